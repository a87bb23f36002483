"""The free blocks of host memory that all threads share, by size class.

The pool keeps a limited number of free bytes (`common_keep`). If there is no room for blocks that are given back, the
pool deletes free blocks of the classes whose last request is older than the last request for this class. Time is
measured in misses: requests for blocks that the pool did not have. So a size that is in use is pooled, whatever was in
use before.

Unmapping takes time, and the thread that gives a block back may be an I/O thread. So this thread deletes at most
AT_ONCE bytes beside its own block, and puts larger blocks aside for `common_cool`. `common_cool` deletes them, and
returns memory that was not used for some seconds to the system: of each class, as many blocks as were free all that
time.

From MAPPED_FROM on a block has a memory mapping of its own, so that deleting it returns the memory to the system and
leaves no hole in the heap. From HUGE_FROM on a block consists of huge pages.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free
from libc.string cimport memset

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport add_own, fetch_add64, load64, spin_lock, spin_unlock, store64
from inferd._native.memory.block cimport SHARED_WITH_NOBODY, Block, Resource
from inferd._native.memory.heap cimport heap_cool
from inferd._native.memory.size_classes cimport CLASSES, class_size, most_of
from inferd._native.threads cimport Mutex, lock, mutex_init, unlock

cdef extern from *:
    """
    #include <stdlib.h>
    #include <sys/mman.h>
    static inline void *inferd_map(size_t size) {
        void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return address == MAP_FAILED ? NULL : address;
    }
    /* the kernel clears and maps 2 MiB at a time instead of 4 KiB */
    static inline void inferd_prefer_huge_pages(void *address, size_t size) { madvise(address, size, MADV_HUGEPAGE); }
    static inline void inferd_raise(int64_t *peak, int64_t value) {
        int64_t seen = __atomic_load_n(peak, __ATOMIC_RELAXED);
        while (seen < value &&
               !__atomic_compare_exchange_n(peak, &seen, value, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    }
    """
    void *aligned_alloc(size_t alignment, size_t size) nogil
    void *map_memory "inferd_map"(size_t size) nogil
    int munmap(void *address, size_t size) nogil
    void prefer_huge_pages "inferd_prefer_huge_pages"(void *address, size_t size) nogil
    void raise_to "inferd_raise"(int64_t *peak, int64_t value) noexcept nogil

cdef enum:
    ALIGNMENT = 256           # what TensorRT requires, and more than vector instructions do
    HEAD = 64                 # in front of the data: a cache line
    KEPT_AT_FIRST = 128 << 20
    MAPPED_FROM = 1 << 20
    HUGE_FROM = 8 << 20
    IDLE_LOOKS = 3            # blocks that were free at so many calls of `common_cool`, and in between, are idle
    AT_ONCE = 16 << 20        # the most bytes, and the largest block, that a thread deletes to make room for another
    POPPED = 256              # blocks that are taken out while the lock of a class is held once

cdef struct SizeClass:
    int32_t guard             # a spin lock; protects all fields but `asked`
    Block *free
    int64_t count             # of free blocks; atomic, for readers without the lock
    int64_t least             # the smallest `count` since the last call of `common_cool`
    int64_t idle[IDLE_LOOKS]  # `least` at the last calls, used in turn
    int64_t asked             # value of `misses` when a block of this class was last requested; atomic

cdef SizeClass pool[CLASSES]
cdef int64_t pooled_bytes = 0  # of the free blocks of all classes, which lists of threads do not have; atomic
cdef int64_t most_kept = KEPT_AT_FIRST  # of pooled bytes; atomic
cdef int32_t aside_guard = 0
cdef Block *aside = NULL  # blocks that `common_cool` deletes
cdef int64_t aside_bytes = 0  # at most most_kept and one block; atomic
cdef int64_t misses = 0  # blocks that were requested and not in the pool; atomic
cdef int64_t looks = 0  # calls of `common_cool`; `cooling` protects it
cdef Mutex cooling
cdef Resource host_memory

memset(pool, 0, sizeof(pool))
memset(&host_memory, 0, sizeof(Resource))
host_memory.name = "host"
mutex_init(&cooling, NULL)


cdef Resource *common_resource() noexcept nogil:
    return &host_memory


# ---------------------------------------------------------------------------------------------------------------------
# Blocks from the system

cdef Block *block_new(size_t size, int size_class) noexcept nogil:
    # Head and data are one allocation: the head fills the cache line in front of the data.
    cdef size_t total
    cdef uint8_t *start
    cdef Block *block
    if size > <size_t>-1 - 4 * ALIGNMENT:
        return NULL
    total = (ALIGNMENT + size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)
    start = <uint8_t *>(map_memory(total) if total >= MAPPED_FROM else aligned_alloc(ALIGNMENT, total))
    if start == NULL:
        fetch_add64(&host_memory.refused, 1)
        return NULL
    if total >= HUGE_FROM:
        prefer_huge_pages(start, total)
    block = <Block *>(start + ALIGNMENT - HEAD)
    block.data = start + ALIGNMENT
    block.size = total - ALIGNMENT
    # Blocks of a class are alike: bytes are counted by class.
    assert_that(size_class < 0 or block.size == (class_size(size_class) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)
    block.size_class = size_class
    block.sharing = SHARED_WITH_NOBODY
    block.sealed = False
    raise_to(&host_memory.peak, fetch_add64(&host_memory.held, <int64_t>block.size) + <int64_t>block.size)
    return block


cdef void block_delete(Block *block) noexcept nogil:
    cdef uint8_t *start = block.data - ALIGNMENT
    fetch_add64(&host_memory.held, -<int64_t>block.size)
    if block.size + ALIGNMENT >= MAPPED_FROM:
        munmap(start, block.size + ALIGNMENT)
    else:
        free(start)


cdef Block *delete_first(Block *block) noexcept nogil:
    cdef Block *following = block.next
    block_delete(block)
    return following


cdef void delete_chain(Block *block) noexcept nogil:
    while block != NULL:
        block = delete_first(block)


# ---------------------------------------------------------------------------------------------------------------------
# Taking

cdef Block *pop(int index, int32_t wanted, int32_t *count) noexcept nogil:
    # a chain of up to `wanted` free blocks of a class; NULL: there is none
    cdef SizeClass *size_class = &pool[index]
    cdef Block *first
    cdef Block *last
    cdef int64_t before
    count[0] = 0
    spin_lock(&size_class.guard)
    first = last = size_class.free
    if first != NULL:
        count[0] = 1
        while count[0] < wanted and last.next != NULL:
            last = last.next
            count[0] += 1
        size_class.free = last.next
        add_own(&size_class.count, -count[0])
        size_class.least = min(size_class.least, size_class.count)
        last.next = NULL
    assert_that((size_class.free == NULL) == (size_class.count == 0))
    spin_unlock(&size_class.guard)
    if first != NULL:
        before = fetch_add64(&pooled_bytes, -<int64_t>first.size * count[0])
        assert_that(before >= <int64_t>first.size * count[0])
    return first


cdef Block *common_take(int index, int32_t wanted, int32_t *count) noexcept nogil:
    cdef Block *block = pop(index, wanted, count)
    if block != NULL:
        store64(&pool[index].asked, load64(&misses))
        return block
    # a miss: from now on classes that are requested count as more recent
    store64(&pool[index].asked, fetch_add64(&misses, 1) + 1)
    block = block_new(class_size(index), index)
    if block != NULL:
        block.next = NULL
        count[0] = 1
    return block


# ---------------------------------------------------------------------------------------------------------------------
# Giving

cdef int stalest(int index) noexcept nogil:
    # Of the classes with free blocks, the one whose last request is the oldest; -1: none is older than that for
    # `index`.
    cdef int64_t oldest = load64(&pool[index].asked)
    cdef int found = -1
    cdef int i
    for i in range(CLASSES):
        if i != index and load64(&pool[i].count) > 0 and load64(&pool[i].asked) < oldest:
            oldest = load64(&pool[i].asked)
            found = i
    return found


cdef void put_aside(Block *block) noexcept nogil:
    global aside
    fetch_add64(&aside_bytes, <int64_t>block.size)
    spin_lock(&aside_guard)
    block.next = aside
    aside = block
    spin_unlock(&aside_guard)


cdef bint displace(int index, int64_t *freed) noexcept nogil:
    # Delete some blocks of the class with the oldest last request. False: there is none, or enough has been deleted.
    cdef int victim = stalest(index) if freed[0] < AT_ONCE else -1
    cdef int32_t count
    cdef Block *chain
    if victim < 0:
        return False
    if class_size(victim) <= AT_ONCE:
        chain = pop(victim, most_of(class_size(victim)), &count)
        freed[0] += <int64_t>class_size(victim) * count
        delete_chain(chain)
        return True
    if load64(&aside_bytes) >= load64(&most_kept):
        return False
    chain = pop(victim, 1, &count)
    if chain != NULL:
        put_aside(chain)
    return True


cdef bint make_room(int index, int64_t size) noexcept nogil:
    # Count `size` bytes more of a class as pooled. False: they exceed the limit, and no other class is older.
    cdef int64_t freed = 0
    while fetch_add64(&pooled_bytes, size) + size > load64(&most_kept):
        fetch_add64(&pooled_bytes, -size)
        if size > load64(&most_kept) or not displace(index, &freed):
            return False
    return True


cdef void common_give(Block *first, Block *last, int index, int32_t count) noexcept nogil:
    cdef SizeClass *size_class = &pool[index]
    assert_that(count > 0 and first.size_class == index and last.size_class == index)
    last.next = NULL
    if not make_room(index, <int64_t>first.size * count):
        delete_chain(first)
        return
    spin_lock(&size_class.guard)
    last.next = size_class.free
    size_class.free = first
    add_own(&size_class.count, count)
    spin_unlock(&size_class.guard)


cdef int64_t common_pooled() noexcept nogil:
    return load64(&pooled_bytes)


cdef int64_t common_aside() noexcept nogil:
    return load64(&aside_bytes)


cdef void common_keep(int64_t size) noexcept nogil:
    store64(&most_kept, size)


# ---------------------------------------------------------------------------------------------------------------------
# Giving memory back to the system

cdef int64_t delete_aside() noexcept nogil:
    # delete the blocks that were put aside; their bytes
    cdef Block *chain
    cdef int64_t before = load64(&host_memory.held)
    global aside
    spin_lock(&aside_guard)
    chain = aside
    aside = NULL
    spin_unlock(&aside_guard)
    while chain != NULL:
        fetch_add64(&aside_bytes, -<int64_t>chain.size)
        chain = delete_first(chain)
    return max(0, before - load64(&host_memory.held))


cdef int64_t drop(int index, int64_t count) noexcept nogil:
    # delete up to `count` free blocks of a class; their bytes
    cdef int32_t popped
    cdef int64_t size
    cdef int64_t dropped = 0
    cdef Block *chain
    while count > 0:
        chain = pop(index, <int32_t>min(count, <int64_t>POPPED), &popped)
        if chain == NULL:
            break
        size = <int64_t>chain.size
        delete_chain(chain)
        dropped += size * popped
        count -= popped
    return dropped


cdef void common_trim() noexcept nogil:
    cdef int index
    for index in range(CLASSES):
        drop(index, load64(&pool[index].count))
    delete_aside()


cdef int64_t common_cool() noexcept nogil:
    cdef int64_t dropped = 0
    cdef int64_t idle
    cdef int index, i
    global looks
    lock(&cooling)
    dropped = delete_aside()
    for index in range(CLASSES):
        spin_lock(&pool[index].guard)
        pool[index].idle[looks % IDLE_LOOKS] = pool[index].least
        pool[index].least = pool[index].count
        idle = pool[index].count
        for i in range(IDLE_LOOKS):
            idle = min(idle, pool[index].idle[i])
        spin_unlock(&pool[index].guard)
        dropped += drop(index, idle)
    looks += 1
    dropped += heap_cool()
    unlock(&cooling)
    return dropped


cdef bint common_is_still() noexcept nogil:
    cdef bint still
    cdef int index
    spin_lock(&aside_guard)
    still = aside == NULL
    spin_unlock(&aside_guard)
    for index in range(CLASSES):
        if not still:
            return False
        spin_lock(&pool[index].guard)
        still = pool[index].count == pool[index].least
        spin_unlock(&pool[index].guard)
    return still
