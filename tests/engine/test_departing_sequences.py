"""Sequences go on where they began, while their model is loaded anew, replaced or unloaded, and while the server stops.

Each answer says which version has given it and what the sequence's sum is: `100 * sum + generation`, where the version
loaded first is generation 0.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading

import pytest

from inferd._native.execution.python_batch import Batch
from inferd._native.refusal import refusal_counts
from inferd._native.service.ticket import CallOrigin
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.engine.models.registry import Models
from inferd.server.engine.models.version import LoadedVersion
from inferd.server.errors import Status
from tests.engine.serving import Answer, Gate, Pending, ensemble_of, infer, poll, puppets_of, request, row, serving
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("native_counters")

EXPLICIT = ModelControl(ControlMode.EXPLICIT, (ALL,))
OK, INVALID, UNAVAILABLE = Status.OK, Status.INVALID_ARGUMENT, Status.UNAVAILABLE
NO_START = "must specify the START flag on the first request of the sequence"
REPLACED = ": the sequence was ended when the version of the model on which it had started was replaced"
ONLY_BEGUN = "Request for unknown model: 'm' is unloading: only requests of sequences that have begun on it are served"

CONFIG = """
backend: "puppet"
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
sequence_batching {
  max_sequence_idle_microseconds: %d
  %s
  state { input_name: "sum" output_name: "sum_out" data_type: TYPE_INT64 dims: [ 1 ] }
}
"""


OLDEST = "oldest { max_candidate_sequences: 8 }"


def config(strategy: str = OLDEST, *, idle_us: int = 600_000_000, drain: str = "") -> str:
    text = CONFIG % (idle_us, strategy)
    if drain:
        text += f'parameters {{ key: "sequence_drain_seconds" value {{ string_value: "{drain}" }} }}'
    return text


class Generations:
    """Adds up; each version has a thread of its own, and those that execute first are the elder ones."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._own = threading.local()

    def __call__(self, batch: Batch) -> None:
        if not hasattr(self._own, "generation"):
            self._own.generation = next(self._count)
        total = batch.input("sum").numpy() + batch.input("x").numpy()
        batch.set_output("y", total * 100 + self._own.generation)
        batch.set_output("sum_out", total)


def step(x: int, name: int, *, start: bool = False, end: bool = False, model: str = "m", version: str = ""):
    message = request(model, x=row(x))
    message.model_version = version
    message.parameters["sequence_id"].int64_param = name
    message.parameters["sequence_start"].bool_param = start
    message.parameters["sequence_end"].bool_param = end
    return message


def said(answer: Answer) -> tuple[int, int]:
    """(generation, sum)"""
    assert answer.status == OK, answer.text
    return answer.array().item() % 100, answer.array().item() // 100


async def ask(engine: Engine, *args, **flags) -> tuple[int, int]:
    return said(await infer(engine, step(*args, **flags)))


async def refusal(engine: Engine, *args, **flags) -> tuple[int, str]:
    answer = await infer(engine, step(*args, **flags))
    return answer.status, answer.text


async def reload(engine: Engine, root, version: str = "1") -> None:
    file = root / "m" / version / "weights"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{file.read_text() if file.exists() else ''}x")
    await engine.load("m")


def closed(engine: Engine) -> int:
    """Versions that are over."""
    return puppets_of(engine).closed.count("m")


def states(engine: Engine) -> dict[str, tuple[str, str]]:
    return {entry.version: (entry.state, entry.reason) for entry in engine.index()}


# -- loaded anew, or replaced -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct { }", OLDEST])
async def test_a_sequence_goes_on_on_the_version_that_it_began_on(tmp_path, strategy):
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config(strategy)) as engine:
        for name in (1, 2):
            assert await ask(engine, name, name, start=True) == (0, name)
        await reload(engine, tmp_path)
        assert states(engine) == {"1": ("READY", "")}
        assert await ask(engine, 5, 3, start=True) == (1, 5)
        assert await ask(engine, 10, 1) == (0, 11)
        assert await ask(engine, 10, 3) == (1, 15)
        assert await refusal(engine, 1, 4) == (INVALID, f"inference request for sequence 4 to model 'm' {NO_START}")
        assert await ask(engine, 10, 1, end=True) == (0, 21)
        assert closed(engine) == 0
        assert await ask(engine, 10, 2, end=True, version="1") == (0, 12)
        await until(lambda: closed(engine) == 1)
        assert (await refusal(engine, 1, 2))[0] == INVALID
        assert await ask(engine, 1, 3, end=True) == (1, 16)


