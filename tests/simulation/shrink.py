"""Make a simulation that fails smaller while it still fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.simulation.kinds import KINDS
from tests.simulation.simulation import Outcome, Scale
from tests.simulation.workers import Sandbox

TRIALS = 120
FEATURES = (
    "faults",
    "hostile",
    "errors",
    "jumps",
    "late",
    "traces",
    "demand",
    "rights",
    "forwarding",
    "regions",
    "streams",
    "operator",
    "cancels",
    "deadlines",
    "preemption",
)


def smaller(scale: Scale, models: tuple[str, ...]) -> Iterator[Scale]:
    """What could be tried next, the greatest steps first."""
    for feature in FEATURES:
        if getattr(scale, feature):
            yield replace(scale, **{feature: False})
    for crowd in (0, scale.crowd // 4, scale.crowd // 2, scale.crowd * 3 // 4):
        if crowd < scale.crowd:
            yield replace(scale, crowd=crowd)
    for lines in (1, scale.lines - 1):
        if scale.crowd and 0 < lines < scale.lines:
            yield replace(scale, lines=lines)
    for calls in (scale.calls // 4, scale.calls // 2, scale.calls * 3 // 4):
        if scale.clients <= calls < scale.calls:
            yield replace(scale, calls=calls)
    for clients in (1, scale.clients // 2, scale.clients - 1):
        if 0 < clients < scale.clients:
            yield replace(scale, clients=clients)
    for name in models:
        left = tuple(other for other in models if other != name)
        asked = any(KINDS[other].weight for other in left)
        if asked and all(step.model in left for other in left for step in KINDS[other].steps):
            yield replace(scale, models=left)


def shrunk(sandbox: Sandbox, outcome: Outcome, scale: Scale) -> tuple[Scale, Outcome]:
    """The smallest that was found, with its whole story."""
    found = sandbox.run(outcome.seed, scale, keep=0)
    trials = 0
    progress = bool(found.problem)
    while progress and trials < TRIALS:
        progress = False
        for candidate in smaller(scale, found.models):
            trials += 1
            tried = sandbox.run(outcome.seed, candidate, keep=0)
            if tried.problem and tried.calls <= found.calls:
                scale, found, progress = candidate, tried, True
                break
            if trials >= TRIALS:
                break
    return scale, found
