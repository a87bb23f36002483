"""The search: which setting to try next, and which of the tried ones is best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inferd.server.errors import Misused
from inferd.server.tools.perf.measuring import Level

BETTER = 1.03
"""The factor of throughput that a change must bring to be kept: less may be chance."""
NOISE = 1.1
"""A throughput that exceeds the requests in flight divided by their latency by this factor is rejected."""
RIVAL, RIVALS, AGAIN = 0.8, 3, 2
"""At the end, settings with this share of the best throughput, at most this number, are measured again this often."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The task of a search.

    Attributes:
        models: the models that are asked, all at the same time. Their configurations are varied, or, of an ensemble,
            those of the models of its steps.
        repository: the folder of model folders.
        latency_ms: limit of the percentile; 0: none.
        percentile: 50, 90, 95 or 99.
        memory_mb: limit of the server's memory; 0: none.
        levels: numbers of requests in flight, for each model, to try with each configuration.
        largest_batch: the largest max_batch_size to try.
        most_instances: the most instances to try.
        runs: how many configurations are measured at most.
        window: seconds of a measurement.
        shapes, data: of the requests; see `inferd perf`.
        options: further options of `inferd serve`, such as --backend-config.
    """

    models: tuple[str, ...]
    repository: Path
    latency_ms: float = 0.0
    percentile: int = 99
    memory_mb: int = 0
    levels: tuple[int, ...] = (1, 8, 32, 128)
    largest_batch: int = 128
    most_instances: int = 4
    runs: int = 30
    window: float = 0.3
    shapes: tuple[str, ...] = ()
    data: str = "random"
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if min(self.levels) < 1:
            raise Misused("--concurrency: expected numbers above 0")
        if min(self.largest_batch, self.most_instances, self.runs) < 1 or self.window <= 0:
            raise Misused("--largest-batch, --most-instances, --max-runs, --measurement-interval: expected 1 or more")
        if not 0 <= self.latency_ms < math.inf or self.memory_mb < 0:
            raise Misused("--latency-budget, --memory-budget: expected 0 or more")
        if self.percentile not in (50, 90, 95, 99):
            raise Misused(f"--percentile: expected 50, 90, 95 or 99, got {self.percentile}")


Axis = tuple[tuple[str, ...], str]
"""A field of the settings of some models, which have the same value there."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The fields of a model's configuration that the search varies.

    Attributes:
        batch: max_batch_size; 0: the model has no batch dimension.
        instances: of the model.
        delay_us: of the dynamic batcher; None: no dynamic batching.
        threads: that compute, as the backend counts them; 0: the backend decides.
        adaptive: the dynamic batcher adapts its delay, and `delay_us`, if it is not 0, is the limit.
        preferred: batch sizes for which the dynamic batcher does not wait longer.
    """

    batch: int
    instances: int
    delay_us: int | None
    threads: int
    adaptive: bool = False
    preferred: tuple[int, ...] = ()

    def changed(self, name: str, value: Any) -> Setting:
        """The setting with another value of a field, and without fields that then have no effect."""
        made = replace(self, **{name: value})
        if made.delay_us is None:
            return replace(made, adaptive=False, preferred=())
        return replace(made, preferred=tuple(size for size in made.preferred if size < made.batch))

    def text(self) -> str:
        """For people."""
        delay = f"delay {self.delay_us} us"
        if self.delay_us is None:
            delay = "no dynamic batching"
        elif self.adaptive:
            delay = f"adaptive delay up to {self.delay_us} us" if self.delay_us else "adaptive delay"
        if self.preferred:
            delay += f", preferred {','.join(map(str, self.preferred))}"
        batch = f"batch {self.batch}, {delay}" if self.batch else "no batches"
        return f"{self.instances} x, {batch}" + (f", {self.threads} threads" if self.threads else "")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all models whose configurations are varied, by name."""

    of: tuple[tuple[str, Setting], ...]

    def value(self, axis: Axis) -> Any:
        """The value of a field, which all models of the axis have."""
        return getattr(dict(self.of)[axis[0][0]], axis[1])

    def changed(self, axis: Axis, value: Any) -> Settings:
        """The settings with another value of a field; see `Setting.changed`."""
        names, field_name = axis
        made = ((name, own.changed(field_name, value) if name in names else own) for name, own in self.of)
        return Settings(tuple(made))

    def text(self) -> str:
        """For people."""
        if len(self.of) == 1:
            return self.of[0][1].text()
        return "; ".join(f"{name}: {own.text()}" for name, own in self.of)


