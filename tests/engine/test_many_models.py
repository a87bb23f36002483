"""Guards that what the server is asked all the time does not cost more with every model that it has.

What is counted are looks at models, not time.
"""

import asyncio
import gc
import statistics
import sys
import threading
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest

from bench import steps
from inferd._native.model_files import Watch
from inferd._native.protobuf.listing import encode_index
from inferd.backends.loader import BackendLoader
from inferd.server.engine import config as configuration
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.housekeeping.collecting import set_aside
from inferd.server.engine.housekeeping.threads import SLICE
from inferd.server.engine.instances.instances import AT_ONCE
from inferd.server.engine.loading.candidates import Maker
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.engine.loading.endings import Endings
from inferd.server.engine.loading.reading import Reader
from inferd.server.engine.models.registry import Models, ModelState
from inferd.server.engine.models.version import LoadedVersion
from inferd.server.engine.repository import folders
from inferd.server.engine.repository.sources import Repositories
from inferd.server.rpc.metadata import Identity, Information
from inferd.server.rpc.repository import Repository
from inferd_client.pb import grpc_service_pb2 as pb
from tests.engine.serving import infer, request
from tests.waiting import until

TENSORS = """
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
"""
CONFIG = f"backend: 'identity'{TENSORS}"
ENSEMBLE = f"""
platform: "ensemble"
{TENSORS}
ensemble_scheduling {{ step {{ model_name: "%s" model_version: -1
    input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }} }} }}
"""
STEP = """
step { model_name: "%s" model_version: -1
    input_map { key: "x" value: "%s" } output_map { key: "y" value: "%s" } }
"""


pytestmark = pytest.mark.usefixtures("native_counters")


def repository(root, count):
    for number in range(count):
        (root / f"m{number}" / "1").mkdir(parents=True)
        (root / f"m{number}" / "config.pbtxt").write_text(CONFIG)
    return root


@pytest.fixture
def looks(monkeypatch):
    """How often a model was asked whether it is ready, and what it is made of."""
    counted = {"ready": 0, "models_of": 0}
    is_ready, models_of = ModelState.is_ready.fget, configuration.models_of

    def count_ready(state):
        counted["ready"] += 1
        return is_ready(state)

    def count_models(spec):
        counted["models_of"] += 1
        return models_of(spec)

    monkeypatch.setattr(ModelState, "is_ready", property(count_ready))
    monkeypatch.setattr(configuration, "models_of", count_models)
    return counted


class Call:
    """One by a client that may use every model."""

    def may_use(self, name):
        return True


async def started(root):
    control = ModelControl(ControlMode.EXPLICIT, (ALL,))
    engine = Engine([root], BackendLoader(), Options(), control=control)
    assert await engine.start() == []
    return engine


async def test_start_looks_at_each_model_a_few_times_whatever_their_number(tmp_path, looks):
    found = []
    for count in (20, 40):
        looks.update(ready=0, models_of=0)
        engine = await started(repository(tmp_path / str(count), count))
        found.append(dict(looks))
        await engine.close()
    few, many = found
    assert many["ready"] <= 2 * few["ready"] + 5
    assert many["models_of"] <= 2 * few["models_of"] + 5
    assert many["ready"] <= 10 * 40


async def test_start_makes_few_threads_and_an_instance_gets_its_own_with_the_first_request(tmp_path, monkeypatch):
    """Threads for each step of each load cost more than what they did, and those of idle instances are memory."""
    monkeypatch.setattr("inferd.server.engine.housekeeping.threads.IDLE_SECONDS", 2.0)  # on a busy machine, too
    monkeypatch.setattr("inferd.server.engine.housekeeping.threads.MOST_IDLE", 40)
    made: list[str] = []
    start = threading.Thread.start

    def count(thread):
        made.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", count)
    engine = await started(repository(tmp_path, 40))
    assert not [name for name in made if not name.startswith("engine")]
    for _ in range(3):
        answer = await infer(engine, request("m7", x=np.array([1, 2])))
        assert answer.array("y").tolist() == [1, 2]
    assert [name for name in made if not name.startswith("engine")] == ["m7_0"]
    await engine.close()
    assert len(made) < 40