async def test_a_sequence_that_begins_while_its_model_is_replaced_is_not_refused(tmp_path, monkeypatch):
    """I/O threads take requests while the event loop puts one version in the place of another: what begins when the old
    one takes no more sequences begins on the new one."""
    begun = []
    drain = LoadedVersion.drain

    def drained(version):
        drain(version)
        begun.append(Pending(engine, step(5, 9, start=True)))

    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config()) as engine:
        await ask(engine, 1, 1, start=True)
        monkeypatch.setattr(LoadedVersion, "drain", drained)
        await reload(engine, tmp_path)
        await until(lambda: begun)
        assert said(await begun[0].answer()) == (1, 5)
        monkeypatch.undo()
        assert await ask(engine, 10, 1, end=True) == (0, 11)


async def test_a_sequence_that_begins_just_before_its_model_is_replaced_goes_on(tmp_path, monkeypatch):
    """The old version had none, and gets one after it was looked at, before the new one is found."""
    publish = Models.publish

    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config()) as engine:

        def published(models, name):
            if not begun:
                begun.append(Pending(engine, step(5, 9, start=True)))
            publish(models, name)

        begun = []
        monkeypatch.setattr(Models, "publish", published)
        await reload(engine, tmp_path)
        assert said(await begun[0].answer()) == (0, 5)
        assert await ask(engine, 1, 9, end=True) == (0, 6)


async def test_what_waits_when_the_model_is_loaded_anew_is_executed_in_order(tmp_path):
    gate = Gate(Generations())
    async with serving(tmp_path, gate, control=EXPLICIT, m=config("direct { }")) as engine:
        begun = [Pending(engine, step(1, name, start=n == 0)) for n in range(3) for name in range(1, 9)]
        await gate.entered()
        await reload(engine, tmp_path)
        begun += [Pending(engine, step(1, name, end=True)) for name in range(1, 9)]
        gate.go(1000)
        answers = [said(await each.answer()) for each in begun]
        assert answers == [(0, n + 1) for n in range(4) for _ in range(8)]
        await until(lambda: closed(engine) == 1)


async def test_sequences_follow_a_version_of_another_number(tmp_path):
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config()) as engine:
        assert await ask(engine, 1, 1, start=True) == (0, 1)
        assert await ask(engine, 2, 2, start=True, version="1") == (0, 2)
        await reload(engine, tmp_path, "2")
        assert states(engine) == {"1": ("UNLOADING", "2 sequences go on"), "2": ("READY", "")}
        assert await ask(engine, 1, 1) == (0, 2)
        assert await ask(engine, 1, 2, version="1") == (0, 3)
        assert await refusal(engine, 1, 3, start=True, version="1") == (UNAVAILABLE, ONLY_BEGUN)
        assert (await refusal(engine, 1, 1, version="2"))[0] == INVALID
        assert await ask(engine, 1, 3, start=True) == (1, 1)
        assert await ask(engine, 1, 1, end=True) == (0, 3)
        assert await ask(engine, 1, 2, end=True) == (0, 4)
        await until(lambda: states(engine) == {"2": ("READY", "")})
        answer = await refusal(engine, 1, 1, version="1")
        assert answer == (Status.NOT_FOUND, "Request for unknown model: 'm' version 1 is not found")


async def test_several_versions_depart_beside_each_other(tmp_path):
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config()) as engine:
        for generation in range(4):
            assert await ask(engine, 1, generation + 1, start=True) == (generation, 1)
            await reload(engine, tmp_path)
        for generation in (2, 0, 3, 1):
            assert await ask(engine, 1, generation + 1, end=True) == (generation, 2)
        await until(lambda: closed(engine) == 4)


async def test_a_start_under_a_live_id_ends_the_sequence_on_the_old_version(tmp_path):
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config()) as engine:
        assert await ask(engine, 7, 1, start=True) == (0, 7)
        await reload(engine, tmp_path)
        assert await ask(engine, 1, 1, start=True) == (1, 1)
        await until(lambda: closed(engine) == 1)
        assert await ask(engine, 1, 1, end=True) == (1, 2)
        assert (await refusal(engine, 1, 1))[0] == INVALID


