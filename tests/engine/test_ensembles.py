"""Guards ensembles in a real engine: what is executed, what is not, and how a request ends when a step fails, is late,
or nobody waits for it any more.
"""

import asyncio

import numpy as np
import pytest

from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.errors import Status, Unavailable
from tests.engine.serving import Gate, Loader, Pending, echo, infer, request, row, serving

MS = 1_000_000


pytestmark = pytest.mark.usefixtures("native_counters")


def tensors(kind, *names, datatype="INT64", dims="[ -1 ]", extra=""):
    return "".join(f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: {dims} {extra} }}\n' for name in names)


def step(model, inputs, outputs, version=-1):
    def entries(kind, pairs):
        return "".join(f'{kind} {{ key: "{key}" value: "{value}" }} ' for key, value in pairs.items())

    return (
        f'step {{ model_name: "{model}" model_version: {version} '
        f"{entries('input_map', inputs)}{entries('output_map', outputs)}}}\n"
    )


def ensemble(*steps, inputs=("x",), outputs=("y",), max_batch_size=8, extra="", scheduling=""):
    return (
        f'platform: "ensemble"\nmax_batch_size: {max_batch_size}\n'
        f"{tensors('input', *inputs)}{tensors('output', *outputs)}"
        f"ensemble_scheduling {{\n{''.join(steps)}{scheduling} }}\n{extra}"
    )


def parameter(key, value):
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def model(*, inputs=("x",), outputs=("y",), max_batch_size=8, extra="dynamic_batching { }", optional=()):
    declared = tensors("input", *(name for name in inputs if name not in optional))
    return (
        f'backend: "puppet"\nmax_batch_size: {max_batch_size}\n{declared}'
        f"{tensors('input', *optional, extra='optional: true')}{tensors('output', *outputs)}"
        f"instance_group {{ kind: KIND_CPU count: 1 }}\n{extra}"
    )


def plus(number):
    def execute(batch):
        batch.set_output("y", batch.input("x").numpy() + number)

    return execute


def add(batch):
    batch.set_output("y", batch.input("a").numpy() + batch.input("b").numpy())


CHAIN = ensemble(
    step("one", {"x": "x"}, {"y": "t"}),
    step("ten", {"x": "t"}, {"y": "y"}),
)


def executions(engine, *names):
    return {name: engine.model(name).statistics().execution_count for name in names}


# -- what is executed --


async def test_steps_that_do_not_depend_on_each_other_run_at_the_same_time(tmp_path):
    left, right = Gate(plus(1)), Gate(plus(10))
    join = model(inputs=("a", "b"))
    diamond = ensemble(
        step("join", {"a": "l", "b": "r"}, {"y": "y"}),  # steps may stand in any order
        step("left", {"x": "x"}, {"y": "l"}),
        step("right", {"x": "x"}, {"y": "r"}),
    )
    models = {"left": left, "right": right, "join": add}
    async with serving(tmp_path, models, left=model(), right=model(), join=join, e=diamond) as engine:
        pending = Pending(engine, request("e", x=row(5)))
        await left.entered()
        await right.entered()
        left.go()
        right.go()
        assert (await pending.answer()).array().item() == 21


async def test_steps_batch_over_requests(tmp_path):
    gate = Gate(plus(1))
    one_step = ensemble(step("one", {"x": "x"}, {"y": "y"}))
    async with serving(tmp_path, {"one": gate}, one=model(), e=one_step) as engine:
        first = Pending(engine, request("e", x=row(0)))
        await gate.entered()
        others = [Pending(engine, request("e", x=row(n))) for n in range(1, 4)]
        gate.go(2)
        assert [(await each.answer()).array().item() for each in (first, *others)] == [1, 2, 3, 4]
        assert gate.batches == [(1, 1), (3, 3)]


async def test_a_step_is_asked_only_for_the_outputs_that_are_needed(tmp_path):
    asked = []

    def both(batch):
        asked.append((batch.wants("y"), batch.wants("z")))
        for name in ("y", "z"):
            if batch.wants(name):
                batch.set_output(name, batch.input("x").numpy())

    two = ensemble(step("both", {"x": "x"}, {"y": "y", "z": "z"}), outputs=("y", "z"))
    async with serving(tmp_path, {"both": both}, both=model(outputs=("y", "z")), e=two) as engine:
        await infer(engine, request("e", outputs=("z",), x=row(1)))
        await infer(engine, request("e", x=row(1)))
    assert asked == [(False, True), (True, True)]


