"""Guards the dispatcher: no request waits beside an idle instance that may take it, whatever happens in which order.

The queues are compared with a plain model of their rules (`tests.native.queue_model`); of consumers and resources the
model is that there is nothing left to decide.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferd._native.scheduling.limiter import ClaimHandle, RateLimiter, Resource
from inferd.backends.api import QueuePolicySpec
from tests.native.probe import DispatcherProbe, QueueProbe
from tests.native.queue_model import Policy, QueueModel

pytestmark = pytest.mark.usefixtures("native_counters")


levels = st.lists(
    st.builds(QueuePolicySpec, timeout_us=st.sampled_from([0, 1, 10, 1000]), yields=st.booleans()),
    min_size=1,
    max_size=2,
)


@st.composite
def policies(draw):
    max_rows = draw(st.integers(1, 8))
    chosen = tuple(draw(levels))
    return Policy(
        batching=draw(st.sampled_from([True, True, True, False])),
        max_rows=max_rows,
        preferred=tuple(draw(st.lists(st.integers(1, max_rows), max_size=3, unique=True))),
        delay_us=draw(st.sampled_from([0, 1, 10, 1000])),
        levels=chosen,
        default_level=draw(st.integers(1, len(chosen))),
    )


class Need:
    """What the instances of one queue need of each resource."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def fits(self, free: list[int]) -> bool:
        return all(count <= left for count, left in zip(self.counts, free, strict=True))


