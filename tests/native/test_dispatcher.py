"""Guards the dispatcher: no request waits beside an idle instance that may take it, whatever happens in which order."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd._native.scheduling.limiter import ClaimHandle, RateLimiter, Resource
from tests.native.probe import DispatcherProbe, QueueProbe
from tests.native.queue_model import Policy
from tests.native.queue_play import Dispatchers

pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.mark.parametrize("part", range(4))
def test_nothing_is_ever_left_to_decide(part):
    for number in range(100):
        Dispatchers(Random(f"{part} {number}")).play(40)


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


def test_who_needs_nothing_of_a_resource_keeps_nobody_from_it():
    """Two share what the third needs all of, which is overdue then; the fourth needs something else, of which the third
    names 0."""
    limiter, shared, other = RateLimiter(), Resource("shared", 2), Resource("other", 1)
    queues = [QueueProbe(PLAIN.spec(), limiter=limiter) for _ in range(4)]
    needs = ([(shared, 1)], [(shared, 1)], [(shared, 2), (other, 0)], [(other, 1)])
    dispatcher = DispatcherProbe(queues, list(enumerate(ClaimHandle(limiter, need) for need in needs)))
    running = []
    for consumer in range(4):
        for tag in range(100 if consumer < 3 else 0):
            queues[consumer].push(1000 * consumer + tag, 4, 0)
        running += [called for called, _ in dispatcher.ask(consumer, 0)]
    while dispatcher.overdue is None:
        running += [called for called, _ in dispatcher.ask(running.pop(0), 0)]
    assert dispatcher.overdue == 2
    queues[3].push(3000, 4, 0)
    assert dispatcher.wake(3, 0) == [(3, [3000])]


def test_more_of_a_resource_serves_those_that_wait():
    queues, dispatcher, pool = limited([(2, 1)])
    queues[0].push(1, 1, 0)
    assert dispatcher.ask(0, 0) == []
    assert dispatcher.resize(0, 2, 0) == [(0, [1])]
    assert (pool.total, pool.free) == (2, 0)
    dispatcher.resize(0, 1, 0)
    assert (pool.total, pool.free) == (1, -1), "what is held stays held"
