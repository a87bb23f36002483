"""How the cost of many models grows: to start them, to ask about all of them, to stop."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import cast

from bench.curves import Curve, Point
from inferd._native.model_files import Watch
from inferd.backends.loader import BackendLoader
from inferd.server.caching import LocalCache
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.housekeeping.collecting import set_aside
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.engine.repository.sources import Repositories
from inferd.server.rpc.call import Call
from inferd.server.rpc.metadata import Identity, Information
from inferd.server.rpc.repository import Repository
from inferd_client.pb import grpc_service_pb2 as pb

MODELS = (100, 400, 1600, 6400, 10_000)
POLLED = (50, 400, 1600, 10_000)
DEPTHS = (2, 4, 8, 16)
PAUSE = 0.001
TENSORS = """
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
"""
MODEL = f"""
backend: "identity"
{TENSORS}"""
STEP = """
step { model_name: "%s" model_version: -1
  input_map { key: "x" value: "%s" } output_map { key: "y" value: "%s" } }
"""


def write_models(folder: Path, text: str, count: int) -> None:
    """Write a repository of `count` models: see `served`."""
    for number in range(count):
        path = folder / f"m{number}"
        (path / "1").mkdir(parents=True)
        (path / "config.pbtxt").write_text(text.replace("%d", str(number)))


@asynccontextmanager
async def served(text: str, count: int = 1, cache: LocalCache | None = None) -> AsyncIterator[Engine]:
    """An engine, not started, with `count` models of this configuration: m0 and so on.

    Args:
        text: the configuration; "%d" in it is the number of the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), text, count)
        engine = Engine([Path(folder)], BackendLoader(), Options(), cache=cache)
        try:
            yield engine
        finally:
            await engine.close()


def resident() -> float:
    """KiB of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1024


def _starts(name: str, title: str, text: str) -> Curve:
    """Models of this configuration loaded at the start of an engine."""

    async def start(count: int) -> Point:
        async with served(text, count) as engine:
            memory, before = resident(), time.process_time()
            await engine.start()
            return Point(count, 1000 * (time.process_time() - before) / count, (resident() - memory) / count)

    points = tuple(asyncio.run(start(count)) for count in MODELS)
    return Curve(name, title, "ms of CPU a model", points, "KiB a model")


def models() -> Curve:
    """Identity models that differ in nothing but their names."""
    return _starts("models", "start of an engine", MODEL)


def kinds() -> Curve:
    """Identity models of which no two are alike."""
    return _starts("kinds", "start of an engine, no two models alike", MODEL.replace('"x"', '"x%d"'))


def ready() -> Curve:
    """ServerReady, for models without a readiness check of their own."""

    async def ask(count: int) -> Point:
        async with served(MODEL, count) as engine:
            await engine.start()
            before = time.thread_time_ns()
            for _ in range(1000):
                assert await engine.check()
            return Point(count, (time.thread_time_ns() - before) / 1e6)

    return Curve("ready", "ServerReady, by models", "us of CPU a call", tuple(asyncio.run(ask(n)) for n in POLLED))


class Anyone:
    """The call of a client that may use every model."""

    def may_use(self, _: str) -> bool:
        return True


def _polled(name: str, title: str, poll: Callable[[Engine], Awaitable[object]]) -> Curve:
    """The cost of asking about all models, in slices: time of the loop's thread, and of all threads."""

    async def ask(count: int) -> Point:
        async with served(MODEL, count) as engine:
            await engine.start(set_aside)  # as a server does
            await poll(engine)
            before, all_before = time.thread_time_ns(), time.process_time_ns()
            for _ in range(5):
                await poll(engine)
            spent, all_spent = time.thread_time_ns() - before, time.process_time_ns() - all_before
            return Point(count, spent / 5e3 / count, all_spent / 5e3 / count)

    points = tuple(asyncio.run(ask(count)) for count in POLLED)
    return Curve(name, title, "us of the loop a model", points, "us of all threads")


def statistics() -> Curve:
    """ModelStatistics of all models, encoded."""

    def poll(engine: Engine) -> Awaitable[object]:
        call = cast(Call, Anyone())
        return Information(engine, Identity()).model_statistics(pb.ModelStatisticsRequest(), call)

    return _polled("statistics", "ModelStatistics of all models", poll)


def index() -> Curve:
    """RepositoryIndex, encoded."""

    def poll(engine: Engine) -> Awaitable[object]:
        return Repository(engine).index(pb.RepositoryIndexRequest(), cast(Call, Anyone()))

    return _polled("index", "RepositoryIndex of all models", poll)


def polls() -> Curve:
    """A look at all files of models that have not changed, as with --model-control-mode=poll."""

    def ask(count: int) -> Point:
        with tempfile.TemporaryDirectory() as folder:
            write_models(Path(folder), MODEL, count)
            repositories, watch = Repositories([Path(folder)]), Watch()
            first = repositories.look(watch)
            before, system = time.process_time_ns(), getrusage(RUSAGE_SELF).ru_stime
            for _ in range(5):
                assert repositories.look(watch) == first
            spent, system = time.process_time_ns() - before, getrusage(RUSAGE_SELF).ru_stime - system
            return Point(count, spent / 5e3 / count, 1e6 * system / 5 / count)

    title = "a look at models that have not changed"
    return Curve("polls", title, "us of CPU a model", tuple(map(ask, POLLED)), "us of the system's")


# ---- stops and loads ------------------------------------------------------------------------------------------------


def stops() -> Curve:
    """A stop of an engine, and how long other callbacks waited for the loop."""

    async def stop(count: int) -> Point:
        longest = 0.0

        async def others() -> None:
            nonlocal longest
            while True:
                before = time.perf_counter() + PAUSE
                await asyncio.sleep(PAUSE)
                longest = max(longest, time.perf_counter() - before)

        async with served(MODEL, count) as engine:
            await engine.start(set_aside)
            beside = asyncio.ensure_future(others())
            before = time.process_time()
            await engine.close()
            spent = time.process_time() - before
            beside.cancel()
            with suppress(asyncio.CancelledError):
                await beside
            return Point(count, 1000 * spent / count, 1000 * longest)

    points = tuple(asyncio.run(stop(count)) for count in POLLED)
    return Curve("stops", "stop of an engine, by models", "ms of CPU a model", points, "longest turn, ms")


def graphs() -> Curve:
    """A load of a model under layers of two ensembles, each of which has both of the layer below as its steps."""

    async def load(depth: int) -> Point:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for number in range(2 * depth + 2):
                below = number // 2 * 2 - 2
                steps = STEP % (f"m{below}", "x", "z") + STEP % (f"m{below + 1}", "z", "y")
                ensemble = f'platform: "ensemble" ensemble_scheduling {{ {steps} }} {TENSORS}'
                path = root / f"m{number}"
                (path / "1").mkdir(parents=True)
                (path / "config.pbtxt").write_text(ensemble if number > 1 else MODEL)
            control = ModelControl(ControlMode.EXPLICIT, (ALL,))
            engine = Engine([root], BackendLoader(), Options(), control=control)
            await engine.start()
            engine.subscribe(lambda *_: None)
            (root / "m0" / "2").mkdir()
            before = time.thread_time_ns()
            await engine.load("m0")
            spent = time.thread_time_ns() - before
            await engine.close()
            return Point(depth, spent / 1e3 / (2 * depth))

    points = tuple(asyncio.run(load(depth)) for depth in DEPTHS)
    title = "load of a model under layers of two ensembles"
    return Curve("graphs", title, "us of the loop an ensemble", points)
