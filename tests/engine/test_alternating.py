"""Guards instances with an alternate: which batches begin early, and that each is a batch like any other."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from inferd.backends.api import AsyncInstance, RequestError
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.instances.resources import Resources
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.errors import Status
from tests.engine.serving import CONFIG, Pending, request, row, serving
from tests.waiting import until, wait_until

pytestmark = pytest.mark.usefixtures("native_counters")

PAIRS = CONFIG.replace("max_batch_size: 8", "max_batch_size: 2")
LIMITED = PAIRS.replace("count: 1 }", 'count: 1 rate_limiter { resources { name: "R" count: 1 } } }')
LEVELS = PAIRS.replace("dynamic_batching { }", "dynamic_batching { priority_levels: 2 default_priority_level: 2 }")
SEQUENCE = PAIRS.replace("dynamic_batching { }", "sequence_batching { oldest { max_candidate_sequences: 4 } }")
WRONG_BEGIN, WRONG_END = -1, -2


class Framework:
    """A framework: it executes the batches that were begun, one after the other, on its own thread; y is 10 x.

    Attributes:
        free: nothing has to be let go.
        stoppable: its instances are told when nobody waits for a batch any more.
        events: "begin", "wait" and "end" with the first x, as they happened; whatever begins early has at "wait".
        sizes: the rows of batches, as they were begun.
        calls: of `begin`, with whatever batch.
    """

    def __init__(self, *, free: bool = False, stoppable: bool = True) -> None:
        self.free = free
        self.stoppable = stoppable
        self.events: list[tuple[str, int]] = []
        self.sizes: list[int] = []
        self.calls = 0
        self.changed = threading.Condition()
        self.allowed = 0
        self.all_sent = threading.Event()
        if free:
            self.all_sent.set()
        self.pool = ThreadPoolExecutor(1)

    def create_instance(self) -> "Alternating":
        instance = Alternating(self)
        instance.alternate = Alternating(self)
        return instance

    def go(self, count: int = 1) -> None:
        self.all_sent.set()
        with self.changed:
            self.allowed += count
            self.changed.notify_all()

    async def begun(self, *firsts: int, executed: int = 0) -> None:
        """Wait until the server waits for the batch `executed`; then check that just these have begun.

        The first batch begins when this is called, so that whatever the test has sent before waits by then.
        """
        self.all_sent.set()
        await until(lambda: ("wait", executed) in self.events)
        assert [first for what, first in self.events if what == "begin"] == list(firsts)

    def compute(self, x: np.ndarray, instance: "Alternating") -> np.ndarray | None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.free or self.allowed or instance.stopped, 60)
            if instance.stopped:
                return None
            self.allowed -= 1
            return x * 10


class Alternating(AsyncInstance):
    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.stoppable = framework.stoppable
        self.stopped = False
        self.stops = 0

    def begin(self, batch):
        self.framework.calls += 1
        x = batch.input("x").numpy().copy()
        self.first = int(x.flat[0])
        assert self.framework.all_sent.wait(60)
        if self.first == WRONG_BEGIN:
            raise RequestError("cannot begin")
        self.framework.events.append(("begin", self.first))
        self.result = self.framework.pool.submit(self.framework.compute, x, self)
        self.framework.sizes.append(batch.rows)

    def end(self, batch):
        self.framework.events.append(("wait", self.first))
        y = self.result.result()
        self.framework.events.append(("end", self.first))
        if y is None or self.first == WRONG_END:
            raise RuntimeError("cannot end")
        batch.set_output("y", y)

    def stop(self):
        self.stops += 1
        self.stopped = True
        with self.framework.changed:
            self.framework.changed.notify_all()

    def resume(self):
        self.stopped = False


def pair(first: int) -> np.ndarray:
    """Two rows: a full batch."""
    return np.array([[first], [first + 1]], dtype=np.int64)


async def test_a_full_batch_begins_while_the_one_before_is_executed(tmp_path):
    """One, and not two; each answer is that of its request."""
    framework = Framework()
    async with serving(tmp_path, framework, m=PAIRS) as engine:
        pending = [Pending(engine, request(x=pair(n))) for n in range(0, 10, 2)]
        await framework.begun(0, 2)
        framework.go()
        assert (await pending[0].answer()).array().tolist() == [[0], [10]]
        await framework.begun(0, 2, 4, executed=2)
        framework.go(4)
        for n, each in enumerate(pending):
            assert (await each.answer()).array().tolist() == [[20 * n], [20 * n + 10]]
        assert engine.model("m").statistics().execution_count == 5


async def test_a_batch_that_can_still_grow_waits(tmp_path):
    framework = Framework()
    async with serving(tmp_path, framework, m=PAIRS) as engine:
        full, one = Pending(engine, request(x=pair(0))), Pending(engine, request(x=row(2)))
        await framework.begun(0)
        joins = Pending(engine, request(x=row(4)))
        framework.go(2)
        assert (await full.answer()).array().tolist() == [[0], [10]]
        assert [(await each.answer()).array().item() for each in (one, joins)] == [20, 40]
        assert framework.sizes == [2, 2]


async def test_a_limit_to_the_time_in_the_queue_holds(tmp_path):
    """Guards that such requests stay in the queue, where the limit is looked after."""
    framework = Framework()
    policy = "default_queue_policy { allow_timeout_override: true }"
    config = PAIRS.replace("dynamic_batching { }", f"dynamic_batching {{ {policy} }}")
    async with serving(tmp_path, framework, m=config) as engine:
        limited = request(x=pair(2))
        limited.parameters["timeout"].int64_param = 300_000
        first, late = Pending(engine, request(x=pair(0))), Pending(engine, limited)
        await framework.begun(0)
        assert (await late.answer()).status == Status.UNAVAILABLE
        framework.go()
        await first.answer()
        assert framework.sizes == [2]


@pytest.mark.parametrize("stoppable", [True, False])
async def test_a_batch_of_which_nothing_is_left_does_not_begin(tmp_path, stoppable):
    """Guards that the instance, too, leaves out requests that have waited too long: the loop may be late."""
    framework = Framework(stoppable=stoppable)
    policy = "default_queue_policy { allow_timeout_override: true }"
    config = PAIRS.replace("dynamic_batching { }", f"dynamic_batching {{ {policy} }}")
    async with serving(tmp_path, framework, m=config) as engine:
        limited = request(x=pair(2))
        limited.parameters["timeout"].int64_param = 1
        first = Pending(engine, request(x=pair(0)))
        await framework.begun(0)
        late = Pending(engine, limited)
        framework.go()
        lane = engine.model("m").lane
        wait_until(lambda: lane.pending == 0)  # the loop does nothing meanwhile, so the instance has taken it
        assert (await late.answer()).status == Status.UNAVAILABLE
        assert (await first.answer()).array().tolist() == [[0], [10]]
        framework.go()
        assert (await Pending(engine, request(x=pair(4))).answer()).array().tolist() == [[40], [50]]
        assert (framework.sizes, framework.calls) == ([2, 2], 2)


async def test_without_batching_every_request_may_begin_early(tmp_path):
    framework = Framework()
    async with serving(tmp_path, framework, m=PAIRS.replace("dynamic_batching { }", "")) as engine:
        pending = [Pending(engine, request(x=row(n))) for n in range(3)]
        await framework.begun(0, 1)
        framework.go(3)
        assert [(await each.answer()).array().item() for each in pending] == [0, 10, 20]


def in_sequence(n: int, **flags: bool):
    message = request(x=row(n))
    message.parameters["sequence_id"].int64_param = 7
    for name, value in flags.items():
        message.parameters[name].bool_param = value
    return message


@pytest.mark.parametrize("config", [LIMITED, LEVELS, SEQUENCE], ids=["limited", "levels", "sequence"])
async def test_where_the_next_batch_depends_on_more_none_begins_early(tmp_path, config):
    """On resources, on what a request of a higher level would overtake, on the state of a sequence."""
    framework = Framework(free=True)
    if config == SEQUENCE:
        messages = [in_sequence(n, sequence_start=n == 0, sequence_end=n == 5) for n in range(6)]
    else:
        messages = [request(x=pair(n)) for n in range(6)]
    hardware = Hardware(resources=Resources({}) if config == LIMITED else None)
    async with serving(tmp_path, framework, m=config, hardware=hardware) as engine:
        pending = [Pending(engine, message) for message in messages]
        for n, each in enumerate(pending):
            assert (await each.answer()).array().flat[0] == 10 * n
        assert [what for what, _ in framework.events] == ["begin", "wait", "end"] * 6


@pytest.mark.parametrize("wrong", [WRONG_BEGIN, WRONG_END])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_batch_that_fails_is_the_only_one(tmp_path, wrong, place):
    """The one that is executed, and the one that waits for it; to begin or to end."""
    framework = Framework()
    async with serving(tmp_path, framework, m=PAIRS) as engine:
        values = [10, 20, 30, 40]
        values[place] = wrong
        pending = [Pending(engine, request(x=pair(value))) for value in values]
        framework.go(4)
        for value, each in zip(values, pending, strict=True):
            answer = await each.answer()
            if value == wrong:
                expected = (Status.INVALID_ARGUMENT, "cannot begin"), (Status.INTERNAL, "cannot end")
                assert (answer.status, answer.text) == expected[wrong == WRONG_END]
            else:
                assert answer.array().tolist() == [[10 * value], [10 * value + 10]]
        statistics = engine.model("m").statistics()
        assert (statistics.inference_stats.success.count, statistics.inference_stats.fail.count) == (3, 1)


@pytest.mark.parametrize("place", [0, 1])
async def test_only_the_batch_that_nobody_waits_for_is_stopped(tmp_path, place):
    """A batch is executed and another one waits for the instance; clients leave one of the two."""
    framework = Framework()
    made = []
    create = framework.create_instance
    framework.create_instance = lambda: made.append(create()) or made[0]
    async with serving(tmp_path, framework, m=PAIRS) as engine:
        pending = [Pending(engine, request(x=pair(n))) for n in (0, 2)]
        await framework.begun(0, 2)
        cancelled = pending.pop(place)
        cancelled.ticket.cancel()
        instances = made[0], made[0].alternate
        assert [each.stops for each in instances] == [place == 0, place == 1]
        pending.append(Pending(engine, request(x=pair(4))))
        framework.go(2)
        assert [(await each.answer()).array().flat[0] for each in pending] == [[20, 40], [0, 40]][place]
        assert not any(each.stopped for each in instances), "resumed"
        assert not cancelled.answers


async def test_the_deadline_of_a_batch_that_waits_for_another(tmp_path):
    framework = Framework()
    async with serving(tmp_path, framework, m=PAIRS) as engine:
        first, late = Pending(engine, request(x=pair(0))), Pending(engine, request(x=pair(2)), timeout_ns=300_000_000)
        framework.all_sent.set()
        assert (await late.answer()).status == Status.DEADLINE_EXCEEDED
        assert not first.answers
        framework.go()
        assert (await first.answer()).array().tolist() == [[0], [10]]


async def test_the_wait_for_the_batch_before_counts_as_queue(tmp_path):
    """Executions do not overlap: together they take no longer than all of it."""
    framework = Framework()
    held = 0.05
    async with serving(tmp_path, framework, m=PAIRS) as engine:
        begun = time.monotonic()
        pending = [Pending(engine, request(x=pair(n))) for n in (0, 2)]
        await framework.begun(0, 2)
        for each in pending:
            await asyncio.sleep(held)
            framework.go()
            await each.answer()
        all_ns = (time.monotonic() - begun) * 1e9
        statistics = engine.model("m").statistics().inference_stats
        assert statistics.compute_infer.ns <= all_ns
        assert statistics.queue.ns + statistics.compute_input.ns + statistics.compute_infer.ns >= 3 * held * 1e9
        busy = sum(use.busy_ns for use in engine.model("m").uses())
        assert 2 * held * 1e9 <= busy <= all_ns


async def test_a_model_that_is_unloaded_answers_the_batch_that_has_begun_early(tmp_path):
    framework = Framework()
    async with serving(tmp_path, framework, m=PAIRS, control=ModelControl(ControlMode.EXPLICIT, ("m",))) as engine:
        pending = [Pending(engine, request(x=pair(n))) for n in (0, 2, 4)]
        await framework.begun(0, 2)
        await engine.unload("m")
        framework.go(3)
        assert [(await each.answer()).array().flat[0] for each in pending] == [0, 20, 40]


async def test_every_answer_is_right_beside_failures_cancellations_and_deadlines(tmp_path):
    framework = Framework(free=True)
    chance = random.Random(5)
    async with serving(tmp_path, framework, m=PAIRS) as engine:
        sent = []
        for n in range(300):
            value = chance.choice([WRONG_BEGIN, WRONG_END, *[10 * n] * 8])
            x = pair(value) if chance.random() < 0.6 else row(value)
            timeout = 2_000_000 if chance.random() < 0.1 else -1
            sent.append((x, timeout, Pending(engine, request(x=x), timeout)))
            if chance.random() < 0.1:
                chance.choice(sent)[2].ticket.cancel()
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        last = Pending(engine, request(x=pair(7)))
        assert (await last.answer()).array().tolist() == [[70], [80]]
        await until(lambda: not engine.model("m").lane.pending)
        for x, timeout, each in sent:
            for answer in each.answers:
                if answer.status == Status.OK:
                    assert answer.array().tolist() == (x * 10).tolist()
                elif answer.status == Status.DEADLINE_EXCEEDED:
                    assert timeout > 0
                else:
                    assert "cannot" in answer.text or "failed" in answer.text
