"""Guards splitting: a request larger than max_batch_size gets one answer, made of its parts in their order."""

import random

import numpy as np
import pytest

from inferd.server.errors import Status
from tests.engine.serving import CONFIG, Gate, Pending, infer, request, serving

MS = 1_000_000
SPLITTING = CONFIG + 'parameters { key: "split_requests" value { string_value: "true" } }'


pytestmark = pytest.mark.usefixtures("native_counters")


def double(batch):
    batch.set_output("y", batch.input("x").numpy() * 2)


def rows(count, width=3):
    return np.arange(count * width, dtype=np.int64).reshape(count, width)


async def test_a_large_request_is_executed_in_parts_by_all_instances(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=SPLITTING.replace("count: 1", "count: 2")) as engine:
        pending = Pending(engine, request(x=rows(20), request_id="large"))
        await gate.entered()
        await gate.entered()  # two at a time
        gate.go(3)
        answer = await pending.answer()
        np.testing.assert_array_equal(answer.array(), rows(20) * 2)
        assert answer.response.id == "large"
        assert sorted(rows for _, rows in gate.batches) == [4, 8, 8]


async def test_the_last_part_shares_a_batch_with_other_requests(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=SPLITTING) as engine:
        large = Pending(engine, request(x=rows(12)))
        small = Pending(engine, request(x=rows(4)))
        gate.go(3)
        np.testing.assert_array_equal((await large.answer()).array(), rows(12) * 2)
        np.testing.assert_array_equal((await small.answer()).array(), rows(4) * 2)
        assert gate.batches[-1] == (2, 8)


async def test_strings_are_split_between_rows(tmp_path):
    def reverse(batch):
        view = batch.input("x")
        batch.set_bytes_output("y", [element[::-1] for element in view.strings()], view.shape)

    array = np.array([[b"%d" % (7**i), b""] for i in range(19)], dtype=object)
    async with serving(tmp_path, reverse, m=SPLITTING.replace("TYPE_INT64", "TYPE_STRING")) as engine:
        answer = await infer(engine, request(x=array))
    assert answer.array().tolist() == [[first[::-1], b""] for first, _ in array.tolist()]


async def test_one_failing_part_fails_the_request_once(tmp_path):
    def fail_the_second(batch):
        if batch.input("x").numpy()[0, 0] == 24:
            raise ValueError("not these")
        double(batch)

    async with serving(tmp_path, fail_the_second, m=SPLITTING) as engine:
        answer = await infer(engine, request(x=rows(40)))
        assert (answer.status, answer.text) == (Status.INTERNAL, "not these")
        assert (await infer(engine, request(x=rows(8) + 1))).status == Status.OK


async def test_cancelling_removes_all_queued_parts(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=SPLITTING) as engine:
        pending = Pending(engine, request(x=rows(80)))
        await gate.entered()
        assert engine.model("m").lane.pending == 9
        pending.ticket.cancel()
        assert engine.model("m").lane.pending == 0
        gate.go()
    assert gate.batches == [(1, 8)]
    assert not pending.answers


async def test_the_deadline_is_that_of_the_whole(tmp_path):
    gate = Gate(double)
    async with serving(tmp_path, gate, m=SPLITTING) as engine:
        pending = Pending(engine, request(x=rows(30)), timeout_ns=20 * MS)
        assert (await pending.answer()).status == Status.DEADLINE_EXCEEDED
        gate.go(4)
    assert len(gate.batches) <= 1


async def test_outputs_of_different_shapes_cannot_be_joined(tmp_path):
    widths = iter([3, 2])

    def narrower(batch):
        batch.set_output("y", batch.input("x").numpy()[:, : next(widths)].copy())

    async with serving(tmp_path, narrower, m=SPLITTING) as engine:
        answer = await infer(engine, request(x=rows(16)))
    assert answer.status == Status.INTERNAL
    assert "output 'y' has another shape or datatype in each part" in answer.text


async def test_there_is_a_limit(tmp_path):
    async with serving(tmp_path, double, m=SPLITTING) as engine:
        answer = await infer(engine, request(x=np.zeros((8 * 4096 + 1, 1), np.int64)))
        assert answer.status == Status.INVALID_ARGUMENT
        assert f"batch-size must be <= {8 * 4096}" in answer.text


async def test_random_sizes_get_their_own_rows(tmp_path):
    rng = random.Random(11)
    async with serving(tmp_path, double, m=SPLITTING.replace("count: 1", "count: 2")) as engine:
        arrays = [rows(rng.randrange(1, 60), rng.randrange(1, 4)) + 1000 * i for i in range(150)]
        pending = [Pending(engine, request(x=array)) for array in arrays]
        for array, each in zip(arrays, pending, strict=True):
            np.testing.assert_array_equal((await each.answer()).array(), array * 2)
