"""Histories of single structures of the native code, compared with models of these in Python.

They are made before a simulation begins: nothing else happens, and there is memory.
"""

from __future__ import annotations

import traceback
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from inferd.backends.api import BackendError, InstanceSpec, ResourceSpec
from inferd.backends.python.worker import _strings
from inferd.server.engine.instances.resources import Resources
from tests.native.probe import TimersProbe
from tests.native.queue_play import Dispatchers, Queues
from tests.native.slots_model import play
from tests.simulation.kind import serialize_strings
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 60
TIMERS = 100  # more than there is room for at first
ELEMENTS = (b"", b"x", b"ab\0", "größe".encode(), bytes(300))
DEVICES = 2


def make_histories(seed: int) -> None:
    """Some of each kind.

    Raises:
        Violation: a structure does something else than its model.
    """
    random = Random(f"{seed} histories")
    kinds: tuple[tuple[int, Callable[[Random], None]], ...] = (
        (2, lambda random: play(random, random.randint(1, STEPS))),
        (2, lambda random: Queues(random).play(STEPS)),
        (2, lambda random: Queues(random, waits=True).play(STEPS)),
        (2, lambda random: Dispatchers(random).play(STEPS)),
        (1, play_timers),
        (1, play_resources),
        (2, play_strings),
    )
    for times, history in kinds:
        for _ in range(times):
            try:
                history(random)
            except AssertionError as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                raise Violation(f"{place.name}: {error or place.line}") from error


def play_timers(random: Random) -> None:
    """What is due comes out once, in the order of times, then as it was set."""
    probe = TimersProbe(TIMERS)
    model: dict[int, tuple[int, int]] = {}  # when it is due, and when it was set
    for moment in range(3 * STEPS):
        number, now = random.randrange(TIMERS), random.randrange(30)
        what = random.random()
        if what < 0.7:
            probe.set(number, now)
            model[number] = (now, moment)
        elif what < 0.9:
            probe.clear(number)
            model.pop(number, None)
        else:
            expected = sorted((n for n, (due, _) in model.items() if due <= now), key=lambda n: model[n])
            assert probe.due(now) == expected
            for each in expected:
                del model[each]
    assert probe.due(30) == sorted(model, key=lambda n: model[n])


def play_resources(random: Random) -> None:
    """There is as much of each resource as is configured, or as the instance needs that needs the most."""
    limit = random.choice((0, 0, 3))
    resources = Resources({("R", None): limit} if limit else {})
    claims: list[tuple[object, int, int]] = []  # with the device and what is needed there
    for _ in range(STEPS // 2):
        if claims and random.random() < 0.4:
            resources.forget(claims.pop(random.randrange(len(claims)))[0])  # type: ignore[arg-type]
            continue
        device, count = random.randrange(DEVICES), random.randint(1, 5)
        spec = InstanceSpec("i", "GPU", device, resources=(ResourceSpec("R", count),))
        try:
            claims.append((resources.claim(spec), device, count))
        except BackendError:
            assert limit
            assert count > limit
        needed = Counter[tuple[str, int]]()
        for _, at, each in claims:
            needed["R", at] = max(needed["R", at], each)
        for key, pool in resources._pools.items():
            assert needed[key] == 0 or pool.total == (limit or needed[key]), f"{pool.total} of {key}, {needed} needed"
            assert pool.free == pool.total
        assert resources.waiting == 0


def play_strings(random: Random) -> None:
    """Workers read and write tensors of strings as anybody does."""
    strings = random.choices(ELEMENTS, k=random.randrange(6))
    data = serialize_strings(strings)
    assert _strings.pack(strings) == data
    assert _strings.unpack(data) == strings
    cut = data[: random.randrange(len(data) + 1)]
    whole = {sum(4 + len(each) for each in strings[:count]) for count in range(len(strings) + 1)}
    assert (_strings.unpack(cut) is not None) == (len(cut) in whole)
