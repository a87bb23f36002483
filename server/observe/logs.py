"""The settings of logging, which can be changed while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from inferd._native.execution import batchlog
from inferd.server.observe.lines import LineFormatter
from inferd.server.observe.writer import LogWriter
from inferd.server.settings import Settings

Setting = bool | int | str

BATCHES = 1
"""From this verbose level on, each batch has a line."""

SWITCHES = {
    logging.DEBUG: "log_verbose_level",
    logging.INFO: "log_info",
    logging.WARNING: "log_warning",
    logging.ERROR: "log_error",
    logging.CRITICAL: "log_error",
}


class Logs:
    """The log settings of the process, which can change at any time.

    Raises:
        OSError: the log file cannot be opened.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings: dict[str, Setting] = {
            "log_file": settings.log_file,
            "log_info": settings.log_info,
            "log_warning": settings.log_warning,
            "log_error": settings.log_error,
            "log_verbose_level": settings.log_verbose,
            "log_format": settings.log_format,
        }
        self._writer = LogWriter(Path(settings.log_file) if settings.log_file else None)
        self._writer.addFilter(self._is_wanted)
        root = logging.getLogger()
        root.handlers[:] = [self._writer]
        logging.getLogger("asyncio").setLevel(logging.WARNING)
        self._apply()

    def settings(self) -> Mapping[str, Setting]:
        """All settings under LogSettings' names."""
        return dict(self._settings)

    def update(self, changes: Mapping[str, Setting]) -> None:
        """Change settings; names and values must be valid."""
        self._settings |= changes
        self._apply()

    def reopen(self) -> None:
        """Open the log file again by its name: the one that is open was moved."""
        self._writer.reopen()

    @property
    def lost(self) -> int:
        """The number of dropped lines since the start."""
        return self._writer.lost

    def _apply(self) -> None:
        verbose = int(self._settings["log_verbose_level"])
        form = str(self._settings["log_format"])
        self._writer.setFormatter(LineFormatter(form, coloured=self._writer.is_terminal))
        logging.getLogger().setLevel(logging.DEBUG if verbose > 0 else logging.INFO)
        batchlog.switch(verbose >= BATCHES)

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        name = SWITCHES.get(record.levelno)
        return name is None or bool(self._settings[name])


def configure(settings: Settings) -> Logs:
    """Set up logging for the process as the settings say.

    Raises:
        OSError: the log file cannot be opened.
    """
    return Logs(settings)