class Dispatchers(RuleBasedStateMachine):
    """Arrivals, departures, timeouts, instances that come, end and execute, resources that become more and fewer."""

    @initialize(
        policies=st.lists(policies(), min_size=1, max_size=3),
        needs=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), min_size=9, max_size=9),
        totals=st.lists(st.integers(2, 4), min_size=2, max_size=2),
        consumers=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        limited=st.booleans(),
    )
    def begin(self, policies, needs, totals, consumers, limited):
        if not limited:
            policies = policies[:1]
        self.limited = limited
        self.now = 1_000_000
        self.limiter = RateLimiter() if limited else None
        self.totals = totals
        self.pools = [Resource(str(number), total) for number, total in enumerate(totals)]
        self.queues = [QueueProbe(policy.spec(), limiter=self.limiter) for policy in policies]
        self.models = [QueueModel(policy) for policy in policies]
        self.policies = policies
        self.lines = [line % len(policies) for line in consumers]
        self.needs = needs[: len(consumers)] if limited else [[0, 0]] * len(consumers)
        claims = [
            ClaimHandle(self.limiter, list(zip(self.pools, need, strict=True)), priority) if limited else None
            for priority, need in enumerate(self.needs, 1)
        ]
        self.probe = DispatcherProbe(self.queues, list(zip(self.lines, claims, strict=True)))
        self.executing: set[int] = set()
        self.holding: set[int] = set()  # until they ask again
        self.retired: set[int] = set()
        self.ended: set[int] = set()
        self.tags = itertools.count(1)
        self.rows: dict[int, tuple[int, int]] = {}  # tag: (queue, rows)

    def decided(self, events):
        """Each queue has given what the model gives at this time, to consumers that were idle."""
        given: dict[int, list[tuple[int, ...]]] = {}
        for consumer, tags in events:
            if tags is None:
                self.ended.add(consumer)
                continue
            assert consumer not in self.executing | self.retired | self.ended
            self.executing.add(consumer)
            self.holding.add(consumer)
            given.setdefault(self.lines[consumer], []).append(tuple(tags))
            for tag in tags:
                del self.rows[tag]
        for line, batches in given.items():
            expected = [tuple(self.models[line].take(self.now)) for _ in batches]
            assert sorted(batches) == sorted(expected)

    def free(self) -> list[int]:
        held = [self.needs[consumer] for consumer in self.holding]
        return [total - sum(need[k] for need in held) for k, total in enumerate(self.totals)]

    @precondition(lambda self: len(self.idle_or_away()) > 0)
    @rule(data=st.data())
    def instance_has_nothing_to_do(self, data):
        consumer = data.draw(st.sampled_from(sorted(self.idle_or_away())))
        self.executing.discard(consumer)
        self.holding.discard(consumer)
        self.decided(self.probe.ask(consumer, self.now))

    def idle_or_away(self) -> set[int]:
        """The consumers that may ask."""
        return set(range(len(self.lines))) - set(self.probe.idle) - self.retired - self.ended

    @rule(data=st.data(), count=st.integers(1, 5))
    def requests_come(self, data, count):
        line = data.draw(st.integers(0, len(self.queues) - 1))
        for _ in range(count):
            rows = min(data.draw(st.integers(1, 8)), self.policies[line].max_rows)
            width, priority = data.draw(st.sampled_from([1, 1, 1, 2])), data.draw(st.sampled_from([0, 0, 1, 2]))
            patience = data.draw(st.sampled_from([0, 0, 0, 1, 8000, 400_000, 4_000_000]))
            tag, deadline = next(self.tags), self.now + patience if patience else 0
            refused = self.queues[line].push(tag, rows, self.now, priority=priority, width=width, deadline=deadline)
            assert refused == self.models[line].push(tag, rows, width, self.now, priority, 0, deadline)
            if refused is None:
                self.rows[tag] = (line, rows)
        self.decided(self.probe.wake(line, self.now))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def a_client_leaves(self, data):
        tag = data.draw(st.sampled_from(sorted(self.rows)))
        line, _ = self.rows.pop(tag)
        assert self.queues[line].remove(tag)
        assert self.models[line].remove(tag)
        self.decided(self.probe.look(line, self.now))

    @rule(step=st.sampled_from([1, 999, 1000, 5000, 10_000, 1_000_000]))
    def time_passes(self, step):
        self.now += step
        self.decided(self.probe.time_passes(self.now))
        for line, (queue, model) in enumerate(zip(self.queues, self.models, strict=True)):
            refused = queue.expire(self.now)
            assert sorted(refused) == sorted(model.expire(self.now))
            for tag in refused:
                del self.rows[tag]
            self.decided(self.probe.look(line, self.now))

    @precondition(lambda self: len(self.retired) < len(self.lines))
    @rule(data=st.data())
    def an_instance_is_to_end(self, data):
        consumer = data.draw(st.sampled_from(sorted(set(range(len(self.lines))) - self.retired)))
        self.retired.add(consumer)
        self.decided(self.probe.retire(consumer, self.now))

    @rule(data=st.data(), rows=st.integers(1, 8), ns=st.sampled_from([0, 1000, 5000, 20_000, 1_000_000]))
    def a_batch_has_been_executed(self, data, rows, ns):
        """Requests are to be executed so much before their deadlines."""
        line = data.draw(st.integers(0, len(self.queues) - 1))
        self.queues[line].executed(rows, ns)
        self.models[line].delay.batches.executed(rows, ns)
        self.decided(self.probe.look(line, self.now))

    @precondition(lambda self: self.limited)
    @rule(k=st.integers(0, 1), total=st.integers(2, 5))
    def resources_change(self, k, total):
        self.totals[k] = total  # what is held stays held
        self.decided(self.probe.resize(k, total, self.now))

    @rule(data=st.data())
    def a_queue_is_closed(self, data):
        line = data.draw(st.integers(0, 30))
        if line < len(self.queues):
            self.queues[line].close()
            self.models[line].closed = True
            self.decided(self.probe.look(line, self.now))

    @invariant()
    def nothing_is_left_to_decide(self):
        if not hasattr(self, "probe"):
            return
        free = self.free()
        assert [pool.free for pool in self.pools] == free
        for line, model in enumerate(self.models):
            idle = [consumer for consumer in self.probe.idle if self.lines[consumer] == line]
            assert not set(idle) & (self.retired | self.ended)
            count, wake = model.plan(self.now)
            able = [consumer for consumer in idle if Need(self.needs[consumer]).fits(free)]
            overdue = self.probe.overdue
            if overdue is not None:
                assert not Need(self.needs[overdue]).fits(free), "it is overdue, and its resources are free"
                kept = [bool(count) for count in self.needs[overdue]]
                able = [consumer for consumer in able if not any(map(min, kept, self.needs[consumer]))]
            assert not (count and able), "a request waits beside an instance that may take it"
            if idle and model.waiting and not count:
                assert self.probe.watched.get(line, wake + 1) <= wake, "nobody looks when the delay is over"
            if model.closed and not model.waiting:
                assert not idle, "an instance waits for what will never come"
            assert self.queues[line].pending == [request.tag for request in model.waiting]


