"""Guards queues against a plain model of their documented rules, and the promises that clients rely on.

`tests.native.queue_model` says what should happen, in the plainest way; both are told the same at the same fake times.
"""

from random import Random

import pytest

from inferd._native.scheduling.queue import QueueLane
from inferd.backends.api import ModelSpec, QueuePolicySpec, QueueSpec, TensorSpec
from tests.native.probe import NEVER, QueueProbe
from tests.native.queue_model import LOOKS, Policy, QueueModel
from tests.native.queue_play import Queues, draw_policy

pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.mark.parametrize("part", range(4))
def test_queues_do_what_the_model_does(part):
    for number in range(150):
        Queues(Random(f"{part} {number}")).play(60)


@pytest.mark.parametrize("number", range(100))
def test_no_earlier_question_would_have_been_answered(number):
    """An instance that was told to wait for rows is not asked too late: fewer rows than that make no batch."""
    random = Random(number)
    policy = draw_policy(random, plain=True)
    probe, model, now = QueueProbe(policy.spec()), QueueModel(policy), 0
    for tag in range(random.randint(0, 8)):
        rows = random.randint(1, policy.max_rows)
        probe.push(tag, rows, now)
        model.push(tag, rows, 1, now, 0, 0)
    while probe.take(now):
        model.take(now)
    waiting = sum(request.rows for request in model.waiting)
    wake, wake_rows = probe.wake
    if wake == NEVER:
        return
    assert waiting < wake_rows <= policy.max_rows
    for more in range(1, wake_rows - waiting):
        model.push(99, more, 1, now, 0, 0)
        assert model.plan(now)[0] == 0, f"{more} more rows make a batch"
        model.remove(99)


def probe_of(policy: Policy) -> QueueProbe:
    return QueueProbe(policy.spec(), max_queue=policy.max_queue, held=policy.held)


def test_largest_preferred_prefix_goes_first():
    probe = probe_of(Policy(True, 16, (4, 8), 1000))
    for tag in range(11):
        probe.push(tag, 1, 0)
    assert probe.take(0) == list(range(8))
    assert probe.why == "preferred size"
    assert (probe.take(0), probe.wake) == ([], (1_000_000, 4))
    probe.push(11, 1, 10)
    assert probe.take(10) == [8, 9, 10, 11]


@pytest.mark.parametrize("delay_us", [0, 1000])
@pytest.mark.parametrize("preferred", [(), (4,), (4, 4)])
def test_the_largest_batch_alone_is_no_preference(preferred, delay_us):
    """Guards that no preferred size, and Triton's default of max_batch_size, mean the same: batches go as full."""
    probe = probe_of(Policy(True, 4, preferred, delay_us))
    for tag, rows in enumerate((1, 3, 3, 2)):
        probe.push(tag, rows, 0)
    assert (probe.take(0), probe.why) == ([0, 1], "full")
    assert (probe.take(0), probe.why) == ([2], "full")
    assert (probe.take(delay_us * 1000), probe.why) == ([3], "delay over" if delay_us else "no delay")


def test_preferred_sizes_may_come_in_any_order_and_twice():
    probe = probe_of(Policy(True, 16, (8, 4, 8), 1000))
    for tag in range(11):
        probe.push(tag, 1, 0)
    assert (probe.take(0), probe.why) == (list(range(8)), "preferred size")
    assert (probe.take(0), probe.wake) == ([], (1_000_000, 4))


def test_a_request_that_does_not_fit_sends_those_before_it():
    probe = probe_of(Policy(True, 4, (), 1000))
    probe.push(1, 3, 0)
    assert (probe.take(0), probe.wake) == ([], (1_000_000, 4))
    probe.push(2, 2, 0)
    assert (probe.take(0), probe.why) == ([1], "full")


SHAPES = 10


def test_shapes_that_come_in_turn_make_full_batches():
    """A batch that ends where another shape begins has one request where shapes come in turn."""
    probe = probe_of(Policy(True, 64))
    for tag in range(64 * SHAPES):
        probe.push(tag, 1, tag, width=tag % SHAPES)
    for shape in range(SHAPES):
        assert probe.take(1000) == list(range(shape, 64 * SHAPES, SHAPES)), "in the order of arrival"
        assert probe.why == "gathered from among other shapes" or shape == SHAPES - 1
    assert probe.take(1000) == []


def test_who_waits_longest_is_served_next_whatever_comes_of_another_shape():
    probe = probe_of(Policy(True, 4))
    probe.push(0, 1, 0, width=1)
    probe.push(1, 1, 0, width=2)
    for tag in range(2, 40):
        probe.push(tag, 1, 0, width=1)
    assert probe.take(0) == [0, 2, 3, 4]
    assert probe.take(0) == [1], "it has been passed by one batch"


def test_a_request_passes_none_of_its_own_shape():
    probe = probe_of(Policy(True, 4))
    for tag, (rows, width) in enumerate([(2, 1), (1, 2), (3, 1), (1, 1)]):
        probe.push(tag, rows, 0, width=width)
    assert probe.take(0) == [0], "3 has room, but 2 comes before it"
    assert probe.take(0) == [1]
    assert probe.take(0) == [2, 3]


def test_a_request_passes_none_of_another_priority():
    probe = probe_of(Policy(True, 8, (), 0, (QueuePolicySpec(),) * 2, default_level=2))
    for tag, (width, priority) in enumerate([(1, 1), (2, 1), (1, 2), (1, 1)]):
        probe.push(tag, 1, 0, width=width, priority=priority)
    assert probe.take(0) == [0, 3]
    assert probe.take(0) == [1]
    assert probe.take(0) == [2]


