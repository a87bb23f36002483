"""Load reports, which the server sends with its answers, and the bytes of requests and answers, which it counts."""

from __future__ import annotations

import base64
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.clients import Call
    from tests.simulation.simulation import Simulation
    from tests.simulation.talks import Talk

SHARE = 0.2  # of simulations that have them
KEY = "endpoint-load-metrics-bin"
MOST = 2048  # bytes of a report as headers have it


class Reports:
    """Those of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(f"{simulation.outcome.seed} reports")
        self._on = simulation.has("load reports", SHARE, when=simulation.scale.operator)
        self._told = [(0, "")]  # since when the report is this one
        self._received = self._sent = 0  # bytes of what clients know to have come and gone

    def change(self) -> None:
        """The load is another one, now and then."""
        if not self._on or self._random.random() < 0.5:
            return
        service, now = self._simulation.service, self._simulation.world.now()
        report = self._random.randbytes(self._random.choice((0, 1, 2, 3, 40, 1536)))
        service.set_load_report(report)
        self._told.append((now, base64.b64encode(report).decode().rstrip("=")))
        try:
            service.set_load_report(bytes(MOST))
        except ValueError:
            return
        raise Violation(f"a report of {MOST} bytes is sent with each answer")

    def check(self, call: Call | Talk) -> None:
        """An answer has the report of a time when its call was open.

        Raises:
            Violation: it has another one.
        """
        if self._simulation.by_python or self._simulation.is_faulty:
            return
        until = [since for since, _ in self._told[1:]] + [1 << 62]
        told = {text for (_, text), end in zip(self._told, until, strict=True) if end >= call.opened_ns}
        found = (call.stream.trailers or {}).get(KEY, "")
        if found not in told:
            raise Violation(f"{call}: its load report is '{found}', where the server had {sorted(told)}")

    def moved(self, call: Call, sent: int) -> None:
        """A call has a good answer of so many bytes."""
        self._received += call.size
        self._sent += sent

    def end(self) -> None:
        """All is over: what clients have sent and heard was counted, and perhaps more."""
        if self._simulation.by_python:
            return
        received, sent = self._simulation.service.traffic
        if received < self._received or sent < self._sent:
            heard = f"clients know of {self._received} and {self._sent}"
            raise Violation(f"{received} bytes were received and {sent} sent, and {heard}")