async def test_an_output_that_is_an_input_and_a_tensor_used_twice(tmp_path):
    config = ensemble(step("join", {"a": "x", "b": "x"}, {"y": "y"}), outputs=("y", "x"))
    async with serving(tmp_path, {"join": add}, join=model(inputs=("a", "b")), e=config) as engine:
        answer = await infer(engine, request("e", x=row(4)))
        assert (answer.array("y").item(), answer.array("x").item()) == (8, 4)


async def test_tensors_are_passed_without_a_copy(tmp_path):
    seen = []

    def look(batch):
        array = batch.input("x").numpy()
        seen.append(array.__array_interface__["data"][0])
        batch.set_output("y", array)

    look.writes_inputs = False
    chain = ensemble(
        *(step("look", {"x": f"t{n}" if n else "x"}, {"y": f"t{n + 1}"}) for n in range(3)), outputs=("t3",)
    )
    async with serving(tmp_path, {"look": look}, look=model(), e=chain) as engine:
        await infer(engine, request("e", x=np.zeros((1, 100_000), np.int64)))
    assert len(seen) == 3
    assert seen[1] == seen[2]  # the first one came in a message and is aligned by a copy


async def test_versions_of_steps(tmp_path):
    for version in ("1", "2"):
        (tmp_path / "one" / version).mkdir(parents=True)
    both = "version_policy { all { } }"
    latest = ensemble(step("one", {"x": "x"}, {"y": "y"}))
    first = ensemble(step("one", {"x": "x"}, {"y": "y"}, version=1))
    async with serving(tmp_path, plus(1), one=model(extra=both), latest=latest, first=first) as engine:
        await infer(engine, request("latest", x=row(1)))
        assert [v.statistics().execution_count for v in engine.versions("one")] == [0, 1]
        await infer(engine, request("first", x=row(1)))
        assert [v.statistics().execution_count for v in engine.versions("one")] == [1, 1]


# -- optional and missing tensors --


def sum_of_present(batch):
    given = [batch.input(name) for name in ("a", "b")]
    batch.set_output("y", sum(view.numpy() for view in given if view is not None))


def lacking(batch):
    """Gives y and leaves z out."""
    batch.set_output("y", batch.input("x").numpy())


async def test_an_output_that_a_step_leaves_out_is_an_absent_input_of_the_next(tmp_path):
    config = ensemble(
        step("lacking", {"x": "x"}, {"y": "t", "z": "u"}),
        step("sum", {"a": "t", "b": "u"}, {"y": "y"}),
    )
    models = {"lacking": lacking, "sum": sum_of_present}
    configs = {"lacking": model(outputs=("y", "z")), "sum": model(inputs=("a", "b"), optional=("b",)), "e": config}
    async with serving(tmp_path, models, **configs) as engine:
        assert (await infer(engine, request("e", x=row(5)))).array().item() == 5


async def test_an_input_that_a_model_must_have_and_no_step_gives(tmp_path):
    config = ensemble(
        step("lacking", {"x": "x"}, {"y": "t", "z": "u"}),
        step("join", {"a": "t", "b": "u"}, {"y": "y"}),
    )
    models = {"lacking": lacking, "join": add}
    configs = {"lacking": model(outputs=("y", "z")), "join": model(inputs=("a", "b")), "e": config}
    async with serving(tmp_path, models, **configs) as engine:
        answer = await infer(engine, request("e", x=row(5)))
        assert answer.status == Status.INVALID_ARGUMENT
        assert answer.text.startswith("in ensemble 'e', [request id: <id_unknown>] expected 2 inputs but got 1 inputs")


async def test_an_output_that_a_step_leaves_out_is_not_in_the_answer(tmp_path):
    config = ensemble(step("lacking", {"x": "x"}, {"y": "y", "z": "z"}), outputs=("y", "z"))
    async with serving(tmp_path, {"lacking": lacking}, lacking=model(outputs=("y", "z")), e=config) as engine:
        answer = await infer(engine, request("e", x=row(5)))
        assert [output.name for output in answer.response.outputs] == ["y"]


