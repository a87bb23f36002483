"""The rules of keepalive, ping strikes and connection age, on a clock that the tests move."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from inferd.server.front.keepalive import Action, Age, ConnectionPolicy, Handshake, Keepalive, PingStrikes

POLICY = ConnectionPolicy(keepalive_time=10, keepalive_timeout=3)


def run(keepalive, until, *, received_at=lambda now: 0.0, response_frames=lambda now: 0, streams=1):
    """What is done at which time, asked at each deadline."""
    done = []
    while keepalive.deadline <= until:
        now = keepalive.deadline
        action = keepalive.due(now, received_at=received_at(now), response_frames=response_frames(now), streams=streams)
        done.append((now, action))
        if action is Action.DROP:
            break
        assert keepalive.deadline > now
    return done


# -- keepalive --


def test_a_silent_peer_is_pinged_and_dropped():
    assert run(Keepalive(POLICY, 0.0), 100) == [(10, Action.PING), (13, Action.DROP)]


def test_a_peer_that_speaks_is_not_pinged():
    actions = run(Keepalive(POLICY, 0.0), 100, received_at=lambda now: now - 1)
    assert {action for _, action in actions} == {Action.NOTHING}
    assert len(actions) <= 12


def test_the_time_counts_from_the_last_byte():
    assert run(Keepalive(POLICY, 0.0), 100, received_at=lambda now: min(now, 4.0)) == [
        (10, Action.NOTHING),
        (14, Action.PING),
        (17, Action.DROP),
    ]


def test_any_byte_after_the_ping_is_an_answer():
    keepalive = Keepalive(POLICY, 0.0)
    assert keepalive.due(10, received_at=0, response_frames=0, streams=1) is Action.PING
    assert keepalive.due(13, received_at=10.5, response_frames=0, streams=1) is Action.NOTHING
    assert keepalive.deadline == 20.5


def test_asked_too_early_it_waits():
    keepalive = Keepalive(POLICY, 0.0)
    assert keepalive.due(9, received_at=0, response_frames=0, streams=1) is Action.NOTHING
    assert keepalive.due(10, received_at=0, response_frames=0, streams=1) is Action.PING
    assert keepalive.due(12, received_at=0, response_frames=0, streams=1) is Action.NOTHING
    assert keepalive.deadline == 13


@pytest.mark.parametrize(("permitted", "expected"), [(True, Action.PING), (False, Action.NOTHING)])
def test_peers_without_calls_are_pinged_where_that_is_permitted(permitted, expected):
    policy = ConnectionPolicy(keepalive_time=10, permit_without_calls=permitted)
    keepalive = Keepalive(policy, 0.0)
    assert keepalive.due(10, received_at=0, response_frames=0, streams=0) is expected
    assert keepalive.deadline > 10


class Answering:
    """A peer that says nothing but the answers to pings."""

    def __init__(self, policy):
        self.keepalive = Keepalive(policy, 0.0)
        self.received_at = 0.0
        self.pings = []

    def run(self, until, response_frames=lambda now: 0):
        while self.keepalive.deadline <= until:
            now = self.keepalive.deadline
            action = self.keepalive.due(
                now, received_at=self.received_at, response_frames=response_frames(now), streams=1
            )
            assert action is not Action.DROP
            if action is Action.PING:
                self.pings.append(now)
                self.received_at = now + 0.01
        return self.pings


def test_after_two_pings_without_data_there_is_one_a_minute():
    times = Answering(POLICY).run(200)
    assert times[:2] == pytest.approx([10, 20], abs=0.1)
    assert [b - a for a, b in pairwise(times[1:])] == pytest.approx([60] * (len(times) - 2), abs=4)


def test_answers_lift_the_limit_on_pings():
    times = Answering(POLICY).run(100, response_frames=lambda now: int(now))
    assert len(times) >= 9


def test_zero_pings_without_data_is_no_limit():
    assert len(Answering(ConnectionPolicy(keepalive_time=10, max_pings_without_data=None)).run(100)) >= 9


# -- strikes --


def test_the_third_ping_too_soon_is_one_too_many():
    strikes = PingStrikes(ConnectionPolicy(min_ping_interval=10, max_ping_strikes=2))
    assert [strikes.pinged(now, response_frames=0, streams=1) for now in (0, 1, 2, 3)] == [False, False, False, True]


def test_pings_at_the_interval_are_welcome():
    strikes = PingStrikes(ConnectionPolicy(min_ping_interval=10, max_ping_strikes=1))
    assert not any(strikes.pinged(now, response_frames=0, streams=0) for now in range(0, 1000, 10))


def test_an_answer_forgives():
    strikes = PingStrikes(ConnectionPolicy(min_ping_interval=10, max_ping_strikes=1))
    assert not any(strikes.pinged(now * 0.1, response_frames=now // 2, streams=1) for now in range(100))


def test_zero_strikes_is_no_limit():
    strikes = PingStrikes(ConnectionPolicy(max_ping_strikes=None))
    assert not any(strikes.pinged(0.0, response_frames=0, streams=1) for _ in range(1000))


def test_where_pings_without_calls_are_not_permitted_an_hour_is_too_soon():
    policy = ConnectionPolicy(permit_without_calls=False, min_ping_interval=10, max_ping_strikes=1)
    idle = PingStrikes(policy)
    assert [idle.pinged(now, response_frames=0, streams=0) for now in (0, 3600, 7200)] == [False, False, True]
    busy = PingStrikes(policy)
    assert [busy.pinged(now, response_frames=0, streams=1) for now in (0, 3600, 7200)] == [False, False, False]


# -- age and greeting --


@pytest.mark.parametrize(("draw", "age"), [(0.0, 90), (0.5, 100), (1.0, 110)])
def test_an_old_connection_ends_in_three_steps(draw, age):
    connection = Age(ConnectionPolicy(max_age=100, age_grace=20), 0.0, draw)
    assert connection.deadline == pytest.approx(age)
    assert connection.due(age - 1) is Action.NOTHING
    for at, action in ((age, Action.ANNOUNCE), (age + 1, Action.LEAVE), (age + 20, Action.FAIL)):
        assert connection.deadline == pytest.approx(at)
        assert connection.due(connection.deadline) is action
    assert connection.deadline == math.inf


def test_without_grace_calls_may_take_as_long_as_they_like():
    connection = Age(ConnectionPolicy(max_age=100), 0.0, 0.5)
    assert [connection.due(connection.deadline) for _ in range(2)] == [Action.ANNOUNCE, Action.LEAVE]
    assert connection.deadline == math.inf


def test_without_an_age_a_connection_never_ends():
    assert Age(ConnectionPolicy(), 0.0).deadline == math.inf


def test_connections_of_one_moment_do_not_all_end_at_once():
    assert len({Age(ConnectionPolicy(max_age=100), 0.0).deadline for _ in range(50)}) > 40


def test_a_peer_that_does_not_greet_is_dropped():
    handshake = Handshake(ConnectionPolicy(handshake_timeout=5), 1.0)
    assert handshake.due(5.9, greeted=False) is Action.NOTHING
    assert handshake.due(6.0, greeted=False) is Action.DROP


def test_a_peer_that_greets_is_left_alone():
    handshake = Handshake(ConnectionPolicy(handshake_timeout=5), 1.0)
    assert handshake.due(6.0, greeted=True) is Action.NOTHING
    assert handshake.deadline == math.inf
