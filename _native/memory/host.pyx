"""Host memory for messages and tensors, from a pool of size classes.

A block that is given back goes to the free list of its size class, where the next message of that size finds it
already mapped. That matters: a fresh 600 kB allocation costs some 150 page faults, several times the cost of copying
the tensor.

There are four size classes for each power of two, from 256 bytes to 1 GiB. So at most a fifth of a block is unused, and
in a large block that fifth is address space only. From MAPPED_FROM on a block has a memory mapping of its own, so that
freeing it returns it to the system and leaves no hole in the heap. From HUGE_FROM on a block consists of huge pages.

The pool keeps a limited number of free bytes (`host_keep`). If there is no room for a block that is given back, blocks
make room whose classes were not requested since its own class was; the pool measures that time in blocks that it did
not have. So a size that is in use is pooled, whatever was in use before. Unmapping takes time, and the thread that
gives a block back may be the event loop. So it frees at most AT_ONCE bytes beside its own block, and leaves larger
blocks for `host_cool`. `host_cool` also returns memory to the system that was not used for some seconds: of each class
as many blocks as were free all that time.

Blocks of up to 64 KiB first go to lists of the thread that gave them back, where taking one needs neither lock nor
atomic instruction. A list that is full or empty is halved or filled from the common lists. Blocks move between threads
(an instance's block is given back by the event loop), so a single thread's count may be negative; only the sum counts.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from _native.atomic cimport add_own, fetch_add64, load64, spin_lock, spin_unlock, store64
from _native.memory.resource cimport CLASS_LARGE, SHARED_WITH_NOBODY, Block, Resource
from _native.threads cimport Mutex, lock, mutex_init, unlock


cdef extern from *:
    """
    #include <stdlib.h>
    #ifdef NDEBUG
    #define INFERD_DEBUG 0
    #else
    #define INFERD_DEBUG 1
    #endif
    #include <pthread.h>
    #include <sys/mman.h>
    static inline void *inferd_map(size_t size) {
        void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return address == MAP_FAILED ? NULL : address;
    }
    #include <malloc.h>
    /* the kernel clears and maps 2 MiB at a time instead of 4 KiB */
    static inline void inferd_prefer_huge_pages(void *address, size_t size) { madvise(address, size, MADV_HUGEPAGE); }
    /* bytes that the C library has free in its heaps, of which it returns hardly any by itself; -1: not known */
    static inline int64_t inferd_heap_free(void) {
    #if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
        return (int64_t)mallinfo2().fordblks;
    #else
        return -1;
    #endif
    }
    static inline void inferd_heap_trim(void) {
    #if defined(__GLIBC__)
        malloc_trim(0);
    #endif
    }
    static inline int inferd_log2(size_t n) { return 63 - __builtin_clzll((unsigned long long)n); }

    /* the thread's own lists: a variable for speed, a key for the call when the thread ends */
    static _Thread_local void *inferd_lists __attribute__((tls_model("initial-exec")));
    static pthread_key_t inferd_lists_key;
    static inline void *inferd_own(void) { return inferd_lists; }
    static inline int inferd_set_own(void *lists) {
        if (pthread_setspecific(inferd_lists_key, lists)) return 0;
        inferd_lists = lists;
        return 1;
    }
    static inline int inferd_own_init(void (*ended)(void *)) { return pthread_key_create(&inferd_lists_key, ended); }
    static inline void inferd_raise(int64_t *peak, int64_t value) {
        int64_t seen = __atomic_load_n(peak, __ATOMIC_RELAXED);
        while (seen < value &&
               !__atomic_compare_exchange_n(peak, &seen, value, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    }
    """
    const bint DEBUG "INFERD_DEBUG"
    int floor_log2 "inferd_log2"(size_t n) nogil
    void *aligned_alloc(size_t alignment, size_t size) nogil
    void *map_memory "inferd_map"(size_t size) nogil
    int munmap(void *address, size_t size) nogil
    void prefer_huge_pages "inferd_prefer_huge_pages"(void *address, size_t size) nogil
    int64_t heap_free "inferd_heap_free"() noexcept nogil
    void trim_heap "inferd_heap_trim"() noexcept nogil
    void *own_lists "inferd_own"() noexcept nogil
    bint set_own_lists "inferd_set_own"(void *lists) noexcept nogil
    int own_lists_init "inferd_own_init"(void (*ended)(void *) noexcept nogil) nogil
    void raise_to "inferd_raise"(int64_t *peak, int64_t value) noexcept nogil

cdef enum:
    ALIGNMENT = 256           # what TensorRT wants, and more than vector instructions do
    HEAD = 64                 # in front of the data: a cache line
    SMALLEST_LOG2 = 8
    LARGEST = 1 << 30
    CLASSES = 89
    OWN_CLASSES = 33          # up to 64 KiB
    OWN_BYTES = 128 << 10     # kept of a class by a thread, but at least two blocks
    OWN_BLOCKS = 32           # and at most so many
    KEPT_AT_FIRST = 128 << 20
    MAPPED_FROM = 1 << 20
    HUGE_FROM = 8 << 20
    IDLE_LOOKS = 3            # blocks that were free at so many looks of `host_cool`, and in between, are idle
    AT_ONCE = 16 << 20        # bytes that make room for one block at most, and the largest that are freed on the spot
    HEAP_SLACK = 8 << 20      # free bytes more in the heap than after its last trim are worth another

cdef struct SizeClass:
    int32_t guard             # a spin lock, of all but `asked`
    Block *free
    int64_t count             # of them; atomic, for those who look without the lock
    int64_t least             # there were since the last look
    int64_t idle[IDLE_LOOKS]  # and at the looks before, in turn
    int64_t asked             # when a block was last asked for, in misses; atomic

cdef struct OwnLists:
    # what belongs to one thread: written by it alone
    Block *free[OWN_CLASSES]
    int32_t count[OWN_CLASSES]
    int64_t blocks            # taken, less given
    int64_t pooled            # bytes in these lists
    OwnLists *next

cdef SizeClass pool[CLASSES]
cdef int64_t pooled_bytes = 0  # in the lists of all threads
cdef int64_t most_kept = KEPT_AT_FIRST  # of them; atomic
cdef int32_t aside_guard = 0
cdef Block *aside = NULL  # blocks that `host_cool` deletes
cdef int64_t aside_bytes = 0  # no more than may be kept, but for one; atomic
cdef int64_t misses = 0  # blocks that were asked for and not there; atomic
cdef int64_t looks = 0  # of `host_cool`, which one thread at a time calls
cdef int64_t heap_before = 0  # free bytes of the heap after its last trim, or fewer since
cdef int64_t heap_idle[IDLE_LOOKS]  # free bytes of the heap at the last looks
cdef Mutex cooling
cdef int64_t ledger = 0  # blocks taken less given by threads that have ended or have no lists
cdef Resource host_memory
cdef Mutex registry_guard
cdef OwnLists *registry = NULL

memset(pool, 0, sizeof(pool))
mutex_init(&cooling, NULL)
mutex_init(&registry_guard, NULL)
memset(&host_memory, 0, sizeof(Resource))
host_memory.take = take
host_memory.name = "host"
if own_lists_init(thread_ended):
    raise MemoryError("no key for the lists of threads")


cdef Block *take(Resource *resource, size_t size) noexcept nogil:
    return host_take(size)


cdef Resource *host_resource() noexcept nogil:
    return &host_memory


# ---------------------------------------------------------------------------------------------------------------------
# Size classes

cdef inline int class_of(size_t size) noexcept nogil:
    cdef int log2
    if size <= (1 << SMALLEST_LOG2):
        return 0
    if size > LARGEST:
        return CLASS_LARGE
    log2 = floor_log2(size - 1)
    return (log2 - SMALLEST_LOG2) * 4 + <int>(((size - 1) >> (log2 - 2)) & 3) + 1


cdef inline size_t class_size(int index) noexcept nogil:
    if index == 0:
        return 1 << SMALLEST_LOG2
    return <size_t>(4 + (index - 1) % 4 + 1) << (SMALLEST_LOG2 + (index - 1) // 4 - 2)


cdef inline int32_t most_of(size_t size) noexcept nogil:
    # how many blocks of this size a thread keeps
    return <int32_t>min(max(<size_t>OWN_BYTES // size, <size_t>2), <size_t>OWN_BLOCKS)


cdef Block *block_new(size_t size, int size_class) noexcept nogil:
    # head and data in one allocation: the head fills the cache line in front of the data
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
    block.size_class = size_class
    block.sharing = SHARED_WITH_NOBODY
    block.sealed = False
    raise_to(&host_memory.peak, fetch_add64(&host_memory.held, <int64_t>block.size) + <int64_t>block.size)
    return block


cdef inline void block_delete(Block *block) noexcept nogil:
    cdef uint8_t *start = block.data - ALIGNMENT
    fetch_add64(&host_memory.held, -<int64_t>block.size)
    if block.size + ALIGNMENT >= MAPPED_FROM:
        munmap(start, block.size + ALIGNMENT)
    else:
        free(start)


# ---------------------------------------------------------------------------------------------------------------------
# Lists of a thread

cdef OwnLists *new_lists() noexcept nogil:
    cdef OwnLists *lists = <OwnLists *>calloc(1, sizeof(OwnLists))
    if lists == NULL or not set_own_lists(lists):
        free(lists)
        return NULL
    lock(&registry_guard)
    global registry
    lists.next = registry
    registry = lists
    unlock(&registry_guard)
    return lists


cdef inline OwnLists *lists_of_thread() noexcept nogil:
    cdef void *lists = own_lists()
    return <OwnLists *>lists if lists != NULL else new_lists()


cdef inline void count(OwnLists *lists, int64_t n) noexcept nogil:
    if lists != NULL:
        add_own(&lists.blocks, n)
    else:
        fetch_add64(&ledger, n)


cdef void host_count(int64_t n) noexcept nogil:
    count(lists_of_thread(), n)


cdef void thread_ended(void *argument) noexcept nogil:
    # its blocks go to all, its ledger to that of the process
    cdef OwnLists *lists = <OwnLists *>argument
    cdef OwnLists **at = &registry
    cdef int index
    set_own_lists(NULL)
    for index in range(OWN_CLASSES):
        share_some(lists, index, lists.count[index])
    lock(&registry_guard)
    while at[0] != lists:
        at = &at[0].next
    at[0] = lists.next
    fetch_add64(&ledger, lists.blocks)
    unlock(&registry_guard)
    free(lists)


cdef void share_some(OwnLists *lists, int index, int32_t count) noexcept nogil:
    # let other threads have `count` blocks of a class
    cdef Block *first = lists.free[index]
    cdef Block *last = first
    cdef int64_t size
    if count == 0:
        return
    size = <int64_t>first.size * count
    for _ in range(count - 1):
        last = last.next
    lists.free[index] = last.next
    lists.count[index] -= count
    add_own(&lists.pooled, -size)
    last.next = NULL
    if not make_room(index, size):
        delete_chain(first)
        return
    spin_lock(&pool[index].guard)
    last.next = pool[index].free
    pool[index].free = first
    add_own(&pool[index].count, count)
    spin_unlock(&pool[index].guard)


cdef Block *delete_first(Block *block) noexcept nogil:
    cdef Block *following = block.next
    block_delete(block)
    return following


cdef void delete_chain(Block *block) noexcept nogil:
    while block != NULL:
        block = delete_first(block)


cdef inline void asked_for(int index) noexcept nogil:
    store64(&pool[index].asked, load64(&misses))


cdef Block *missing(int index) noexcept nogil:
    # a new block, because there is none: from now on classes that are asked for count as more recent
    store64(&pool[index].asked, fetch_add64(&misses, 1) + 1)
    return block_new(class_size(index), index)


cdef Block *pop(int index, int32_t wanted, int32_t *count) noexcept nogil:
    # a chain of up to so many free blocks of a class; NULL: there is none
    cdef SizeClass *size_class = &pool[index]
    cdef Block *first
    cdef Block *last
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
    spin_unlock(&size_class.guard)
    if first != NULL:
        fetch_add64(&pooled_bytes, -<int64_t>first.size * count[0])
    return first


cdef Block *take_shared(int index) noexcept nogil:
    cdef int32_t count
    cdef Block *block = pop(index, 1, &count)
    if block == NULL:
        return missing(index)
    asked_for(index)
    return block


cdef int stalest(int index) noexcept nogil:
    # of the classes with free blocks the one that was asked for the longest ago, before this one was; -1: none
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


cdef int64_t delete_aside() noexcept nogil:
    # the bytes
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


cdef bint displace(int index, int64_t *freed) noexcept nogil:
    # some blocks of the class that has been asked for the longest ago; False: there is none, or it is enough
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
    # count `size` bytes more of a class as pooled. False: they must not be, all others are wanted more
    cdef int64_t freed = 0
    while fetch_add64(&pooled_bytes, size) + size > load64(&most_kept):
        fetch_add64(&pooled_bytes, -size)
        if size > load64(&most_kept) or not displace(index, &freed):
            return False
    return True


cdef void give_shared(Block *block) noexcept nogil:
    cdef SizeClass *size_class = &pool[block.size_class]
    if not make_room(block.size_class, <int64_t>block.size):
        block_delete(block)
        return
    spin_lock(&size_class.guard)
    block.next = size_class.free
    size_class.free = block
    add_own(&size_class.count, 1)
    spin_unlock(&size_class.guard)


cdef Block *refill(OwnLists *lists, int index) noexcept nogil:
    # one block for the caller, and up to half a list for later
    cdef int32_t count
    cdef Block *first = pop(index, most_of(class_size(index)) // 2, &count)
    if first == NULL:
        return missing(index)
    asked_for(index)
    lists.free[index] = first.next
    lists.count[index] = count - 1
    add_own(&lists.pooled, <int64_t>first.size * (count - 1))
    return first


# ---------------------------------------------------------------------------------------------------------------------
# Taking and giving

cdef Block *host_take(size_t size) noexcept nogil:
    cdef int index = class_of(size)
    cdef OwnLists *lists = lists_of_thread()
    cdef Block *block
    if 0 <= index < OWN_CLASSES and lists != NULL:
        block = lists.free[index]
        if block != NULL:
            lists.free[index] = block.next
            lists.count[index] -= 1
            add_own(&lists.pooled, -<int64_t>block.size)
        else:
            block = refill(lists, index)
    elif index >= 0:
        block = take_shared(index)
    else:
        block = block_new(size, CLASS_LARGE)
    if block != NULL:
        block.references = 1
        count(lists, 1)
    return block


cdef void host_give(Block *block) noexcept nogil:
    cdef int index = block.size_class
    cdef OwnLists *lists = lists_of_thread()
    count(lists, -1)
    if DEBUG:
        memset(block.data, 0xA5, block.size)  # nobody may read a block that was given back
    if index == CLASS_LARGE:
        block_delete(block)
    elif index >= OWN_CLASSES or lists == NULL:
        give_shared(block)
    else:
        block.next = lists.free[index]
        lists.free[index] = block
        lists.count[index] += 1
        add_own(&lists.pooled, <int64_t>block.size)
        if lists.count[index] > most_of(block.size):
            share_some(lists, index, lists.count[index] // 2)


# ---------------------------------------------------------------------------------------------------------------------
# Figures

cdef int64_t sum_of_threads(bint blocks) noexcept nogil:
    cdef OwnLists *lists
    cdef int64_t total = 0
    lock(&registry_guard)
    lists = registry
    while lists != NULL:
        total += load64(&lists.blocks if blocks else &lists.pooled)
        lists = lists.next
    if blocks:
        total += load64(&ledger)
    unlock(&registry_guard)
    return total


cdef int64_t host_blocks() noexcept nogil:
    return sum_of_threads(True)


cdef int64_t host_pooled() noexcept nogil:
    return load64(&pooled_bytes) + sum_of_threads(False)


cdef int64_t host_free() noexcept nogil:
    return host_pooled() + load64(&aside_bytes)


# ---------------------------------------------------------------------------------------------------------------------
# Giving memory back to the system

cdef void host_keep(int64_t size) noexcept nogil:
    store64(&most_kept, size)


cdef int64_t drop(int index, int64_t count) noexcept nogil:
    # delete so many free blocks of a class, if there are; their bytes
    cdef int32_t popped
    cdef int64_t size
    cdef int64_t dropped = 0
    cdef Block *chain
    while count > 0:
        chain = pop(index, <int32_t>min(count, <int64_t>256), &popped)  # the lock is held for so many
        if chain == NULL:
            break
        size = <int64_t>chain.size
        delete_chain(chain)
        dropped += size * popped
        count -= popped
    return dropped


cdef int64_t host_trim() noexcept nogil:
    cdef int index
    cdef OwnLists *lists = lists_of_thread()
    cdef int64_t before = load64(&host_memory.held)
    for index in range(CLASSES):
        if index < OWN_CLASSES and lists != NULL:
            share_some(lists, index, lists.count[index])
        drop(index, load64(&pool[index].count))
    delete_aside()
    return before - load64(&host_memory.held)


cdef int64_t host_cool() noexcept nogil:
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
    dropped += cool_heap()
    unlock(&cooling)
    return dropped


cdef bint host_is_still() noexcept nogil:
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


cdef int64_t cool_heap() noexcept nogil:
    # What the C library has free lies in pages that it keeps: those of connections that have left, of small blocks. To
    # give them back takes its locks, so that is done when they were free for some time, and many.
    cdef int64_t idle
    cdef int i
    global heap_before
    heap_idle[looks % IDLE_LOOKS] = heap_free()
    idle = heap_idle[0]
    for i in range(1, IDLE_LOOKS):
        idle = min(idle, heap_idle[i])
    heap_before = min(heap_before, heap_idle[looks % IDLE_LOOKS])
    if idle - heap_before < HEAP_SLACK:
        return 0
    trim_heap()
    heap_before = heap_free()
    return idle - heap_before if idle > heap_before else 0


def size_class(size: int) -> tuple[int, int]:
    """The class that serves `size` bytes and the bytes that it gives; (-1, size) beyond the largest."""
    cdef int index = class_of(size)
    return (index, class_size(index)) if index >= 0 else (index, size)