async def test_a_stream_that_ends_takes_its_sequences_on_the_old_version_along(tmp_path):
    text = config() + 'parameters { key: "sequence_ends_with_stream" value { string_value: "true" } }'
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=text) as engine:
        answered = asyncio.get_running_loop().create_future()
        message = step(1, 1, start=True).SerializeToString()
        engine.infer.submit(
            message, lambda *answer: answered.set_result(answer), CallOrigin(stream=True, stream_number=7)
        )
        assert (await answered)[0] == OK
        await reload(engine, tmp_path)
        assert await ask(engine, 1, 1) == (0, 2)
        engine.stream_ended(7)
        await until(lambda: closed(engine) == 1)


async def test_the_time_for_which_sequences_go_on(tmp_path, caplog):
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config(drain="1")) as engine:
        assert await ask(engine, 1, 1, start=True) == (0, 1)
        await reload(engine, tmp_path)
        with caplog.at_level(logging.WARNING):
            await until(lambda: closed(engine) == 1)
        assert "'m' version 1: 1 sequences are ended" in caplog.text
        assert (await refusal(engine, 1, 1))[1].endswith(NO_START + REPLACED)
        assert (await refusal(engine, 1, 2))[1].endswith(NO_START)
        assert await ask(engine, 1, 1, start=True, end=True) == (1, 1)
        assert (await refusal(engine, 1, 1))[1].endswith(NO_START)


async def test_no_time_ends_them_at_once(tmp_path):
    gate = Gate(Generations())
    async with serving(tmp_path, gate, control=EXPLICIT, m=config(drain="0")) as engine:
        begun = [Pending(engine, step(1, 7, start=n == 0)) for n in range(3)]
        await gate.entered()
        await reload(engine, tmp_path)
        gate.go(1000)
        assert (await refusal(engine, 1, 7))[1].endswith(NO_START + REPLACED)
        assert [said(await each.answer()) for each in begun] == [(0, 1), (0, 2), (0, 3)]


async def test_sequences_that_name_no_version_stay_when_a_later_one_comes(tmp_path):
    """The one before still serves who asks for it, and its sequences are not touched by others of the same id."""
    text = config() + "version_policy { all { } }"
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=text) as engine:
        for name in (1, 2):
            assert await ask(engine, 1, name, start=True) == (0, 1)
        await reload(engine, tmp_path, "2")
        assert states(engine) == {"1": ("READY", ""), "2": ("READY", "")}
        assert await ask(engine, 1, 1) == (0, 2)
        assert await ask(engine, 1, 3, start=True) == (1, 1)
        assert await ask(engine, 1, 4, start=True, version="1") == (0, 1)
        assert await ask(engine, 1, 2, start=True) == (1, 1)
        assert await ask(engine, 1, 2, version="1") == (0, 2)
        assert await ask(engine, 1, 2) == (1, 2)
        await engine.unload("m")
        for name, expected in ((1, (0, 3)), (2, (1, 3)), (3, (1, 2)), (4, (0, 2)), (2, (0, 3))):
            assert await ask(engine, 1, name, end=True) == expected
        await until(lambda: closed(engine) == 2)


async def test_a_version_that_is_not_the_latest_any_more_keeps_no_later_request(tmp_path):
    text = config() + "version_policy { all { } }"
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=text) as engine:
        assert await ask(engine, 1, 1, start=True) == (0, 1)
        await reload(engine, tmp_path, "2")
        assert await ask(engine, 1, 1, end=True) == (0, 2)
        await until(lambda: not engine._models["m"].departing)
        assert await ask(engine, 1, 1, start=True, version="1") == (0, 1)
        assert NO_START in (await refusal(engine, 1, 1))[1]
        assert closed(engine) == 0


async def test_a_random_history(tmp_path):
    """A plain model says which version answers what, or that nothing does."""
    rng = random.Random(5)
    versions: list[dict[int, int]] = [{}]  # the sums of what is open on each
    served, known = 0, 1

    def owner(name: int) -> int | None:
        return next((n for n in reversed(range(len(versions))) if name in versions[n]), None)

    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config(OLDEST.replace("8", "64"))) as engine:
        assert await ask(engine, 0, 99, start=True, end=True) == (0, 0)
        for _ in range(600):
            chance = rng.random()
            if chance < 0.02:
                await engine.unload("m") if served >= 0 else None
                served = -1
            elif chance < 0.05:
                await reload(engine, tmp_path)
                served, known = known, known + 1
                versions.append({})
                assert await ask(engine, 0, 99, start=True, end=True) == (served, 0)  # the generations in their order
            else:
                name, start, end = rng.randrange(1, 15), rng.random() < 0.3, rng.random() < 0.2
                where = served if start else owner(name)
                answer = await infer(engine, step(1, name, start=start, end=end))
                if where is None or where < 0:
                    assert answer.status != OK
                    continue
                if start:
                    for each in versions:
                        each.pop(name, None)
                versions[where][name] = versions[where].get(name, 0) + 1
                assert said(answer) == (where, versions[where][name])
                if end:
                    del versions[where][name]
        gone = sum(not each for n, each in enumerate(versions) if n != served)
        await until(lambda: closed(engine) == gone)


