"""Arenas: what is taken is apart from each other, what is given back is used again, and pages go back to the system."""

import mmap
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd._native.memory.arena import ArenaHandle
from inferd._native.memory.resource import live_counters

SIZES = st.integers(1, 300_000)


def pages(arena):
    """Bytes of memory that the arena has."""
    return os.fstat(arena.fd).st_blocks * 512


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=40))
def test_blocks_do_not_overlap(steps):
    arena = ArenaHandle("test", 10_000)
    held = []
    for size, gives in steps:
        offset, view = arena._take(size)
        assert offset >= 10_000
        assert offset % 4096 == 0
        for other, other_size, _ in held:
            assert offset + size <= other or other + other_size <= offset
        held.append((offset, size, view))
        if gives:
            held.pop(0)


def test_what_is_given_back_is_used_again_and_costs_no_new_memory():
    arena = ArenaHandle("test")
    offset, view = arena._take(100_000)
    del view
    assert arena.used == 0
    assert arena.pooled >= 100_000
    again, view = arena._take(90_000)
    assert again == offset
    del view


@pytest.mark.parametrize("count", [1, 17, 25, 257, 4099])
def test_what_is_asked_for_again_lies_where_it_lay(count):
    """Elsewhere it would have no pages yet, and each of them costs a fault."""
    arena = ArenaHandle("test")
    first, view = arena._take(4096 * count)
    del view
    for _ in range(3):
        again, view = arena._take(4096 * count)
        del view
        assert again == first
    assert arena.pooled == 4096 * count


def test_no_history_of_sizes_uses_the_address_space_up():
    """A client that announces messages of every size once leaves nothing behind."""
    arena = ArenaHandle("test")
    for quarter in range(4, 8):
        size = arena.size // 2 * quarter // 8
        while size >= 4096:
            _, view = arena._take(size)
            del view
            size //= 2
    _, view = arena._take(arena.size // 2)
    del view


def test_nobody_is_refused_while_pages_are_given_back():
    """What is free is in nobody's reach for the time that it takes; whoever needs it waits."""
    arena = ArenaHandle("test")
    _, rest = arena._take(arena.size - (64 << 20))
    stop = threading.Event()

    def trim():
        while not stop.is_set():
            arena.trim()

    trimming = threading.Thread(target=trim)
    trimming.start()
    try:
        for _ in range(3000):
            _, view = arena._take(40 << 20)
            del view
    finally:
        stop.set()
        trimming.join()
    del rest


def test_small_ranges_become_large_ones_again():
    arena = ArenaHandle("test")
    views = [arena._take(4096 * (1 + number % 7))[1] for number in range(2000)]
    del views[::2]
    views.clear()
    offset, view = arena._take(7_000_000)
    assert offset < 40_000_000, "it lies where they were"
    del view


def test_ranges_without_pages_and_those_that_have_some_are_one_where_that_is_needed():
    arena = ArenaHandle("test")
    islands = [arena._take(arena.size // 16)[1] for _ in range(15)]
    small = [arena._take(4096)[1] for _ in range(3)]
    islands.clear()  # more than is kept: without pages
    small.clear()  # with
    _, view = arena._take(arena.size // 16 * 15 + 4096 * 3)
    del view


def test_another_mapping_sees_the_same_bytes_and_pages_go_back():
    arena = ArenaHandle("test")
    other = mmap.mmap(arena.fd, 1 << 20)
    offset, view = arena._take(200_000)
    other[offset : offset + 5] = b"hello"
    assert bytes(memoryview(view)[:5]) == b"hello"
    assert pages(arena) > 0
    del view
    assert arena.trim() > 0
    assert pages(arena) == 0
    assert other[offset : offset + 5] == bytes(5)
    other.close()


def test_it_cannot_be_made_smaller_or_larger_by_others():
    arena = ArenaHandle("test")
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, arena.size * 2)


def test_too_much_is_refused():
    arena = ArenaHandle("test")
    with pytest.raises(MemoryError):
        arena._take(arena.size + 1)


def test_a_block_outlives_the_handle():
    before = live_counters()["arenas"]
    arena = ArenaHandle("test")
    _, view = arena._take(10)
    del arena
    assert live_counters()["arenas"] == before + 1
    assert len(memoryview(view)) == 10
    del view
    assert live_counters()["arenas"] == before
