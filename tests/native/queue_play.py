"""Histories of queues and dispatchers that compare them with models of their rules (`tests.native.queue_model`).

Of consumers and resources the model is that there is nothing left to decide.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from inferd._native.scheduling.limiter import ClaimHandle, RateLimiter, Resource
from inferd.backends.api import QueuePolicySpec
from tests.native.probe import NEVER, DispatcherProbe, QueueProbe
from tests.native.queue_model import Policy, QueueModel

if TYPE_CHECKING:
    from tests.native.probe import Decided

STEPS_NS = (1, 999, 1000, 5000, 10_000, 1_000_000)
TAKES_NS = (0, 1000, 5000, 20_000, 1_000_000)
LONG_TAKES_NS = (100_000, 1_000_000, 4_000_000)  # waiting for more may pay beside these
COUNTS = (1, 2, 3, 5, 8)  # of requests that wait


def draw_policy(random: Random, *, plain: bool = False) -> Policy:
    """Any; a plain one has one level, no limits, and no adaptive delay."""
    max_rows = random.randint(1, 12)
    levels = tuple(draw_level(random) for _ in range(1 if plain else random.randint(1, 3)))
    return Policy(
        batching=random.random() < 0.75,
        max_rows=max_rows,
        preferred=tuple(random.sample(range(1, max_rows + 1), min(max_rows, random.randint(0, 3)))),
        delay_us=random.choice((0, 1, 10, 1000)),
        levels=(QueuePolicySpec(),) if plain else levels,
        default_level=random.randint(1, len(levels)),
        adaptive=not plain and random.random() < 0.5,
        max_queue=0 if plain else random.choice((0, 0, 5)),
        held=0 if plain else random.choice((0, 0, 0, 4)),
        ordered=random.random() < 0.3,
    )


def draw_level(random: Random) -> QueuePolicySpec:
    return QueuePolicySpec(
        max_size=random.choice((0, 0, 1, 3)),
        timeout_us=random.choice((0, 1, 10, 1000)),
        overridable=random.random() < 0.5,
        yields=random.random() < 0.5,
    )


class Queues:
    """Random arrivals, cancellations, timeouts and instances; each request comes to one end.

    Args:
        waits: instances wait for more requests whenever that pays, as it often does.
    """

    def __init__(self, random: Random, *, waits: bool = False) -> None:
        self.random = random
        self.policy = policy = draw_policy(random, plain=waits)
        if waits:
            self.policy = policy = replace(policy, batching=True, max_rows=12, preferred=(), adaptive=True)
        self.model = QueueModel(policy)
        self.probe = QueueProbe(policy.spec(), max_queue=policy.max_queue, held=policy.held)
        self.now = 1_000_000
        self.takes = LONG_TAKES_NS if waits else random.choice((TAKES_NS, LONG_TAKES_NS))
        self.pushed = 0
        self.rows: dict[int, int] = {}  # of those that have not ended
        self.ended: set[int] = set()

    def play(self, steps: int) -> None:
        """So many steps, and then the end."""
        kinds = (self.push, self.push, self.pass_time, self.leave, self.expire, self.execute, self.ask, self.ask)
        for _ in range(steps):
            self.random.choice(kinds)()
            assert self.probe.pending == [request.tag for request in self.model.waiting]
            assert set(self.probe.pending) == set(self.rows)
            if self.probe.predictor is not None:
                assert [self.probe.gap(n) for n in COUNTS] == [self.model.delay.gap(n) for n in COUNTS]
        self.finish()

    def end(self, tags: list[int]) -> None:
        for tag in tags:
            assert tag not in self.ended, f"request {tag} ends twice"
            self.ended.add(tag)
            del self.rows[tag]

    def push(self) -> None:
        random = self.random
        rows, width = min(random.randint(1, 12), self.policy.max_rows), random.choice((1, 1, 1, 2))
        priority = random.choice((0, 0, 1, 2, 3, 4, 1 << 40))
        timeout_us = random.choice((0, 0, 1, 5, 500, 10_000, (1 << 63) - 1))
        patience = random.choice((0, 0, 1, 5000, 20_000, 3_000_000, 1 << 61))
        tag = self.pushed = self.pushed + 1
        deadline = self.now + patience if patience else 0
        refused = self.probe.push(
            tag, rows, self.now, priority=priority, timeout_us=timeout_us, width=width, deadline=deadline, client=tag
        )  # each of a client of its own: nobody has more than others, who would make room
        expected = self.model.push(tag, rows, width, self.now, priority, timeout_us, deadline)
        if expected is None:
            assert refused is None
            self.rows[tag] = rows
        else:
            assert refused is not None
            assert refused.startswith(expected)

    def pass_time(self) -> None:
        self.now += self.random.choice(STEPS_NS)

    def leave(self) -> None:
        """A client."""
        if self.rows:
            tag = self.random.choice(sorted(self.rows))
            assert self.probe.remove(tag)
            assert self.model.remove(tag)
            self.end([tag])
            assert not self.probe.remove(tag)

    def expire(self) -> None:
        """Timers are due."""
        refused = self.probe.expire(self.now)
        assert sorted(refused) == sorted(self.model.expire(self.now))
        self.end(refused)

    def execute(self) -> None:
        """An instance has."""
        rows, ns = self.random.randint(1, 12), self.random.choice(self.takes)
        self.probe.executed(rows, ns)
        self.model.delay.batches.executed(rows, ns)
        if (learnt := self.probe.predictor) is not None:
            batches = self.model.delay.batches
            assert (learnt["fixed_ns"], learnt["row_ns"]) == (batches.fixed_ns, batches.row_ns)

    def ask(self) -> None:
        """An instance does."""
        idle = self.random.choice((0, 0, 1))
        count, wake = self.model.plan(self.now, idle)
        expected = self.model.take(self.now, idle)
        taken = self.probe.take(self.now, idle=idle)
        assert taken == expected
        if not taken:
            assert count == 0
            assert self.probe.wake[0] == wake
            assert wake == NEVER or self.now < wake
            return
        assert self.probe.why
        rows = [self.rows[tag] for tag in taken]
        assert len(rows) == 1 or (self.policy.batching and sum(rows) <= self.policy.max_rows)
        self.end(taken)

    def finish(self) -> None:
        """What was accepted and has not ended is taken after the close: nothing is lost."""
        self.probe.close()
        self.model.closed = True
        assert self.probe.push(0, 1, self.now) == "closed"
        while self.rows:
            taken = self.probe.take(self.now)
            assert taken == self.model.take(self.now)
            assert taken
            self.end(taken)
        assert self.probe.take(self.now) == []


class Need:
    """What the instances of one queue need of each resource."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def fits(self, free: list[int]) -> bool:
        return all(count <= left for count, left in zip(self.counts, free, strict=True))


