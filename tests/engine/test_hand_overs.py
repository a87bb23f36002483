"""Guards what a request keeps when it becomes another: its time, its deadline, its priority, and how it is counted.

A request is resumed after a load, joined to an identical one, looked up in a cache, split, made a step of an ensemble,
or executed again and again.
"""

import logging

import numpy as np
import pytest

from inferd._native.execution import batchlog
from inferd.server.caching import LocalCache
from inferd.server.errors import Status
from tests.engine.serving import CONFIG, Gate, Pending, echo, ensemble_of, infer, infer_all, request, row, serving
from tests.engine.test_demand import lazy
from tests.engine.test_sequences import STATE, config, controls, step

OK, UNAVAILABLE, DEADLINE = Status.OK, Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED
MS = 1_000_000
COALESCING = 'parameters { key: "coalesce_requests" value { string_value: "true" } }'
SPLITTING = 'parameters { key: "split_requests" value { string_value: "true" } }'
ALONE = CONFIG.replace("max_batch_size: 8", "max_batch_size: 1")
PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


pytestmark = pytest.mark.usefixtures("native_counters")


def policy(text: str, base: str = ALONE) -> str:
    return base.replace("dynamic_batching { }", f"dynamic_batching {{ {text} }}")


def asked(number: int, *, priority: int = 0, timeout_us: int = 0):
    message = request(x=row(number))
    if priority:
        message.parameters["priority"].uint64_param = priority
    if timeout_us:
        message.parameters["timeout"].int64_param = timeout_us
    return message


# -- after a load -----------------------------------------------------------------------------------------------------


async def test_the_time_in_the_queue_begins_when_the_model_is_there(tmp_path):
    """A load that takes longer than the queue timeout does not refuse the requests that have caused it."""
    text = policy("default_queue_policy { default_timeout_microseconds: 200000 }")
    async with lazy(tmp_path, names="", a=text) as (engine, shelf):
        shelf.open.clear()
        first = Pending(engine, request("a", x=row(1)))
        late = Pending(engine, request("a", x=row(2)), timeout_ns=300 * MS)  # the queue timeout is over then
        assert (await late.answer()).status == DEADLINE
        shelf.open.set()
        assert (await first.answer()).status == OK
        found = engine.model("a").statistics().inference_stats
        assert found.success.ns == sum(getattr(found, phase).ns for phase in PHASES)


# -- joined to an identical one ---------------------------------------------------------------------------------------

OVERRIDABLE = "default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 60000000 }"


@pytest.mark.parametrize("limited", [0, 1], ids=["first", "second"])
async def test_each_of_identical_requests_has_its_own_time_in_the_queue(tmp_path, limited):
    gate = Gate()
    async with serving(tmp_path, gate, m=policy(OVERRIDABLE) + COALESCING) as engine:
        running = Pending(engine, asked(-1))
        await gate.entered()
        pair = [Pending(engine, asked(1, timeout_us=100_000 * (n == limited))) for n in range(2)]
        answer = await pair[limited].answer()
        assert answer.status == UNAVAILABLE
        assert "Request timeout expired" in answer.text
        assert pair[1 - limited].answers == []
        gate.go(2)
        assert (await pair[1 - limited].answer()).array().tolist() == [[1]]
        assert (await running.answer()).status == OK
        found = engine.model("m").statistics().inference_stats
        assert (found.success.count, found.fail.count) == (2, 1)
        failures = engine.model("m").lane.statistics()["failures"]
        assert failures["REJECTED"][0] == 1


async def test_identical_requests_are_executed_although_the_only_one_with_a_limit_has_gone(tmp_path):
    """The last one that waits takes the work with it when its time is over."""
    gate = Gate()
    async with serving(tmp_path, gate, m=policy(OVERRIDABLE) + COALESCING) as engine:
        running = Pending(engine, asked(-1))
        await gate.entered()
        alone = Pending(engine, asked(1, timeout_us=50_000))
        assert (await alone.answer()).status == UNAVAILABLE
        assert engine.model("m").lane.pending == 0
        gate.go(1)
        await running.answer()
        assert gate.batches == [(1, 1)]
        assert engine.model("m").lane.statistics()["failures"]["REJECTED"][0] == 1
        assert engine.model("m").statistics().inference_stats.fail.count == 1


