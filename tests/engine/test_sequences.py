"""Guards sequences in a real engine: what a model is told, the state it is given, and what becomes of late requests."""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferd._native.execution.python_batch import Batch
from inferd.server.errors import Status
from tests.engine.serving import DTYPES, Answer, Gate, Pending, infer, infer_all, request, serving
from tests.waiting import until

OK, INVALID, CANCELLED, UNAVAILABLE = Status.OK, Status.INVALID_ARGUMENT, Status.CANCELLED, Status.UNAVAILABLE

HEAD = """
backend: "puppet"
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""

CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 2 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: %s } }
"""

STATE = 'state { input_name: "sum" output_name: "sum_out" data_type: TYPE_INT64 dims: [ 1 ] %s }'

TELL_END = """
parameters { key: "sequence_end_notice" value { string_value: "true" } }
parameters { key: "sequence_end_reason" value { string_value: "WHY" } }
"""


pytestmark = pytest.mark.usefixtures("native_counters")


def config(strategy: str = "oldest { }", *more: str, after: str = "", idle_us: int = 60_000_000) -> str:
    inside = "\n".join((strategy, *more))
    return f"{HEAD}\nsequence_batching {{ max_sequence_idle_microseconds: {idle_us}\n{inside} }}\n{after}"


def controls(corrid: str = "TYPE_UINT64") -> str:
    return CONTROLS % corrid


def step(x: Any, name: int | str, *, start: bool = False, end: bool = False, timeout_us: int = 0) -> Any:
    """A request of a sequence; x is a number or an array."""
    message = request(x=np.array([[x]], dtype=np.int64) if isinstance(x, int) else x)
    if isinstance(name, str):
        message.parameters["sequence_id"].string_param = name
    elif name:
        message.parameters["sequence_id"].int64_param = name
    if start:
        message.parameters["sequence_start"].bool_param = True
    if end:
        message.parameters["sequence_end"].bool_param = True
    if timeout_us:
        message.parameters["timeout"].int64_param = timeout_us
    return message


@dataclass
class Accumulator:
    """y and the state are the sum of the sequence so far; remembers what it was told, a dict for each batch."""

    names: tuple[str, ...] = ()
    told: list[dict[str, list[Any]]] = field(default_factory=list)

    def __call__(self, batch: Batch) -> None:
        self.told.append({name: list(batch.input(name).numpy().reshape(-1)) for name in self.names})
        total = batch.input("sum").numpy() + batch.input("x").numpy()
        batch.set_output("y", total.copy())
        batch.set_output("sum_out", total)


def told(batch: Batch, *names: str) -> dict[str, list[Any]]:
    return {name: list(batch.input(name).numpy().reshape(-1)) for name in names}


def value(answer: Answer) -> int:
    assert answer.status == OK, answer.text
    return int(answer.array().item())


# -- what the model is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["START", "END", "READY"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("int32_false_true: [ -7, 2147483647 ]", np.array([-7, 2147483647], np.int32)),
        ("fp32_false_true: [ 0.25, -1 ]", np.array([0.25, -1], np.float32)),
        ("bool_false_true: [ true, false ]", np.array([True, False])),
    ],
)
async def test_a_control_of_every_kind_in_every_datatype(tmp_path, kind, values, expected):
    seen = []

    def look(batch):
        seen.append(batch.input("C").numpy().copy())
        batch.set_output("y", batch.input("x").numpy().copy())

    control = f'control_input {{ name: "C" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'
    async with serving(tmp_path, look, m=config("direct { }", control)) as engine:
        for flags in ({"start": True}, {}, {"end": True}, {"start": True, "end": True}):
            assert (await infer(engine, step(1, 7, **flags))).status == OK
    says = {"START": [1, 0, 0, 1], "END": [0, 0, 1, 1], "READY": [1, 1, 1, 1]}[kind]
    assert [each.tolist() for each in seen] == [[[expected[value].item()]] for value in says]
    assert {each.dtype for each in seen} == {expected.dtype}


