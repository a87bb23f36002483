"""Loading, reloading and unloading under requests: nothing accepted is lost, nothing else is disturbed."""

import asyncio
import gc
import itertools
import json
import random
import shutil
import threading
from collections import Counter
from functools import partial
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from inferd._native.memory.resource import live_counters
from inferd.backends.api import BackendError
from inferd.server.engine.config import Options, config_from_json
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.engine.repository.sources import FolderSource
from inferd.server.errors import ConfigError, InvalidArgument, ServerError, Status, Unavailable
from tests.engine import serving as puppets
from tests.engine.serving import (
    CONFIG,
    Gate,
    Loader,
    Pending,
    PuppetBackend,
    echo,
    ensemble_of,
    infer,
    infer_all,
    poll,
    puppets_of,
    request,
    row,
    serving,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("native_counters")

EXPLICIT = ModelControl(ControlMode.EXPLICIT, (ALL,))
NOTHING = ModelControl(ControlMode.EXPLICIT)
OK = Status.OK

CHAIN = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "a" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } }
  step { model_name: "b" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "y" } }
}
"""


def plus(number):
    def execute(batch):
        batch.set_output("y", batch.input("x").numpy() + number)

    return execute


def change(root, name="m", version="1"):
    """Something of this version is another than it was."""
    file = root / name / version / "weights"
    file.write_text(f"{file.read_text() if file.exists() else ''}x")


def states(engine):
    return {(entry.name, entry.version): (entry.state, entry.reason) for entry in engine.index()}


# -- one model --


async def test_what_was_made_is_closed_and_its_memory_is_back(tmp_path):
    async with serving(tmp_path, control=EXPLICIT) as engine:
        await infer(engine, request(x=row(1)))
        await engine.unload("m")
        await until(lambda: states(engine) == {("m", "1"): ("UNAVAILABLE", "unloaded")})
        assert puppets_of(engine).closed == ["m_0_0", "m"]
        gc.collect()
        assert not any(live_counters().values())


async def test_an_unload_does_not_wait_for_the_requests_that_it_finishes(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate, control=EXPLICIT) as engine:
        pending = [Pending(engine, request(x=row(n))) for n in range(20)]
        await gate.entered()
        await engine.unload("m")
        assert states(engine) == {("m", "1"): ("UNLOADING", "")}
        await engine.unload("m")
        gate.go(100)
        assert [(await each.answer()).array().item() for each in pending] == list(range(20))


async def test_a_model_can_be_loaded_while_it_is_still_unloading(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate, control=EXPLICIT) as engine:
        pending = Pending(engine, request(x=row(1)))
        await gate.entered()
        await engine.unload("m")
        puppets_of(engine).models = {"m": plus(5)}
        await engine.load("m")
        assert (await infer(engine, request(x=row(1)))).array().item() == 6
        gate.go()
        assert (await pending.answer()).array().item() == 1
        assert states(engine) == {("m", "1"): ("READY", "")}


async def test_a_reload_happens_behind_those_who_are_served(tmp_path, monkeypatch):
    """The old version serves until the new one is there, finishes what it has, and is closed then."""
    making, go = threading.Event(), threading.Event()
    made = puppets.PuppetModel.create_instance
    gate = Gate()

    def create_instance(self, spec):
        if engine_started:
            making.set()
            assert go.wait(30)
        return made(self, spec)

    engine_started = []
    monkeypatch.setattr(puppets.PuppetModel, "create_instance", create_instance)
    async with serving(tmp_path, gate, control=EXPLICIT) as engine:
        engine_started.append(True)
        old = engine.model("m")
        change(tmp_path)
        reload = asyncio.create_task(engine.load("m"))
        assert await asyncio.to_thread(making.wait, 30)
        pending = Pending(engine, request(x=row(1)))
        await gate.entered()
        assert states(engine) == {("m", "1"): ("READY", "")}
        assert not reload.done()
        go.set()
        await reload
        assert engine.model("m") is not old
        assert puppets_of(engine).closed == []  # the old one has a request
        gate.go(2)
        assert (await pending.answer()).status == OK
        assert (await infer(engine, request(x=row(2)))).status == OK
        await until(lambda: puppets_of(engine).closed == ["m_0_0", "m"])


async def replaced_while_busy(engine, gate, root) -> list[Pending]:
    """A model that has been replaced twice while it executed a request; these."""
    pending = []
    for _ in range(2):
        pending.append(Pending(engine, request(x=row(len(pending)))))
        await gate.entered()
        change(root)
        await engine.load("m")
    return pending


async def test_a_load_waits_while_much_of_what_was_replaced_goes_on(tmp_path):
    """Each reload keeps a version, with its instances, for as long as it has requests; they are bounded."""
    gate = Gate()
    async with serving(tmp_path, gate, control=EXPLICIT, m=CONFIG) as engine:
        pending = await replaced_while_busy(engine, gate, tmp_path)
        pending.append(Pending(engine, request(x=row(2))))
        await gate.entered()
        change(tmp_path)
        with pytest.raises(ServerError, match="a load that a model asks for does not wait for them, try again"):
            await engine.load("m", asked_by="another")
        load = asyncio.create_task(engine.load("m"))
        await asyncio.wait({load}, timeout=0.2)
        assert not load.done()
        gate.go(100)
        await asyncio.wait_for(load, 30)
        assert [(await each.answer()).array().item() for each in pending] == [0, 1, 2]
        assert (await infer(engine, request(x=row(3)))).status == OK


async def test_a_load_that_waits_is_ended_by_an_unload(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate, control=EXPLICIT, m=CONFIG) as engine:
        pending = await replaced_while_busy(engine, gate, tmp_path)
        change(tmp_path)
        load = asyncio.create_task(engine.load("m"))
        await asyncio.wait({load}, timeout=0.2)
        await asyncio.wait_for(engine.unload("m"), 30)
        with pytest.raises(ServerError, match="unloaded before its load has ended"):
            await load
        gate.go(100)
        assert {(await each.answer()).status for each in pending} == {OK}


async def test_a_load_that_reads_the_configuration_is_ended_by_an_unload(tmp_path, monkeypatch):
    """The model is not made, and not warmed up, only to be unloaded."""
    reading, go = threading.Event(), threading.Event()

    def complete(self, source):
        reading.set()
        assert go.wait(60)

    monkeypatch.setattr(puppets.PuppetBackend, "completes", True)
    monkeypatch.setattr(puppets.PuppetBackend, "complete", complete)
    async with serving(tmp_path, control=NOTHING, m=CONFIG) as engine:
        load = asyncio.create_task(engine.load("m"))
        assert await asyncio.to_thread(reading.wait, 60)
        unload = asyncio.create_task(engine.unload("m"))
        for _ in range(10):  # turns of the loop, until it is asked for
            await asyncio.sleep(0)
        go.set()
        with pytest.raises(ServerError, match="unloaded before its load has ended"):
            await load
        await unload


@pytest.mark.parametrize("threads", [1, 2])
async def test_versions_are_looked_into_at_a_time_and_once(tmp_path, monkeypatch, threads):
    """As many versions as models are loaded at a time; a version that is added later is examined alone."""
    together = threading.Barrier(threads)
    looked = []

    def complete(self, source):
        if source.version < 3:
            together.wait(60)
        looked.append(source.version)

    monkeypatch.setattr(puppets.PuppetBackend, "completes", True)
    monkeypatch.setattr(puppets.PuppetBackend, "complete", complete)
    (tmp_path / "m" / "2").mkdir(parents=True)
    text = CONFIG + "version_policy { all { } }"
    async with serving(tmp_path, control=EXPLICIT, load_threads=threads, m=text) as engine:
        assert sorted(looked) == [1, 2]
        (tmp_path / "m" / "3").mkdir()
        await engine.load("m")
        assert looked[2:] == [3]
        assert [each.version for each in engine.versions("m")] == [1, 2, 3]


@pytest.mark.parametrize("threads", [1, 2])
async def test_code_that_exits_while_it_looks_into_a_version_ends_no_load(tmp_path, monkeypatch, threads):
    """Neither the thread that has begun the load, nor one that helps it: the other version is served."""
    together = threading.Barrier(threads)

    def complete(self, source):
        together.wait(60)
        if source.version == 1:
            raise SystemExit("no licence")

    monkeypatch.setattr(puppets.PuppetBackend, "completes", True)
    monkeypatch.setattr(puppets.PuppetBackend, "complete", complete)
    (tmp_path / "m" / "2").mkdir(parents=True)
    text = CONFIG + "version_policy { all { } }"
    async with serving(tmp_path, control=NOTHING, load_threads=threads, m=text) as engine:
        with pytest.raises(ServerError, match="no licence"):
            await engine.load("m")
        assert [each.version for each in engine.versions("m")] == [2]
        assert "no licence" in states(engine)["m", "1"][1]


async def test_a_load_goes_on_without_the_client_that_asked_for_it(tmp_path, monkeypatch):
    making, go = threading.Event(), threading.Event()
    made = puppets.PuppetBackend.load

    def load(self, source):
        making.set()
        assert go.wait(30)
        return made(self, source)

    monkeypatch.setattr(puppets.PuppetBackend, "load", load)
    async with serving(tmp_path, control=NOTHING) as engine:
        asked = asyncio.create_task(engine.load("m"))
        assert await asyncio.to_thread(making.wait, 30)
        asked.cancel()
        await asyncio.wait({asked})
        assert asked.cancelled()
        assert states(engine) == {("m", "1"): ("LOADING", "")}
        go.set()
        await engine.load("m")
        assert (await infer(engine, request(x=row(1)))).status == OK
        assert puppets_of(engine).closed == []  # it was made once


async def test_what_has_not_changed_is_not_loaded_anew(tmp_path):
    (tmp_path / "m" / "2").mkdir(parents=True)
    all_ = CONFIG + "version_policy { all { } }"
    async with serving(tmp_path, control=EXPLICIT, m=all_) as engine:
        first, second = engine.versions("m")
        await engine.load("m")
        assert engine.versions("m") == (first, second)
        change(tmp_path, version="2")
        await engine.load("m")
        assert engine.versions("m")[0] is first
        assert engine.versions("m")[1] is not second
        (tmp_path / "m" / "3").mkdir()
        await engine.load("m")
        assert [version.version for version in engine.versions("m")] == [1, 2, 3]
        assert engine.versions("m")[0] is first
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG + "version_policy { specific { versions: [ 1 ] } }")
        await engine.load("m")
        assert engine.versions("m") == (first,)
        assert "versions: 1" in str(engine.model("m").config)
        assert (await infer(engine, request(x=row(1)))).status == OK


async def test_the_number_of_instances_changes_without_a_reload(tmp_path):
    async with serving(tmp_path, control=EXPLICIT) as engine:
        loaded = engine.model("m")
        for count in (3, 1):
            (tmp_path / "m" / "config.pbtxt").write_text(CONFIG.replace("count: 1", f"count: {count}"))
            await engine.load("m")
            if count == 1:  # the load has waited for those that it has taken away
                assert {"m_0_1", "m_0_2"} <= set(puppets_of(engine).closed)
            assert engine.model("m") is loaded
            assert len(loaded.spec.instances) == loaded.config.instance_group[0].count == count
            answers = await infer_all(engine, *(request(x=row(n)) for n in range(10)))
            assert {answer.status for answer in answers} == {OK}


async def test_a_model_that_takes_instances_from_itself(tmp_path):
    """A model may ask for a load that ends the instance which waits for it."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    asked = []
    one_at_a_time = threading.Lock()  # a second load meanwhile would be refused: it would wait for the first

    def reload(batch):
        with one_at_a_time:
            asked.append(asyncio.run_coroutine_threadsafe(engine.load("m", asked_by="m"), loop).result(30))
        echo(batch)

    async with serving(tmp_path, reload, control=EXPLICIT, m=CONFIG.replace("count: 1", "count: 2")) as engine:
        loop = asyncio.get_running_loop()
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
        assert {answer.status for answer in await infer_all(engine, *(request(x=row(n)) for n in range(4)))} == {OK}
        assert len(engine.model("m").spec.instances) == 1
        change(tmp_path)
        assert (await infer(engine, request(x=row(1)))).status == OK
        assert asked


