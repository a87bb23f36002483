"""Shared memory of clients that the server trusts, as inputs of a model: mapped here, so that nobody copies it.

What the model writes there stays its own: the mapping is private, and a page is copied when it is first written to. Its
client may write there as soon as it has its answer, and a private mapping shows that in all pages that were not
copied. So what the model holds on to for longer than it executes is made its own first. Nothing helps against a client
that shortens its object: the system takes away copied pages, too, and whoever reads them is ended by SIGBUS. (Another
mapping in their place would lose what a thread of the model writes meanwhile.)
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref

from .errors import TritonModelException


class Mapped(mmap.mmap):
    """A part of an object, which tensors lie in and keep; it is unmapped when nothing refers to it any more.

    Attributes:
        file: which object it is: the numbers of its file system and in that.
        begin: offset of the part.
    """

    file: tuple[int, int]
    begin: int


class Regions:
    """The objects of the batch that is executed.

    Args:
        folder: has the server's descriptors of them, by their numbers.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._mapped: list[weakref.ref[Mapped]] = []

    def reaches(self, descriptor: int) -> bool:
        """Whether this process can open what is there."""
        try:
            os.close(self._open(descriptor))
        except OSError:
            return False
        return True

    def map(self, descriptor: int, offset: int, size: int) -> tuple[Mapped, int]:
        """Map so many bytes of an object; where they begin in the mapping, too.

        Raises:
            TritonModelException: the object is shorter, or cannot be mapped.
        """
        before = offset % mmap.ALLOCATIONGRANULARITY
        try:
            opened = self._open(descriptor)
            try:
                memory = Mapped(opened, before + size, access=mmap.ACCESS_COPY, offset=offset - before)
                found = os.fstat(opened)
            finally:
                os.close(opened)
        except ValueError:
            raise TritonModelException(
                "its shared memory has been shortened since it was registered: register it again"
            ) from None
        except OSError as error:
            raise TritonModelException(f"its shared memory cannot be mapped: {error.strerror}") from None
        memory.file = found.st_dev, found.st_ino
        memory.begin = offset - before
        self._mapped.append(weakref.ref(memory))
        return memory, before

    def write(self, descriptor: int, offset: int, data: memoryview) -> bool:
        """Write to an object; False: an input of the batch lies there, or it cannot be written to."""
        try:
            opened = self._open(descriptor, os.O_WRONLY)
            try:
                found = os.fstat(opened)
                if self._is_read(found, offset, len(data)) or offset + len(data) > found.st_size:
                    return False
                while data:
                    written = os.pwrite(opened, data, offset)
                    data = data[written:]
                    offset += written
            finally:
                os.close(opened)
        except OSError:
            return False
        return True

    def _is_read(self, found: os.stat_result, offset: int, size: int) -> bool:
        """Whether an input of the batch may lie in this part of an object."""
        inputs = [memory for memory in (reference() for reference in self._mapped) if memory is not None]
        return any(
            memory.file == (found.st_dev, found.st_ino)
            and memory.begin < offset + size
            and offset < memory.begin + len(memory)
            for memory in inputs
        )

    def let_go(self) -> None:
        """The execution ends: what something still refers to is copied."""
        if self._mapped:
            for memory in self._mapped:
                _make_own(memory())
            self._mapped.clear()

    def _open(self, descriptor: int, access: int = os.O_RDONLY) -> int:
        return os.open(f"{self._folder}/{descriptor}", access | os.O_CLOEXEC)


class Place:
    """Where an output goes: so much `room` at an offset of an object."""

    __slots__ = ("_descriptor", "_offset", "_regions", "_room")

    def __init__(self, regions: Regions, descriptor: int, offset: int, room: int) -> None:
        self._regions = regions
        self._descriptor = descriptor
        self._offset = offset
        self._room = room

    def write(self, data: memoryview) -> bool:
        """Write it there; False: the server has to, which also says why that cannot be."""
        return len(data) <= self._room and self._regions.write(self._descriptor, self._offset, data)


POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: each page becomes what it would be after it was written to


def _make_own(memory: Mapped | None) -> None:
    if memory is None:
        return
    try:
        memory.madvise(POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some of the object is gone: there is nothing to be kept
            return
        import numpy as np

        # The kernel is older than 5.14: what each page has is written to it.
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        np.add(pages, 0, out=pages)
