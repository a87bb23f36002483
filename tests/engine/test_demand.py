"""Models that are loaded at the first request: who waits, what is answered, who leaves for whom, and what is shown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shutil
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inferd._native.memory.resource import live_counters
from inferd.backends.api import BackendError, ModelSource
from inferd.server.caching import CacheConfig, LocalCache
from inferd.server.engine import engine as engine_module
from inferd.server.engine.config import Options
from inferd.server.engine.engine import ON_DEMAND, Engine
from inferd.server.engine.loading import demand, memory
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.engine.models.services import EngineServices
from inferd.server.engine.repository.sources import Repositories
from inferd.server.errors import ConfigError, Exhausted, NotFound, Status, Unavailable
from inferd.server.front.health import follow
from tests.engine.serving import (
    CONFIG,
    Loader,
    Pending,
    PuppetBackend,
    PuppetModel,
    echo,
    ensemble_of,
    infer,
    infer_all,
    request,
    row,
)
from tests.waiting import until

SIZE = 1000  # of each model's file
ENSEMBLE = ensemble_of("a")
TENSOR = {"data_type": "TYPE_INT64", "dims": [-1]}
PLAIN = {
    "backend": "puppet",
    "max_batch_size": 8,
    "input": [{"name": "x", **TENSOR}],
    "output": [{"name": "y", **TENSOR}],
}


class Shelf(PuppetBackend):
    """Counts the loads of each model; has them wait, or fail."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys("abcd", echo))
        self.loads: Counter[str] = Counter()
        self.broken: set[str] = set()
        self.open = threading.Event()
        self.open.set()
        self.meanwhile: dict[str, Callable[[], object]] = {}  # what a model does while it is loaded

    def load(self, source: ModelSource) -> PuppetModel:
        self.loads[source.spec.name] += 1
        self.meanwhile.get(source.spec.name, int)()
        assert self.open.wait(60)
        if source.spec.name in self.broken:
            raise BackendError("no weights")
        return super().load(source)


@asynccontextmanager
async def lazy(
    root: Path,
    *pinned: str,
    budget: int | None = None,
    threads: int = 4,
    names: str = "abc",
    cache: CacheConfig = None,
    **configs: str,
):
    for name, config in {**dict.fromkeys(names, CONFIG), **configs}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        if name in names:
            (root / name / "1" / "weights").write_bytes(bytes(SIZE))
    loader = Loader({})
    loader.puppets = shelf = Shelf()
    engine = Engine(
        [root],
        loader,
        Options(),
        load_threads=threads,
        control=ModelControl(ControlMode.LAZY, pinned, 15, budget),
        cache=cache,
    )
    try:
        assert await engine.start() == []
        yield engine, shelf
    finally:
        shelf.open.set()
        await engine.close()


def loaded(engine: Engine) -> set[str]:
    return {version.name for version in engine.loaded()}


async def ask(engine: Engine, name: str):
    return await infer(engine, request(name, x=row(1)))


async def test_the_first_request_loads_the_model_once_for_all_who_wait(tmp_path, native_counters) -> None:
    async with lazy(tmp_path) as (engine, shelf):
        assert loaded(engine) == set()
        assert engine.ready
        answers = await infer_all(engine, *(request("a", x=row(i)) for i in range(50)))
        assert [int(answer.array()[0, 0]) for answer in answers] == list(range(50))
        assert shelf.loads == {"a": 1}
        assert loaded(engine) == {"a"}


async def test_requests_wait_within_their_deadlines(tmp_path, native_counters) -> None:
    """A deadline that passes, or a client that leaves, while the model is loaded: the others are served."""
    async with lazy(tmp_path) as (engine, shelf):
        shelf.open.clear()
        late = Pending(engine, request("a", x=row(1)), timeout_ns=20_000_000)
        patient = Pending(engine, request("a", x=row(2)), timeout_ns=3600 * 10**9)
        gone = Pending(engine, request("a", x=row(3)))
        gone.ticket.cancel()
        assert (await late.answer()).status == Status.DEADLINE_EXCEEDED
        shelf.open.set()
        assert (await patient.answer()).array()[0, 0] == 2
        assert shelf.loads == {"a": 1}


async def test_without_memory_to_ask_for_a_load_a_request_is_refused(tmp_path, monkeypatch, native_counters) -> None:
    """Guards that it does not wait for a load that nobody began. The next one is served."""

    def no_memory(*_: object) -> str:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(demand.Demand, "_missed", no_memory)
        async with lazy(tmp_path / "poor") as (engine, _):
            refused = await ask(engine, "a")
            assert refused.status == Status.RESOURCE_EXHAUSTED
    async with lazy(tmp_path / "well") as (engine, _):
        assert (await ask(engine, "a")).status == Status.OK


async def test_a_failed_load_is_answered_to_all_and_tried_again_later(tmp_path, monkeypatch, native_counters) -> None:
    async with lazy(tmp_path) as (engine, shelf):
        shelf.broken = {"a"}
        answers = await infer_all(engine, *(request("a", x=row(1)) for _ in range(5)))
        assert {answer.status for answer in answers} == {Status.UNAVAILABLE}
        assert all("no weights" in answer.text for answer in answers)
        assert (await ask(engine, "a")).status == Status.UNAVAILABLE
        assert shelf.loads == {"a": 1}
        assert engine.ready, "one model that cannot be loaded does not take the server out"
        assert not await engine.is_on_demand("a")
        [entry] = [each for each in await engine.repository_index() if each.name == "a"]
        assert entry.state == "UNAVAILABLE" and "no weights" in entry.reason
        shelf.broken = set()
        monkeypatch.setattr(engine._demand, "_clock", lambda: 1e12)  # much later
        assert (await ask(engine, "a")).status == Status.OK


