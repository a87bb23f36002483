# A resource with a limit: blocks that are parts of a few large slabs, for memory that is slow to allocate.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.memory.resource cimport Block, Memory, Resource
from inferd._native.threads cimport Mutex

cdef enum:
    POOL_GRAIN = 256         # every block begins at a multiple of this, and its size is one
    LEVELS = 40              # powers of two, in grains
    STEPS = 8                # size classes of equal width between one power of two and the next

cdef struct Backing:
    # Where slabs come from. The pool calls these functions without the GIL, and without the lock under which blocks are
    # taken and given back.

    # Return the address of `size` bytes, aligned to POOL_GRAIN; NULL if there is no memory. The function may store
    # something for `release` in `slab`.
    void *(*obtain)(void *context, size_t size, void **slab) noexcept nogil
    void (*release)(void *context, void *address, size_t size, void *slab) noexcept nogil
    # Return the pages of a free piece to the system; the piece stays in the pool. NULL: the pool's memory always has
    # its pages.
    void (*cool)(void *context, void *address, size_t size) noexcept nogil
    # All slabs are released, and the pool ends. NULL: nothing is to be done then.
    void (*end)(void *context) noexcept nogil
    # The last user has left, on any thread, after the owner: have a thread call pool_free. NULL: the pool is freed at
    # once. If the owner leaves last, it frees the pool itself.
    void (*finish)(void *context, Pool *pool) noexcept nogil
    void *context

cdef struct Slab:
    uint8_t *address
    size_t size
    void *mark               # what `obtain` has stored for `release`
    Chunk *first
    Slab *next

cdef struct Chunk:
    # A piece of a slab: a block, or free. It is separate from the memory, which the CPU may be unable to read.
    Block block              # first, so that a block is its chunk
    Pool *pool
    Slab *slab
    Chunk *before            # neighbours in the slab
    Chunk *after
    Chunk *next              # free list
    Chunk *previous
    bint is_free
    bint hollow              # it has no pages; pieces are merged only with pieces of the same kind

cdef struct Pool:
    Resource resource        # first, so that a pool is a resource
    Backing backing
    size_t slab_size
    int64_t warm             # free bytes that have pages, if there is `cool`; atomic
    int64_t most_warm        # beyond this, pieces that are given back are cooled at once
    int32_t guard            # a spin lock
    Mutex growth             # one thread at a time obtains slabs
    uint64_t levels          # one bit for each level with free chunks
    uint8_t steps[LEVELS]
    Chunk *free[LEVELS][STEPS]
    Chunk *spare             # chunks without memory
    Chunk *batches           # the allocations that contain the chunks
    Slab *slabs
    int64_t users            # blocks, and other users of the pool or its backing
    bint left                # the owner has called pool_leave

# A pool that holds at most `limit` bytes and allocates `slab_size` at a time (more for larger blocks); NULL if there is
# no memory for its head. `name` must live as long as the pool.
cdef Pool *pool_new(const char *name, int64_t limit, size_t slab_size, const Backing *backing) noexcept nogil
# The owner does not use the pool any more. The pool is freed now, or after the last of its users.
cdef void pool_leave(Pool *pool) noexcept nogil
# Add a user of the backing, and remove one.
cdef void pool_use(Pool *pool) noexcept nogil
cdef void pool_unuse(Pool *pool) noexcept nogil
# For `finish`.
cdef void pool_free(Pool *pool) noexcept nogil
# Allocate slabs until the pool holds at least `size` bytes. False: there is no memory, or the limit is lower.
cdef bint pool_reserve(Pool *pool, size_t size) noexcept nogil
# Return the pages of all free pieces to the system; returns the number of bytes. The growth lock is held.
cdef size_t pool_cool(Pool *pool) noexcept nogil
# Release the slabs that have no block; returns the number of bytes.
cdef size_t pool_trim(Pool *pool) noexcept nogil


cdef class PooledMemory(Memory):
    cdef Pool *pool
    cdef int make(self, const char *name, object limit, object slab_size, const Backing *backing) except -1