@dataclass(frozen=True, slots=True)
class Tried:
    """Settings and their results.

    Attributes:
        best: of each asked model, the level with the most throughput within the limits; empty without one.
        memory_mb: of the server's processes, after the measurement.
        problem: why the settings do not qualify; empty if they do.
        pace: the factor that makes their throughput comparable with the others': how much slower the machine was than
            at the first measurement.
    """

    setting: Settings
    best: tuple[Level, ...]
    memory_mb: int
    problem: str = ""
    pace: float = 1.0

    @property
    def rates(self) -> list[float]:
        """Inferences per second of each asked model, at the pace of the first measurement.

        By Little's law not more than the requests in flight divided by their latency.
        """
        return [min(each.inferences * self.pace, _most(each)) for each in self.best]

    @property
    def rate(self) -> float:
        """The geometric mean of `rates`, in which a gain of 10 % counts the same for each model; 0 without any."""
        return statistics.geometric_mean(self.rates) if self.best and all(self.rates) else 0.0

    @property
    def noise(self) -> bool:
        """Whether the pace gives more than Little's law allows: the machine's speed has changed too much to compare."""
        return any(each.inferences * self.pace > NOISE * _most(each) for each in self.best)


def _most(level: Level) -> float:
    return level.level / level.mean * 1e6 if level.mean else float("inf")


@dataclass(slots=True)
class Search:
    """Tries settings, one change at a time.

    Args:
        measure: tries a setting, beside the best one so far if there is one.
        tell: called with each result.
        runs: how many settings are tried at most.
    """

    measure: Callable[[Settings, Tried | None], Tried]
    tell: Callable[[Tried], None]
    runs: int
    tried: dict[Settings, Tried] = field(default_factory=dict)

    def look(self, setting: Settings, best: Tried | None = None) -> Tried | None:
        """Try a setting beside the best one, once; None if the search has used up its runs."""
        if setting not in self.tried:
            if len(self.tried) >= self.runs:
                return None
            self.tried[setting] = self.measure(setting, best)
            self.tell(self.tried[setting])
        return self.tried[setting]

    def climb(self, start: Settings, axes: Sequence[tuple[Axis, Sequence[Any]]]) -> Tried:
        """The best setting that changes of one field at a time find.

        On each axis the search goes to the next values, up and then down, as long as that pays. After a step that does
        not pay it tries one more, because some changes pay only from a certain size on.
        """
        best = self.look(start)
        assert best is not None
        while True:
            before = best
            for axis, values in axes:
                best = self._along(best, axis, values)
            if best is before or len(self.tried) >= self.runs:
                return best

    def _along(self, best: Tried, axis: Axis, values: Sequence[Any]) -> Tried:
        for step in (1, -1):
            here = _nearest(values, best.setting.value(axis))
            missed = 0
            while missed < 2 and 0 <= here + step < len(values):
                here += step
                setting = best.setting.changed(axis, values[here])
                if setting == best.setting:
                    missed += 1  # it has no effect
                    continue
                found = self.look(setting, best)
                if found is None:
                    return best
                if found.rate > best.rate * BETTER:
                    best, missed = found, 0
                else:
                    missed += 1
        return best

    def rivals(self, best: Tried) -> list[Tried]:
        """The best one and those that are nearly as good, the quickest first."""
        able = sorted((each for each in self.tried.values() if each.rate), key=lambda each: -each.rate)
        return [each for each in able[:RIVALS] if each.rate >= best.rate * RIVAL]

    def settle(self, best: Tried) -> Tried:
        """The best of those that are nearly as good as the best one, after further measurements of each.

        A single measurement is partly chance, above all the best of many. The median of each counts.
        """
        measured = {each.setting: [each] for each in self.rivals(best)}
        if len(measured) < 2:
            return best
        for _ in range(AGAIN):
            for setting, found in measured.items():
                found.append(self.measure(setting, best))
                if found[-1] is not best:
                    self.tell(found[-1])
        for setting, found in measured.items():
            self.tried[setting] = sorted(found, key=lambda each: each.rate)[len(found) // 2]
        return max((self.tried[setting] for setting in measured), key=lambda each: each.rate)

    def front(self) -> list[Tried]:
        """The results that no other beats in throughput, latency and memory, the fastest first."""

        def beats(a: Tried, b: Tried) -> bool:
            ours, theirs = ((each.rate, -_latency(each), -each.memory_mb) for each in (a, b))
            return all(x >= y for x, y in zip(ours, theirs, strict=True)) and ours != theirs

        able = [each for each in self.tried.values() if each.best]
        found = [each for each in able if not any(beats(other, each) for other in able)]
        return sorted(found, key=lambda each: -each.rate)


def _latency(tried: Tried) -> float:
    return max(each.p99 for each in tried.best)


def _nearest(values: Sequence[Any], value: Any) -> int:
    """The index of a value, or of the nearest one."""
    if value in values:
        return values.index(value)
    if isinstance(value, tuple):
        return 0  # some of the configured preferred sizes are left: others are too large for the batch
    known = [-1 if each is None else each for each in values]
    wanted = -1 if value is None else value
    return min(range(len(known)), key=lambda i: (abs(known[i] - wanted), i))
