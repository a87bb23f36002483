"""What workers print, line by line in the server's log."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("inferd.python")

LONGEST_LINE = 8 << 10  # bytes; more is broken
LINES_PER_SECOND = 200  # of one worker; more is counted and left out


class Lines:
    """Makes log lines of pieces of text.

    Args:
        prefix: of each line: who speaks.
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
        while len(rest) > LONGEST_LINE:
            lines.append(rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
        self._rests[stream] = rest
        for line in lines:
            self._log(line)

    def end(self) -> None:
        """The worker has ended: what it left without a line feed."""
        for stream, rest in self._rests.items():
            if rest:
                self._log(rest)
            self._rests[stream] = b""
        self._tell_dropped()

    def _full(self) -> bool:
        """Whether there were as many lines in this second as are logged."""
        now = int(time.monotonic())
        if now != self._second:
            self._tell_dropped()
            self._second = now
            self._count = 0
        return self._count >= LINES_PER_SECOND

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
