"""Guards queue policies in a real engine: limits, timeouts, priorities, order of answers, with Triton's texts."""

import asyncio
import itertools
import logging
import threading

import numpy as np
import pytest

from inferd._native.execution import batchlog
from inferd._native.refusal import refusal_table
from inferd.server.errors import Status
from tests.engine.serving import CONFIG, Gate, Pending, echo, infer, request, row, serving

OK, INTERNAL, UNAVAILABLE, DEADLINE = Status.OK, Status.INTERNAL, Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED


pytestmark = pytest.mark.usefixtures("native_counters")


def config(batching: str, *, max_batch_size: int = 1, instances: int = 1) -> str:
    return (
        CONFIG.replace("dynamic_batching { }", f"dynamic_batching {{ {batching} }}")
        .replace("max_batch_size: 8", f"max_batch_size: {max_batch_size}")
        .replace("count: 1", f"count: {instances}")
    )


def asked(number: int, *, priority: int = 0, timeout_us: int = 0):
    """A request that is answered with its number."""
    message = request(x=row(number))
    if priority:
        message.parameters["priority"].uint64_param = priority
    if timeout_us:
        message.parameters["timeout"].int64_param = timeout_us
    return message


ADAPTIVE = 'parameters { key: "adaptive_queue_delay" value { string_value: "true" } }'


async def busy(engine, gate) -> Pending:
    """Have the instance execute a request, so that others wait."""
    first = Pending(engine, asked(-1))
    await gate.entered()
    return first


REJECT = "default_queue_policy { default_timeout_microseconds: 100000 }"  # an idle instance wakes sooner


async def test_a_request_is_refused_when_its_time_is_over_while_all_instances_are_busy(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate, m=config(REJECT)) as engine:
        first = await busy(engine, gate)
        late = [Pending(engine, asked(n)) for n in range(3)]
        for each in late:
            answer = await each.answer()  # the instance still executes the first one
            assert answer.status == UNAVAILABLE
            assert answer.text.startswith("Request timeout expired: waited 100000 us in the queue of model 'm'")
            assert refusal_table()[each.ticket.refusal - 1][0] == "QUEUE_TIMEOUT"
        assert not first.answers
        gate.go(100)
        assert (await first.answer()).status == OK, "the time in the queue is over, not that of the execution"
        statistics = engine.model("m").statistics()
        assert statistics.inference_stats.fail.count == statistics.fail_reasons["REJECTED"].count == 3
        assert statistics.fail_reasons["REJECTED"].ns == statistics.inference_stats.fail.ns >= 3 * 100_000_000
        while (await infer(engine, asked(5))).status != OK:  # a busy machine may need more than its time in the queue
            pass


async def test_delayed_requests_are_served_behind_the_others(tmp_path):
    gate = Gate()
    policy = "default_queue_policy { timeout_action: DELAY allow_timeout_override: true }"
    order = []

    def record(batch):
        order.extend(batch.input("x").numpy().ravel().tolist())
        echo(batch)

    gate = Gate(record)
    async with serving(tmp_path, gate, m=config(policy)) as engine:
        first = await busy(engine, gate)
        late = Pending(engine, asked(1, timeout_us=1))
        moved = Pending(engine, asked(2, timeout_us=1), timeout_ns=10_000_000)
        assert (await moved.answer()).status == DEADLINE  # its deadline is watched beyond that, and comes after it
        good = Pending(engine, asked(3))
        gate.go(100)
        assert [(await each.answer()).status for each in (first, late, good)] == [OK, OK, OK]
        assert order == [-1, 3, 1]


async def test_max_queue_size_counts_each_level(tmp_path):
    gate = Gate()
    policy = """
        priority_levels: 2 default_priority_level: 2 default_queue_policy { max_queue_size: 2 }
        priority_queue_policy { key: 1 value { max_queue_size: 1 } }
    """
    async with serving(tmp_path, gate, m=config(policy)) as engine:
        first = await busy(engine, gate)
        waiting = [Pending(engine, asked(n, priority=p)) for n, p in enumerate((1, 2, 2))]
        for priority, most in ((1, 1), (2, 2), (0, 2), (9, 2)):
            answer = await infer(engine, asked(0, priority=priority))
            assert answer.status == UNAVAILABLE
            assert answer.text == (
                f"Exceeds maximum queue size: model 'm' version 1 has {most} requests of priority "
                f"{1 if priority == 1 else 2} waiting, which is its limit"
            )
        waiting.pop().ticket.cancel()
        waiting.append(Pending(engine, asked(7, priority=2)))
        gate.go(100)
        assert [(await each.answer()).status for each in (first, *waiting)] == [OK] * 4


