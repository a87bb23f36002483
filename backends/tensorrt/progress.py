"""The progress of a build."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

Tell = Callable[[str, int], object]
"""Called on any thread with the current step, and how much of the whole is done, in percent."""


class Monitor(Protocol):
    """An IProgressMonitor of TensorRT's."""

    def cancel(self) -> None:
        """Have the build end at its next step."""


@dataclass(slots=True)
class _Phase:
    name: str
    parent: str | None
    steps: int
    done: float = 0.0
    begun: float = field(default=0.0)


class Progress:
    """Sums up nested phases, each of which is a part of its parent's current step.

    Safe to use from several threads: TensorRT builds in some.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._phases: dict[str, _Phase] = {}
        self._told = -1
        self._lock = threading.Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        with self._lock:
            self._phases[name] = _Phase(name, parent, max(1, steps))
            self._report(name)

    def step(self, name: str, step: int) -> None:
        with self._lock:
            if name in self._phases:
                self._phases[name].done = step + 1
                self._report(name)

    def finish(self, name: str) -> None:
        with self._lock:
            phase = self._phases.pop(name, None)
            if phase is not None and phase.parent is None:
                self._say(name, 100)

    def _report(self, name: str) -> None:
        share, phase = 0.0, self._phases.get(name)
        while phase is not None:
            share = min(1.0, (phase.done + share) / phase.steps)
            phase = self._phases.get(phase.parent or "")
        self._say(name, int(100 * share))

    def _say(self, name: str, percent: int) -> None:
        if percent > self._told:  # never less: phases take steps that they did not announce
            self._told = percent
            self._tell(name, percent)


def make_monitor(module: Any, progress: Progress) -> Monitor:
    """A monitor that tells `progress`; `module` is the imported TensorRT."""

    class ProgressMonitor(module.IProgressMonitor):  # type: ignore[misc]  # the class is known at run time only
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self._cancelled = False

        def cancel(self) -> None:
            self._cancelled = True

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress.step(phase_name, step)
            return not self._cancelled

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return ProgressMonitor()
