"""Models that are loaded when somebody asks for them: what requests for those that are not there may hear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.operator import BROKEN, LACKS_STEP, NO_ROOM, RETRY, UNREACHABLE

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SHARE = 0.15  # of simulations that load models so


class Demand:
    """What the engine owes to those whose requests wait for a load.

    Attributes:
        on: models are loaded on demand.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        scale = simulation.scale
        self.on = simulation.has("demand", SHARE, when=scale.demand and scale.operator)

    def may_refuse(self, names: set[str], since_ns: int, text: str) -> bool:
        """Whether a request that has begun then may be refused so, since one of these models could not be loaded."""
        if not self.on:
            return False
        if "load failed for model" not in text:
            return False
        failed_ns = self._simulation.shop.failed_ns
        if BROKEN in text or UNREACHABLE in text or LACKS_STEP in text:
            return any(failed_ns.get(name, -RETRY) + RETRY >= since_ns for name in names)
        return NO_ROOM in text and self._simulation.operator.control.budget > 0
