"""How cost grows with the work: curves that must stay flat.

    python -m bench.growth [--only pool|models|kinds|ready|statistics|index|polls|stops|graphs|tensors|parameters|split|
                            responses|reloads|shapes|cache|connections|http2|streams|regions|steps|calls] [--record]

Each curve is printed with the figures of the last record beside it and with its slope: the power of the size by which
its unit cost grows. A cost that is the same for each byte, or for each model, has a slope of 0. CPU time is that of the
process or of the loop's thread, so other work on the machine disturbs it less than it would disturb wall-clock time;
the other counts are exact. All but the last six run in one process without a transport.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import platform
import resource as system
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import growth_models, growth_served
from bench.curves import Curve, Point
from bench.growth_goals import GOALS
from bench.growth_models import MODEL, resident, served
from inferd._native.memory import resource
from inferd._native.service.ticket import CallOrigin
from inferd.backends.loader import BackendLoader
from inferd.server.app import SWITCH_INTERVAL
from inferd.server.caching import LocalCache
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.machine import usable_memory
from inferd_client.pb import grpc_service_pb2 as pb

RESULTS = Path(__file__).parent / "results" / "growth.json"
PAGE = RESULTS.with_suffix(".md")
MIB = 1 << 20
SIZES = (1 << 10, 64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
TENSORS = (16, 128, 1024, 4096)
PARAMETERS = (16, 256, 4096, 16384)
ROWS = (16, 128, 1024, 8192)
RESPONSES = (100, 1000, 10_000, 100_000)
RELOADS = (2, 8, 32, 128)
SHAPES = (1, 2, 5, 10, 20, 50)
HITS = (4 << 10, 64 << 10, MIB, 4 * MIB, 16 * MIB)
IN_FLIGHT = 640
REQUESTS = 6400


def pool() -> Curve:
    """Blocks that are taken, written, read by a copy and given back, after a burst of another size filled the pool."""
    resource.keep_at_most(max(128 * MIB, usable_memory() // 8))
    points = []
    for size in SIZES:
        burst = [resource.host().take(7 * MIB) for _ in range(32)]
        burst.clear()
        rounds = max(5, min(2000, 256 * MIB // size))
        _use(size)
        faults, started = system.getrusage(system.RUSAGE_THREAD).ru_minflt, time.thread_time_ns()
        for _ in range(rounds):
            _use(size)
        spent = time.thread_time_ns() - started
        faults = system.getrusage(system.RUSAGE_THREAD).ru_minflt - faults
        points.append(Point(size, spent / rounds / size, faults / rounds))
    resource.trim()
    title = "a block written and given back after 32 x 7 MiB"
    return Curve("pool", title, "ns of CPU a byte", tuple(points), "page faults")


def _use(size: int) -> None:
    block = resource.host().take(size)
    ctypes.memset(block.address, 1, size)


# ---- requests -------------------------------------------------------------------------------------------------------


async def _answered(engine: Engine, message: bytes, rounds: int) -> int:
    """Nanoseconds of the loop's thread to submit the message, the least of several rounds."""
    best = 1 << 62
    for _ in range(rounds):
        done = asyncio.Event()
        message = bytes(bytearray(message))  # as if it had just come

        def deliver(status: int, text: str, _: bytes | None, done: asyncio.Event = done) -> None:
            assert status == 0, text
            done.set()

        before = time.thread_time_ns()
        engine.infer.submit(message, deliver)
        best = min(best, time.thread_time_ns() - before)
        await done.wait()
    return best


def _tensors(kind: str, prefix: str, count: int) -> str:
    optional = "optional: true" if kind == "input" else ""
    return "".join(
        f'{kind} {{ name: "{prefix}{number}" data_type: TYPE_INT64 dims: [ 1 ] {optional} }}\n'
        for number in range(count)
    )


def tensors() -> Curve:
    """Inputs and outputs that a request names, the last first."""

    async def ask(count: int) -> Point:
        message = pb.ModelInferRequest(model_name="m0")
        for number in reversed(range(count)):
            message.inputs.add(name=f"x{number}", datatype="INT64", shape=(1,))
            message.raw_input_contents.append(bytes(8))
            message.outputs.add(name=f"y{number}")
        text = f'backend: "identity"\n{_tensors("input", "x", count)}{_tensors("output", "y", count)}'
        async with served(text) as engine:
            await engine.start()
            return Point(count, await _answered(engine, message.SerializeToString(), 50) / count)

    points = tuple(asyncio.run(ask(count)) for count in TENSORS)
    return Curve("tensors", "a request by its inputs, each output named", "ns of CPU an input", points)


def parameters() -> Curve:
    """Parameters of the wrong type that later ones replace."""

    async def ask(count: int) -> Point:
        message = pb.ModelInferRequest(model_name="m0")
        message.inputs.add(name="x", datatype="INT64", shape=(1,))
        message.raw_input_contents.append(bytes(8))
        encoded = message.SerializeToString()
        for value in (pb.InferParameter(uint64_param=1), pb.InferParameter(int64_param=1)):
            for number in range(count):
                one = pb.ModelInferRequest()
                one.parameters[f"key {number}"].CopyFrom(value)
                encoded += one.SerializeToString()
        async with served(MODEL) as engine:
            await engine.start()
            return Point(count, await _answered(engine, encoded, 50) / count / 2)

    points = tuple(asyncio.run(ask(count)) for count in PARAMETERS)
    return Curve("parameters", "wrong parameters that later ones replace", "ns of CPU a parameter", points)


