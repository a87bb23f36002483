"""Two servers, to measure a setting beside the best one so far."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferd.server.tools.perf.measuring import Level
from inferd.server.tools.perf.plan import LoadPlan, Range
from inferd.server.tools.perf.running import levels_of, under_load, within
from inferd.server.tools.reach import CallFailed
from inferd.server.tools.tune.configurations import applied
from inferd.server.tools.tune.search import Settings, Tried, Wanted
from inferd.server.tools.tune.trial import Trial
from inferd_client.pb import model_config_pb2 as pb
from inferd_client.utils import InferenceServerException

TURNS, FIRST_TURNS = 16, 4
"""The most and the fewest turns of two settings."""
PLAIN = 1.6
"""The first turns are enough if one setting has this many times the throughput of the other."""
SHARE = 0.35
"""A turn's share of a window."""


def throughput(levels: Sequence[Level]) -> float:
    """The geometric mean of the models' inferences per second; 0 if a model has none."""
    rates = [each.inferences for each in levels]
    return statistics.geometric_mean(rates) if all(rates) else 0.0


class Pair:
    """Measures settings of the models.

    Other work on the machine changes its speed by more than most settings differ. So one server keeps serving the best
    setting so far, while another serves the next one, and the two take turns under load: the ratio of their throughputs
    counts. Where there is no room to serve the models twice, settings are measured one after the other.

    Attributes:
        configs: the complete configurations of the models, and of the models of ensembles' steps.
    """

    def __init__(self, wanted: Wanted, folder: Path) -> None:
        self._wanted = wanted
        self._folder = folder
        self._served: dict[Trial, Settings | None] = {}
        self._has_room = True  # for two

    def __enter__(self) -> Pair:
        with contextlib.ExitStack() as stack:
            self._stack = stack
            self.configs = self._another().configs()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _another(self) -> Trial:
        """One more server."""
        trial = self._stack.enter_context(Trial(self._wanted, self._folder / str(len(self._served))))
        self._served[trial] = None
        return trial

    def measure(self, setting: Settings, best: Tried | None) -> Tried:
        """Put the models under load with their settings.

        Args:
            best: the best setting so far, which stays served; None: there is none.

        Raises:
            CallFailed: a server does not start.
        """
        if best is not None and setting == best.setting and self._has_room:
            return best
        found = self._measured(setting, best)
        return self._measured(setting, best) if found.noise else found

    def _measured(self, setting: Settings, best: Tried | None) -> Tried:
        trial, problem = self._serve(setting, best)
        if problem:
            return Tried(setting, (), 0, problem)
        rival = None
        try:
            found = self._tried(trial, setting)
            rival = self._rival(best)
            if not found.best or best is None or not best.best or rival is None or rival is trial:
                return found
            ratio, problem = self._ratio((rival, best.best), (trial, found.best))
        except (CallFailed, InferenceServerException):
            if trial.ends():
                return Tried(setting, (), 0, "the server has ended under load")
            if rival is None or not rival.ends():
                raise
            return found
        if problem:
            return Tried(setting, (), found.memory_mb, problem)
        own = throughput(found.best)
        return replace(found, pace=best.rate * ratio / own) if ratio and own else found

    def _serve(self, setting: Settings, best: Tried | None) -> tuple[Trial, str]:
        """A server that serves the setting, or the reason why none does."""
        rival = self._rival(best)
        trial = next((each for each in self._served if each is not rival), rival)
        if trial is None or (trial is rival and self._has_room):
            trial = self._another()
        self._served[trial] = None
        changed = self._applied(setting)
        problem = trial.serve(changed)
        if problem:
            for each in self._served:  # alone it may have enough memory
                each.unload()
                self._served[each] = None
            problem = trial.serve(changed)
            if not problem:
                self._has_room = False
            elif best is not None and rival is not None and not rival.serve(self._applied(best.setting)):
                self._served[rival] = best.setting
        if not problem:
            self._served[trial] = setting
        return trial, problem

    def _rival(self, best: Tried | None) -> Trial | None:
        """The server that serves the best setting so far."""
        rival = next((each for each, served in self._served.items() if best and served == best.setting), None)
        if best is None or rival is None or rival.is_up():
            return rival
        self._served[rival] = None if rival.serve(self._applied(best.setting)) else best.setting
        return rival if self._served[rival] else None

    def _applied(self, setting: Settings) -> dict[str, pb.ModelConfig]:
        return {name: applied(self.configs[name], own) for name, own in setting.of}

    def _tried(self, trial: Trial, setting: Settings) -> Tried:
        """The levels of a setting, one after the other."""
        able: list[tuple[Level, ...]] = []
        for level in self._wanted.levels:
            found = levels_of(trial.reach, plans := self._plans(level))
            if any(each.errors for each in found):
                problem = next((each.sample for each in found if each.sample), "calls failed")
                return Tried(setting, (), trial.memory_mb(), problem)
            if not all(within(*each) for each in zip(found, plans, strict=True)):
                break
            able.append(tuple(found))
        memory = trial.memory_mb()
        if self._wanted.memory_mb and memory > self._wanted.memory_mb:
            return Tried(setting, (), memory, f"{memory} MiB of memory")
        best = max(able, key=throughput, default=())
        return Tried(setting, best, memory, "" if best else "no level is within the latency budget")

    def _plans(self, level: float) -> list[LoadPlan]:
        return [self._plan(model, level) for model in self._wanted.models]

    def _plan(self, model: str, level: float) -> LoadPlan:
        return LoadPlan(
            model=model,
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

    def _ratio(self, first: tuple[Trial, Sequence[Level]], second: tuple[Trial, Sequence[Level]]) -> tuple[float, str]:
        """The ratio of the second throughput to the first, 0 if unknown; and the problem of the second setting.

        Of the turns of each setting the faster half counts: other work makes a turn slower, never faster.
        """
        with contextlib.ExitStack() as stack:
            loads = [
                stack.enter_context(under_load(trial.reach, self._plans(levels[0].level), levels[0].level))
                for trial, levels in (first, second)
            ]
            # a turn is so long that all requests in flight are answered at least once
            seconds = [
                max(SHARE * self._wanted.window, *(each.level / each.rate for each in levels))
                for _, levels in (first, second)
            ]
            rates: tuple[list[float], list[float]] = ([], [])
            ratio = 0.0
            for turn in range(1, TURNS + 1):
                for at in (0, 1) if turn % 2 else (1, 0):
                    found = loads[at](seconds[at])
                    if any(each.errors for each in found):
                        return 0.0, next((each.sample for each in found if each.sample), "calls failed") if at else ""
                    rates[at].append(throughput(found))
                one, other = (statistics.mean(sorted(each)[turn // 2 :]) for each in rates)
                ratio = other / one if one else 0.0
                if turn == FIRST_TURNS and not 1 / PLAIN < ratio < PLAIN:
                    break
        return ratio, ""
