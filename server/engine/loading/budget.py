"""The memory budget decides which load begins, and which models leave for it.

This module only decides: it has no I/O, no clock, no event loop. The caller reports events (`claim`, `leave`, `left`,
`late`, `end`), and after each of them does what `look` decides.

A *claim* is a load that needs room: for its model, and for the models of its steps. Its states:

    waiting → running → ended          it has begun when `look` says so, with its room reserved
    waiting → ended                    refused, or no longer wanted, or its model was loaded otherwise

Models that a running claim has reserved, or uses, do not leave. A *leaving* model counts until it has left, or is late.

Claims begin in the order in which they came, but first those for which running claims wait. A claim for which too
little could leave waits until running loads end. Later claims go ahead of it if they do not delay it: those that fit
beside it once these loads have ended ("backfilling", as in batch systems).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

AHEAD: Final = 64
"""The most waiting claims that one decision considers; later ones wait for these."""

Use = tuple[bool, int]
"""Whether a model has running requests, and when it was used last: the smallest leaves first."""


class Stay(enum.Enum):
    """Whether a loaded model may leave."""

    MAY_LEAVE = "may leave"
    FOR_NOW = "stays for now"  # it has live sequences
    PINNED = "stays"


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded.

    Attributes:
        size: bytes.
        steps: the models of an ensemble's steps.
    """

    size: int
    steps: frozenset[str] = frozenset()
    stay: Stay = Stay.MAY_LEAVE


Residents = Mapping[str, Resident]
Waiters = Mapping[str, Collection[str]]


@dataclass(eq=False, slots=True)
class Claim:
    """A load that needs room.

    Attributes:
        sizes: bytes of all models that are loaded together, by name.
        asked: the model that is to be loaded; the others are those of its steps.
        reloads: it also begins if all are loaded, to reload them; else it ends when `asked` is loaded.
        elders: running claims for which it waits; None until it must wait.
    """

    sizes: Mapping[str, int]
    asked: str
    reloads: bool = False
    elders: frozenset[Hashable] | None = None


@dataclass(slots=True)
class Leaving:
    """A model that was told to leave, and its running `ends`, each reported by `leave`."""

    size: int
    ends: int = 1
    late: bool = False


@dataclass(slots=True)
class Decision:
    """The next actions.

    Attributes:
        begin: claims that are running from now on.
        ready: claims that have ended, because their models are loaded.
        refuse: claims that have ended because they do not fit beside what stays, each with the bytes that are lacking.
        leave: models that must leave, ensembles before the models of their steps.
        over: bytes beyond the budget that cannot be freed.
    """

    begin: list[Hashable] = field(default_factory=list)
    ready: list[Hashable] = field(default_factory=list)
    refuse: dict[Hashable, int] = field(default_factory=dict)
    leave: list[str] = field(default_factory=list)
    over: int = 0


class Budget:
    """Shares bytes among models.

    Args:
        limit: how many.

    Attributes:
        waiting: claims in order.
        running: claims with reserved room; only `begin` and `end` change it.
        reserved: bytes that running claims have reserved, by model.
        reserved_bytes: their sum.
        leaving: models that leave.
    """

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self.waiting: dict[Hashable, Claim] = {}
        self.running: dict[Hashable, Claim] = {}
        self.reserved: dict[str, int] = {}
        self.reserved_bytes = 0
        self.leaving: dict[str, Leaving] = {}
        self._reservations: dict[str, list[int]] = {}  # each running claim's, by model

    # -- what happens --

    def claim(self, key: Hashable, sizes: Mapping[str, int], *, asked: str, reloads: bool = False) -> None:
        """A load needs room; see `Claim`. The key must be unique."""
        assert key not in self.waiting
        assert key not in self.running
        self.waiting[key] = Claim(sizes, asked, reloads)

    def end(self, key: Hashable) -> None:
        """A load has ended, or is no longer wanted."""
        self.waiting.pop(key, None)
        claim = self.running.pop(key, None)
        for name, size in claim.sizes.items() if claim is not None else ():
            self._reservations[name].remove(size)
            self._reserve(name)

    def leave(self, name: str, size: int) -> None:
        """A model was told to leave for another reason."""
        if name in self.leaving:
            self.leaving[name].ends += 1
        else:
            self.leaving[name] = Leaving(size)

    def left(self, name: str) -> None:
        """One end of a model has finished: the model has left, or stays after all."""
        leaving = self.leaving[name]
        leaving.ends -= 1
        if not leaving.ends:
            del self.leaving[name]

    def late(self, name: str) -> None:
        """Loads no longer wait for a model to leave: it does not count any more."""
        if name in self.leaving:
            self.leaving[name].late = True

    # -- what follows --

    def begin(self, key: Hashable) -> None:
        """A waiting claim runs from now on."""
        claim = self.running[key] = self.waiting.pop(key)
        for name, size in claim.sizes.items():
            self._reservations.setdefault(name, []).append(size)
            self._reserve(name)

    def _reserve(self, name: str) -> None:
        """The reservations of this model have changed."""
        self.reserved_bytes -= self.reserved.pop(name, 0)
        if sizes := self._reservations[name]:
            self.reserved[name] = max(sizes)
            self.reserved_bytes += self.reserved[name]
        else:
            del self._reservations[name]

    def may_leave(self, name: str, residents: Residents) -> bool:
        """Whether a leaving model still may leave: the last check before requests stop finding it."""
        found = residents.get(name)
        if found is None or found.stay is not Stay.MAY_LEAVE:
            return False
        return name not in self.reserved and not any(name in other.steps for other in residents.values())

    def look(
        self,
        residents: Residents,
        used: Callable[[str], Use] = lambda _: (False, 0),
        waiters: Waiters = MappingProxyType({}),
    ) -> Decision:
        """Decide what happens next.

        Args:
            residents: the models that requests find now.
            used: returns when a model was used last.
            waiters: the models whose loads wait for the load of another, because they call it, by that one.
        """
        return _Look(self, residents, used, waiters).decide()

    def holders(self, key: Hashable, residents: Residents) -> list[str]:
        """The models beside the claim's own that hold the room for which it waits, for an error's text."""
        own = self.waiting[key].sizes
        stay = {name for name, each in residents.items() if each.stay is not Stay.MAY_LEAVE}
        return sorted((stay | set(self.reserved) | set(self.leaving)) - set(own))


