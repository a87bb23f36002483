"""The rate limiter's resources: how much of each exists, and how much instances need to execute.

With `--rate-limit=execution_count`, as in tritonserver, an instance executes only while it holds the resources in the
`rate_limiter` of its group. `--rate-limit-resource` sets the amount of a resource; the default is the largest need of
an instance. `inferd._native.scheduling.dispatcher` does the waiting and granting.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable

from inferd._native.scheduling.limiter import ClaimHandle, RateLimiter, Resource
from inferd.backends.api import BackendError, InstanceSpec, ResourceSpec

_NUMBER = re.compile("[0-9]{1,9}")

EVERYWHERE = -1
"""The device of a global resource."""


class ResourceError(ValueError):
    """Limits that contradict each other or cannot be parsed; the text says why."""


def parse_limits(entries: Iterable[str]) -> dict[tuple[str, int | None], int]:
    """`("R1:3", "R2:2:0")` as {(name, device): count}; the device is None where none is given.

    Raises:
        ResourceError: an entry has another form, or is given twice.
    """
    found: dict[tuple[str, int | None], int] = {}
    for entry in entries:
        name, *numbers = entry.split(":")
        if not name or not 1 <= len(numbers) <= 2 or not all(map(_NUMBER.fullmatch, numbers)):
            raise ResourceError(f"expected NAME:COUNT or NAME:COUNT:DEVICE, got {entry!r}")
        key = (name, int(numbers[1]) if len(numbers) == 2 else None)
        if key in found:
            raise ResourceError(f"resource '{name}' is given twice{f' for device {numbers[1]}' if numbers[1:] else ''}")
        found[key] = int(numbers[0])
    return found


class Resources:
    """All resources of a server. Its methods may be called from any thread."""

    def __init__(self, limits: dict[tuple[str, int | None], int]) -> None:
        self._limits = limits
        self._limiter = RateLimiter()
        self._pools: dict[tuple[str, int], Resource] = {}
        self._needed: dict[tuple[str, int], dict[object, int]] = {}  # the needs of existing claims, by resource
        self._guard = threading.Lock()

    def limiter_of(self, specs: Iterable[InstanceSpec]) -> RateLimiter | None:
        """The rate limiter that all lanes share; None if none of these instances needs resources."""
        return self._limiter if any(spec.resources for spec in specs) else None

    def claim(self, spec: InstanceSpec) -> ClaimHandle:
        """The claim of an instance, which `forget` gives back.

        Raises:
            BackendError: the instance needs more than the limit.
        """
        with self._guard:
            wanted = [(self._key(spec, need), need.count) for need in spec.resources]
            for key, count in wanted:
                self._check(key, count)
            pools = [(self._pool(key, count), count) for key, count in wanted]
            claim = ClaimHandle(self._limiter, pools, spec.priority)
            for key, count in wanted:
                self._needed[key][id(claim)] = count
            return claim

    def forget(self, claim: ClaimHandle) -> None:
        """Give back the claim of an instance; a resource without limit shrinks to the largest need that is left."""
        with self._guard:
            for key, needed in self._needed.items():
                if needed.pop(id(claim), None) is not None and self._limit(key) is None:
                    self._limiter.resize(self._pools[key], max(needed.values(), default=0))

    @property
    def waiting(self) -> int:
        """How many instances wait for resources."""
        return self._limiter.waiting

    @staticmethod
    def _key(spec: InstanceSpec, need: ResourceSpec) -> tuple[str, int]:
        return need.name, EVERYWHERE if need.is_global else spec.device

    def _limit(self, key: tuple[str, int]) -> int | None:
        name, device = key
        return self._limits.get((name, device), self._limits.get((name, None)))

    def _check(self, key: tuple[str, int], count: int) -> None:
        name, device = key
        for other, needed in self._needed.items():
            if needed and other[0] == name and (other[1] == EVERYWHERE) != (device == EVERYWHERE):
                raise BackendError(f'Resource "{name}" is present as both global and device-specific resource')
        limit = self._limit(key)
        if limit is not None and limit < count:
            raise BackendError(
                f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more model '
                f"instances, the minimum required count is {count}"
            )

    def _pool(self, key: tuple[str, int], count: int) -> Resource:
        limit = self._limit(key)
        if key not in self._pools:
            self._pools[key] = Resource(key[0], count if limit is None else limit)
            self._needed[key] = {}
        pool = self._pools[key]
        if limit is None and pool.total < count:
            self._limiter.resize(pool, count)
        return pool