async def test_requests_whose_time_is_over_go_behind_others_together(tmp_path):
    """timeout_action DELAY: the work yields when none of those who wait for it is in time any more."""
    order = []

    def note(batch):
        order.append(int(batch.input("x").numpy()[0, 0]))
        echo(batch)

    gate = Gate(note)
    text = policy("default_queue_policy { timeout_action: DELAY allow_timeout_override: true }") + COALESCING
    async with serving(tmp_path, gate, m=text) as engine:
        pending = [Pending(engine, asked(-1))]
        await gate.entered()
        pending += [Pending(engine, asked(1, timeout_us=20_000)), Pending(engine, asked(1, timeout_us=40_000))]
        pending.append(Pending(engine, asked(2)))
        clock = Pending(engine, asked(9), timeout_ns=80 * MS)
        await clock.answer()
        gate.go(3)
        for each in pending:
            assert (await each.answer()).status == OK
        assert order == [-1, 2, 1]


@pytest.mark.parametrize("stays", [True, False], ids=["it stays", "it leaves"])
async def test_identical_requests_have_the_best_of_their_priorities(tmp_path, stays):
    """They have it as long as the request with the best priority waits; then they go back to their places."""
    order = []

    def note(batch):
        order.append(int(batch.input("x").numpy()[0, 0]))
        echo(batch)

    gate = Gate(note)
    async with serving(tmp_path, gate, m=policy("priority_levels: 3 default_priority_level: 2") + COALESCING) as engine:
        pending = [Pending(engine, asked(-1))]
        await gate.entered()
        pending += [Pending(engine, asked(n)) for n in (2, 3, 4)]
        best = Pending(engine, asked(3, priority=1))
        pending.append(Pending(engine, asked(3, priority=3)))
        if not stays:
            best.ticket.cancel()
        pending.append(Pending(engine, asked(5)))
        gate.go(5)
        for each in pending:
            assert (await each.answer()).status == OK
        if stays:
            await best.answer()
        assert order == ([-1, 3, 2, 4, 5] if stays else [-1, 2, 3, 4, 5])


# -- deadlines --------------------------------------------------------------------------------------------------------


async def test_a_delay_makes_no_request_miss_its_deadline_whatever_became_of_it(tmp_path):
    """Each waits for mates until its deadline is near, and is then executed; the delay itself is a minute."""
    slow = "max_queue_delay_microseconds: 60000000 preferred_batch_size: 8"
    plain = policy(slow, CONFIG)
    models = {
        "plain": plain,
        "coalescing": plain + COALESCING,
        "cached": plain + "response_cache { enable: true }",
        "split": plain + SPLITTING,
        "step": plain,
        "e": ensemble_of("step"),
        "first": plain,
        "chain": ensemble_of("first").replace(
            'output_map { key: "y" value: "y" }',
            'output_map { key: "y" value: "t" } } step { model_name: "second" model_version: -1 '
            'input_map { key: "x" value: "t" } output_map { key: "y" value: "y" }',
        ),
        "second": plain,
        "both": plain + COALESCING + SPLITTING,
    }
    rows = {"split": 12, "both": 12}
    async with serving(tmp_path, echo, cache=LocalCache(1 << 20), **models) as engine:
        asked_of = ("plain", "coalescing", "cached", "split", "e", "chain", "both")
        patient = Pending(engine, request("coalescing", x=np.ones((1, 1), np.int64)))
        pending = {
            name: Pending(engine, request(name, x=np.ones((rows.get(name, 1), 1), np.int64)), timeout_ns=2000 * MS)
            for name in asked_of
        }
        assert {name: (await each.answer()).status for name, each in pending.items()} == dict.fromkeys(asked_of, OK)
        assert (await patient.answer()).status == OK


# -- the books --------------------------------------------------------------------------------------------------------


async def test_an_iterative_request_is_executed_as_often_as_it_was(tmp_path):
    """Every execution counts, and all time of a request is in its queue and in its phases."""
    executions = []

    def count_down(batch):
        x, done = batch.input("x").numpy(), batch.input("sum").numpy() + 1
        executions.append(batch.request_count)
        batch.set_output("y", done.copy())
        batch.set_output("sum_out", done)
        for index in range(batch.request_count):
            if done[index, 0] < x[index, 0]:
                batch.reschedule(index)

    text = config("oldest { }", "iterative_sequence: true", controls(), STATE % "")
    async with serving(tmp_path, count_down, m=text) as engine:
        answers = await infer_all(engine, *(step(30, 0) for _ in range(10)))
        assert [int(each.array()[0, 0]) for each in answers] == [30] * 10
        found = engine.model("m").statistics()
        assert sum(executions) == 300
        assert found.execution_count == len(executions)
        assert sum(batch.compute_infer.count for batch in found.batch_stats) == len(executions)
        assert found.inference_count == found.inference_stats.success.count == 10
        assert found.inference_stats.success.ns == sum(getattr(found.inference_stats, name).ns for name in PHASES)


def failing(batch):
    if (batch.input("x").numpy() == 13).any():
        raise ValueError("not this one")
    echo(batch)


