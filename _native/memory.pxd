# Blocks: reference-counted memory, from the host pool or lent by a foreign owner; and the ledger of live objects.

from libc.stdint cimport int32_t, int64_t, uint8_t

ctypedef void (*release_fn)(void *owner) noexcept nogil

cdef enum Sharing:
    # who else writes to the memory of a block
    SHARED_WITH_NOBODY
    SHARED_WITH_FRIEND       # a client that is trusted to leave it alone while a request of its own uses it
    SHARED_WITH_STRANGER     # a client that may change it at any time: copy it before anything depends on it

cdef struct Block:
    uint8_t *data            # 64-byte aligned when it comes from the pool
    size_t size              # usable bytes
    int32_t references       # atomic
    int32_t size_class       # >= 0: the pool's class; CLASS_LARGE; CLASS_FOREIGN
    Sharing sharing          # of a foreign block; what is shared must not outlive its request
    release_fn release       # foreign blocks: called with `owner` when the last reference goes
    void *owner
    Block *next              # the pool's free list

# A block of at least `size` bytes with one reference; NULL when there is no memory.
cdef Block *block_take(size_t size) noexcept nogil
# A block over memory of somebody else; NULL when there is no memory for its head (the owner is then not released).
# `release(owner)` is called exactly once, by whichever thread gives the last reference back, possibly without the GIL.
cdef Block *block_wrap(const void *data, size_t size, release_fn release, void *owner) noexcept nogil
# One more reference; returns the same block.
cdef Block *block_share(Block *block) noexcept nogil
# Give one reference back; the last one returns the memory. NULL is allowed.
cdef void block_give(Block *block) noexcept nogil
# Replace a reference to shared memory by one to a copy of its `size` bytes at `data`; do nothing with memory that is
# not shared. False: no memory.
cdef bint block_own(Block **block, const uint8_t **data, size_t size) noexcept nogil
# A foreign block that keeps a Python object alive; NULL when there is no memory. Needs the GIL now, but not when it is
# given back.
cdef Block *block_of_object(object owner, const void *data, size_t size)


cdef class BlockView:
    # read-only Python buffer over part of a block; holds one reference
    cdef Block *block
    cdef const uint8_t *data
    cdef Py_ssize_t size

# A Python view of `size` bytes at `data` inside `block`, sharing the block.
cdef BlockView block_view(Block *block, const uint8_t *data, size_t size)


cdef enum Live:
    # kinds of native objects whose number alive is counted
    LIVE_BLOCKS
    LIVE_REQUESTS
    LIVE_STREAMS
    LIVE_CONNECTIONS
    LIVE_LANES
    LIVE_ARENAS
    LIVE_KINDS

cdef void live_add(Live kind, int64_t n) noexcept nogil
