"""`inferd tune`: searches the configuration of a model with the most throughput within limits of latency and memory.

It serves a copy of the model by a server of its own and changes the copy's configuration, one field at a time. It keeps
a change that pays, and repeats earlier trials only if the change may have made them better.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from inferd_client.utils import InferenceServerException
from server.errors import Misused
from server.pb import model_config_pb2 as pb
from server.tools.perf.measuring import Level
from server.tools.perf.plan import LoadPlan, Range
from server.tools.perf.running import best_of, levels_of
from server.tools.reach import CallFailed, Reach
from server.tools.tables import table

CONFIG = "config.pbtxt"
START_SECONDS = 300.0
BETTER = 1.03
"""The factor of throughput that a change must bring to be kept: less may be chance."""
THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
"""By backend, the parameter with the number of threads of an instance."""
OF_PROCESS = {"pytorch"}
"""Backends whose models share threads: the first model that a server loads decides their number."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DELAYS_US = (0, 100, 300, 1000, 3000, 10000)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The task of a search.

    Attributes:
        model: its name.
        repository: the folder of model folders.
        latency_ms: limit of the percentile; 0: none.
        percentile: 50, 90, 95 or 99.
        memory_mb: limit of the server's memory; 0: none.
        levels: numbers of requests in flight to try with each configuration.
        largest_batch: the largest max_batch_size to try.
        most_instances: the most instances to try.
        runs: how many configurations are measured at most.
        window: seconds of a measurement.
        shapes, data: of the requests; see `inferd perf`.
        options: further options of `inferd serve`, such as --backend-config.
    """

    model: str
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


@dataclass(frozen=True, slots=True)
class Setting:
    """The fields of a configuration that the search varies.

    Attributes:
        batch: max_batch_size; 0: the model has no batch dimension.
        instances: of the model.
        delay_us: of the dynamic batcher; None: no dynamic batching.
        threads: of an instance; 0: the backend decides.
    """

    batch: int
    instances: int
    delay_us: int | None
    threads: int

    def text(self) -> str:
        """For people."""
        delay = "no dynamic batching" if self.delay_us is None else f"delay {self.delay_us} us"
        batch = f"batch {self.batch}, {delay}" if self.batch else "no batches"
        return f"{self.instances} x, {batch}" + (f", {self.threads} threads" if self.threads else "")


@dataclass(frozen=True, slots=True)
class Tried:
    """A setting and its results.

    Attributes:
        best: its level with the most throughput within the limits; None without one.
        memory_mb: of the server's processes, after the measurement.
        problem: why the setting does not qualify; empty if it does.
    """

    setting: Setting
    best: Level | None
    memory_mb: int
    problem: str = ""

    @property
    def rate(self) -> float:
        """Inferences per second; 0 if the setting does not qualify."""
        return self.best.inferences if self.best is not None else 0.0


@dataclass(slots=True)
class Search:
    """Tries settings, one change at a time.

    Args:
        measure: tries a setting.
        tell: called with each result.
        runs: how many settings are tried at most.
    """

    measure: Callable[[Setting], Tried]
    tell: Callable[[Tried], None]
    runs: int
    tried: dict[Setting, Tried] = field(default_factory=dict)

    def look(self, setting: Setting) -> Tried | None:
        """Try a setting, once; None if the search has used up its runs."""
        if setting not in self.tried:
            if len(self.tried) >= self.runs:
                return None
            self.tried[setting] = self.measure(setting)
            self.tell(self.tried[setting])
        return self.tried[setting]

    def climb(self, start: Setting, axes: Sequence[tuple[str, Sequence[Any]]]) -> Tried:
        """The best setting that changes of one field at a time find.

        On each axis the search goes to the next values, up and then down, as long as that pays. After a step that does
        not pay it tries one more, because some changes pay only from a certain size on.
        """
        best = self.look(start)
        assert best is not None
        while True:
            before = best
            for name, values in axes:
                best = self._along(best, name, values)
            if best is before or len(self.tried) >= self.runs:
                return best

    def _along(self, best: Tried, name: str, values: Sequence[Any]) -> Tried:
        for step in (1, -1):
            here = _nearest(values, getattr(best.setting, name))
            missed = 0
            while missed < 2 and 0 <= here + step < len(values):
                here += step
                found = self.look(replace(best.setting, **{name: values[here]}))
                if found is None:
                    return best
                if found.rate > best.rate * BETTER:
                    best, missed = found, 0
                else:
                    missed += 1
        return best

    def front(self) -> list[Tried]:
        """The results that no other beats in throughput, latency and memory, the quickest first."""

        def beats(a: Tried, b: Tried) -> bool:
            if a.best is None or b.best is None:
                return False
            ours, theirs = ((each.rate, -_latency(each), -each.memory_mb) for each in (a, b))
            return all(x >= y for x, y in zip(ours, theirs, strict=True)) and ours != theirs

        able = [each for each in self.tried.values() if each.best is not None]
        found = [each for each in able if not any(beats(other, each) for other in able)]
        return sorted(found, key=lambda each: -each.rate)


def _latency(tried: Tried) -> float:
    return tried.best.p99 if tried.best is not None else float("inf")


def _nearest(values: Sequence[Any], value: Any) -> int:
    """The index of a value, or of the next larger one."""
    known = [-1 if each is None else each for each in values]
    wanted = -1 if value is None else value
    return min(range(len(known)), key=lambda i: (abs(known[i] - wanted), i))


# ---- configurations -------------------------------------------------------------------------------------------------


def setting_of(config: pb.ModelConfig) -> Setting:
    """The setting of a configuration."""
    delay = config.dynamic_batching.max_queue_delay_microseconds if config.HasField("dynamic_batching") else None
    count = sum(max(group.count, 1) for group in config.instance_group) or 1
    text = threads_of(config)
    threads = int(text) if text.isdecimal() else 0
    return Setting(config.max_batch_size, count, delay, threads)


def threads_of(config: pb.ModelConfig) -> str:
    """The configured threads of an instance; empty without the parameter."""
    name = THREADS.get(config.backend, "")
    return config.parameters[name].string_value if name in config.parameters else ""


def applied(config: pb.ModelConfig, setting: Setting) -> pb.ModelConfig:
    """A configuration with a setting."""
    made = pb.ModelConfig()
    made.CopyFrom(config)
    made.max_batch_size = setting.batch
    if setting.delay_us is None:
        made.ClearField("dynamic_batching")
    else:
        made.dynamic_batching.SetInParent()
        made.dynamic_batching.max_queue_delay_microseconds = setting.delay_us
        sizes = list(made.dynamic_batching.preferred_batch_size)
        if sizes == [config.max_batch_size]:
            sizes = []  # from auto-completion, which the server repeats
        made.dynamic_batching.preferred_batch_size[:] = [size for size in sizes if size <= setting.batch]
    if made.instance_group:
        del made.instance_group[1:]
    else:
        made.instance_group.add()
    made.instance_group[0].count = setting.instances
    if made.instance_group[0].name == f"{config.name}_0":
        made.instance_group[0].ClearField("name")  # so are names
    name = THREADS.get(made.backend)
    if name and setting.threads:
        made.parameters[name].string_value = str(setting.threads)
    elif name and name in made.parameters:
        del made.parameters[name]
    return made


def lines(config: pb.ModelConfig, setting: Setting) -> str:
    """The lines for a config.pbtxt."""
    whole = applied(config, setting)
    part = pb.ModelConfig(max_batch_size=whole.max_batch_size, instance_group=whole.instance_group)
    if whole.HasField("dynamic_batching"):
        part.dynamic_batching.CopyFrom(whole.dynamic_batching)
    name = THREADS.get(whole.backend)
    if name and setting.threads:
        part.parameters[name].string_value = str(setting.threads)
    return text_format.MessageToString(part)


def axes_of(config: pb.ModelConfig, start: Setting, wanted: Wanted) -> list[tuple[str, Sequence[Any]]]:
    """The fields to vary and their values, in order."""
    found: list[tuple[str, Sequence[Any]]] = []
    batches = start.batch > 0 and not config.HasField("sequence_batching")
    if batches:
        found.append(("batch", [size for size in BATCHES if size <= wanted.largest_batch]))
    found.append(("instances", list(range(1, wanted.most_instances + 1))))
    if batches:
        found.append(("delay_us", list(DELAYS_US)))
    if config.backend in THREADS:
        found.append(("threads", [0, *(count for count in (1, 2, 4, 8, 16) if count <= (os.cpu_count() or 1))]))
    return found


# ---- a server of its own --------------------------------------------------------------------------------------------


class Trial:
    """A server with a copy of the model, whose configuration can be changed."""

    def __init__(self, wanted: Wanted, folder: Path) -> None:
        self._wanted = wanted
        self._models = folder / "models"
        self._socket = folder / "tune.sock"
        self._log = folder / "log"
        self.reach = Reach(url=f"unix:{self._socket}", timeout=START_SECONDS)
        self._threads = ""  # of the running process
        copy_model(wanted.repository / wanted.model, self._models / wanted.model)

    def __enter__(self) -> Trial:
        self._start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop()

    def _start(self) -> None:
        command = [sys.executable, "-m", "server", "serve", "--model-repository", str(self._models)]
        command += ["--grpc-address", f"unix:{self._socket}", "--model-control-mode", "explicit"]
        command += ["--allow-metrics=false"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, *self._wanted.options], stdout=log, stderr=subprocess.STDOUT)
        ends = time.monotonic() + START_SECONDS
        while time.monotonic() < ends and self._process.poll() is None:
            with contextlib.suppress(CallFailed, InferenceServerException), self.reach.client() as client:
                if client.is_server_live(client_timeout=1):
                    return
            time.sleep(0.05)
        self._stop()
        raise CallFailed(f"the server does not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def config(self) -> pb.ModelConfig:
        """The model's complete configuration."""
        with self.reach.client() as client:
            try:
                client.load_model(self._wanted.model)
                found = client.get_model_config(self._wanted.model).config
            except InferenceServerException as error:
                raise CallFailed(f"model '{self._wanted.model}' cannot be served as it is: {error.message()}") from None
        made = pb.ModelConfig.FromString(found.SerializeToString())
        self._threads = threads_of(made)
        return made

    def serve(self, config: pb.ModelConfig) -> str:
        """Serve the model with a configuration. Returns the reason if that fails, else an empty text.

        Raises:
            CallFailed: the configuration needs a new server process, which does not start.
        """
        if config.backend in OF_PROCESS and threads_of(config) != self._threads:
            self._stop()
            self._start()
            self._threads = threads_of(config)
        (self._models / self._wanted.model / CONFIG).write_text(text_format.MessageToString(config))
        with self.reach.client() as client:
            try:
                client.load_model(self._wanted.model)
            except InferenceServerException as error:
                return str(error.message())
        return ""

    def memory_mb(self) -> int:
        """The memory of the server and its workers: private pages, and their share of shared ones."""
        return sum(_proportional(process) for process in _family(self._process.pid)) >> 20