async def test_a_model_that_is_loaded_after_a_failure_is_ready_in_the_index_and_comes_back(tmp_path) -> None:
    """Guards that the pause after a failed load ends when a client has loaded the model itself."""
    async with lazy(tmp_path) as (engine, shelf):
        shelf.broken = {"a"}
        assert (await ask(engine, "a")).status == Status.UNAVAILABLE
        shelf.broken = set()
        await engine.load("a")
        [entry] = [each for each in await engine.repository_index() if each.name == "a"]
        assert (entry.state, entry.reason) == ("READY", "")
        await engine.unload("a")
        assert (await ask(engine, "a")).status == Status.OK


async def test_a_model_that_a_client_loads_while_the_look_for_it_fails_is_there(tmp_path, monkeypatch) -> None:
    """Guards that such a failure refuses no request, is not shown in the index, and keeps nothing from coming back."""
    looks, fails = threading.Event(), threading.Event()
    find = Repositories.find

    def broken_once(self: Repositories, name: str) -> object:
        if not looks.is_set():
            looks.set()
            assert fails.wait(60)
            raise ConfigError("the repository cannot be reached")
        return find(self, name)

    monkeypatch.setattr(Repositories, "find", broken_once)
    async with lazy(tmp_path) as (engine, shelf):
        brought = asyncio.create_task(engine.bring("a"))
        await until(looks.is_set)
        try:
            await engine.load("a")
        finally:
            fails.set()
        await brought
        assert [(each.state, each.reason) for each in await engine.repository_index() if each.name == "a"] == [
            ("READY", "")
        ]
        await engine.unload("a")
        assert (await ask(engine, "a")).status == Status.OK
        assert shelf.loads == {"a": 2}


async def test_the_index_says_why_an_unloaded_model_is_not_loaded_for_requests(tmp_path) -> None:
    async with lazy(tmp_path) as (engine, shelf):
        shelf.broken = {"a"}
        assert (await ask(engine, "a")).status == Status.UNAVAILABLE
        await engine.unload("a")
        [entry] = [each for each in await engine.repository_index() if each.name == "a"]
        assert (entry.state, "no weights" in entry.reason) == ("UNAVAILABLE", True)


async def test_the_index_promises_no_load_of_a_model_that_is_in_no_repository_any_more(tmp_path) -> None:
    async with lazy(tmp_path) as (engine, _shelf):
        for name in "ab":
            await engine.bring(name)
        shutil.rmtree(tmp_path / "a")
        assert {(each.name, each.state) for each in await engine.repository_index()} >= {("a", "READY"), ("b", "READY")}
        for name in "ab":
            await engine.unload(name)
        told = {each.name: each.reason for each in await engine.repository_index()}
        assert told == {"a": told["a"], "b": ON_DEMAND, "c": ON_DEMAND} and told["a"] != ON_DEMAND
        assert (await ask(engine, "a")).status == Status.NOT_FOUND


async def test_the_failure_that_is_remembered_is_an_error_anew_for_each_who_asks(tmp_path) -> None:
    """Guards memory: an error that is raised again and again gets longer, and its frames hold what they have made."""
    errors: list[Unavailable] = []
    async with lazy(tmp_path) as (engine, shelf):
        shelf.broken = {"a"}
        for _ in range(4):
            with pytest.raises(Unavailable, match="no weights") as caught:
                await engine.bring("a")
            errors.append(caught.value)
        assert shelf.loads == {"a": 1}, "the failure is remembered"
    lengths = [len(traceback.extract_tb(error.__traceback__)) for error in errors[1:]]
    assert len(set(map(id, errors))) == len(errors) and len(set(lengths)) == 1


async def test_a_model_that_fails_in_the_same_way_again_is_told_in_a_line(tmp_path, monkeypatch, caplog) -> None:
    """The traceback is written once, because clients may ask for the model for hours."""
    monkeypatch.setattr(demand, "RETRY_SECONDS", 0.0)

    def fails() -> None:
        raise RuntimeError("there is no such layer")

    async with lazy(tmp_path) as (engine, shelf):
        shelf.meanwhile["a"] = fails
        for _ in range(3):
            answer = await ask(engine, "a")
            assert (answer.status, "there is no such layer" in answer.text) == (Status.UNAVAILABLE, True)
        told = [record for record in caplog.records if "there is no such layer" in caplog.handler.format(record)]
        assert len(told) >= 3
        assert sum(record.exc_info is not None for record in told) == 1


async def test_versions_that_can_be_loaded_answer_beside_one_that_cannot(tmp_path, native_counters) -> None:
    async with lazy(tmp_path, a=CONFIG + "version_policy { all { } }") as (engine, shelf):
        (tmp_path / "a" / "2").mkdir()
        (tmp_path / "a" / "1" / "config.pbtxt").write_text("nonsense")
        assert (await ask(engine, "a")).status == Status.OK
        message = request("a", x=row(1))
        message.model_version = "1"
        answer = await infer(engine, message)
        assert answer.status in (Status.NOT_FOUND, Status.UNAVAILABLE)
        assert shelf.loads == {"a": 1}