@pytest.mark.parametrize(
    ("datatype", "name", "expected"),
    [
        ("TYPE_UINT64", -1, (1 << 64) - 1),
        ("TYPE_INT64", -5, -5),
        ("TYPE_UINT32", (1 << 32) + 9, 9),  # the low bytes, as Triton does
        ("TYPE_INT32", 9, 9),
        ("TYPE_INT32", (1 << 31) + 1, -(1 << 31) + 1),
        ("TYPE_STRING", "abc", b"abc"),
        ("TYPE_STRING", "é" * 500, ("é" * 500).encode()),
    ],
)
async def test_a_model_is_told_the_correlation_id_in_its_datatype(tmp_path, datatype, name, expected):
    seen = []

    def look(batch):
        seen.append((batch.input("CORRID").shape, *batch.input("CORRID").numpy().reshape(-1)))
        batch.set_output("y", batch.input("x").numpy().copy())

    async with serving(tmp_path, look, m=config("oldest { }", controls(datatype))) as engine:
        assert (await infer(engine, step(1, name, start=True))).status == OK
    assert seen == [((1, 1), expected)]


async def test_an_id_of_the_other_kind_is_refused(tmp_path):
    async with serving(tmp_path, m=config("oldest { }", controls())) as engine:
        answer = await infer(engine, step(1, "abc", start=True))
    assert (answer.status, "data-type is 'BYTES', but model 'm' expects 'UINT64'" in answer.text) == (INVALID, True)


async def test_without_a_batch_dimension(tmp_path):
    seen = []

    def look(batch):
        seen.append((batch.input("START").shape, *told(batch, "START", "CORRID").values()))
        batch.set_output("y", batch.input("x").numpy().copy())

    text = config("direct { }", controls()).replace("max_batch_size: 4", "max_batch_size: 0")
    async with serving(tmp_path, look, m=text) as engine:
        for name in (3, 4):  # one slot: the second waits for the end of the first
            for message in (step(np.arange(2), name, start=True), step(np.arange(2), name, end=True)):
                assert (await infer(engine, message)).status == OK
    assert seen == [((1,), [1], [3]), ((1,), [0], [3]), ((1,), [1], [4]), ((1,), [0], [4])]


async def test_direct_keeps_rows_and_fills_idle_ones(tmp_path):
    model = Accumulator(("READY", "CORRID"))
    gate = Gate(model)
    async with serving(tmp_path, gate, m=config("direct { }", controls(), STATE % "")) as engine:
        first = [Pending(engine, step(name, name, start=True)) for name in (1, 2, 3)]
        await gate.entered()
        gate.go(100)
        assert [value(await each.answer()) for each in first] == [1, 2, 3]
        model.told.clear()
        assert value(await infer(engine, step(10, 3))) == 13
        assert value(await infer(engine, step(10, 1))) == 11
        assert value(await infer(engine, step(10, 2, end=True))) == 12
        assert value(await infer(engine, step(4, 4, start=True))) == 4  # takes the row that became free
    assert [each["READY"] for each in model.told] == [[False, False, True], [True], [False, True], [False, True]]
    assert [each["CORRID"][-1] for each in model.told] == [3, 1, 2, 4]


