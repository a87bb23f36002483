"""Simulations of other sizes than the usual one: each seed draws its own, say with few models or many clients."""

from __future__ import annotations

from dataclasses import fields
from random import Random

from tests.simulation.clients import TEMPERS
from tests.simulation.kind import Kind
from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.simulation import Scale

FEATURES = tuple(each.name for each in fields(Scale) if each.default is True)
EXTREMES: dict[str, tuple[float, ...]] = {
    "preempt": (800,),
    "spurious": (800,),
    "faults": (50, 20_000),
    "pace": (0, 300),
    "talks": (0.9, 1),
    "sharing": (1,),
    "packing": (1,),
    "errors": (0.5,),
    "hostile": (30,),
    "stands": (20_000,),
    "late": (1,),
    "refusing": (0.9,),
    "service limit": (1, 3, 8),
    "held limit": (1 << 16,),
    "ttl": (0.0003, 1),
    "traces": (1,),
    "demand": (1,),
    "rights": (1,),
    "forwarding": (1,),
}


def drawn_scale(seed: int) -> Scale:
    """The scale of this seed."""
    random = Random(f"{seed} scale")
    clients = random.choice((1, 2, 5, 5, 20, 50))
    calls = random.choice((100, 500, 500, 2000, 4000, 8000))
    has = dict.fromkeys(FEATURES, True)
    if random.random() < 0.3:
        has = {name: random.random() < 0.3 for name in FEATURES}
    tempers = tuple(random.sample([temper.name for temper in TEMPERS], random.choice((0, 0, 1, 2))))
    extremes = {name: random.choice(values) for name, values in EXTREMES.items() if random.random() < 0.1}
    return Scale(clients, calls, _models(random), tempers, extremes, **has)


def _models(random: Random) -> tuple[str, ...]:
    """What there is to ask, with the steps of it; empty for what the simulation draws."""
    asked = [kind for kind in KINDS.values() if kind.weight and not kind.popular]
    groups = [
        [],
        [],
        random.sample(asked, random.randint(1, 3)),
        random.sample(asked, random.randint(1, 3)),
        _some(random, [kind for kind in asked if kind.sequence or kind.tallies]),
        _some(random, [kind for kind in asked if kind.steps]),
        _some(random, [kind for kind in asked if kind.style == "worker"]),
        _some(random, [kind for kind in asked if kind.reuses or kind.bounded]),
        _some(random, [kind for kind in asked if kind.style == "gpu" or kind.decoupled]),
    ]
    return tuple(sorted(set().union(*(STEPS[kind.name] for kind in random.choice(groups)))))


def _some(random: Random, kinds: list[Kind]) -> list[Kind]:
    return random.sample(kinds, random.randint(1, len(kinds)))
