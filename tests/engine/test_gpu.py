"""Guards instances on a GPU, on the stub driver: answers, overlap, order of accesses, fall-backs, graphs, lost devices.

The stub reports accesses that nothing orders, host memory written before its copy ran, and what is left alive: every
test here checks that it has nothing to report.
"""

import asyncio
import gc
import logging
from contextlib import asynccontextmanager

import numpy as np
import pytest

from inferd._native.execution import batchlog
from inferd.server.errors import Status
from tests import gpu_stub
from tests.engine.serving import Pending, gpus_of_stub, infer, infer_all, request, serving_folder
from tests.gpu_stub.fixtures import stub

__all__ = ["stub"]

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
MIB = 1 << 20

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_GPU count: 1 }
dynamic_batching { }
"""
STATIC = CONFIG.replace("dims: [ -1 ]", "dims: [ 4 ]")
TWO_INPUTS = """
backend: "identity"
max_batch_size: 8
input { name: "a" data_type: TYPE_FP32 dims: [ 3 ] }
input { name: "b" data_type: TYPE_INT8 dims: [ 5 ] optional: true }
output { name: "a" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "b" data_type: TYPE_INT8 dims: [ 5 ] }
instance_group { kind: KIND_GPU }
"""


# Requests, blocks, streams, events and device memory are gone when the engine is closed.
pytestmark = pytest.mark.usefixtures("native_counters", "stub")


@asynccontextmanager
async def serving(root, config=CONFIG, problems=0, shared_memory=None, **policy):
    """An engine with the model "m" on the stub's device; this thread, the loop's, must not wait for the device."""
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(config)
    logging.disable(logging.CRITICAL if problems else logging.NOTSET)  # a record would keep what failed alive
    gpus = gpus_of_stub(**policy)
    async with serving_folder(root, None, problems, gpus, shared_memory=shared_memory) as engine:
        logging.disable(logging.NOTSET)
        with gpu_stub.load().loop():
            yield engine
            await engine.close()


def array(rows, columns, start=0):
    return (np.arange(rows * columns, dtype=np.int64) + start).reshape(rows, columns)


async def test_each_request_gets_its_own_rows_back(tmp_path):
    async with serving(tmp_path) as engine:
        sent = [array(1 + i % 3, 1 + i % 5, 1000 * i) for i in range(300)]
        answers = await infer_all(engine, *(request(x=each) for each in sent))
        for each, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer.array(), each)


async def test_three_instances_answer_each_request_with_its_own_rows(tmp_path):
    async with serving(tmp_path, CONFIG.replace("count: 1", "count: 3")) as engine:
        sent = [array(1, 64, 1000 * i) for i in range(200)]
        answers = await infer_all(engine, *(request(x=each) for each in sent))
        for each, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer.array(), each)


async def test_a_line_for_each_batch_while_it_is_switched_on(tmp_path, caplog):
    async with serving(tmp_path, CONFIG.replace("dynamic_batching { }", "")) as engine:
        with caplog.at_level(logging.DEBUG, "inferd.batch"):
            batchlog.switch(True)
            assert (await infer(engine, request(x=array(2, 3)))).status == Status.OK
            batchlog.switch(False)
        [line] = [record.getMessage() for record in caplog.records if record.name == "inferd.batch"]
        assert line.startswith("model m, instance m_0_0, executing 1 requests: version 1, 2 rows, the oldest waited ")
        assert line.endswith(" us, no batching")


async def test_empty_and_large_tensors(tmp_path, stub):
    """The buffers grow with what comes, here beyond what the pool may hold."""
    async with serving(tmp_path, pool_sizes={0: 4 * MIB}) as engine:
        for each in (array(1, 0), array(2, 3), array(1, MIB // 2), array(8, MIB // 8), array(1, 1)):
            answer = await infer(engine, request(x=each))
            assert answer.status == Status.OK, answer.text
            np.testing.assert_array_equal(answer.array(), each)


async def test_next_batch_is_uploaded_while_one_computes(tmp_path, stub):
    async with serving(tmp_path) as engine:
        await infer(engine, request(x=array(1, 4)))
        uploads, computed = stub.executed("h2d"), stub.executed("d2d")
        with stub.held("d2d"):
            first = Pending(engine, request(x=array(1, 4)))
            await asyncio.to_thread(stub.wait_executed, "h2d", uploads + 1)
            second = Pending(engine, request(x=array(1, 4, 9)))
            await asyncio.to_thread(stub.wait_executed, "h2d", uploads + 2)
            assert stub.executed("d2d") == computed
            assert not first.answers
            # a third stays in the lane, where it can form a batch with what comes
            third = [Pending(engine, request(x=array(1, 4, i))) for i in range(4)]
        for each in (first, second, *third):
            assert (await each.answer()).status == Status.OK
        assert stub.executed("h2d") == uploads + 3


async def test_one_batch_is_downloaded_while_the_next_computes(tmp_path, stub):
    async with serving(tmp_path) as engine:
        await infer(engine, request(x=array(1, 4)))
        computed = stub.executed("d2d")
        with stub.held("d2h"):
            pending = [Pending(engine, request(x=array(1, 4)))]
            await asyncio.to_thread(stub.wait_executed, "d2d", computed + 1)
            pending.append(Pending(engine, request(x=array(1, 4, 9))))
            await asyncio.to_thread(stub.wait_executed, "d2d", computed + 2)
            assert not any(each.answers for each in pending)
        for each in pending:
            assert (await each.answer()).status == Status.OK


async def test_all_inputs_of_a_batch_go_up_in_one_copy_and_nothing_waits(tmp_path, stub):
    async with serving(tmp_path, TWO_INPUTS) as engine:
        a, b = np.ones((2, 3), np.float32), np.full((2, 5), 7, np.int8)
        await infer(engine, request(a=a, b=b))
        waits = ("cuStreamSynchronize", "cuCtxSynchronize", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc")
        before, uploads = [stub.calls(name) for name in waits], stub.executed("h2d")
        for _ in range(5):
            answer = await infer(engine, request(a=a, b=b))
            np.testing.assert_array_equal(answer.array("a"), a)
            np.testing.assert_array_equal(answer.array("b"), b)
        assert stub.executed("h2d") == uploads + 5
        assert [stub.calls(name) for name in waits] == before
        only = await infer(engine, request(a=a, outputs=("a",)))
        np.testing.assert_array_equal(only.array("a"), a)


async def test_without_page_locked_memory_it_works_and_says_so_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "inferd.cuda"):
        async with serving(tmp_path, pinned_size=0) as engine:
            for i in range(3):
                each = array(2, 50, i)
                np.testing.assert_array_equal((await infer(engine, request(x=each))).array(), each)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "no page-locked memory: asked for 1024 bytes; 0 are in use, 0 held of at most 0; ordinary memory"
    )


async def test_pinned_memory_is_a_choice(tmp_path, stub):
    off = "optimization { input_pinned_memory { enable: false } output_pinned_memory { enable: false } }"
    async with serving(tmp_path, CONFIG + off) as engine:
        calls = stub.calls("cuMemHostAlloc")
        np.testing.assert_array_equal((await infer(engine, request(x=array(2, 5)))).array(), array(2, 5))
        assert stub.calls("cuMemHostAlloc") == calls


async def test_failed_call_fails_its_batch_alone(tmp_path, stub):
    async with serving(tmp_path) as engine:
        for call in ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord"):
            stub.fail(call, 1)
            answer = await infer(engine, request(x=array(1, 4)))
            assert answer.status == Status.INTERNAL
            assert f"{call}: CUDA_ERROR_INVALID_VALUE (1)" in answer.text
            np.testing.assert_array_equal((await infer(engine, request(x=array(1, 4)))).array(), array(1, 4))
        assert engine.model("m").ready


async def test_device_without_memory_fails_the_request_with_figures(tmp_path, stub):
    async with serving(tmp_path, pool_sizes={0: 2 * MIB}) as engine:
        await infer(engine, request(x=array(1, 4)))
        stub.set(memory=4 * MIB)
        try:
            answer = await infer(engine, request(x=array(1, MIB)))
        finally:
            stub.set(memory=1 << 30)
        assert answer.status == Status.INTERNAL
        assert "no device memory: asked for" in answer.text
        np.testing.assert_array_equal((await infer(engine, request(x=array(1, 4)))).array(), array(1, 4))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
async def test_a_gpu_that_is_too_full_takes_no_model(tmp_path, fraction):
    """--model-load-gpu-limit, with Triton's text; what the instance had taken is given back."""
    sample = "data_type: TYPE_INT64 dims: [ 4 ] zero_data: true"
    warmup = f'model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "x" value {{ {sample} }} }} }}'
    async with serving(tmp_path, STATIC + warmup, int(not fraction), load_limits={0: fraction}) as engine:
        if fraction:
            assert (await infer(engine, request(x=array(1, 4)))).status == Status.OK
        else:
            problem = engine.problems["m"]
            assert "can not create model 'm': memory limit set for GPU 0 has exceeded" in problem


