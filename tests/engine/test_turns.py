"""Turns against what they promise: overlapping ones run in order and never together, others do not wait."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.turns import Circle, Turns

NAMES = st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=3)


@given(st.lists(st.tuples(NAMES, st.integers(0, 3)), min_size=1, max_size=12))
def test_overlapping_turns_run_in_order_and_alone(asked):
    running: list[frozenset[str]] = []
    began: list[int] = []

    async def take(turns, number, names, length):
        async with turns.of(names):
            assert not any(names & other for other in running)
            running.append(names)
            began.append(number)
            for _ in range(length):
                await asyncio.sleep(0)
            running.remove(names)

    async def run():
        turns = Turns()
        await asyncio.gather(*(take(turns, i, names, length) for i, (names, length) in enumerate(asked)))
        await turns.idle()

    asyncio.run(run())
    assert sorted(began) == list(range(len(asked)))
    for i, (names, _) in enumerate(asked):
        for j, (others, _) in enumerate(asked[:i]):
            if names & others:
                assert began.index(j) < began.index(i)


async def test_turns_of_other_names_do_not_wait():
    turns = Turns()
    async with turns.of("a"), turns.of("b"):
        later = asyncio.create_task(_take(turns, "ab"))
        await asyncio.sleep(0)
        async with turns.of("c"):
            assert not later.done()
    await later


async def test_one_that_waits_for_itself_is_refused():
    turns = Turns()
    async with turns.of("a") as outer:
        with pytest.raises(Circle):
            await _take(turns, "a", outer)
        async with turns.of("b", outer) as inner:
            with pytest.raises(Circle):
                await _take(turns, "a", inner)


async def test_two_that_would_wait_for_each_other_are_told_apart_from_two_that_wait():
    turns = Turns()
    async with turns.of("a") as first, turns.of("b") as second:
        waiting = asyncio.create_task(_take(turns, "b", first))  # the turn of a waits for that of b
        await asyncio.sleep(0)
        with pytest.raises(Circle):
            await _take(turns, "a", second)
    await waiting


async def test_one_that_gives_up_is_not_waited_for():
    turns = Turns()
    async with turns.of("a"):
        waiting = asyncio.create_task(_take(turns, "a"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    await asyncio.wait_for(_take(turns, "a"), 10)


async def _take(turns, names, parent=None):
    async with turns.of(names, parent):
        pass
