"""The formats of log lines.

    default    I1121 10:49:02.123456 4711 inferd.engine] "successfully loaded 'digits' version 1"
    ISO8601    2026-11-21T10:49:02Z I 4711 inferd.engine] "..."
    json       {"time": "2026-11-21T10:49:02.123456Z", "level": "info", "pid": 4711, "logger": "inferd.engine",
                "message": "..."}, on one line; further values follow, each with its own key

The first two are Triton's, and write the message as a JSON string. No text of a client can end a line, begin
another, or control a terminal: unprintable characters are escaped.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from inferd.server.observe.escaping import escaped

FORMATS: Final = ("default", "ISO8601", "json")

LETTERS: Final = MappingProxyType(
    {logging.DEBUG: "V", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}
)
NAMES: Final = MappingProxyType(
    {
        logging.DEBUG: "verbose",
        logging.INFO: "info",
        logging.WARNING: "warning",
        logging.ERROR: "error",
        logging.CRITICAL: "error",
    }
)
_COLOURS: Final = MappingProxyType({"V": "\x1b[2m", "I": "\x1b[32m", "W": "\x1b[33m", "E": "\x1b[31m"})
_PLAIN: Final = "\x1b[0m"
_DIM: Final = "\x1b[2m"


def as_object(fields: Mapping[str, Any]) -> str:
    """Fields as an object of JSON in ASCII, without unprintable characters."""
    return json.dumps(fields, default=str).replace("\x7f", r"\u007f")


class LineFormatter(logging.Formatter):
    """One record, one line.

    Args:
        form: one of FORMATS.
        coloured: for a terminal; not with json.
    """

    def __init__(self, form: str, *, coloured: bool = False) -> None:
        super().__init__()
        self._write: Callable[[logging.LogRecord], str] = self._json if form == "json" else self._triton
        self._iso = form == "ISO8601"
        self._coloured = coloured
        self._pid = os.getpid()

    def format(self, record: logging.LogRecord) -> str:
        return self._write(record)

    def _message(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        return f"{message}\n{self.formatException(record.exc_info)}" if record.exc_info else message

    def _triton(self, record: logging.LogRecord) -> str:
        letter = LETTERS.get(record.levelno, "I")
        moment = time.gmtime(record.created)
        if self._iso:
            head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {letter}"
        else:
            micros = int(record.created % 1 * 1e6)
            head = f"{letter}{time.strftime('%m%d %H:%M:%S', moment)}.{micros:06d}"
        message = escaped(self._message(record))
        if self._coloured:
            return f"{_COLOURS[letter]}{head}{_PLAIN} {_DIM}{self._pid} {record.name}]{_PLAIN} {message}"
        return f"{head} {self._pid} {record.name}] {message}"

    def _json(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.created % 1 * 1e6):06d}Z",
            "level": NAMES.get(record.levelno, "info"),
            "pid": self._pid,
            "logger": record.name,
            "message": self._message(record),
        }
        fields: Mapping[str, Any] | None = getattr(record, "fields", None)
        return as_object({**line, **fields} if fields else line)