async def test_what_is_not_there_is_not_found(tmp_path, native_counters) -> None:
    async with lazy(tmp_path) as (engine, shelf):
        answer = await ask(engine, "nothing")
        assert (answer.status, answer.text) == (Status.NOT_FOUND, "Request for unknown model: 'nothing' is not found")
        assert (await ask(engine, "../a")).status == Status.NOT_FOUND
        await ask(engine, "a")
        message = request("a", x=row(1))
        message.model_version = "7"
        assert (await infer(engine, message)).status == Status.NOT_FOUND
        await engine.bring("nothing")
        with pytest.raises(NotFound):
            engine.model("nothing")
        assert not await engine.is_on_demand("nothing")
        assert shelf.loads == {"a": 1}


async def test_a_version_that_is_not_there_is_not_found_while_the_model_is_looked_for(tmp_path, monkeypatch) -> None:
    """Guards that such a request waits for no load: the model is there, since a client has loaded it meanwhile."""
    looks, found = threading.Event(), threading.Event()
    find = Repositories.find

    def slowly(self: Repositories, name: str) -> object:
        if not looks.is_set():
            looks.set()
            assert found.wait(60)
        return find(self, name)

    monkeypatch.setattr(Repositories, "find", slowly)
    async with lazy(tmp_path) as (engine, shelf):
        first = Pending(engine, request("a", x=row(1)))
        await until(looks.is_set)
        try:
            await engine.load("a")
            assert (await first.answer()).status == Status.OK
            message = request("a", x=row(1))
            message.model_version = "7"
            assert (await infer(engine, message)).status == Status.NOT_FOUND
        finally:
            found.set()
        assert shelf.loads == {"a": 1}


async def test_the_least_recently_asked_leave_and_come_back(tmp_path, native_counters) -> None:
    async with lazy(tmp_path, budget=2 * SIZE) as (engine, shelf):
        await ask(engine, "a")
        await ask(engine, "b")
        await ask(engine, "a")
        await ask(engine, "c")
        assert loaded(engine) == {"a", "c"}
        assert (await ask(engine, "b")).status == Status.OK
        assert len(loaded(engine)) == 2
        assert shelf.loads == {"a": 1, "b": 2, "c": 1}


@pytest.mark.parametrize("budget", [None, 2 * SIZE])
async def test_a_model_may_ask_another_while_it_is_loaded(tmp_path, budget) -> None:
    """As in a warm-up: the load of the called model does not wait for that of the caller."""
    async with lazy(tmp_path, budget=budget) as (engine, shelf):
        loop = asyncio.get_running_loop()
        found = []
        shelf.meanwhile["a"] = lambda: found.append(asyncio.run_coroutine_threadsafe(ask(engine, "b"), loop).result(60))
        assert (await ask(engine, "a")).status == Status.OK
        assert found[0].status == Status.OK
        assert loaded(engine) == {"a", "b"}


async def test_a_model_may_ask_another_where_one_is_loaded_at_a_time(tmp_path, monkeypatch) -> None:
    """The load of the other one waits for a place that the first one has, but not for ever."""
    monkeypatch.setattr(engine_module, "LOAD_PATIENCE", 0.2)
    async with lazy(tmp_path, threads=1) as (engine, shelf):
        loop = asyncio.get_running_loop()
        found = []

        def asks(name: str) -> Callable[[], object]:
            return lambda: found.append(asyncio.run_coroutine_threadsafe(ask(engine, name), loop).result(60))

        shelf.meanwhile = {"a": asks("b"), "b": asks("c")}
        assert (await ask(engine, "a")).status == Status.OK
        assert [answer.status for answer in found] == [Status.OK] * 2
        assert loaded(engine) == {"a", "b", "c"}


async def test_a_model_may_ask_about_another_where_one_is_loaded_at_a_time(tmp_path) -> None:
    """The asked model is loaded to tell how it answers, but the asking one's load has the only place."""
    async with lazy(tmp_path, threads=1) as (engine, shelf):
        services = EngineServices(engine, engine.measures, engine.infer.entrance)
        told = []

        def asks() -> None:
            for what, name in (("is_model_ready", "b"), ("is_decoupled", "b"), ("is_model_ready", "none")):
                told.append(services.ask(what, {"name": name, "asked_by": "a"}).result(60))
                told.append(shelf.loads["b"])

        shelf.meanwhile = {"a": asks}
        assert (await ask(engine, "a")).status == Status.OK
        assert told == [True, 0, False, 1, False, 1]
        assert loaded(engine) == {"a", "b"}
        with pytest.raises(NotFound):
            await asyncio.wrap_future(services.ask("is_decoupled", {"name": "none", "asked_by": "a"}))


@pytest.mark.parametrize("names", ["ae", "ab", "a"])
async def test_a_model_may_not_wait_for_what_waits_for_it(tmp_path, names) -> None:
    """A model that is made asks about an ensemble that has it as a step, or about one that asks about it.

    Each is told, whether the load that it waits for was begun for it or for another; none waits for ever.
    """
    async with lazy(tmp_path, e=ENSEMBLE) as (engine, shelf):
        services = EngineServices(engine, None, None)
        told: dict[str, str] = {}

        def asks(who: str, about: str) -> None:
            told[who] = str(services.ask("is_decoupled", {"name": about, "asked_by": who}).exception(60))

        shelf.meanwhile.update(a=lambda: asks("a", "b" if "b" in names else "e"), b=lambda: asks("b", "a"))
        answers = await infer_all(engine, *(request(name, x=row(1)) for name in names))
        assert answers[0].status == Status.OK
        assert any("waits for" in error for error in told.values())
        assert (await ask(engine, "b")).status == Status.OK
    gc.collect()  # errors and the frames that raised them refer to each other
    assert not live_counters()["lanes"]