@pytest.mark.parametrize("name", ["coalesce_requests", "split_requests"])
async def test_a_step_that_is_coalesced_or_split_may_leave_outputs_out_too(tmp_path, name):
    config = ensemble(step("lacking", {"x": "x"}, {"y": "y", "z": "z"}), outputs=("y", "z"), max_batch_size=0)
    lacks = model(outputs=("y", "z"), max_batch_size=1, extra=parameter(name, "true"))
    rows = np.array([[5], [6]] if name == "split_requests" else [[5]])
    async with serving(
        tmp_path, {"lacking": lacking}, lacking=lacks, e=config.replace("[ -1 ]", "[ -1, -1 ]")
    ) as engine:
        answer = await infer(engine, request("e", x=rows))
        assert [output.name for output in answer.response.outputs] == ["y"]
        assert answer.array().tolist() == rows.tolist()
        direct = await infer(engine, request("lacking", x=rows))
        assert (direct.status, direct.text) == (Status.INTERNAL, "model 'lacking' did not produce output 'z'")


@pytest.mark.parametrize("first", ["e", "lacking"])
async def test_a_client_that_shares_the_work_of_a_step_still_hears_what_is_missing(tmp_path, first):
    """The step does not fail, whichever client has asked first."""
    gate = Gate(lacking)
    config = ensemble(step("lacking", {"x": "x"}, {"y": "y", "z": "z"}), outputs=("y", "z"))
    lacks = model(outputs=("y", "z"), extra=parameter("coalesce_requests", "true"))
    async with serving(tmp_path, {"lacking": gate}, lacking=lacks, e=config) as engine:
        asked = [(first, Pending(engine, request(first, x=row(5))))]
        await gate.entered()
        asked += [(name, Pending(engine, request(name, x=row(5)))) for name in ("lacking", "e")]
        gate.go()
        for name, each in asked:
            answer = await each.answer()
            assert answer.status == (Status.OK if name == "e" else Status.INTERNAL), name
            assert name != "e" or [output.name for output in answer.response.outputs] == ["y"]
        assert gate.batches == [(1, 1)]
        assert engine.infer.reuse()["followers"] == 2


# -- batch dimensions --


async def test_a_step_without_batch_dimension(tmp_path):
    def single(batch):
        array = batch.input("x").numpy()
        assert array.ndim == 1
        batch.set_output("y", array + 1)

    config = ensemble(
        step("single", {"x": "x"}, {"y": "t"}),
        step("ten", {"x": "t"}, {"y": "y"}),
    )
    configs = {"single": model(max_batch_size=0, extra=""), "ten": model(), "e": config}
    async with serving(tmp_path, {"single": single, "ten": plus(10)}, **configs) as engine:
        assert (await infer(engine, request("e", x=row(1, 2)))).array().tolist() == [[12, 13]]
        answer = await infer(engine, request("e", x=np.ones((2, 2), np.int64)))
        assert answer.status == Status.INVALID_ARGUMENT
        assert "unexpected shape for input 'x' for model 'single'. Expected [-1], got [2,2]" in answer.text


async def test_a_model_that_has_the_batch_dimension_among_its_own(tmp_path):
    whole = 'backend: "puppet"\nmax_batch_size: 0\n' + tensors("input", "x", dims="[ -1, -1 ]")
    whole += tensors("output", "y", dims="[ -1, -1 ]") + "instance_group { kind: KIND_CPU count: 1 }"
    config = ensemble(step("whole", {"x": "x"}, {"y": "t"}), step("ten", {"x": "t"}, {"y": "y"}))
    async with serving(tmp_path, {"whole": plus(1), "ten": plus(10)}, whole=whole, ten=model(), e=config) as engine:
        answer = await infer(engine, request("e", x=np.arange(6).reshape(3, 2)))
        assert answer.array().tolist() == [[11, 12], [13, 14], [15, 16]]


# -- conditional steps --


def is_large(batch):
    x = batch.input("x").numpy()
    batch.set_output("large", (x > 10).any(axis=1, keepdims=True))


