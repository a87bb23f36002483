"""Guards the coalescer: identical requests in flight are executed once, and nobody gets another question's answer."""

import asyncio
import random

import numpy as np
import pytest

from inferd.server.errors import Status
from tests.engine.serving import CONFIG, YZ, Answer, Gate, Pending, Z, infer, request, row, serving

MS = 1_000_000
ALIKE = 'parameters { key: "coalesce_requests" value { string_value: "true" } }'
COALESCING = CONFIG + ALIKE
TWO_OUTPUTS = COALESCING + Z

pytestmark = pytest.mark.usefixtures("native_counters")


def double(batch):
    batch.set_output("y", batch.input("x").numpy() * 2)


async def test_identical_requests_are_executed_once(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=COALESCING) as engine:
        first = Pending(engine, request(x=row(1, 2), request_id="a"))
        await gate.entered()
        others = [Pending(engine, request(x=row(1, 2), request_id=f"b{i}")) for i in range(10)]
        gate.go()
        answers = [await each.answer() for each in (first, *others)]
        assert gate.batches == [(1, 1)]
        assert [answer.response.id for answer in answers] == ["a", *(f"b{i}" for i in range(10))]
        assert all(answer.array().tolist() == [[2, 4]] for answer in answers)
        assert engine.infer.reuse()["followers"] == 10
        statistics = engine.model("m").statistics()
        assert statistics.inference_count == 1
        assert statistics.inference_stats.success.count == 11


@pytest.mark.parametrize(
    "other",
    [
        request(x=row(1, 3)),
        request(x=row(1)),
        request(x=row(1, 2), outputs=("y",)),
        request(x=np.array([[1, 2], [1, 2]], dtype=np.int64)),
    ],
    ids=["bytes", "shape", "outputs", "rows"],
)
async def test_different_questions_are_executed_each(tmp_path, other):
    gate = Gate(lambda batch: [batch.set_output(name, batch.input("x").numpy()) for name in ("y", "z")])
    async with serving(tmp_path, gate, m=TWO_OUTPUTS) as engine:
        first = Pending(engine, request(x=row(1, 2)))
        await gate.entered()
        second = Pending(engine, other)
        gate.go(2)
        await first.answer()
        answer = await second.answer()
        assert answer.array().tobytes() == other.raw_input_contents[0]
        assert engine.infer.reuse()["followers"] == 0


async def test_parameters_that_the_model_sees_are_part_of_the_question(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=COALESCING) as engine:
        messages = [request(x=row(1)) for _ in range(5)]
        messages[0].parameters["style"].string_param = "a"
        messages[1].parameters["style"].string_param = "b"
        messages[2].parameters["style"].string_param = "a"
        messages[2].parameters["priority"].uint64_param = 3  # only the scheduler's
        messages[3].parameters["style"].int64_param = 1
        pending = [Pending(engine, message) for message in messages]
        gate.go(5)
        for each in pending:
            assert (await each.answer()).status == Status.OK
        assert engine.infer.reuse()["followers"] == 1


async def test_callers_who_are_kept_apart_share_no_execution(tmp_path):
    """A follower is quicker than the first request, so its client could tell what another client asks at the moment."""
    gate = Gate(double)
    async with serving(tmp_path, gate, m=COALESCING) as engine:
        engine.infer.set_callers_apart(sequences=True, responses=True)
        who = [{"caller": 7}, {"caller": 7}, {"caller": 8}, {"identity": 9}, {}, {}]
        pending = [Pending(engine, request(x=row(1)), **each) for each in who]
        gate.go(len(who))
        for each in pending:
            assert (await each.answer()).array().tolist() == [[2]]
        assert engine.infer.reuse()["followers"] == 2, "the second one of caller 7, and of those who are not known"
        assert sum(requests for requests, _ in gate.batches) == 4


async def test_followers_have_their_own_deadlines(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=COALESCING) as engine:
        first = Pending(engine, request(x=row(1)), timeout_ns=20 * MS)
        second = Pending(engine, request(x=row(1)))
        third = Pending(engine, request(x=row(1)), timeout_ns=20 * MS)
        await gate.entered()
        assert (await first.answer()).status == Status.DEADLINE_EXCEEDED
        assert (await third.answer()).status == Status.DEADLINE_EXCEEDED
        gate.go()
        assert (await second.answer()).array().tolist() == [[2]]