async def test_a_sequence_model_is_loaded_anew_for_another_number_of_instances(tmp_path):
    config = CONFIG.replace("dynamic_batching { }", "sequence_batching { }")
    async with serving(tmp_path, control=EXPLICIT, m=config) as engine:
        loaded = engine.model("m")
        (tmp_path / "m" / "config.pbtxt").write_text(config.replace("count: 1", "count: 2"))
        await engine.load("m")
        assert engine.model("m") is not loaded
        assert len(engine.model("m").spec.instances) == 2


# -- what fails --


async def test_a_failed_reload_keeps_what_was(tmp_path, monkeypatch):
    (tmp_path / "m" / "2").mkdir(parents=True)
    async with serving(tmp_path, control=EXPLICIT, m=CONFIG + "version_policy { all { } }") as engine:
        before = engine.versions("m")
        made = puppets.PuppetBackend.load

        def load(self, source):
            if source.version == 2:
                raise BackendError("no room")
            return made(self, source)

        monkeypatch.setattr(puppets.PuppetBackend, "load", load)
        change(tmp_path, version="1")
        change(tmp_path, version="2")
        with pytest.raises(InvalidArgument) as caught:
            await engine.load("m")
        assert str(caught.value) == "load failed for model 'm': version 2 is at UNAVAILABLE state: no room;"
        assert engine.versions("m") == before
        assert states(engine) == {("m", "1"): ("READY", ""), ("m", "2"): ("READY", "")}
        assert engine.ready
        (tmp_path / "m" / "config.pbtxt").write_text("nonsense")
        with pytest.raises(InvalidArgument, match=r"load failed for model 'm': .*nonsense"):
            await engine.load("m")
        assert engine.versions("m") == before
        monkeypatch.undo()
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
        await engine.load("m")
        assert [version.version for version in engine.versions("m")] == [2]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_code_that_exits_while_a_model_is_loaded_or_unloaded_ends_no_server(tmp_path, monkeypatch, caplog, error):
    def exits(*_args):
        raise error("no licence")

    async with serving(tmp_path, control=NOTHING, other=CONFIG, m=CONFIG) as engine:
        await engine.load("other")
        for where in ((puppets.PuppetBackend, "load"), (puppets.PuppetModel, "create_instance")):
            with monkeypatch.context() as patch:
                patch.setattr(*where, exits)
                with pytest.raises(InvalidArgument, match=f"the code has raised {error.__name__}: no licence"):
                    await engine.load("m")
        await engine.load("m")
        for where in (puppets.PuppetInstance, puppets.PuppetModel):
            monkeypatch.setattr(where, "close", exits)
        await engine.unload("m")
        await until(lambda: states(engine)["m", "1"] == ("UNAVAILABLE", "unloaded"))
        await engine.load("m")
        assert (await infer(engine, request(x=row(1)))).status == OK
        assert engine.versions("other")
    caplog.clear()  # frames of the logged errors hold what they were about


