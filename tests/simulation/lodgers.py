"""Others in the server's memory: somebody takes blocks and gives them back, pools are trimmed and cooled meanwhile.

All has a model: what is in a block stays there until its holder gives it back, figures are sums of what was asked for,
and a pool refuses only what does not fit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from inferd._native.memory import resource
from inferd._native.memory.resource import Lent, host
from tests.simulation.audit import free_bytes
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferd._native.memory.resource import Memory
    from tests.simulation.simulation import Simulation

MOST_KEPT = 128 << 20  # as it is at the start of a server
KEPT = (0, 1 << 12, 1 << 16, 1 << 20, 40 << 20, MOST_KEPT)
LOOKS = 4  # at which memory was free that is idle
GRAIN = 256
SLAB = 1 << 21  # pools grow by so many bytes, or a multiple of these
SLACK = 4  # a block of the host is larger than was asked for by one part of so many, and GRAIN
LARGEST = 48 << 20
LODGERS = 12
SHOWN = 64  # bytes at each end of a block that are looked at


@dataclass
class Lodger:
    """A block, and what its holder has written to its ends."""

    place: str
    lent: Lent
    size: int
    mark: int


class Lodgers:
    """Those of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(f"{simulation.outcome.seed} lodgers")
        self._lodgers: list[Lodger] = []
        self._marks = 0
        self._exact = not simulation.preempts  # no other thread runs between two lines of this class

    def act(self) -> str:
        """Take a block, give one back, or have the server look after its memory; in words."""
        deed = self._random.random()
        if deed < 0.5 and len(self._lodgers) < LODGERS:
            return self._take()
        if deed < 0.75 and self._lodgers:
            lodger = self._lodgers.pop(self._random.randrange(len(self._lodgers)))
            self._leave(lodger)
            return f"gives {lodger.size} bytes back"
        look: Callable[[], str] = self._random.choice((self._keep, self._cool, self._cool, self._trim))
        return look()

    def end(self) -> None:
        """All leave."""
        while self._lodgers:
            self._leave(self._lodgers.pop())
        resource.keep_at_most(MOST_KEPT)

    # -- blocks --

    def _take(self) -> str:
        place, memory = self._random.choice(self._places())
        usage = memory.usage()
        size = self._draw_size(usage["limit"])
        try:
            lent = memory.take(size)
        except MemoryError as error:
            self._check_refusal(place, memory, size, str(error))
            return f"has no {size} bytes: {error}"
        most = size + (size // SLACK if place == "host" else 0) + GRAIN
        if not size <= lent.size <= max(most, 2 * GRAIN) or lent.address % GRAIN:
            raise Violation(f"memory '{place}': {size} bytes asked for, and {lent.size} at {lent.address:#x}")
        self._check_sum(place, memory, usage, lent.size)
        self._marks = self._marks % 251 + 1
        lodger = Lodger(place, lent, size, self._marks)
        for at, length in self._ends(lodger):
            self._write(lodger, at, bytes([lodger.mark]) * length)
        self._lodgers.append(lodger)
        return f"takes {size} bytes of '{place}'"

    def _places(self) -> list[tuple[str, Memory]]:
        return [("host", host()), *self._simulation.graphics.gpus.pools().items()]

    def _draw_size(self, limit: int) -> int:
        random = self._random
        if limit and random.random() < 0.1:
            return limit + random.choice((-4096, -1, 0, 1, 4096))
        highest = 1 << random.randint(0, 20)
        return min(max(0, highest + random.choice((-1, 0, 1, random.randrange(highest)))), LARGEST)

    def _check_refusal(self, place: str, memory: Memory, size: int, text: str) -> None:
        usage = memory.usage()
        own = sum(each.lent.size for each in self._lodgers if each.place == place)
        fits = -(-max(size, 1) // SLAB) * SLAB <= usage["limit"] and own == usage["used"] == 0
        told = f"asked for {size} bytes; {usage['used']} are in use, {usage['held']} held of at most {usage['limit']}"
        if self._simulation.is_faulty or self._simulation.graphics.is_moody or not self._exact:
            return
        if fits or place == "host" or told not in text:
            raise Violation(f"memory '{place}' refuses {size} bytes with {usage}: {text}")

    def _check_sum(self, place: str, memory: Memory, before: dict[str, int], size: int) -> None:
        now = memory.usage()
        if self._exact and now["used"] - before["used"] != size:
            raise Violation(f"memory '{place}': {before}, and with {size} bytes more {now}")
        if now["used"] > now["held"] or now["peak"] < now["used"]:
            raise Violation(f"memory '{place}': {now}")

    def _leave(self, lodger: Lodger) -> None:
        for at, length in self._ends(lodger):
            found = self._read(lodger, at, length)
            if found != bytes([lodger.mark]) * length:
                raise Violation(f"a block of {lodger.size} bytes of '{lodger.place}' has changed at {at}: {found!r}")
        lodger.lent = None  # type: ignore[assignment]

    @staticmethod
    def _ends(lodger: Lodger) -> list[tuple[int, int]]:
        size = lodger.lent.size
        return [(0, min(size, SHOWN)), (max(0, size - SHOWN), min(size, SHOWN))]

    def _write(self, lodger: Lodger, at: int, data: bytes) -> None:
        if lodger.place.startswith("gpu"):
            self._simulation.graphics.stub.write(lodger.lent.address + at, data)
        else:
            ctypes.memmove(lodger.lent.address + at, data, len(data))

    def _read(self, lodger: Lodger, at: int, length: int) -> bytes:
        if lodger.place.startswith("gpu"):
            return self._simulation.graphics.stub.read(lodger.lent.address + at, length)
        return ctypes.string_at(lodger.lent.address + at, length)

    # -- what the server does with its memory --

    def _keep(self) -> str:
        size = self._random.choice(KEPT)
        resource.keep_at_most(size)
        return f"has the server keep {size} bytes"

    def _cool(self) -> str:
        """Memory is given back that was free at so many looks, and nothing else."""
        looks = self._random.choice((1, LOOKS))
        held, free, dropped = host().usage()["held"], sum(free_bytes()), 0
        for _ in range(looks):
            dropped += resource.cool()
            if self._exact and not resource.is_still():
                raise Violation("memory has just been looked after, and is not at rest")
        left, less = sum(free_bytes()), held - host().usage()["held"]
        if self._exact and (less != free - left or dropped < less or (looks == LOOKS and left)):
            raise Violation(
                f"{free} bytes were free, {left} are after {looks} looks, and {dropped} given back of {less}"
            )
        return f"{dropped} bytes are given back"

    def _trim(self) -> str:
        held = host().usage()["held"]
        dropped, less = resource.trim(), 0
        less = held - host().usage()["held"]
        if self._exact and (dropped != less or any(free_bytes())):
            raise Violation(f"{free_bytes()} bytes are free after {dropped} are given back of {less}")
        if self._exact and host().usage()["used"] < sum(e.lent.size for e in self._lodgers if e.place == "host"):
            raise Violation(f"memory 'host': {host().usage()} with lodgers {self._lodgers}")
        return f"{dropped} bytes of the host are given back"