def split() -> Curve:
    """Rows of a request that is split into batches of at most 8."""
    text = f"""{MODEL}
max_batch_size: 8
parameters {{ key: "split_requests" value {{ string_value: "true" }} }}
"""

    async def ask(count: int) -> Point:
        message = pb.ModelInferRequest(model_name="m0")
        message.inputs.add(name="x", datatype="INT64", shape=(count, 1))
        message.raw_input_contents.append(bytes(8 * count))
        async with served(text) as engine:
            await engine.start()
            return Point(count, await _answered(engine, message.SerializeToString(), 50) / count)

    points = tuple(asyncio.run(ask(count)) for count in ROWS)
    return Curve("split", "a request that is split, by its rows", "ns of CPU a row", points)


def responses() -> Curve:
    """Responses of a decoupled model to one request, each taken on arrival."""

    async def ask(count: int) -> Point:
        message = pb.ModelInferRequest(model_name="m0")
        message.inputs.add(name="x", datatype="INT64", shape=(count,))
        message.raw_input_contents.append(bytes(8 * count))
        async with served(f"{MODEL}model_transaction_policy {{ decoupled: true }}\n") as engine:
            await engine.start()
            done, first = asyncio.Event(), resident()
            come, most, tickets = 0, 0.0, []

            def deliver(status: int, text: str, response: bytes | None) -> None:
                nonlocal come, most
                assert status == 0, text
                come += 1
                if come % 500 == 0:
                    most = max(most, resident() - first)
                if response is not None:
                    tickets[0].taken()
                if tickets[0].done:
                    done.set()

            before = time.process_time_ns()
            tickets.append(engine.infer.submit(message.SerializeToString(), deliver, CallOrigin(stream=True)))
            await done.wait()
            return Point(count, (time.process_time_ns() - before) / count, most)

    points = tuple(asyncio.run(ask(count)) for count in RESPONSES)
    return Curve("responses", "responses of a decoupled model", "ns of CPU a response", points, "KiB more")