LARGE = (
    'backend: "puppet"\nmax_batch_size: 8\n'
    + tensors("input", "x")
    + tensors("output", "large", datatype="BOOL", dims="[ 1 ]")
    + "instance_group { kind: KIND_CPU count: 1 }"
)


async def test_a_gated_step_runs_for_a_batch_in_which_any_row_asks_for_it(tmp_path):
    config = ensemble(
        step("is_large", {"x": "x"}, {"large": "large"}),
        step("one", {"x": "x"}, {"y": "y"}),
        step("ten", {"x": "x"}, {"y": "z"}),
        outputs=("y", "z"),
        extra=parameter("gate[one]", "large") + parameter("gate[ten]", "!large"),
    )
    models = {"is_large": is_large, "one": plus(1), "ten": plus(10)}
    async with serving(tmp_path, models, is_large=LARGE, one=model(), ten=model(), e=config) as engine:
        answer = await infer(engine, request("e", x=np.array([[20], [5]])))
        assert answer.array("y").tolist() == [[21], [6]]
        assert answer.array("z").tolist() == [[30], [15]]


# -- failures --


async def test_a_failing_step_fails_the_request_with_the_name_of_the_ensemble(tmp_path):
    def broken(batch):
        raise RuntimeError("no such thing")

    async with serving(tmp_path, {"one": plus(1), "ten": broken}, one=model(), ten=model(), e=CHAIN) as engine:
        answer = await infer(engine, request("e", x=row(1)))
        assert (answer.status, answer.text) == (Status.INTERNAL, "in ensemble 'e', no such thing")
        statistics = engine.model("e").statistics()
        assert (statistics.inference_stats.success.count, statistics.fail_reasons["BACKEND"].count) == (0, 1)


async def test_a_failing_step_ends_the_others(tmp_path):
    slow = Gate(plus(1))

    def broken(batch):
        raise RuntimeError("no")

    config = ensemble(
        step("slow", {"x": "x"}, {"y": "l"}),
        step("broken", {"x": "x"}, {"y": "r"}),
        step("join", {"a": "l", "b": "r"}, {"y": "y"}),
    )
    models = {"slow": slow, "broken": broken, "join": add}
    configs = {"slow": model(), "broken": model(), "join": model(inputs=("a", "b")), "e": config}
    async with serving(tmp_path, models, **configs) as engine:
        hold = Pending(engine, request("slow", x=row(1)))
        await slow.entered()
        answer = await infer(engine, request("e", x=row(1)))
        assert answer.text == "in ensemble 'e', no"
        assert engine.model("slow").lane.pending == 0  # the step that waited is gone
        slow.go()
        await hold.answer()
        assert slow.batches == [(1, 1)]


async def test_a_full_queue_of_a_step(tmp_path):
    gate = Gate(plus(1))
    one_step = ensemble(step("one", {"x": "x"}, {"y": "y"}), max_batch_size=1)
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    async with serving(tmp_path, {"one": gate}, one=model(max_batch_size=1, extra=queue), e=one_step) as engine:
        first = Pending(engine, request("e", x=row(1)))
        await gate.entered()
        second = Pending(engine, request("e", x=row(2)))
        answer = await infer(engine, request("e", x=row(3)))
        assert answer.status == Status.UNAVAILABLE
        assert answer.text.startswith("in ensemble 'e', ")
        assert "Exceeds maximum queue size" in answer.text
        for name in ("one", "e"):
            assert engine.model(name).statistics().fail_reasons["REJECTED"].count == 1
        gate.go(2)
        assert (await first.answer()).status == (await second.answer()).status == Status.OK


# -- cancellation and deadlines --


async def test_cancelling_an_ensemble_cancels_its_steps(tmp_path):
    gate = Gate(plus(1))
    async with serving(tmp_path, {"one": gate, "ten": plus(10)}, one=model(), ten=model(), e=CHAIN) as engine:
        hold = Pending(engine, request("one", x=row(0)))
        await gate.entered()
        pending = [Pending(engine, request("e", x=row(n))) for n in range(3)]
        assert engine.model("one").lane.pending == 3
        pending[1].ticket.cancel()
        assert engine.model("one").lane.pending == 2
        gate.go(2)
        await hold.answer()
        assert [(await pending[n].answer()).array().item() for n in (0, 2)] == [11, 13]
        assert pending[1].answers == []
        assert gate.batches == [(1, 1), (2, 2)]
        for name in ("one", "e"):
            assert engine.model(name).statistics().fail_reasons["CANCELED"].count == 1