async def test_lost_device(tmp_path, stub, caplog):
    """Everything that is under way and comes later is answered; the model is not ready any more."""
    async with serving(tmp_path) as engine:
        await infer(engine, request(x=array(1, 4)))
        assert engine.model("m").ready
        unready = asyncio.Event()
        engine.subscribe(lambda model, version, ready: None if ready else unready.set())
        uploads = stub.executed("h2d")
        stub.hold("d2d")
        pending = [Pending(engine, request(x=array(1, 4)))]
        await asyncio.to_thread(stub.wait_executed, "h2d", uploads + 1)
        pending += [Pending(engine, request(x=array(1, 4, i))) for i in range(20)]
        await asyncio.to_thread(stub.wait_executed, "h2d", uploads + 2)
        with stub.broken(ILLEGAL_ADDRESS):
            for each in pending:
                answer = await each.answer()
                assert answer.status == Status.INTERNAL
                assert "CUDA_ERROR_ILLEGAL_ADDRESS" in answer.text
            answer = await infer(engine, request(x=array(1, 4)))
            assert answer.text.startswith("CUDA device 0 is lost and the server has to be restarted: ")
            await asyncio.wait_for(unready.wait(), 30)
            assert "CUDA device 0 is lost" in caplog.text
        stub.release("d2d")


