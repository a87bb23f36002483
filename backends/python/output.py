"""Writes the output of workers to the server's log, line by line."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("inferd.python")

LONGEST_LINE = 8 << 10  # bytes; a longer line becomes several
LINES_PER_SECOND = 200  # of one worker; further lines are counted and left out


class Lines:
    """Makes log lines of pieces of text.

    Args:
        prefix: of each line: the name of the worker's instance.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._rests = {1: b"", 2: b""}
        self._second = 0
        self._count = 0
        self._dropped = 0

    def add(self, stream: int, data: bytes) -> None:
        """Take a piece of standard output (1) or standard error (2)."""
        data = self._rests[stream] + data
        if self._full():
            text, _, rest = data.rpartition(b"\n")
            self._dropped += text.count(b"\n") + (len(rest) != len(data))
            self._rests[stream] = rest[-LONGEST_LINE:]
            return
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._log_parts(line)
        whole = max(len(rest) - 1, 0) // LONGEST_LINE * LONGEST_LINE
        if whole:
            self._log_parts(rest[:whole])
        self._rests[stream] = rest[whole:]

    def end(self) -> None:
        """Log the unfinished line: the worker has ended."""
        for stream, rest in self._rests.items():
            if rest:
                self._log(rest)
            self._rests[stream] = b""
        self._tell_dropped()

    def _full(self) -> bool:
        """Whether this second's limit is reached."""
        now = int(time.monotonic())
        if now != self._second:
            self._tell_dropped()
            self._second = now
            self._count = 0
        return self._count >= LINES_PER_SECOND

    def _log_parts(self, line: bytes) -> None:
        for at in range(0, max(len(line), 1), LONGEST_LINE):
            self._log(line[at : at + LONGEST_LINE])

    def _log(self, line: bytes) -> None:
        if self._full():
            self._dropped += 1
        else:
            self._count += 1
            log.info("%s: %s", self._prefix, line.decode("utf-8", "backslashreplace").rstrip("\r"))

    def _tell_dropped(self) -> None:
        if self._dropped:
            log.warning("%s: left out %d lines of its output", self._prefix, self._dropped)
            self._dropped = 0
