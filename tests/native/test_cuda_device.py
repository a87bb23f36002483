"""Guards CUDA's objects, on the stub driver: order between streams, capture, errors."""

import ctypes
import platform
import threading

import pytest

from inferd._native.cuda.device import Device, device
from inferd._native.cuda.driver import CudaError
from inferd._native.cuda.memory import DevicePool, PageLocked
from inferd._native.execution.affinity import bind_memory
from tests.gpu_stub.fixtures import HostBuffer

OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
LAUNCH_FAILED = 719


@pytest.fixture
def gpu(stub):
    found = device(0)
    found.use()
    return found


def test_device_says_what_it_is(gpu):
    assert gpu.name == "stub device 0"
    assert gpu.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e00"
    assert gpu.compute_capability == (9, 0)
    assert gpu.pci_bus_id == "0000:01:00.0"
    assert gpu.numa_node == 0
    assert gpu.stream_priorities == (0, -5)
    assert gpu.memory_info() == (gpu.total_memory, gpu.total_memory)
    assert device(0) is gpu


def test_device_is_not_made_by_hand_nor_out_of_nothing(stub):
    with pytest.raises(CudaError, match=r"cuDeviceGet: CUDA_ERROR_INVALID_DEVICE \(101\)"):
        device(7)
    with pytest.raises(TypeError):
        Device(0)


def test_what_is_copied_in_comes_back(gpu):
    memory, stream = gpu.allocate(4096), gpu.stream()
    with HostBuffer(bytes(range(256)) * 16, gpu) as source, HostBuffer(bytes(4096), gpu) as target:
        stream.copy_to_device(memory.pointer, source.address, 4096)
        stream.fill(memory.pointer + 256, 7, 256)
        stream.copy_on_device(memory.pointer + 512, memory.pointer + 256, 256)
        stream.copy_to_host(target.address, memory.pointer, 4096)
        stream.synchronize()
        assert target.read() == source.read()[:256] + bytes([7]) * 512 + source.read()[768:]


def test_submitting_does_not_wait(gpu, stub):
    memory, stream, done = gpu.allocate(64), gpu.stream(), gpu.event()
    with HostBuffer(b"x" * 64, gpu) as source:
        with stub.held("h2d"):
            stream.copy_to_device(memory.pointer, source.address, 64)
            stream.record(done)
            assert not done.is_done()
            assert not stream.is_done()
            assert stub.read(memory.pointer, 64) != b"x" * 64
        done.synchronize()
        assert done.is_done()
        assert stream.is_done()
        assert stub.read(memory.pointer, 64) == b"x" * 64


def test_streams_run_beside_each_other_and_wait_for_events(gpu, stub):
    memory, first, second, copied = gpu.allocate(128), gpu.stream(), gpu.stream(), gpu.event()
    with HostBuffer(b"a" * 64, gpu) as source, HostBuffer(bytes(64), gpu) as target:
        with stub.held("h2d"):
            first.copy_to_device(memory.pointer, source.address, 64)
            first.record(copied)
            fills = stub.executed("fill")
            second.fill(memory.pointer + 64, 1, 64)  # other bytes: needs no order
            stub.wait_executed("fill", fills + 1)
            second.wait(copied)
            second.copy_to_host(target.address, memory.pointer, 64)
            assert not second.is_done()
        second.synchronize()
        assert target.read() == b"a" * 64


def test_pageable_memory_makes_the_caller_wait(gpu, stub):
    memory, stream = gpu.allocate(64), gpu.stream()
    copied = threading.Event()
    with HostBuffer(b"p" * 64) as source:

        def copy():
            gpu.use()
            stream.copy_to_device(memory.pointer, source.address, 64)
            copied.set()

        thread = threading.Thread(target=copy)
        with stub.held("h2d"):
            thread.start()
            assert not copied.is_set()
        thread.join()
        assert copied.is_set()
        assert stub.read(memory.pointer, 64) == b"p" * 64


def test_graph_runs_what_was_captured_each_time_it_is_launched(gpu):
    memory, stream = gpu.allocate(128), gpu.stream()
    with HostBuffer(b"1" * 64, gpu) as source, HostBuffer(bytes(64), gpu) as target:
        stream.begin_capture()
        stream.copy_to_device(memory.pointer, source.address, 64)
        stream.copy_on_device(memory.pointer + 64, memory.pointer, 64)
        stream.copy_to_host(target.address, memory.pointer + 64, 64)
        graph = stream.end_capture()
        assert target.read() == bytes(64)  # captured, not run
        for text in (b"2" * 64, b"3" * 64):
            source.write(text)
            stream.launch(graph)
            stream.synchronize()
            assert target.read() == text
        del graph  # before the memory that it uses


