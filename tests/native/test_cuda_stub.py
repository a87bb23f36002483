"""Guards the guard: mistakes that a GPU forgives most of the time, planted here, are found by the stub driver."""

import gc
import threading

import pytest

from inferd._native.cuda.device import device
from inferd._native.cuda.driver import CudaError
from tests import gpu_stub
from tests.gpu_stub.fixtures import HostBuffer

SIZE = 1 << 16


@pytest.fixture
def stub():
    """Without the check at the end: these tests make the reports."""
    stub = gpu_stub.load()
    stub.report()
    yield stub
    gc.collect()
    stub.report()


@pytest.fixture
def gpu(stub):
    found = device(0)
    found.use()
    return found


def test_buffer_used_again_before_its_copy_ran(gpu, stub):
    memory, stream = gpu.allocate(SIZE), gpu.stream()
    with HostBuffer(b"a" * SIZE, gpu) as staging:
        with stub.held("h2d"):
            stream.copy_to_device(memory.pointer, staging.address, SIZE)
            staging.write(b"b" * SIZE)
        stream.synchronize()
    (found,) = stub.violations()
    assert found == f"violation: the host memory of a h2d copy of {SIZE} bytes was written before the copy ran"


def test_result_read_before_its_copy_ran(gpu, stub):
    memory, stream = gpu.allocate(SIZE), gpu.stream()
    with HostBuffer(bytes(SIZE), gpu) as target:
        stream.fill(memory.pointer, 3, SIZE)
        with stub.held("d2h"):
            stream.copy_to_host(target.address, memory.pointer, SIZE)
            assert target.read() == bytes([0xEE]) * SIZE
        stream.synchronize()
        assert target.read() == bytes([3]) * SIZE
    assert stub.violations() == []