@pytest.mark.parametrize("base", [ValueError, RuntimeError, BaseException])
async def test_an_error_without_a_text_fails_only_its_load(tmp_path, monkeypatch, caplog, base):
    class Textless(base):
        def __str__(self):
            raise ValueError("no text")

    def fails(*_args):
        raise Textless

    async with serving(tmp_path, control=NOTHING, m=CONFIG) as engine:
        for where in ((puppets.PuppetBackend, "load"), (puppets.PuppetModel, "create_instance")):
            with monkeypatch.context() as patch:
                patch.setattr(*where, fails)
                with pytest.raises(InvalidArgument, match="the code has raised Textless: it has no text"):
                    await engine.load("m")
        await engine.load("m")
        assert (await infer(engine, request(x=row(1)))).status == OK
    caplog.clear()  # frames of the logged errors hold what they were about


async def test_a_failed_change_of_instances_keeps_those_of_all_versions(tmp_path, monkeypatch):
    """A version that got its further instances before another could not have them loses them again."""
    (tmp_path / "m" / "2").mkdir(parents=True)
    config = CONFIG + "version_policy { all { } }"
    async with serving(tmp_path, control=EXPLICIT, m=config) as engine:
        before = engine.versions("m")
        made = puppets.PuppetModel.create_instance
        further = []

        def create_instance(self, spec):
            further.append(spec.name)
            if len(further) > 2:  # those of the version that comes first
                raise BackendError("no room")
            return made(self, spec)

        monkeypatch.setattr(puppets.PuppetModel, "create_instance", create_instance)
        (tmp_path / "m" / "config.pbtxt").write_text(config.replace("count: 1", "count: 3"))
        with pytest.raises(InvalidArgument, match="no room"):
            await engine.load("m")
        assert len(further) > 2
        assert engine.versions("m") == before
        for version in before:
            assert len(version.spec.instances) == version.config.instance_group[0].count == 1
            assert len(version.uses()) == 1
        assert {"m_0_1", "m_0_2"} <= set(puppets_of(engine).closed)
        monkeypatch.undo()
        await engine.load("m")
        assert [len(version.uses()) for version in engine.versions("m")] == [3, 3]


