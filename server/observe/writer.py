"""Where log lines go: to a queue, from there on a thread of its own to a file or to standard error.

Whoever logs never waits for a disk or for a reader of a pipe. The queue is bounded: what does not fit is left out and
counted, and the first line after it says how many.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Final, TextIO

MOST: Final = 10_000
"""Records that may wait to be written."""

LAST_SECONDS: Final = 2.0
"""For what waits to be written when the process ends."""


class LogWriter(logging.Handler):
    """Writes records in order.

    Args:
        file: a path; None stands for standard error.
        most: records that may wait.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, file: Path | None = None, most: int = MOST) -> None:
        super().__init__()
        self._file = file
        self._most = most
        self._stream: TextIO = sys.stderr if file is None else self._open(file)
        self._queue: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = queue.SimpleQueue()
        self._reopen = threading.Event()
        self._untold = 0
        self.lost = 0  # records that were left out, ever
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    @property
    def is_terminal(self) -> bool:
        return self._file is None and sys.stderr.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() >= self._most:
            self.lost += 1
            self._untold += 1
            return
        record.msg, record.args = record.getMessage(), None  # what the arguments are now, not later
        self._queue.put(record)

    def reopen(self) -> None:
        """Go on in a file of the same name: the one that is open has been moved away."""
        self._reopen.set()

    def flush(self) -> None:
        """Return when what has been logged is written, or after `LAST_SECONDS`."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            written = threading.Event()
            self._queue.put(written)
            written.wait(LAST_SECONDS)

    def close(self) -> None:
        """Write what waits, and end; takes `LAST_SECONDS` at most."""
        self._queue.put(None)
        self._thread.join(LAST_SECONDS)
        super().close()

    # -- the thread --

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            if self._reopen.is_set():
                self._reopen.clear()
                self._begin_again()
            if self._untold:
                missing, self._untold = self._untold, 0
                self._write(_line(f"{missing} log lines were left out: the writer did not keep up"))
            self._write(item)

    def _write(self, record: logging.LogRecord) -> None:
        try:
            self._stream.write(self.format(record) + "\n")
            if self._queue.empty():
                self._stream.flush()
        except Exception:  # a full disk, a closed pipe: the server goes on
            self.lost += 1

    def _begin_again(self) -> None:
        if self._file is None:
            return
        try:
            fresh = self._open(self._file)
        except OSError as error:
            self._write(_line(f"the log file cannot be opened again, the one that is open is used: {error}"))
            return
        self._stream.close()
        self._stream = fresh

    @staticmethod
    def _open(file: Path) -> TextIO:
        return file.open("a", encoding="utf-8", errors="backslashreplace")


def _line(message: str) -> logging.LogRecord:
    record = logging.LogRecord("inferd.logs", logging.WARNING, "", 0, message, None, None)
    record.created = time.time()
    return record