async def test_other_shapes_wait_for_their_own_batch(tmp_path):
    seen = []

    def look(batch):
        x = batch.input("x").numpy()
        seen.append((x.shape, told(batch, "READY")["READY"]))
        batch.set_output("y", x.copy())

    gate = Gate(look)
    async with serving(tmp_path, gate, m=config("direct { }", controls())) as engine:
        hold = Pending(engine, step(0, 9, start=True))
        await gate.entered()
        others = [Pending(engine, step(np.ones((1, n), np.int64), n, start=True)) for n in (2, 3)]
        gate.go(100)
        for each in (hold, *others):
            assert (await each.answer()).status == OK
    assert seen[1:] == [((2, 2), [False, True]), ((3, 3), [False, False, True])]


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 1000])
@pytest.mark.parametrize(
    "keep",
    ["", "use_same_buffer_for_input_output: true", "use_same_buffer_for_input_output: true use_growable_memory: true"],
)
async def test_state_of_growing_shape(tmp_path, keep, width):
    """What came so far, as a state with a variable dimension; sequences of different lengths do not mix."""

    def remember(batch):
        past, x = batch.input("past").numpy(), batch.input("x").numpy()
        both = np.concatenate([past, x], axis=1)
        batch.set_output("past_out", both)
        batch.set_output("y", both.copy())

    state = f'state {{ input_name: "past" output_name: "past_out" data_type: TYPE_INT64 dims: [ -1 ] {keep} }}'
    async with serving(tmp_path, remember, m=config("oldest { max_candidate_sequences: 8 }", state)) as engine:
        expected = {1: [0], 2: [0]}  # without an initial state a variable dimension begins with one zero
        await infer(engine, step(0, 1, start=True))
        expected[1].append(0)
        for turn in range(30):
            x = np.full((1, width), turn)
            messages = [step(x, 1), step(x, 2, start=turn == 0)]
            for name, answer in zip((1, 2), await infer_all(engine, *messages), strict=True):
                expected[name].extend([turn] * width)
                assert list(answer.array()[0]) == expected[name]


@pytest.mark.parametrize("initial", ["", "zero_data: true", 'data_file: "begin"'])
@pytest.mark.parametrize("name", sorted(DTYPES))
async def test_state_of_every_datatype(tmp_path, name, initial):
    dtype = np.dtype(DTYPES[name])
    begin = np.array([[1, 0, 1]]).astype(dtype) if "file" in initial else np.zeros((1, 3), dtype)
    (tmp_path / "m" / "initial_state").mkdir(parents=True)
    (tmp_path / "m" / "initial_state" / "begin").write_bytes(begin.tobytes())
    seen = []

    def invert(batch):
        state = batch.input("s").numpy()
        seen.append(state.copy())
        batch.set_output("s_out", (state == 0).astype(dtype))
        batch.set_output("y", batch.input("x").numpy().copy())

    how = f'initial_state {{ name: "i" data_type: TYPE_{name} dims: [ 3 ] {initial} }}' if initial else ""
    state = f'state {{ input_name: "s" output_name: "s_out" data_type: TYPE_{name} dims: [ 3 ] {how} }}'
    async with serving(tmp_path, invert, m=config("oldest { }", state)) as engine:
        for turn in range(3):
            assert (await infer(engine, step(1, 1, start=turn == 0))).status == OK
    assert [each.dtype for each in seen] == [dtype] * 3
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate([begin, begin == 0, begin]).astype(dtype))


async def test_state_of_strings(tmp_path):
    def join(batch):
        numbers = batch.input("x").numpy().reshape(-1)
        text = [past + bytes([65 + x]) for past, x in zip(batch.input("s").strings(), numbers, strict=True)]
        batch.set_bytes_output("s_out", text, (batch.rows, 1))
        batch.set_output("y", np.array([[len(each)] for each in text], np.int64))

    state = 'state { input_name: "s" output_name: "s_out" data_type: TYPE_STRING dims: [ 1 ] }'
    text = config("oldest { }", state, after='output { name: "s_out" data_type: TYPE_STRING dims: [ 1 ] }')
    async with serving(tmp_path, join, m=text) as engine:
        for n, start in ((0, True), (1, False), (2, False)):
            answer = await infer(engine, step(n, 1, start=start))
        assert list(answer.array("s_out").flat) == [b"ABC"]


