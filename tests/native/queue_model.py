"""What queues should do, in plain Python: the documented rules, with nothing but lists.

Time is an argument everywhere, in nanoseconds. Requests are told apart by their tags.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inferd.backends.api import BatchingSpec, ModelSpec, QueuePolicySpec, QueueSpec, TensorSpec
from tests.native.delay_model import Delay
from tests.native.probe import NEVER

LOOKS = 64
"""Requests that are looked at for each that joins a batch, and for none."""


@dataclass(frozen=True)
class Policy:
    """What the configuration says."""

    batching: bool
    max_rows: int
    preferred: tuple[int, ...] = ()
    delay_us: int = 0
    levels: tuple[QueuePolicySpec, ...] = (QueuePolicySpec(),)
    default_level: int = 1
    max_queue: int = 0
    held: int = 0
    adaptive: bool = False
    ordered: bool = False  # answers keep the order of requests

    @property
    def longest_ns(self) -> int:
        """How long the oldest request of a batch may be waited for."""
        return NEVER if self.adaptive and not self.delay_us else self.delay_us * 1000

    @property
    def largest(self) -> int:
        """The largest preferred size."""
        return max(self.preferred or (self.max_rows,))

    def spec(self) -> ModelSpec:
        tensor = TensorSpec("x", "FP32", (-1,))
        return ModelSpec(
            "m",
            "b",
            max_batch_size=self.max_rows,
            inputs=(tensor,),
            outputs=(tensor,),
            batching=BatchingSpec(self.preferred, self.delay_us, self.adaptive) if self.batching else None,
            queue=QueueSpec(self.levels, self.default_level, preserve_ordering=self.ordered),
        )


@dataclass
class Waiting:
    """A request in a queue."""

    tag: int
    rows: int
    width: int  # of its tensor: others do not share a batch
    queued: int
    due: int | None  # when its time is over; None once that has been seen to, or when there is no such time
    yields: bool = False
    deadline: int = 0  # of its client; 0 for none

    def ends(self, adaptive: bool) -> int:
        """When it must have been executed: with an eighth of its client's time to spare, and before it is refused."""
        end = self.deadline - (self.deadline - self.queued) // 8 if self.deadline else NEVER
        return min(end, self.due) if adaptive and self.due is not None and not self.yields else end


@dataclass
class Level:
    """One priority level: its policy, and the requests that wait."""

    policy: QueuePolicySpec
    in_time: list[Waiting] = field(default_factory=list)
    beyond: list[Waiting] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.in_time) + len(self.beyond)

    def allowed(self, timeout_us: int) -> int:
        """Microseconds that a request with this timeout may wait; 0 for any number."""
        default = self.policy.timeout_us
        if not self.policy.overridable or not timeout_us:
            return default
        return min(timeout_us, default) if default else timeout_us


