"""Shared memory of clients that the server trusts, as inputs of a model: mapped here, so that nobody copies it.

The client does not see what the model writes there: the mapping is private, and the kernel copies a page at the first
write. The client may write to its object once it has its answer, and a private mapping shows that in all pages that
were not copied. So the worker copies, when an execution ends, all pages that the model still holds. Nothing helps
against a client that shortens its object: the kernel then takes away copied pages, too, and SIGBUS ends a process that
reads them. (Another mapping in their place would lose what a thread of the model writes meanwhile.)
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

from .errors import TritonModelException

MOST_MAPPED = 256
"""Mappings at a time: each keeps a descriptor of this process open, of which the model wants some, too."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: each page becomes as it would be after a write to it."""


class Mapped(mmap.mmap):
    """A mapped part of an object, which its tensors keep; it is unmapped when nothing refers to it any more."""


class Regions:
    """The objects of the batch that is executed.

    Args:
        folder: the folder that has the server's descriptors of the objects, by their numbers.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._mapped: list[weakref.ref[Mapped]] = []  # of this batch
        self._alive: weakref.WeakSet[Mapped] = weakref.WeakSet()  # also kept by the model from earlier batches

    def reaches(self, descriptor: int) -> bool:
        """Whether this process can open the objects of regions, and the kernel can copy mapped pages for it."""
        try:
            os.close(self._open(descriptor))
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                page.madvise(POPULATE_WRITE)
        except OSError:  # the kernel is older than 5.14, or does not let this process
            return False
        return True

    def map(self, descriptor: int, offset: int, size: int) -> tuple[Mapped | bytearray, int]:
        """So many bytes of an object, mapped, or copied if they cannot be mapped; and where they begin in that memory.

        Raises:
            TritonModelException: the object is shorter, or cannot be read.
        """
        try:
            opened = self._open(descriptor)
            try:
                return self._map(opened, offset, size) or (_copy(opened, offset, size), 0)
            finally:
                os.close(opened)
        except ValueError:
            raise TritonModelException(
                "its shared memory has been shortened since it was registered: register it again"
            ) from None
        except OSError as error:
            raise TritonModelException(f"its shared memory cannot be read: {error.strerror}") from None

    def _map(self, opened: int, offset: int, size: int) -> tuple[Mapped, int] | None:
        if len(self._alive) >= MOST_MAPPED:
            return None
        before = offset % mmap.ALLOCATIONGRANULARITY
        try:
            memory = Mapped(opened, before + size, access=mmap.ACCESS_COPY, offset=offset - before)
        except OSError:
            return None
        self._mapped.append(weakref.ref(memory))
        self._alive.add(memory)
        return memory, before

    def let_go(self) -> None:
        """Copy the memory that something still refers to: the execution ends."""
        if self._mapped:
            for memory in self._mapped:
                _make_own(memory())
            self._mapped.clear()

    def _open(self, descriptor: int) -> int:
        return os.open(f"{self._folder}/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _copy(opened: int, offset: int, size: int) -> bytearray:
    """Bytes of an object.

    Raises:
        ValueError: it is shorter.
    """
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = os.preadv(opened, [left], offset)
        if not count:
            raise ValueError
        left, offset = left[count:], offset + count
    return data


def _make_own(memory: Mapped | None) -> None:
    # The kernel copies the pages in place: a copy made here would lose what a thread of the model writes meanwhile.
    if memory is not None:
        with suppress(OSError):  # the object was shortened, or memory has run out: nothing can be kept
            memory.madvise(POPULATE_WRITE)