async def test_work_is_cancelled_when_the_last_waiter_has_left(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=COALESCING) as engine:
        running = Pending(engine, request(x=row(7)))
        await gate.entered()
        waiting = [Pending(engine, request(x=row(1))) for _ in range(3)]
        for each in waiting:
            each.ticket.cancel()
        assert engine.model("m").lane.pending == 0
        later = Pending(engine, request(x=row(1)))
        gate.go(2)
        await running.answer()
        assert (await later.answer()).array().tolist() == [[2]]
        assert len(gate.batches) == 2
        assert not any(each.answers for each in waiting)


async def test_all_get_the_error(tmp_path):
    def fail(batch):
        raise ValueError("no such thing")

    gate = Gate(fail)
    async with serving(tmp_path, gate, m=COALESCING) as engine:
        pending = [Pending(engine, request(x=row(1))) for _ in range(3)]
        gate.go()
        for each in pending:
            answer = await each.answer()
            assert (answer.status, answer.text) == (Status.INTERNAL, "no such thing")
        assert engine.model("m").statistics().inference_stats.fail.count == 3


async def test_ensembles_that_share_an_execution_may_lack_an_output(tmp_path):
    """Outputs may be missing as they may where each request is executed on its own."""
    gate = Gate(double)
    async with serving(tmp_path, gate, m=TWO_OUTPUTS, e=YZ + ALIKE) as engine:
        through = [Pending(engine, request("e", x=row(1, 2))) for _ in range(3)]
        await gate.entered()
        gate.go()
        for each in through:
            answer = await each.answer()
            assert [output.name for output in answer.response.outputs] == ["y"]
            assert answer.array().tolist() == [[2, 4]]
        assert engine.infer.reuse()["followers"] == 2


async def test_a_delivery_may_make_other_waiters_leave(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=COALESCING) as engine:
        others: list[Pending] = []
        delivered = asyncio.Event()

        def cancel_the_others(*_):
            for each in others:
                each.ticket.cancel()
            delivered.set()

        engine.infer.submit(request(x=row(1)).SerializeToString(), cancel_the_others)
        others.extend(Pending(engine, request(x=row(1))) for _ in range(4))
        gate.go(2)
        await asyncio.wait_for(delivered.wait(), 30)
        assert (await infer(engine, request(x=row(1)))).array().tolist() == [[2]]
        assert not any(each.answers for each in others)


async def test_sequences_are_never_joined(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=COALESCING) as engine:
        message = request(x=row(1))
        message.parameters["sequence_id"].int64_param = 5
        pending = [Pending(engine, message) for _ in range(2)]
        gate.go(2)
        for each in pending:
            await each.answer()
        assert engine.infer.reuse()["followers"] == 0


@pytest.mark.parametrize("seed", range(3))
async def test_random_questions_get_their_own_answers(tmp_path, seed):
    rng = random.Random(seed)
    async with serving(tmp_path, double, m=COALESCING.replace("count: 1", "count: 2")) as engine:
        open_ones: list[tuple[Pending, int]] = []
        for _ in range(3000):
            value = rng.randrange(20)
            timeout = rng.choice([-1, -1, -1, 100_000, 2 * MS])
            open_ones.append((Pending(engine, request(x=row(value)), timeout_ns=timeout), value))
            if rng.random() < 0.1:
                pending, _ = open_ones.pop(rng.randrange(len(open_ones)))
                pending.ticket.cancel()
                assert len(pending.answers) <= 1
            if len(open_ones) > 50:
                await _checked(*open_ones.pop(0))
        for each in open_ones:
            await _checked(*each)
        assert engine.infer.reuse()["followers"] > 0


async def _checked(pending: Pending, value: int) -> None:
    answer: Answer = await pending.answer()
    assert answer.status in (Status.OK, Status.DEADLINE_EXCEEDED)
    if answer.status == Status.OK:
        assert answer.array().tolist() == [[2 * value]]
