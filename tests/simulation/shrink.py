"""Make a simulation that fails smaller while it fails in the same way.

What a client does depends on nothing but the client and the number of the action, so that what is left out does not
change what others do. Features and models go first; then actions, in ever smaller parts, as in delta debugging.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.simulation import Outcome, Scale
from tests.simulation.workers import Sandbox

TRIALS = 160
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
    "questions",
    "remote",
    "tls",
    "library",
    "regions",
    "streams",
    "operator",
    "cancels",
    "deadlines",
    "preemption",
)
PARTICULARS = (
    # one failure: the world says the first while a timer is still set, and else the second
    (re.compile(r"nothing is answered for \d+ s|calls are never answered"), "nobody is answered"),
    (re.compile(r"call \d+ of (client|line) \d+ to [^\s,]+( deadline \d+ us)?"), "a call"),
    (re.compile(r"stream \d+ of client \d+( deadline \d+ us)?"), "a stream"),
    # one failure, whether many calls wait or few
    (re.compile(r"(a call|a stream)(, (a call|a stream))*(, and \d+ more)?"), "calls"),
    (re.compile(r"\b\w+\.\d+(_\d+)?\b"), "a version"),
    (re.compile(r"'[^']*'"), "'…'"),
    (re.compile(r"[\[{(][^\])}]*[\])}]"), "[…]"),
    (re.compile(r"0x[0-9a-f]+|-?\d+"), "N"),
)


def sort_of(problem: str) -> str:
    """The class of a failure: what was said, without whom it was said of."""
    for pattern, instead in PARTICULARS:
        problem = pattern.sub(instead, problem)
    return problem


def smaller(scale: Scale, models: tuple[str, ...]) -> Iterator[Scale]:
    """The scales that could be tried next, those with the greatest steps first."""
    for calls in (scale.calls // 8, scale.calls // 3, scale.calls * 2 // 3):
        if scale.clients <= calls < scale.calls:
            yield replace(scale, calls=calls)
    for feature in FEATURES:
        if getattr(scale, feature):
            yield replace(scale, **{feature: False})
    for crowd in (0, scale.crowd // 4, scale.crowd // 2, scale.crowd * 3 // 4):
        if crowd < scale.crowd:
            yield replace(scale, crowd=crowd)
    for lines in (1, scale.lines - 1):
        if scale.crowd and 0 < lines < scale.lines:
            yield replace(scale, lines=lines)
    left = [name for name in models if name not in scale.removed]
    size = len(left)
    while size > 1:
        size = (size + 1) // 2
        for begin in range(0, len(left), size):
            gone = set(left[begin : begin + size])
            stays = [name for name in left if name not in gone]
            if any(KINDS[name].weight for name in stays) and all(STEPS[name] <= set(stays) for name in stays):
                yield replace(scale, removed=(*scale.removed, *sorted(gone)))
        if size == 1:
            break


class Shrinking:
    """The attempts to make one failure smaller.

    Args:
        sandbox: where they run.
        outcome: the failure.
        scale: of it.
        trials: so many, at most.
    """

    def __init__(self, sandbox: Sandbox, outcome: Outcome, scale: Scale, trials: int) -> None:
        self.sandbox = sandbox
        self.scale = scale
        self.left = trials
        self.found = sandbox.run(outcome.seed, scale, keep=0)
        self._wanted = sort_of(self.found.problem)

    def fails(self, candidate: Scale) -> bool:
        """Whether this one fails in the same way, with no more calls; it is the smallest, then."""
        self.left -= 1
        tried = self.sandbox.run(self.found.seed, candidate, keep=0)
        if sort_of(tried.problem) != self._wanted or tried.calls > self.found.calls:
            return False
        self.scale, self.found = candidate, tried
        return True

    def leave_features_out(self) -> None:
        """Leave out features, models, and connections of a crowd."""
        progress = True
        while progress:
            progress = any(self.left > 0 and self.fails(each) for each in smaller(self.scale, self.found.models))

    def leave_actions_out(self) -> None:
        """All of a client's, then halves of them, and so on."""
        most = size = max(1, self.scale.calls // max(1, self.scale.clients))
        while size and self.left > 0:
            for client, first in product(range(self.scale.clients), range(1, most + 1, size)):
                part = (client, first, min(most, first + size - 1))
                if self.left > 0 and self.found.calls > 1 and not self._is_left_out(part):
                    self.fails(replace(self.scale, left_out=(*self.scale.left_out, part)))
            size //= 2

    def _is_left_out(self, part: tuple[int, int, int]) -> bool:
        client, first, last = part
        return any(each == client and begin <= first and last <= end for each, begin, end in self.scale.left_out)


def shrunk(sandbox: Sandbox, outcome: Outcome, scale: Scale, trials: int = TRIALS) -> tuple[Scale, Outcome]:
    """The smallest that was found, with its whole story."""
    shrinking = Shrinking(sandbox, outcome, scale, trials)
    if shrinking.found.problem:
        shrinking.leave_features_out()
        shrinking.leave_actions_out()
    return shrinking.scale, shrinking.found