async def test_queued_requests_are_executed_by_priority_then_by_arrival(tmp_path):
    order = []

    def record(batch):
        order.extend(batch.input("x").numpy().ravel().tolist())
        echo(batch)

    gate = Gate(record)
    async with serving(tmp_path, gate, m=config("priority_levels: 3 default_priority_level: 2")) as engine:
        pending = [await busy(engine, gate)]
        pending += [Pending(engine, asked(n, priority=p)) for n, p in enumerate((3, 0, 1, 2, 8, 1))]
        gate.go(100)
        for each in pending:
            await each.answer()
        assert order == [-1, 2, 5, 1, 3, 4, 0]


async def test_policy_without_dynamic_batching(tmp_path):
    """Triton has none there: ours are parameters."""
    gate = Gate()
    plain = CONFIG.replace("dynamic_batching { }", "")
    for key, value in (("max_queue_size", 2), ("allow_timeout_override", "true")):
        plain += f'parameters {{ key: "queue_policy.{key}" value {{ string_value: "{value}" }} }}\n'
    async with serving(tmp_path, gate, m=plain) as engine:
        assert engine.model("m").spec.parameters == {}
        first = await busy(engine, gate)
        waiting = [Pending(engine, asked(1)), Pending(engine, asked(2, timeout_us=1))]
        assert "has 2 requests waiting" in (await infer(engine, asked(3))).text
        assert (await waiting.pop().answer()).status == UNAVAILABLE
        gate.go(100)
        assert [(await each.answer()).status for each in (first, *waiting)] == [OK, OK]


async def test_the_policy_of_a_model_without_batch_dimension(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate, m=config(REJECT, max_batch_size=0)) as engine:
        first = Pending(engine, request(x=np.zeros(1, np.int64)))
        await gate.entered()
        assert (await infer(engine, request(x=np.zeros(1, np.int64)))).status == UNAVAILABLE
        gate.go(100)
        assert (await first.answer()).status == OK


# -- the order of answers --


class Gates:
    """Holds each execution until the test lets the one with this number go."""

    def __init__(self):
        self._doors: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self.entered = threading.Semaphore(0)
        self.failing: set[int] = set()

    def door(self, number: int) -> threading.Event:
        with self._lock:
            return self._doors.setdefault(number, threading.Event())

    def __call__(self, batch):
        number = int(batch.input("x").numpy()[0, 0])
        self.entered.release()
        assert self.door(number).wait(30)
        if number in self.failing:
            raise RuntimeError("out of luck")
        echo(batch)


ORDERED = "preserve_ordering: true"


async def executed(engine, count: int) -> None:
    """Wait until so many requests have come to the end of their execution."""
    lane = engine.model("m").lane

    def over() -> bool:
        return sum(lane.statistics()[field][0] for field in ("success", "fail")) >= count

    for _ in range(1_000_000):
        if over():
            return
        await asyncio.sleep(0)
    raise AssertionError("the executions do not end")


async def begun(gates: Gates, count: int) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(gates.entered.acquire, timeout=30)


@pytest.mark.parametrize("finishing", list(itertools.permutations(range(3))))
async def test_answers_leave_in_the_order_of_arrival(tmp_path, finishing):
    gates, order = Gates(), []
    async with serving(tmp_path, gates, m=config(ORDERED, instances=3)) as engine:
        pending = [Pending(engine, asked(n)) for n in range(3)]
        engine.after_delivery(lambda: order.extend(n for n in range(3) if pending[n].answers and n not in order))
        await begun(gates, 3)
        for count, number in enumerate(finishing, 1):
            gates.door(number).set()
            await executed(engine, count)
            for _ in range(3):
                await asyncio.sleep(0)
            done = [bool(each.answers) for each in pending]
            assert done == sorted(done, reverse=True), "an answer has overtaken an earlier one"
        for number, each in enumerate(pending):
            assert (await each.answer()).array().item() == number
        assert order == [0, 1, 2]


async def test_a_failing_request_keeps_its_place_and_stalls_nobody(tmp_path):
    gates = Gates()
    gates.failing.add(0)
    async with serving(tmp_path, gates, m=config(ORDERED, instances=2)) as engine:
        pending = [Pending(engine, asked(n)) for n in range(2)]
        await begun(gates, 2)
        gates.door(1).set()
        await executed(engine, 1)
        assert not pending[1].answers
        gates.door(0).set()
        assert [(await each.answer()).status for each in pending] == [INTERNAL, OK]


