"""Two servers, to measure a setting beside the best one so far."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferd.server.tools.perf.measuring import Level, summed
from inferd.server.tools.perf.plan import LoadPlan, Range
from inferd.server.tools.perf.running import best_of, levels_of, under_load
from inferd.server.tools.reach import CallFailed
from inferd.server.tools.tune.configurations import applied
from inferd.server.tools.tune.search import Setting, Tried, Wanted
from inferd.server.tools.tune.trial import Trial
from inferd_client.utils import InferenceServerException

TURNS, FIRST_TURNS = 16, 4
"""The most and the fewest turns of two settings."""
PLAIN = 1.6
"""The first turns are enough if one setting has this many times the throughput of the other."""
SHARE = 0.35
"""A turn's share of a window."""


class Pair:
    """Measures settings of a model.

    Other work on the machine changes its speed by more than most settings differ. So one server keeps serving the best
    setting so far, while another serves the next one, and the two take turns under load: the ratio of their throughputs
    counts. Where there is no room to serve the model twice, settings are measured one after the other.

    Attributes:
        config: the model's complete configuration.
    """

    def __init__(self, wanted: Wanted, folder: Path) -> None:
        self._wanted = wanted
        self._folder = folder
        self._served: dict[Trial, Setting | None] = {}
        self._has_room = True  # for two

    def __enter__(self) -> Pair:
        with contextlib.ExitStack() as stack:
            self._stack = stack
            self.config = self._another().config()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _another(self) -> Trial:
        """One more server."""
        trial = self._stack.enter_context(Trial(self._wanted, self._folder / str(len(self._served))))
        self._served[trial] = None
        return trial

    def measure(self, setting: Setting, best: Tried | None) -> Tried:
        """Put the model under load with a setting.

        Args:
            best: the best setting so far, which stays served; None: there is none.

        Raises:
            CallFailed: a server does not start.
        """
        if best is not None and setting == best.setting and self._has_room:
            return best
        found = self._measured(setting, best)
        return self._measured(setting, best) if found.noise else found

    def _measured(self, setting: Setting, best: Tried | None) -> Tried:
        trial, problem = self._serve(setting, best)
        if problem:
            return Tried(setting, None, 0, problem)
        rival = None
        try:
            found = self._tried(trial, setting)
            rival = self._rival(best)
            if found.best is None or best is None or best.best is None or rival is None or rival is trial:
                return found
            ratio, problem = self._ratio((rival, best.best), (trial, found.best))
        except (CallFailed, InferenceServerException):
            if trial.ends():
                return Tried(setting, None, 0, "the server has ended under load")
            if rival is None or not rival.ends():
                raise
            return found
        if problem:
            return Tried(setting, None, found.memory_mb, problem)
        return replace(found, pace=best.rate * ratio / found.best.inferences) if ratio else found

    def _serve(self, setting: Setting, best: Tried | None) -> tuple[Trial, str]:
        """A server that serves the setting, or the reason why none does."""
        rival = self._rival(best)
        trial = next((each for each in self._served if each is not rival), rival)
        if trial is None or (trial is rival and self._has_room):
            trial = self._another()
        self._served[trial] = None
        changed = applied(self.config, setting)
        problem = trial.serve(changed)
        if problem:
            for each in self._served:  # alone it may have enough memory
                each.unload()
                self._served[each] = None
            problem = trial.serve(changed)
            if not problem:
                self._has_room = False
            elif best is not None and rival is not None and not rival.serve(applied(self.config, best.setting)):
                self._served[rival] = best.setting
        if not problem:
            self._served[trial] = setting
        return trial, problem

    def _rival(self, best: Tried | None) -> Trial | None:
        """The server that serves the best setting so far."""
        rival = next((each for each, served in self._served.items() if best and served == best.setting), None)
        if best is None or rival is None or rival.is_up():
            return rival
        self._served[rival] = None if rival.serve(applied(self.config, best.setting)) else best.setting
        return rival if self._served[rival] else None

    def _tried(self, trial: Trial, setting: Setting) -> Tried:
        """The levels of a setting, one after the other."""
        levels: list[Level] = []
        for level in self._wanted.levels:
            found = levels_of(trial.reach, self._plan(level))[0]
            if found.errors:
                return Tried(setting, None, trial.memory_mb(), found.sample or "calls failed")
            levels.append(found)
            if not best_of([found], self._plan(level)):
                break
        memory = trial.memory_mb()
        best = next(iter(best_of(levels, self._plan(levels[0].level))), None)
        if self._wanted.memory_mb and memory > self._wanted.memory_mb:
            return Tried(setting, None, memory, f"{memory} MiB of memory")
        return Tried(setting, best, memory, "" if best else "no level is within the latency budget")

    def _plan(self, level: float) -> LoadPlan:
        return LoadPlan(
            model=self._wanted.model,
            concurrency=Range(level, level, 1),
            percentile=self._wanted.percentile,
            limit_ms=self._wanted.latency_ms,
            window=self._wanted.window,
            warm_up=self._wanted.window,
            stability=0.05,
            trials=4,
            shapes=self._wanted.shapes,
            data=self._wanted.data,
        )

    def _ratio(self, first: tuple[Trial, Level], second: tuple[Trial, Level]) -> tuple[float, str]:
        """The ratio of the second throughput to the first, 0 if unknown; and why the second fails.

        The faster half of each one's turns counts: other work makes a turn slower, never faster.
        """
        with contextlib.ExitStack() as stack:
            loads = [
                stack.enter_context(under_load(trial.reach, self._plan(level.level), level.level))
                for trial, level in (first, second)
            ]
            # in a turn all requests in flight are answered once at least
            seconds = [max(SHARE * self._wanted.window, level.level / level.rate) for _, level in (first, second)]
            rates: tuple[list[float], list[float]] = ([], [])
            ratio = 0.0
            for turn in range(1, TURNS + 1):
                for at in (0, 1) if turn % 2 else (1, 0):
                    level = (first, second)[at][1].level
                    found = summed([loads[at].window(seconds[at], 1)], self._plan(level), level)
                    if found.errors:
                        return 0.0, (found.sample or "calls failed") if at else ""
                    rates[at].append(found.rate)
                one, other = (statistics.mean(sorted(each)[turn // 2 :]) for each in rates)
                ratio = other / one if one else 0.0
                if turn == FIRST_TURNS and not 1 / PLAIN < ratio < PLAIN:
                    break
        return ratio, ""
