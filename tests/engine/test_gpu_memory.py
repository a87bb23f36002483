"""Guards whose the memory of a device is: of graphs, of batches, of objects that a backend keeps, of clients' regions.

The model is the identity backend's, with the work on the device done by kernels of the stub driver where a test has to
see what a model sees. The stub reports what is read and was never written, what is freed too early, and a loop that
waits or finds another context current.
"""

import asyncio
import threading
import weakref

import numpy as np
import pytest

from inferd._native.cuda import closing
from inferd.backends.identity import IdentityGpuInstance
from inferd.server.engine.instances.shared_memory import CUDA, SharedMemoryPolicy
from inferd.server.errors import Status
from tests.engine.region_owner import SIZE, RegionOwner, placed
from tests.engine.serving import Pending, infer, request
from tests.engine.test_gpu import CONFIG, MIB, STATIC, array, serving
from tests.gpu_stub.fixtures import stub

__all__ = ["stub"]

ROW = 32  # bytes: four INT64
ONE_ROW = "optimization { cuda { graphs: true graph_spec { batch_size: 1 } } }"
PADDED = "optimization { cuda { graphs: true graph_spec { batch_size: 8 graph_lower_bound { batch_size: 1 } } } }"


pytestmark = pytest.mark.usefixtures("native_counters", "stub")


@pytest.fixture
def seen(monkeypatch, stub):
    """The rows of each execution as the model sees them, which answers with its input."""
    seen = []

    def submit(instance, batch):
        source = batch.input("x")
        target = batch.output("y", source.shape)

        def kernel():
            rows = stub.read(source.pointer, source.size)
            seen.append(np.frombuffer(rows, np.int64).reshape(source.shape))
            stub.write(target.pointer, rows)

        touched = [(source.pointer, source.size, False), (target.pointer, target.size, True)]
        assert stub.launch(instance.stream.handle, kernel, touched) == 0

    monkeypatch.setattr(IdentityGpuInstance, "submit", submit)
    return seen


# -- graphs --


async def test_a_larger_batch_leaves_the_inputs_of_a_graph_where_they_are(tmp_path, stub):
    """The buffers of a set grow with what comes; the addresses of a graph do not change."""
    async with serving(tmp_path, STATIC + ONE_ROW) as engine:
        launched = stub.calls("cuGraphLaunch")
        for round_ in range(6):
            for rows in (8, 1):
                each = array(rows, 4, 1000 * round_ + rows)
                answer = await infer(engine, request(x=each))
                np.testing.assert_array_equal(answer.array(), each)
        assert stub.calls("cuGraphLaunch") == launched + 6


async def test_memory_of_graphs_is_theirs_also_beyond_the_pool(tmp_path, stub):
    """Every block is an allocation of its own here, so the stub sees whether one is freed under a live graph."""
    async with serving(tmp_path, STATIC + ONE_ROW, pool_sizes={0: 0}) as engine:
        for rows in (1, 8, 2, 1, 8, 1):
            each = array(rows, 4, rows)
            np.testing.assert_array_equal((await infer(engine, request(x=each))).array(), each)
    assert stub.violations() == []


async def test_a_model_is_captured_with_zeros(tmp_path, seen, stub):
    """Anything else could be an index out of range, which costs the device."""
    async with serving(tmp_path, STATIC + PADDED, pool_sizes={0: 0}):
        assert len(seen) == 3  # the warm-up runs on each set of buffers
        assert not any(rows.any() for rows in seen)
    assert stub.violations() == []


async def test_rows_that_a_graph_computes_for_nobody_are_zeros(tmp_path, seen, stub):
    async with serving(tmp_path, STATIC + PADDED) as engine:
        for rows in (8, 8, 8, 8, 1, 2, 1, 5, 1):
            each = array(rows, 4, 7)
            np.testing.assert_array_equal((await infer(engine, request(x=each))).array(), each)
            np.testing.assert_array_equal(seen[-1][:rows], each)
            assert not seen[-1][rows:].any()
    assert stub.violations() == []


async def test_rows_behind_a_clients_region_are_zeros_too(tmp_path, seen, stub):
    other = RegionOwner()
    try:
        policy = SharedMemoryPolicy(shared=True, access="map")
        async with serving(tmp_path, STATIC + PADDED, shared_memory=policy) as engine:
            await asyncio.to_thread(engine.shared_memory.register_cuda, None, "r", other.handle, 0, SIZE)
            for rows in (8, 8, 8, 1):
                each = array(rows, 4, 7)
                other.write(0, each.tobytes())
                message = request(x=each)
                del message.raw_input_contents[:]
                placed(message.inputs[0], "r", each.nbytes, 0)
                np.testing.assert_array_equal((await infer(engine, message)).array(), each)
            assert not seen[-1][1:].any()
    finally:
        other.close()
    assert not [line for line in stub.report() if "violation" in line]