class _Look:
    """One decision."""

    def __init__(
        self,
        budget: Budget,
        residents: Residents,
        used: Callable[[str], Use],
        waiters: Waiters,
    ) -> None:
        self._budget = budget
        self._residents = dict(residents)
        for name in budget.leaving:
            self._residents.pop(name, None)
        self._used = used
        self._waiters = waiters
        self._decision = Decision()
        self._kept = set(budget.reserved)
        self._taken = budget.reserved_bytes + sum(each.size for each in self._residents.values())
        for name in budget.reserved.keys() & self._residents.keys():
            self._taken -= min(budget.reserved[name], self._residents[name].size)
        self._freeing = 0
        for each in budget.leaving.values():
            self._taken += 0 if each.late else each.size
            self._freeing += 0 if each.late else each.size
        self._promised: dict[str, int] = {}  # the models of earlier claims, which begin as soon as others have left
        self._promised_bytes = 0  # that these do not have yet
        self._blocked: Claim | None = None  # the first claim that waits for running loads
        self._order: list[tuple[str, list[str]]] | None = None

    def decide(self) -> Decision:
        for key, claim in tuple(self._budget.waiting.items()):  # before one of these models is told to leave
            if not claim.reloads and claim.asked in self._residents:
                del self._budget.waiting[key]
                self._decision.ready.append(key)
        pinned = _sizes(self._residents, Stay.PINNED)
        held = 0
        waiting = self._budget.waiting
        first = [key for key, claim in waiting.items() if claim.asked in self._waiters] if self._waiters else []
        for key in dict.fromkeys((*first, *waiting)):
            claim = waiting[key]
            if held == AHEAD:
                break
            if (lack := self._lack(claim, pinned)) > 0:
                del waiting[key]
                self._decision.refuse[key] = lack
            else:
                self._admit(key, claim, pinned)
                held += key in waiting
        over = self._taken - self._freeing - self._budget.limit
        if over > 0:
            _, over = self._dismiss(over, partly=True)
            self._decision.over = max(0, over)
        return self._decision

    def _lack(self, claim: Claim, pinned: Mapping[str, int]) -> int:
        """Bytes that the claim will always lack, beside models that never leave and loads that wait for it."""
        beside = [each.sizes for each in self._that_wait_for(claim).values()]
        own = {name: self._size(name) for name in claim.sizes}  # these stay for it
        lack = sum(_largest([pinned, claim.sizes, own, *beside]).values()) - self._budget.limit
        return lack if lack > 0 and self._new(claim) else 0

    def _that_wait_for(self, claim: Claim) -> dict[Hashable, Claim]:
        """The running claims that cannot end before this one, because their models wait for its model, or for others
        that wait for it."""
        found: dict[Hashable, Claim] = {}
        seen = {claim.asked}
        left = [claim.asked]
        while left:
            for waiter in self._waiters.get(left.pop(), ()):
                loads = {key: each for key, each in self._budget.running.items() if waiter in each.sizes}
                found.update(loads)
                more = {waiter}.union(*(each.sizes for each in loads.values())) - seen
                seen |= more
                left.extend(more)
        return found

    def _begin(self, key: Hashable, claim: Claim) -> None:
        self._taken += self._new(claim)
        self._budget.begin(key)
        self._kept.update(claim.sizes)
        self._decision.begin.append(key)

    def _admit(self, key: Hashable, claim: Claim, pinned: Mapping[str, int]) -> None:
        """Begin a claim, make models leave for it, or let it wait."""
        new = self._new(claim, self._promised)
        lacking = self._taken + self._promised_bytes + new - self._budget.limit
        # what waits for it holds up the blocked one, too
        is_urgent = claim.asked in self._waiters and bool(self._that_wait_for(claim))
        goes_ahead = self._blocked is None or is_urgent or self._goes_ahead(claim, pinned)
        if goes_ahead and (lacking <= 0 or not self._new(claim)) and not self._is_leaving(claim):
            self._begin(key, claim)
            return
        if goes_ahead:
            enough, _ = self._dismiss(lacking - self._freeing, but=claim.sizes)
            if enough:
                self._promised_bytes += new
                self._promised = _largest([self._promised, claim.sizes])
            elif self._blocked is None:
                self._blocked = claim
                if claim.elders is None:
                    claim.elders = frozenset(self._budget.running)
        self._kept.update(claim.sizes)

    def _goes_ahead(self, claim: Claim, pinned: Mapping[str, int]) -> bool:
        """Whether a later claim fits beside the blocked one when that one no longer waits for others."""
        assert self._blocked is not None
        elders = (self._blocked.elders or frozenset()) - self._that_wait_for(self._blocked).keys()
        younger = [each.sizes for key, each in self._budget.running.items() if key not in elders]
        future = _largest([pinned, self._blocked.sizes, claim.sizes, self._promised, *younger])
        return sum(future.values()) <= self._budget.limit

    def _is_leaving(self, claim: Claim) -> bool:
        """Whether one of its models is leaving; it is loaded again when it has left."""
        return any(name in self._budget.leaving and not self._budget.leaving[name].late for name in claim.sizes)

    def _size(self, name: str) -> int:
        found = self._residents.get(name)
        return found.size if found else 0

    def _new(self, claim: Claim, promised: Mapping[str, int] = MappingProxyType({})) -> int:
        """The bytes of a claim's models beyond those that they have, or that are reserved or promised for them."""
        return sum(
            max(0, size - max(self._size(name), self._budget.reserved.get(name, 0), promised.get(name, 0)))
            for name, size in claim.sizes.items()
        )

    # -- who leaves --

    def _dismiss(self, lacking: int, but: Collection[str] = (), *, partly: bool = False) -> tuple[bool, int]:
        """Make models leave until `lacking` bytes will be free: all of them or, unless `partly`, none.

        Args:
            but: they stay, as do the models that other claims keep.

        Returns:
            Whether they suffice, and the bytes still lacking.
        """
        going: dict[str, None] = {}
        for name, group in self._candidates() if lacking > 0 else ():
            if lacking <= 0:
                break
            if name in going or not self._kept.isdisjoint(group) or not set(but).isdisjoint(group):
                continue
            for each in group:
                if each not in going:
                    going[each] = None
                    lacking -= self._size(each)
        if lacking > 0 and not partly:
            return False, lacking
        for name in going:
            size = self._size(name)
            self._budget.leaving[name] = Leaving(size)
            self._freeing += size
            self._decision.leave.append(name)
        for name in going:
            del self._residents[name]
        if going:
            self._order = None
        return lacking <= 0, lacking

    def _candidates(self) -> list[tuple[str, list[str]]]:
        """The models that may leave, least recently used first, each with those that leave with it: the ensembles above
        it, outer ones first, and itself."""
        if self._order is None:
            users: dict[str, list[str]] = {}
            for name, each in self._residents.items():
                for step in each.steps:
                    users.setdefault(step, []).append(name)
            found = []
            for name, each in self._residents.items():
                group = list(_above(name, users))
                if each.size and all(self._residents[one].stay is Stay.MAY_LEAVE for one in group):
                    uses = [self._used(one) for one in group]
                    found.append(((any(busy for busy, _ in uses), max(at for _, at in uses)), name, group))
            self._order = [(name, group) for _, name, group in sorted(found)]
        return self._order


def _above(name: str, users: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """The ensembles above a model, each before the models of its steps, and the model."""
    found: dict[str, None] = {}

    def visit(each: str) -> None:
        if each not in found:
            for user in users.get(each, ()):
                visit(user)
            found[each] = None

    visit(name)
    yield from found


def _largest(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """All names of several mappings, each with its largest size."""
    found: dict[str, int] = {}
    for sizes in parts:
        for name, size in sizes.items():
            found[name] = max(size, found.get(name, 0))
    return found


def _sizes(residents: Residents, stay: Stay) -> dict[str, int]:
    """The sizes of the models that stay for this reason, and of all models of their steps."""
    found: dict[str, int] = {}
    left = [name for name, each in residents.items() if each.stay is stay]
    while left:
        name = left.pop()
        if name in residents and name not in found:
            found[name] = residents[name].size
            left.extend(residents[name].steps)
    return found
