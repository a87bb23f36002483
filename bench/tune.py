"""`inferd tune` against a brute-force grid: how near to the best it comes, with how few configurations.

    python -m bench.tune                   the demo's CNN as ONNX and as TorchScript
    python -m bench.tune --language DIR    its text classifier, too; examples/language/make_repository.py makes DIR

One server serves each configuration of a grid as a model of its own. They are measured in turns, in windows so short
that other work on the machine affects all of them alike. A Python model's instances are processes, too many for one
server: its grid is measured in parts. `inferd tune` then searches twice: in these figures, which shows how good its
steps are, and with measurements of its own, as a user runs it. Its choices and the best of the grid are measured once
more, in turns. Writes bench/results/tune.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf import text_format

from bench import digits, inferd, system
from inferd.server.pb import model_config_pb2 as pb
from inferd.server.tools.perf.measuring import Level
from inferd.server.tools.perf.plan import LoadPlan
from inferd.server.tools.perf.requests import Requests, model_of, serialised
from inferd.server.tools.reach import Reach
from inferd.server.tools.tune.configurations import THREADS, applied, setting_of
from inferd.server.tools.tune.pair import Pair
from inferd.server.tools.tune.search import Search, Setting, Tried, Wanted
from inferd.server.tools.tune.trial import OF_PROCESS, copy_model
from inferd_client.driver import Driver, Fixed

RESULT = Path(__file__).parent / "results" / "tune.md"
IN_FLIGHT = 64
WINDOW = 0.25  # seconds, of the search with measurements of its own
TURN = 0.08  # seconds
WAVES = 2
"""Each request in flight is answered at least this often in a turn, which lasts longer for slow models."""
ROUNDS, LAST_ROUNDS = 8, 24
FINALISTS = 8
SIDE_BY_SIDE = {"python": 8}
"""By backend, how many configurations one server serves at a time; of others, all."""
SHARE = 0.2
"""The largest share of the grid that the search may measure."""
NEAR = 0.95
"""The share of the best throughput that the search's choice must reach."""
BATCHES, INSTANCES, DELAYS_US = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2), (0, 300, 3000)