async def test_few_of_many_instances_get_their_threads_on_the_loop(tmp_path, monkeypatch):
    """The first request for a model with a thousand of them held the loop for a quarter of a second."""
    root = repository(tmp_path, 1)
    (root / "m0" / "config.pbtxt").write_text(f"{CONFIG}instance_group {{ count: 30 }}")
    engine = await started(root)
    made: list[tuple[bool, str]] = []
    start = threading.Thread.start

    def note(thread):
        made.append((threading.current_thread() is threading.main_thread(), thread.name))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    answer = await infer(engine, request("m0", x=np.array([1, 2])))
    assert answer.array("y").tolist() == [1, 2]
    await until(lambda: len({name for _, name in made if name.startswith("m0")}) == 30)
    assert len([name for on_loop, name in made if on_loop and name.startswith("m0")]) == AT_ONCE
    await engine.close()


def calls_of(function, counts):
    """Wrap the function: each of its calls notes how many functions it calls.

    The collector waits: what it finalizes are calls of an earlier test.
    """

    def counted(*args, **kwargs):
        count = 0

        def note(_, event, __):
            nonlocal count
            count += event in ("call", "c_call")

        gc.disable()
        sys.setprofile(note)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(None)
            gc.enable()
            counts.append(count)

    return counted


async def test_one_more_model_of_a_kind_takes_few_calls(tmp_path, monkeypatch):
    """To read a configuration with protobuf's text_format and to check it took 2,000 of them."""
    read: list[int] = []
    made: list[int] = []
    monkeypatch.setattr(Reader, "_read", calls_of(Reader._read, read))
    monkeypatch.setattr(Maker, "make", calls_of(Maker.make, made))
    engine = await started(repository(tmp_path, 40))
    await engine.close()
    assert len(read) == len(made) == 40
    assert statistics.median(read) < 550
    assert statistics.median(made) < 125


async def test_start_lists_the_folder_of_each_model_once_and_opens_its_backend_once(tmp_path, monkeypatch):
    """The load took neither from the scan or the preparation before it."""
    listed: list[str] = []
    opened: list[str] = []
    list_folder, open_backend = folders._list, BackendLoader.backend_of_model
    monkeypatch.setattr(folders, "_list", lambda path: listed.append(path.name) or list_folder(path))
    monkeypatch.setattr(
        BackendLoader,
        "backend_of_model",
        lambda self, name, paths: opened.append(paths[-1].name) or open_backend(self, name, paths),
    )
    engine = await started(repository(tmp_path, 10))
    await engine.close()
    assert sorted(listed) == sorted(opened) == [f"m{number}" for number in range(10)]


async def test_one_more_model_takes_little_memory_of_the_interpreter(tmp_path):
    """Models of a kind share their specification, and an idle instance has no thread."""

    async def held(count):
        root = repository(tmp_path / str(count), count)
        gc.collect()
        tracemalloc.start()
        try:
            engine = await started(root)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            await engine.close()

    few, many = await held(20), await held(60)
    assert (many - few) / 40 < 8000


async def test_a_load_looks_at_what_its_ensembles_are_made_of_and_at_no_other_model(tmp_path, monkeypatch):
    root = repository(tmp_path, 30)
    (root / "e" / "1").mkdir(parents=True)
    (root / "e" / "config.pbtxt").write_text(ENSEMBLE % "m0")
    engine = await started(root)
    looked: list[set[str]] = []
    compose = configuration.compose

    def note(prepared):
        looked.append(set(prepared))
        return compose(prepared)

    monkeypatch.setattr(configuration, "compose", note)
    (root / "m0" / "2").mkdir()
    await engine.load("m0")
    assert looked == [{"m0", "e"}]
    (root / "f" / "1").mkdir(parents=True)
    (root / "f" / "config.pbtxt").write_text(ENSEMBLE % "m0")
    await engine.load("f")
    assert looked[1:] == [{"m0", "f"}], "the other ensemble of a model that stays is not completed again"
    (root / "m1" / "2").mkdir()
    await engine.load("m1")
    assert looked[2:] in ([], [{"m1"}])
    await engine.close()


