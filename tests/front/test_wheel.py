"""The timer of all connections: never early, a little late, one timer for everything."""

from __future__ import annotations

import math

from server.front.wheel import GRANULARITY, TimerWheel


class Loop:
    """An event loop with a clock that the test moves."""

    def __init__(self):
        self.now = 100.0
        self.timers = []
        self.armed = 0

    def time(self):
        return self.now

    def call_soon(self, function):
        function()

    def call_at(self, when, function):
        self.armed += 1
        timer = Timer(when, function)
        self.timers.append(timer)
        return timer

    def run(self, until):
        while due := [timer for timer in self.timers if not timer.cancelled and timer.when <= until]:
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            timer.function()
        self.now = until


class Timer:
    def __init__(self, when, function):
        self.when, self.function, self.cancelled = when, function, False

    def cancel(self):
        self.cancelled = True


def test_each_entry_fires_once_and_not_early():
    loop, fired = Loop(), []
    wheel = TimerWheel(loop)
    deadlines = [100.1, 103.7, 101.0, 101.01, 100.0, 250.0]
    for deadline in deadlines:
        wheel.entry(lambda deadline=deadline: fired.append((deadline, loop.now))).set(deadline)
    loop.run(1000)
    assert [deadline for deadline, _ in fired] == sorted(deadlines)
    assert all(deadline <= now <= deadline + GRANULARITY for deadline, now in fired)


def test_a_moved_entry_fires_at_its_last_deadline():
    loop, fired = Loop(), []
    entry = TimerWheel(loop).entry(lambda: fired.append(loop.now))
    entry.set(101)
    entry.set(110)
    loop.run(105)
    assert not fired
    loop.run(120)
    assert len(fired) == 1
    entry.set(130)
    entry.cancel()
    entry.set(math.inf)
    loop.run(200)
    assert len(fired) == 1


def test_an_entry_may_set_itself_again():
    loop, fired = Loop(), []
    wheel = TimerWheel(loop)

    def fire():
        fired.append(loop.now)
        entry.set(loop.now + 1)

    entry = wheel.entry(fire)
    entry.set(101)
    loop.run(110)
    assert 8 <= len(fired) <= 10


def test_a_thousand_distant_deadlines_are_one_timer():
    loop = Loop()
    wheel = TimerWheel(loop)
    entries = [wheel.entry(lambda: None) for _ in range(1000)]
    for number, entry in enumerate(entries):
        entry.set(7300.0 + number * 1e-5)
    assert loop.armed == 1
    assert sum(not timer.cancelled for timer in loop.timers) == 1


def test_a_closed_wheel_fires_nothing():
    loop, fired = Loop(), []
    wheel = TimerWheel(loop)
    wheel.entry(lambda: fired.append(1)).set(101)
    wheel.close()
    loop.run(200)
    assert not fired
