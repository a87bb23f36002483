"""Locks of models against what they promise: overlapping ones run in order and never together, others do not wait."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.server.engine.loading.model_locks import Deadlock, ModelLocks

NAMES = st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=3)


@given(st.lists(st.tuples(NAMES, st.integers(0, 3)), min_size=1, max_size=12))
def test_overlapping_turns_run_in_order_and_alone(asked):
    running: list[frozenset[str]] = []
    began: list[int] = []

    async def take(locks, number, names, length):
        async with locks.of(names):
            assert not any(names & other for other in running)
            running.append(names)
            began.append(number)
            for _ in range(length):
                await asyncio.sleep(0)
            running.remove(names)

    async def run():
        locks = ModelLocks()
        await asyncio.gather(*(take(locks, i, names, length) for i, (names, length) in enumerate(asked)))
        await locks.idle()

    asyncio.run(run())
    assert sorted(began) == list(range(len(asked)))
    for i, (names, _) in enumerate(asked):
        for j, (others, _) in enumerate(asked[:i]):
            if names & others:
                assert began.index(j) < began.index(i)


async def test_turns_of_other_names_do_not_wait():
    locks = ModelLocks()
    async with locks.of("a"), locks.of("b"):
        later = asyncio.create_task(_take(locks, "ab"))
        await asyncio.sleep(0)
        async with locks.of("c"):
            assert not later.done()
    await later


async def test_one_that_waits_for_itself_is_refused():
    locks = ModelLocks()
    async with locks.of("a") as outer:
        with pytest.raises(Deadlock):
            await _take(locks, "a", outer)
        async with locks.of("b", outer) as inner:
            with pytest.raises(Deadlock):
                await _take(locks, "a", inner)


async def test_two_that_would_wait_for_each_other_are_told_apart_from_two_that_wait():
    locks = ModelLocks()
    async with locks.of("a") as first, locks.of("b") as second:
        waiting = asyncio.create_task(_take(locks, "b", first))  # the lock of a waits for that of b
        await asyncio.sleep(0)
        with pytest.raises(Deadlock):
            await _take(locks, "a", second)
    await waiting


async def test_one_that_gives_up_is_not_waited_for():
    locks = ModelLocks()
    async with locks.of("a"):
        waiting = asyncio.create_task(_take(locks, "a"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    await asyncio.wait_for(_take(locks, "a"), 10)


async def _take(locks, names, parent=None):
    async with locks.of(names, parent):
        pass
