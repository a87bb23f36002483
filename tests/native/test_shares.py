"""Guards whose requests make room in a full queue: no client keeps another, that has fewer, from having one. And whose
turn it is where clients wait: none gets more than another that wants as much."""

import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from inferd._native.shares import Turns
from inferd.backends.api import QueuePolicySpec
from tests.native.probe import QueueProbe
from tests.native.queue_model import Policy

CLIENTS = st.sampled_from([1, 2, 3, 4, 1 << 47])


pytestmark = pytest.mark.usefixtures("native_counters")


def probe_of(max_queue=0, *max_sizes: int) -> QueueProbe:
    levels = tuple(QueuePolicySpec(max_size=size) for size in max_sizes or (0,))
    return QueueProbe(Policy(True, 4, levels=levels, default_level=len(levels)).spec(), max_queue=max_queue)


class FullQueues(RuleBasedStateMachine):
    """Clients come, leave and are served; the queue is small."""

    @initialize(most=st.sampled_from([0, 1, 2, 7, 100]), sizes=st.lists(st.sampled_from([0, 1, 5]), max_size=3))
    def begin(self, most, sizes):
        self.most, self.sizes = most, sizes or [0]
        self.probe = probe_of(most, *self.sizes)
        self.waiting: dict[int, tuple[int, int]] = {}  # tag: (client, level)
        self.tag = 0

    def teardown(self):
        self.probe = None  # with its requests, however long the machine is kept

    def room_on(self, level: int) -> tuple[int, ...]:
        """The levels on which somebody would have to make room; empty: there is room."""
        size = self.sizes[level]
        if size and sum(at == level for _, at in self.waiting.values()) >= size:
            return (level,)
        if self.most and len(self.waiting) >= self.most:
            return tuple(range(level, len(self.sizes)))
        return ()

    @rule(client=CLIENTS, data=st.data(), count=st.integers(1, 40))
    def requests_come(self, client, data, count):
        level = data.draw(st.integers(0, len(self.sizes) - 1))
        for _ in range(count):
            self.request_comes(client, level)

    def request_comes(self, client, level):
        self.tag += 1
        full = self.room_on(level)
        shares = Counter((who, at) for who, at in self.waiting.values() if at in full)
        own, most = shares[client, level], max(shares.values(), default=0)
        refused = self.probe.push(self.tag, 1, 0, priority=level + 1, client=client)
        ousted = self.probe.ousted
        assert (refused is not None) == bool(full and most <= own + 1)
        assert bool(ousted) == bool(full and refused is None)
        if ousted:
            assert len({self.waiting[tag] for tag in ousted}) == 1
            yielding = self.waiting[ousted[0]]
            assert shares[yielding] == most
            assert most - len(ousted) >= own + 1, "the two have not changed places"
            latest = sorted(tag for tag, each in self.waiting.items() if each == yielding)
            assert sorted(ousted) == latest[-len(ousted) :]
        for tag in ousted:
            del self.waiting[tag]
        if refused is None:
            self.waiting[self.tag] = (client, level)
        assert sorted(self.probe.pending) == sorted(self.waiting)

    @rule(times=st.integers(1, 30))
    def instances_ask(self, times):
        for _ in range(times):
            for tag in self.probe.take(0):
                del self.waiting[tag]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def client_leaves(self, data):
        tag = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.probe.remove(tag)
        del self.waiting[tag]


TestFullQueues = FullQueues.TestCase
TestFullQueues.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_client_with_many_requests_gives_way_to_others():
    probe = probe_of(64)
    for tag in range(64):
        assert probe.push(tag, 1, 0, client=1) is None
    assert probe.push(64, 1, 0, client=1) == "lane full"
    assert probe.push(65, 1, 0, client=2) is None
    assert probe.ousted == [62, 63]
    assert probe.push(66, 1, 0, client=1) is None, "two have made room for one"


@given(st.integers(2, 300))
def test_many_clients_with_one_request_each_give_way_to_nobody(clients):
    """More than the table of shares has room for at first."""
    probe = probe_of(clients)
    for tag in range(clients):
        assert probe.push(tag, 1, 0, client=tag + 1) is None
    assert probe.push(clients, 1, 0, client=clients + 1) == "lane full"
    assert probe.ousted == []


def test_higher_levels_do_not_make_room_for_lower_ones():
    probe = probe_of(8, 0, 0)
    for tag in range(8):
        assert probe.push(tag, 1, 0, client=1, priority=1) is None
    assert probe.push(8, 1, 0, client=2, priority=2) == "lane full"
    assert probe.push(9, 1, 0, client=2, priority=1) is None
    assert probe.ousted == [7]


@given(st.lists(st.one_of(st.tuples(CLIENTS, st.integers(1, 30)), st.integers(1, 60)), max_size=60))
def test_turns_go_to_the_client_that_has_had_least(steps):
    """Against a model: a client's turns begin where its last one ended, and no earlier than the latest of anybody."""
    turns, waiting, ends, now = Turns(), {}, {}, 0
    number = 0
    for step in steps:
        if isinstance(step, tuple):
            client, count = step
            if not waiting.get(client):
                ends[client] = max(ends.get(client, 0), now)
            for _ in range(count):
                number += 1
                waiting.setdefault(client, []).append(number)
                turns.put(client, (client, number))
            continue
        for _ in range(min(step, turns.waiting)):
            client, taken = turns.take()
            assert ends[client] == min(ends[each] for each, its in waiting.items() if its)
            assert waiting[client].pop(0) == taken, "the calls of one client keep their order"
            now = ends[client]
            ends[client] += 1
    assert turns.waiting == sum(map(len, waiting.values()))
    while turns.waiting:
        turns.take()
    with pytest.raises(IndexError):
        turns.take()


def test_a_client_that_comes_anew_goes_next():
    """Whoever has been served a thousand times waits for it; then they take turns."""
    turns = Turns()
    for number in range(2000):
        turns.put(1, number)
    assert [turns.take() for _ in range(1000)] == list(range(1000))
    for number in range(3):
        turns.put(2, f"late {number}")
    assert [turns.take() for _ in range(6)].index("late 2") <= 5
    assert turns.waiting == 997


def test_any_number_of_clients_is_remembered_as_long_as_it_matters():
    """An attacker may have any number of addresses; what each has had is forgotten when there are many."""
    turns = Turns()
    for number in range(100_000):
        turns.put(number, number)
        assert turns.take() == number
    turns.put(7, "waits")
    assert turns.take() == "waits"


def test_what_waits_is_let_go_of_with_its_turns():
    turns = Turns()
    things = [object() for _ in range(100)]
    before = sys.getrefcount(things[0])
    for number, thing in enumerate(things):
        turns.put(number % 3, thing)
    waiting = sys.getrefcount(things[0])
    del turns
    after = sys.getrefcount(things[0])
    assert (waiting, after) == (before + 1, before)