async def test_a_start_names_a_model_that_is_not_there(tmp_path):
    with pytest.raises(AssertionError, match="failed to load 'nothing', failed to poll from model repository"):
        async with serving(tmp_path, control=ModelControl(ControlMode.EXPLICIT, ("m", "nothing"))):
            pass


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_only_explicit_control_is_taken(tmp_path, mode):
    text = "explicit model load / unload is not allowed if polling is enabled"
    async with serving(tmp_path, control=ModelControl(mode)) as engine:
        for ask in (engine.load, engine.unload):
            with pytest.raises(Unavailable, match=f"^{text}$"):
                await ask("m")


# -- overrides --


def config_json(**changes):
    config = {
        "backend": "puppet",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_INT64", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_INT64", "dims": [-1]}],
    }
    return json.dumps({**config, **changes})


async def test_files_of_an_override_live_as_long_as_what_was_loaded_from_them(tmp_path, monkeypatch):
    holders = tmp_path / "holders"
    holders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(holders))
    async with serving(tmp_path / "models", control=EXPLICIT) as engine:
        await engine.load("m", config_json(), {"file:7/weights": b"w", "file:7/sub/more": b"more"})
        assert engine.model("m").version == 7
        [file] = holders.rglob("weights")
        assert file.read_bytes() == b"w"
        with pytest.raises(InvalidArgument):
            await engine.load("m", config_json(name="other"), {"file:7/weights": b"w"})
        assert list(holders.rglob("weights")) == [file]
        await engine.load("m")
        await until(lambda: not list(holders.iterdir()))
        assert engine.model("m").version == 1
        await engine.load("m", config_json(), {"file:7/weights": b"w"})
    assert not list(holders.iterdir())


@pytest.mark.parametrize(
    ("config", "files", "text"),
    [
        ("{", {}, "failed to load 'm', failed to poll from model repository: Invalid config override: "),
        ("", {"file:1/x": b""}, "Load parameter 'config' must be specified for model file override"),
        ("{}", {"file:../x": b""}, "must stay within model directory"),
        ("{}", {"file:/x": b""}, "must stay within model directory"),
        ("{}", {"file:": b""}, "must stay within model directory"),
        ("{}", {"1/x": b""}, "unrecognized load parameter '1/x'"),
        ("{}", {"file:1/x": b"", "file:1/x/y": b""}, "directory has been created as a file"),
        pytest.param(f"{{name: {'x' * 1_000_000}", {}, "Invalid config override: ", id="long word"),
        pytest.param(" " * (5 << 20), {}, "override: it has more than 4194304 characters", id="long text"),
        pytest.param('{name: "' + '\\"' * 500_000, {}, "Invalid config override: ", id="text without end"),
    ],
)
async def test_overrides_that_are_none(tmp_path, config, files, text):
    async with serving(tmp_path, control=EXPLICIT) as engine:
        before = engine.versions("m")
        with pytest.raises(InvalidArgument) as caught:
            await engine.load("m", config, files)
        assert text in str(caught.value)
        assert engine.versions("m") == before