async def test_loads_on_demand_are_as_many_at_a_time_as_there_are_threads(tmp_path) -> None:
    together, guard = threading.Barrier(2), threading.Lock()
    now, most = [0], [0]

    def load() -> None:
        with guard:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait(60)
        with guard:
            now[0] -= 1

    async with lazy(tmp_path, threads=2, names="abcd") as (engine, shelf):
        shelf.meanwhile = dict.fromkeys("abcd", load)
        answers = await asyncio.gather(*(ask(engine, name) for name in "abcd"))
        assert {answer.status for answer in answers} == {Status.OK}
        assert most == [2]


async def test_a_model_that_executes_may_ask_one_for_which_it_must_leave(tmp_path, monkeypatch) -> None:
    """The load does not wait for the executing model without end, because that model may wait for the load."""
    monkeypatch.setattr(memory, "LEAVING_SECONDS", 0.1)
    async with lazy(tmp_path, budget=SIZE) as (engine, shelf):
        loop = asyncio.get_running_loop()
        found = []

        def asking(batch) -> None:
            found.append(asyncio.run_coroutine_threadsafe(ask(engine, "b"), loop).result(60))
            echo(batch)

        shelf.models["a"] = asking
        assert (await ask(engine, "a")).status == Status.OK
        assert found[0].status == Status.OK
        assert loaded(engine) == {"b"}


async def test_loads_that_do_not_fit_beside_each_other_follow_each_other(tmp_path) -> None:
    """Nobody is refused because another model is just being loaded, which may leave when it has been."""
    async with lazy(tmp_path, budget=SIZE) as (engine, shelf):
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        shelf.meanwhile = dict.fromkeys("abc", lambda: loop.call_soon_threadsafe(begun.set))
        shelf.open.clear()
        answers = [Pending(engine, request(name, x=row(1))) for name in "abc"]
        await begun.wait()
        assert shelf.loads.total() == 1
        shelf.open.set()
        assert {(await each.answer()).status for each in answers} == {Status.OK}
        assert len(loaded(engine)) == 1


async def test_any_number_of_unknown_names_takes_few_threads(tmp_path, monkeypatch) -> None:
    async with lazy(tmp_path) as (engine, _shelf):
        find, now, most = engine._repositories.find, [], []

        def counted(name: str):
            now.append(name)
            most.append(len(now))
            try:
                return find(name)
            finally:
                now.remove(name)

        monkeypatch.setattr(engine._repositories, "find", counted)
        answers = await infer_all(engine, *(request(f"no {i}", x=row(1)) for i in range(200)))
        assert {answer.status for answer in answers} == {Status.NOT_FOUND}
        assert max(most) <= demand.LOOKS


async def test_pinned_models_stay(tmp_path) -> None:
    async with lazy(tmp_path, "a", budget=2 * SIZE) as (engine, _shelf):
        assert loaded(engine) == {"a"}
        for name in "bcbc":
            assert (await ask(engine, name)).status == Status.OK
            assert loaded(engine) == {"a", name}


async def test_an_ensemble_is_loaded_with_its_steps_and_leaves_with_them(tmp_path) -> None:
    """What was asked least recently leaves, steps too: else one ensemble would keep its room for good."""
    async with lazy(tmp_path, budget=2 * SIZE, e=ENSEMBLE) as (engine, _shelf):
        answer = await ask(engine, "e")
        assert answer.array()[0, 0] == 1
        await ask(engine, "b")
        assert loaded(engine) == {"e", "a", "b"}
        await ask(engine, "e")
        await ask(engine, "c")
        assert loaded(engine) == {"e", "a", "c"}
        await ask(engine, "b")
        assert loaded(engine) == {"b", "c"}
        answer = await ask(engine, "e")
        assert answer.array()[0, 0] == 1


async def test_an_ensemble_whose_step_is_unloaded_comes_back_with_it(tmp_path) -> None:
    """The same for an ensemble that has such an ensemble as a step."""
    async with lazy(tmp_path, e=ENSEMBLE, f=ENSEMBLE.replace('"a"', '"e"')) as (engine, _shelf):
        assert (await ask(engine, "f")).status == Status.OK
        await engine.unload("a")
        for name in "fe":
            assert (await ask(engine, name)).array()[0, 0] == 1
        assert loaded(engine) == {"a", "e", "f"}


async def test_it_is_ready_for_what_a_request_would_load(tmp_path) -> None:
    """ModelReady and the health service say yes, without a load; the index says why nothing is loaded."""
    async with lazy(tmp_path) as (engine, shelf):
        health = follow(engine, "service")
        assert await engine.is_on_demand("a")
        assert health._statuses["a"] == 1
        assert {(each.name, each.reason) for each in await engine.repository_index()} == {(n, ON_DEMAND) for n in "abc"}
        assert shelf.loads == {}
        await engine.bring("a")
        assert not await engine.is_on_demand("a")
        await engine.unload("a")
        assert health._statuses["a"] == 1
        assert await engine.is_on_demand("a")
        await engine.load("a")
        assert shelf.loads == {"a": 2}