async def test_a_capture_that_fails_waits_for_what_it_has_begun(tmp_path, monkeypatch, stub):
    """The capture's memory is given back, but the device still uses it."""

    def submit(instance, batch):
        source = batch.input("x")
        target = batch.output("y", source.shape)
        threading.Timer(0.05, stub.release, ["d2d"]).start()
        instance.stream.copy_on_device(target.pointer, source.pointer, source.size)
        raise RuntimeError("no more")

    monkeypatch.setattr(IdentityGpuInstance, "submit", submit)
    stub.hold("d2d")
    async with serving(tmp_path, STATIC + ONE_ROW, problems=1, pool_sizes={0: 0}) as engine:
        assert "no CUDA graphs: no more" in engine.problems["m"]
    assert stub.violations() == []


# -- batches --


async def test_memory_that_a_model_gives_up_stays_until_the_batch_is_answered(tmp_path, monkeypatch, stub):
    """TensorRT asks again when an output turns out larger; work on the first may still run."""
    given = []

    def submit(instance, batch):
        source = batch.input("x")
        first = batch.output_memory("y", source.size)
        instance.stream.copy_on_device(first, source.pointer, source.size)
        second = batch.output_memory("y", source.size)
        instance.stream.copy_on_device(second, first, source.size)
        batch.set_output_shape("y", source.shape)
        given.append((first, second))

    monkeypatch.setattr(IdentityGpuInstance, "submit", submit)
    async with serving(tmp_path, pool_sizes={0: 0}) as engine:
        with stub.held("d2d"):
            pending = Pending(engine, request(x=array(2, 4)))
            uploads = stub.executed("h2d")
            await asyncio.to_thread(stub.wait_executed, "h2d", uploads)
        answer = await pending.answer()
        np.testing.assert_array_equal(answer.array(), array(2, 4))
    assert given[0][0] != given[0][1]
    assert stub.violations() == []


async def test_what_a_backend_holds_goes_when_the_batch_is_answered(tmp_path, monkeypatch):
    """The backend's objects go then, not when a later batch happens to get the same buffers."""

    class Tensor:
        pass

    gone = threading.Event()
    submit = IdentityGpuInstance.submit

    def holding(instance, batch):
        tensor = Tensor()
        weakref.finalize(tensor, gone.set)
        batch.hold(tensor)
        submit(instance, batch)

    monkeypatch.setattr(IdentityGpuInstance, "submit", holding)
    async with serving(tmp_path) as engine:
        assert (await infer(engine, request(x=array(1, 4)))).status == Status.OK
        assert await asyncio.to_thread(gone.wait, 5)


# -- regions --


async def test_the_loop_closes_no_region_though_it_is_the_last_user(tmp_path, stub):
    """The driver may wait for the device then. `serving` says that this thread is the loop's."""
    other = RegionOwner()
    try:
        policy = SharedMemoryPolicy(shared=True, access="map")
        async with serving(tmp_path, shared_memory=policy) as engine:
            memory = engine.shared_memory
            await asyncio.to_thread(memory.register_cuda, None, "r", other.handle, 0, SIZE)
            message = request(x=array(1, 4))
            placed(message.outputs.add(name="y"), "r", ROW)
            closed = stub.calls("cuIpcCloseMemHandle")
            with stub.held("d2d"):
                computed = Pending(engine, message)
                await asyncio.to_thread(memory.unregister, None, CUDA, "r")
                assert stub.calls("cuIpcCloseMemHandle") == closed
            assert (await computed.answer()).status == Status.OK
            await asyncio.to_thread(closing.wait_closed)
            assert stub.calls("cuIpcCloseMemHandle") == closed + 1
            assert other.read(0, ROW) == array(1, 4).tobytes()
    finally:
        other.close()
    assert not [line for line in stub.report() if "violation" in line]


async def test_a_model_on_the_cpu_has_regions_read_and_written_aside(tmp_path, stub):
    other = RegionOwner()
    try:
        policy = SharedMemoryPolicy(shared=True, access="map")
        config = CONFIG.replace("KIND_GPU", "KIND_CPU")
        async with serving(tmp_path, config, shared_memory=policy) as engine:
            await asyncio.to_thread(engine.shared_memory.register_cuda, None, "r", other.handle, 0, SIZE)
            other.write(0, array(1, 4).tobytes())
            message = request(x=array(1, 4))
            del message.raw_input_contents[:]
            placed(message.inputs[0], "r", ROW, 0)
            placed(message.outputs.add(name="y"), "r", ROW, 4096)
            assert (await infer(engine, message)).status == Status.OK
            assert other.read(4096, ROW) == array(1, 4).tobytes()
    finally:
        other.close()
    assert not [line for line in stub.report() if "violation" in line]


async def test_large_buffers_grow_and_stay_in_order(tmp_path, stub):
    """Beyond what the pool may hold each growth frees an allocation, after its last use."""
    async with serving(tmp_path, pool_sizes={0: 0}) as engine:
        for columns in (4, 1000, 4, MIB // 64, 8):
            each = array(2, columns)
            np.testing.assert_array_equal((await infer(engine, request(x=each))).array(), each)
    assert stub.violations() == []