async def test_a_large_override_is_read_beside_the_loop(tmp_path, monkeypatch):
    go = threading.Event()

    def read(text):
        assert go.wait(30)
        return config_from_json(text)

    monkeypatch.setattr("inferd.server.engine.loading.overrides.config_from_json", read)
    async with serving(tmp_path, control=EXPLICIT) as engine:
        large = config_json(parameters={"p": {"string_value": "x" * 100_000}})
        asked = asyncio.create_task(engine.load("m", large))
        asyncio.get_running_loop().call_soon(go.set)
        await asked
        assert len(engine.model("m").spec.parameters["p"]) == 100_000


# -- ensembles --


async def test_steps_stay_until_the_last_request_of_their_ensemble_is_over(tmp_path):
    gate = Gate(plus(1))
    async with serving(tmp_path, {"a": gate, "b": plus(10)}, control=NOTHING, a=CONFIG, b=CONFIG, e=CHAIN) as engine:
        await engine.load("e")
        pending = Pending(engine, request("e", x=row(1)))
        await gate.entered()
        unload = asyncio.create_task(engine.unload("e", dependents=True))
        await until(lambda: states(engine)["e", "1"][0] == "UNLOADING")
        assert states(engine)["b", "1"] == ("READY", "")
        gate.go()
        assert (await pending.answer()).array().item() == 12
        await unload
        await until(lambda: states(engine)["b", "1"] == ("UNAVAILABLE", "unloaded"))


async def test_a_step_stays_for_an_ensemble_that_is_being_loaded(tmp_path, monkeypatch):
    """Another ensemble takes its steps with it, and the load of this one has found them loaded."""
    making, go = threading.Event(), threading.Event()
    made = puppets.PuppetBackend.load

    def load(self, source):
        if source.spec.name == "c":
            making.set()
            assert go.wait(60)
        return made(self, source)

    monkeypatch.setattr(puppets.PuppetBackend, "load", load)
    models = {"a": plus(1), "b": plus(10), "c": plus(100)}
    other = CHAIN.replace('"b"', '"c"')
    async with serving(tmp_path, models, control=NOTHING, **dict.fromkeys("abc", CONFIG), e=CHAIN, f=other) as engine:
        await engine.load("e")
        coming = asyncio.create_task(engine.load("f"))
        assert await asyncio.to_thread(making.wait, 60)
        going = asyncio.create_task(engine.unload("e", dependents=True))
        await until(lambda: states(engine)["e", "1"][0] == "UNAVAILABLE")
        go.set()
        await coming
        await going
        assert (await infer(engine, request("f", x=row(1)))).array().item() == 102
        assert states(engine)["b", "1"] == ("UNAVAILABLE", "unloaded")


async def test_a_step_and_its_ensemble_change_at_once(tmp_path, monkeypatch):
    """No new request meets a new step through the old ensemble, whose tensors it does not have."""
    making, go = threading.Event(), threading.Event()
    made = puppets.PuppetBackend.load
    models = {"a": plus(1), "b": plus_ten_to_either}
    async with serving(tmp_path, models, control=EXPLICIT, a=CONFIG, b=CONFIG, e=CHAIN) as engine:

        def load(self, source):
            making.set()
            assert go.wait(30)
            return made(self, source)

        monkeypatch.setattr(puppets.PuppetBackend, "load", load)
        (tmp_path / "b" / "config.pbtxt").write_text(CONFIG.replace('"x"', '"z"'))
        (tmp_path / "e" / "config.pbtxt").write_text(CHAIN.replace('key: "x" value: "t"', 'key: "z" value: "t"'))
        reload = asyncio.create_task(engine.load("e"))
        assert await asyncio.to_thread(making.wait, 30)
        assert (await infer(engine, request("e", x=row(1)))).array().item() == 12
        assert [tensor.name for tensor in engine.model("b").spec.inputs] == ["x"]
        go.set()
        await reload
        assert (await infer(engine, request("e", x=row(1)))).array().item() == 12
        assert [tensor.name for tensor in engine.model("b").spec.inputs] == ["z"]


def plus_ten_to_either(batch):
    """Adds to whichever input the model has."""
    try:
        x = batch.input("z")
    except ValueError:
        x = batch.input("x")
    batch.set_output("y", x.numpy() + 10)