class Dispatchers:
    """Arrivals, departures, timeouts, instances that come, end and execute, resources that become more and fewer."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.limited = random.random() < 0.5
        self.policies = [self.draw_policy() for _ in range(random.randint(1, 3) if self.limited else 1)]
        self.now = 1 << 60  # behind the system's clock, at which the dispatcher looks when a batch was executed
        self.limiter = RateLimiter() if self.limited else None
        self.totals = [random.randint(2, 4) for _ in range(2)]
        self.pools = [Resource(str(number), total) for number, total in enumerate(self.totals)]
        self.queues = [QueueProbe(policy.spec(), limiter=self.limiter) for policy in self.policies]
        self.models = [QueueModel(policy) for policy in self.policies]
        self.lines = [random.randrange(len(self.policies)) for _ in range(random.randint(1, 9))]
        self.needs = [[random.randint(0, 2) if self.limited else 0 for _ in self.totals] for _ in self.lines]
        claims = [
            ClaimHandle(self.limiter, list(zip(self.pools, need, strict=True)), priority) if self.limiter else None
            for priority, need in enumerate(self.needs, 1)
        ]
        self.probe = DispatcherProbe(self.queues, list(zip(self.lines, claims, strict=True)))
        self.executing: set[int] = set()
        self.holding: set[int] = set()  # until they ask again
        self.retired: set[int] = set()
        self.ended: set[int] = set()
        self.tags = itertools.count(1)
        self.rows: dict[int, tuple[int, int]] = {}  # tag: (queue, rows)

    def draw_policy(self) -> Policy:
        random, max_rows = self.random, self.random.randint(1, 8)
        levels = tuple(
            QueuePolicySpec(timeout_us=random.choice((0, 1, 10, 1000)), yields=random.random() < 0.5)
            for _ in range(random.randint(1, 2))
        )
        return Policy(
            batching=random.random() < 0.75,
            max_rows=max_rows,
            preferred=tuple(random.sample(range(1, max_rows + 1), min(max_rows, random.randint(0, 3)))),
            delay_us=random.choice((0, 1, 10, 1000)),
            levels=levels,
            default_level=random.randint(1, len(levels)),
        )

    def play(self, steps: int) -> None:
        """So many steps."""
        kinds = (
            *(self.ask, self.ask, self.ask, self.come, self.come, self.come, self.leave, self.pass_time),
            *(self.pass_time, self.retire, self.executed, self.resize, self.close),
        )
        for _ in range(steps):
            self.random.choice(kinds)()
            self.check()

    def decided(self, events: Decided) -> None:
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

    def ask(self) -> None:
        """An instance has nothing to do."""
        away = set(range(len(self.lines))) - set(self.probe.idle) - self.retired - self.ended
        if away:
            consumer = self.random.choice(sorted(away))
            self.executing.discard(consumer)
            self.holding.discard(consumer)
            self.decided(self.probe.ask(consumer, self.now))

    def come(self) -> None:
        """Requests do."""
        random = self.random
        line = random.randrange(len(self.queues))
        for _ in range(random.randint(1, 5)):
            rows = min(random.randint(1, 8), self.policies[line].max_rows)
            width, priority = random.choice((1, 1, 1, 2)), random.choice((0, 0, 1, 2))
            patience = random.choice((0, 0, 0, 1, 8000, 400_000, 4_000_000))
            tag, deadline = next(self.tags), self.now + patience if patience else 0
            refused = self.queues[line].push(tag, rows, self.now, priority=priority, width=width, deadline=deadline)
            assert refused == self.models[line].push(tag, rows, width, self.now, priority, 0, deadline)
            if refused is None:
                self.rows[tag] = (line, rows)
        self.decided(self.probe.wake(line, self.now))

    def leave(self) -> None:
        """A client."""
        if self.rows:
            tag = self.random.choice(sorted(self.rows))
            line, _ = self.rows.pop(tag)
            assert self.queues[line].remove(tag)
            assert self.models[line].remove(tag)
            self.decided(self.probe.look(line, self.now))

    def pass_time(self) -> None:
        self.now += self.random.choice(STEPS_NS)
        self.decided(self.probe.time_passes(self.now))
        for line, (queue, model) in enumerate(zip(self.queues, self.models, strict=True)):
            refused = queue.expire(self.now)
            assert sorted(refused) == sorted(model.expire(self.now))
            for tag in refused:
                del self.rows[tag]
            self.decided(self.probe.look(line, self.now))

    def retire(self) -> None:
        """An instance is to end."""
        left = sorted(set(range(len(self.lines))) - self.retired)
        if left:
            consumer = self.random.choice(left)
            self.retired.add(consumer)
            self.decided(self.probe.retire(consumer, self.now))

    def executed(self) -> None:
        """A batch has been: requests are to be executed so much before their deadlines."""
        line, rows = self.random.randrange(len(self.queues)), self.random.randint(1, 8)
        ns = self.random.choice(TAKES_NS)
        self.queues[line].executed(rows, ns)
        self.models[line].delay.batches.executed(rows, ns)
        self.decided(self.probe.look(line, self.now))

    def resize(self) -> None:
        """Resize a resource. Claims keep what they hold."""
        if self.limited:
            k, total = self.random.randrange(2), self.random.randint(2, 5)
            self.totals[k] = total
            self.decided(self.probe.resize(k, total, self.now))

    def close(self) -> None:
        """A queue, now and then."""
        line = self.random.randrange(31)
        if line < len(self.queues):
            self.queues[line].close()
            self.models[line].closed = True
            self.decided(self.probe.look(line, self.now))

    def check(self) -> None:
        """Nothing is left to decide."""
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
