"""Guards the adaptive delay: what it learns, that it waits while that pays, and what bounds the wait.

That it does what its plain model says, among all else that a queue does: tests/native/test_queue.py.
"""

import heapq
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.api import QueuePolicySpec
from tests.native.delay_model import Batches
from tests.native.probe import DispatcherProbe, QueueProbe
from tests.native.queue_model import Policy

MS = 1_000_000


pytestmark = pytest.mark.usefixtures("native_counters")


def probe_of(*, adaptive: bool = True, delay_us: int = 0, timeout_us: int = 0) -> QueueProbe:
    levels = (QueuePolicySpec(timeout_us=timeout_us),)
    return QueueProbe(Policy(True, 64, delay_us=delay_us, levels=levels, adaptive=adaptive).spec())


def teach(probe: QueueProbe, fixed: int, row: int, gap: int) -> int:
    """Batches that take fixed + row for each row, and that the next request comes after `gap`; the time after."""
    for n in range(200):
        rows = n % 8 + 1
        probe.executed(rows, fixed + row * rows)
    now = 1
    for waiting in range(1, 65):
        for _ in range(3):
            for tag in range(waiting):
                probe.push(tag, 1, now)
            assert len(probe.take(now, idle=1)) == waiting
            now += gap
    return now


class Served:
    """One instance that serves requests; a request is (time, client).

    Attributes:
        sizes: of the batches.
        latencies: of the requests, in the order of their answers.
    """

    def __init__(self, probe: QueueProbe, arrivals, fixed: int, row: int, *, again: int = 0, most: int = 1 << 30):
        self.sizes: list[int] = []
        self.latencies: list[int] = []
        came: dict[int, int] = {}
        coming, now, tag = list(arrivals), 0, 0
        heapq.heapify(coming)
        while (coming or came) and len(self.latencies) < most:
            while coming and coming[0] <= now:
                tag += 1
                came[tag] = heapq.heappop(coming)
                probe.push(tag, 1, came[tag])
            if taken := probe.take(now):
                took = fixed + row * len(taken)
                probe.executed(len(taken), took)
                now += took
                self.sizes.append(len(taken))
                self.latencies += [now - came.pop(tag) for tag in taken]
                if again:
                    for n in range(len(taken)):
                        heapq.heappush(coming, now + again + n * again // 10)
            else:
                now = min([probe.wake[0], *coming[:1]])

    @property
    def mean_latency(self) -> float:
        return sum(self.latencies) / len(self.latencies)

    @property
    def mean_size(self) -> float:
        """The mean size of the batches in the second half, when there has been time to learn."""
        late = self.sizes[len(self.sizes) // 2 :]
        return sum(late) / len(late)


def at_random(per_second: float, count: int, seed: int) -> list[int]:
    """Times of requests that come independently of each other."""
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(per_second / 1e9)
        found.append(int(now))
    return found


# -- what is learnt --


def test_what_has_been_learnt():
    probe = probe_of()
    teach(probe, 4 * MS, 100_000, MS)
    learnt = probe.predictor
    assert learnt["fixed_ns"] == pytest.approx(4 * MS, rel=0.01)
    assert learnt["row_ns"] == pytest.approx(100_000, rel=0.01)
    assert learnt["gap_ns"] == MS
    assert learnt["target"] == 3  # (2 + 1) * 1 ms + 2 * 0.1 ms < 4 ms, with 3 it is more


@given(st.floats(0, 10 * MS), st.floats(0, 2 * MS), st.integers(0, 1 << 32))
def test_the_line_through_exact_times_is_found(fixed, row, seed):
    rng, batches = random.Random(seed), Batches()
    for _ in range(100):
        rows = rng.randint(1, 16)
        batches.executed(rows, round(fixed + row * rows))
    assert batches.row_ns == pytest.approx(row, abs=row / 100 + 1000)
    assert batches.fixed_ns == pytest.approx(fixed, abs=fixed / 100 + row / 10 + 10_000)


def test_one_slow_batch_changes_little():
    probe = probe_of()
    teach(probe, 4 * MS, 100_000, MS)
    probe.executed(4, 60_000 * MS)
    assert probe.predictor["fixed_ns"] < 6 * MS


def test_the_first_batch_in_which_frameworks_warm_up_teaches_nothing():
    probe = probe_of()
    probe.executed(1, 60_000 * MS)
    assert probe.predictor["fixed_ns"] == 0


def test_a_quiet_time_is_soon_forgotten():
    probe = probe_of()
    now = teach(probe, 4 * MS, 0, 100_000) + 3_600_000 * MS
    for n in range(60):
        probe.push(n, 1, now + n * 100_000)
        probe.take(now + n * 100_000, idle=1)
    assert probe.predictor["gap_ns"] < 200_000


def test_the_gap_behind_a_second_request_is_not_that_behind_the_first():
    """Where both come before anybody looks again, as those of one read do."""
    probe = probe_of()
    now = teach(probe, 4 * MS, 0, MS)
    for _ in range(60):
        probe.push(0, 1, now)
        assert probe.take(now) == []
        probe.push(1, 1, now + 100_000)
        probe.push(2, 1, now + 3_100_000)
        now += 100 * MS
        assert len(probe.take(now)) == 3
    assert probe.predictor["gap_ns"] < 200_000


# -- what is done --


@pytest.mark.parametrize(
    ("fixed", "row", "gap", "target"),
    [
        (4 * MS, 0, 10 * MS, 1),  # requests are rare
        (4 * MS, 0, 99_000, 40),  # and frequent
        (4 * MS, MS, 100_000, 4),  # each row costs
        (0, 4 * MS, 100_000, 1),  # batches gain nothing
        (80 * MS, 1000, 1000, 64),  # at most max_batch_size
    ],
)
def test_how_many_are_waited_for(fixed, row, gap, target):
    probe = probe_of()
    now = teach(probe, fixed, row, gap)
    assert probe.predictor["target"] == target
    for tag in range(target - 1):
        probe.push(1000 + tag, 1, now)
        assert probe.take(now) == [], f"{tag + 1} of {target}"
        assert probe.wake[1] == target
    probe.push(5000, 1, now)
    assert len(probe.take(now)) == target
    assert probe.why == ("full" if target == 64 else "waiting does not pay")


@pytest.mark.parametrize(
    ("fixed", "row", "gap"), [(4 * MS, 20_000, 1000), (4 * MS, 0, 10_000), (40 * MS, 5, 0), (40 * MS, 0, 0)]
)
def test_how_many_are_waited_for_where_batches_may_be_large(fixed, row, gap):
    """The time of a decision does not grow with the largest batch; if it did, this test would take many minutes."""
    most = 1 << 20
    probe = QueueProbe(Policy(True, most, adaptive=True).spec())
    teach(probe, fixed, row, gap)
    learnt = probe.predictor
    fixed, row, gap = learnt["fixed_ns"], learnt["row_ns"], learnt["gap_ns"]
    expected = next((n for n in range(1, most) if (n + 1) * gap + n * row >= fixed), most)
    for _ in range(10_000):
        assert probe.predictor["target"] == expected


def test_nothing_is_waited_for_while_nothing_is_known():
    probe = probe_of()
    probe.push(1, 1, 10)
    assert probe.take(10) == [1]


def test_nothing_is_waited_for_while_another_instance_is_idle():
    probe = probe_of()
    now = teach(probe, 4 * MS, 0, 100_000)
    probe.push(1000, 1, now)
    assert probe.take(now) == []
    assert probe.take(now, idle=1) == [1000]


def test_the_bet_on_the_next_request_is_given_up():
    probe = probe_of()
    now = teach(probe, 4 * MS, 0, 100_000)
    probe.push(1000, 1, now)
    assert probe.take(now) == []
    assert probe.wake[0] == now + 300_000
    probe.push(1001, 1, now + 200_000)
    assert probe.take(now + 300_000) == [], "one has come"
    assert probe.take(probe.wake[0]) == [1000, 1001]


def test_no_instance_waits_for_longer_than_the_fixed_time():
    probe = probe_of()
    now = teach(probe, 4 * MS, 0, 99_000)
    for n in range(30):
        probe.push(1000 + n, 1, now + n * 140_000)
        if taken := probe.take(now + n * 140_000):
            break
    assert len(taken) == 4_000_000 // 140_000 + 2


def test_the_configured_delay_is_the_longest():
    probe = probe_of(delay_us=150)
    now = teach(probe, 4 * MS, 0, 100_000)
    probe.push(1000, 1, now)
    assert probe.take(now) == []
    assert probe.wake[0] == now + 150_000


def test_a_request_whose_time_is_short_is_executed_in_time():
    probe = probe_of(timeout_us=4100)
    now = teach(probe, 4 * MS, 0, 100_000)
    probe.push(1000, 1, now)
    assert probe.take(now) == []
    assert now < probe.wake[0] <= now + 100_000


def test_a_deadline_shortens_a_wait_that_runs():
    """The instance waits for the next request until `probe.watched`; one comes that has not so much time."""
    probe = probe_of()
    now = teach(probe, 4 * MS, 0, 300_000)
    consumers = DispatcherProbe([probe], [(0, None)])
    assert consumers.ask(0, now) == []
    probe.push(1000, 1, now)
    assert consumers.wake(0, now) == []
    assert consumers.watched[0] == now + 900_000
    probe.push(1001, 1, now, deadline=now + 5 * MS)  # an eighth of which is for the way: 4.375 ms remain
    assert consumers.wake(0, now) == []
    assert consumers.watched[0] == now + 375_000
    assert consumers.time_passes(now + 374_999) == []
    assert consumers.time_passes(now + 375_000) == [(0, [1000, 1001])]


def test_executions_that_turn_out_longer_shorten_a_wait_that_runs():
    """Guards a wait with a deadline beside an instance that executes several batches: it may wait when one ends."""
    now, second = time.monotonic_ns(), 1000 * MS
    probe = probe_of(delay_us=10**9, adaptive=False)
    consumers = DispatcherProbe([probe], [(0, None)])
    assert consumers.ask(0, now) == []
    probe.push(1, 1, now, deadline=now + 400 * second)  # an eighth of which is for the way: 350 s remain
    assert consumers.wake(0, now) == []
    assert consumers.watched[0] == now + 350 * second
    for _ in range(2):  # the first tells nothing
        probe.executed(1, 2 * second)
    assert consumers.watched[0] == now + 348 * second


# -- what that is worth --


@pytest.mark.parametrize(("clients", "least"), [(2, 1.9), (8, 7.5), (32, 30)])
def test_clients_that_ask_again_when_they_are_answered_share_batches(clients, least):
    """Without a delay the first ones that are back get a batch of their own, and keep all others waiting."""
    arrivals = [n * 10_000 for n in range(clients)]
    greedy = Served(probe_of(adaptive=False), arrivals, 2 * MS, 10_000, again=50_000, most=8000)
    patient = Served(probe_of(), arrivals, 2 * MS, 10_000, again=50_000, most=8000)
    assert patient.mean_size >= least > greedy.mean_size
    assert patient.mean_latency < 0.7 * greedy.mean_latency


@pytest.mark.parametrize("seed", range(3))
def test_rare_requests_do_not_wait(seed):
    arrivals = at_random(20, 1000, seed)
    greedy = Served(probe_of(adaptive=False), arrivals, 2 * MS, 50_000)
    patient = Served(probe_of(), arrivals, 2 * MS, 50_000)
    assert patient.mean_latency < 1.02 * greedy.mean_latency


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("per_second", [200, 500, 2000, 10_000])
def test_requests_that_come_by_themselves_wait_no_longer_than_it_pays(seed, per_second):
    """Latencies are about those without a delay or better, and the instance does the same with fewer batches."""
    arrivals = at_random(per_second, 4000, seed)
    greedy = Served(probe_of(adaptive=False), arrivals, 2 * MS, 50_000)
    patient = Served(probe_of(), arrivals, 2 * MS, 50_000)
    assert patient.mean_latency < 1.02 * greedy.mean_latency
    assert len(patient.sizes) <= len(greedy.sizes)
