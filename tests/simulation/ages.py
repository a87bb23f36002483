"""The age of connections: the server announces their end, refuses further calls, and at last fails the open ones."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

from inferd.server.front.keepalive import Action, Age, ConnectionPolicy
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.clients import Client

TOO_OLD = "the connection is too old"
SECOND = 1_000_000_000
AGES = (0.001, 0.01, 0.1)  # seconds
GRACES = (0.005, 0.05, 1.05, 3.0)
LATE = 10.0  # seconds in which an old connection without calls must have ended


class Ageing:
    """Of one connection of a client.

    Args:
        client: whose present connection it is.

    Attributes:
        knows: the client had read the announcement before further calls were refused.
        over: the time of open calls is over.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connection = client.connection
        self.knows = self.over = False
        self._idle = math.inf  # since when it has no calls
        random = Random(f"{client.simulation.outcome.seed} ages {client.number} {client.life}")
        self._policy = ConnectionPolicy(max_age=random.choice(AGES), age_grace=random.choice(GRACES))
        self._age = Age(self._policy, self._now(), random.random())
        self._wait()

    def _now(self) -> float:
        return self._client.simulation.world.now() / SECOND

    def _wait(self) -> None:
        if self._age.deadline < math.inf:
            ns = math.ceil((self._age.deadline - self._now()) * SECOND) + 1
            self._client.simulation.later(max(0, ns), self._turn)

    def _turn(self) -> None:
        """As the door does, for as long as the client uses the connection."""
        connection = self._connection
        if self._client.connection is not connection or not self._client.active:
            return
        action = self._age.due(self._now())
        self._client.tell(f"has an old connection: {action.name}")
        if action is Action.ANNOUNCE:
            connection.announce_shutdown()
        elif action is Action.LEAVE:
            self.knows = connection.told
            connection.go_away("max_age")
        elif action is Action.FAIL:
            self.over = True
            self._client.simulation.bounds.left(soon=True)
            connection.fail_calls(TOO_OLD)
        self._client.read_later()
        self._wait()

    def refused(self, what: object, *, executed: bool) -> None:
        """A call came behind those that the server has taken: somebody else may be asked for it.

        Raises:
            Violation: not so.
        """
        if self.knows:
            raise Violation(f"{what}: it is refused, and its client had opened none after the announcement")
        if executed:
            raise Violation(f"{what}: it is refused for the connection's age, and was executed")

    def judge(self) -> None:
        """The client has nothing open, and has heard that the connection ends.

        Raises:
            Violation: it has not ended.
        """
        now = self._now()
        self._idle = min(self._idle, now)
        if now > self._idle + LATE:
            raise Violation(f"client {self._client.number}: its old connection does not end")


def is_too_old(call: object) -> bool:
    """Whether the connection of a call is so old that its calls are ended; those of a crowd do not age."""
    ageing = getattr(getattr(call, "client", None), "ageing", None)
    return ageing is not None and ageing.over