TestDispatchers = Dispatchers.TestCase
TestDispatchers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


PLAIN = Policy(True, 4, (), 0)


def probe(policy: Policy, consumers: int) -> tuple[QueueProbe, DispatcherProbe]:
    queue = QueueProbe(policy.spec())
    return queue, DispatcherProbe([queue], [(0, None)] * consumers)


def test_another_instance_watches_when_the_one_that_did_has_got_a_batch():
    """What the first waited with is not left behind for the second."""
    queue, dispatcher = probe(Policy(True, 2, (), 20), 2)
    for consumer in (0, 1):
        assert dispatcher.ask(consumer, 0) == []
    queue.push(1, 1, 0)
    assert dispatcher.wake(0, 0) == []
    [(first, tags)] = dispatcher.time_passes(20_000)
    assert tags == [1]
    queue.push(2, 1, 300_000)
    assert dispatcher.wake(0, 300_000) == []
    assert dispatcher.watched == {0: 320_000}
    assert dispatcher.time_passes(320_000) == [(1 - first, [2])]


def test_all_that_came_together_goes_at_once():
    """One batch for each idle instance, without one waking the next."""
    queue, dispatcher = probe(Policy(False, 1), 3)
    for consumer in range(3):
        dispatcher.ask(consumer, 0)
    for tag in range(5):
        queue.push(tag, 1, 0)
    assert [tags for _, tags in dispatcher.wake(0, 0)] != []
    assert dispatcher.idle == []
    assert queue.pending == [3, 4]
    assert dispatcher.ask(1, 0) == [(1, [3])]


def test_a_departure_can_make_a_batch():
    queue, dispatcher = probe(Policy(True, 8, (4, 8), 10_000_000), 1)
    dispatcher.ask(0, 0)
    for tag, rows in ((1, 1), (2, 2), (3, 2)):
        queue.push(tag, rows, 0)
        assert dispatcher.wake(0, 0) == []
    assert queue.remove(1)
    assert dispatcher.look(0, 0) == [(0, [2, 3])]


def limited(pairs, total: int = 1) -> tuple[list[QueueProbe], DispatcherProbe, Resource]:
    """A queue and a consumer for each (need, priority)."""
    limiter, pool = RateLimiter(), Resource("r", total)
    queues = [QueueProbe(Policy(False, 1).spec(), limiter=limiter) for _ in pairs]
    claims = [ClaimHandle(limiter, [(pool, need)], priority) for need, priority in pairs]
    return queues, DispatcherProbe(queues, list(enumerate(claims))), pool


def executions(dispatcher, queues, rounds: int) -> list[int]:
    """Which of the queues, which always have requests, are served in turn."""
    tags = itertools.count()
    for queue in queues:
        for _ in range(rounds + 1):
            queue.push(next(tags), 1, 0)
    running = []
    for consumer in range(len(queues)):
        running += dispatcher.ask(consumer, 0)
    served = []
    for _ in range(rounds):
        consumer, _ = running.pop(0)
        served.append(consumer)
        running += dispatcher.ask(consumer, 0)
    for queue in queues:
        for tag in list(queue.pending):
            queue.remove(tag)
    return served


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_executions_are_in_inverse_proportion_to_priorities(priorities):
    queues, dispatcher, _ = limited([(1, priority) for priority in priorities])
    served = executions(dispatcher, queues, 2000)
    shares = [1 / priority for priority in priorities]
    for consumer, share in enumerate(shares):
        assert served.count(consumer) == pytest.approx(2000 * share / sum(shares), rel=0.05, abs=2)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 3))
