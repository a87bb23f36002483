"""Arenas of shared memory, with a model of them in Python."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from inferd._native.memory.arena import ArenaHandle
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from random import Random

PAGE = 4096
GRAIN = 2 << 20  # of what is never given out
MOST_POOLED = 128 << 20  # free bytes that have pages
STEPS = 40


def try_arenas(random: Random) -> None:
    """Blocks of an arena lie apart from each other, in its memory, and have what is written there."""
    reserved = random.choice((0, 1, GRAIN, GRAIN + 1))
    try:
        arena = ArenaHandle("tried", reserved)
    except OSError as error:  # there was no memory
        raise MemoryError(str(error)) from None
    if arena.size % GRAIN or arena.used or arena.pooled or arena.trim():
        raise Violation(f"an arena of {arena.size} bytes has {arena.used} in use, {arena.pooled} free, when it is new")
    blocks: dict[int, tuple[memoryview, int, int]] = {}  # by offset, with what is written to its ends
    with mmap.mmap(arena.fd, 64 << 20, offset=arena.size - (64 << 20)) as end:
        for number in range(STEPS):
            deed = random.random()
            if deed < 0.55:
                _take(arena, random, blocks, -(-reserved // GRAIN) * GRAIN, number)
            elif deed < 0.9 and blocks:
                _look(arena, blocks, end)
                pooled, (_, size, _) = arena.pooled, blocks.pop(random.choice(sorted(blocks)))
                if arena.pooled != pooled + size:
                    raise Violation(f"{arena.pooled} bytes are free, {pooled} were before {size} came back")
            else:
                pooled = arena.pooled
                if (cooled := arena.trim()) != pooled or arena.pooled:
                    raise Violation(f"{cooled} bytes are given back of {pooled}, and {arena.pooled} are left")
            used = sum(size for _, size, _ in blocks.values())
            if arena.used != used or not 0 <= arena.pooled <= MOST_POOLED:
                raise Violation(f"{arena.used} bytes are in use, {arena.pooled} free, where {used} are so")
        _look(arena, blocks, end)
    if random.random() < 0.5:
        del arena  # its blocks keep it
    for view, _, mark in blocks.values():
        if len(view) and (view[0], view[-1]) != (mark, mark):
            raise Violation("an arena has gone, and its blocks have other bytes")


def _take(
    arena: ArenaHandle, random: Random, blocks: dict[int, tuple[memoryview, int, int]], begin: int, number: int
) -> None:
    size = random.choice((0, 1, PAGE, PAGE + 1, random.randrange(1 << 16), random.randrange(4 << 20)))
    if random.random() < 0.05:
        beyond = arena.size + random.choice((1, PAGE, 1 << 62))
        try:
            arena._take(beyond)
        except MemoryError as error:
            if str(error) != f"no room for {beyond} bytes in the arena":
                raise Violation(f"an arena refuses {beyond} bytes with '{error}'") from None
            return
        raise Violation(f"an arena of {arena.size} bytes gives {beyond}")
    used, pooled = arena.used, arena.pooled
    offset, block = arena._take(size)
    view = memoryview(block)
    del block
    whole, mark = arena.used - used, number % 255 + 1
    if len(view) != size or not size <= whole <= max(size + PAGE, PAGE) or offset % PAGE or whole % PAGE:
        raise Violation(f"{len(view)} bytes at {offset} of {whole} for {size} that were asked for")
    if not max(0, pooled - whole) <= arena.pooled <= pooled:
        raise Violation(f"{arena.pooled} bytes are free, {pooled} were before {whole} were taken")
    if offset < begin or offset + whole > arena.size:
        raise Violation(f"{whole} bytes at {offset}, of an arena from {begin} to {arena.size}")
    for other, (_, length, _) in blocks.items():
        if offset < other + length and other < offset + whole:
            raise Violation(f"blocks of {length} bytes at {other} and of {whole} at {offset}")
    if size:
        with mmap.mmap(arena.fd, whole, offset=offset) as place:
            place[0] = place[size - 1] = mark
    blocks[offset] = view, whole, mark


def _look(arena: ArenaHandle, blocks: dict[int, tuple[memoryview, int, int]], end: mmap.mmap) -> None:
    """What is written is there, whatever was given back."""
    for offset, (view, _, mark) in blocks.items():
        if len(view) and (view[0], view[-1]) != (mark, mark):
            raise Violation(f"the block at {offset} has {view[0]} and {view[-1]} at its ends, not {mark}")
        at = offset - arena.size + len(end)
        if len(view) and at >= 0 and end[at] != mark:
            raise Violation(f"the block at {offset} has another byte in its file")
