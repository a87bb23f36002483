"""Writes log lines: from a queue, on a thread of its own, to a file or to standard error.

A logging thread never waits for a disk or for the reader of a pipe. The queue is bounded: the writer drops and counts
lines that do not fit or cannot be written, and the next line has their number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Final

from inferd.server.observe.files import opened, write_all

MOST: Final = 10_000
"""How many records may wait to be written."""

TOGETHER: Final = 256
"""How many lines are written at once at most."""

LAST_SECONDS: Final = 2.0
"""Seconds for writing waiting records when the process ends."""


class LogWriter(logging.Handler):
    """Writes records in order.

    Args:
        file: a path; None: standard error.
        most: how many records may wait.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, file: Path | None = None, most: int = MOST) -> None:
        super().__init__()
        self._file = file
        self._most = most
        self._descriptor = -1 if file is None else self._open(file)
        self._queue: queue.SimpleQueue[logging.LogRecord | threading.Event | _Reopen | None] = queue.SimpleQueue()
        self._lines: list[str] = []  # written together
        self._torn = False  # the last line in the file is incomplete
        self._untold = 0  # records left out since the last line about them
        self.lost = 0  # records left out since the start
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
        try:
            text = record.getMessage()
        except Exception as error:  # the arguments do not fit the text: log the record anyway
            text = f"{record.msg} {record.args!r} ({type(error).__name__}: {error})"
        record.msg, record.args = text, None  # formatted now: the arguments may change later
        self._queue.put(record)

    def reopen(self) -> None:
        """Open the file again by its name: the one that is open was moved away."""
        self._queue.put(_Reopen())

    def flush(self) -> None:
        """Return when all records so far are written, or after `LAST_SECONDS`."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            written = threading.Event()
            self._queue.put(written)
            written.wait(LAST_SECONDS)

    def close(self) -> None:
        """Write waiting records and end; takes at most `LAST_SECONDS`."""
        self._queue.put(None)
        self._thread.join(LAST_SECONDS)
        super().close()

    # -- the thread --

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                self._write()
                item.set()
            elif isinstance(item, _Reopen):
                self._write()
                self._begin_again()
            else:
                if self._untold:
                    missing, self._untold = self._untold, 0
                    self._add(_line(f"{missing} log lines were left out: the writer did not keep up"))
                self._add(item)
            if len(self._lines) >= TOGETHER or self._queue.empty():
                self._write()
        self._write()

    def _add(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + "\n")
        except Exception:  # a broken record must not stop the others
            self.lost += 1

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        text = "".join(lines)
        try:
            if self._file is None:
                sys.stderr.write(text)
                sys.stderr.flush()
            elif text:
                self._append(text.encode("utf-8", "backslashreplace"))
        except (OSError, ValueError, MemoryError):  # such as a full disk or a closed pipe: the server continues
            self.lost += len(lines)
            self._untold += len(lines)

    def _append(self, data: bytes) -> None:
        """Write all data; after an incomplete line, begin on a new one."""
        if self._torn:
            write_all(self._descriptor, b"\n")
        self._torn = True
        write_all(self._descriptor, data)
        self._torn = False

    def _begin_again(self) -> None:
        if self._file is None:
            return
        try:
            fresh = self._open(self._file)
        except OSError as error:
            self._add(_line(f"the log file cannot be opened again, the one that is open is used: {error}"))
            return
        with contextlib.suppress(OSError):  # errors of earlier writes
            os.close(self._descriptor)
        self._descriptor, self._torn = fresh, False

    @staticmethod
    def _open(file: Path) -> int:
        return opened(file, os.O_APPEND, pipes=True)


class _Reopen:
    """An entry of the queue: open the file again."""


def _line(message: str) -> logging.LogRecord:
    record = logging.LogRecord("inferd.logs", logging.WARNING, "", 0, message, None, None)
    record.created = time.time()
    return record