async def test_ensembles_that_share_steps_are_looked_at_once_each(tmp_path, monkeypatch):
    """Guards what was done for each way through a graph of ensembles, of which there are 2^depth here."""
    root, depth = repository(tmp_path, 2), 9
    for layer in range(1, depth + 1):
        steps = STEP % (f"m{2 * layer - 2}", "x", "z") + STEP % (f"m{2 * layer - 1}", "z", "y")
        for number in (0, 1):
            (root / f"m{2 * layer + number}" / "1").mkdir(parents=True)
            text = f"{TENSORS}platform: 'ensemble'\nensemble_scheduling {{ {steps} }}"
            (root / f"m{2 * layer + number}" / "config.pbtxt").write_text(text)
    engine = await started(root)
    told, looked = [], []
    engine.subscribe(lambda name, version, ready: told.append((name, version, ready)))
    (root / "m0" / "2").mkdir()
    await engine.load("m0")
    assert len(told) <= 2 * (1 + 2 * depth)
    versions = Models.versions
    monkeypatch.setattr(Models, "versions", lambda models, name: looked.append(name) or versions(models, name))
    assert engine.model(f"m{2 * depth}").name == f"m{2 * depth}"
    assert len(looked) == len(set(looked)) == 2 * depth + 1
    await engine.close()