async def test_an_ensemble_that_does_not_fit_a_new_step_is_not_served(tmp_path):
    models = {"a": plus(1), "b": plus(10)}
    async with serving(tmp_path, models, control=EXPLICIT, a=CONFIG, b=CONFIG, e=CHAIN) as engine:
        text = (tmp_path / "b" / "config.pbtxt").read_text()
        (tmp_path / "b" / "config.pbtxt").write_text(CONFIG.replace('"x"', '"z"'))
        await engine.load("b")
        assert (await infer(engine, request("e", x=row(1)))).status == Status.NOT_FOUND
        assert states(engine)["e", ""][0] == "UNAVAILABLE"
        assert "non-existing input x in model b" in states(engine)["e", ""][1]
        (tmp_path / "b" / "config.pbtxt").write_text(text)
        await engine.load("e")
        assert (await infer(engine, request("e", x=row(1)))).array().item() == 12


async def test_an_ensemble_keeps_its_configuration_when_the_reload_of_a_step_fails(tmp_path, monkeypatch):
    decoupled = CONFIG.replace("dynamic_batching { }", "model_transaction_policy { decoupled: true }")
    async with serving(tmp_path, control=EXPLICIT, m=CONFIG, e=ensemble_of("m")) as engine:
        (tmp_path / "m" / "config.pbtxt").write_text(decoupled)
        with monkeypatch.context() as patch:
            patch.setattr(puppets.PuppetBackend, "load", Mock(side_effect=BackendError("no room")))
            with pytest.raises(InvalidArgument, match="no room"):
                await engine.load("m")
        assert not engine.model("e").config.model_transaction_policy.decoupled
        await engine.load("m")
        assert engine.model("e").config.model_transaction_policy.decoupled


async def test_kept_answers_are_of_what_is_served(tmp_path):
    """After a reload nobody gets what the old version, or an ensemble by an old step, has answered."""
    from inferd.server.caching import LocalCache

    cached = CONFIG + "response_cache { enable: true }"
    models = {"a": plus(1), "b": plus(10)}
    cache = LocalCache(size=1 << 20)
    chain = CHAIN + "response_cache { enable: true }"
    async with serving(tmp_path, models, control=EXPLICIT, cache=cache, a=cached, b=CONFIG, e=chain) as engine:
        for _ in range(2):
            assert (await infer(engine, request("a", x=row(1)))).array().item() == 2
            assert (await infer(engine, request("e", x=row(1)))).array().item() == 12
        gate = Gate(plus(100))
        puppets_of(engine).models = {"a": plus(2), "b": gate}
        change(tmp_path, "b")
        late = Pending(engine, request("e", x=row(5)))  # its step is the old one, its answer comes later
        await gate.entered()
        await engine.load("b")
        puppets_of(engine).models = {"a": plus(2), "b": plus(20)}
        change(tmp_path, "a")
        await engine.load("a")
        gate.go()
        await late.answer()
        assert (await infer(engine, request("a", x=row(1)))).array().item() == 3
        assert (await infer(engine, request("e", x=row(1)))).array().item() == 23
        assert (await infer(engine, request("e", x=row(5)))).array().item() == 27


# -- order --


async def test_loads_and_unloads_of_a_model_happen_in_order(tmp_path):
    async with serving(tmp_path, control=EXPLICIT) as engine:
        for last, expected in (("load", OK), ("unload", Status.NOT_FOUND)):
            names = ["unload", "load", "unload", "load", last]
            ends = await asyncio.gather(*(getattr(engine, name)("m") for name in names), return_exceptions=True)
            assert ends.pop() is None
            assert all(end is None or "unloaded before its load has ended" in str(end) for end in ends)
            assert (await infer(engine, request(x=row(1)))).status == expected


async def test_models_load_beside_each_other(tmp_path, monkeypatch):
    meeting = threading.Barrier(2)
    made = puppets.PuppetBackend.load

    def load(self, source):
        meeting.wait(30)
        return made(self, source)

    monkeypatch.setattr(puppets.PuppetBackend, "load", load)
    async with serving(tmp_path, control=NOTHING, a=CONFIG, b=CONFIG) as engine:
        await asyncio.gather(engine.load("a"), engine.load("b"))


@pytest.mark.parametrize("asked", ["itself", "its ensemble", "one that asks for it"])
async def test_models_that_would_wait_for_each_other_are_refused(tmp_path, monkeypatch, asked):
    """A model that is loaded asks for a load that cannot be before its own."""
    made = puppets.PuppetBackend.load
    wanted = {"itself": {"a": "a"}, "its ensemble": {"a": "e"}, "one that asks for it": {"a": "b", "b": "a"}}[asked]
    refused = []
    both = threading.Barrier(2) if len(wanted) == 2 else None

    def load(self, source):
        name = source.spec.name
        if name in wanted:
            if both:
                both.wait(30)
            try:
                asyncio.run_coroutine_threadsafe(engine.load(wanted[name], asked_by=name), loop).result(30)
            except Unavailable as error:
                refused.append(str(error))
        return made(self, source)

    monkeypatch.setattr(puppets.PuppetBackend, "load", load)
    models = {"a": plus(1), "b": plus(10)}
    async with serving(tmp_path, models, control=NOTHING, a=CONFIG, b=CONFIG, e=CHAIN) as engine:
        loop = asyncio.get_running_loop()
        names = ["e"] if asked == "its ensemble" else sorted(wanted)
        await asyncio.gather(*map(engine.load, names))
        assert len(refused) == 1
        assert "while it is loaded itself" in refused[0]
        assert {engine.model(name).ready for name in names} == {True}