@pytest.mark.parametrize("waits", [False, True])
def test_missing_wait_between_streams(gpu, stub, waits):
    """Found whoever was quicker: here the streams run one after the other."""
    memory, copy, compute, copied = gpu.allocate(SIZE), gpu.stream(), gpu.stream(), gpu.event()
    with HostBuffer(b"a" * SIZE, gpu) as staging:
        copies = stub.executed("h2d")
        copy.copy_to_device(memory.pointer, staging.address, SIZE // 2)
        copy.record(copied)
        stub.wait_executed("h2d", copies + 1)
        if waits:
            compute.wait(copied)
        compute.copy_on_device(memory.pointer + SIZE // 2, memory.pointer, SIZE // 2)
        compute.synchronize()
        copy.synchronize()
    found = stub.violations()
    assert len(found) == (0 if waits else 1)
    assert waits or "no event orders them" in found[0]


def test_next_upload_overwrites_what_is_still_computed_on(gpu, stub):
    memory, copy, compute, copied = gpu.allocate(SIZE), gpu.stream(), gpu.stream(), gpu.event()
    with HostBuffer(b"a" * SIZE, gpu) as staging:
        copy.copy_to_device(memory.pointer, staging.address, SIZE // 2)
        copy.record(copied)
        compute.wait(copied)
        compute.copy_on_device(memory.pointer + SIZE // 2, memory.pointer, SIZE // 2)
        copy.copy_to_device(memory.pointer, staging.address, SIZE // 2)
        compute.synchronize()
        copy.synchronize()
    (found,) = stub.violations()
    assert "writes" in found
    assert "no event orders them" in found


def test_memory_freed_while_work_on_it_is_pending(gpu, stub):
    memory, stream = gpu.allocate(SIZE), gpu.stream()
    stub.hold("fill")
    stream.fill(memory.pointer, 0, SIZE)
    del memory
    stub.release("fill")
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        stream.synchronize()
    stub.lib.stub_break(0, 0)
    found = stub.violations()
    assert "were freed while 1 operations on them were pending" in found[0]
    assert "ran on memory that was freed" in found[1]


def test_use_after_free_and_beyond_the_end(gpu, stub):
    memory, stream = gpu.allocate(SIZE), gpu.stream()
    pointer = memory.pointer
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        stream.fill(pointer + 8, 0, SIZE)
    del memory
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        stream.fill(pointer, 0, SIZE)
    beyond, freed = stub.violations()
    assert "beyond an allocation" in beyond
    assert "on memory that was freed" in freed


def test_leak_is_reported(gpu, stub):
    memory, stream, event = gpu.allocate(SIZE), gpu.stream(), gpu.event()
    assert set(stub.report()) == {
        f"alive: {SIZE} bytes of device memory",
        "alive: a stream",
        "alive: 1 events",
        "alive: the context of device 0, 1 times",
    }
    del memory, stream, event
    assert stub.report() == ["alive: the context of device 0, 1 times"]


@pytest.mark.parametrize("waits", [False, True])
def test_kernel_that_nothing_orders_behind_its_input(gpu, stub, waits):
    memory, copy, compute, copied = gpu.allocate(SIZE), gpu.stream(), gpu.stream(), gpu.event()
    ran, may_copy = [], threading.Event()
    with HostBuffer(b"a" * SIZE, gpu) as staging:
        assert stub.launch(copy.handle, may_copy.wait, []) == 0
        copy.copy_to_device(memory.pointer, staging.address, SIZE)
        copy.record(copied)
        if waits:
            compute.wait(copied)
            may_copy.set()
        assert stub.launch(compute.handle, lambda: ran.append(True), [(memory.pointer, SIZE, False)]) == 0
        compute.synchronize()
        may_copy.set()
        copy.synchronize()
    assert ran == [True]
    assert any(f"reads {SIZE} bytes" in line for line in stub.violations()) is not waits


def test_kernel_beyond_an_allocation_and_one_that_raises(gpu, stub):
    memory, stream = gpu.allocate(SIZE), gpu.stream()
    assert stub.launch(stream.handle, int, [(memory.pointer, SIZE + 1, True)]) == 1
    assert stub.launch(stream.handle, lambda: 1 // 0, [(memory.pointer, SIZE, True)]) == 0
    stream.synchronize()
    assert stub.violations() == [
        "violation: a kernel failed: ZeroDivisionError: integer division or modulo by zero",
        f"violation: a kernel was submitted that writes {SIZE + 1} bytes beyond an allocation",
    ]


def test_kernels_are_captured(gpu, stub):
    stream, ran = gpu.stream(), []
    stream.begin_capture()
    stub.launch(stream.handle, lambda: ran.append(True), [])
    graph = stream.end_capture()
    assert ran == []
    for _ in range(2):
        stream.launch(graph)
    stream.synchronize()
    assert ran == [True, True]
    assert stub.violations() == []


def test_bytes_that_nobody_has_written(gpu, stub):
    memory, stream = gpu.allocate(SIZE), gpu.stream()
    stream.fill(memory.pointer, 0, 64)
    stream.copy_on_device(memory.pointer + 1024, memory.pointer, 64)
    stub.launch(stream.handle, int, [(memory.pointer + 1024, 64, False), (memory.pointer + 2048, 8, True)])
    stub.launch(stream.handle, int, [(memory.pointer + 2048, 8, False)])
    stream.synchronize()
    assert stub.violations() == []
    stream.copy_on_device(memory.pointer + 4096, memory.pointer + 32, 64)
    stub.launch(stream.handle, int, [(memory.pointer + 2048, 9, False)])
    stream.synchronize()
    copied, read = stub.violations()
    assert f"a d2d reads 64 bytes at {memory.pointer + 32:#x}, of which nobody has written number 32" in copied
    assert f"a kernel reads 9 bytes at {memory.pointer + 2048:#x}, of which nobody has written number 8" in read


def test_memory_freed_under_a_graph_that_can_be_launched(gpu, stub):
    memory, stream = gpu.allocate(SIZE), gpu.stream()
    stream.begin_capture()
    stream.fill(memory.pointer, 0, SIZE)
    graph = stream.end_capture()
    del memory
    (found,) = stub.violations()
    assert f"{SIZE} bytes of memory were freed that a graph uses, which can still be launched" in found
    del graph


def test_loop_that_waits_and_one_that_does_not(gpu, stub):
    stream, memory = gpu.stream(), gpu.allocate(SIZE)
    with stub.loop():
        stream.fill(memory.pointer, 0, SIZE)
    assert stub.violations() == []
    with stub.loop(), HostBuffer(b"a" * 64) as pageable:
        stream.synchronize()
        stream.copy_to_device(memory.pointer, pageable.address, 64)
    waits, copies = stub.violations()
    assert "the loop calls cuStreamSynchronize, which may wait for the device" in waits
    assert "the loop copies 64 bytes of pageable memory, which waits for the device" in copies
    del memory, stream


def test_context_that_is_left_current_on_the_loop(stub):
    stub.set(devices=2)
    try:
        first, second = device(0), device(1)
        first.use()
        with stub.loop():
            second.use()
        first.use()
        (found,) = stub.violations()
        assert "the context of device 1 was left current on the loop's thread, which had that of 0" in found
        del first, second
    finally:
        stub.set(devices=1)
