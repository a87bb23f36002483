# A resource with a cap: blocks carved out of a few large slabs, for memory that is slow to obtain.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from _native.memory.resource cimport Block, Memory, Resource
from _native.threads cimport Mutex

cdef enum:
    POOL_GRAIN = 256         # every block begins at a multiple of this, and its size is one
    LEVELS = 40              # powers of two, in grains
    STEPS = 8                # of equal width between one power of two and the next

# Where slabs come from. `obtain` gives the address of `size` bytes, aligned to POOL_GRAIN, and may leave something for
# `release` in `slab`; NULL when there are none. Called without the GIL and without a lock that takes and gives need.
cdef struct Backing:
    void *(*obtain)(void *context, size_t size, void **slab) noexcept nogil
    void (*release)(void *context, void *address, size_t size, void *slab) noexcept nogil
    # Give the pages of a free piece back to the system; it stays the pool's. NULL: the
    # pool's memory always has its pages.
    void (*cool)(void *context, void *address, size_t size) noexcept nogil
    # All slabs are returned. NULL: nothing is left to do.
    void (*end)(void *context) noexcept nogil
    # The last user has left after the owner, on any thread: have pool_free called. NULL: at once.
    void (*finish)(void *context, Pool *pool) noexcept nogil
    void *context

cdef struct Slab:
    uint8_t *address
    size_t size
    void *mark               # the backing's
    Chunk *first
    Slab *next

cdef struct Chunk:
    # part of a slab: a block, or free. Lies apart from the memory, which the CPU may be unable to read.
    Block block              # first: a block is its chunk
    Pool *pool
    Slab *slab
    Chunk *before            # neighbours in the slab
    Chunk *after
    Chunk *next              # free list
    Chunk *previous
    bint is_free
    bint hollow              # it has no pages; a piece that has is joined only to others that have

cdef struct Pool:
    Resource resource        # first: a pool is a resource
    Backing backing
    size_t slab_size
    int64_t warm             # bytes that are free with their pages, if there is `cool`; atomic
    int64_t most_warm        # beyond which what is given back is cooled at once
    int32_t guard            # a spin lock
    Mutex growth             # one thread at a time obtains slabs
    uint64_t levels          # which have free chunks
    uint8_t steps[LEVELS]
    Chunk *free[LEVELS][STEPS]
    Chunk *spare             # chunks without memory
    Chunk *batches           # in which chunks were made
    Slab *slabs
    int64_t users            # blocks, and who else needs the pool or its backing
    bint left                # its owner has

# A pool that holds at most `limit` bytes and obtains `slab_size` at a time (more for larger blocks); NULL when there is
# no memory for its head. `name` has to live as long.
cdef Pool *pool_new(const char *name, int64_t limit, size_t slab_size, const Backing *backing) noexcept nogil
# Its owner has no more use for it: it goes now, or with the last of its users.
cdef void pool_leave(Pool *pool) noexcept nogil
# One more user of the backing, and one less.
cdef void pool_use(Pool *pool) noexcept nogil
cdef void pool_unuse(Pool *pool) noexcept nogil
# For `finish`.
cdef void pool_free(Pool *pool) noexcept nogil
# Obtain slabs until at least `size` bytes are held. False: there is no memory, or the limit is lower.
cdef bint pool_reserve(Pool *pool, size_t size) noexcept nogil
# Cool everything that is free; how many bytes.
cdef size_t pool_cool(Pool *pool) noexcept nogil
# Return slabs without a block in them; how many bytes.
cdef size_t pool_trim(Pool *pool) noexcept nogil


cdef class PooledMemory(Memory):
    cdef Pool *pool
    cdef int make(self, const char *name, object limit, object slab_size, const Backing *backing) except -1


cdef class SharedMemory(PooledMemory):
    pass
