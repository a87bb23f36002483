"""Models that are loaded when somebody asks for them: their requests wait until the load has ended, or is refused."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SHARE = 0.15  # of simulations that load models so
US = 1000
MS = 1000 * US
UNAVAILABLE = 14
REFUSED = "models are not loaded at this time"
FAILED = "its load has failed"


class Demand:
    """Loads the models of a simulation.

    Attributes:
        on: it does.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = random = Random(f"{simulation.outcome.seed} demand")
        scale = simulation.scale
        self.on = simulation.has("demand", SHARE, when=scale.demand and scale.operator)
        self._pending: set[str] = set()  # models that somebody waits for
        self._refused_ns: dict[str, int] = {}  # when those who asked for a model were refused last
        self._is_moody = random.random() < 0.5  # some loads are refused
        if self.on:
            simulation.service.load_on_demand(self._missed)

    def _missed(self, name: str, by_model: bool, asked_by: str) -> str:
        """Somebody asks for a model that is not there; why it is refused, empty if it has to wait."""
        simulation = self._simulation
        simulation.tell("operator", f"is asked for '{name}'")
        if self._is_moody and self._random.random() < 0.1:
            self._refused_ns[name] = simulation.world.now()
            return REFUSED
        if name not in self._pending:
            self._pending.add(name)
            simulation.later(
                self._random.randint(0, self._random.choice((0, 200 * US, 30 * MS))), partial(self._decide, name)
            )
        return ""

    def _decide(self, name: str) -> None:
        """Load it, unless somebody has, or refuse those who wait."""
        simulation = self._simulation
        if name not in self._pending:
            return
        if name not in simulation.kinds:
            self._resume(name)  # they meet the same again
        elif self._is_moody and self._random.random() < 0.2:
            simulation.tell("operator", f"does not load '{name}'")
            self._refused_ns[name] = simulation.world.now()
            self._resume(name, UNAVAILABLE, FAILED)
        else:
            simulation.load(name)

    def loaded(self, name: str) -> None:
        """A model is there."""
        if name in self._pending:
            self._resume(name)

    def _resume(self, name: str, status: int = 0, text: str = "") -> None:
        self._pending.discard(name)
        may_fail = self._simulation.world.may_fail(1)
        self._simulation.service.resume(name, status, text)
        self._simulation.world.may_fail(may_fail)

    def may_refuse(self, names: set[str], since_ns: int, text: str) -> bool:
        """Whether a request that has begun then may be refused so, since one of these models was not there."""
        return text in (REFUSED, FAILED) and any(self._refused_ns.get(name, 0) >= since_ns for name in names)
