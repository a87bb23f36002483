"""Guards the block pool: size classes, blocks that never overlap however many threads take them, counters, trim."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _native.memory import resource as memory
from _native.memory.host import size_class
from tests.threads import in_threads

LARGEST = 64 << 20
ALIGNMENT = 256


@pytest.fixture(autouse=True)
def _nothing_left(native_counters):
    """Every block that a test takes is given back."""


@given(st.integers(1, LARGEST))
@example(1)
@example(256)
@example(257)
@example(LARGEST)
def test_class_serves_its_size_and_wastes_at_most_a_fifth(size):
    index, given_size = size_class(size)
    assert given_size >= size
    assert given_size <= max(256, size * 5 / 4)
    assert size_class(given_size) == (index, given_size)
    if size < LARGEST:
        next_index, next_size = size_class(given_size + 1) if given_size < LARGEST else (index + 1, LARGEST)
        assert next_index == index + 1
        assert next_size >= given_size


def test_classes_are_numbered_without_gaps():
    size, seen = 1, []
    while size <= LARGEST:
        index, given_size = size_class(size)
        seen.append(index)
        size = given_size + 1
    assert seen == list(range(len(seen)))
    assert size_class(LARGEST + 1) == (-1, LARGEST + 1)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 1 << 20, LARGEST, LARGEST + 1])
def test_block_is_counted_while_it_lives(size):
    before = memory.live_counters()["blocks"]
    block = memory._take(size)
    assert len(block) == size
    assert memory.live_counters()["blocks"] == before + 1
    view = memoryview(block)
    del block
    assert memory.live_counters()["blocks"] == before + 1
    view.release()
    assert memory.live_counters()["blocks"] == before


def test_impossible_size_is_refused():
    before = memory.live_counters()
    with pytest.raises(MemoryError, match="no memory for a block"):
        memory._take((1 << 64) - 8)
    assert memory.live_counters() == before


def test_freed_block_is_kept_for_the_next_of_its_class_and_trimmed():
    memory.trim()
    assert memory.pooled() == 0
    _, given_size = size_class(100_000)
    first = memory._take(100_000)
    address = _address(first)
    del first
    assert memory.pooled() == given_size
    second = memory._take(given_size - 5)
    assert _address(second) == address
    assert address % ALIGNMENT == 0
    assert memory.pooled() == 0
    del second
    assert memory.trim() == given_size
    assert memory.pooled() == 0


def test_large_block_is_never_kept():
    memory.trim()
    block = memory._take(LARGEST + 1)
    del block
    assert memory.pooled() == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=40))
def test_blocks_alive_together_never_overlap(steps):
    alive = []
    for take, number in steps:
        if take or not alive:
            alive.append(memory._take(number))
        else:
            alive.pop(number % len(alive))
        spans = sorted((_address(block), len(block)) for block in alive)
        assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(spans))


def test_threads_share_the_pool_without_sharing_blocks():
    """Each thread takes blocks, marks them with itself and finds its mark again, while others do the same."""
    wrong = []
    start = threading.Barrier(4)

    def work(mark):
        start.wait()
        for round_ in range(1500):
            blocks = [memory._take(size) for size in (200, 700 + round_ % 64, 5000)]
            addresses = [_address(block) for block in blocks]
            with lock:
                if alive.intersection(addresses):
                    wrong.append((mark, round_))
                alive.update(addresses)
            with lock:
                alive.difference_update(addresses)
            del blocks

    lock, alive = threading.Lock(), set()
    in_threads(work, range(4))
    assert wrong == []


def test_view_cannot_be_made_or_written():
    with pytest.raises(TypeError):
        memory.BlockView()
    with pytest.raises(TypeError):
        memoryview(memory._take(8))[0] = 1


def _address(block):
    return np.frombuffer(block, dtype=np.uint8).ctypes.data
