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

from server.settings import Settings

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


def configure(settings: Settings) -> None:
    """Set up logging for the process as the settings say."""
    enabled = {
        logging.DEBUG: settings.log_verbose > 0,
        logging.INFO: settings.log_info,
        logging.WARNING: settings.log_warning,
        logging.ERROR: settings.log_error,
        logging.CRITICAL: settings.log_error,
    }
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(settings.log_format))
    handler.addFilter(lambda record: enabled.get(record.levelno, True))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if settings.log_verbose > 0 else logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
