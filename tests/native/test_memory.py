"""Guards the block pool: size classes, blocks that never overlap however many threads take them, counters, trim."""

import ctypes
import itertools
import resource
import threading

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferd._native.memory import resource as memory
from inferd._native.memory.host import size_class
from tests.threads import in_threads

LARGEST = 1 << 30
MIB = 1 << 20
LOOKS = 4  # after which what was free all the while has gone
ALIGNMENT = 256


pytestmark = pytest.mark.usefixtures("native_counters")


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


@pytest.fixture
def kept():
    """Sets how many bytes the pool keeps; afterwards it is empty and has the default again."""
    memory.trim()
    yield memory.keep_at_most
    memory.keep_at_most(128 * MIB)
    memory.trim()


def use(size, rounds=1):
    """Take, write and give a block; how many pages the kernel had to bring."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(rounds):
        block = memory.host().take(size)
        ctypes.memset(block.address, 1, size)
        del block
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("size", [70_000, MIB, 3 * MIB, 20 * MIB])
def test_a_size_that_is_asked_for_displaces_others(kept, size):
    """Whatever filled the pool before: here a burst of another size, all of it free."""
    kept(40 * MIB)
    burst = [memory.host().take(7 * MIB) for _ in range(8)]
    del burst[:]
    assert memory.pooled() > 30 * MIB
    first = use(size)
    assert use(size, 50) <= first + 20, "blocks of this size are made anew each time"
    assert memory.pooled() <= 40 * MIB


def test_sizes_that_are_used_in_turn_stay_together(kept):
    """A class is displaced by what is asked for after it, and not by its neighbours in use."""
    kept(40 * MIB)
    sizes = [70_000, MIB, 5 * MIB, 9 * MIB]
    for size in sizes:
        use(size)
    assert sum(use(size) for _ in range(10) for size in sizes) < 40


def test_the_largest_blocks_are_kept_warm(kept):
    """Beyond 64 MiB a fresh mapping costs several times what the copy does."""
    kept(256 * MIB)
    use(80 * MIB)
    assert use(80 * MIB, 3) < 100
    kept(64 * MIB)  # more than may be kept is not, and displaces nothing
    use(MIB)
    use(80 * MIB)
    assert use(MIB) < 10


def test_making_room_frees_little_at_once(kept):
    """Whoever gives a block back may be the event loop; to unmap much takes long."""
    kept(512 * MIB)
    burst = [memory.host().take(7 * MIB) for _ in range(50)]
    del burst[:]
    wanted = memory.host().take(400 * MIB)
    held = memory.host().usage()["held"]
    del wanted
    freed = held - memory.host().usage()["held"]
    assert freed <= size_class(400 * MIB)[1] + 32 * MIB
    assert memory.pooled() <= 512 * MIB


def test_large_blocks_that_make_room_are_freed_elsewhere(kept):
    kept(256 * MIB)
    burst = [memory.host().take(100 * MIB) for _ in range(2)]
    del burst[:]
    held = memory.host().usage()["held"]
    use(80 * MIB)
    assert memory.pooled() <= 256 * MIB
    assert memory.host().usage()["held"] >= held, "nothing has been freed"
    assert memory.cool() >= 90 * MIB
    first = use(80 * MIB)
    assert use(80 * MIB, 3) <= first, "the size that is in use is pooled"


def test_what_nobody_uses_goes_back_after_some_looks(kept):
    held = memory.host().usage()["held"]
    blocks = [memory.host().take(MIB) for _ in range(20)]
    del blocks[:]
    assert memory.host().usage()["held"] >= held + 20 * MIB
    freed = sum(memory.cool() for _ in range(LOOKS))
    assert freed >= 20 * MIB
    assert memory.host().usage()["held"] <= held
    assert memory.cool() < MIB


def test_what_is_used_between_two_looks_stays(kept):
    """As many blocks are kept as were in use at a time, and no more."""
    blocks = [memory.host().take(MIB) for _ in range(20)]
    del blocks[:]
    for _ in range(LOOKS + 2):
        busy = [memory.host().take(MIB) for _ in range(3)]
        del busy[:]
        memory.cool()
    assert 3 * MIB <= memory.pooled() < 4.5 * MIB


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


def test_the_pool_tells_whether_anything_has_moved():
    """So that nobody looks after memory that nobody uses."""
    memory.cool()
    assert memory.is_still()
    block = memory._take(10 * MIB)
    del block
    assert not memory.is_still()
    memory.cool()
    assert memory.is_still()
