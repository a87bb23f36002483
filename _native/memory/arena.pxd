# Memory that is shared with other processes: blocks in a sparse memfd.

from libc.stdint cimport int64_t, uint8_t, uint64_t

from inferd._native.memory.pool cimport Pool
from inferd._native.memory.resource cimport Block

cdef struct Arena:
    int fd                   # the memfd; another process maps all of it
    uint8_t *base
    uint64_t size            # of the mapping, in bytes of address space, not of memory
    Pool *pool               # with one slab; its metadata is in private memory, which other processes cannot reach
    int64_t taken            # blocks taken so far; atomic

# A new arena with one reference, whose first `reserved` bytes are never given out; NULL if the system has no memfd or
# no address space.
cdef Arena *arena_new(const char *name, uint64_t reserved) noexcept nogil
# Add a reference; returns the same arena.
cdef Arena *arena_share(Arena *arena) noexcept nogil
# Give back a reference. The last one, the owner's or a block's, unmaps the arena.
cdef void arena_give(Arena *arena) noexcept nogil
# A block of at least `size` bytes with one reference, at a multiple of 4096; NULL if there is no room. Any thread
# may give it back, like any other block.
cdef Block *arena_take(Arena *arena, uint64_t size) noexcept nogil
# Return the pages of all free pieces to the system; returns the number of bytes.
cdef uint64_t arena_trim(Arena *arena) noexcept nogil

cdef inline bint arena_holds(const Arena *arena, const void *data) noexcept nogil:
    return arena.base <= <const uint8_t *>data < arena.base + arena.size


cdef class ArenaHandle:
    # an Arena for Python
    cdef Arena *arena
    cdef object __weakref__