SEQUENCES = CONFIG.replace("dynamic_batching { }", "sequence_batching { %s }")
KINDS = {
    "one at a time": ALONE.replace("dynamic_batching { }", ""),
    "dynamic": CONFIG,
    "coalescing": CONFIG + COALESCING,
    "splitting": CONFIG.replace("max_batch_size: 8", "max_batch_size: 2") + SPLITTING,
    "cached": CONFIG + "response_cache { enable: true }",
    "direct": SEQUENCES % "direct { }",
    "oldest": SEQUENCES % "oldest { }",
    "iterative": SEQUENCES % "oldest { } iterative_sequence: true",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_books_add_up(tmp_path, kind):
    """Asked is answered and failed, and all time of the answered is in the queue, in a phase, or in the cache."""
    gate = Gate(failing)
    rows = 5 if kind == "splitting" else 1
    async with serving(tmp_path, gate, cache=LocalCache(1 << 20), m=KINDS[kind]) as engine:
        messages = []
        for number in (7, 7, 7, 13, 8, 8):
            message = request(x=np.full((rows, 1), number, np.int64))
            if kind in ("direct", "oldest"):
                message.parameters["sequence_id"].int64_param = len(messages) + 1
                message.parameters["sequence_start"].bool_param = True
                message.parameters["sequence_end"].bool_param = True
            messages.append(message)
        running = Pending(engine, messages[0])
        await gate.entered()
        pending = [Pending(engine, message) for message in messages[1:]]
        gone = pending.pop()
        gone.ticket.cancel()
        gate.go(100)
        answers = [await each.answer() for each in (running, *pending)]
        if kind == "cached":
            answers.append(await infer(engine, messages[0]))
        stats = engine.model("m").statistics().inference_stats
        assert stats.success.count == sum(answer.status == OK for answer in answers)
        assert stats.fail.count == sum(answer.status != OK for answer in answers) + 1, "one was cancelled"
        assert stats.cache_hit.count == (kind == "cached")
        for name in PHASES:
            assert getattr(stats, name).count == stats.success.count - stats.cache_hit.count
        passed = stats.success.ns
        if kind == "cached":  # the request from the cache has spent its time there
            assert passed >= sum(getattr(stats, name).ns for name in (*PHASES, "cache_hit"))
        else:
            assert passed == sum(getattr(stats, name).ns for name in PHASES)


# -- split ------------------------------------------------------------------------------------------------------------


async def test_a_split_request_is_let_in_or_refused_as_a_whole(tmp_path):
    """Guards that it is decided before the first part: where one more request may wait, all of its parts may. Refused,
    none of them is executed. Each part that waits counts for the requests after it.
    """
    text = CONFIG.replace("max_batch_size: 8", "max_batch_size: 2") + SPLITTING
    gate = Gate()
    async with serving(tmp_path, gate, m=policy("default_queue_policy { max_queue_size: 3 }", text)) as engine:
        large = Pending(engine, request(x=np.arange(20).reshape(20, 1)))
        await gate.entered()
        for number_of_rows in (1, 4):
            refused = await infer(engine, request(x=np.arange(number_of_rows).reshape(-1, 1)))
            assert refused.status == UNAVAILABLE
            assert "Exceeds maximum queue size" in refused.text
        gate.go(7)
        for _ in range(7):
            await gate.entered()
        small = Pending(engine, request(x=np.arange(4).reshape(4, 1)))  # two parts, beside two others that wait
        gate.go(5)
        assert (await large.answer()).array().ravel().tolist() == list(range(20))
        assert (await small.answer()).array().ravel().tolist() == list(range(4))
        assert len(gate.batches) == 12
        found = engine.model("m").statistics().inference_stats
        assert (found.success.count, found.fail.count) == (2, 2)


# -- names of reasons -------------------------------------------------------------------------------------------------


async def test_a_full_batch_of_sequences_is_full(tmp_path, caplog):
    """The configuration names no preferred size, so none is the reason."""
    gate = Gate()
    text = (SEQUENCES % "oldest { max_candidate_sequences: 16 }").replace("max_batch_size: 8", "max_batch_size: 2")
    async with serving(tmp_path, gate, m=text) as engine:
        pending = []
        for number in range(5):
            message = request(x=row(number))
            message.parameters["sequence_id"].int64_param = number + 1
            message.parameters["sequence_start"].bool_param = True
            pending.append(Pending(engine, message))
            if number == 0:
                await gate.entered()
        with caplog.at_level(logging.DEBUG, "inferd.batch"):
            batchlog.switch(True)
            try:
                gate.go(3)
                for each in pending:
                    assert (await each.answer()).status == OK
            finally:
                batchlog.switch(False)
        lines = [record.getMessage() for record in caplog.records if record.name == "inferd.batch"]
        assert [line.rpartition(", ")[2] for line in lines] == ["full", "full"]
