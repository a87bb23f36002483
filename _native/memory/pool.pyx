"""Pools for memory that is slow to allocate: page-locked, on a device, shared with other processes.

A pool divides large slabs into blocks, up to a hard limit. Free pieces are in two-level size classes (eight for each
power of two), with a bitmap of the classes that have free pieces. So taking and giving a block needs a handful of
instructions, whatever the number of pieces. Adjacent free pieces are merged at once; so a large block is possible again
when the small blocks in its place have been given back. (Known as TLSF: Masmano, Ripoll, Crespo and Real, "TLSF: a new
dynamic memory allocator for real-time systems", ECRTS 2004.)

The metadata of a piece is in ordinary memory, because the CPU may be unable to read the piece.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport add_own, fetch_add64, load64, spin_lock, spin_unlock
from inferd._native.memory.resource cimport CLASS_LENT, Block, Memory, Resource, block_lent
from inferd._native.threads cimport lock, mutex_destroy, mutex_init, unlock

cdef extern from *:
    """
    static inline int inferd_lowest(unsigned long long bits) { return __builtin_ctzll(bits); }
    static inline int inferd_highest(unsigned long long bits) { return 63 - __builtin_clzll(bits); }
    """
    int lowest "inferd_lowest"(uint64_t bits) noexcept nogil
    int highest "inferd_highest"(uint64_t bits) noexcept nogil

cdef enum:
    STEP_BITS = 3             # log2 of STEPS
    SLAB_GRAIN = 2 << 20      # slabs are multiples of it: a page of the device, and the unit of sharing with processes
    SPARES = 64               # chunks made at a time


# ---------------------------------------------------------------------------------------------------------------------
# Free lists

cdef inline void class_of(uint64_t grains, int *level, int *step) noexcept nogil:
    # the class that a free chunk of this size belongs to
    cdef int log2
    if grains < STEPS:
        level[0] = 0
        step[0] = <int>grains
    else:
        log2 = highest(grains)
        level[0] = log2 - STEP_BITS + 1
        step[0] = <int>(grains >> (log2 - STEP_BITS)) - STEPS


cdef inline void add_warm(Pool *pool, const Chunk *chunk, int sign) noexcept nogil:
    if pool.backing.cool != NULL and not chunk.hollow:
        add_own(&pool.warm, sign * <int64_t>chunk.block.size)


cdef inline void put_free(Pool *pool, Chunk *chunk) noexcept nogil:
    cdef int level, step
    class_of(chunk.block.size // POOL_GRAIN, &level, &step)
    assert_that(not chunk.is_free and level < LEVELS)
    chunk.is_free = True
    add_warm(pool, chunk, 1)
    chunk.previous = NULL
    chunk.next = pool.free[level][step]
    if chunk.next != NULL:
        chunk.next.previous = chunk
    pool.free[level][step] = chunk
    pool.steps[level] |= 1 << step
    pool.levels |= <uint64_t>1 << level


cdef inline void take_out(Pool *pool, Chunk *chunk) noexcept nogil:
    cdef int level, step
    class_of(chunk.block.size // POOL_GRAIN, &level, &step)
    assert_that(chunk.is_free and (chunk.previous != NULL or pool.free[level][step] == chunk))
    chunk.is_free = False
    add_warm(pool, chunk, -1)
    if chunk.next != NULL:
        chunk.next.previous = chunk.previous
    if chunk.previous != NULL:
        chunk.previous.next = chunk.next
        return
    pool.free[level][step] = chunk.next
    if chunk.next == NULL:
        pool.steps[level] &= ~(1 << step)
        if pool.steps[level] == 0:
            pool.levels &= ~(<uint64_t>1 << level)


cdef Chunk *find(Pool *pool, uint64_t grains) noexcept nogil:
    # a free chunk of a class whose smallest chunks are large enough
    cdef int level, step
    cdef uint64_t above
    cdef uint32_t steps
    if grains >= STEPS:
        grains += (<uint64_t>1 << (highest(grains) - STEP_BITS)) - 1
    class_of(grains, &level, &step)
    if level >= LEVELS:
        return NULL
    steps = pool.steps[level] & (<uint32_t>0xff << step)
    if steps == 0:
        above = pool.levels & ~((<uint64_t>2 << level) - 1)
        if above == 0:
            return NULL
        level = lowest(above)
        steps = pool.steps[level]
    return pool.free[level][lowest(steps)]


# ---------------------------------------------------------------------------------------------------------------------
# Chunks

cdef Chunk *new_chunk(Pool *pool) noexcept nogil:
    # from the spare chunks, which the pool keeps until it is freed
    cdef Chunk *chunk
    cdef Chunk *made
    if pool.spare == NULL:
        made = <Chunk *>calloc(SPARES, sizeof(Chunk))
        if made == NULL:
            return NULL
        made[0].slab = NULL
        made[0].after = pool.batches
        pool.batches = made  # the first of each batch only holds the list of batches
        for i in range(1, SPARES):
            made[i].next = pool.spare
            pool.spare = &made[i]
    chunk = pool.spare
    pool.spare = chunk.next
    chunk.pool = pool
    chunk.block.size_class = CLASS_LENT
    chunk.block.release = give_chunk
    chunk.block.owner = chunk
    return chunk


cdef inline void spare_chunk(Pool *pool, Chunk *chunk) noexcept nogil:
    chunk.next = pool.spare
    pool.spare = chunk


cdef Chunk *split(Pool *pool, Chunk *chunk, size_t size) noexcept nogil:
    # leave `size` bytes in the chunk, and free the rest; without memory for its head the chunk stays whole
    cdef Chunk *rest
    assert_that(chunk.block.size >= size)
    if chunk.block.size == size:
        return chunk
    rest = new_chunk(pool)
    if rest == NULL:
        return chunk
    rest.slab = chunk.slab
    rest.hollow = chunk.hollow
    rest.block.data = chunk.block.data + size
    rest.block.size = chunk.block.size - size
    rest.before = chunk
    rest.after = chunk.after
    if rest.after != NULL:
        rest.after.before = rest
    chunk.after = rest
    chunk.block.size = size
    put_free(pool, rest)
    return chunk


cdef inline Chunk *join(Pool *pool, Chunk *chunk, Chunk *following) noexcept nogil:
    # make one chunk of two neighbours; `following` becomes spare
    assert_that(chunk.after == following and chunk.block.data + chunk.block.size == following.block.data)
    chunk.block.size += following.block.size
    chunk.after = following.after
    if chunk.after != NULL:
        chunk.after.before = chunk
    spare_chunk(pool, following)
    return chunk


cdef inline bint joins(const Chunk *chunk, const Chunk *neighbour) noexcept nogil:
    return neighbour != NULL and neighbour.is_free and neighbour.hollow == chunk.hollow


cdef void free_chunk(Pool *pool, Chunk *chunk) noexcept nogil:
    # join it with free neighbours, and put it into a free list; with the lock held
    cdef Chunk *neighbour = chunk.after
    if joins(chunk, neighbour):
        take_out(pool, neighbour)
        join(pool, chunk, neighbour)
    neighbour = chunk.before
    if joins(chunk, neighbour):
        take_out(pool, neighbour)
        chunk = join(pool, neighbour, chunk)
    put_free(pool, chunk)


cdef void give_chunk(void *owner) noexcept nogil:
    cdef Chunk *chunk = <Chunk *>owner
    cdef Pool *pool = chunk.pool
    cdef int64_t size = <int64_t>chunk.block.size
    cdef bint last
    chunk.hollow = pool.backing.cool != NULL and load64(&pool.warm) + size > pool.most_warm
    if chunk.hollow:
        pool.backing.cool(pool.backing.context, chunk.block.data, chunk.block.size)
    spin_lock(&pool.guard)
    assert_that(not chunk.is_free and pool.resource.used >= size)
    add_own(&pool.resource.used, -size)
    free_chunk(pool, chunk)
    last = is_last(pool)
    spin_unlock(&pool.guard)
    if last:
        finish(pool)


# ---------------------------------------------------------------------------------------------------------------------
# Users: the owner, every block, and other users of the backing

cdef inline bint is_last(Pool *pool) noexcept nogil:
    # A user leaves: whether the pool has neither users nor an owner now. With the lock held.
    assert_that(pool.users > 0)
    pool.users -= 1
    return pool.left and pool.users == 0


cdef void finish(Pool *pool) noexcept nogil:
    if pool.backing.finish != NULL:
        pool.backing.finish(pool.backing.context, pool)
    else:
        pool_free(pool)


cdef void pool_use(Pool *pool) noexcept nogil:
    spin_lock(&pool.guard)
    pool.users += 1
    spin_unlock(&pool.guard)


cdef void pool_unuse(Pool *pool) noexcept nogil:
    cdef bint last
    spin_lock(&pool.guard)
    last = is_last(pool)
    spin_unlock(&pool.guard)
    if last:
        finish(pool)


cdef void pool_leave(Pool *pool) noexcept nogil:
    cdef bint unused
    spin_lock(&pool.guard)
    pool.left = True
    unused = pool.users == 0
    spin_unlock(&pool.guard)
    if unused:
        pool_free(pool)


# ---------------------------------------------------------------------------------------------------------------------
# Slabs

cdef bint add_slab(Pool *pool, size_t size) noexcept nogil:
    # `size` is a multiple of SLAB_GRAIN; the growth lock is held
    cdef Slab *slab = <Slab *>calloc(1, sizeof(Slab))
    if slab == NULL:
        return False
    slab.address = <uint8_t *>pool.backing.obtain(pool.backing.context, size, &slab.mark)
    if slab.address == NULL:
        free(slab)
        return False
    assert_that(<uintptr_t>slab.address % POOL_GRAIN == 0)
    slab.size = size
    spin_lock(&pool.guard)
    slab.first = new_chunk(pool)
    if slab.first != NULL:
        slab.first.slab = slab
        slab.first.hollow = pool.backing.cool != NULL
        slab.first.before = slab.first.after = NULL
        slab.first.block.data = slab.address
        slab.first.block.size = size
        put_free(pool, slab.first)
        slab.next = pool.slabs
        pool.slabs = slab
        add_own(&pool.resource.held, <int64_t>size)
    spin_unlock(&pool.guard)
    if slab.first == NULL:
        release_slab(pool, slab)
        return False
    return True


cdef void release_slab(Pool *pool, Slab *slab) noexcept nogil:
    pool.backing.release(pool.backing.context, slab.address, slab.size, slab.mark)
    free(slab)


cdef inline size_t rounded(size_t size, size_t grain) noexcept nogil:
    return (size + grain - 1) // grain * grain


cdef bint grow(Pool *pool, size_t wanted) noexcept nogil:
    # add a slab that serves `wanted` bytes; the growth lock is held
    cdef size_t least
    cdef size_t most
    cdef size_t size
    if wanted >= <size_t>1 << 47:
        return False
    if pool.backing.cool != NULL and pool.slabs != NULL:
        return pool_cool(pool) > 0  # there is one slab only, but this merges pieces with and without pages
    # `find` needs a class whose smallest chunks are large enough: an eighth more is always enough
    least = rounded(wanted + wanted // STEPS, SLAB_GRAIN)
    if <int64_t>least + load64(&pool.resource.held) > pool.resource.limit:
        least = rounded(wanted, SLAB_GRAIN)
    if <int64_t>least + load64(&pool.resource.held) > pool.resource.limit:
        pool_trim_locked(pool)
    most = <size_t>max(0, pool.resource.limit - load64(&pool.resource.held)) // SLAB_GRAIN * SLAB_GRAIN
    if least > most:
        return False
    size = min(max(least, pool.slab_size), most)
    return add_slab(pool, size) or (size > least and add_slab(pool, least))


cdef bint pool_reserve(Pool *pool, size_t size) noexcept nogil:
    cdef bint good = <int64_t>size <= pool.resource.limit // SLAB_GRAIN * SLAB_GRAIN  # more slabs do not fit
    lock(&pool.growth)
    while good and load64(&pool.resource.held) < <int64_t>size:
        good = grow(pool, min(size - <size_t>load64(&pool.resource.held), pool.slab_size))
    unlock(&pool.growth)
    return good


cdef Chunk *take_warm(Pool *pool) noexcept nogil:
    # Take out all free chunks with pages, as a chain; no thread can take them meanwhile. With the lock held.
    cdef Chunk *chain = NULL
    cdef Chunk *chunk
    cdef Chunk *following
    cdef int level, step
    for level in range(LEVELS):
        for step in range(STEPS):
            chunk = pool.free[level][step]
            while chunk != NULL:
                following = chunk.next
                if not chunk.hollow:
                    take_out(pool, chunk)
                    chunk.next = chain
                    chain = chunk
                chunk = following
    return chain


cdef size_t pool_cool(Pool *pool) noexcept nogil:
    cdef Chunk *chain
    cdef Chunk *chunk
    cdef size_t cooled = 0
    if pool.backing.cool == NULL:
        return 0
    spin_lock(&pool.guard)
    chain = take_warm(pool)
    spin_unlock(&pool.guard)
    chunk = chain
    while chunk != NULL:
        pool.backing.cool(pool.backing.context, chunk.block.data, chunk.block.size)
        cooled += chunk.block.size
        chunk = chunk.next
    spin_lock(&pool.guard)
    while chain != NULL:
        chunk = chain
        chain = chunk.next
        chunk.hollow = True
        free_chunk(pool, chunk)
    spin_unlock(&pool.guard)
    return cooled


cdef size_t pool_trim_locked(Pool *pool) noexcept nogil:
    cdef Slab *dropped = NULL
    cdef Slab **at
    cdef Slab *slab
    cdef size_t freed = 0
    spin_lock(&pool.guard)
    at = &pool.slabs
    while at[0] != NULL:
        slab = at[0]
        if slab.first.is_free and slab.first.after == NULL:
            assert_that(slab.first.block.size == slab.size)
            take_out(pool, slab.first)
            spare_chunk(pool, slab.first)
            at[0] = slab.next
            slab.next = dropped
            dropped = slab
            add_own(&pool.resource.held, -<int64_t>slab.size)
        else:
            at = &slab.next
    spin_unlock(&pool.guard)
    while dropped != NULL:
        slab = dropped
        dropped = slab.next
        freed += slab.size
        release_slab(pool, slab)
    return freed


cdef size_t pool_trim(Pool *pool) noexcept nogil:
    cdef size_t freed
    lock(&pool.growth)
    freed = pool_trim_locked(pool)
    unlock(&pool.growth)
    return freed


# ---------------------------------------------------------------------------------------------------------------------
# The pool

cdef Chunk *carve(Pool *pool, size_t size) noexcept nogil:
    cdef Chunk *chunk = NULL
    cdef bint alone = size < <size_t>POOL_GRAIN * STEPS     # whether all chunks of its class have this size
    spin_lock(&pool.guard)
    if pool.backing.cool != NULL and not alone:
        chunk = find_alike(pool, size)  # it may have been in use, and have its pages; a larger chunk rather has none
    if chunk == NULL:
        chunk = find(pool, size // POOL_GRAIN)
    if chunk == NULL and not alone:
        chunk = find_alike(pool, size)
    if chunk != NULL:
        take_out(pool, chunk)
        chunk = split(pool, chunk, size)
        pool.users += 1
        add_own(&pool.resource.used, <int64_t>chunk.block.size)
        if pool.resource.used > pool.resource.peak:
            add_own(&pool.resource.peak, pool.resource.used - pool.resource.peak)
    spin_unlock(&pool.guard)
    return chunk


cdef Chunk *find_alike(Pool *pool, size_t size) noexcept nogil:
    # a free chunk of this size or a little larger: its class has smaller chunks, too, so look at a few
    cdef int level, step
    cdef Chunk *chunk
    cdef int looked = 0
    class_of(size // POOL_GRAIN, &level, &step)
    chunk = pool.free[level][step]
    while chunk != NULL and chunk.block.size < size:
        looked += 1
        chunk = chunk.next if looked < 16 else NULL
    return chunk


cdef Block *take_from_pool(Resource *resource, size_t size) noexcept nogil:
    cdef Pool *pool = <Pool *>resource
    cdef Chunk *chunk
    cdef bint grown = True
    size = rounded(max(size, <size_t>1), POOL_GRAIN) if size <= <size_t>1 << 47 else size
    chunk = carve(pool, size) if size <= <size_t>1 << 47 else NULL
    if chunk == NULL:
        lock(&pool.growth)
        chunk = carve(pool, size) if size <= <size_t>1 << 47 else NULL  # another thread may have grown the pool
        while chunk == NULL and grown:
            grown = grow(pool, size)
            if grown:
                chunk = carve(pool, size)  # NULL: other threads were quicker
        unlock(&pool.growth)
    if chunk == NULL:
        fetch_add64(&resource.refused, 1)
        return NULL
    return block_lent(&chunk.block)


cdef Pool *pool_new(const char *name, int64_t limit, size_t slab_size, const Backing *backing) noexcept nogil:
    cdef Pool *pool = <Pool *>calloc(1, sizeof(Pool))
    if pool == NULL:
        return NULL
    pool.resource.take = take_from_pool
    pool.resource.name = name
    pool.resource.limit = limit
    pool.slab_size = rounded(max(slab_size, <size_t>1), SLAB_GRAIN)
    pool.backing = backing[0]
    mutex_init(&pool.growth, NULL)
    return pool


cdef void pool_free(Pool *pool) noexcept nogil:
    cdef Chunk *batch
    cdef Slab *slab
    assert_that(pool.users == 0 and pool.resource.used == 0)
    while pool.slabs != NULL:
        slab = pool.slabs
        pool.slabs = slab.next
        release_slab(pool, slab)
    while pool.batches != NULL:
        batch = pool.batches
        pool.batches = batch.after
        free(batch)
    mutex_destroy(&pool.growth)
    if pool.backing.end != NULL:
        pool.backing.end(pool.backing.context)
    free(pool)


# ---------------------------------------------------------------------------------------------------------------------
# Python

cdef class PooledMemory(Memory):
    """A pool as an object. Subclasses provide the slabs."""

    cdef int make(self, const char *name, object limit, object slab_size, const Backing *backing) except -1:
        self.pool = pool_new(name, limit, slab_size, backing)
        if self.pool == NULL:
            raise MemoryError
        self.resource = &self.pool.resource
        return 0

    def __dealloc__(self):
        if self.pool != NULL:
            pool_leave(self.pool)

    def reserve(self, size: int) -> bool:
        """Allocate slabs until the pool holds at least `size` bytes, so that no thread waits for them later.

        False: there is no memory, or the limit is lower.
        """
        cdef size_t wanted = size
        cdef bint good
        with nogil:
            good = pool_reserve(self.pool, wanted)
        return good

    def trim(self) -> int:
        """Release the slabs that have no block; returns the number of bytes."""
        cdef size_t freed
        with nogil:
            freed = pool_trim(self.pool)
        return freed
