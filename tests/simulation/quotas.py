"""Limits of what each client may have under way: calls, streams, and bytes."""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING

from inferd.server.front.connection_limits import ClientLimits
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from inferd._native.transport.client import ClientUse
    from tests.simulation.simulation import Simulation

SHARE = 0.12  # of simulations that have them
EXHAUSTED = 8
CERTIFIED = "certificate client.example,"  # how the name of a client begins that has shown one
IN_FLIGHT = re.compile(
    r"client (.+) has (\d+) (calls|streams|bytes) in flight, (?:which is more than )?its limit (?:of|is) (\d+)$"
)
ANNOUNCED = re.compile(r"client (.+) announces a message of (\d+) bytes, which is more than its limit of (\d+)$")


class Quota:
    """That of a simulation's clients, of which those of one host are one."""

    def __init__(self, simulation: Simulation) -> None:
        random = Random(f"{simulation.outcome.seed} quota")
        self.limits = ClientLimits()
        if simulation.has("quota", SHARE, when=simulation.scale.errors and not simulation.scale.crowd):
            self.limits = ClientLimits(
                calls=random.choice((None, 2, 8, 20)),
                streams=random.choice((None, 0, 1, 3)),
                bytes_in_flight=random.choice((None, 1 << 18, 40_000)),
            )

    def explains(self, address: str, status: int, text: str) -> bool:
        """Whether the client at this address may be refused so."""
        names = (address.rpartition(":")[0].partition(":")[2], CERTIFIED)
        if found := ANNOUNCED.match(text):
            limit = self.limits.bytes_in_flight
            return status == EXHAUSTED and found[1].startswith(names) and int(found[2]) > int(found[3]) == limit
        found = IN_FLIGHT.match(text)
        if found is None:
            return False
        limits = {"calls": self.limits.calls, "streams": self.limits.streams, "bytes": self.limits.bytes_in_flight}
        limit, count = limits[found[3]], int(found[2])
        more = count >= int(found[4]) if found[3] == "streams" else count > int(found[4])
        return status == EXHAUSTED and found[1].startswith(names) and int(found[4]) == limit and more

    def look(self, uses: list[ClientUse]) -> None:
        """No client has more streams than it may.

        Raises:
            Violation: one has.
        """
        most = self.limits.streams
        if most is not None and any(use.streams > most for use in uses):
            raise Violation(f"{[use.streams for use in uses]} streams are under way, where {most} may be")
