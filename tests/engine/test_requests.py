"""Guards the life of a request in a real engine: cancelled, late, refused or unloaded, it is answered at most once and
never disturbs another; and what statistics say of it.
"""

import asyncio
import random
import time

import pytest

from inferd._native.service.ticket import CallOrigin
from inferd.server.errors import Status
from inferd_client.pb import grpc_service_pb2 as pb
from tests.engine.serving import Gate, Pending, echo, infer, infer_all, request, row, serving
from tests.waiting import until

MS = 1_000_000
OK, INVALID, DEADLINE = Status.OK, Status.INVALID_ARGUMENT, Status.DEADLINE_EXCEEDED


pytestmark = pytest.mark.usefixtures("native_counters")


def failures(engine) -> dict[str, int]:
    """The failures of the model "m" by reason; reasons without a failure are left out."""
    statistics = engine.model("m").statistics()
    found = {reason: duration.count for reason, duration in statistics.fail_reasons.items()}
    assert set(found) == {"REJECTED", "CANCELED", "BACKEND", "OTHER"}
    assert sum(found.values()) == statistics.inference_stats.fail.count
    return {reason: count for reason, count in found.items() if count}


# -- cancellation --


async def test_cancelled_in_the_queue_is_not_executed(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        pending = [Pending(engine, request(x=row(0)))]
        await gate.entered()
        pending += [Pending(engine, request(x=row(n))) for n in range(1, 7)]
        for index in (1, 4, 6):
            pending[index].ticket.cancel()
            pending[index].ticket.cancel()
        assert engine.model("m").lane.pending == 3
        gate.go(10)
        for index in (0, 2, 3, 5):
            assert (await pending[index].answer()).array().item() == index
        assert gate.batches == [(1, 1), (3, 3)]
        assert all(not pending[index].answers for index in (1, 4, 6))
        assert failures(engine) == {"CANCELED": 3}


async def test_cancelled_while_running_does_not_disturb_its_mates(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        first = Pending(engine, request(x=row(0)))
        await gate.entered()
        pending = [Pending(engine, request(x=row(n))) for n in range(4)]
        gate.go()
        await gate.entered()
        pending[0].ticket.cancel()
        pending[2].ticket.cancel()
        gate.go()
        await first.answer()
        assert [(await pending[index].answer()).array().item() for index in (1, 3)] == [1, 3]
        assert (await infer_one(engine, gate)).status == OK
        assert not pending[0].answers
        assert not pending[2].answers


async def infer_one(engine, gate):
    gate.go()
    return await infer(engine, request(x=row(7)))


async def test_cancelling_from_inside_deliveries(tmp_path):
    """An answer may cancel any other request of its round, itself too."""
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        tickets, delivered = [], []
        done = asyncio.Event()

        def deliver(number):
            def inner(status, text, response):
                delivered.append(number)
                for ticket in tickets[1:]:
                    ticket.cancel()
                done.set()

            return inner

        tickets += [engine.infer.submit(request(x=row(n)).SerializeToString(), deliver(n)) for n in range(6)]
        gate.go(10)
        await asyncio.wait_for(done.wait(), 30)
        await infer_one(engine, gate)
        assert delivered == [0]


async def test_an_exception_in_deliver_harms_nobody_else(tmp_path, monkeypatch):
    unraisable = []
    monkeypatch.setattr("sys.unraisablehook", lambda info: unraisable.append(str(info.exc_value)))

    def deliver(status, text, response):
        raise RuntimeError("broken sink")

    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        first = Pending(engine, request(x=row(0)))
        await gate.entered()
        engine.infer.submit(request(x=row(1)).SerializeToString(), deliver)
        mate = Pending(engine, request(x=row(2)))
        gate.go(2)
        assert (await mate.answer()).status == OK
        await first.answer()
    assert unraisable == ["broken sink"]


# -- deadlines --


async def test_expired_in_the_queue_is_answered_on_time_and_never_executed(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        first = Pending(engine, request(x=row(0)))
        await gate.entered()
        begin = time.monotonic_ns()
        late = Pending(engine, request(x=row(1)), timeout_ns=20 * MS)
        mate = Pending(engine, request(x=row(2)), timeout_ns=60_000 * MS)
        answer = await late.answer()
        assert time.monotonic_ns() - begin >= 20 * MS
        assert (answer.status, answer.text) == (DEADLINE, "Deadline Exceeded")
        assert engine.model("m").lane.pending == 1
        gate.go(2)
        await first.answer()
        assert (await mate.answer()).array().item() == 2
        assert gate.batches == [(1, 1), (1, 1)]


async def test_expired_while_the_loop_was_busy_is_not_executed(tmp_path):
    """No timer can fire then; the instance itself leaves the late ones out."""
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        first = Pending(engine, request(x=row(0)))
        await gate.entered()
        pending = [Pending(engine, request(x=row(n)), timeout_ns=(1 if n % 2 else 60_000) * MS) for n in range(1, 6)]
        end = time.monotonic_ns() + 2 * MS
        while time.monotonic_ns() < end:
            pass
        gate.go(3)
        lane = engine.model("m").lane
        while lane.pending:
            pass
        statuses = [(await each.answer()).status for each in pending]
        assert statuses == [DEADLINE, OK, DEADLINE, OK, DEADLINE]
        await first.answer()
        assert gate.batches == [(1, 1), (2, 2)]
        only_late = Pending(engine, request(x=row(9)), timeout_ns=0)
        assert (await only_late.answer()).status == DEADLINE
        assert gate.batches == [(1, 1), (2, 2)]
        await infer_one(engine, gate)  # the instance has counted the late one: it may do so after the answer
        assert failures(engine) == {"CANCELED": 4}, "nobody waits any longer than the deadline"


async def test_expired_while_running_is_answered_on_time(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        for seconds in (0.25, 2.5, 25):
            late = Pending(engine, request(x=row(1)), timeout_ns=int(seconds * 1000) * MS)
            assert (await late.answer()).status == DEADLINE
            if gate.batches:  # there is none, where the deadline passed in the queue
                break
        await gate.entered()
        gate.go()
        assert (await infer_one(engine, gate)).status == OK
        assert len(late.answers) == 1


@pytest.mark.parametrize("timeout_ns", [(1 << 63) - 1, 1 << 62])
async def test_a_request_with_the_longest_timeout_is_answered(tmp_path, timeout_ns):
    async with serving(tmp_path) as engine:
        assert (await infer(engine, request(x=row(1)), timeout_ns)).status == OK


async def test_many_deadlines_in_any_order(tmp_path):
    """No deadline fires early and none is forgotten, whatever leaves the heap in between."""
    rng = random.Random(11)
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        first = Pending(engine, request(x=row(0)))
        await gate.entered()
        early, answered, done, tickets = [], 0, asyncio.Event(), []
        expected = 0

        def deliver_after(due):
            def deliver(status, text, response):
                nonlocal answered
                answered += 1
                if status != DEADLINE or time.monotonic_ns() < due:
                    early.append((status, due))
                if answered == expected:
                    done.set()

            return deliver

        for _ in range(600):
            timeout = rng.randrange(40 * MS)
            due = time.monotonic_ns() + timeout
            message = request(x=row(1)).SerializeToString()
            tickets.append(engine.infer.submit(message, deliver_after(due), timeout_ns=timeout))
        for ticket in rng.sample(tickets, 200):
            ticket.cancel()
        expected = 400
        await asyncio.wait_for(done.wait(), 30)
        assert early == []
        assert engine.model("m").lane.pending == 0
        gate.go()
        await first.answer()


# -- refusals --


async def test_refused_requests_are_answered_later_and_once(tmp_path):
    async with serving(tmp_path) as engine:
        garbage = []
        engine.infer.submit(b"\xff\xff", lambda *answer: garbage.append(answer))
        assert garbage == []
        unknown, wrong, good = await infer_all(engine, request("nope", x=row(1)), request(y=row(1)), request(x=row(1)))
        assert (unknown.status, unknown.text) == (Status.NOT_FOUND, "Request for unknown model: 'nope' is not found")
        assert (wrong.status, good.status) == (INVALID, OK)
        [(status, text, response)] = garbage
        assert (status, response) == (Status.INTERNAL, None)
        assert "not a valid inference.ModelInferRequest" in text


async def test_what_a_full_house_refuses_on_a_stream_carries_the_id(tmp_path):
    """Answers of decoupled models come in any order, so a client finds by the id which request was refused."""
    gate = Gate()
    async with serving(tmp_path, gate, max_inflight=1) as engine:
        first = Pending(engine, request(x=row(0)))
        await gate.entered()
        refused = asyncio.get_running_loop().create_future()
        for_it = request(request_id="which", x=row(1)).SerializeToString()
        engine.infer.submit(for_it, lambda *answer: refused.set_result(answer), CallOrigin(stream=True))
        status, text, data = await asyncio.wait_for(refused, 30)
        assert (status, text) == (
            Status.UNAVAILABLE,
            "Exceeds maximum queue size: the server already holds 1 requests, its limit",
        )
        assert pb.ModelStreamInferResponse.FromString(data).infer_response.id == "which"
        garbage = asyncio.get_running_loop().create_future()
        engine.infer.submit(b"\xff\xff", lambda *answer: garbage.set_result(answer), CallOrigin(stream=True))
        assert (await asyncio.wait_for(garbage, 30))[0] == Status.INTERNAL
        gate.go()
        assert (await first.answer()).status == OK


async def test_a_submission_for_which_there_is_no_memory_leaves_nothing(tmp_path):
    """One allocation of the interpreter fails, each in turn: the request is submitted whole, or freed."""
    hooks = pytest.importorskip("_testcapi")
    answers, failed = [], 0
    async with serving(tmp_path) as engine:
        message, submit = request(x=row(1)).SerializeToString(), engine.infer.submit

        def deliver(*answer):
            answers.append(answer)

        for at in range(8):
            hooks.set_nomemory(at, at + 1)
            try:
                submit(message, deliver)
            except MemoryError:
                failed += 1
            finally:
                hooks.remove_mem_hooks()
        assert 0 < failed < 8
        await until(lambda: len(answers) == 8 - failed)
    assert {status for status, _, _ in answers} == {OK}


# -- statistics --


async def test_statistics_add_up(tmp_path):
    failing = []

    def execute(batch):
        if failing:
            raise RuntimeError("no")
        echo(batch)

    gate = Gate(execute)
    async with serving(tmp_path, gate) as engine:
        gate.go(1)
        await infer(engine, request(x=row(1)))
        first = Pending(engine, request(x=row(0)))
        await gate.entered()
        await gate.entered()
        pending = [Pending(engine, request(x=row(0).repeat(rows, axis=0))) for rows in (3, 1, 4)]
        cancelled = Pending(engine, request(x=row(0)))
        cancelled.ticket.cancel()
        gate.go(2)
        for each in (first, *pending):
            assert (await each.answer()).status == OK
        failing.append(True)
        gate.go()
        await infer(engine, request(x=row(5)))
        statistics = engine.model("m").statistics()
        stats = statistics.inference_stats
        assert (stats.success.count, stats.fail.count) == (5, 2)
        assert (statistics.inference_count, statistics.execution_count) == (10, 3)
        assert {batch.batch_size: batch.compute_infer.count for batch in statistics.batch_stats} == {1: 2, 8: 1}
        phases = (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
        assert all(phase.count == 5 for phase in phases)
        assert stats.success.ns == sum(phase.ns for phase in phases)
        assert 0 < statistics.last_inference <= time.time() * 1000
        assert failures(engine) == {"CANCELED": 1, "BACKEND": 1}
        assert sum(bucket.count for bucket in statistics.queue_times) == 5
        assert [bucket.us for bucket in statistics.queue_times] == [*(1 << i for i in range(26)), 0]


# -- unloading --


async def test_close_answers_everything_that_was_accepted(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        pending = [Pending(engine, request(x=row(n)), timeout_ns=60_000 * MS) for n in range(40)]
        await gate.entered()
        closing = asyncio.create_task(engine.close())
        while engine.index()[0].state != "UNLOADING":  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        message = request(x=row(0))
        message.model_version = "1"
        refused = Pending(engine, message)
        gate.go(1000)
        assert [(await each.answer()).array().item() for each in pending] == list(range(40))
        answer = await refused.answer()
        assert answer.status == Status.UNAVAILABLE
        assert "not at ready state" in answer.text
        await closing
        assert not engine.ready
        assert engine.index()[0].state == "UNAVAILABLE"


async def test_close_answers_the_refused_too(tmp_path):
    async with serving(tmp_path) as engine:
        answers = []
        await engine.close()
        engine.infer.submit(request(x=row(1)).SerializeToString(), lambda *answer: answers.append(answer))
        engine.infer.submit(b"\xff", lambda *answer: answers.append(answer))
        await engine.close()
        assert [answer[0] for answer in answers] == [Status.NOT_FOUND, Status.INTERNAL]