Axes = list[tuple[str, Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A search's choice.

    Attributes:
        tried: configurations that it has measured.
        share: of the throughput of the best of the grid.
    """

    setting: Setting
    tried: int
    share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model's results: the grid, its best with inferences per second, and the two searches."""

    model: str
    start: Setting
    grid: int
    best: Setting
    rate: float
    in_figures: Choice
    by_itself: Choice

    @property
    def holds(self) -> bool:
        """Whether the search in the grid's figures reaches its share with few enough configurations."""
        return self.in_figures.share >= NEAR and self.in_figures.tried <= SHARE * self.grid


def compared(wanted: Wanted) -> Comparison:
    """Grid and searches of one model."""
    config = text_format.Parse((wanted.repository / wanted.model / "config.pbtxt").read_text(), pb.ModelConfig())
    axes = axes_of(config)
    start = replace(nearest(setting_of(config), axes), adaptive=False, preferred=())
    grid = list(grid_of(start, axes))
    most = int(SHARE * len(grid))
    with tempfile.TemporaryDirectory() as folder, Pair(wanted, Path(folder)) as pair:
        own = Search(pair.measure, _told, most)
        print(f"{wanted.model}: search from {start.text()}", flush=True)
        chosen = own.settle(own.climb(start, axes)).setting
    print(f"{wanted.model}: grid of {len(grid)}", flush=True)
    rates: dict[Setting, float] = {}
    step = SIDE_BY_SIDE.get(config.backend, len(grid))
    for first in range(0, len(grid), step):
        rates |= rates_of(wanted, config, grid[first : first + step], ROUNDS)
    known = Search(lambda setting, _: known_rate(setting, rates[setting]), _untold, most)
    rivals = [each.setting for each in known.rivals(known.climb(start, axes))]
    ranked = sorted(grid, key=lambda setting: -rates[setting])
    finals = rates_of(wanted, config, list(dict.fromkeys([chosen, *rivals, *ranked[:FINALISTS]])), LAST_ROUNDS)
    found = max(rivals, key=lambda setting: finals[setting])  # as a search measures them again
    best = max(finals, key=lambda setting: finals[setting])
    for setting, rate in sorted(finals.items(), key=lambda each: -each[1]):
        print(f"  {setting.text()}: {rate:.0f}/s")
    return Comparison(
        wanted.model,
        start,
        len(grid),
        best,
        finals[best],
        Choice(found, len(known.tried), finals[found] / finals[best]),
        Choice(chosen, len(own.tried), finals[chosen] / finals[best]),
    )


def rates_of(wanted: Wanted, config: pb.ModelConfig, settings: Sequence[Setting], rounds: int) -> dict[Setting, float]:
    """Inferences per second of each, side by side."""
    with tempfile.TemporaryDirectory() as folder, Side(wanted, config, settings, Path(folder)) as side:
        return side.rates(rounds)


def known_rate(setting: Setting, rate: float) -> Tried:
    """A setting of which only the throughput is known."""
    return Tried(setting, cast(Level, SimpleNamespace(inferences=rate, mean=0.0)), 0)


class Side:
    """A copy of a model for each setting, side by side: in one server, or in one for each number of threads."""

    def __init__(self, wanted: Wanted, config: pb.ModelConfig, settings: Sequence[Setting], folder: Path) -> None:
        self._names = {setting: f"{wanted.model}_{i}" for i, setting in enumerate(settings)}
        self._folder = folder
        self._of = {setting: str(setting.threads if config.backend in OF_PROCESS else "all") for setting in settings}
        for setting, name in self._names.items():
            model = folder / self._of[setting] / name
            copy_model(wanted.repository / wanted.model, model)
            changed = applied(config, setting)
            changed.name = name
            (model / "config.pbtxt").write_text(text_format.MessageToString(changed))
        self._wanted = wanted

    def __enter__(self) -> Side:
        with contextlib.ExitStack() as stack:
            self._drivers: dict[str, Driver] = {}
            self._loads: dict[Setting, Fixed] = {}
            for group in dict.fromkeys(self._of.values()):
                server = inferd.start(self._folder / group, self._folder / f"{group}.log", patience=900)
                stack.callback(server.stop)
                self._drivers[group] = stack.enter_context(Driver(server.address))
                self._prepare(Reach(server.address), group)
            self._stack = stack.pop_all()
        return self

    def _prepare(self, reach: Reach, group: str) -> None:
        """Measures the models of a server."""
        names = {setting: name for setting, name in self._names.items() if self._of[setting] == group}
        plan = LoadPlan(next(iter(names.values())), shapes=self._wanted.shapes, data=self._wanted.data)
        with reach.client() as client, Requests(client, model_of(client, reach, plan), plan) as requests:
            for setting, name in names.items():
                self._loads[setting] = Fixed([serialised(replace(plan, model=name), each) for each in requests])

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def rates(self, rounds: int) -> dict[Setting, float]:
        """Inferences per second of each: the mean of the faster half of short turns; other work slowed the rest."""
        turns = {setting: max(TURN, WAVES * IN_FLIGHT / self._rate(setting, TURN)) for setting in self._loads}
        found: dict[Setting, list[float]] = {setting: [] for setting in turns}
        for _ in range(rounds):
            for setting, turn in turns.items():
                found[setting].append(self._rate(setting, turn))
        return {setting: statistics.mean(sorted(rates)[len(rates) // 2 :]) for setting, rates in found.items()}

    def _rate(self, setting: Setting, turn: float) -> float:
        report = self._drivers[self._of[setting]].run(self._loads[setting], in_flight=IN_FLIGHT, seconds=turn)
        if report.correct != report.requests:
            raise RuntimeError(f"{setting.text()}: {report}")
        return report.rate


def _told(tried: Tried) -> None:
    print(f"  {tried.setting.text()}: {tried.rate:.0f}/s {tried.problem}", flush=True)


def _untold(tried: Tried) -> None:
    """It is known."""


def axes_of(config: pb.ModelConfig) -> Axes:
    """What is varied."""
    found: Axes = [("batch", BATCHES), ("instances", INSTANCES), ("delay_us", DELAYS_US)]
    if config.backend in THREADS:
        found.append(("threads", [count for count in (1, 2, 4, 8) if count <= (os.cpu_count() or 1)]))
    return found


def nearest(setting: Setting, axes: Axes) -> Setting:
    """The setting of the grid that is nearest to one."""
    return replace(setting, **{name: _closest(values, getattr(setting, name) or 0) for name, values in axes})


def _closest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: abs(value - wanted))


def grid_of(start: Setting, axes: Axes) -> Iterator[Setting]:
    """Every setting."""
    names = [name for name, _ in axes]
    for values in itertools.product(*(values for _, values in axes)):
        yield replace(start, **dict(zip(names, values, strict=True)))


HEADS = ("model", "grid", "best, inferences/s", "search in the grid's figures", "search by itself")


def page(found: Sequence[Comparison]) -> str:
    """For bench/results."""

    def said(each: Comparison, choice: Choice) -> str:
        return f"{choice.share:.0%} with {choice.tried}, 1/{each.grid / choice.tried:.1f}"

    rows = [
        (each.model, f"{each.grid}", f"{each.rate:,.0f}", said(each, each.in_figures), said(each, each.by_itself))
        for each in found
    ]
    settings = [
        f"- {each.model}: from {each.start.text()}. Best: {each.best.text()}. Chosen in the grid's figures: "
        f"{each.in_figures.setting.text()}; by itself: {each.by_itself.setting.text()}."
        for each in found
    ]
    machine = ", ".join(f"{name} {text}" for name, text in system.describe().items())
    return f"""# inferd tune against a brute-force grid

`python -m bench.tune`, {time.strftime("%Y-%m-%d")}; {machine}; load {os.getloadavg()[1]:.0f}.
{IN_FLIGHT} requests in flight.

The search and the grid have the same axes: max_batch_size {_listed(BATCHES)}; instances {_listed(INSTANCES)}; queue
delay {_listed(DELAYS_US)} µs; for ONNX Runtime and TorchScript the threads of an instance. Instances of the text
classifier, a Python model, have one thread each (OMP_NUM_THREADS). One server serves all
configurations of the grid, or {SIDE_BY_SIDE["python"]} at a time of the text classifier, whose instances are processes.
They are measured in turns of {TURN * 1000:.0f} ms, or of {WAVES} answers to each request in flight where that is
longer: {ROUNDS} of each, then {LAST_ROUNDS} of the best {FINALISTS} and of what the searches chose; the quicker half
counts. "Search by itself" measures as `inferd tune` does: each configuration takes turns with the best one before it,
and the best few are measured again. Wanted: at least {NEAR:.0%} of the best with at most 1/{1 / SHARE:.0f} of the
configurations.

{"".join(f"| {' | '.join(row)} |{chr(10)}" for row in (HEADS, ["---"] + ["---:"] * (len(HEADS) - 1), *rows))}
{chr(10).join(settings)}
"""


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def main() -> int:
    """Measure what the command line asks for; 0 if all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--language", type=Path, help="repository with the text classifier")
    parser.add_argument("--only", action="append", default=[], help="name of a model; may be given several times")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of Python models: no searched setting says how many they have
    with tempfile.TemporaryDirectory() as folder:
        repository = digits.make(Path(folder) / "models")
        plain = Wanted("", repository, levels=(IN_FLIGHT,), window=WINDOW)
        wanted = [replace(plain, model=f"digits_{kind}") for kind in ("onnx", "torchscript")]
        if arguments.language is not None:
            wanted.append(replace(plain, model="sentiment", repository=arguments.language, shapes=("text:1",)))
        found = [compared(each) for each in wanted if not arguments.only or each.model in arguments.only]
    RESULT.write_text(page(found))
    print(page(found))
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
