"""Users register and use regions of shared memory, up to all bounds. A model says what that gives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from inferd._native.memory.shm import CUDA, SYSTEM, RegionError, Regions, Use
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

NAMES = ("a", "b", "ab", "ba", "a region with a longer name", "")
SCOPES = (1, 2, 1 << 33)
OWNERS = (0, 0, 1, 2)
PAGE = 4096
MOST = 4  # pages of a region
ALREADY_EXISTS, EXHAUSTED = 6, 8
HIGHEST = (1 << 64) - 1


@dataclass
class Entry:
    """A region as it was registered."""

    scope: int
    name: str
    key: str
    offset: int
    size: int
    owner: int
    mark: int  # with which it is filled
    uses: int = 0
    listed: bool = True


class Registrar:
    """The regions of a few users, in a registry of their own."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = random = Random(f"{simulation.outcome.seed} registrar")
        self._count, self._size = random.choice((3, 6, 12)), random.choice((6, 20, 100)) * PAGE
        self._scope_count, self._scope_size = random.choice((None, 2, 4)), random.choice((None, 5 * PAGE))
        self._regions: Regions | None = None
        self._entries: list[Entry] = []
        self._uses: list[tuple[Entry, Use]] = []
        self._marks = 0
        self._fd = -1

    @property
    def _open(self) -> Regions:
        if self._regions is None:
            self._regions = Regions(
                max_count=self._count,
                max_byte_size=self._size,
                scope_count=self._scope_count,
                scope_byte_size=self._scope_size,
            )
            self._fd = os.memfd_create("regions of users")
            os.ftruncate(self._fd, 2 * MOST * PAGE)
        return self._regions

    def act(self) -> None:
        """What some users do."""
        regions, random = self._open, self._random
        for _ in range(random.randint(1, 6)):
            deed = random.random()
            if deed < 0.45:
                self._add(regions)
            elif deed < 0.6:
                self._remove(regions)
            elif deed < 0.75:
                self._use(regions)
            elif deed < 0.9 and self._uses:
                entry, use = self._uses.pop(random.randrange(len(self._uses)))
                self._touch(entry, use)
                use.leave()
                entry.uses -= 1
            else:
                self._remove_many(regions)
            self._entries = [each for each in self._entries if each.listed or each.uses]
            self._check(regions)

    def end(self) -> None:
        """All leave, those that use regions last.

        Raises:
            Violation: something is left.
        """
        if self._regions is None:
            return
        self._regions.close()
        for entry, use in self._uses:
            self._touch(entry, use)
            use.leave()
        if self._regions.count or self._regions.byte_size:
            raise Violation(f"{self._regions.count} regions of {self._regions.byte_size} bytes are left")
        os.close(self._fd)
        self._uses.clear()
        self._regions = None

    def _listed(self, scope: int, name: str | None = None) -> list[Entry]:
        return [e for e in self._entries if e.listed and e.scope == scope and name in (None, e.name)]

    # -- what users do --

    def _add(self, regions: Regions) -> None:
        random = self._random
        scope, name, owner = random.choice(SCOPES), random.choice(NAMES), random.choice(OWNERS)
        size = random.choice((1, 100, PAGE, PAGE + 1, MOST * PAGE))
        offset = random.choice((0, 8, PAGE, PAGE + 64, MOST * PAGE))
        self._marks += 1
        entry = Entry(scope, name, f"/key {self._marks}", offset, size, owner, self._marks % 251)
        refused, said = self._refusal(entry)
        trusted, writable, reopened = (random.random() < 0.5 for _ in range(3))
        try:
            regions.add_system(
                scope,
                name,
                entry.key,
                self._fd,
                offset,
                size,
                trusted=trusted,
                writable=writable,
                reopened=reopened,
                owner=owner,
            )
        except RegionError as error:
            if error.status != refused or said not in str(error):
                raise Violation(f"{entry}: {error.status} '{error}', not {refused} '{said}'") from error
            return
        if refused:
            raise Violation(f"{entry} is registered, and '{said}' was expected")
        self._entries.append(entry)

    def _refusal(self, entry: Entry) -> tuple[int, str]:
        """The status and what the text says with which it has to be refused; 0: it has not."""
        own = [each for each in self._entries if each.scope == entry.scope]
        count, size = len(own), sum(each.size for each in own)
        most = self._count if self._scope_count is None else self._scope_count
        most_size = self._size if self._scope_size is None else self._scope_size
        if self._listed(entry.scope, entry.name):
            return ALREADY_EXISTS, f"shared memory region '{entry.name}' already in manager"
        if count >= most or size + entry.size > most_size:
            told = f"{count} regions of {size} bytes are registered or in use, expected at most {most} of {most_size}"
            return EXHAUSTED, told
        if len(self._entries) >= self._count or sum(each.size for each in self._entries) + entry.size > self._size:
            return EXHAUSTED, f"region '{entry.name}' of {entry.size} bytes: all users together have as much"
        return 0, ""

    def _remove(self, regions: Regions) -> None:
        random = self._random
        scope, name, kind = random.choice(SCOPES), random.choice(NAMES), random.choice((SYSTEM, SYSTEM, CUDA))
        found = self._listed(scope, name) if kind == SYSTEM else []
        if regions.remove(scope, kind, name) != bool(found):
            raise Violation(f"region '{name}' of {scope} and kind {kind} is there: {found}, and not so when removed")
        for each in found:
            each.listed = False

    def _remove_many(self, regions: Regions) -> None:
        random = self._random
        if random.random() < 0.5:
            owner = random.choice(OWNERS)
            gone = [each for each in self._entries if each.listed and owner and each.owner == owner]
            count = regions.remove_owned(owner)
        else:
            scope, kind = random.choice(SCOPES), random.choice((SYSTEM, SYSTEM, CUDA))
            gone = self._listed(scope) if kind == SYSTEM else []
            count = regions.remove_all(scope, kind)
        if count != len(gone):
            raise Violation(f"{count} regions are removed, and not {gone}")
        for each in gone:
            each.listed = False

    def _use(self, regions: Regions) -> None:
        scope, name = self._random.choice(SCOPES), self._random.choice(NAMES)
        found = self._listed(scope, name)
        try:
            use = Use(regions, scope, name)
        except KeyError:
            if found:
                raise Violation(f"region '{name}' of {scope} is not found, and is {found}") from None
            return
        if not found:
            raise Violation(f"region '{name}' of {scope} is found, and is not there")
        found[0].uses += 1
        self._uses.append((found[0], use))

    def _touch(self, entry: Entry, use: Use) -> None:
        """Read what the object has where the region is, and have what lies beyond its end refused."""
        os.pwrite(self._fd, bytes([entry.mark]) * entry.size, entry.offset)
        if use.read(0, entry.size) != bytes([entry.mark]) * entry.size:
            raise Violation(f"{entry} has other bytes")
        offset = self._random.choice((0, 1, entry.size - 1, entry.size, entry.size + 1, -1))
        size = self._random.choice((0, 1, entry.size - offset, entry.size - offset + 1, entry.size, -1))
        start, length = offset & HIGHEST, size & HIGHEST
        said = ""
        if start >= entry.size:
            said = f"expected less than {entry.size}, got {offset}"
        elif length > HIGHEST - start:
            said = f"byte_size ({length}) + offset ({start}) exceeds maximum value ({HIGHEST})"
        elif start + length > entry.size:
            said = f"expected at most {entry.size}, got {start} + {length}"
        told = use.refusal(offset, size)
        if bool(told) != bool(said) or said not in told:
            raise Violation(f"{entry}: {size} bytes at {offset} are refused with '{told}', not '{said}'")

    def _check(self, regions: Regions) -> None:
        """What is told of them."""
        size = sum(each.size for each in self._entries)
        if (regions.count, regions.byte_size) != (len(self._entries), size):
            raise Violation(f"{regions.count} regions of {regions.byte_size} bytes, not {self._entries}")
        scope = self._random.choice(SCOPES)
        told = [(each.name, each.key, each.offset, each.byte_size) for each in regions.entries(scope, SYSTEM)]
        there = sorted((each.name, each.key, each.offset, each.size) for each in self._listed(scope))
        if told != there or regions.entries(scope, CUDA):
            raise Violation(f"regions of {scope}: {told}, not {there}")
        name = self._random.choice(NAMES)
        found, known = regions.find(scope, name), self._listed(scope, name)
        if (found.key if found is not None else "") != (known[0].key if known else ""):
            raise Violation(f"region '{name}' of {scope} is found as {found}, not {known}")