def reloads() -> Curve:
    """Reloads of a model, each with another number of instances, while 64 requests are in flight."""

    def kept() -> int:
        return sum(len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task"))  # noqa: PTH208

    async def ask(count: int) -> Point:
        message = pb.ModelInferRequest(model_name="m0")
        message.inputs.add(name="x", datatype="INT64", shape=(1,))
        message.raw_input_contents.append(bytes(8))
        encoded = message.SerializeToString()
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "m0")
            (root / "1").mkdir(parents=True)
            (root / "config.pbtxt").write_text(MODEL)
            engine = Engine([Path(folder)], BackendLoader(), Options(), control=ModelControl(ControlMode.EXPLICIT))
            await engine.start()
            await engine.load("m0")
            await asyncio.sleep(1)  # idle threads end
            running = True

            def deliver(status: int, text: str, _: bytes | None) -> None:
                assert status == 0, text
                if running:
                    engine.infer.submit(encoded, deliver)

            before, spent = kept(), time.process_time()
            for _ in range(64):
                engine.infer.submit(encoded, deliver)
            for number in range(count):
                (root / "1" / "file").write_text("x" * (number // 2))
                (root / "config.pbtxt").write_text(f"{MODEL}instance_group {{ count: {1 + (number + 1) % 2} }}\n")
                await engine.load("m0")
            running = False
            spent = time.process_time() - spent
            await asyncio.sleep(1)
            left = kept() - before
            await engine.close()
            return Point(count, 1000 * spent / count, left)

    points = tuple(asyncio.run(ask(count)) for count in RELOADS)
    return Curve("reloads", "reloads under load", "ms of CPU a reload", points, "descriptors and threads left")


def shapes() -> Curve:
    """Requests of several shapes in turn, 640 in flight, for a model that takes 1 ms for a batch of at most 64."""
    text = f"""{MODEL}
max_batch_size: 64
dynamic_batching {{ }}
parameters {{ key: "gather" value {{ string_value: "true" }} }}
parameters {{ key: "delay_us" value {{ string_value: "1000" }} }}
"""

    async def ask(count: int) -> Point:
        messages = []
        for width in range(1, count + 1):
            message = pb.ModelInferRequest(model_name="m0")
            message.inputs.add(name="x", datatype="INT64", shape=(1, width))
            message.raw_input_contents.append(bytes(8 * width))
            messages.append(message.SerializeToString())
        async with served(text) as engine:
            await engine.start()
            await _answered(engine, messages[0], 1)
            done, left, begun = asyncio.Event(), REQUESTS, 0

            def deliver(status: int, text: str, _: bytes | None) -> None:
                nonlocal left, begun
                assert status == 0, text
                left -= 1
                if left == 0:
                    done.set()
                if begun < REQUESTS:
                    begun += 1
                    engine.infer.submit(messages[begun % count], deliver)

            before, batches = time.process_time(), engine.model("m0").statistics().execution_count
            for _ in range(IN_FLIGHT):
                begun += 1
                engine.infer.submit(messages[begun % count], deliver)
            await done.wait()
            spent = time.process_time() - before
            batches = engine.model("m0").statistics().execution_count - batches
            return Point(count, 1e6 * spent / REQUESTS, REQUESTS / batches)

    points = tuple(asyncio.run(ask(count)) for count in SHAPES)
    return Curve("shapes", "shapes that come in turn", "us of CPU a request", points, "requests a batch")


def cache() -> Curve:
    """Hits of the response cache by the bytes of the input."""
    text = f"{MODEL}response_cache {{ enable: true }}\n"

    async def ask(size: int) -> Point:
        message = pb.ModelInferRequest(model_name="m0")
        message.inputs.add(name="x", datatype="INT64", shape=(size // 8,))
        message.raw_input_contents.append(bytes(size))
        async with served(text, cache=LocalCache(256 * MIB)) as engine:
            await engine.start()
            spent = await _answered(engine, message.SerializeToString(), 50)
            assert engine.infer.reuse()["hits"] == 49
            return Point(size, spent / size)

    points = tuple(asyncio.run(ask(size)) for size in HITS)
    return Curve("cache", "hits of the cache", "ns of CPU a byte", points)


CURVES: dict[str, Callable[[], Curve]] = {
    "pool": pool,
    "models": growth_models.models,
    "kinds": growth_models.kinds,
    "ready": growth_models.ready,
    "statistics": growth_models.statistics,
    "index": growth_models.index,
    "polls": growth_models.polls,
    "stops": growth_models.stops,
    "graphs": growth_models.graphs,
    "tensors": tensors,
    "parameters": parameters,
    "split": split,
    "responses": responses,
    "reloads": reloads,
    "shapes": shapes,
    "cache": cache,
    "connections": growth_served.connections,
    "http2": growth_served.http2,
    "streams": growth_served.streams,
    "regions": growth_served.regions,
    "steps": growth_served.steps,
    "calls": growth_served.calls,
}


def lines(curve: Curve, before: dict[str, float]) -> list[str]:
    """The curve as a table."""
    heads = ["size", curve.unit, "last record", *([curve.counted] if curve.counted else [])]
    out = [f"## {curve.name}: {curve.title}", "", f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    for point in curve.points:
        last = f"{before[str(point.size)]:.3f}" if str(point.size) in before else "-"
        cells = [f"{point.size:,}", f"{point.cost:.3f}", last, *([f"{point.counted:.1f}"] if curve.counted else [])]
        out.append(f"| {' | '.join(cells)} |")
    return [*out, "", f"slope {curve.slope:+.2f}", ""]


def page(known: dict[str, dict[str, Any]], note: str) -> list[str]:
    """All curves that are recorded, as a text."""
    cores = len(os.sched_getaffinity(0))
    out = [
        f"# Growth, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python -m bench.growth`; {cores} cores, {platform.machine()}, Linux {platform.release()}. {note}",
        "",
    ]
    curves: dict[str, Curve] = {}
    for name in filter(known.__contains__, CURVES):
        fields = {key: value for key, value in known[name].items() if key != "before"}
        curves[name] = Curve(**{**fields, "points": tuple(Point(**point) for point in fields["points"])})
    out += summary(curves)
    for name, curve in curves.items():
        out += lines(curve, known[name].get("before", {}))
    return out


def summary(curves: Mapping[str, Curve]) -> list[str]:
    """A line for each curve: its goal, its ends, and what guards it."""
    out = ["| curve | goal | least size | most | slope | guarded by |", "|---|---|---:|---:|---:|---|"]
    remarks: list[str] = []
    for name, curve in curves.items():
        goal = GOALS[name]
        first, last = curve.points[0], curve.points[-1]
        costs = [f"{point.cost:.3g} {curve.unit.split()[0]} at {point.size:,}" for point in (first, last)]
        tests = ", ".join(f"`{test}`" for test in goal.tests) or "-"
        out.append(f"| {name} | {goal.text} | {' | '.join(costs)} | {curve.slope:+.2f} | {tests} |")
        if goal.remark:
            remarks += [f"**{name}**: {goal.remark}", ""]
    return [*out, "", *remarks]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=CURVES)
    parser.add_argument("--record", action="store_true", help="write bench/results/growth.md and growth.json")
    parser.add_argument("--note", default="", help="of the machine, for the record")
    given = parser.parse_args(arguments)
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    sys.setswitchinterval(SWITCH_INTERVAL)  # as in a server: loading threads wait as long for a busy loop
    for name in [given.only] if given.only else CURVES:
        before = {str(point["size"]): point["cost"] for point in known.get(name, {}).get("points", ())}
        curve = CURVES[name]()
        known[name] = {**asdict(curve), "before": before}
        print("\n".join(lines(curve, before)), flush=True)
    if given.record:
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        PAGE.write_text("\n".join(page(known, given.note)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
