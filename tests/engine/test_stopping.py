"""Work that nobody waits for any more ends early; work that somebody waits for does not."""

import asyncio
import logging
import threading

import numpy as np
import pytest

from inferd._native.execution.python_batch import Batch
from tests.backends.models import endless_onnx
from tests.engine.serving import CONFIG, Pending, echo, infer, request, row, serving
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("native_counters")

BATCHED = CONFIG.replace("dynamic_batching { }", "dynamic_batching { max_queue_delay_microseconds: 30000000 }").replace(
    "max_batch_size: 8", "max_batch_size: 2"
)
COALESCING = CONFIG + 'parameters { key: "coalesce_requests" value { string_value: "true" } }'
SEQUENCES = """
backend: "puppet"
max_batch_size: 1
input { name: "x" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
sequence_batching { }
"""
LOOP = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { }
"""


class Stoppable:
    """An execution that lasts until it is stopped or let go."""

    def __init__(self) -> None:
        self.stops = 0
        self.resumes = 0
        self.entered = threading.Semaphore(0)
        self._over = threading.Semaphore(0)

    def __call__(self, batch: Batch) -> None:
        before = self.stops
        self.entered.release()
        assert self._over.acquire(timeout=30), "neither stopped nor let go"
        if self.stops > before:
            raise InterruptedError("stopped")
        echo(batch)

    def stop(self) -> None:
        self.stops += 1
        self._over.release()

    def resume(self) -> None:
        self.resumes += 1

    def go(self) -> None:
        self._over.release()

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=30), "the model was not executed"


async def test_a_batch_is_stopped_when_the_last_of_its_requests_is_cancelled(tmp_path, caplog):
    model = Stoppable()
    with caplog.at_level(logging.DEBUG, "inferd.instance"):
        async with serving(tmp_path, model, m=BATCHED) as engine:
            first, second = (Pending(engine, request(x=row(n))) for n in range(2))
            await model.begun()
            first.ticket.cancel()
            assert model.stops == 0, "somebody waits for the second"
            second.ticket.cancel()
            assert model.stops == 1
            third, fourth = (Pending(engine, request(x=row(n))) for n in (2, 3))
            await model.begun()  # the instance goes on
            assert model.resumes == 1
            model.go()
            assert [(await each.answer()).array().item() for each in (third, fourth)] == [2, 3]
    assert model.stops == 1
    assert not first.answers and not second.answers
    assert [record.levelname for record in caplog.records if "stopped" in record.message] == ["DEBUG"]


async def test_a_deadline_stops_as_well(tmp_path):
    model = Stoppable()
    async with serving(tmp_path, model) as engine:
        pending = Pending(engine, request(x=row(1)), timeout_ns=1_000_000_000)
        await model.begun()
        assert (await pending.answer()).status == 4
    assert (model.stops, model.resumes) == (1, 1)


async def test_identical_requests_that_run_once_stop_with_the_last_of_them(tmp_path):
    model = Stoppable()
    async with serving(tmp_path, model, m=COALESCING) as engine:
        first, second = (Pending(engine, request(x=row(7))) for _ in range(2))
        await model.begun()
        first.ticket.cancel()
        assert model.stops == 0
        second.ticket.cancel()
        assert model.stops == 1


async def test_sequences_are_not_stopped(tmp_path):
    """What comes next in a sequence depends on what was executed."""
    model = Stoppable()
    start = request(x=row(1))
    start.parameters["sequence_id"].int64_param = 1
    start.parameters["sequence_start"].bool_param = True
    async with serving(tmp_path, model, m=SEQUENCES) as engine:
        pending = Pending(engine, start)
        await model.begun()
        pending.ticket.cancel()
        assert model.stops == 0
        model.go()


async def test_what_is_stopped_counts_as_failed(tmp_path):
    model = Stoppable()
    async with serving(tmp_path, model) as engine:
        pending = Pending(engine, request(x=row(1)))
        await model.begun()
        pending.ticket.cancel()
        model.go()
        assert (await infer(engine, request(x=row(2)))).array().item() == 2
        statistics = engine.model("m").statistics().inference_stats
    assert (statistics.success.count, statistics.fail.count) == (1, 1)


async def executing(engine, requests):
    """Until so many are executed: what comes then is in no batch with them."""
    await until(lambda: sum(use.running for use in engine.model("m").uses()) >= requests)


@pytest.mark.parametrize("ends", ["cancelled", "late"])
async def test_a_running_onnx_model_is_stopped(tmp_path, ends):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(endless_onnx())
    async with serving(tmp_path, m=LOOP) as engine:
        assert (await infer(engine, request(x=row(3)))).array().item() == 3
        # as many steps as nobody can wait for, on the only instance
        for_ever = np.full((1, 1), 2**62, np.int64)
        pending = Pending(engine, request(x=for_ever), timeout_ns=3_000_000_000 if ends == "late" else -1)
        await executing(engine, 1)
        if ends == "late":
            assert (await pending.answer()).status == 4
        else:
            pending.ticket.cancel()
        assert (await infer(engine, request(x=row(5)))).array().item() == 5


async def test_the_other_instances_go_on(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(endless_onnx())
    config = LOOP.replace("count: 1", "count: 2").replace("dynamic_batching { }", "")
    async with serving(tmp_path, m=config) as engine:
        for_ever = np.full((1, 1), 2**62, np.int64)
        first, second = (Pending(engine, request(x=for_ever)) for _ in range(2))
        await executing(engine, 2)
        first.ticket.cancel()
        assert (await infer(engine, request(x=row(6)))).array().item() == 6
        assert not second.answers, "somebody waits for it"
        second.ticket.cancel()