async def test_rows_of_one_sequence(tmp_path):
    """With the strategy oldest, a request may have several rows: the sequence has a state for each."""
    async with serving(tmp_path, Accumulator(("CORRID",)), m=config("oldest { }", controls(), STATE % "")) as engine:
        rows = np.array([[1], [2], [3]])
        assert list((await infer(engine, step(rows, 5, start=True))).array().flat) == [1, 2, 3]
        assert list((await infer(engine, step(rows, 5))).array().flat) == [2, 4, 6]
        answer = await infer(engine, step(1, 5))
        assert answer.status == INVALID
        assert "must have the batch size 3 with which its sequence started, got 1" in answer.text
    async with serving(tmp_path, Accumulator(), m=config("direct { }", STATE % "")) as engine:
        answer = await infer(engine, step(rows, 5, start=True))
        assert (answer.status, "must specify batch-size 1" in answer.text) == (INVALID, True)


async def test_a_failed_batch_leaves_the_state(tmp_path):
    model = Accumulator()

    def fragile(batch):
        if batch.input("x").numpy().max() > 99:
            batch.set_output("sum_out", batch.input("x").numpy())
            raise RuntimeError("too much")
        model(batch)

    async with serving(tmp_path, fragile, m=config("oldest { }", STATE % "")) as engine:
        assert value(await infer(engine, step(5, 1, start=True))) == 5
        assert (await infer(engine, step(100, 1))).text == "too much"
        assert value(await infer(engine, step(1, 1))) == 6


async def test_a_state_of_a_wrong_shape_fails_the_batch(tmp_path):
    def wrong(batch):
        batch.set_output("y", batch.input("x").numpy().copy())
        batch.set_output("sum_out", np.zeros((batch.rows, 2), np.int64))

    async with serving(tmp_path, wrong, m=config("oldest { }", STATE % "")) as engine:
        answer = await infer(engine, step(5, 1, start=True))
    assert "the output for state 'sum' must have shape [-1,1], got [1,2]" in answer.text


async def test_a_state_that_is_an_output_of_other_dims_is_sent_as_it_is(tmp_path):
    """As in Triton, which does not compare them."""
    other = 'output { name: "sum_out" data_type: TYPE_INT64 dims: [ 1, 1, 1 ] }'
    async with serving(tmp_path, Accumulator(), m=config("oldest { }", STATE % "", after=other)) as engine:
        answers = [await infer(engine, step(n, 1, start=n == 1)) for n in (1, 2)]
    assert [answer.array("sum_out").tolist() for answer in answers] == [[[1]], [[3]]]


async def test_a_model_that_writes_its_state_in_place(tmp_path):
    """The memory of the state is its own: what a model writes there is the state, and no answer changes by it."""

    def in_place(batch):
        total = batch.input("sum").numpy()
        total += batch.input("x").numpy()
        batch.set_output("y", total.copy())
        batch.set_output("sum_out", batch.input("sum"))

    same = STATE % "use_same_buffer_for_input_output: true"
    async with serving(tmp_path, in_place, m=config("oldest { }", same)) as engine:
        for n in range(1, 6):
            assert value(await infer(engine, step(1, 1, start=n == 1))) == n


# -- iterative sequences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["oldest { }", "direct { }"])
async def test_iterative_requests_run_until_they_are_done(tmp_path, strategy):
    """Continuous batching: each request counts down its own number; those that are done leave, new ones join."""
    seen = []

    def count_down(batch):
        x, done = batch.input("x").numpy(), batch.input("sum").numpy() + 1
        ready, starts = told(batch, "READY", "START").values()
        seen.append((sum(ready), sum(start for start, row in zip(starts, ready, strict=True) if row)))
        batch.set_output("y", done.copy())
        batch.set_output("sum_out", done)
        for index in range(batch.request_count):
            if done[index, 0] < x[index, 0]:
                batch.reschedule(index)

    text = config(strategy, "iterative_sequence: true", controls(), STATE % "")
    async with serving(tmp_path, count_down, m=text) as engine:
        answers = await infer_all(engine, *(step(n, 0) for n in (3, 1, 5, 2, 4)))
        assert [value(each) for each in answers] == [3, 1, 5, 2, 4]
        lane = engine.model("m").lane
        await until(lambda: lane.live == 0)
        assert lane.statistics()["inference_count"] == 5
    assert sum(count for count, _ in seen) == 15
    assert sum(starts for _, starts in seen) == 5