# -- graphs --


async def test_graphs_are_captured_at_load_and_launched(tmp_path, stub):
    large = "graph_spec { batch_size: 8 graph_lower_bound { batch_size: 4 } }"
    graphs = f"optimization {{ cuda {{ graphs: true graph_spec {{ batch_size: 2 }} {large} }} }}"
    async with serving(tmp_path, STATIC + graphs) as engine:
        launched, copies = stub.calls("cuGraphLaunch"), stub.calls("cuMemcpyDtoDAsync_v2")
        for rows, by_graph in ((2, True), (4, True), (7, True), (8, True), (1, False), (3, False), (2, True)):
            each = array(rows, 4, 100 * rows)
            answer = await infer(engine, request(x=each))
            np.testing.assert_array_equal(answer.array(), each)
            launched += by_graph
            copies += not by_graph
            assert (stub.calls("cuGraphLaunch"), stub.calls("cuMemcpyDtoDAsync_v2")) == (launched, copies)


async def test_graphs_of_given_shapes(tmp_path, stub):
    """Each for batches of its own shape; others are submitted call by call."""
    rows = "batch_size: 4 graph_lower_bound { batch_size: 1 }"
    specs = "".join(f'graph_spec {{ {rows} input {{ key: "x" value {{ dim: {n} }} }} }}' for n in (4, 64))
    async with serving(tmp_path, CONFIG + f"optimization {{ cuda {{ graphs: true {specs} }} }}") as engine:
        launched, copies = stub.calls("cuGraphLaunch"), stub.calls("cuMemcpyDtoDAsync_v2")
        for rows, columns, by_graph in ((4, 64, True), (2, 4, True), (3, 64, True), (2, 5, False), (5, 64, False)):
            each = array(rows, columns, 100 * rows)
            answer = await infer(engine, request(x=each))
            np.testing.assert_array_equal(answer.array(), each)
            launched += by_graph
            copies += not by_graph
            assert (stub.calls("cuGraphLaunch"), stub.calls("cuMemcpyDtoDAsync_v2")) == (launched, copies)


async def test_graphs_need_shapes_that_do_not_vary(tmp_path):
    async with serving(tmp_path, CONFIG + "optimization { cuda { graphs: true } }", problems=1) as engine:
        assert (
            "instance m_0_0: no CUDA graphs: CUDA graphs need inputs of one shape, but 'x' varies"
            in engine.problems["m"]
        )


async def test_device_without_memory_for_graphs_is_named(tmp_path, stub):
    """It is the device that lacks memory, not the server."""
    stub.set(full=1)
    try:
        async with serving(tmp_path, STATIC + "optimization { cuda { graphs: true } }", problems=1) as engine:
            assert "no CUDA graphs: no device memory: asked for" in engine.problems["m"]
            assert "container" not in engine.problems["m"]
    finally:
        stub.set(full=0)