async def test_the_end_of_the_server_answers_those_who_wait(tmp_path, native_counters) -> None:
    async with lazy(tmp_path) as (engine, shelf):
        shelf.open.clear()
        waiting = Pending(engine, request("a", x=row(1)))
        load = asyncio.create_task(engine.bring("b"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close())
        assert (await waiting.answer()).status == Status.UNAVAILABLE
        shelf.open.set()
        await closing
        await asyncio.wait((load,))
        assert load.exception() is None or isinstance(load.exception(), Unavailable)


def chain(*steps: str) -> str:
    """The configuration of an ensemble whose steps follow each other; all have `CONFIG`'s tensors."""
    names = ["x", *(f"t{i}" for i in range(1, len(steps))), "y"]
    parts = ",".join(
        f'{{ model_name: "{step}" model_version: -1 input_map {{ key: "x" value: "{names[i]}" }} '
        f'output_map {{ key: "y" value: "{names[i + 1]}" }} }}'
        for i, step in enumerate(steps)
    )
    tensors = ENSEMBLE[: ENSEMBLE.index("ensemble_scheduling")]
    return f"{tensors} ensemble_scheduling {{ step [ {parts} ] }}"


class Busy:
    """Holds the executions of a model until the test lets them go."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        self.begun, self.go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def execute(batch) -> None:
            loop.call_soon_threadsafe(self.begun.set)
            assert self.go_on.wait(60)
            echo(batch)

        shelf.models[name] = execute


async def test_a_step_stays_while_an_ensemble_that_needs_it_is_loaded(tmp_path, native_counters) -> None:
    """Guards that it does not leave for a third model meanwhile: the ensemble would fail for good. That model waits."""
    async with lazy(tmp_path, budget=2 * SIZE, names="abcd", e=chain("a", "b")) as (engine, shelf):
        await ask(engine, "a")
        await ask(engine, "d")
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        shelf.meanwhile["b"] = lambda: loop.call_soon_threadsafe(begun.set)
        shelf.open.clear()
        first = Pending(engine, request("e", x=row(1)))
        await begun.wait()
        other = Pending(engine, request("c", x=row(2)))
        for _ in range(20):
            await asyncio.to_thread(int)  # it is looked for
        shelf.open.set()
        assert (await first.answer()).array()[0, 0] == 1
        assert (await other.answer()).array()[0, 0] == 2
        for _ in range(3):
            assert (await ask(engine, "e")).array()[0, 0] == 1
        assert loaded(engine) == {"e", "a", "b"}


async def test_ensembles_that_share_steps_take_turns(tmp_path, native_counters) -> None:
    """Whatever leaves for whom: no request fails, as each fits alone."""
    ensembles = {"e": chain("a", "b"), "f": chain("b", "c"), "g": chain("c", "a"), "h": chain("d", "a")}
    async with lazy(tmp_path, budget=2 * SIZE, names="abcd", **ensembles) as (engine, _shelf):
        for _ in range(10):
            answers = await asyncio.gather(*(ask(engine, name) for name in "efghabcd"))
            assert [answer.text for answer in answers] == [""] * 8
            assert sum(SIZE for name in loaded(engine) if name in "abcd") <= 2 * SIZE


async def test_an_ensemble_is_ready_when_there_is_room_for_its_steps(tmp_path, native_counters) -> None:
    """Not before: a model that is requested meanwhile is not refused, but waits for the same busy model to leave."""
    async with lazy(tmp_path, budget=2 * SIZE, names="abcd", e=chain("a", "c")) as (engine, shelf):
        busy = Busy(shelf, "b")
        running = Pending(engine, request("b", x=row(3)))
        await busy.begun.wait()
        kept = []
        engine.subscribe(lambda name, _, ready: kept.append(loaded(engine)) if name == "e" and ready else None)
        first = Pending(engine, request("e", x=row(1)))
        await until(lambda: not engine.versions("b"))
        other = Pending(engine, request("d", x=row(2)))
        for _ in range(20):
            await asyncio.to_thread(int)
        assert not first.answers and not other.answers
        assert kept == []
        busy.go_on.set()
        assert (await running.answer()).array()[0, 0] == 3
        assert (await first.answer()).array()[0, 0] == 1
        assert (await other.answer()).array()[0, 0] == 2
        assert kept == [{"a", "c", "e"}]


async def test_a_first_request_is_answered_when_its_model_is_ready(tmp_path, native_counters) -> None:
    """Though the load of the ensemble has more to wait for: an instance of a step that it ends is busy."""
    both = (
        chain("a")
        .replace(
            "step [",
            'step [ { model_name: "b" model_version: -1 input_map { key: "x" value: "x" } '
            'output_map { key: "y" value: "z" } },',
        )
        .replace("ensemble_scheduling", 'output { name: "z" data_type: TYPE_INT64 dims: [ -1 ] } ensemble_scheduling')
    )
    single = CONFIG.replace("dynamic_batching { }", "")
    async with lazy(tmp_path, b=single.replace("count: 1", "count: 2"), names="ab", e=both) as (engine, shelf):
        busy = Busy(shelf, "b")
        running = [Pending(engine, request("b", x=row(i))) for i in range(2)]
        await busy.begun.wait()
        (tmp_path / "b" / "config.pbtxt").write_text(single)
        answer = await infer(engine, request("e", outputs=("y",), x=row(1)))
        assert answer.array()[0, 0] == 1
        busy.go_on.set()
        for each in running:
            assert (await each.answer()).status == Status.OK


async def test_the_budget_counts_the_versions_that_are_served(tmp_path, native_counters) -> None:
    """All of them, and no others."""
    policies = {"a": "version_policy { all { } }", "b": "version_policy { specific { versions: 1 } }"}
    configs = {name: CONFIG + policy for name, policy in policies.items()}
    async with lazy(tmp_path, budget=2 * SIZE, **configs) as (engine, shelf):
        for name, version, size in (("a", 2, SIZE), ("a", 3, SIZE), ("b", 2, 100 * SIZE)):
            (tmp_path / name / str(version)).mkdir()
            (tmp_path / name / str(version) / "weights").write_bytes(bytes(size))
        answer = await ask(engine, "a")
        assert answer.status == Status.RESOURCE_EXHAUSTED
        assert shelf.loads == {}
        assert (await ask(engine, "b")).status == Status.OK
        assert (await ask(engine, "c")).status == Status.OK
        assert loaded(engine) == {"b", "c"}


async def test_an_ensemble_with_more_than_the_budget_is_refused(tmp_path, native_counters) -> None:
    async with lazy(tmp_path, budget=2 * SIZE, e=chain("a", "b", "c")) as (engine, shelf):
        await ask(engine, "a")
        answer = await ask(engine, "e")
        assert (answer.status, "--model-memory-budget lacks 1000 bytes for its files" in answer.text) == (
            Status.RESOURCE_EXHAUSTED,
            True,
        )
        assert loaded(engine) == {"a"}
        assert shelf.loads == {"a": 1}


async def test_a_load_by_a_client_makes_room_too(tmp_path, native_counters) -> None:
    async with lazy(tmp_path, "c", budget=2 * SIZE, e=chain("a", "b")) as (engine, _shelf):
        await ask(engine, "a")
        await engine.load("b")
        assert loaded(engine) == {"b", "c"}
        with pytest.raises(Exhausted, match="lacks 1000 bytes"):
            await engine.load("e")
        assert loaded(engine) == {"b", "c"}


async def test_a_client_that_leaves_while_its_load_fails_leaves_no_trace(tmp_path, monkeypatch, caplog) -> None:
    """Guards the log: the failure was told with the traceback of a task that nobody has awaited."""
    looks, fails = threading.Event(), threading.Event()

    def unreachable(*_: object) -> object:
        looks.set()
        assert fails.wait(60)
        raise ConfigError("the repository cannot be reached")

    async with lazy(tmp_path, budget=2 * SIZE) as (engine, _shelf):
        monkeypatch.setattr(Repositories, "find", unreachable)
        load = asyncio.create_task(engine.load("a"))
        await until(looks.is_set)
        load.cancel()
        await asyncio.wait((load,))
        fails.set()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_others_leave_for_what_a_client_loads_with_files_of_its_own(tmp_path, native_counters) -> None:
    """Guards that these leave at once, the least recently used first, and not with the next load on demand."""
    async with lazy(tmp_path, budget=2 * SIZE) as (engine, _shelf):
        await ask(engine, "a")
        await ask(engine, "b")
        await engine.load("c", json.dumps(PLAIN), {"file:1/weights": bytes(SIZE)})
        await until(lambda: not engine.versions("a"))
        assert loaded(engine) == {"b", "c"}


async def test_a_load_by_a_client_is_use(tmp_path, native_counters) -> None:
    async with lazy(tmp_path, budget=2 * SIZE) as (engine, _shelf):
        await ask(engine, "a")
        await engine.load("b")
        await ask(engine, "c")
        assert loaded(engine) == {"b", "c"}


@pytest.mark.parametrize("by_client", [False, True])
async def test_a_step_that_could_not_be_read_at_first_has_room_before_it_is_loaded(
    tmp_path, monkeypatch, by_client, native_counters
) -> None:
    """Guards the budget: such a step counted as nothing, and models that had to leave for its ensemble stayed."""
    find, looks = Repositories.find, Counter[str]()

    def at_the_second_look(self: Repositories, name: str) -> object:
        looks[name] += 1
        if (name, looks[name]) == ("a", 1):
            raise ConfigError("the repository cannot be reached")
        return find(self, name)

    async with lazy(tmp_path, budget=2 * SIZE, e=chain("a", "b")) as (engine, shelf):
        await ask(engine, "c")
        most = []
        engine.subscribe(lambda *_: most.append(SIZE * len(loaded(engine) & set("abc"))))
        monkeypatch.setattr(Repositories, "find", at_the_second_look)
        if by_client:
            await engine.load("e")
        assert (await ask(engine, "e")).status == Status.OK
        assert loaded(engine) == {"a", "b", "e"}
        assert max(most) == 2 * SIZE
        assert shelf.loads == {"a": 1, "b": 1, "c": 1}


async def test_a_model_that_outgrows_the_budget_while_it_is_looked_for_is_refused(tmp_path, monkeypatch) -> None:
    find = Repositories.find

    def grows(self: Repositories, name: str) -> object:
        (tmp_path / "a" / "1" / "weights").write_bytes(bytes(next(sizes, 3) * SIZE))
        return find(self, name)

    async with lazy(tmp_path, budget=2 * SIZE) as (engine, shelf):
        sizes = iter((1, 3))
        monkeypatch.setattr(Repositories, "find", grows)
        answer = await ask(engine, "a")
        assert (answer.status, "lacks 1000 bytes" in answer.text) == (Status.RESOURCE_EXHAUSTED, True)
        assert shelf.loads == {}


@pytest.mark.parametrize("case", ["on demand", "by a client", "as a step", "by a load", "later", "through a third"])
async def test_a_load_that_waits_for_one_beside_which_it_does_not_fit_is_told_at_once(tmp_path, case) -> None:
    """Guards that neither waits for the other until the time for room is over, whoever has begun the loads."""
    async with lazy(tmp_path, budget=SIZE, e=ENSEMBLE, d=CONFIG) as (engine, shelf):
        services = EngineServices(engine, engine.measures, engine.infer.entrance)
        loop, told, begun, goes_on = asyncio.get_running_loop(), [], asyncio.Event(), threading.Event()

        def asks() -> None:
            loop.call_soon_threadsafe(begun.set)
            assert goes_on.wait(60)
            what = "load_model" if case == "by a load" else "is_decoupled"
            about = "d" if case == "through a third" else "b"
            told.append(str(services.ask(what, {"name": about, "asked_by": "a"}).exception(20)))

        shelf.meanwhile["a"] = asks
        shelf.meanwhile["d"] = lambda: services.ask("is_decoupled", {"name": "b", "asked_by": "d"}).result(20)
        if case == "by a client":
            load = asyncio.create_task(engine.load("a"))
        else:
            load = asyncio.create_task(engine.bring("e" if case == "as a step" else "a"))
        await begun.wait()
        waiting = Pending(engine, request("b", x=row(1))) if case == "later" else None
        for _ in range(20):
            await asyncio.to_thread(int)
        goes_on.set()
        await load
        assert ["--model-memory-budget lacks 1000 bytes" in text for text in told] == [True], told
        if waiting is not None:
            assert (await waiting.answer()).status in (Status.OK, Status.RESOURCE_EXHAUSTED)


async def test_a_load_for_which_a_model_waits_goes_ahead_of_one_that_waits_for_that_model(tmp_path) -> None:
    """Guards that the three do not wait for each other until the time for room is over."""
    async with lazy(tmp_path, budget=3 * SIZE) as (engine, shelf):
        (tmp_path / "c" / "1" / "weights").write_bytes(bytes(3 * SIZE))
        services = EngineServices(engine, engine.measures, engine.infer.entrance)
        loop, begun, goes_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        told = []

        def asks() -> None:
            loop.call_soon_threadsafe(begun.set)
            assert goes_on.wait(60)
            told.append(services.ask("is_decoupled", {"name": "b", "asked_by": "a"}).result(20))

        shelf.meanwhile["a"] = asks
        first = Pending(engine, request("a", x=row(1)))
        await begun.wait()
        wide = Pending(engine, request("c", x=row(2)))
        for _ in range(20):
            await asyncio.to_thread(int)
        goes_on.set()
        assert (await first.answer()).status == Status.OK
        assert (await wide.answer()).status == Status.OK
        assert told == [False]


async def test_what_loads_and_leaves_does_not_have_all_others_counted_again(tmp_path, monkeypatch) -> None:
    """Guards the loop's time: with each load and each end the server looks at all models, of which it has thousands."""
    names = [f"m{number}" for number in range(40)]
    looked_at = []
    size_of = memory.size_of
    async with lazy(tmp_path, budget=40 * SIZE, names="a", **dict.fromkeys(names, CONFIG)) as (engine, shelf):
        shelf.models.update(dict.fromkeys(names, echo))
        for name in names:
            (tmp_path / name / "1" / "weights").write_bytes(bytes(SIZE))
        (tmp_path / "a" / "1" / "weights").write_bytes(bytes(40 * SIZE))
        monkeypatch.setattr(memory, "size_of", lambda *given: looked_at.append(given) or size_of(*given))
        assert {answer.status for answer in await infer_all(engine, *(request(n, x=row(1)) for n in names))} == {
            Status.OK
        }
        assert (await ask(engine, "a")).status == Status.OK
        assert loaded(engine) == {"a"}
    assert len(looked_at) <= 4 * len(names)


async def test_answers_from_the_cache_are_use(tmp_path, native_counters) -> None:
    """A model whose answers come from the cache leaves after one that nobody has asked since."""
    cached = CONFIG + "response_cache { enable: true }"
    async with lazy(tmp_path, budget=2 * SIZE, cache=LocalCache(1 << 20), a=cached) as (engine, _shelf):
        await ask(engine, "a")
        await ask(engine, "b")
        await ask(engine, "a")
        assert engine.infer.reuse()["hits"] == 1
        await ask(engine, "c")
        assert loaded(engine) == {"a", "c"}


async def test_a_step_that_a_client_unloads_leaves_after_the_requests_that_need_it(tmp_path, native_counters) -> None:
    """New requests for the ensembles above it wait, and load it again."""
    outer = ENSEMBLE.replace('"a"', '"e"')
    async with lazy(tmp_path, budget=2 * SIZE, e=chain("a", "b"), f=outer) as (engine, shelf):
        busy = Busy(shelf, "a")
        running = [Pending(engine, request(name, x=row(i))) for i, name in enumerate("efe")]
        await busy.begun.wait()
        await until(lambda: loaded(engine) == set("abef"))
        unload = asyncio.create_task(engine.unload("b"))
        await until(lambda: loaded(engine) == set("abe"))
        later = Pending(engine, request("f", x=row(7)))
        assert not unload.done()
        busy.go_on.set()
        assert [(await each.answer()).array()[0, 0] for each in running] == [0, 1, 2]
        await unload
        assert (await later.answer()).array()[0, 0] == 7
        assert shelf.loads == {"a": 1, "b": 2}


@pytest.mark.parametrize("budget", [None, 2 * SIZE])
async def test_a_request_between_two_steps_waits_for_a_step_that_a_model_unloads(
    tmp_path, budget, native_counters
) -> None:
    """It takes the same way as a model that is missing: it is loaded, and the request goes on."""
    async with lazy(tmp_path, budget=budget, e=chain("a", "b")) as (engine, shelf):
        busy = Busy(shelf, "a")
        running = [Pending(engine, request("e", x=row(i))) for i in range(3)]
        await busy.begun.wait()
        await engine.unload("b", asked_by="a")
        assert loaded(engine) == {"a"}
        busy.go_on.set()
        assert [(await each.answer()).array()[0, 0] for each in running] == [0, 1, 2]
        assert shelf.loads == {"a": 1, "b": 2}


@pytest.mark.parametrize("budget", [None, 2 * SIZE])
async def test_a_load_that_waits_for_replaced_versions_does_not_hold_up_what_they_wait_for(
    tmp_path, budget, caplog, native_counters
) -> None:
    """The ensemble is crowded: its next load waits for requests, and these wait for a step that it loads, too."""
    caplog.set_level(logging.INFO)
    async with lazy(tmp_path, budget=budget, e=chain("a", "b")) as (engine, shelf):
        busy = Busy(shelf, "a")
        pending = []
        for number in range(2):
            pending.append(Pending(engine, request("e", x=row(number))))
            await until(lambda: engine.versions("e"))
            await busy.begun.wait()
            changed = f'{chain("a", "b")} parameters {{ key: "n" value {{ string_value: "{number}" }} }}'
            (tmp_path / "e" / "config.pbtxt").write_text(changed)
            await engine.load("e")
        await engine.unload("b", asked_by="a")
        pending.append(Pending(engine, request("e", x=row(2))))
        await until(lambda: "the load waits for one of them" in caplog.text)
        busy.go_on.set()
        assert [(await each.answer()).array()[0, 0] for each in pending] == [0, 1, 2]


async def test_a_request_waits_for_a_step_within_its_deadline(tmp_path, native_counters) -> None:
    """One whose deadline passes, and one whose client leaves, wait no more; the third goes on."""
    async with lazy(tmp_path, e=chain("a", "b")) as (engine, shelf):
        busy = Busy(shelf, "a")
        late = Pending(engine, request("e", x=row(1)), timeout_ns=50_000_000)
        gone = Pending(engine, request("e", x=row(2)))
        patient = Pending(engine, request("e", x=row(3)))
        await busy.begun.wait()
        await engine.unload("b", asked_by="a")
        shelf.open.clear()
        busy.go_on.set()
        assert (await late.answer()).status == Status.DEADLINE_EXCEEDED
        gone.ticket.cancel()
        shelf.open.set()
        assert (await patient.answer()).array()[0, 0] == 3


async def test_a_step_that_is_really_gone_fails_its_request(tmp_path, native_counters) -> None:
    async with lazy(tmp_path, e=chain("a", "b"), f=chain("a", "c")) as (engine, shelf):
        busy = Busy(shelf, "a")
        running = {name: Pending(engine, request(name, x=row(1))) for name in "ef"}
        await until(lambda: engine.versions("e") and engine.versions("f"))
        await busy.begun.wait()
        for name in "bc":
            await engine.unload(name, asked_by="a")
        shutil.rmtree(tmp_path / "b")
        shelf.broken = {"c"}
        busy.go_on.set()
        answers = {name: await each.answer() for name, each in running.items()}
        assert {answer.status for answer in answers.values()} == {Status.UNAVAILABLE}
        assert "in ensemble 'e', Request for unknown model: 'b' has no available versions" in answers["e"].text
        assert "in ensemble 'f', load failed for model 'c'" in answers["f"].text


async def test_an_unload_lets_a_load_end_for_which_requests_wait(tmp_path, native_counters) -> None:
    """Guards that unloads, however many, do not keep requests from their model: each had its load begin anew."""
    async with lazy(tmp_path, e=chain("a", "b")) as (engine, shelf):
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        shelf.meanwhile["a"] = lambda: loop.call_soon_threadsafe(begun.set)
        shelf.open.clear()
        waiting = Pending(engine, request("e", x=row(1)))
        await begun.wait()
        unloads = [asyncio.create_task(engine.unload(name)) for name in "eab"]
        await asyncio.sleep(0)
        shelf.open.set()
        assert (await waiting.answer()).array()[0, 0] == 1
        await asyncio.gather(*unloads)
        assert shelf.loads == {"a": 1, "b": 1}
        assert loaded(engine) == set()


async def test_what_is_brought_is_there_although_an_unload_comes_between(tmp_path) -> None:
    """Guards that a handler finds the model when it goes on: it was told NOT_FOUND when an unload was quicker."""
    async with lazy(tmp_path) as (engine, _shelf):
        came = asyncio.Event()
        engine.subscribe(lambda _name, _version, ready: came.set() if ready else None)

        async def finds() -> bool:
            await engine.bring("a")
            return bool(engine.versions("a"))

        for turns in range(12):  # of the loop, between the model's becoming ready and the unload
            came.clear()
            found = asyncio.create_task(finds())
            await came.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            await engine.unload("a")
            assert await found
            await engine.unload("a")


async def test_nothing_leaves_for_a_model_that_nobody_waits_for_any_more(tmp_path, native_counters) -> None:
    async with lazy(tmp_path, budget=SIZE) as (engine, shelf):
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        shelf.meanwhile["a"] = lambda: loop.call_soon_threadsafe(begun.set)
        shelf.open.clear()
        first = Pending(engine, request("a", x=row(1)))
        await begun.wait()
        late = Pending(engine, request("b", x=row(1)), timeout_ns=20_000_000)
        assert (await late.answer()).status == Status.DEADLINE_EXCEEDED
        shelf.open.set()
        assert (await first.answer()).status == Status.OK
        await engine.bring("a")
        assert (loaded(engine), shelf.loads) == ({"a"}, {"a": 1})
