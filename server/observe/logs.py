"""Log lines in Triton's two forms, on standard error.

    default    I1121 10:49:02.123456 4711 inferd.engine] "successfully loaded 'digits' version 1"
    ISO8601    2026-11-21T10:49:02Z I 4711 inferd.engine] "..."

The message is written as a JSON string, so that nothing a client chose can forge a line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping

from _native.execution import batchlog
from server.settings import Settings

Setting = bool | int | str

BATCHES = 2
"""The verbose level from which on there is a line for each batch."""

SWITCHES = {
    logging.DEBUG: "log_verbose_level",
    logging.INFO: "log_info",
    logging.WARNING: "log_warning",
    logging.ERROR: "log_error",
    logging.CRITICAL: "log_error",
}

LETTERS = {logging.DEBUG: "V", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}


class LineFormatter(logging.Formatter):
    """One record, one line."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._iso = form == "ISO8601"
        self._pid = os.getpid()

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        letter = LETTERS.get(record.levelno, "I")
        moment = time.gmtime(record.created)
        if self._iso:
            head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {letter}"
        else:
            micros = int(record.created % 1 * 1e6)
            head = f"{letter}{time.strftime('%m%d %H:%M:%S', moment)}.{micros:06d}"
        return f"{head} {self._pid} {record.name}] {json.dumps(message, ensure_ascii=False)}"


class Logs:
    """What the process logs; can be changed at any time.

    Level 1 of verbose messages is everything at DEBUG but the line for each batch, which level 2 adds.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings: dict[str, Setting] = {
            "log_file": "",
            "log_info": settings.log_info,
            "log_warning": settings.log_warning,
            "log_error": settings.log_error,
            "log_verbose_level": settings.log_verbose,
            "log_format": settings.log_format,
        }
        self._handler = logging.StreamHandler(sys.stderr)
        self._handler.addFilter(self._is_wanted)
        root = logging.getLogger()
        root.handlers[:] = [self._handler]
        logging.getLogger("asyncio").setLevel(logging.WARNING)
        self._apply()

    def settings(self) -> Mapping[str, Setting]:
        """All settings by the names that LogSettings has for them."""
        return dict(self._settings)

    def update(self, changes: Mapping[str, Setting]) -> None:
        """Change some of them from now on; names and values are valid."""
        self._settings |= changes
        self._apply()

    def _apply(self) -> None:
        verbose = int(self._settings["log_verbose_level"])
        self._handler.setFormatter(LineFormatter(str(self._settings["log_format"])))
        logging.getLogger().setLevel(logging.DEBUG if verbose > 0 else logging.INFO)
        batchlog.switch(verbose >= BATCHES)

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        name = SWITCHES.get(record.levelno)
        return name is None or bool(self._settings[name])


def configure(settings: Settings) -> Logs:
    """Set up logging for the process as the settings say."""
    return Logs(settings)