def copy_model(source: Path, target: Path) -> None:
    """Copy a model's folder, with hard links to its files if possible.

    Raises:
        Misused: the folder does not exist.
    """
    if not source.is_dir():
        raise Misused(f"tune: there is no folder {source}: --model-repository says where models are")
    shutil.copytree(source, target, copy_function=_linked)


def _linked(source: str, target: str) -> None:
    """Link a file instead of copying it if possible, but copy files that the search changes."""
    if Path(source).name != CONFIG:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _family(process: int) -> Iterator[int]:
    yield process
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _proportional(process: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


# ---- all of it ------------------------------------------------------------------------------------------------------


def tune(wanted: Wanted, *, write: bool, out: Path | None) -> int:
    """Search, print the trials and the best one, and with `write` put it into the model's configuration.

    Raises:
        CallFailed: the model cannot be served with its own configuration.
        Misused: the model cannot be tuned.
    """
    with tempfile.TemporaryDirectory(prefix="inferd-tune-") as folder, Trial(wanted, Path(folder)) as trial:
        config = trial.config()
        if config.HasField("ensemble_scheduling") or config.model_transaction_policy.decoupled:
            raise Misused(f"tune: model '{wanted.model}' is an ensemble or decoupled: tune the models that it asks")
        start = setting_of(config)
        search = Search(lambda setting: measured(trial, config, setting, wanted), _tell, wanted.runs)
        print(f"{wanted.model}, as it is: {start.text()}", file=sys.stderr)
        best = search.climb(start, axes_of(config, start, wanted))
    first = search.tried[start]
    _print_front(search)
    if out is not None:
        out.write_text(json.dumps({"tool": "inferd tune", "model": wanted.model, "tried": _as_json(search)}, indent=1))
    if best.best is None:
        print("no tried configuration is within the limits")
        return 1
    gain = f", {best.rate / first.rate:.2f} x what it is" if first.rate else ""
    print(f"\nbest of {len(search.tried)}: {best.setting.text()}: {best.rate:.1f} inferences/s{gain}\n")
    print(lines(config, best.setting))
    if write:
        _write(wanted.repository / wanted.model, config, best.setting)
    return 0


def measured(trial: Trial, config: pb.ModelConfig, setting: Setting, wanted: Wanted) -> Tried:
    """Serve the model with a setting by the trial's server, and put it under load."""
    if problem := trial.serve(applied(config, setting)):
        return Tried(setting, None, 0, problem)
    plan = LoadPlan(
        model=wanted.model,
        percentile=wanted.percentile,
        limit_ms=wanted.latency_ms,
        window=wanted.window,
        warm_up=wanted.window,
        stability=0.05,
        trials=4,
        shapes=wanted.shapes,
        data=wanted.data,
    )
    levels: list[Level] = []
    for level in wanted.levels:
        found = levels_of(trial.reach, replace(plan, concurrency=Range(level, level, 1)))[0]
        if found.errors:
            return Tried(setting, None, trial.memory_mb(), found.sample or "calls failed")
        levels.append(found)
        if not best_of([found], plan):
            break
    memory = trial.memory_mb()
    best = next(iter(best_of(levels, plan)), None)
    if wanted.memory_mb and memory > wanted.memory_mb:
        return Tried(setting, None, memory, f"{memory} MiB of memory")
    return Tried(setting, best, memory, "" if best else "no level is within the latency budget")


def _tell(tried: Tried) -> None:
    if tried.best is None:
        said = tried.problem.splitlines()[0]
    else:
        said = f"{tried.rate:.1f} inferences/s at {tried.best.level:g} in flight, p99 {tried.best.p99 / 1e3:.2f} ms"
        said += f", {tried.memory_mb} MiB"
    print(f"  {tried.setting.text()}: {said}", file=sys.stderr, flush=True)


def _print_front(search: Search) -> None:
    rows = [
        (
            each.setting.text(),
            f"{each.rate:.1f}",
            f"{each.best.level:g}",
            f"{each.best.p50 / 1e3:.2f}",
            f"{each.best.p99 / 1e3:.2f}",
            each.memory_mb,
        )
        for each in search.front()
        if each.best is not None
    ]
    if rows:
        print("nothing that was tried is better than these in throughput, latency and memory:\n")
        print(table(("setting", "inferences/s", "in flight", "p50 ms", "p99 ms", "MiB"), rows, "lrrrrr"))


def _as_json(search: Search) -> list[Mapping[str, Any]]:
    return [
        {
            "batch": setting.batch,
            "instances": setting.instances,
            "delay_us": setting.delay_us,
            "threads": setting.threads,
            "memory_mb": tried.memory_mb,
            "problem": tried.problem,
            "level": tried.best.as_dict() if tried.best else None,
        }
        for setting, tried in search.tried.items()
    ]


def _write(folder: Path, completed: pb.ModelConfig, setting: Setting) -> None:
    """Change the model's config.pbtxt, and keep the former one beside it."""
    path = folder / CONFIG
    config = completed
    if path.exists():
        config = text_format.Parse(path.read_text(), pb.ModelConfig())
        config.backend = config.backend or completed.backend
        shutil.copyfile(path, path.with_name(f"{CONFIG}.before-tune"))
    path.write_text("# Changed by `inferd tune`.\n" + text_format.MessageToString(applied(config, setting)))
    print(f"written: {path}")