@contextmanager
def little_memory(free: int) -> Iterator[Callable[[], None]]:
    """A function that leaves this process so many bytes of new memory until the block's end."""
    usual = resource.getrlimit(resource.RLIMIT_AS)

    def limit() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + free, usual[1]))

    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


async def test_an_iterative_request_ends_if_there_is_no_memory_for_its_state(tmp_path):
    """Guards a model that stops by its state: without the state it would be called again and again."""
    calls = []

    def grow(batch):
        calls.append(batch.input("sum").shape)
        batch.set_output("sum_out", np.zeros((1, 1 << 26), np.int64))  # no page of it is touched
        limit()
        if len(calls) < 9:
            batch.reschedule(0)

    text = config("oldest { }", "iterative_sequence: true", (STATE % "").replace("[ 1 ]", "[ -1 ]"))
    with little_memory(1 << 26) as limit:
        async with serving(tmp_path, grow, m=text) as engine:
            answer = await infer(engine, step(1, 0))
    assert answer.status == Status.RESOURCE_EXHAUSTED
    assert len(calls) == 1


async def test_only_iterative_requests_can_be_rescheduled(tmp_path):
    async with serving(tmp_path, lambda batch: batch.reschedule(0), m=config()) as engine:
        answer = await infer(engine, step(1, 1, start=True))
    assert "only requests of a model with 'iterative_sequence' can be rescheduled" in answer.text


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_requests_that_belong_nowhere(tmp_path):
    async with serving(tmp_path, m=config()) as engine:
        none, unknown = await infer_all(engine, step(1, 0, start=True), step(1, 5))
        assert (none.status, unknown.status) == (INVALID, INVALID)
        assert "must specify a non-zero or non-empty correlation ID" in none.text
        assert "inference request for sequence 5 to model 'm' must specify the START flag" in unknown.text
        assert (await infer(engine, step(1, 5, start=True, end=True))).status == OK
        assert (
            "must specify the START flag on the first request of the sequence" in (await infer(engine, step(1, 5))).text
        )


async def test_an_idle_sequence_ends_and_the_model_hears_of_it(tmp_path):
    model = Accumulator(("CORRID", "END", "WHY", "sum", "x"))
    text = config("oldest { }", controls(), STATE % "", after=TELL_END, idle_us=1000)
    async with serving(tmp_path, model, m=text) as engine:
        assert value(await infer(engine, step(5, 7, start=True))) == 5
        lane = engine.model("m").lane
        await until(lambda: lane.live == 0)
        assert model.told[-1] == {"CORRID": [7], "END": [2.0], "WHY": [2], "sum": [5], "x": [0]}
        late = await infer(engine, step(1, 7))
        assert late.status == INVALID
        assert "no request had come for max_sequence_idle_microseconds" in late.text
        assert lane.statistics()["inference_count"] == 1, "what the server makes itself is no traffic"
        assert value(await infer(engine, step(1, 7, start=True))) == 1


async def test_a_cancelled_request_takes_those_behind_it(tmp_path):
    gate = Gate(Accumulator())
    async with serving(tmp_path, gate, m=config("oldest { }", STATE % "")) as engine:
        first = Pending(engine, step(1, 1, start=True))
        await gate.entered()
        before, cancelled, behind = (Pending(engine, step(n, 1)) for n in (2, 3, 4))
        cancelled.ticket.cancel()
        gone = await behind.answer()
        assert (gone.status, "an earlier request of it was cancelled" in gone.text) == (CANCELLED, True)
        gate.go(100)
        assert [value(await each.answer()) for each in (first, before)] == [1, 3]
        late = await infer(engine, step(1, 1))
        assert "was ended when a request of it was cancelled" in late.text
        assert engine.model("m").lane.live == 0