def test_where_answers_keep_their_order_nothing_passes_anything():
    probe = probe_of(Policy(True, 4, ordered=True))
    for tag in range(4):
        probe.push(tag, 1, 0, width=tag % 2)
    assert [probe.take(0) for _ in range(4)] == [[0], [1], [2], [3]]


def test_how_far_is_looked_for_the_same_shape_is_bounded_by_what_is_found():
    """Else a queue of nothing but different shapes would be walked over for each of its requests."""
    probe = probe_of(Policy(True, 64))
    for tag in range(3 * LOOKS):
        probe.push(tag, 1, 0, width=tag)
    probe.push(1000, 1, 0, width=0)
    assert probe.take(0) == [0], "1000 is too far away"
    for tag in range(1, 2 * LOOKS + 1):
        assert probe.take(0) == [tag]
    near = probe.pending[0]
    probe.push(1001, 1, 0, width=near)
    assert probe.take(0) == [near, 1001]


def test_higher_priorities_go_first_and_lower_ones_fill_the_batch():
    probe = probe_of(Policy(True, 4, (), 0, (QueuePolicySpec(),) * 2, default_level=2))
    for tag, priority in enumerate((2, 0, 1, 7, 1)):
        probe.push(tag, 1, 0, priority=priority)
    assert probe.take(0) == [2, 4, 0, 1]
    assert probe.take(0) == [3]


def test_requests_whose_time_is_over_wait_behind_their_level():
    policies = (QueuePolicySpec(timeout_us=1, yields=True), QueuePolicySpec())
    probe = probe_of(Policy(False, 1, (), 0, policies))
    probe.push(1, 1, 0, priority=1)
    probe.push(2, 1, 0, priority=2)
    assert probe.expire(1000) == []
    probe.push(3, 1, 1000, priority=1)
    assert probe.pending == [3, 1, 2]


@pytest.mark.parametrize(
    ("default", "overridable", "asked", "allowed"),
    [(10, True, 5, 5), (10, True, 20, 10), (10, False, 5, 10), (0, True, 5, 5), (0, False, 5, 0), (10, True, 0, 10)],
)
def test_timeout_of_a_request(default, overridable, asked, allowed):
    """A request may shorten its time where the policy allows it, also where there is no default."""
    probe = probe_of(Policy(False, 1, levels=(QueuePolicySpec(0, default, overridable),)))
    probe.push(1, 1, 0, timeout_us=asked)
    assert probe.expire(allowed * 1000 - 1) == []
    assert probe.expire(max(allowed * 1000, 0)) == ([1] if allowed else [])


def test_limit_of_a_level_counts_those_beyond_their_time():
    probe = probe_of(Policy(False, 1, levels=(QueuePolicySpec(2, 1, yields=True), QueuePolicySpec(1))))
    assert probe.push(1, 1, 0, priority=1) is None
    assert probe.expire(1000) == []
    assert probe.push(2, 1, 1000, priority=1) is None
    text = "Exceeds maximum queue size: model 'm' version 1 has 2 requests of priority 1 waiting, which is its limit"
    assert probe.push(3, 1, 1000, priority=1) == text
    assert probe.push(3, 1, 1000, priority=2) is None


def test_longest_times_that_a_configuration_may_name():
    """Such times are never over, and the arithmetic must not overflow."""
    probe = probe_of(Policy(True, 4, (), 1 << 62, (QueuePolicySpec(timeout_us=1 << 62, overridable=True),)))
    probe.push(1, 1, 1 << 60, timeout_us=(1 << 63) - 1)
    assert probe.take((1 << 60) + 1) == []
    assert probe.wake[0] > 1 << 60
    assert probe.expire(1 << 60) == []


def test_too_many_preferred_sizes_are_refused():
    with pytest.raises(ValueError, match="65 preferred batch sizes, at most 64"):
        QueueLane(Policy(True, 100, tuple(range(1, 66))).spec(), 1)


@pytest.mark.parametrize(
    ("queue", "text"),
    [
        (QueueSpec((QueuePolicySpec(),) * 257), "257 priority levels, 1 to 256"),
        (QueueSpec(()), "0 priority levels"),
        (QueueSpec(default_level=2), "default priority level 2, expected 1 to 1"),
    ],
)
def test_levels_that_cannot_be_served_are_refused(queue, text):
    with pytest.raises(ValueError, match=text):
        QueueLane(ModelSpec("m", "b", queue=queue), 1)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (TensorSpec("x", "FP32", (1,) * 17), "17 dimensions"),
        (TensorSpec("x", "FP31", (1,)), "unknown datatype 'FP31'"),
        (TensorSpec("x", "BYTES", (-1,), pad_value=0.0), "inputs of BYTES cannot be padded"),
        (TensorSpec("x", "BF16", (-1,), pad_value=0.0), "inputs of BF16 cannot be padded"),
        (TensorSpec("x", "FP32", (-1, -1), pad_value=0.0), "one variable dimension, 'x' has 2"),
    ],
)
def test_signature_that_cannot_be_served_is_refused(tensor, text):
    with pytest.raises(ValueError, match=text):
        QueueLane(ModelSpec("m", "b", inputs=(tensor,), outputs=()), 1)
