"""A model configuration as JSON text, in the form in which Triton passes it to Python models.

It is protobuf's JSON with the field names of model_config.proto and with defaults, except that 64-bit integers are
numbers: models compare and index with them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from inferd_client.pb import model_config_pb2 as pb

_WIDE = frozenset(
    {
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_SFIXED64,
    }
)


def config_to_json(config: pb.ModelConfig) -> str:
    """The configuration as an object in JSON text."""
    found = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(_with_numbers(found, config.DESCRIPTOR))


_LENIENT = re.compile(
    r"""(?P<text> "(?:[^"\\]|\\.)*" )
      | '(?P<quoted> (?:[^'\\]|\\.)* )'
      | (?P<open> ["'] .* )
      | (?<![A-Za-z0-9_]) (?P<key> [A-Za-z_][A-Za-z0-9_]*+ ) (?= \s* : )
      | (?P<comma> , ) (?= \s* [}\]] )""",
    re.VERBOSE | re.DOTALL,
)
"""Reads each character a few times at most, also of a text that has no JSON in it."""


def config_from_json(text: str) -> pb.ModelConfig:
    """A configuration from JSON as protobuf's C++ parser accepts it, since Triton's clients write it for that parser.

    Beside JSON, that is: keys without quotes, single quotes, a comma behind the last item, and an object in place of a
    list of one.

    Raises:
        ValueError: it is not a model configuration.
    """
    try:
        return json_format.Parse(text, pb.ModelConfig())
    except json_format.ParseError as error:
        try:
            found = _with_lists(json.loads(_LENIENT.sub(_strict, text)), pb.ModelConfig.DESCRIPTOR)
            return json_format.ParseDict(found, pb.ModelConfig())
        except (ValueError, RecursionError, json_format.ParseError):
            raise ValueError(str(error)) from error


def _strict(found: re.Match[str]) -> str:
    if found["quoted"] is not None:
        return '"' + re.sub(r"""\\(')|(")""", lambda each: each[1] or r"\"", found["quoted"]) + '"'
    return f'"{found["key"]}"' if found["key"] else found["text"] or found["open"] or ""


def _with_lists(message: Any, descriptor: Any) -> Any:
    """The fields of a message with objects where lists may be in lists of their own."""
    if not isinstance(message, dict):
        return message
    fields = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    return {name: _in_list(value, fields.get(name)) for name, value in message.items()}


def _in_list(value: Any, field: FieldDescriptor | None) -> Any:
    kind = None if field is None else field.message_type
    if field is None or kind is None:
        return value
    if kind.GetOptions().map_entry:
        inner = kind.fields_by_name["value"]
        return {key: _in_list(item, inner) for key, item in value.items()} if isinstance(value, dict) else value
    if field.is_repeated:
        return [_with_lists(item, kind) for item in (value if isinstance(value, list) else [value])]
    return _with_lists(value, kind)


def _with_numbers(message: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    for field in descriptor.fields:
        if field.name in message:
            message[field.name] = _value(message[field.name], field)
    return message


def _value(value: Any, field: FieldDescriptor) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {key: _value(item, kind.fields_by_name["value"]) for key, item in value.items()}
    if isinstance(value, list):
        return [_one(item, field) for item in value]
    return _one(value, field)


def _one(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return _with_numbers(value, field.message_type)
    return int(value) if field.type in _WIDE else value