async def test_a_deadline_in_the_queue_ends_the_sequence(tmp_path):
    gate = Gate(Accumulator(("WHY",)))
    async with serving(tmp_path, gate, m=config("oldest { }", controls(), STATE % "", after=TELL_END)) as engine:
        first = Pending(engine, step(1, 1, start=True))
        await gate.entered()
        late = Pending(engine, step(2, 1), timeout_ns=1_000_000)
        assert (await late.answer()).status == Status.DEADLINE_EXCEEDED
        gate.go(100)
        assert value(await first.answer()) == 1
        await until(lambda: engine.model("m").lane.live == 0)
    assert gate._execute.told[-1] == {"WHY": [3]}


async def test_a_model_hears_once_of_a_sequence_that_a_cancelled_start_has_ended(tmp_path):
    """A START ends the sequence before it; the one that it begins is cancelled before the model knows of it."""
    gate = Gate(Accumulator(("CORRID", "START", "WHY")))
    async with serving(tmp_path, gate, m=config("oldest { }", controls(), STATE % "", after=TELL_END)) as engine:
        first = Pending(engine, step(1, 7, start=True))
        await gate.entered()
        again = Pending(engine, step(2, 7, start=True))
        again.ticket.cancel()
        gate.go(100)
        assert value(await first.answer()) == 1
        await until(lambda: engine.model("m").lane.live == 0)
        assert value(await infer(engine, step(1, 8, start=True, end=True))) == 1
    assert gate._execute.told == [
        {"CORRID": [7], "START": [1], "WHY": [0]},
        {"CORRID": [7], "START": [0], "WHY": [5]},
        {"CORRID": [8], "START": [1], "WHY": [1]},
    ]


async def test_a_sequence_that_waits_too_long_for_a_slot(tmp_path):
    gate = Gate(Accumulator())
    text = config("oldest { max_candidate_sequences: 1 }", STATE % "")
    async with serving(tmp_path, gate, m=text) as engine:
        holder = Pending(engine, step(1, 1, start=True))
        await gate.entered()
        waiting = [Pending(engine, step(2, 2, start=True)), Pending(engine, step(2, 2, timeout_us=2000))]
        third = Pending(engine, step(3, 3, start=True))
        for each in waiting:
            answer = await each.answer()
            assert answer.status == UNAVAILABLE
            assert answer.text == "timeout of the corresponding sequence has been expired"
        gate.go(100)
        assert value(await holder.answer()) == 1
        assert value(await infer(engine, step(1, 1, end=True))) == 2
        assert value(await third.answer()) == 3


async def test_the_backlog_has_its_own_limit(tmp_path):
    limit = 'parameters { key: "sequence_max_backlog" value { string_value: "1" } }'
    gate = Gate(Accumulator())
    async with serving(
        tmp_path, gate, m=config("oldest { max_candidate_sequences: 1 }", STATE % "", after=limit)
    ) as engine:
        pending = [Pending(engine, step(name, name, start=True, end=True)) for name in (1, 2, 3)]
        refused = await pending[2].answer()
        assert refused.status == UNAVAILABLE
        assert "Exceeds maximum queue size: all slots of model 'm' are taken, and 1 sequences wait" in refused.text
        gate.go(100)
        assert [value(await each.answer()) for each in pending[:2]] == [1, 2]