def test_nobody_starves(priorities, total):
    """Between two executions of one that always has work each other one has its share at most."""
    queues, dispatcher, _ = limited([(1, priority) for priority in priorities], total)
    served = executions(dispatcher, queues, 500)
    for consumer, priority in enumerate(priorities):
        at = [place for place, who in enumerate(served) if who == consumer]
        longest = sum(priority / other + 2 for other in priorities)
        assert max(b - a for a, b in itertools.pairwise(at)) <= longest


def test_a_need_for_all_of_a_resource_is_met_while_others_share_it():
    """Two that need half of it each, and always have work, are never idle at the same time by themselves."""
    queues, dispatcher, _ = limited([(1, 1), (1, 1), (2, 1)], total=2)
    served = executions(dispatcher, queues, 400)
    at = [place for place, who in enumerate(served) if who == 2]
    assert at
    assert max(b - a for a, b in itertools.pairwise([0, *at, 400])) <= 40
    assert served.count(2) >= 10


def test_who_had_no_work_does_not_make_up_for_it():
    queues, dispatcher, _ = limited([(1, 1), (1, 1)])
    dispatcher.ask(1, 0)
    for tag in range(100):
        queues[0].push(tag, 1, 0)
    dispatcher.ask(0, 0)
    for _ in range(98):
        assert [consumer for consumer, _ in dispatcher.ask(0, 0)] == [0]
    for tag in range(100, 110):
        queues[0].push(tag, 1, 0)
        queues[1].push(tag + 100, 1, 0)
        assert dispatcher.wake(1, 0) == []
    consumers, running = [], 0
    for _ in range(10):
        [(running, _)] = dispatcher.ask(running, 0)
        consumers.append(running)
    assert 4 <= consumers.count(0) <= 6
    for queue in queues:
        for tag in list(queue.pending):
            queue.remove(tag)


def test_who_cannot_be_served_keeps_nobody_else_waiting():
    """Triton's limiter looks only at the first of those that wait."""
    queues, dispatcher, pool = limited([(1, 1), (2, 1), (1, 1)], total=2)
    for consumer in range(3):
        dispatcher.ask(consumer, 0)
    queues[0].push(1, 1, 0)
    assert dispatcher.wake(0, 0) == [(0, [1])]
    queues[1].push(2, 1, 0)
    assert dispatcher.wake(1, 0) == []
    queues[2].push(3, 1, 0)
    assert dispatcher.wake(2, 0) == [(2, [3])]
    assert pool.free == 0
    assert dispatcher.ask(0, 0) == []
    assert dispatcher.ask(2, 0) == [(1, [2])]
    assert pool.free == 0
    assert dispatcher.ask(1, 0) == []
    assert pool.free == 2


def test_an_instance_without_its_resources_uses_no_request_up():
    """Another instance of the model, whose resources are free, takes it."""
    limiter, scarce, plenty = RateLimiter(), Resource("scarce", 1), Resource("plenty", 1)
    model, other = (QueueProbe(PLAIN.spec(), limiter=limiter) for _ in range(2))
    dispatcher = DispatcherProbe(
        [model, other],
        [
            (0, ClaimHandle(limiter, [(scarce, 1)])),
            (0, ClaimHandle(limiter, [(plenty, 1)])),
            (1, ClaimHandle(limiter, [(scarce, 1)])),
        ],
    )
    for consumer in range(3):
        dispatcher.ask(consumer, 0)
    other.push(1, 1, 0)
    assert dispatcher.wake(1, 0) == [(2, [1])]
    model.push(2, 1, 0)
    assert dispatcher.wake(0, 0) == [(1, [2])]


def test_more_of_a_resource_serves_those_that_wait():
    queues, dispatcher, pool = limited([(2, 1)])
    queues[0].push(1, 1, 0)
    assert dispatcher.ask(0, 0) == []
    assert dispatcher.resize(0, 2, 0) == [(0, [1])]
    assert (pool.total, pool.free) == (2, 0)
    dispatcher.resize(0, 1, 0)
    assert (pool.total, pool.free) == (1, -1), "what is held stays held"
