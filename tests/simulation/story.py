"""What happens in a simulation, as lines for people, and what is left of it when its process crashes."""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque

from tests.simulation.world import START_NS

SIZE = 32 << 20  # bytes of lines that outlive a process
HEAD = struct.Struct("<qqqq")  # where the next line begins, bytes ever written, calls, bytes of the names of models
NAMES = 8192  # bytes for these
TRACE = 1 << 16  # bytes of a trace of calls, at most


class Remains:
    """Memory that a process shares with the one that has started it: the story so far, and what tells its size.

    `trace` is a file for the trace of a crash.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE)
        self.trace = os.memfd_create("trace")
        self.begin()

    def begin(self) -> None:
        """For another process."""
        self._memory[: HEAD.size] = HEAD.pack(0, 0, 0, 0)
        os.ftruncate(self.trace, 0)
        os.lseek(self.trace, 0, os.SEEK_SET)

    # -- in the process

    def note(self, models: tuple[str, ...], calls: int) -> None:
        """Note the models of the simulation, and how many calls it has had."""
        at, written, _, size = HEAD.unpack_from(self._memory)
        if not size:
            names = ",".join(models).encode()[:NAMES]
            size = len(names)
            self._memory[HEAD.size : HEAD.size + size] = names
        self._memory[: HEAD.size] = HEAD.pack(at, written, calls, size)

    def write(self, line: str) -> None:
        """One more line; the oldest ones make room."""
        data = line.encode() + b"\n"
        room = SIZE - HEAD.size - NAMES
        at, written, calls, size = HEAD.unpack_from(self._memory)
        if at + len(data) > room:
            at = 0
        begin = HEAD.size + NAMES + at
        self._memory[begin : begin + len(data)] = data
        self._memory[: HEAD.size] = HEAD.pack(at + len(data), written + len(data), calls, size)

    # -- in the one that has started it

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return int(HEAD.unpack_from(self._memory)[2])

    @property
    def models(self) -> tuple[str, ...]:
        """The models that there were."""
        size = HEAD.unpack_from(self._memory)[3]
        names = self._memory[HEAD.size : HEAD.size + size].decode()
        return tuple(names.split(",")) if names else ()

    def text(self) -> str:
        """The lines, and where each thread was when the process crashed."""
        at, written, _, _ = HEAD.unpack_from(self._memory)
        begin = HEAD.size + NAMES
        lines = self._memory[begin : begin + at]
        if written > at:  # the lines went round: what is behind the last one is older
            _, _, older = self._memory[begin + at :].rstrip(b"\0").partition(b"\n")
            lines = older + lines
        return lines.decode(errors="replace") + os.pread(self.trace, TRACE, 0).decode(errors="replace")


class Story:
    """Keeps the last lines, or all of them.

    Args:
        keep: so many; 0 for all, negative for none.

    Attributes:
        remains: where lines go, too, for a process that may crash; of all stories of a process.
    """

    remains: Remains | None = None

    def __init__(self, keep: int) -> None:
        self.lines: deque[tuple[int, str, str]] = deque(maxlen=keep or None if keep >= 0 else 0)
        self.on = keep >= 0
        self.now = 0

    def tell(self, who: str, what: str) -> None:
        """One line, of now."""
        if not self.on:
            return
        self.lines.append((self.now, who, what))
        if self.remains is not None:
            self.remains.write(line(self.now, who, what))

    def note(self, models: tuple[str, ...], calls: int) -> None:
        """Note the models of the simulation, and how many calls there were."""
        if self.remains is not None:
            self.remains.note(models, calls)

    def text(self) -> str:
        """All lines that are kept, with the microseconds since the beginning in front."""
        return "\n".join(line(*each) for each in self.lines)


def line(at: int, who: str, what: str) -> str:
    """A line for people: when it happened, to whom, and what."""
    return f"{(at - START_NS) / 1000:14.3f}  {who:<14} {what}"