async def test_a_model_loads_another_one_while_it_is_loaded(tmp_path, monkeypatch):
    """However many do it at a time: what they ask for is not held up by them."""
    made = puppets.PuppetBackend.load
    names = [f"m{i}" for i in range(6)]

    def load(self, source):
        if source.spec.name != "other":
            asyncio.run_coroutine_threadsafe(engine.load("other", asked_by=source.spec.name), loop).result(30)
        return made(self, source)

    monkeypatch.setattr(puppets.PuppetBackend, "load", load)
    configs = dict.fromkeys([*names, "other"], CONFIG)
    async with serving(tmp_path, control=NOTHING, **configs) as engine:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*map(engine.load, names))
        assert engine.model("other").ready


# -- polling --


async def test_what_a_poll_finds(tmp_path):
    async with serving(tmp_path, control=ModelControl(ControlMode.POLL, poll_seconds=3600)) as engine:
        look = partial(poll, engine)
        first = engine.model("m")
        await look()
        assert engine.model("m") is first
        change(tmp_path)
        await look()
        second = engine.model("m")
        assert second is not first
        (tmp_path / "m" / "1" / "config.pbtxt").write_text("max_batch_size: 5")
        await look()
        assert engine.model("m") is not second
        assert engine.model("m").config.max_batch_size == 5
        (tmp_path / "n" / "1").mkdir(parents=True)
        (tmp_path / "n" / "config.pbtxt").write_text(CONFIG)
        puppets_of(engine).models = {"m": echo, "n": plus(1)}
        await look()
        assert (await infer(engine, request("n", x=row(1)))).array().item() == 2
        (tmp_path / "n" / "config.pbtxt").write_text("nonsense")
        await look()
        assert (await infer(engine, request("n", x=row(1)))).array().item() == 2
        (tmp_path / "n").rename(tmp_path.parent / f"{tmp_path.name}-n")
        await look()
        assert (await infer(engine, request("n", x=row(1)))).text.startswith("Request for unknown model: 'n'")
        await until(lambda: ("n", "1") not in states(engine))
        assert engine.ready


async def test_a_poll_loads_ensembles_when_the_model_of_a_step_has_been_mended(tmp_path):
    """The same for an ensemble above one; and again for a model that comes later than its ensembles."""
    above = {"e": ensemble_of("m"), "f": ensemble_of("e")}
    async with serving(tmp_path, control=ModelControl(ControlMode.POLL, poll_seconds=3600), m=CONFIG) as engine:
        look = partial(poll, engine)
        shutil.rmtree(tmp_path / "m")
        for name, config in above.items():
            (tmp_path / name / "1").mkdir(parents=True)
            (tmp_path / name / "config.pbtxt").write_text(config)
        await look()
        for config, status in (("nonsense", Status.NOT_FOUND), (CONFIG, Status.OK)):
            (tmp_path / "m" / "1").mkdir(parents=True, exist_ok=True)
            (tmp_path / "m" / "config.pbtxt").write_text(config)
            await look()
            assert (await infer(engine, request("f", x=row(1)))).status == status
        assert states(engine) == {(name, "1"): ("READY", "") for name in "efm"}


class Store(FolderSource):
    """A repository that can be out of reach."""

    reachable = True

    def look(self, watch):
        self.reach()
        return super().look(watch)

    def find(self, name):
        self.reach()
        return super().find(name)

    def reach(self):
        if not self.reachable:
            raise ConfigError(f"{self}: it cannot be reached")


async def test_a_repository_out_of_reach_does_not_stop_the_polls_of_others(tmp_path):
    """Its models stay, and those of the others come, change and go. Without any in reach, the poll says so."""
    near, far = tmp_path / "near", Store(tmp_path / "far")
    for name in ("near/m", "near/leaves", "far/n"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG)
    loader = Loader(dict.fromkeys(("m", "leaves", "n", "comes"), echo))
    engine = Engine([near, far], loader, Options(), control=ModelControl(ControlMode.POLL, poll_seconds=3600))
    try:
        assert await engine.start() == []
        first = {name: engine.model(name) for name in ("m", "n")}
        far.reachable = False
        change(near)
        (tmp_path / "far" / "n" / "1" / "weights").touch()
        shutil.rmtree(near / "leaves")
        (near / "comes" / "1").mkdir(parents=True)
        (near / "comes" / "config.pbtxt").write_text(CONFIG)
        await poll(engine)
        assert engine.model("m") is not first["m"]
        assert engine.model("comes").ready
        assert not engine.versions("leaves")
        assert engine.model("n") is first["n"]
        far.reachable = True
        await poll(engine)
        assert engine.model("n") is not first["n"]
        near.rename(tmp_path / "elsewhere")
        far.reachable = False
        with pytest.raises(ConfigError):
            await poll(engine)
        assert engine.model("m").ready
    finally:
        await engine.close()


