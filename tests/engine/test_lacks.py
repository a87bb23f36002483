"""Guards what becomes of a load for which the system has no descriptor, thread or memory.

Nothing is wrong with the model: the answer is RESOURCE_EXHAUSTED and says what to raise. A poll takes no model for
changed because it cannot be looked at.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.errors import Exhausted, ServerError, Status
from tests.engine.serving import CONFIG, Counting, Loader, echo, poll, serving

EXPLICIT = ModelControl(ControlMode.EXPLICIT)


pytestmark = pytest.mark.usefixtures("native_counters")


@contextmanager
def descriptors(free: int) -> Iterator[None]:
    """Let this process open so many more files inside of the block."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, usual[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


ENOUGH = 64  # descriptors, for any load here


async def refusals(engine, *arguments) -> list[ServerError]:
    """The answers of loads with one more descriptor each, until one succeeds."""
    found: list[ServerError] = []
    for free in range(ENOUGH):
        with descriptors(free):
            try:
                await engine.load("m", *arguments)
            except ServerError as error:
                found.append(error)
            else:
                break
    return found


OVERRIDE = """{"backend": "puppet", "input": [{"name": "x", "data_type": "TYPE_INT64", "dims": [-1]}],
"output": [{"name": "y", "data_type": "TYPE_INT64", "dims": [-1]}]}"""


@pytest.mark.parametrize("given", [(), (OVERRIDE, {"file:1/weights": b"x"})])
async def test_a_load_without_descriptors_says_what_to_raise(tmp_path, given):
    """However far the load comes: its folder, its configuration, its files."""
    async with serving(tmp_path, echo, control=EXPLICIT, m=CONFIG) as engine:
        found = await refusals(engine, *given)
        assert found
        for error in found:
            assert error.status == Status.RESOURCE_EXHAUSTED, error
            assert "oo many open files" in str(error)
            assert str(error).count("raise it (ulimit -n)") == 1
        assert engine.model("m").ready


async def test_what_serves_goes_on_when_its_load_lacks_descriptors(tmp_path):
    async with serving(tmp_path, echo, control=EXPLICIT, m=CONFIG) as engine:
        await engine.load("m")
        first = engine.model("m")
        (tmp_path / "m" / "1" / "weights").touch()
        with descriptors(0), pytest.raises(Exhausted, match="too many open files"):
            await engine.load("m")
        assert engine.model("m") is first
        await engine.load("m")
        assert engine.model("m") is not first


async def test_a_look_for_a_model_without_descriptors_finds_none(tmp_path):
    async with serving(tmp_path, echo, control=ModelControl(ControlMode.LAZY), m=CONFIG) as engine:
        with descriptors(0):
            assert not await engine.is_on_demand("m")
        assert await engine.is_on_demand("m")


async def test_a_poll_without_descriptors_changes_nothing(tmp_path):
    control = ModelControl(ControlMode.POLL, poll_seconds=3600)
    async with serving(tmp_path, echo, control=control, m=CONFIG) as engine:
        first = engine.model("m")
        for free in range(4):
            with descriptors(free), suppress(Exhausted):
                await poll(engine)
            assert engine.model("m") is first
        await poll(engine)
        assert engine.model("m") is first


async def test_a_poll_tries_again_what_lacked_memory(tmp_path):
    """At the next look, even if no file has changed: nothing is wrong with the model. At the start, and later."""
    weights = tmp_path / "m" / "1" / "weights"
    weights.parent.mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    loader = Loader({"m": Greedy()})
    engine = Engine([tmp_path], loader, Options(), control=ModelControl(ControlMode.POLL, poll_seconds=3600))
    try:
        [problem] = await engine.start()
        assert "the server has no memory for it" in problem
        loader.puppets.models = {"m": echo}
        await poll(engine)
        first = engine.model("m")
        loader.puppets.models = {"m": Greedy()}
        weights.touch()
        await poll(engine)
        assert engine.model("m") is first
        loader.puppets.models = {"m": echo}
        await poll(engine)
        assert engine.model("m") is not first
    finally:
        await engine.close()


class Greedy(Counting):
    """A model for which there is no memory."""

    def create_instance(self):
        raise MemoryError


async def test_a_load_without_memory(tmp_path):
    async with serving(tmp_path, Greedy(), control=EXPLICIT, m=CONFIG) as engine:
        with pytest.raises(Exhausted, match=r"^load failed for model 'm': .*the server has no memory for it, raise"):
            await engine.load("m")


async def test_a_load_without_threads(tmp_path, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("m"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    async with serving(tmp_path, echo, control=EXPLICIT, m=CONFIG) as engine:
        with pytest.raises(Exhausted, match=r"no thread for it: can't start new thread: .*\(ulimit -u\)"):
            await engine.load("m")