@pytest.mark.parametrize("end", ["cancelled", "deadline"])
async def test_who_gets_no_answer_gives_the_turn_up(tmp_path, end):
    """Running, ready and waiting for its turn, or queued: nobody waits for one whose client has gone."""
    gates = Gates()
    async with serving(tmp_path, gates, m=config(ORDERED, instances=3)) as engine:
        timeout = 50_000_000 if end == "deadline" else -1
        first, second = (Pending(engine, asked(n), timeout) for n in (0, 1))
        third = Pending(engine, asked(2))
        await begun(gates, 3)
        queued = Pending(engine, asked(3), timeout)
        gates.door(1).set()
        gates.door(2).set()
        await executed(engine, 2)  # the second and the third wait for the first
        assert not third.answers
        for each in (second, first, queued):
            if end == "cancelled":
                each.ticket.cancel()
            else:
                assert (await each.answer()).status == DEADLINE
        assert (await third.answer()).array().item() == 2
        gates.door(0).set()
        gates.door(3).set()
        gates.door(4).set()
        assert (await infer(engine, asked(4))).array().item() == 4


async def test_a_request_that_has_waited_too_long_is_refused_before_its_turn(tmp_path):
    gates = Gates()
    async with serving(tmp_path, gates, m=config(f"{ORDERED} {REJECT}")) as engine:
        first = Pending(engine, asked(0))
        await begun(gates, 1)
        late = Pending(engine, asked(1))
        assert (await late.answer()).status == UNAVAILABLE  # the instance still executes the first one
        assert not first.answers
        gates.door(0).set()
        assert (await first.answer()).array().item() == 0
        gates.door(2).set()
        while (await infer(engine, asked(2))).status != OK:  # a busy machine may need more than its time in the queue
            pass  # with the refused request still in the order, none would be answered


# -- what a person sees --


async def test_a_line_for_each_batch_while_it_is_switched_on(tmp_path, caplog):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        first = await busy(engine, gate)
        pending = [Pending(engine, asked(n)) for n in range(3)]
        with caplog.at_level(logging.DEBUG, "inferd.batch"):
            batchlog.switch(True)
            gate.go(100)
            for each in (first, *pending):
                await each.answer()
            batchlog.switch(False)
        assert (await infer(engine, asked(9))).status == OK
        [line] = [record.getMessage() for record in caplog.records if record.name == "inferd.batch"]
        assert line.startswith("model m, instance m_0_0, executing 3 requests: version 1, 3 rows, the oldest waited ")
        assert line.endswith(" us, no delay")


async def test_histogram_of_times_in_the_queue(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        first = await busy(engine, gate)
        pending = [Pending(engine, asked(n)) for n in range(3)]
        gate.go(100)
        for each in (first, *pending):
            await each.answer()
        counters = engine.model("m").lane.statistics()
        bounds, counts = zip(*counters["queue_times"], strict=True)
        assert bounds == (*(1 << i for i in range(26)), None)
        assert sum(counts) == counters["queue"][0] == 4
        least = sum(0 if i == 0 else (1 << (i - 1)) * 1000 * count for i, count in enumerate(counts))
        most = sum((bound or 1 << 40) * 1000 * count for bound, count in counters["queue_times"])
        assert least <= counters["queue"][1] <= most


async def test_an_adaptive_delay_tells_what_it_goes_by(tmp_path):
    text = config("", max_batch_size=8) + ADAPTIVE
    async with serving(tmp_path, echo, m=text, plain=CONFIG) as engine:
        for n in range(30):
            assert (await infer(engine, asked(n))).array().item() == n
        assert (await infer(engine, asked(30))).array().item() == 30  # the one before has been counted
        statistics = engine.model("m").statistics()
        assert statistics.adaptive_delay.fixed_ns + statistics.adaptive_delay.row_ns > 0
        assert statistics.adaptive_delay.gap_ns > 0
        assert 1 <= statistics.adaptive_delay.target <= 8
        assert not engine.model("plain").statistics().HasField("adaptive_delay")


async def test_triton_s_hook_that_holds_the_scheduler(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
    gate = Gate()
    gate.go(100)
    async with serving(tmp_path, gate) as engine:
        pending = [Pending(engine, asked(n)) for n in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(each.answers for each in pending)
        pending.append(Pending(engine, asked(2)))
        for each in pending:
            await each.answer()
        assert gate.batches == [(3, 3)]
        await infer(engine, asked(4))
        assert gate.batches == [(3, 3), (1, 1)]