async def test_the_time_for_which_sequences_may_wait_for_a_slot(tmp_path):
    limit = 'parameters { key: "queue_policy.default_timeout_microseconds" value { string_value: "2000" } }'
    gate = Gate(Accumulator())
    text = config("oldest { max_candidate_sequences: 1 }", STATE % "", after=limit)
    async with serving(tmp_path, gate, m=text) as engine:
        holder = [Pending(engine, step(1, 1, start=True)), Pending(engine, step(1, 1))]
        await gate.entered()
        answer = await infer(engine, step(2, 2, start=True))
        assert (answer.status, answer.text) == (
            UNAVAILABLE,
            "timeout of the corresponding sequence has been expired",
        )
        gate.go(100)  # who has a slot waits on
        assert [value(await each.answer()) for each in holder] == [1, 2]


async def test_the_number_of_requests_that_wait_in_sequences(tmp_path):
    limit = 'parameters { key: "queue_policy.max_queue_size" value { string_value: "2" } }'
    gate = Gate(Accumulator())
    text = config("oldest { max_candidate_sequences: 1 }", STATE % "", after=limit)
    async with serving(tmp_path, gate, m=text) as engine:
        running = Pending(engine, step(1, 1, start=True))
        await gate.entered()
        waiting = [Pending(engine, step(1, 1)), Pending(engine, step(3, 2, start=True))]
        for refused in (step(1, 1), step(1, 3, start=True)):
            answer = await infer(engine, refused)
            assert answer.status == UNAVAILABLE
            assert "Exceeds maximum queue size: model 'm' version 1 has 2 requests waiting" in answer.text
        gate.go(100)
        assert value(await running.answer()) == 1
        assert value(await waiting[0].answer()) == 2
        assert value(await infer(engine, step(1, 1, end=True))) == 3
        assert value(await waiting[1].answer()) == 3


async def test_closing_finishes_what_was_accepted(tmp_path):
    gate = Gate(Accumulator())
    async with serving(tmp_path, gate, m=config("direct { }", STATE % "")) as engine:
        pending = [Pending(engine, step(name, name, start=True)) for name in range(1, 10)]  # more than there are slots
        pending += [Pending(engine, step(1, name)) for name in range(1, 10)]
        await gate.entered()
        closing = asyncio.create_task(engine.close())
        gate.go(100)
        assert [value(await each.answer()) for each in pending] == [*range(1, 10), *range(2, 11)]
        await closing


@pytest.mark.parametrize("instances", [1, 2])
async def test_the_scheduler_can_be_held_for_tests_from_outside(tmp_path, monkeypatch, instances):
    """TRITONSERVER_DELAY_SCHEDULER: no batch before so many requests wait for all instances; and so in the backlog."""
    slots = 4 * instances
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", str(slots))
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "2")
    seen = []

    def look(batch):
        seen.append(batch.rows)
        batch.set_output("y", batch.input("x").numpy().copy())

    text = config("direct { }").replace("count: 1", f"count: {instances}")
    async with serving(tmp_path, look, m=text) as engine:
        pending = [Pending(engine, step(1, name, start=True, end=True)) for name in range(1, slots + 2)]
        await asyncio.sleep(0)
        assert not seen
        pending.append(Pending(engine, step(1, slots + 2, start=True, end=True)))
        for each in pending:
            assert (await each.answer()).status == OK
    assert seen[0] == 4
    assert sum(seen) == slots + 2


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 3 }"])
async def test_many_sequences_on_two_instances(tmp_path, strategy):
    """More than there are slots, interleaved at random, while the loop submits and two threads execute."""
    rng = random.Random(1)
    text = config(strategy, STATE % "").replace("count: 1", "count: 2")
    async with serving(tmp_path, Accumulator(), m=text) as engine:
        for _ in range(5):
            names = [name for name in range(1, 26) for _ in range(5)]
            rng.shuffle(names)
            counts: dict[int, int] = {}
            pending, expected = [], []
            for name in names:
                counts[name] = counts.get(name, 0) + 1
                pending.append(Pending(engine, step(name, name, start=counts[name] == 1, end=counts[name] == 5)))
                expected.append(name * counts[name])
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            assert [value(await each.answer()) for each in pending] == expected
