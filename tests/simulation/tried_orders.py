"""Trials of who comes first: alarms, requests that make room in a full queue, and turns of very many clients."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

from inferd._native.shares import Turns
from inferd._native.timers import Alarm, TimersHandle
from inferd.backends.api import BatchingSpec, ModelSpec, QueuePolicySpec, QueueSpec, TensorSpec
from tests.native.probe import QueueProbe
from tests.simulation.tried_texts import expect
from tests.simulation.wire import Violation

OUSTED = 32  # of what waits, the part that makes room at a time
CLIENTS = (1, 2, 3, 4, 1 << 47)
MANY = 2600  # clients: more than are remembered that have nothing
HOUR = 3600.0


def try_alarms(random: Random) -> None:
    """An alarm rings once when it is due, unless it was moved, cancelled, or forgotten."""
    timers, rung = TimersHandle(), list[int]()
    alarms = {number: Alarm(timers, lambda number=number: rung.append(number)) for number in range(8)}
    due: dict[int, tuple[float, int]] = {}
    for moment in range(30):
        number = random.choice(sorted(alarms) or [0])
        what = random.random()
        if number in alarms and what < 0.6:
            deadline = timers.time() + random.choice((-2.0, -1.0, HOUR, math.inf, 1e12, -1e12))
            alarms[number].set(deadline)
            due[number] = (max(0.0, deadline), moment)
            if deadline == math.inf:
                del due[number]
        elif number in alarms and what < 0.75:
            alarms[number].cancel()
            due.pop(number, None)
        elif what < 0.8:
            alarms.pop(number, None)
            due.pop(number, None)
        else:
            timers.fire()
            now = timers.time()
            expected = sorted((each for each in due if due[each][0] <= now), key=lambda each: due[each])
            expect(rung, expected, "alarms that have rung")
            for each in expected:
                del due[each]
            rung.clear()
        expect(timers.count, len(due), "timers that are set")


def _probe(most: int, sizes: list[int]) -> QueueProbe:
    tensor = TensorSpec("x", "FP32", (-1,))
    levels = tuple(QueuePolicySpec(max_size=size) for size in sizes)
    spec = ModelSpec(
        "m",
        "b",
        max_batch_size=4,
        inputs=(tensor,),
        outputs=(tensor,),
        batching=BatchingSpec(),
        queue=QueueSpec(levels, len(levels)),
    )
    return QueueProbe(spec, max_queue=most)


def try_full_queues(random: Random) -> None:
    """In a full queue the client with most requests makes room for those that have fewer by two."""
    most, sizes = random.choice((0, 1, 2, 7, 100)), [random.choice((0, 1, 5)) for _ in range(random.choice((1, 2, 3)))]
    probe = _probe(most, sizes)
    waiting: dict[int, tuple[int, int]] = {}  # who, and on which level, by tag
    clients = random.choice((CLIENTS, CLIENTS, range(1, 100)))
    for tag in range(1, random.choice((40, 150))):
        what = random.random()
        if what < 0.1:
            for each in probe.take(0):
                del waiting[each]
            continue
        if what < 0.2 and waiting:
            each = random.choice(sorted(waiting))
            expect(probe.remove(each), True, f"whether request {each} was there")
            del waiting[each]
            continue
        client, level = random.choice(clients), random.randrange(len(sizes))
        if random.random() < 0.5:
            client = clients[0]
        _put(probe, waiting, tag, client, level, _room_on(waiting, level, most, sizes))
        expect(sorted(probe.pending), sorted(waiting), "requests that wait")


def _room_on(waiting: dict[int, tuple[int, int]], level: int, most: int, sizes: list[int]) -> tuple[int, ...]:
    """The levels on which somebody would have to make room; empty: there is room."""
    if sizes[level] and sum(at == level for _, at in waiting.values()) >= sizes[level]:
        return (level,)
    return tuple(range(level, len(sizes))) if most and len(waiting) >= most else ()


def _put(
    probe: QueueProbe, waiting: dict[int, tuple[int, int]], tag: int, client: int, level: int, full: tuple[int, ...]
) -> None:
    shares = Counter((who, at) for who, at in waiting.values() if at in full)
    own, largest = shares[client, level], max(shares.values(), default=0)
    refused = probe.push(tag, 1, 0, priority=level + 1, client=client)
    ousted = probe.ousted
    if len(shares) < len(CLIENTS) * 3:  # else no search for room may have been worth it
        expect(refused is not None, bool(full and largest <= own + 1), f"whether request {tag} is refused")
    if bool(ousted) != bool(full and refused is None):
        raise Violation(f"request {tag}: {refused}, and {ousted} make room, on levels {full}")
    if ousted:
        [yielding] = {waiting[each] for each in ousted}
        first = min((each for each, count in shares.items() if count == largest), key=lambda each: (-each[1], each[0]))
        expect(yielding, first, "who makes room")
        latest = sorted(each for each, its in waiting.items() if its == yielding)
        count = min((largest - own) // 2, max(len(waiting) // OUSTED, 1))
        expect(sorted(ousted), latest[-count:], "what makes room")
    for each in ousted:
        del waiting[each]
    if refused is None:
        waiting[tag] = (client, level)


def try_many_turns(random: Random) -> None:
    """Of more clients than are remembered each has its turn, none much more often than another, and in its order."""
    turns, waiting, had = Turns(), dict[int, list[int]](), Counter[int]()
    count = random.choice((70, 300, 300, 300, MANY))
    rounds, number = random.choice((1, 2)), 0
    for _ in range(rounds):
        for client in random.sample(range(count), count):
            for _ in range(random.choice((1, 1, 2))):
                number += 1
                waiting.setdefault(client, []).append(number)
                turns.put(client, (client, number))
        for _ in range(random.choice((turns.waiting, turns.waiting // 2))):
            client, taken = turns.take()
            had[client] += 1
            expect(taken, waiting[client].pop(0), f"the turn of client {client}")
            if not waiting[client]:
                del waiting[client]
    least = min((had[client] for client in waiting), default=0)
    if waiting and max(had.values(), default=0) > least + 1 + rounds:
        raise Violation(f"a client has had {max(had.values())} turns, and one that waits {least}")
    expect(turns.waiting, sum(map(len, waiting.values())), "what waits for a turn")