# -- unloaded ---------------------------------------------------------------------------------------------------------


async def test_a_model_is_loaded_while_sequences_go_on_on_what_was_unloaded(tmp_path):
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config()) as engine:
        assert await ask(engine, 1, 1, start=True) == (0, 1)
        await engine.unload("m")
        await engine.load("m")
        assert states(engine) == {"1": ("READY", "")}
        assert await ask(engine, 1, 2, start=True) == (1, 1)
        assert await ask(engine, 1, 1, end=True) == (0, 2)
        await until(lambda: closed(engine) == 1)


async def test_what_waits_for_its_model_keeps_the_order_of_its_sequence(tmp_path):
    """Guards the request behind one that begins anew, and waits for the model to be loaded on demand: it went on on the
    version that was being unloaded, with the state of the sequence before."""
    async with serving(tmp_path, Generations(), control=ModelControl(ControlMode.LAZY, ()), m=config()) as engine:
        assert await ask(engine, 7, 1, start=True) == (0, 7)
        await engine.unload("m")
        begun = Pending(engine, step(1, 1, start=True))
        followed = Pending(engine, step(2, 1, end=True))
        assert said(await begun.answer()) == (1, 1)
        assert said(await followed.answer()) == (1, 3)


async def test_a_second_unload_ends_them(tmp_path):
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=config()) as engine:
        assert await ask(engine, 1, 1, start=True) == (0, 1)
        await reload(engine, tmp_path)
        assert await ask(engine, 1, 2, start=True) == (1, 1)
        await engine.unload("m")
        assert await ask(engine, 1, 1) == (0, 2)
        await engine.unload("m")
        await until(lambda: closed(engine) == 2)
        assert (await refusal(engine, 1, 1))[0] == Status.NOT_FOUND


async def test_sequences_go_on_when_a_poll_finds_that_their_model_is_gone(tmp_path):
    control = ModelControl(ControlMode.POLL, poll_seconds=3600)
    async with serving(tmp_path, Generations(), control=control, m=config()) as engine:
        assert await ask(engine, 1, 1, start=True) == (0, 1)
        (tmp_path / "m").rename(tmp_path.parent / f"{tmp_path.name}-m")
        await poll(engine)
        assert await ask(engine, 1, 1) == (0, 2)
        assert states(engine) == {"1": ("UNLOADING", "1 sequences go on")}
        assert await ask(engine, 1, 1, end=True) == (0, 3)
        await until(lambda: not states(engine))
        status, text = await refusal(engine, 1, 1)
        assert (status, text) == (Status.NOT_FOUND, "Request for unknown model: 'm' is not found")


# -- the server stops -------------------------------------------------------------------------------------------------


async def test_what_a_step_refuses_counts_as_a_refusal_of_the_ensemble(tmp_path):
    """Its client hears the reason NOT_READY, which `inferd_refused_requests_total` has once."""
    whole = ensemble_of("m").replace("dims: [ -1 ]", "dims: [ 1 ]").replace("max_batch_size: 8", "max_batch_size: 4")
    async with serving(tmp_path, Generations(), m=config(), whole=whole) as engine:
        assert (await infer(engine, step(1, 1, start=True))).status == OK
        engine.drain()
        finishing = asyncio.create_task(engine.finish_sequences(600))
        await asyncio.sleep(0)
        before = refusal_counts().get("NOT_READY", 0)
        refused = await infer(engine, step(1, 2, start=True, model="whole"))
        assert refused.status == UNAVAILABLE
        assert "no sequence begins on model 'm'" in refused.text
        assert refusal_counts()["NOT_READY"] == before + 1
        assert (await infer(engine, step(1, 1, end=True))).status == OK
        await finishing
