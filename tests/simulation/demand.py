"""Models that are loaded when somebody asks for them: what requests for those that are not there may hear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.kinds import STEPS
from tests.simulation.operator import BROKEN, LACKS_STEP, NO_ROOM, RETRY, UNREACHABLE, size_of
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.simulation.simulation import Simulation

NO_LOADS = "the server is stopping: models are not loaded"
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
        self._checked = 0  # `Shop.changes` when the budget was checked last

    def may_refuse(self, names: set[str], since_ns: int, text: str) -> bool:
        """Whether a request that has begun then may be refused so, since one of these models could not be loaded."""
        if not self.on:
            return False
        if NO_LOADS in text:
            return self._simulation.operator.is_stopping
        if "load failed for model" not in text:
            return False
        failed_ns = self._simulation.shop.failed_ns
        if BROKEN in text or UNREACHABLE in text or LACKS_STEP in text:
            return any(failed_ns.get(name, -RETRY) >= self.told_since(since_ns, text) for name in names)
        return NO_ROOM in text and self.lacks_room(names)

    def told_since(self, since_ns: int, text: str) -> int:
        """The earliest time of the event of which `text` tells a request that began at `since_ns`. The server tells a
        failed load for a while after it."""
        return since_ns - RETRY if self.on and "load failed for model" in text else since_ns

    def lacks_room(self, names: Iterable[str]) -> bool:
        """Whether these models do not fit beside what stays, and beside loads that may wait for them."""
        simulation = self._simulation
        stay = set().union(*(STEPS[name] for name in self._pinned if name in simulation.kinds))
        askers = {name for name, kind in simulation.kinds.items() if kind.asks}
        stay.update(*(STEPS[name] for name in simulation.kinds if not STEPS[name].isdisjoint(askers)))
        budget = simulation.operator.control.budget
        return budget is not None and budget < _bytes({*names, *stay} & simulation.kinds.keys())

    def look(self) -> None:
        """After each step: memory is within the budget.

        Raises:
            Violation: it is not, and that is not because of what stays.
        """
        simulation = self._simulation
        if simulation.shop.changes == self._checked:
            return
        self._checked = simulation.shop.changes
        budget = simulation.operator.control.budget if self.on else None
        if budget is None or (taken := _bytes(simulation.versions)) <= budget or self.lacks_room(()):
            return
        there = ", ".join(sorted(simulation.versions))
        raise Violation(f"models of {taken} bytes are there, and the budget is {budget}: {there}")

    def rest(self) -> None:
        """When nothing can go on: nobody waits for a model that is there.

        Raises:
            Violation: somebody does.
        """
        if self.on:
            for name in self._simulation.versions:
                if self._simulation.service.awaits(name):
                    raise Violation(f"a request waits for '{name}', which is there")

    @property
    def _pinned(self) -> tuple[str, ...]:
        return self._simulation.operator.control.load


def _bytes(names: Iterable[str]) -> int:
    return sum(size_of(name) for name in names)
