"""Peers that send what nobody should: the sequences of frames of the conformance tests, cut anywhere."""

from __future__ import annotations

import functools
from random import Random
from typing import TYPE_CHECKING

from tests.conformance import h2cases
from tests.simulation.sockets import OPEN
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

US = 1000
LAST = 5000 * US  # that it stays when the server has read all
LARGE = 4000  # bytes that are sent at once, at most, of long sequences


@functools.cache
def cases() -> list[h2cases.Case]:
    """All that there are."""
    return h2cases.cases()


class Hostile:
    """One connection, on which one sequence is sent.

    Args:
        simulation: whose it is.
        number: for the story.
    """

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.simulation = simulation
        self.random = Random(f"{simulation.outcome.seed} hostile {number}")
        self.case = self.random.choice(cases())
        self.name = f"hostile {number}"
        self.data = self.case.greeting + self.case.sent + h2cases.frame(h2cases.PING, 0, 0, h2cases.MARK)
        self.got = bytearray()
        self.at_once = self.random.random() < 0.5
        self.end = simulation.sockets.connect(self, number, self.random, roomy=True)
        simulation.tell(self.name, f"connects: {self.case.name}")
        self._later()

    def _later(self) -> None:
        self.simulation.later(self.random.randint(0, 50 * US), self._send)

    def _send(self) -> None:
        if self.end.peer is None:
            return
        size = len(self.data) if self.at_once else self.random.randint(1, LARGE if len(self.data) > LARGE else 40)
        size = self.end.send(self.data[:size])
        self.data = self.data[size:]
        if self.data and size:
            self._later()  # else there is no room
        elif not self.data:
            # the answer may be written in several rounds
            self.end.when_done(self.end.sent, lambda: self.simulation.later(LAST, self._leave), anyway=True)

    def heard(self) -> None:
        """Look only whether the connection ended: responses, read before the client leaves, would change its frames."""
        if self.end.seen != OPEN:
            self._leave()
        elif self.data:
            self._later()

    def _leave(self) -> None:
        """All is sent, or the server has had enough."""
        if self.end.peer is None:
            return
        self.got += self.end.take(1 << 30)
        seen = h2cases.Seen(h2cases.frames(bytes(self.got)), self.end.seen != OPEN)
        self.end.part(reset=False)
        self.simulation.tell(self.name, f"leaves: {seen}")
        if self.simulation.is_faulty or self.simulation.held_limit or self.end.dropped:
            return
        if self.simulation.operator.is_stopping and seen.goaway == h2cases.NO_ERROR:
            return
        # the server ignores bytes behind the answer to its call: their stream is closed
        if self.end.reads > 1 and seen.answered and any(frame.stream_id for frame in seen.frames):
            return
        try:
            seen.judge(self.case)
        except AssertionError as error:
            raise Violation(f"{self.name}: {error}") from None
