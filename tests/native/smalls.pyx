"""Small memory of one thread (`inferd._native.memory.small`), for its tests."""

from libc.stddef cimport size_t
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

from inferd._native.memory.small cimport SMALL_CLASSES, Smalls, small_give, small_resize, small_take, smalls_clear


cdef class SmallsProbe:
    """Pieces are known by their addresses."""

    cdef Smalls smalls

    def __dealloc__(self):
        smalls_clear(&self.smalls)

    def take(self, size: int) -> int:
        return <uintptr_t>small_take(&self.smalls, size)

    def give(self, address: int) -> None:
        small_give(&self.smalls, <void *><uintptr_t>address)

    def resize(self, address: int, size: int) -> int:
        return <uintptr_t>small_resize(&self.smalls, <void *><uintptr_t>address, size)

    def clear(self) -> None:
        smalls_clear(&self.smalls)

    @property
    def waiting(self) -> int:
        """Free pieces."""
        cdef size_t i
        count = 0
        for i in range(<size_t>SMALL_CLASSES):
            count += self.smalls.count[i]
        return count

    @staticmethod
    def write(address: int, data: bytes) -> None:
        memcpy(<void *><uintptr_t>address, <const char *>data, len(data))

    @staticmethod
    def read(address: int, size: int) -> bytes:
        return (<const char *><uintptr_t>address)[:size]
