"""Shared memory of trusted clients as inputs of a model, mapped here to avoid a copy.

A region stays mapped from its first use until the server closes it, so its pages are not mapped again for each batch.
The client does not see the model's writes: the mapping is private, and the kernel copies a page at the first write.
When an execution ends, the worker drops the pages that it has written, so the next batch sees the client's.

The client may write to its object once it has its response, and a private mapping shows these writes in all pages that
were not copied. So if the model still holds memory then, the worker copies all its pages, and leaves the mapping to the
model. There is no protection from a client that shortens its object while a model reads it: the kernel then removes
copied pages, too, and SIGBUS ends a process that reads them. (Replacing the mapping would lose concurrent writes of the
model's threads.)
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from typing import Any

from .errors import TritonModelException

MOST_MAPPED = 256
"""Mappings at a time: each holds a descriptor of this process, and the model needs some, too."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: each page becomes as it would be after a write to it."""
PAGE = mmap.PAGESIZE

# /proc/self/pagemap has 64 bits for each page, of which the upper three say: present, swapped, a file's.
STATE_SHIFT = 61
FILE_BIT = 1


class Mapped(mmap.mmap):
    """A mapped part of an object; it is unmapped when nothing refers to it any more."""

    start: int
    """The offset of this part in the object."""


class Use:
    """One batch's use of a mapping."""

    def __init__(self, memory: Mapped) -> None:
        import numpy as np

        self.memory = memory
        self.parts: list[tuple[int, int]] = []  # of tensors: offset in the mapping, and bytes
        # Views keep this array, so a weak reference tells whether the model still holds any.
        self.array: Any = np.frombuffer(memory, np.uint8)
        self.address: int = self.array.__array_interface__["data"][0]
        self._watch = weakref.ref(self.array)

    def is_held(self) -> bool:
        """Whether the model holds memory of the mapping after the batch has released it."""
        self.array = None
        return self._watch() is not None


class Regions:
    """The regions that are mapped.

    Args:
        folder: the folder that has the server's descriptors of the objects, by their numbers.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._kept: dict[int, Mapped] = {}  # by the region's number
        self._uses: dict[int, Use] = {}  # of the batch that is executed, by the region's number
        self._alive: weakref.WeakSet[Mapped] = weakref.WeakSet()  # also those left to the model
        self._pagemap = -1

    def reaches(self, descriptor: int) -> bool:
        """Whether this process can open the objects of regions, and the kernel can copy mapped pages for it."""
        try:
            os.close(self._open(descriptor))
            with mmap.mmap(-1, PAGE) as page:
                page.madvise(POPULATE_WRITE)
        except OSError:  # the kernel is older than 5.14, or does not let this process
            return False
        with suppress(OSError):  # without it, all pages count as written
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        return True

    def map(self, region: tuple[int, int, int, int, int], offset: int, size: int) -> tuple[Any, int]:
        """The memory with `size` bytes of an object, mapped, or copied if mapping fails; and their offset in it.

        Args:
            region: the fields of REGION_MEMORY.
            offset: of the bytes in the object.
            size: how many.

        Raises:
            TritonModelException: the object is shorter, or cannot be read.
        """
        try:
            use = self._uses.get(region[0]) or self._begin(region, offset + size)
            # Checked for each tensor: reading a page that the object no longer has ends the process.
            if use is None or offset + size > use.memory.start + len(use.memory):
                return self._copy(region[3], offset, size), 0
            if offset + size > use.memory.size():
                raise ValueError
        except ValueError:
            raise TritonModelException(
                "its shared memory has been shortened since it was registered: register it again"
            ) from None
        except OSError as error:
            raise TritonModelException(f"its shared memory cannot be read: {error.strerror}") from None
        offset -= use.memory.start
        use.parts.append((offset, size))
        return use.array, offset

    def _begin(self, region: tuple[int, int, int, int, int], end: int) -> Use | None:
        """The batch's use of a region, up to `end` of its object; None: it cannot be mapped."""
        number, start, size, descriptor, keep = region
        memory = self._kept.get(number)
        if memory is None or end > memory.start + len(memory):  # the object was shorter then
            memory = self._map(descriptor, start, start + size, end)
            if memory is None:
                return None
            if keep:
                self._kept[number] = memory
        use = self._uses[number] = Use(memory)
        return use

    def _map(self, descriptor: int, start: int, stop: int, end: int) -> Mapped | None:
        # The part of the region that the object has; it must reach `end`.
        if len(self._alive) >= MOST_MAPPED:
            return None
        opened = self._open(descriptor)
        try:
            there = os.fstat(opened).st_size
            if there < end:
                raise ValueError
            first = start - start % mmap.ALLOCATIONGRANULARITY
            memory = Mapped(opened, min(stop, there) - first, access=mmap.ACCESS_COPY, offset=first)
        except OSError:
            return None
        finally:
            os.close(opened)
        memory.start = first
        self._alive.add(memory)
        return memory

    def _copy(self, descriptor: int, offset: int, size: int) -> bytearray:
        """Bytes of an object.

        Raises:
            ValueError: it is shorter.
        """
        data = bytearray(size)
        left = memoryview(data)
        opened = self._open(descriptor)
        try:
            while left:
                count = os.preadv(opened, [left], offset)
                if not count:
                    raise ValueError
                left, offset = left[count:], offset + count
        finally:
            os.close(opened)
        return data

    def have(self, array: Any) -> bool:
        """Whether this array, the base of tensors of the batch, is memory of a region."""
        return any(use.array is array for use in self._uses.values())

    def is_unwritten(self, array: Any, offset: int, size: int) -> bool:
        """Whether a part of such an array still is the client's memory."""
        return any(use.array is array and not self._is_written(use, offset, size) for use in self._uses.values())

    def let_go(self) -> None:
        """The execution ends: leave to the model what it still holds, and drop the pages that it has written."""
        for number, use in self._uses.items():
            if use.is_held():
                self._kept.pop(number, None)
                # The kernel copies the pages in place: a copy made here would lose what a thread writes meanwhile.
                with suppress(OSError):  # the object was shortened, or memory has run out: nothing can be kept
                    _advise(use, POPULATE_WRITE, use.parts)
            elif number in self._kept:
                _advise(use, mmap.MADV_DONTNEED, [part for part in use.parts if self._is_written(use, *part)])
        self._uses.clear()

    def forget(self, number: int) -> None:
        """A region is closed."""
        self._kept.pop(number, None)

    def _is_written(self, use: Use, offset: int, size: int) -> bool:
        """Whether the model has written to any page of a part, which then is no page of the object."""
        import numpy as np

        if self._pagemap < 0:
            return True
        first = (use.address + offset) // PAGE
        count = (use.address + offset + size - 1) // PAGE + 1 - first
        entries = np.frombuffer(os.pread(self._pagemap, 8 * count, 8 * first), np.uint64)
        states = entries >> np.uint64(STATE_SHIFT)  # 0: never touched
        return len(entries) < count or bool(((states > FILE_BIT) & (states & np.uint64(FILE_BIT) == 0)).any())

    def _open(self, descriptor: int) -> int:
        return os.open(f"{self._folder}/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _advise(use: Use, advice: int, parts: list[tuple[int, int]]) -> None:
    for offset, size in parts:
        before = offset % PAGE
        use.memory.madvise(advice, offset - before, before + size)