async def test_cancelling_while_a_step_runs_stops_the_ones_behind_it(tmp_path):
    gate = Gate(plus(1))
    async with serving(tmp_path, {"one": gate, "ten": plus(10)}, one=model(), ten=model(), e=CHAIN) as engine:
        pending = Pending(engine, request("e", x=row(0)))
        await gate.entered()
        pending.ticket.cancel()
        gate.go(2)
        await infer(engine, request("one", x=row(0)))
        assert executions(engine, "ten") == {"ten": 0}
        assert pending.answers == []


async def test_the_deadline_of_an_ensemble_ends_its_steps(tmp_path):
    gate = Gate(plus(1))
    async with serving(tmp_path, {"one": gate, "ten": plus(10)}, one=model(), ten=model(), e=CHAIN) as engine:
        hold = Pending(engine, request("one", x=row(0)))
        await gate.entered()
        answer = await infer(engine, request("e", x=row(1)), timeout_ns=20 * MS)
        assert (answer.status, answer.text) == (Status.DEADLINE_EXCEEDED, "Deadline Exceeded")
        assert engine.model("one").lane.pending == 0
        gate.go()
        await hold.answer()
        assert gate.batches == [(1, 1)]


async def test_cancelling_everything_at_random_leaves_nothing(tmp_path):
    models = {"one": plus(1), "ten": plus(10)}
    outer = ensemble(step("e", {"x": "x"}, {"y": "t"}), step("one", {"x": "t"}, {"y": "y"}))
    async with serving(tmp_path, models, one=model(), ten=model(), e=CHAIN, outer=outer) as engine:
        generator = np.random.default_rng(5)
        for _ in range(40):
            pending = [Pending(engine, request("outer", x=row(n))) for n in range(16)]
            for _ in range(int(generator.integers(4))):
                await asyncio.sleep(0)
            gone = generator.random(16) < 0.4
            for each, leave in zip(pending, gone, strict=True):
                if leave:
                    each.ticket.cancel()
            for n, each in enumerate(pending):
                if not gone[n]:
                    assert (await each.answer()).array().item() == n + 12


# -- limits --


async def test_at_most_max_inflight_requests_of_a_step(tmp_path):
    gate = Gate(plus(1))
    config = ensemble(step("one", {"x": "x"}, {"y": "y"}), scheduling="max_inflight_requests: 2")
    async with serving(tmp_path, {"one": gate}, one=model(max_batch_size=8), e=config) as engine:
        first = Pending(engine, request("e", x=row(0)))
        await gate.entered()
        others = [Pending(engine, request("e", x=row(n))) for n in range(1, 6)]
        assert engine.model("one").lane.pending == 1  # one runs, one is queued, four wait for their turn
        others[1].ticket.cancel()  # one that waits
        gate.go(10)
        answers = [await each.answer() for each in (first, others[0], *others[2:])]
        assert [answer.array().item() for answer in answers] == [1, 2, 4, 5, 6]
        assert max(rows for _, rows in gate.batches) <= 2


async def test_at_most_max_queue_size_requests_in_an_ensemble(tmp_path):
    gate = Gate(plus(1))
    config = ensemble(step("one", {"x": "x"}, {"y": "y"}), extra=parameter("queue_policy.max_queue_size", "2"))
    async with serving(tmp_path, {"one": gate}, one=model(), e=config) as engine:
        first = Pending(engine, request("e", x=row(0)))
        second = Pending(engine, request("e", x=row(1)))
        answer = await infer(engine, request("e", x=row(2)))
        assert answer.status == Status.UNAVAILABLE
        assert answer.text == (
            "Exceeds maximum queue size: ensemble 'e' version 1 has 2 requests in it, which is its limit"
        )
        gate.go(3)
        await first.answer()
        await second.answer()
        assert (await infer(engine, request("e", x=row(3)))).status == Status.OK