async def test_model_that_cannot_be_captured_does_not_load(tmp_path, stub):
    stub.fail("cuMemcpyDtoDAsync_v2", 900, after=1)
    async with serving(tmp_path, STATIC + "optimization { cuda { graphs: true } }", problems=1) as engine:
        assert "no CUDA graphs: cuMemcpyDtoDAsync_v2: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in engine.problems["m"]


# -- configuration --


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG.replace("count: 1", "gpus: [ 0, 5 ]"), "specifies invalid or unsupported gpu id 5"),
        (CONFIG.replace("INT64", "STRING"), "input 'x' is BYTES, which no GPU takes"),
        (
            CONFIG + "optimization { cuda { graph_spec { batch_size: 9 } } }",
            "must be 0 to max_batch_size, which is 8, for model 'm': got 9",
        ),
        (
            CONFIG + "optimization { cuda { graph_spec { batch_size: 2 graph_lower_bound { batch_size: 3 } } } }",
            "must not be above the batch_size 2",
        ),
        (
            CONFIG + 'optimization { cuda { graph_spec { input { key: "z" value { dim: 4 } } } } }',
            "graph_spec has a shape for 'z', which is no input of the model",
        ),
        (
            STATIC + 'optimization { cuda { graph_spec { input { key: "x" value { dim: 5 } } } } }',
            "the shape of input 'x' in a graph_spec, without the batch dimension, must match [4]",
        ),
        (
            CONFIG
            + 'optimization { cuda { graph_spec { graph_lower_bound { input { key: "x" value { dim: 5 } } } } } }',
            "the shape of input 'x' in graph_lower_bound must be the same as in its graph_spec",
        ),
    ],
)
async def test_configurations_that_cannot_be(tmp_path, config, expected):
    async with serving(tmp_path, config, problems=1) as engine:
        assert expected in engine.problems["m"]


@pytest.mark.parametrize(("priority", "greatest"), [("MAX", 1), ("MIN", 0), ("DEFAULT", 0)])
async def test_priority_is_that_of_the_computing_stream(tmp_path, stub, priority, greatest):
    before = stub.streams(0)
    async with serving(tmp_path, CONFIG + f"optimization {{ priority: PRIORITY_{priority} }}"):
        assert (stub.streams(-5), stub.streams(0) - before) == (greatest, 3 - greatest)


async def test_outputs_have_a_stream_of_their_own_asked_for_or_not(tmp_path, stub):
    for asked in ("true", "false"):
        options = f"optimization {{ cuda {{ output_copy_stream: {asked} busy_wait_events: {asked} }} }}"
        before = stub.streams(0)
        async with serving(tmp_path / asked, CONFIG + options) as engine:
            assert stub.streams(0) == before + 3
            np.testing.assert_array_equal((await infer(engine, request(x=array(2, 5)))).array(), array(2, 5))
        gc.collect()


async def test_usage_of_the_pools_can_be_read(tmp_path):
    async with serving(tmp_path) as engine:
        await infer(engine, request(x=array(2, 5)))
        usage = engine.memory_usage()
        assert usage.pop("host").keys() == usage["gpu 0"].keys()
        assert set(usage) == {"gpu 0", "page-locked 0"}
        assert usage["gpu 0"]["limit"] == 64 * MIB
        assert usage["page-locked 0"]["limit"] == 256 * MIB
        assert all(pool["peak"] > 0 for pool in usage.values())


async def test_statistics_tell_what_a_model_keeps_on_its_device(tmp_path):
    """Buffers for inputs grow with what comes; graphs keep their outputs."""
    async with serving(tmp_path) as engine:
        await infer(engine, request(x=array(2, 5)))
        [before] = engine.model("m").statistics().memory_usage
        await infer(engine, request(x=array(8, 1000)))
        [after] = engine.model("m").statistics().memory_usage
        assert (before.type, before.id) == ("GPU", 0)
        assert before.byte_size > 0
        assert after.byte_size >= 65536
    async with serving(tmp_path / "graphs", STATIC + "optimization { cuda { graphs: true } }") as engine:
        [kept] = engine.model("m").statistics().memory_usage
        assert kept.byte_size >= 3 * 3 * 256


async def test_a_gpu_that_gives_no_context_at_the_start_ends_no_server(tmp_path, stub, caplog):
    """Another process may have the device to itself, or all of its memory: models on the CPU are served."""
    stub.fail("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY)
    gpus = gpus_of_stub()
    assert gpus.count > 0
    assert "GPU 0 cannot be used now: " in caplog.text
    assert gpus.device(0).name
