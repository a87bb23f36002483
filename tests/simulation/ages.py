"""The end of connections: the server announces it, refuses further calls, and at last fails the open ones; because they
are old, or because it ends itself. It ends those of peers at once that are silent, or send PINGs in a row."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from inferd.server.front.connection_monitor import TOO_OLD
from inferd.server.front.door import STOPPING
from tests.simulation.audit import exposed
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.clients import Call, Client
    from tests.simulation.crowd import Refused
    from tests.simulation.questions import Question
    from tests.simulation.simulation import Simulation
    from tests.simulation.sockets import End
    from tests.simulation.talks import Talk

AGES = (0.001, 0.01, 0.1)  # seconds
GRACES = (0.005, 0.05, 1.05, 3.0)
SILENCES = ((0.005, 0.0003), (0.02, 0.001), (0.1, 0.005))  # seconds until a peer is asked, by the pace, and to answer
MOST_DROPS = 200
DROPS_NS = 1_000_000  # between two, at most
GOES_NS = 50_000_000  # in which a socket that the door closes is closed
EXPOSED = ("in a call", "next", "next", "to write", "")  # see `exposed`
MOST_LOOKS = 40  # for a connection that is exposed so
LOOKS_NS = 100_000  # between two of them, at most
STRIKES = 2
FREE = 2  # PINGs beside those that count: the first one, and the one that is too many
ENDS = (TOO_OLD, STOPPING)  # the texts with which the server ends open calls


class Drops:
    """The door closes sockets at once now and then, as it does with those of peers for whom it has no time left.

    Args:
        simulation: whose door it is.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(f"{simulation.outcome.seed} drops")
        self.on = simulation.has("drops", 0.2, when=simulation.scale.operator and not simulation.scale.crowd)
        self._left = MOST_DROPS

    def begin(self) -> None:
        """From now on."""
        if self.on:
            where = self._random.choice(EXPOSED)
            self._simulation.later(self._random.randint(0, DROPS_NS), partial(self._drop, where, MOST_LOOKS))

    def _look_soon(self, end: End) -> None:
        self._simulation.later(GOES_NS, partial(self._look, end, self._simulation.world.now()))

    def _look(self, end: End, since_ns: int) -> None:
        if end.peer is None or end.closed:
            return
        if self._simulation.jumped_ns < since_ns:
            raise Violation(f"{end.address}: the door has closed its socket, and it is open")
        self._look_soon(end)  # the machine has stood still instead

    def _drop(self, where: str = "", looks: int = 0) -> None:
        """Drop a connection that a thread is busy with in this way, if there is one within so many looks."""
        simulation = self._simulation
        drivers = sorted(simulation.door._drivers, key=lambda driver: driver._connection.peer)
        found = [driver for driver in drivers if exposed(driver._connection) == where]
        if looks and not found:
            simulation.later(self._random.randint(0, LOOKS_NS), partial(self._drop, where, looks - 1))
            return
        if drivers and not simulation.operator.is_stopping:
            chosen = self._random.choice(found or drivers)
            if (end := simulation.sockets.end_at(chosen._connection.peer)) is not None:
                end.dropped = True
                self._look_soon(end)
            simulation.bounds.left(soon=True)
            chosen.abort()
        self._left -= 1
        if self._left:
            self.begin()


def judge_refused(client: Client, what: object, *, executed: bool) -> None:
    """A call came behind those that the server has taken: somebody else may be asked for it.

    Raises:
        Violation: not so.
    """
    if client.end.knew:
        raise Violation(f"{what}: it is refused, and its client had opened none after the announcement")
    if executed:
        raise Violation(f"{what}: it is refused for the end of its connection, and was executed")


def may_drop(client: Client) -> bool:
    """Whether the server may end a connection at once: its peer was silent, or has sent PINGs in a row, or the door has
    no time for it."""
    simulation = client.simulation
    if client.end.dropped:
        return True
    if simulation.silence_ns and (client.end.silent_ns >= simulation.silence_ns or simulation.preempts):
        return True  # a thread that is interrupted may have read later than it says
    return simulation.strikes and client.wire.farewell == "too_many_pings" and client.wire.pings >= STRIKES + FREE


def is_too_late(call: Call | Refused | Talk | Question, text: str) -> bool:
    """Whether the connection of a call has been ending for so long that its calls are ended with this text, or it is a
    stream, or of a sequence, and these end before."""
    if text in call.client.end.over:
        return True
    is_stream = not hasattr(call, "kind") or getattr(call, "talk", None) is not None
    return text == STOPPING and is_stream and call.client.simulation.operator.is_stopping