class QueueModel:
    """A queue by its rules."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.levels = [Level(each) for each in policy.levels]
        self.held = policy.held
        self.closed = False
        self.delay = Delay()
        self.by_shape = False

    @property
    def waiting(self) -> list[Waiting]:
        """All, in the order of service: level by level, in each those in time first, each in the order of arrival."""
        return [request for level in self.levels for request in level.in_time + level.beyond]

    def push(
        self, tag: int, rows: int, width: int, now: int, priority: int, timeout_us: int, deadline: int = 0
    ) -> str | None:
        """Queue a request; a word of why it was refused."""
        if self.closed:
            return "closed"
        if self.policy.max_queue and len(self.waiting) >= self.policy.max_queue:
            return "lane full"
        number = priority if 1 <= priority <= len(self.levels) else self.policy.default_level
        level = self.levels[number - 1]
        if level.policy.max_size and len(level) >= level.policy.max_size:
            return "Exceeds maximum queue size"
        allowed = level.allowed(timeout_us)
        due = now + allowed * 1000 if allowed else None
        level.in_time.append(Waiting(tag, rows, width, now, due, level.policy.yields, deadline))
        self.delay.arrived(now)
        return None

    def remove(self, tag: int) -> bool:
        """The client of a request has gone."""
        for level in self.levels:
            for queue in (level.in_time, level.beyond):
                for request in queue:
                    if request.tag == tag:
                        queue.remove(request)
                        return True
        return False

    def expire(self, now: int) -> list[int]:
        """The requests that are refused because their time is over; others whose time is over go behind their level."""
        over = [
            (request.due, level, request)
            for level in self.levels
            for request in level.in_time
            if request.due is not None and request.due <= now
        ]
        refused = []
        for _, level, request in sorted(over, key=lambda each: each[0]):
            level.in_time.remove(request)
            if request.yields:
                level.beyond.append(request)
            else:
                refused.append(request.tag)
        return refused

    def take(self, now: int, idle: int = 0) -> list[int]:
        """The requests that go to an instance that asks, while so many others are idle."""
        count = self.plan(now, idle)[0]
        if count:
            self.delay.take()
        taken = self.waiting[:count]
        for request in taken:
            self.remove(request.tag)
        if self.by_shape and not self.policy.ordered:
            taken += self.gathered(taken)
        return [request.tag for request in taken]

    def ends_by_shape(self, candidates: list[Waiting]) -> bool:
        """Whether what follows them would fit but for its shape."""
        following = self.waiting[len(candidates) : len(candidates) + 1]
        rows = sum(request.rows for request in candidates)
        full = rows >= (
            self.policy.max_rows if self.policy.longest_ns else min(self.policy.largest, self.policy.max_rows)
        )
        return not full and any(
            each.width != candidates[0].width and rows + each.rows <= self.policy.max_rows for each in following
        )

    def gathered(self, batch: list[Waiting]) -> list[Waiting]:
        """Requests that join from behind others: of the batch's shape, of the first one's priority, in order."""
        first = self.waiting[0]
        queue = next(queue for level in self.levels for queue in (level.in_time, level.beyond) if first in queue)
        joined: list[Waiting] = []
        rows, looks = sum(request.rows for request in batch), LOOKS
        for request in list(queue):
            if not looks or rows >= self.policy.max_rows:
                break
            looks -= 1
            if request.width == batch[0].width:
                rows += request.rows
                if rows > self.policy.max_rows:
                    break
                queue.remove(request)
                joined.append(request)
                looks += LOOKS
        return joined

    def plan(self, now: int, idle: int = 0) -> tuple[int, int]:
        """(how many form a batch, when to ask again if none do)."""
        waiting = self.waiting
        self.by_shape = False  # another shape closes the batch, and nothing else does
        if self.held and not self.closed:
            if len(waiting) < self.held:
                return 0, NEVER
            self.held = 0
        if not waiting:
            return 0, NEVER
        if not self.policy.batching:
            return 1, NEVER
        self.delay.ask(len(waiting), now)
        candidates, complete = self.candidates(waiting)
        due = min(request.queued for request in candidates) + self.policy.longest_ns
        if self.policy.longest_ns and (now >= due or self.closed):
            self.by_shape = self.ends_by_shape(candidates)
            return len(candidates), NEVER
        early = self.leaving_early(candidates, waiting)
        if early:
            return early, NEVER
        rows = sum(request.rows for request in candidates)
        if complete or rows > self.policy.largest or not self.policy.longest_ns:
            self.by_shape = self.ends_by_shape(candidates)
            return len(candidates), NEVER
        if self.policy.adaptive:
            due = min(due, self.delay.due(len(candidates), idle=idle, rows=rows))
        end = min(request.ends(self.policy.adaptive) for request in candidates)
        if end != NEVER:
            due = min(due, self.delay.batches.latest(rows, end))
        return (len(candidates), NEVER) if now >= due else (0, due)

    def leaving_early(self, candidates: list[Waiting], waiting: list[Waiting]) -> int:
        """How many go while the delay is not over, by Triton's rule."""
        sums = [sum(request.rows for request in waiting[:count]) for count in range(len(waiting) + 1)]
        for count in range(len(candidates), 0, -1):
            if sums[count] in (self.policy.preferred or (self.policy.max_rows,)):
                return count
        for count in range(1, len(candidates) + 1):
            if count < len(waiting) and sums[count + 1] > self.policy.largest:
                return count
        return 0

    def candidates(self, waiting: list[Waiting]) -> tuple[list[Waiting], bool]:
        """The longest prefix that may go together, and whether it can become no longer."""
        taken: list[Waiting] = []
        rows = 0
        for request in waiting:
            if taken and (rows + request.rows > self.policy.max_rows or request.width != taken[0].width):
                return taken, True
            taken.append(request)
            rows += request.rows
            if rows >= self.policy.max_rows:
                return taken, True
        return taken, False
