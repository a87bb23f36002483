# Memory that is shared with other processes: a sparse memfd from which blocks are taken.

from libc.stdint cimport int64_t, uint8_t, uint64_t

from _native.memory.pool cimport Pool
from _native.memory.resource cimport Block

cdef struct Arena:
    int fd                   # the memfd; another process maps all of it
    uint8_t *base
    uint64_t size            # of the mapping: address space, not memory
    Pool *pool               # of one slab; its books are kept in private memory, out of reach for other processes
    int64_t taken            # blocks taken so far; atomic

# An arena whose first `reserved` bytes are never handed out; NULL when the system has no memfd or no address space.
cdef Arena *arena_new(const char *name, uint64_t reserved) noexcept nogil
cdef Arena *arena_share(Arena *arena) noexcept nogil
# The last reference, the owner's or a block's, unmaps it.
cdef void arena_give(Arena *arena) noexcept nogil
# A block of at least `size` bytes with one reference, at a multiple of 4096; NULL when there is no room. It is given
# back as any block, by any thread.
cdef Block *arena_take(Arena *arena, uint64_t size) noexcept nogil
# Give the pages of everything free back to the system; the number of bytes.
cdef uint64_t arena_trim(Arena *arena) noexcept nogil

cdef inline bint arena_holds(const Arena *arena, const void *data) noexcept nogil:
    return arena.base <= <const uint8_t *>data < arena.base + arena.size


cdef class ArenaHandle:
    # owns an Arena for Python
    cdef Arena *arena
    cdef object __weakref__
