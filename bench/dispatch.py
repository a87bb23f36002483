"""How well instances are used: idle time while requests wait, throughput of many instances, shares of a resource.

    nice -n -5 python -m bench.dispatch

Idle: an engine in this process gets requests at random times, for models that sleep for random times. The figure is the
time that each request waited beyond its model's delay although fewer instances executed than may execute at once.
Throughput: N instances of a model that sleeps 5 ms serve N times as much as one. Shares: two models that always have
requests and share a resource execute in inverse proportion to their priorities. All figures contain the wake-ups of a
busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import inferd, messages
from bench.adaptive import statistics
from bench.processes import ServerProcess
from bench.repository import Identity, write
from inferd._native.execution.python_batch import Batch
from inferd.backends.api import Backend, Instance, InstanceSpec, Model, ModelSource
from inferd.backends.loader import BackendLoader
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.instances.resources import Resources
from inferd.server.pb import grpc_service_pb2 as pb
from inferd_client.driver import Driver, Fixed

SLEEP_US = 5000
COUNTS = (1, 2, 4, 8, 16, 32, 64)
RATE = 400.0  # requests a second; executions take as long as that needs
BUSY = 0.7  # of the time of the instances
RESOURCE = 'rate_limiter {{ priority: {priority} resources {{ name: "R" count: 1 }} }}'


# -- idle time beside requests that wait --


@dataclass
class Sleeper(Backend):
    """Its models answer with their input after a random time; it notes when."""

    name = "sleeper"
    mean: float = 0.0  # seconds
    executions: list[tuple[int, int, list[int]]] = field(default_factory=list)  # begin, end, numbers of the requests

    def __post_init__(self) -> None:
        super().__init__()

    def load(self, _source: ModelSource) -> Model:
        return SleepingModel(self)


@dataclass
class SleepingModel(Model):
    sleeper: Sleeper

    def create_instance(self, _spec: InstanceSpec) -> Instance:
        return SleepingInstance(self.sleeper)


@dataclass
class SleepingInstance(Instance):
    sleeper: Sleeper

    def execute(self, batch: Batch) -> None:
        begin = time.monotonic_ns()
        view = batch.input("x")
        assert view is not None
        numbers: Any = view.numpy()
        time.sleep(random.uniform(0.5, 1.5) * self.sleeper.mean)
        batch.set_output("y", numbers)
        self.sleeper.executions.append((begin, time.monotonic_ns(), numbers.ravel().tolist()))


class Loader(BackendLoader):
    """Has the sleeper."""

    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__()
        self.sleeper = sleeper

    def backend(self, name: str) -> Backend:
        return self.sleeper if name == "sleeper" else super().backend(name)


@dataclass(frozen=True)
class Case:
    """One kind of model."""

    title: str
    delay_us: int = 0
    levels: int = 0
    limited: bool = False

    def config(self, instances: int) -> str:
        """The text of config.pbtxt."""
        batching = f"max_queue_delay_microseconds: {self.delay_us}"
        if self.levels:
            batching += f" priority_levels: {self.levels} default_priority_level: 1"
        limiter = RESOURCE.format(priority=1) if self.limited else ""
        return (
            'backend: "sleeper"\nmax_batch_size: 4\n'
            'input { name: "x" data_type: TYPE_INT64 dims: [ 1 ] }\n'
            'output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }\n'
            f"instance_group {{ kind: KIND_CPU count: {instances} {limiter} }}\n"
            f"dynamic_batching {{ {batching} }}\n"
        )


CASES = (
    Case("no delay"),
    Case("delay of 5 ms", delay_us=5000),
    Case("three levels", levels=3),
    Case("resources for half", limited=True),
    Case("delay and resources", delay_us=5000, limited=True),
)


def message(number: int, levels: int) -> bytes:
    """A request of one row."""
    out = pb.ModelInferRequest(model_name="m")
    out.inputs.add(name="x", datatype="INT64", shape=[1, 1])
    out.raw_input_contents.append(np.int64(number).tobytes())
    if levels:
        out.parameters["priority"].uint64_param = random.randint(1, levels)
    return out.SerializeToString()


async def submitted(engine: Engine, case: Case, seconds: float) -> dict[int, int]:
    """Send requests at random times, alone and in bursts, and cancel some; return the arrivals of those that stayed."""
    came: dict[int, int] = {}
    answered: list[asyncio.Future[None]] = []
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        for _ in range(random.choice((1, 1, 1, 6))):
            number += 1
            body = message(number, case.levels)
            answer = asyncio.get_running_loop().create_future()
            came[number] = time.monotonic_ns()
            ticket = engine.submit(body, lambda *_, answer=answer: answer.set_result(None), timeout_ns=-1)
            if random.random() < 0.05:
                ticket.cancel()
                del came[number]
            else:
                answered.append(answer)
        await asyncio.sleep(random.expovariate(RATE / 2.25))
    await asyncio.gather(*answered)
    return came


class IdleTime:
    """For any time: how long fewer than `usable` executions were under way until then."""

    def __init__(self, executions: Sequence[tuple[int, int, list[int]]], usable: int) -> None:
        changes = sorted([(begin, 1) for begin, _, _ in executions] + [(end, -1) for _, end, _ in executions])
        self.times, self.idle, self.usable = [0], [0], usable
        self.busy, busy = [0], 0
        for at, change in changes:
            self.idle.append(self.until(at))
            busy += change
            self.times.append(at)
            self.busy.append(busy)

    def until(self, at: int) -> int:
        """Nanoseconds."""
        last = bisect_right(self.times, at, hi=len(self.idle)) - 1
        return self.idle[last] + (at - self.times[last] if self.busy[last] < self.usable else 0)


async def idle_times(case: Case, instances: int, seconds: float) -> list[float]:
    """For each request in ms."""
    sleeper = Sleeper(mean=BUSY * instances / RATE * (0.5 if case.limited else 1.0))
    usable = max(1, instances // 2) if case.limited else instances
    hardware = Hardware(resources=Resources({("R", None): usable})) if case.limited else None
    with tempfile.TemporaryDirectory(prefix="inferd-dispatch-") as folder:
        (Path(folder) / "m" / "1").mkdir(parents=True)
        (Path(folder) / "m" / "config.pbtxt").write_text(case.config(instances))
        engine = Engine([Path(folder)], Loader(sleeper), Options(), hardware=hardware)
        try:
            problems = await engine.start()
            if problems:
                raise RuntimeError(str(problems))
            came = await submitted(engine, case, seconds)
        finally:
            await engine.close()
    idle = IdleTime(sleeper.executions, usable)
    return [
        (idle.until(begin) - idle.until(due)) / 1e6 if begin > (due := came[number] + case.delay_us * 1000) else 0.0
        for begin, _, numbers in sleeper.executions
        for number in numbers
        if number in came
    ]


def print_idle(counts: Sequence[int], seconds: float) -> None:
    print("| model | instances | requests | idle beside one, ms: p50 | p99 | most |\n|---|---:|---:|---:|---:|---:|")
    for case in CASES:
        for count in counts:
            if count == 1:
                continue
            found = sorted(asyncio.run(idle_times(case, count, seconds)))
            cells = (found[len(found) // 2], found[int(len(found) * 0.99)], found[-1])
            numbers = " | ".join(f"{cell:.2f}" for cell in cells)
            print(f"| {case.title} | {count} | {len(found)} | {numbers} |", flush=True)


# -- throughput of many instances --


def sleeping(name: str, instances: int, *, batching: str = "", limited: bool = False) -> str:
    """config.pbtxt of a native model that sleeps."""
    model = Identity(name, (("FP32", 1),), 1, batching, instances, {"delay_us": str(SLEEP_US)})
    limiter = RESOURCE.format(priority=1) if limited else ""
    return model.config().replace("kind: KIND_CPU", f"kind: KIND_CPU {limiter}")


WAYS = {
    "plain": "",
    "delay": "dynamic_batching { max_queue_delay_microseconds: 2000 }",
    "limited": "",
}


def throughput_repository(folder: Path, counts: Sequence[int]) -> Path:
    for way, batching in WAYS.items():
        for count in counts:
            model = Identity(f"{way}_{count}", (("FP32", 1),))
            write(folder, [model])
            text = sleeping(model.name, count, batching=batching, limited=way == "limited")
            (folder / model.name / "config.pbtxt").write_text(text)
    return folder


def rate(server: ServerProcess, name: str, instances: int, seconds: float) -> float:
    """Requests per second while twice as many wait as execute."""
    with Driver(server.address, connections=1) as driver:
        workload = Fixed([messages.identity(64, name).request])
        driver.run(workload, in_flight=3 * instances, seconds=seconds / 4)
        report = driver.run(workload, in_flight=3 * instances, seconds=seconds)
    return report.rate


def print_throughput(counts: Sequence[int], seconds: float) -> None:
    print("| model that sleeps 5 ms | instances | requests/s | of N x one |\n|---|---:|---:|---:|")
    for way in WAYS:
        one = 0.0
        for count in counts:
            with tempfile.TemporaryDirectory(prefix="inferd-dispatch-") as folder:
                options = (
                    ("--rate-limit=execution_count", f"--rate-limit-resource=R:{count}") if way == "limited" else ()
                )
                root = throughput_repository(Path(folder) / "models", (count,))
                server = inferd.start(root, Path(folder) / "log", options=options)
                try:
                    found = rate(server, f"{way}_{count}", count, seconds)
                finally:
                    server.stop()
            one = one or found / count
            print(f"| {way} | {count} | {found:,.0f} | {100 * found / count / one:.1f} % |", flush=True)


# -- shares of a resource --


def print_shares(seconds: float) -> None:
    print("| priorities | executions | share of the first | by priority |\n|---|---|---:|---:|")
    for priorities in ((1, 1), (1, 2), (1, 4), (2, 3)):
        with tempfile.TemporaryDirectory(prefix="inferd-dispatch-") as folder:
            root = Path(folder) / "models"
            for number, priority in enumerate(priorities):
                name = f"m{number}"
                write(root, [Identity(name, (("FP32", 1),))])
                text = sleeping(name, 1, limited=True).replace("priority: 1", f"priority: {priority}")
                (root / name / "config.pbtxt").write_text(text)
            options = ("--rate-limit=execution_count", "--rate-limit-resource=R:1")
            server = inferd.start(root, Path(folder) / "log", options=options)
            try:
                first, second = contended(server, seconds)
            finally:
                server.stop()
        share = first / max(1, first + second)
        expected = (1 / priorities[0]) / (1 / priorities[0] + 1 / priorities[1])
        print(f"| {priorities[0]} : {priorities[1]} | {first} : {second} | {share:.3f} | {expected:.3f} |", flush=True)


def contended(server: ServerProcess, seconds: float) -> tuple[int, int]:
    """Executions of m0 and m1 in a time during which both always have requests."""
    requests = [messages.identity(64, name).request for name in ("m0", "m1")]
    with Driver(server.address, connections=1) as first, Driver(server.address, connections=1) as second:
        threads = [
            threading.Thread(
                target=driver.run, args=(Fixed([body]),), kwargs={"in_flight": 8, "seconds": seconds * 1.5}
            )
            for driver, body in ((first, requests[0]), (second, requests[1]))
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 4)
        before = [statistics(server, name).execution_count for name in ("m0", "m1")]
        time.sleep(seconds)
        after = [statistics(server, name).execution_count for name in ("m0", "m1")]
        for thread in threads:
            thread.join()
    return after[0] - before[0], after[1] - before[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each row")
    parser.add_argument("--instances", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--part", choices=("idle", "throughput", "shares"), action="append")
    arguments = parser.parse_args()
    parts = arguments.part or ("idle", "throughput", "shares")
    if "idle" in parts:
        print_idle(arguments.instances, arguments.seconds)
    if "throughput" in parts:
        print_throughput(arguments.instances, arguments.seconds)
    if "shares" in parts:
        print_shares(arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
