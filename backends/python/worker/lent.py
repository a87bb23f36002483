"""Memory of the arena that the server lends to one execution: what the EXECUTE refers to, and grants for outputs."""

from __future__ import annotations

import weakref
from typing import Any

from . import protocol as p
from .errors import TritonModelException
from .link import Link, no_memory

ALIGNMENT = 64  # of outputs in the arena: a cache line


class Lease:
    """The memory of one EXECUTE, which the model may hold for longer than it executes.

    Tensors lie in an array over the arena; their arrays keep that object. A weak reference tells when it is freed.
    Reference counts would not do: each interpreter counts in its own way.
    """

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self._whole: Any = None
        self._watch: Any = None  # most batches fit into their packets, and have neither this nor `_first`
        # The execution and the array may end on different threads: the first to end takes the item.
        self._first: list[None]

    def arena(self) -> Any:
        """The array that the arena's tensors lie in."""
        if self._whole is None:
            import numpy as np

            self._first = [None]
            self._whole = np.frombuffer(self._link.arena, np.uint8)
            self._watch = weakref.ref(self._whole, self._let_go)
        return self._whole

    def end(self) -> bool:
        """Whether the model still holds it. If so, DONE must say that; RELEASE may be sent before."""
        self._whole = None
        if self._watch is None or self._watch() is None:
            return False
        _leases.add(self)  # before the array can be freed
        try:
            self._first.pop()
        except IndexError:
            _leases.discard(self)
            return False
        return True

    def _let_go(self, _: Any) -> None:
        try:
            self._first.pop()
        except IndexError:  # the execution has ended before
            _leases.discard(self)
            self._link.send(self._link.side, p.RELEASE, number=self._number)


_leases: set[Lease] = set()  # those that the model still holds: their weak references must live


class OutputMemory:
    """Memory of the arena for the outputs of one batch: first the grant of the EXECUTE, then further grants.

    A backend in C may have its outputs made in the first grant (`begin`, `end`): the memory `has` such an output
    already. `keep` returns an object without which the backend may not write there after the execution.
    """

    def __init__(self, link: Link, offset: int, size: int, lease: Lease | None = None) -> None:
        self._arena: Any = None
        self._link = link
        self._lease = lease
        self._at = offset
        self._end = offset + size
        self.kept = False

    def begin(self) -> tuple[Any, int, int]:
        """The arena, and the range that is left of the first grant."""
        self._arena = memoryview(self._link.arena)
        return self._arena, self._at, self._end

    def end(self, at: int) -> None:
        """The backend has taken the range up to `at`."""
        self._at = at

    def has(self, buffer: Any) -> bool:
        """Whether this is the buffer of an output that was made in the first grant."""
        return buffer is not None and buffer is self._arena

    def keep(self) -> Any:
        """An object that the backend holds as long as it may write to its outputs."""
        assert self._lease is not None
        self.kept = True
        return self._lease.arena()

    def take(self, size: int) -> int:
        """The offset of `size` bytes.

        Raises:
            TritonModelException: the server has no memory for them.
        """
        at = (self._at + ALIGNMENT - 1) & -ALIGNMENT
        if at + size <= self._end:
            self._at = at + size
            return at
        link = self._link
        link.send(link.work, p.ALLOCATE, number=link.next_id(), offset=size)
        granted = link.receive_work()
        if granted.code:
            raise TritonModelException(no_memory(size))
        offset: int = granted.offset
        return offset