async def test_a_poll_that_is_disturbed_is_made_up_for(tmp_path, monkeypatch):
    """What a look has seen is not lost when a model cannot be removed, or the load is broken off."""
    async with serving(
        tmp_path, control=ModelControl(ControlMode.POLL, poll_seconds=3600), m=CONFIG, n=CONFIG
    ) as engine:
        look, first = partial(poll, engine), engine.model("m")
        (tmp_path / "n").rename(tmp_path.parent / f"{tmp_path.name}-n")
        change(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(engine._lifecycle, "remove", AsyncMock(side_effect=ConfigError("it cannot be read")))
            patch.setattr(engine._lifecycle, "load", AsyncMock(side_effect=RuntimeError("broken off")))
            with pytest.raises(RuntimeError, match="broken off"):
                await look()
        assert engine.model("m") is first
        assert engine.model("n").ready
        await look()
        assert engine.model("m") is not first
        assert not engine.versions("n")


async def test_a_model_that_is_loaded_slowly_does_not_hold_up_the_changes_of_others(tmp_path):
    """Neither in the same look nor in later ones; what changes while it is loaded comes after it."""
    held, begun, values = threading.Event(), threading.Event(), itertools.count()
    loads: Counter[str] = Counter()

    class Slow(PuppetBackend):
        def load(self, source):
            loads[source.spec.name] += 1
            if source.spec.name == "slow" and loads["slow"] > 1:
                begun.set()
                assert held.wait(60)
            return super().load(source)

    configs = {"slow": CONFIG, "a": CONFIG, "b": CONFIG, "e": CHAIN}
    control = ModelControl(ControlMode.POLL, poll_seconds=3600)

    def touch(*names):
        for name in names:
            (tmp_path / name / "1" / "weights").write_text(str(next(values)))

    for name, config in configs.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    loader = Loader(dict.fromkeys(configs, echo))
    loader.puppets = Slow(dict.fromkeys(configs, echo))
    engine = Engine([tmp_path], loader, Options(), control=control)
    try:
        assert await engine.start() == []
        first = {name: engine.model(name) for name in configs}
        touch("slow", "a")
        looks = [asyncio.create_task(poll(engine))]
        await until(lambda: engine.model("a") is not first["a"])
        await asyncio.to_thread(begun.wait, 60)
        touch("slow", "b")
        await poll(engine)
        assert engine.model("b") is not first["b"]
        assert engine.model("slow") is first["slow"]
        shutil.rmtree(tmp_path / "e")
        await poll(engine)
        assert not engine.versions("e")
        held.set()
        await looks[0]
        assert engine.model("slow") is not first["slow"]
        assert loads["slow"] == 2
        await poll(engine)
        assert loads["slow"] == 3
    finally:
        held.set()
        await engine.close()


# -- all at once --


@pytest.mark.parametrize("seed", range(3))
async def test_requests_while_everything_comes_and_goes(tmp_path, seed):
    """Each request is answered once; those for models that are only reloaded succeed, by some version of them."""
    rng = random.Random(seed)
    generation = itertools.count()
    models = {"a": plus(1), "b": plus(10), "loose": echo}
    configs = {"a": CONFIG.replace("count: 1", "count: 2"), "b": CONFIG, "e": CHAIN, "loose": CONFIG}
    async with serving(tmp_path, models, control=EXPLICIT, **configs) as engine:
        pending: dict[str, list[Pending]] = {"a": [], "b": [], "e": [], "loose": []}
        stop = False

        async def ask(name):
            while not stop:
                pending[name].append(Pending(engine, request(name, x=np.array([[rng.randrange(1000)]]))))
                if len(pending[name]) % 20 == 0:
                    await pending[name][-1].answer()
                await asyncio.sleep(0)

        async def turn_over(names):
            for _ in range(12):
                name = rng.choice(names)
                match rng.randrange(4):
                    case 0 if name != "e":
                        text = configs[name].replace("count: 1", f"count: {rng.randrange(1, 4)}")
                        (tmp_path / name / ".new").write_text(text)  # another load may read it now
                        (tmp_path / name / ".new").rename(tmp_path / name / "config.pbtxt")
                    case 1 if name != "e":
                        (tmp_path / name / "1" / "weights").write_text(str(next(generation)))
                    case 2 if name == "loose":
                        await engine.unload(name)
                await engine.load(name)

        asking = [asyncio.create_task(ask(name)) for name in pending]
        await asyncio.gather(*(turn_over(["a", "b", "e"]) for _ in range(3)), turn_over(["loose"]))
        stop = True
        await asyncio.gather(*asking)
        answers = {name: [await each.answer() for each in found] for name, found in pending.items()}
        for name in ("a", "b", "e"):
            assert {(answer.status, answer.text) for answer in answers[name]} == {(OK, "")}
        assert {answer.status for answer in answers["loose"]} <= {OK, Status.NOT_FOUND, Status.UNAVAILABLE}
        assert sum(map(len, answers.values())) > 100