def test_capture_spreads_to_streams_that_wait_for_it(gpu):
    memory, first, second = gpu.allocate(64), gpu.stream(), gpu.stream()
    fork, join = gpu.event(), gpu.event()
    first.begin_capture()
    first.record(fork)
    second.wait(fork)
    second.fill(memory.pointer, 5, 64)
    second.record(join)
    first.wait(join)
    graph = first.end_capture()
    with HostBuffer(bytes(64), gpu) as target:
        first.launch(graph)
        first.copy_to_host(target.address, memory.pointer, 64)
        first.synchronize()
        assert target.read() == bytes([5]) * 64
        del graph


def test_capture_that_waits_fails_and_leaves_the_stream_as_it_was(gpu):
    stream, memory = gpu.stream(), gpu.allocate(8)
    stream.begin_capture()
    with pytest.raises(CudaError, match="STREAM_CAPTURE_UNSUPPORTED"):
        stream.synchronize()
    with pytest.raises(CudaError, match="STREAM_CAPTURE_INVALIDATED"):
        stream.end_capture()
    stream.fill(memory.pointer, 0, 8)
    stream.synchronize()


def test_error_carries_call_and_code(gpu, stub):
    stub.fail("cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(CudaError) as caught:
        gpu.allocate(64)
    assert str(caught.value) == "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    assert (caught.value.call, caught.value.code) == ("cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="out of memory"):
        gpu.allocate(1 << 40)
    assert gpu.allocate(64).size == 64


def test_sticky_error_fails_everything_that_follows(gpu, stub):
    stream, memory = gpu.stream(), gpu.allocate(8)
    stub.hold("fill")
    stream.fill(memory.pointer, 0, 8)
    with stub.broken(LAUNCH_FAILED):
        for act in (stream.synchronize, stream.is_done, lambda: gpu.allocate(8), lambda: stream.fill(1, 0, 8)):
            with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
                act()
    stub.release("fill")
    stream.synchronize()


def test_thread_needs_the_context_of_its_device(gpu):
    caught = []
    stream, memory = gpu.stream(), gpu.allocate(8)

    def work():
        try:
            stream.fill(memory.pointer, 0, 8)
        except CudaError as error:
            caught.append(error)
        gpu.use()
        stream.fill(memory.pointer, 0, 8)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [error.code for error in caught] == [INVALID_CONTEXT]
    stream.synchronize()


def test_device_of_a_thread_stays_whatever_is_done_for_another(stub):
    """Page-locked memory is shared by devices, and what Python drops may be another device's: neither may move the
    thread that submits work."""
    stub.set(devices=2)
    try:
        first, second = device(0), device(1)
        dropped = [first.stream(), first.event(), first.allocate(64)]
        pool = PageLocked(first, 1 << 30)
        second.use()
        there = stub.current_context()
        block = pool.take(64 << 20)  # more than a slab: pages are locked for it
        assert stub.current_context() == there
        del block
        assert pool.trim() >= 64 << 20
        assert stub.current_context() == there
        dropped.clear()
        assert stub.current_context() == there
        del pool, first, second
    finally:
        stub.set(devices=1)


def test_no_call_leaves_a_context_behind(stub):
    """On a thread that has none: only `use` does."""
    found = []

    def work():
        gpu = device(0)
        stream, event, memory = gpu.stream(), gpu.event(), gpu.allocate(64)
        pools = PageLocked(gpu, 1 << 30), DevicePool(gpu, 1 << 30)
        blocks = [pool.take(64) for pool in pools]
        assert gpu.memory_info()
        assert gpu.stream_priorities
        stream.synchronize()
        event.synchronize()
        blocks.clear()
        del stream, event, memory, pools
        found.append(stub.current_context())
        gpu.use()
        found.append(stub.current_context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] is None
    assert found[1] is not None


def test_policy_of_memory_is_the_threads_own_after_pages_are_locked(gpu):
    """A host policy binds an instance to a node of the host's memory, whatever node is the device's."""
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if number is None:
        pytest.skip(f"the number of get_mempolicy is not known for {platform.machine()}")
    found = []

    def policy():
        mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
        if ctypes.CDLL(None).syscall(number, ctypes.byref(mode), nodes, 1024, 0, 0):
            return None
        return mode.value, nodes[0]

    def work():
        try:
            bind_memory(0)
        except OSError:
            return
        found.append(policy())
        block = PageLocked(gpu, 1 << 30).take(64)
        found.append(policy())
        del block

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not found or found[0] is None:
        pytest.skip("this kernel does not tell, or not let choose, where memory comes from")
    assert found[0] == found[1]
    assert found[0][1] == 1
