"""Guards the places of loads: so many at a time, nobody is forgotten, and who waits for one that waits gets on."""

from __future__ import annotations

import asyncio
import random

import pytest

from server.engine.loading.room import Room


class Visits:
    """Who is inside of a room, in the order of their coming."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.inside: list[int] = []
        self.came: list[int] = []
        self.most = 0

    async def visit(self, number: int, stay: asyncio.Event) -> None:
        async with self.room.place():
            self.inside.append(number)
            self.came.append(number)
            self.most = max(self.most, len(self.inside))
            try:
                await stay.wait()
            finally:
                self.inside.remove(number)


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_so_many_are_inside_and_the_others_follow_in_order():
    visits, stay = Visits(Room(2)), asyncio.Event()
    tasks = [asyncio.create_task(visits.visit(number, stay)) for number in range(5)]
    await rounds()
    assert visits.inside == [0, 1]
    stay.set()
    await asyncio.gather(*tasks)
    assert visits.came == [0, 1, 2, 3, 4]
    assert visits.most == 2


async def test_who_waits_for_one_that_waits_gets_on():
    """A chain of visits, each of which waits for the next: one place is enough, it takes the patience of each."""
    room = Room(1, patience=0.01)

    async def chain(left: int) -> int:
        async with room.place():
            return 1 + (await chain(left - 1) if left else 0)

    assert await asyncio.wait_for(chain(5), 30) == 6
    async with room.place():
        assert room._free == 0, "all places are free again, and no more"


async def test_one_that_was_let_in_beside_is_followed_at_once():
    """The room's only visitor waits for the last in the row: that takes one patience, not one for each before it."""
    room, last = Room(1, patience=0.01), asyncio.Event()
    out_of_patience = []
    room._out_of_patience = lambda: (out_of_patience.append(1), Room._out_of_patience(room))

    async def first() -> None:
        async with room.place():
            await last.wait()

    async def visit(number: int) -> None:
        async with room.place():
            if number == 49:
                last.set()

    await asyncio.wait_for(asyncio.gather(first(), *(visit(number) for number in range(50))), 30)
    assert len(out_of_patience) == 1
    assert room._free == 1


@pytest.mark.parametrize("seed", range(20))
async def test_visitors_who_give_up_take_no_place_along(seed):
    """At any moment, also when they have just been given one."""
    draw = random.Random(seed)
    visits = Visits(Room(3))
    stays = [asyncio.Event() for _ in range(30)]
    tasks = [asyncio.create_task(visits.visit(number, stay)) for number, stay in enumerate(stays)]
    for number in draw.sample(range(30), 30):
        if draw.random() < 0.5:
            tasks[number].cancel()
        if draw.random() < 0.5:
            await rounds(draw.randrange(3))
        stays[number].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert visits.inside == []
    assert visits.most <= 3
    assert visits.room._free == 3
