"""Guards the batching policy against a plain model of its documented rules, and the promises that clients rely on.

The model says what `_native/queue.pyx` documents, in the plainest way; both are asked at the same fake times.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _native.queue import PolicyProbe, QueueLane
from backends.api import BatchingSpec, ModelSpec, TensorSpec

NEVER = (1 << 63) - 1


@pytest.fixture(autouse=True)
def _nothing_left(native_counters):
    """Lanes and the requests in them are freed."""


@dataclass(frozen=True)
class Policy:
    """What the configuration says."""

    batching: bool
    max_rows: int
    preferred: tuple[int, ...] = ()
    delay_us: int = 0

    def spec(self) -> ModelSpec:
        batching = BatchingSpec(self.preferred, self.delay_us) if self.batching else None
        tensor = TensorSpec("x", "FP32", (1,))
        return ModelSpec("m", "b", max_batch_size=self.max_rows, inputs=(tensor,), outputs=(tensor,), batching=batching)


def candidates(policy: Policy, rows: list[int]) -> tuple[list[int], bool]:
    """The rows of the longest prefix that fits, and whether it can become no longer."""
    taken: list[int] = []
    for size in rows:
        if taken and sum(taken) + size > policy.max_rows:
            return taken, True
        taken.append(size)
        if sum(taken) >= policy.max_rows:
            return taken, True
    return taken, False


def model(policy: Policy, queue: list[tuple[int, int]], now: int) -> tuple[int, int]:
    """(requests to take, when to ask again) for a queue of (rows, time), oldest first."""
    if not queue:
        return 0, NEVER
    if not policy.batching:
        return 1, 0
    preferred = policy.preferred or (policy.max_rows,)
    rows = [size for size, _ in queue]
    due = queue[0][1] + policy.delay_us * 1000
    taken, complete = candidates(policy, rows)
    if now >= due:
        return len(taken), 0
    for count in range(len(taken), 0, -1):
        if sum(taken[:count]) in preferred:
            return count, 0
    if complete:
        return len(taken), 0
    if rows[0] > max(preferred):
        return 1, 0
    return 0, due


policies = st.integers(1, 12).flatmap(
    lambda max_rows: st.builds(
        Policy,
        st.sampled_from([True, True, True, False]),
        st.just(max_rows),
        st.lists(st.integers(1, max_rows), max_size=3, unique=True).map(tuple),
        st.sampled_from([0, 1, 10, 1000]),
    )
)


@given(policies, st.data())
def test_policy_is_the_documented_one(policy, data):
    """Same count and same wake time at every step of a random history; batches taken keep order and size."""
    probe = PolicyProbe(policy.spec())
    queue: list[tuple[int, int]] = []
    now = 1_000_000
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            rows = data.draw(st.integers(1, policy.max_rows))
            probe.push(rows, now)
            queue.append((rows, now))
        else:
            now += data.draw(st.sampled_from([0, 1, 999, 1000, 5000, 10_000, 1_000_000]))
        count, wake, wake_rows = probe.plan(now)
        expected, expected_wake = model(policy, queue, now)
        assert count == expected
        if count == 0:
            assert wake == expected_wake
            _check_waiting(policy, queue, now, wake, wake_rows)
        else:
            assert probe.take(count) == [size for size, _ in queue[:count]]
            assert count == 1 or sum(size for size, _ in queue[:count]) <= policy.max_rows
            del queue[:count]


def _check_waiting(policy, queue, now, wake, wake_rows):
    """Nobody waits past the delay, and no fewer rows than `wake_rows` could have changed the answer."""
    if not queue:
        assert wake_rows == 1
        return
    assert now < wake <= queue[0][1] + policy.delay_us * 1000
    waiting = sum(size for size, _ in queue)
    assert waiting < wake_rows <= policy.max_rows
    for more in range(1, wake_rows - waiting):
        assert model(policy, [*queue, (more, now)], now)[0] == 0, f"{more} more rows make a batch"


@given(policies, st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_everything_queued_is_taken_in_order_after_the_delay(policy, sizes):
    sizes = [min(size, policy.max_rows) for size in sizes]
    probe = PolicyProbe(policy.spec())
    for size in sizes:
        probe.push(size, 0)
    out = []
    while (count := probe.plan(policy.delay_us * 1000)[0]) > 0:
        batch = probe.take(count)
        assert policy.batching or count == 1
        assert sum(batch) <= policy.max_rows
        out += batch
    assert out == sizes


def test_largest_preferred_prefix_goes_first():
    probe = PolicyProbe(Policy(True, 16, (4, 8), 1000).spec())
    for _ in range(11):
        probe.push(1, 0)
    assert probe.plan(0)[0] == 8
    probe.take(8)
    assert probe.plan(0) == (0, 1_000_000, 4)
    probe.push(1, 10)
    assert probe.plan(10)[0] == 4


def test_a_request_that_does_not_fit_sends_those_before_it():
    probe = PolicyProbe(Policy(True, 4, (), 1000).spec())
    probe.push(3, 0)
    assert probe.plan(0) == (0, 1_000_000, 4)
    probe.push(2, 0)
    assert probe.plan(0)[0] == 1


def test_longest_delay_that_a_configuration_may_name():
    """2^62 microseconds are never over; the arithmetic must not overflow on the way."""
    probe = PolicyProbe(Policy(True, 4, (), 1 << 62).spec())
    probe.push(1, 1 << 60)
    count, wake, _ = probe.plan((1 << 60) + 1)
    assert count == 0
    assert wake > 1 << 60


def test_too_many_preferred_sizes_are_refused():
    with pytest.raises(ValueError, match="65 preferred batch sizes, at most 64"):
        QueueLane(Policy(True, 100, tuple(range(1, 66))).spec(), 1)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (TensorSpec("x", "FP32", (1,) * 17), "17 dimensions"),
        (TensorSpec("x", "FP31", (1,)), "unknown datatype 'FP31'"),
    ],
)
def test_signature_that_cannot_be_served_is_refused(tensor, text):
    with pytest.raises(ValueError, match=text):
        QueueLane(ModelSpec("m", "b", inputs=(tensor,), outputs=()), 1)
