"""Guards the places of loads: so many at a time, none is forgotten, and a load that waits for a waiting one gets on."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import partial

import pytest

from inferd.server.engine.loading.room import Room
from tests.waiting import PATIENCE, until


class Visits:
    """The visitors of a room, in the order of their coming."""

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


async def test_those_who_leave_soon_come_one_by_one():
    """Loads that are nothing but work of the interpreter take each other's time."""
    room, inside, most = Room(4, pace=1000.0), 0, 0

    async def visit() -> None:
        nonlocal inside, most
        async with room.place():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.wait_for(asyncio.gather(*(visit() for _ in range(50))), 30)
    assert most == 1
    assert room._free == 4


async def test_those_who_stay_soon_have_all_places():
    visits, stay = Visits(Room(3, pace=0.001)), asyncio.Event()
    tasks = [asyncio.create_task(visits.visit(number, stay)) for number in range(5)]
    await until(lambda: visits.inside == [0, 1, 2])
    stay.set()
    await asyncio.gather(*tasks)
    assert visits.came == [0, 1, 2, 3, 4]
    assert visits.most == 3


async def test_one_for_whom_another_waits_has_a_place_at_once_whatever_the_pace():
    room = Room(2, pace=1000.0)
    async with room.place("first"):
        waiting = asyncio.create_task(room._enter("awaited"))
        await rounds()
        assert not waiting.done()
        with room.urge({"awaited"}):
            assert await asyncio.wait_for(waiting, 30) is False
            room._leave(False)


# -- work --


class Desk:
    """Work for threads: which threads are at it."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.now = 0
        self.most = 0
        self.order: list[int] = []
        self.go = threading.Event()

    def at(self, number: int, wait: bool = False) -> int:
        with self.guard:
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(number)
        if wait:
            assert self.go.wait(PATIENCE)
        with self.guard:
            self.now -= 1
        return 2 * number


async def test_work_that_takes_no_time_is_done_one_by_one_in_order():
    room, desk = Room(4, pace=1000.0), Desk()
    found = await asyncio.gather(*(room.work("", partial(desk.at, number)) for number in range(100)))
    assert found == [2 * number for number in range(100)]
    assert desk.order == list(range(100))
    assert desk.most == 1
    await until(lambda: room._free == 4)


async def test_work_that_takes_long_has_all_places():
    room, desk = Room(3, pace=0.001), Desk()
    tasks = [asyncio.create_task(room.work("", partial(desk.at, number, wait=True))) for number in range(5)]
    await until(lambda: desk.now == 3)
    desk.go.set()
    assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8]
    assert desk.most == 3
    await until(lambda: room._free == 3)


async def test_work_is_told_of_although_the_thread_is_at_other_work_that_waits_for_it():
    """One thread has both, one behind the other, and there is no other place."""
    room, told = Room(1, pace=0.2), threading.Event()

    async def first() -> None:
        await room.work("", lambda: None)
        told.set()

    await asyncio.gather(first(), room.work("", lambda: told.wait(PATIENCE)))
    assert told.is_set()


async def test_work_fails_by_itself():
    room = Room(2, pace=1000.0)

    def fail() -> None:
        raise ValueError("no")

    found = await asyncio.gather(*(room.work("", work) for work in (fail, int, fail)), return_exceptions=True)
    assert [str(each) for each in found] == ["no", "0", "no"]
    await until(lambda: room._free == 2)


async def test_work_whose_asker_has_given_up_is_not_begun():
    room, desk = Room(1, pace=1000.0), Desk()
    first = asyncio.create_task(room.work("", partial(desk.at, 0, wait=True)))
    await until(lambda: desk.now == 1)
    others = [asyncio.create_task(room.work("", partial(desk.at, number))) for number in (1, 2)]
    await rounds()
    others[0].cancel()
    await rounds()
    desk.go.set()
    assert await first == 0
    assert await others[1] == 4
    assert desk.order == [0, 2]
    await until(lambda: room._free == 1)


async def test_work_for_which_another_waits_has_a_place_at_once():
    room, desk = Room(1, pace=1000.0), Desk()
    first = asyncio.create_task(room.work("first", partial(desk.at, 0, wait=True)))
    await until(lambda: desk.now == 1)
    others = [asyncio.create_task(room.work(name, partial(desk.at, 1))) for name in ("other", "awaited")]
    await rounds()
    with room.urge({"awaited"}):
        assert await others[1] == 2
    assert not others[0].done()
    desk.go.set()
    assert await asyncio.gather(first, others[0]) == [0, 2]
    await until(lambda: room._free == 1)


async def test_work_fails_where_the_system_has_no_thread_for_it(monkeypatch):
    """All of it, and the places are free again."""
    room = Room(2, pace=0.001)

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("inferd.server.engine.loading.room.begin", refuse)
    found = await asyncio.gather(*(room.work("", int) for _ in range(50)), return_exceptions=True)
    assert {str(each) for each in found} == {"can't start new thread"}
    await until(lambda: room._free == 2)
    monkeypatch.undo()
    assert await room.work("", int) == 0