async def test_positions_of_fields_are_looked_for_where_something_is_wrong(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("nothing is wrong")

    monkeypatch.setattr("inferd.server.engine.pbtxt.source.locate", refuse)
    engine = await started(repository(tmp_path, 2))
    await engine.close()


def versions_looked_at():
    """The number of loaded versions at which a full collection looks."""
    return sum(isinstance(each, LoadedVersion) for each in gc.get_objects())


async def test_a_full_collection_does_not_look_at_models_that_stay(tmp_path):
    """The collection would hold the loop. It looks at none of them after a model has ended, either."""
    control = ModelControl(ControlMode.EXPLICIT, (ALL,))
    engine = Engine([repository(tmp_path, 40)], BackendLoader(), Options(), control=control)
    try:
        frozen = gc.get_freeze_count()
        await engine.start(set_aside)
        assert gc.get_freeze_count() > frozen + 40 * 20
        assert versions_looked_at() == 0
        ended = engine.versions("m0")[0].weak()
        gc.disable()
        await engine.unload("m0")
        async with asyncio.timeout(60):
            while any(each() is not None for each in ended):  # noqa: ASYNC110 - nothing tells of the end
                await asyncio.sleep(0)
        assert versions_looked_at() == 0
    finally:
        gc.enable()
        await engine.close()
        gc.collect()
        gc.freeze()  # as tests/conftest.py has done


CIRCULAR = """
from inferd.backends.api import Backend, Instance, Model


class CircularModel(Model):
    def __init__(self):
        self.own = self

    def create_instance(self, spec):
        return CircularInstance()


class CircularInstance(Instance):
    def execute(self, batch):
        raise NotImplementedError


class Circular(Backend):
    name = "circular"

    def load(self, source):
        return CircularModel()
"""


async def test_a_model_whose_objects_refer_to_each_other_is_found_when_it_has_ended(tmp_path, monkeypatch):
    """What is set aside is looked at once then, without waiting for the collector's own time."""
    monkeypatch.setattr("inferd.server.engine.engine.LEFT_AFTER", 0.1)
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends/circular.py").write_text(CIRCULAR)
    root = tmp_path / "models"
    (root / "circular/1").mkdir(parents=True)
    tensors = "".join(f'{what} {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }}\n' for what in ("input", "output"))
    (root / "circular/config.pbtxt").write_text(f'backend: "circular"\n{tensors}')
    control = ModelControl(ControlMode.EXPLICIT, (ALL,))
    engine = Engine([root], BackendLoader(directory=tmp_path / "backends"), Options(), control=control)
    try:
        await engine.start(set_aside)
        ended = engine.versions("circular")[0].weak()
        gc.disable()
        await engine.unload("circular")
        await until(lambda: all(each() is None for each in ended))
        assert gc.get_freeze_count(), "what stays is set aside again"
        assert versions_looked_at() == 0
    finally:
        gc.enable()
        await engine.close()
        gc.collect()
        gc.freeze()  # as tests/conftest.py has done


async def test_readiness_is_known_and_not_found_out(tmp_path, looks):
    engine = await started(repository(tmp_path, 30))
    looks.update(ready=0, models_of=0)
    for _ in range(10):
        assert engine.ready
        assert await engine.check()
    assert looks == {"ready": 0, "models_of": 0}
    await engine.unload("m3")
    assert looks["models_of"] < 10, "no other model was looked at"
    await engine.close()


async def test_what_streams_and_balancers_ask_is_asked_of_those_that_can_tell(tmp_path, monkeypatch):
    """No model that is without sequences, and has no say in readiness, is looked at."""
    engine = await started(repository(tmp_path, 30))

    def refuse(*_):
        raise AssertionError("no model can tell")

    for name in ("check", "stream_ended", "sequences", "is_asked"):
        monkeypatch.setattr(LoadedVersion, name, property(refuse))
    assert await engine.check()
    engine.stream_ended(1)
    assert engine._models.asked() == engine._models.with_sequences() == []
    monkeypatch.undo()
    await engine.close()


async def test_what_is_known_follows_every_change(tmp_path):
    """Loads, loads that fail, unloads, loads again; and the ensembles of a model, whose answers depend on it."""
    root = repository(tmp_path, 2)
    (root / "e" / "1").mkdir(parents=True)
    (root / "e" / "config.pbtxt").write_text(ENSEMBLE % "m0")
    engine = await started(root)
    told = []
    engine.subscribe(lambda name, version, ready: told.append((name, ready)))
    assert engine.ready
    await engine.unload("m0")
    assert engine.ready, "nobody wants it any more"
    assert ("e", False) in told
    told.clear()
    await engine.load("m0")
    assert ("e", True) in told
    (root / "bad" / "1").mkdir(parents=True)
    (root / "bad" / "config.pbtxt").write_text(CONFIG.replace("identity", "nothing"))
    with pytest.raises(Exception, match="nothing"):
        await engine.load("bad")
    assert not engine.ready
    (root / "bad" / "config.pbtxt").write_text(CONFIG)
    await engine.load("bad")
    assert engine.ready
    (root / "e" / "config.pbtxt").write_text(ENSEMBLE % "m1")
    await engine.load("e")
    told.clear()
    await engine.unload("m0")
    assert ("e", False) not in told, "it is no step of it any more"
    await engine.unload("m1")
    assert ("e", False) in told
    await engine.close()


@contextmanager
def turns_counted(monkeypatch, owner, name):
    """A block in which calls of a method are counted: yields [all, the most between two turns of another task]."""
    counts, since = [0, 0], 0
    method = getattr(owner, name)

    def count(*args):
        nonlocal since
        since += 1
        counts[:] = counts[0] + 1, max(counts[1], since)
        return method(*args)

    async def others():
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(owner, name, count)
    beside = asyncio.ensure_future(others())
    yield counts
    beside.cancel()


async def test_others_have_their_turn_while_statistics_are_gathered(tmp_path, monkeypatch):
    engine = await started(repository(tmp_path, 3 * SLICE))
    service = Information(engine, Identity("inferd", "0", ()))
    with turns_counted(monkeypatch, LoadedVersion, "account") as counts:
        answer = await service.model_statistics(pb.ModelStatisticsRequest(), Call())
    assert len(pb.ModelStatisticsResponse.FromString(answer).model_stats) == 3 * SLICE
    assert counts[1] <= SLICE
    await engine.close()


async def test_others_have_their_turn_while_all_models_are_unloaded(tmp_path, monkeypatch):
    """A stop held the loop until the last of all models was hidden, and with it the answers of earlier requests."""
    engine = await started(repository(tmp_path, 3 * SLICE))
    with turns_counted(monkeypatch, Endings, "withdraw") as counts:
        await engine.close()
    assert counts[0] == 3 * SLICE
    assert counts[1] <= SLICE


def driven(coroutine):
    """The result of a coroutine that waits for nothing but its turn."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as end:
        return end.value


def is_below(limit, measured):
    """Whether one of a few measurements is: some take more, when the collector runs or another thread has its turn."""
    return any(measured() < limit for _ in range(3))


@pytest.mark.skipif(not steps.can_count(), reason="instructions are counted on x86-64 only")
async def test_statistics_of_one_more_model_take_few_instructions(tmp_path):
    """Guards what is asked every few seconds, of all models, on the loop that serves requests."""
    engine = await started(repository(tmp_path, 16))
    service = Information(engine, Identity("inferd", "0", ()))

    def taken(count):
        chosen = [version for number in range(count) for version in engine.versions(f"m{number}")]
        return steps.count(lambda: driven(engine.statistics(chosen)))

    def all_of_them():
        driven(service.model_statistics(pb.ModelStatisticsRequest(), Call()))

    all_of_them()
    assert is_below(4 * 10_000, lambda: taken(8) - taken(4))
    assert is_below(16 * 15_000, lambda: steps.count(all_of_them))
    await engine.close()


async def test_the_index_looks_at_no_folder_of_a_model_that_is_known(tmp_path, monkeypatch):
    """Who lists thousands of models that are loaded reads one folder: that of the repository."""
    control = ModelControl(ControlMode.EXPLICIT, ("m0", "m1", "m2"))
    engine = Engine([repository(tmp_path, 5)], BackendLoader(), Options(), control=control)
    await engine.start()
    looked = []
    look = folders._model_folder
    monkeypatch.setattr(folders, "_model_folder", lambda path, root: looked.append(path.name) or look(path, root))
    index = pb.RepositoryIndexResponse.FromString(await Repository(engine).index(pb.RepositoryIndexRequest(), Call()))
    assert sorted(looked) == ["m3", "m4"]
    assert [(each.name, each.version, each.state) for each in index.models] == [
        ("m0", "1", "READY"), ("m1", "1", "READY"), ("m2", "1", "READY"), ("m3", "", ""), ("m4", "", ""),
    ]  # fmt: skip
    await engine.close()


async def test_the_index_makes_few_calls_for_one_more_model(tmp_path, monkeypatch):
    counts: list[int] = []
    engine = await started(repository(tmp_path, 5))
    monkeypatch.setattr(Models, "index_of", calls_of(Models.index_of, counts))
    assert len(await engine.repository_index()) == len(counts) == 5
    assert max(counts) <= 12
    await engine.close()


async def test_a_poll_makes_few_calls_for_one_more_model(tmp_path):
    """In Python each file of each model took several."""
    counts: list[int] = []
    for number in (20, 40):
        look = calls_of(Repositories([repository(tmp_path / str(number), number)]).look, counts)
        assert len(look(Watch())) == number
    assert counts[1] - counts[0] <= 20 * 10


def test_an_index_with_what_is_no_text_is_encoded():
    """Names of files and texts of models may hold lone surrogates."""
    entries = [("m", "1", "UNAVAILABLE", "bad \udcff"), ("n", "", "", "")]
    index = pb.RepositoryIndexResponse.FromString(encode_index(entries))
    assert [(each.name, each.reason) for each in index.models] == [("m", "bad \\udcff"), ("n", "")]
