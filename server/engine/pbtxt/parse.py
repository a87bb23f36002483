"""Parses config.pbtxt into a ModelConfig message; errors have file, line, column and a suggestion."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from google.protobuf import text_format

from inferd.server.engine.pbtxt import reader
from inferd.server.engine.pbtxt.files import read_text
from inferd.server.engine.pbtxt.source import Source
from inferd.server.engine.pbtxt.variables import Variables
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb
from inferd_client.pb import pool

MAX_FILE_SIZE = 1 << 20
NO_VARIABLES = Variables(())

POSITION = re.compile(r"^\d+:\d+ : ")
UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" .*no field named "([^"]+)"')
UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named ([^\s.]+)')


def parse_file(path: Path, model_dir: Path, variables: Variables = NO_VARIABLES) -> tuple[pb.ModelConfig, Source]:
    """Read one file, with these variables.

    Raises:
        ConfigError: the file cannot be read or is no configuration.
    """
    text = variables.fill(read_text(path.parent, path.name, model_dir, MAX_FILE_SIZE), path)
    config = pb.ModelConfig()
    source = Source(path, text)
    if reader.merge(text, config):
        return config, source
    config.Clear()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        raise ConfigError(_explained(path, text, error)) from None
    if source.duplicates:
        raise ConfigError(
            "\n".join(
                f"{path}:{found.line}: {found.field} '{found.key}' is given twice, first in line {found.first_line}: "
                "remove one of them"
                for found in source.duplicates
            )
        )
    return config, source


def _explained(path: Path, content: str, error: text_format.ParseError) -> str:
    """The parser's error as `file:line:column: text`, with the nearest known name."""
    if content.lstrip().startswith("{"):
        return f"{path}: this is JSON; expected protobuf's text format, such as max_batch_size: 4"
    text = POSITION.sub("", str(error)).strip()
    if found := UNKNOWN_FIELD.search(text):
        text = _unknown_field(*found.groups())
    elif found := UNKNOWN_VALUE.search(text):
        text = _unknown_value(*found.groups())
    position = [str(part) for part in (error.GetLine(), error.GetColumn()) if part]
    return f"{':'.join([str(path), *position])}: {text}"


def _unknown_field(message: str, name: str) -> str:
    fields = list(pool.FindMessageTypeByName(message).fields_by_name)
    return f"{message.removeprefix('inference.')} has no field named '{name}'{_nearest(name, fields)}"


def _unknown_value(enum: str, name: str) -> str:
    values = list(pool.FindEnumTypeByName(enum).values_by_name)
    return f"{enum.removeprefix('inference.')} has no value named '{name}'{_nearest(name.upper(), values)}"


def _nearest(name: str, known: list[str]) -> str:
    # "FP32" for TYPE_FP32 and "cpu" for KIND_CPU are closer than edit distance says.
    found = [other for other in known if other.endswith(f"_{name}")] or difflib.get_close_matches(name, known, n=1)
    return f": did you mean '{found[0]}'?" if found else f": it is one of {', '.join(known)}"
