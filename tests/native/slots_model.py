"""What sequence batching should do, in plain Python, and histories that compare the policy with it.

The model says what `_native/sequences/slots.pyx` documents, in the plainest way. Both are driven through the same
random histories of arrivals, batches, answers, cancellations, timeouts and idle times, by a fake clock.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from random import Random

from inferd.backends.api import (
    InstanceSpec,
    ModelSpec,
    QueuePolicySpec,
    QueueSpec,
    SequenceSpec,
    StateSpec,
    SuppliedSpec,
    TensorSpec,
)
from tests.native.probe import SlotsProbe

NEVER = (1 << 63) - 1
CANCELLED, UNAVAILABLE = 1, 14
CLIENT, IDLE, CANCEL, STREAM, REPLACED, TIMEOUT = 1, 2, 3, 4, 5, 6
NOTICE = -1
NO_LIMITS = QueuePolicySpec()
OWNER = 1000  # names below it are of nobody; those of one thousand are of one caller
HOLDS = ("TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER")

START_TEXT = "must specify the START flag on the first request of the sequence"
ENDED = ": the sequence was ended "
ENDED_FOR = {  # what a refusal says of a sequence that was ended early
    IDLE: ENDED + "because no request had come for max_sequence_idle_microseconds",
    CANCEL: ENDED + "when a request of it was cancelled or its deadline passed",
    STREAM: ENDED + "with the stream that it had started on",
    TIMEOUT: ENDED + "because it had waited for a slot longer than its timeout",
}
ENOUGH = 3  # sequences of which not all reasons are forgotten, whatever their hashes are


def spec_of(
    sequence: SequenceSpec,
    max_batch_size: int,
    instance_count: int = 1,
    queue: QueuePolicySpec = NO_LIMITS,
    supplied: tuple[SuppliedSpec, ...] = (),
) -> ModelSpec:
    tensor = TensorSpec("x", "FP32", (1,))
    instances = tuple(InstanceSpec(f"m_{i}") for i in range(instance_count))
    return ModelSpec(
        "m",
        "b",
        max_batch_size=max_batch_size,
        inputs=(tensor,),
        outputs=(tensor,),
        queue=QueueSpec((queue,)),
        sequence=sequence,
        instances=instances,
        supplied=supplied,
        kept=tuple(TensorSpec(f"kept {i}", "INT64", (1,)) for i in range(len(sequence.states))),
    )


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Waiting:
    """A request in the model; NOTICE for one that tells of an end."""

    number: int
    start: bool
    end: bool
    rows: int
    queued: int
    reason: int = 0
    timeout_us: int = 0
    expires: int = 0
    stream: int = 0


@dataclass(eq=False)
class Live:
    """A sequence in the model."""

    name: int
    queue: list[Waiting] = field(default_factory=list)
    running: Waiting | None = None
    rows: int = 1
    begun: bool = False
    over: bool = False
    place: tuple[int, int] | None = None  # (slot, instance)
    ready: tuple[int, int] | None = None  # (when, the how manieth)
    idle: tuple[int, int] | None = None
    stream: int = 0  # with which it ends

    def ends_itself(self) -> bool:
        last = self.queue[-1] if self.queue else self.running
        return last is not None and last.end


class Model:
    """Sequence batching in plain Python."""

    def __init__(self, spec: ModelSpec, hold: int = 0, hold_backlog: int = 0) -> None:
        assert spec.sequence is not None
        self.policy = spec.sequence
        self.queue = spec.queue.levels[0]
        self.rows = max(1, spec.max_batch_size)
        per_instance = self.rows if self.policy.direct else self.policy.max_candidates or self.rows
        self.vacant = [(slot, instance) for slot in range(per_instance) for instance in range(len(spec.instances))]
        self.per_instance = per_instance
        self.live: list[Live] = []
        self.table: dict[int, Live] = {}
        self.backlog: list[Live] = []
        self.fallen: list[tuple[int, int]] = []
        self.closed = self.draining = False
        self.text_ids = next((each.tensor.datatype == "BYTES" for each in spec.supplied if each.kind == "CORRID"), None)
        self.hold, self.hold_backlog = hold, hold_backlog
        self.held = [bool(hold or hold_backlog)] * len(spec.instances)
        self.tied: list[Live] = []  # to streams, the latest first
        self.reasons: dict[int, int] = {}  # why sequences were ended early that have not begun again
        self.serial = count()
        self.taken: list[Live | None] = []  # whose requests the last batch has
        self.instance_of: dict[Live, int] = {}  # of what runs

    # changes

    def push(self, request: Waiting, name: int, now: int) -> str:
        found = self.table.get(name)
        if self.closed:
            return "closed"
        if self.queue.max_size and self.counts[2] >= self.queue.max_size:
            return "full"
        if self.policy.direct and request.rows > 1:
            return "must specify batch-size 1"
        if name == 0:
            return "must specify a non-zero or non-empty correlation ID"
        if self.text_ids is not None and self.text_ids != (name < 0):
            return f"data-type is '{'BYTES' if name < 0 else 'UINT64'}', but model 'm' expects"
        if self.draining and request.start:
            return "Server is stopping, scheduler for model has stopped accepting new inference requests"
        if found is None and not request.start:
            return START_TEXT
        if found is not None and self.policy.states and not request.start and request.rows != found.rows:
            return f"must have the batch size {found.rows} with which its sequence started, got {request.rows}"
        if found is None:
            if not self.vacant and self.policy.max_backlog and len(self.backlog) >= self.policy.max_backlog:
                return "Exceeds maximum queue size"
            found = self.table[name] = Live(name)
            self.live.append(found)
            self.reasons.pop(name, None)
            if self.vacant:
                found.place = min(self.vacant)
                self.vacant.remove(found.place)
            else:
                self.backlog.append(found)
        elif request.start and (found.begun or found.queue):
            self.notify(found, REPLACED, now)
        at_rest = found.running is None and not (found.queue and found.queue[0].number != NOTICE)
        if request.start:
            found.rows = request.rows
            if self.policy.ends_with_stream:
                self.tie(found, request.stream)
        found.queue.append(request)
        times = [time for time in (request.timeout_us, self.queue.timeout_us) if time]
        if found.place is None and times:
            request.expires = now + min(times) * 1000
        found.idle = None
        if request.end:
            found.over = True
            del self.table[name]
        if at_rest and found.place and not found.ready:
            self.make_ready(found, now)
        return ""

    def tie(self, sequence: Live, stream: int) -> None:
        self.tied = [each for each in self.tied if each is not sequence]
        sequence.stream = stream
        if stream:
            self.tied.insert(0, sequence)

    def notify(self, sequence: Live, reason: int, now: int) -> None:
        if self.policy.notices_end and not sequence.ends_itself():
            sequence.queue.append(Waiting(NOTICE, False, True, sequence.rows, now, reason))

    def make_ready(self, sequence: Live, now: int) -> None:
        sequence.ready = (now, next(self.serial))

    def go_on(self, sequence: Live, now: int) -> None:
        if sequence.queue:
            if sequence.place:
                self.make_ready(sequence, now)
        elif sequence.over or self.closed:
            self.end(sequence, now)
        else:
            sequence.idle = (now, next(self.serial))

    def end(self, sequence: Live, now: int) -> None:
        self.live.remove(sequence)
        self.tie(sequence, 0)
        self.table = {name: each for name, each in self.table.items() if each is not sequence}
        if sequence in self.backlog:
            self.backlog.remove(sequence)
        self.release(sequence, now)

    def release(self, sequence: Live, now: int) -> None:
        if sequence.place is None:
            return
        if self.backlog:
            following = self.backlog.pop(0)
            following.place = sequence.place
            self.make_ready(following, now)
        else:
            self.vacant.append(sequence.place)
        sequence.place = None

    def cut_short(self, sequence: Live, reason: int, now: int) -> None:
        self.table = {name: each for name, each in self.table.items() if each is not sequence}
        sequence.over = True
        self.reasons[sequence.name] = reason
        was_ready = sequence.ready is not None
        if sequence.begun or sequence.queue:
            self.notify(sequence, reason, now)
        sequence.idle = None
        if sequence.running is None and not was_ready and (sequence.place or not sequence.queue):
            self.go_on(sequence, now)

    # batches

    def take(self, instance: int, now: int) -> list[tuple[int, int, int]]:
        if self.is_held(instance):
            self.taken = []
            return []
        self.taken = self.next_direct(instance, now) if self.policy.direct else self.next_oldest(instance, now)
        return [self.give_out(each, now) if each else (0, 0, 0) for each in self.taken]

    def is_held(self, instance: int) -> bool:
        if not self.held[instance] or self.closed:
            return False
        backlog = sum(len(each.queue) for each in self.backlog)
        ready = [each for each in self.live if each.ready and each.place and each.place[1] == instance]
        waiting = self.counts[2] - backlog if self.policy.direct else len(ready)
        self.held[instance] = waiting < self.hold or backlog < self.hold_backlog
        if self.policy.direct and not self.held[instance]:
            self.held = [False] * len(self.held)
        return self.held[instance]

    def next_oldest(self, instance: int, now: int) -> list[Live | None]:
        ready = sorted(
            (each for each in self.live if each.ready and each.place and each.place[1] == instance),
            key=lambda each: each.ready[1],
        )
        return list(ready[: self.how_many(ready, now)])

    def how_many(self, ready: list[Live], now: int) -> int:
        taken: list[int] = []
        complete = False
        for each in ready:
            if taken and sum(taken) + each.queue[0].rows > self.rows:
                complete = True
                break
            taken.append(each.queue[0].rows)
            if sum(taken) >= self.rows:
                complete = True
                break
        delay = self.policy.max_queue_delay_us * 1000
        if not taken or (delay and (self.closed or now - ready[0].ready[0] >= delay)):
            return len(taken)
        preferred = self.policy.preferred_sizes or (self.rows,)
        rows = [each.queue[0].rows for each in ready]
        for n in range(len(taken), 0, -1):
            if sum(rows[:n]) in preferred:
                return n
        for n in range(1, len(taken) + 1):
            if n < len(rows) and sum(rows[: n + 1]) > max(preferred):
                return n
        return len(taken) if complete or sum(taken) > max(preferred) or not delay else 0

    def next_direct(self, instance: int, now: int) -> list[Live | None]:
        if any(self.instance_of[each] == instance for each in self.live if each.running):
            return []
        rows = {each.place[0]: each for each in self.live if each.place and each.place[1] == instance and each.queue}
        if not rows:
            return []
        waits = self.policy.max_queue_delay_us and self.policy.min_slot_utilization and not self.closed
        young = now - min(each.queue[0].queued for each in rows.values()) < self.policy.max_queue_delay_us * 1000
        if waits and young and len(rows) < self.policy.min_slot_utilization * self.per_instance:
            return []
        return [rows.get(slot) for slot in range(max(rows) + 1)]

    def give_out(self, sequence: Live, now: int) -> tuple[int, int, int]:
        request = sequence.queue.pop(0)
        sequence.ready = None
        sequence.running = request
        sequence.begun = request.number != NOTICE  # behind that its START may never run
        assert sequence.place is not None
        self.instance_of[sequence] = sequence.place[1]
        if self.policy.direct and request.end and not sequence.queue:
            self.release(sequence, now)
        return request.number, sequence.name, request.reason or (CLIENT if request.end else 0)

    # what becomes of requests

    def request_done(self, sequence: Live, now: int) -> None:
        sequence.running = None
        self.go_on(sequence, now)

    def of(self, number: int) -> Live:
        return next(each for each in self.live if any(request.number == number for request in each.queue))

    def remove(self, number: int, now: int) -> None:
        sequence = self.of(number)
        at = [request.number for request in sequence.queue].index(number)
        self.fallen += [(each.number, CANCELLED) for each in sequence.queue[at + 1 :] if each.number != NOTICE]
        del sequence.queue[at:]
        if at == 0:
            sequence.ready = None
        self.cut_short(sequence, CANCEL, now)

    def expire(self, number: int, now: int) -> None:
        sequence = self.of(number)
        if sequence.place is None:
            self.fallen += [(each.number, UNAVAILABLE) for each in sequence.queue if each.number != NOTICE]
            sequence.queue.clear()
            self.cut_short(sequence, TIMEOUT, now)

    def leave(self, stream: int, now: int) -> None:
        for each in [each for each in self.tied if each.stream == stream and self.table.get(each.name) is each]:
            self.cut_short(each, STREAM, now)

    def evict(self, now: int) -> int:
        for each in sorted((each for each in self.live if each.idle), key=lambda each: each.idle[1]):
            if now - each.idle[0] >= self.policy.max_idle_us * 1000:
                self.cut_short(each, IDLE, now)
        idle = [each.idle[0] for each in self.live if each.idle]
        if idle:
            return min(idle) + self.policy.max_idle_us * 1000
        return now + self.policy.max_idle_us * 1000 if self.live else NEVER

    def close(self, now: int) -> None:
        self.closed = True
        for each in sorted((each for each in self.live if each.idle), key=lambda each: each.idle[1]):
            self.end(each, now)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        waiting = sum(len(each.queue) for each in self.live)
        return len(self.live), len(self.backlog), waiting, len(self.vacant)


# -- both together ----------------------------------------------------------------------------------------------------


class Pair:
    """The policy and its model; whatever is done is done to both, and both must say the same.

    It also keeps its own books: which requests were accepted and answered, and in which order a sequence was run.
    """

    def __init__(self, spec: ModelSpec, hold: int = 0, hold_backlog: int = 0) -> None:
        self.probe = held_probe(spec, hold, hold_backlog)
        self.model = Model(spec, hold, hold_backlog)
        self.instances = len(spec.instances)
        self.max_rows = max(1, spec.max_batch_size)
        self.now = 1_000_000
        self.numbers = count(1)
        self.accepted: list[int] = []
        self.owner: dict[int, Live] = {}  # of each request
        self.rows: dict[int, int] = {}
        self.answered: list[int] = []
        self.executed: list[int] = []
        self.running: dict[int, dict[int, Live]] = {instance: {} for instance in range(self.instances)}
        self.gone: set[int] = set()  # sequences that go on although they were ended early
        self.told = 0  # how often it was said why

    def push(self, name: int, *, start: bool, end: bool, rows: int, timeout_us: int = 0, stream: int = 0) -> str:
        number = next(self.numbers)
        text = self.probe.push(
            number, name, self.now, start=start, end=end, rows=rows, timeout_us=timeout_us, stream=stream
        )
        waiting = Waiting(number, start, end, rows, self.now, timeout_us=timeout_us, stream=stream)
        expected = self.model.push(waiting, name, self.now)
        assert (text == "") == (expected == ""), (text, expected)
        assert expected in text
        if expected == START_TEXT:
            self.check_reason(name, text.partition(START_TEXT)[2])
        if not text:
            self.accepted.append(number)
            self.rows[number] = rows
            self.owner[number] = self.model.of(number)
            assert self.probe.expires(number) == waiting.expires
        return text

    def check_reason(self, name: int, said: str) -> None:
        """Why a sequence has ended early is said, unless it is forgotten because of another one."""
        reason = ENDED_FOR.get(self.model.reasons.get(name, 0), "")
        assert said in ("", reason)
        if reason:
            self.gone.add(name)
            self.told += bool(said)

    def take(self, instance: int) -> list[tuple[int, int, int]]:
        batch, _ = self.probe.take(instance, self.now)
        assert [(max(number, NOTICE), name, reason) for number, name, reason in batch] == self.model.take(
            instance, self.now
        )
        for (number, _, _), owner in zip(batch, self.model.taken, strict=True):
            if number:
                self.running[instance][number] = owner
        self.check_batch(batch)
        return batch

    def check_batch(self, batch) -> None:
        """No batch over its limit, and no request twice."""
        assert sum(self.rows.get(number, 1) for number, _, _ in batch) <= self.max_rows
        numbers = [number for number, _, _ in batch if number > 0]
        assert not set(numbers) & set(self.executed)
        self.executed += numbers

    def request_done(self, instance: int, key: int) -> None:
        owner = self.running[instance].pop(key)
        self.probe.request_done(key, self.now)
        self.model.request_done(owner, self.now)
        if key > 0:
            self.answered.append(key)

    def remove(self, number: int) -> None:
        self.probe.remove(number, self.now)
        self.model.remove(number, self.now)
        self.answered.append(number)

    def expire(self, number: int) -> None:
        self.probe.expire(number, self.now)
        self.model.expire(number, self.now)

    def leave(self, stream: int) -> None:
        self.probe.leave(stream, self.now)
        self.model.leave(stream, self.now)

    def drain(self) -> None:
        self.probe.drain()
        self.model.draining = True

    def evict(self) -> None:
        assert self.probe.evict(self.now) == self.model.evict(self.now)

    def waiting(self) -> list[int]:
        return [request.number for each in self.model.live for request in each.queue if request.number != NOTICE]

    def check(self) -> None:
        assert self.probe.counts == self.model.counts
        fallen = self.probe.fallen()
        assert fallen == sorted(self.model.fallen)
        self.model.fallen.clear()
        self.answered += [number for number, _ in fallen]
        places = [each.place for each in self.model.live if each.place]
        assert len(set(places)) == len(places), "two sequences share a slot"

    def finish(self) -> None:
        """Close and drain: everything that was accepted has been answered exactly once, in order."""
        self.probe.close(self.now)
        self.model.close(self.now)
        for _ in range(10_000):
            if all(self.probe.done(instance) for instance in range(self.instances)):
                break
            for instance in range(self.instances):
                self.take(instance)
                for key in list(self.running[instance]):
                    self.request_done(instance, key)
                self.check()
        assert self.probe.counts[:3] == (0, 0, 0)
        assert self.told or len(self.gone) < ENOUGH, f"nobody is told why {self.gone} have ended"
        assert sorted(self.answered) == self.accepted
        for owner in set(self.owner.values()):
            own = [number for number in self.executed if self.owner[number] is owner]
            assert own == sorted(own)


def held_probe(spec: ModelSpec, hold: int, hold_backlog: int) -> SlotsProbe:
    """With as many requests that must wait at first."""
    before = {name: os.environ.get(name) for name in HOLDS}
    os.environ.update(zip(HOLDS, (str(hold), str(hold_backlog)), strict=True))
    try:
        return SlotsProbe(spec)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def draw_spec(random: Random) -> ModelSpec:
    """A model of any policy."""
    rows = random.randint(1, 6)
    state = StateSpec(bytes(8), (1,), same_buffer=random.random() < 0.5, growable=random.random() < 0.5)
    states = (state,) * random.choice((0, 0, 1, 2))
    sequence = SequenceSpec(
        direct=random.random() < 0.5,
        max_idle_us=random.choice((5, 50)),
        max_queue_delay_us=random.choice((0, 0, 10)),
        min_slot_utilization=random.choice((0.0, 0.5, 1.0)),
        max_candidates=random.randint(0, 4),
        preferred_sizes=tuple(sorted(random.sample(range(1, rows + 1), min(rows, random.randint(0, 2))))),
        max_backlog=random.choice((0, 0, 1, 3)),
        notices_end=random.random() < 0.5,
        ends_with_stream=random.random() < 0.3,
        states=states,
    )
    supplied = [
        SuppliedSpec("STATE", TensorSpec(f"state {i}", "INT64", (1,)), source=f"kept {i}") for i in range(len(states))
    ]
    if random.random() < 0.4:
        datatype = random.choice(("UINT64", "BYTES"))
        supplied.append(SuppliedSpec("CORRID", TensorSpec("corrid", datatype, (1,))))
    queue = QueuePolicySpec(max_size=random.choice((0, 0, 2, 5)), timeout_us=random.choice((0, 3, 20)))
    return spec_of(sequence, rows, random.randint(1, 2), queue, tuple(supplied))


STEPS = (
    *("push",) * 9,
    *("take", "done", "time") * 5,
    *("remove", "expire", "evict", "evict", "leave", "leave"),
    "drain",
)


def play(random: Random, steps: int) -> None:
    """A random history, and then the end."""
    spec = draw_spec(random)
    assert spec.sequence is not None
    hold, hold_backlog = (random.choice((0, 0, 0, 0, 2)) for _ in range(2))
    pair = Pair(spec, hold, hold_backlog)
    names = [0, 1, 2, 3, 1001, 1002, -1, -2, -1001]
    if random.random() < 0.1:
        names, steps = [*range(1, 200)], 4 * steps
    for _ in range(steps):
        step = random.choice(STEPS)
        instance = random.randrange(pair.instances)
        waiting = pair.waiting()
        if step == "push":
            pair.push(
                random.choice(names),
                start=random.random() < 0.5,
                end=random.random() < 0.25,
                rows=random.choice((1, 1, 1, min(2, pair.max_rows))),
                timeout_us=random.choice((0, 7)),
                stream=random.choice((0, 1, 2, 257)),
            )
        elif step == "take" and (spec.sequence.direct or not pair.running[instance]):
            pair.take(instance)
        elif step == "done" and pair.running[instance]:
            pair.request_done(instance, random.choice(sorted(pair.running[instance])))
        elif step == "remove" and waiting:
            pair.remove(random.choice(waiting))
        elif step == "expire" and waiting:
            pair.expire(random.choice(waiting))
        elif step == "time":
            pair.now += random.choice((1, 999, 1000, 5000, 10_000, 50_000))
        elif step == "evict":
            pair.evict()
        elif step == "leave" and spec.sequence.ends_with_stream:
            pair.leave(random.choice((1, 2, 257)))
        elif step == "drain" and random.random() < 0.2:
            pair.drain()
        pair.check()
    pair.finish()
