"""Shows on a real GPU what the stub driver stands for elsewhere: the ABI, asynchrony, graphs, sharing, the pools."""

import ctypes
import time

import numpy as np
import pytest

from bench.memory_speed import random_operations
from inferd._native.cuda import driver
from inferd._native.cuda.memory import DevicePool, PageLocked
from tests.threads import in_threads

MIB = 1 << 20


@pytest.fixture
def pinned(gpu):
    """64 MiB of page-locked memory as an array."""
    pool = PageLocked(gpu, 64 * MIB)
    block = pool.take(64 * MIB)
    yield np.frombuffer((ctypes.c_uint8 * block.size).from_address(block.address), np.uint8)
    del block
    assert pool.trim() == 64 * MIB


def test_device_describes_itself(gpu):
    assert driver.version() >= (12, 0)
    assert gpu.name
    assert gpu.uuid.startswith("GPU-")
    assert gpu.compute_capability >= (5, 0)
    free, total = gpu.memory_info()
    assert 0 < free <= total == gpu.total_memory
    least, greatest = gpu.stream_priorities
    assert greatest <= least


def test_copies_there_and_back(gpu, pinned):
    memory, stream = gpu.allocate(pinned.size), gpu.stream()
    half = pinned.size // 2
    pinned[:half] = np.arange(half, dtype=np.uint8)
    stream.copy_to_device(memory.pointer, pinned.ctypes.data, half)
    stream.copy_on_device(memory.pointer + half, memory.pointer, half)
    stream.copy_to_host(pinned.ctypes.data + half, memory.pointer + half, half)
    stream.synchronize()
    np.testing.assert_array_equal(pinned[:half], pinned[half:])


def test_copies_of_both_directions_overlap(gpu, pinned):
    """Two streams that copy against each other take less than one after the other."""
    memory, up, down = gpu.allocate(pinned.size), gpu.stream(), gpu.stream()
    half = pinned.size // 2

    def milliseconds(streams):
        start = time.perf_counter()
        for _ in range(20):
            streams[0].copy_to_device(memory.pointer, pinned.ctypes.data, half)
            streams[-1].copy_to_host(pinned.ctypes.data + half, memory.pointer + half, half)
        for stream in streams:
            stream.synchronize()
        return 1_000 * (time.perf_counter() - start)

    milliseconds([up, down])
    assert milliseconds([up, down]) < 0.8 * milliseconds([up])


def test_submitting_is_asynchronous(gpu, pinned):
    memory, stream, done = gpu.allocate(pinned.size), gpu.stream(), gpu.event()
    for _ in range(50):
        stream.copy_to_device(memory.pointer, pinned.ctypes.data, pinned.size)
    stream.record(done)
    assert not done.is_done()
    done.synchronize()
    assert done.is_done()


def test_graph_of_copies(gpu, pinned):
    memory, stream = gpu.allocate(2 * MIB), gpu.stream()
    stream.begin_capture()
    stream.copy_to_device(memory.pointer, pinned.ctypes.data, MIB)
    stream.copy_on_device(memory.pointer + MIB, memory.pointer, MIB)
    stream.copy_to_host(pinned.ctypes.data + MIB, memory.pointer + MIB, MIB)
    graph = stream.end_capture()
    for value in (1, 2, 3):
        pinned[:MIB] = value
        stream.launch(graph)
        stream.synchronize()
        assert (pinned[MIB : 2 * MIB] == value).all()


@pytest.mark.parametrize("make", [PageLocked, DevicePool])
def test_pools_under_random_operations(gpu, make):
    pool = make(gpu, 256 * MIB)

    def work(seed):
        return random_operations(pool, seed, 20_000, 40, 4 * MIB, make is PageLocked)

    found = in_threads(work, range(1, 5))
    assert [wrong for wrong, _ in found] == [0] * 4
    assert pool.usage()["used"] == 0
    pool.trim()
    assert pool.usage()["held"] == 0


def test_late_blocks_are_in_order(gpu, pinned):
    """One block through two streams without a wait on the host: the last writer wins."""
    pool, first, second = DevicePool(gpu, 32 * MIB), gpu.stream(), gpu.stream()
    for value in range(1, 40):
        block = pool.take_for(32 * MIB, first if value % 2 else second)
        stream = first if value % 2 else second
        stream.fill(block.address, value, 32 * MIB)
        stream.copy_to_host(pinned.ctypes.data, block.address, 32 * MIB)
        pool.give_after(block, stream)
    first.synchronize()
    second.synchronize()
    assert (pinned[: 32 * MIB] == 39).all()
    pool.trim()
