"""Workers of decoupled models: each row of a request has a response of its own, soon after the last one or with pauses,
as far as the server gives credit."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from inferd.backends.python.worker import protocol as p
from tests.simulation.replies import Reply
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.process import Asked, Process

US = 1000
WINDOW = 64  # responses that may be sent before the server takes one
PAUSES_US = (0, 0, 30, 90, 500)  # the longest pause between two groups of responses
MOST_TOGETHER = 8  # responses of a group
LARGE = p.PACKET // 2  # bytes of a row that lies in the arena


class Sender:
    """The responses to one request.

    Args:
        process: the worker.
        asked: the request.
    """

    def __init__(self, process: Process, asked: Asked) -> None:
        self._process = process
        self._asked = asked
        self._random = process.random
        self._pause_ns = self._random.choice(PAUSES_US) * US
        self._rows = deque(range(len(asked.x)))
        self._credit = WINDOW
        self._sent = self._given = 0  # responses, and how many of them the server has taken
        self._waits = False  # for credit
        self._go_on_later()

    def __str__(self) -> str:
        return f"{self._process.name}: the responses to {self._asked.number}"

    def _go_on_later(self) -> None:
        self._process.later(self._random.randint(0, self._pause_ns), self._go_on)

    def _go_on(self) -> None:
        """Send a group of responses; stop before the one that needs credit or memory, and ask for that."""
        if self._process.is_cancelled(self._asked) and self._random.random() < 0.3:
            self._say(flags=p.FINAL | p.EMPTY)
            self._end()
            return
        for _ in range(self._random.randint(1, MOST_TOGETHER)):
            if self._credit == 0:
                self._waits = True
                self._process.say(self._process.its_side, p.CREDIT, number=self._asked.wire)
                return
            size = self._asked.x[0].nbytes
            if size > LARGE or self._random.random() < 0.02:
                self._process.ask_memory(len(self._reply(self._rows[0]).record(0, -1)) + size, self._say_in_arena)
                return
            if not self._say_row(self._rows.popleft()):
                return
        self._go_on_later()

    def _reply(self, row: int) -> Reply:
        """The reply for one row."""
        y = self._asked.x[row : row + 1].copy()
        y[:, 1:] *= 2
        return Reply(y)

    def _say_row(self, row: int) -> bool:
        """Send a row as a response; whether there are more."""
        return self._send(self._reply(row).record(0, -1), 0, -1)

    def _say_in_arena(self, at: int) -> None:
        """Send the next row with its tensor, or with its whole record, in the granted memory; -1: none was granted."""
        row = self._rows.popleft()
        if at < 0:
            self._rows.clear()
            error = Reply(None, error=(p.CODE_UNAVAILABLE, "no memory for outputs"))
            self._say(error.record(0, -1), flags=p.FINAL)
            self._end()
            return
        reply = self._reply(row)
        assert reply.y is not None
        if reply.y.nbytes > LARGE or self._random.random() < 0.5:
            self._process.memory[at : at + reply.y.nbytes] = reply.y.tobytes()
            more = self._send(reply.record(0, at), 0, -1)
        else:
            record = reply.record(0, -1)
            self._process.memory[at : at + len(record)] = record
            more = self._send(record, p.IN_ARENA, at)
        if more:
            self._go_on_later()

    def _send(self, record: bytes, flags: int, at: int) -> bool:
        """Send a response; whether there are more."""
        self._credit -= 1
        self._sent += 1
        ends = not self._rows
        carries_final = ends and self._random.random() < 0.5  # else the flag comes alone
        self._say(record, flags=flags | (p.FINAL if carries_final else 0), offset=max(0, at))
        if ends and not carries_final:
            self._say(flags=p.FINAL | p.EMPTY)
        if ends:
            self._end()
        return not ends

    def _say(self, record: bytes = b"", *, flags: int, offset: int = 0) -> None:
        process = self._process
        process.say(process.its_side, p.RESPONSE, record, flags=flags, number=self._asked.wire, offset=offset)

    def _end(self) -> None:
        del self._process.senders[self._asked.wire]

    def take_credit(self, credit: int) -> None:
        """The server lets the worker send so many more responses."""
        if not self._waits:
            raise Violation(f"{self}: credit, and it waits for none")
        self._given += credit
        if not 0 < credit <= self._given <= self._sent and not self._process.is_cancelled(self._asked):
            raise Violation(f"{self}: credit for {self._given}, and {self._sent} were sent")
        self._waits = False
        self._credit += credit
        self._go_on()
