"""Peers that send what nobody should: the sequences of frames of the conformance tests, cut anywhere."""

from __future__ import annotations

import functools
from random import Random
from typing import TYPE_CHECKING

from inferd._native.transport.connection import Connection
from tests.conformance import h2cases
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

US = 1000
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
        self.sent = bytearray()
        use = simulation.uses[number % len(simulation.uses)]
        self.connection = Connection(simulation.endpoint, f"hostile:{number}", use=use)
        simulation.desk.meet(self.connection, use, self.name)
        self.connection.flush = self._ignore  # it reads when it leaves: an answer would change what its frames mean
        simulation.tell(self.name, f"connects: {self.case.name}")
        self._later()

    def _later(self) -> None:
        self.simulation.later(self.random.randint(0, 50 * US), self._send)

    def _send(self) -> None:
        connection, world = self.connection, self.simulation.world
        if connection.finished or not self.data:
            self._leave()
            return
        size = self.random.randint(1, LARGE if len(self.data) > LARGE else 40)
        with memoryview(connection.receive_buffer()) as whole, whole.cast("B") as view:
            size = min(size, len(self.data), len(view))
            view[:size] = self.data[:size]
        self.data = self.data[size:]
        world.may_fail(1)
        connection.received(size)
        world.may_fail(0)
        self._later()

    def _ignore(self) -> None:
        pass

    def _read(self) -> None:
        while pieces := self.connection.take_output():
            self.sent += b"".join(bytes(piece) for piece in pieces)

    def _leave(self) -> None:
        """All is sent, or the server has had enough."""
        self._read()
        seen = h2cases.Seen(h2cases.frames(bytes(self.sent)), self.connection.finished)
        self.connection.flush = None
        self.connection.close()
        self.simulation.tell(self.name, f"leaves: {seen}")
        if self.simulation.is_faulty or self.simulation.held_limit:
            return
        try:
            seen.judge(self.case)
        except AssertionError as error:
            raise Violation(f"{self.name}: {error}") from None