async def test_the_timeout_of_an_ensemble(tmp_path):
    gate = Gate(plus(1))
    config = ensemble(
        step("one", {"x": "x"}, {"y": "y"}), extra=parameter("queue_policy.default_timeout_microseconds", "20000")
    )
    async with serving(tmp_path, {"one": gate}, one=model(), e=config) as engine:
        hold = Pending(engine, request("one", x=row(0)))
        await gate.entered()
        answer = await infer(engine, request("e", x=row(1)))
        assert answer.status == Status.UNAVAILABLE
        assert answer.text == ("Request timeout expired: ensemble 'e' version 1 has held it for 20000 us, its limit")
        assert engine.model("one").lane.pending == 0
        gate.go()
        await hold.answer()
        assert gate.batches == [(1, 1)]


# -- what is told --


async def test_statistics_of_an_ensemble(tmp_path):
    models = {"one": plus(1), "ten": plus(10)}
    async with serving(tmp_path, models, one=model(), ten=model(), e=CHAIN) as engine:
        for rows in (1, 3):
            await infer(engine, request("e", x=np.ones((rows, 2), np.int64)))
        found = engine.model("e").statistics()
        assert (found.inference_count, found.execution_count) == (4, 2)
        assert found.inference_stats.success.count == 2
        steps = [engine.model(name).statistics().inference_stats for name in models]
        for phase in ("queue", "compute_input", "compute_infer", "compute_output"):
            assert getattr(found.inference_stats, phase).ns == sum(getattr(each, phase).ns for each in steps)


async def test_labels_come_from_the_step_that_writes_the_output(tmp_path):
    labelled = model().replace('output { name: "y"', 'output { name: "y" label_filename: "labels.txt"')
    (tmp_path / "one" / "1").mkdir(parents=True)
    (tmp_path / "one" / "labels.txt").write_text("cat\ndog\n")
    config = ensemble(step("one", {"x": "x"}, {"y": "y"}))
    async with serving(tmp_path, {"one": echo}, one=labelled, e=config) as engine:
        message = request("e", x=row(3, 9))
        message.outputs.add(name="y").parameters["classification"].int64_param = 1
        answer = await infer(engine, message)
        assert answer.array().tolist() == [[b"9:1:dog"]]


async def test_requests_finish_when_the_engine_closes(tmp_path):
    models = {"one": plus(1), "ten": plus(10)}
    async with serving(tmp_path, models, one=model(), ten=model(), e=CHAIN) as engine:
        pending = [Pending(engine, request("e", x=row(n))) for n in range(20)]
    assert [(await each.answer()).array().item() for each in pending] == [n + 11 for n in range(20)]


async def test_an_ensemble_is_ready_while_the_models_of_its_steps_are(tmp_path):
    models = {"one": plus(1), "ten": plus(10)}
    control = ModelControl(ControlMode.EXPLICIT, (ALL,))
    async with serving(tmp_path, models, control=control, one=model(), ten=model(), e=CHAIN) as engine:
        told = []
        engine.subscribe(lambda name, version, ready: told.append((name, version, ready)))
        await engine.unload("ten")
        assert told == [("ten", 1, False), ("e", 1, False)]
        with pytest.raises(Unavailable, match="in ensemble 'e', Request for unknown model: 'ten'"):
            engine.model("e")
        answer = await infer(engine, request("e", x=row(1)))
        assert answer.status == Status.UNAVAILABLE
        assert answer.text.startswith("in ensemble 'e', Request for unknown model: 'ten'")


async def test_an_ensemble_whose_step_does_not_load(tmp_path):
    root = tmp_path / "models"
    async with serving(root, {"one": plus(1), "ten": plus(10)}, one=model(), ten=model(), e=CHAIN):
        pass
    (root / "ten" / "config.pbtxt").write_text(model().replace("puppet", "pytorch"))  # there is no model.pt
    engine = Engine([root], Loader({"one": plus(1)}), Options())
    try:
        problems = await engine.start()
        assert len(problems) == 2
        assert problems[1].startswith("failed to load 'ten'")
        assert problems[0].startswith("failed to load 'e': ensemble 'e' depends on 'ten' which has no loaded version")
        assert (await infer(engine, request("one", x=row(1)))).status == Status.OK
        assert (await infer(engine, request("e", x=row(1)))).status == Status.NOT_FOUND
    finally:
        await engine.close()
