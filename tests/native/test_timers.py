"""Guards the heap of timers against a dict: what is due comes out once, in the order of times, then as it was set; and
alarms: never early, once, and not after they were moved, cancelled or forgotten."""

import gc
import math
import select
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd._native.timers import Alarm, TimersHandle
from tests.native.probe import TimersProbe

COUNT = 100

steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, COUNT - 1), st.integers(0, 30)),
        st.tuples(st.just("clear"), st.integers(0, COUNT - 1)),
        st.tuples(st.just("due"), st.integers(0, 30)),
    ),
    max_size=300,
)


@given(steps)
def test_timers_are_due_in_order(history):
    probe = TimersProbe(COUNT)
    model: dict[int, tuple[int, int]] = {}  # number -> (due, when it was set)
    for moment, (what, *arguments) in enumerate(history):
        if what == "set":
            number, due = arguments
            probe.set(number, due)
            model[number] = (due, moment)
        elif what == "clear":
            probe.clear(arguments[0])
            model.pop(arguments[0], None)
        else:
            expected = sorted((n for n, (due, _) in model.items() if due <= arguments[0]), key=lambda n: model[n])
            assert probe.due(arguments[0]) == expected
            for number in expected:
                del model[number]
    assert probe.due(31) == sorted(model, key=lambda n: model[n])


@pytest.fixture
def timers():
    return TimersHandle()


def wait(timers):
    """Return when the descriptor tells that something may be due, and do it."""
    assert select.select([timers.fd], [], [], 30)[0], "the descriptor tells of nothing"
    timers.fire()


def silent(timers):
    return not select.select([timers.fd], [], [], 0)[0]


def test_alarms_ring_in_order_and_not_early(timers):
    start = timers.time()
    rung = []
    alarms = [
        Alarm(timers, lambda after=after: rung.append((after, timers.time())))
        for after in (0.03, 0.01, 0.05, 0.0, 0.011)
    ]
    for alarm, after in zip(alarms, (0.03, 0.01, 0.05, 0.0, 0.011), strict=True):
        alarm.set(start + after)
    while timers.count:
        wait(timers)
    assert [after for after, _ in rung] == [0.0, 0.01, 0.011, 0.03, 0.05]
    assert all(start + after <= now for after, now in rung)


def test_an_alarm_rings_where_it_was_moved_to_and_once(timers):
    rung = []
    alarm = Alarm(timers, lambda: rung.append(timers.time()))
    alarm.set(timers.time() + 1000)
    due = timers.time() + 0.01
    alarm.set(due)
    assert timers.count == 1
    while not rung:
        wait(timers)
    assert rung[0] >= due
    assert timers.count == 0
    alarm.set(timers.time())
    alarm.set(math.inf)
    alarm.set(timers.time())
    alarm.cancel()
    timers.fire()
    assert len(rung) == 1


def test_what_an_alarm_sets_waits_for_the_next_time(timers):
    """An alarm that sets itself to a time that has passed does not keep the loop."""
    rung = []

    def ring():
        rung.append(timers.time())
        alarm.set(0.0)

    alarm = Alarm(timers, ring)
    alarm.set(0.0)
    for count in range(1, 4):
        wait(timers)
        assert len(rung) == count
    alarm.cancel()


def test_a_forgotten_alarm_does_not_ring(timers):
    Alarm(timers, lambda: pytest.fail("it is forgotten")).set(0.0)
    gc.collect()
    assert timers.count == 0
    timers.fire()


def test_an_alarm_that_fails_does_not_keep_others_from_ringing(timers, monkeypatch):
    rung, failed = [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: failed.append(error.exc_type))
    alarms = [Alarm(timers, lambda: 1 // 0), Alarm(timers, lambda: rung.append(1))]
    for alarm in alarms:
        alarm.set(0.0)
    wait(timers)
    assert (rung, failed) == ([1], [ZeroDivisionError])


def test_far_deadlines_wake_nobody(timers):
    alarms = [Alarm(timers, lambda: None) for _ in range(1000)]
    for number, alarm in enumerate(alarms):
        alarm.set(timers.time() + 7200 + number)
    assert timers.count == 1000
    assert silent(timers)
