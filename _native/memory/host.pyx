"""Host memory for messages and tensors, from a pool of size classes.

A block that is given back becomes a free block of its size class, where the next message of that size finds it already
mapped: a new allocation of 600 kB costs some 150 page faults, which take several times as long as copying the tensor.

Free blocks of up to 64 KiB first go to lists of the thread that gave them back, where taking one needs neither lock nor
atomic instruction. Half of a list that is full goes to the pool that all threads share
(`inferd._native.memory.common_pool`); a list that is empty is filled from there to a half. Larger blocks go there at
once. Blocks move between threads (the event loop gives
back the block of an instance), so a single thread's count may be negative; only the sum counts.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport add_own, fetch_add64, load64
from inferd._native.memory.block cimport CLASS_LARGE, Block, Resource
from inferd._native.memory.common_pool cimport (
    block_delete,
    block_new,
    common_aside,
    common_give,
    common_pooled,
    common_resource,
    common_take,
    common_trim,
)
from inferd._native.memory.size_classes cimport CLASSES, OWN_CLASSES, class_of, class_size, most_of
from inferd._native.memory.spoiling cimport NONSENSE, spoils
from inferd._native.threads cimport Mutex, lock, mutex_init, unlock

cdef extern from *:
    """
    #include <pthread.h>
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
    """
    void *own_lists "inferd_own"() noexcept nogil
    bint set_own_lists "inferd_set_own"(void *lists) noexcept nogil
    int own_lists_init "inferd_own_init"(void (*ended)(void *) noexcept nogil) nogil

cdef struct OwnLists:
    # the lists of one thread, which alone writes to them
    Block *free[OWN_CLASSES]
    int32_t count[OWN_CLASSES]
    int64_t blocks            # blocks that the thread took minus those that it gave back
    int64_t pooled            # bytes in these lists
    OwnLists *next

cdef int64_t ledger = 0  # blocks taken less given back, by threads that have ended or have no lists; atomic
cdef Mutex registry_guard
cdef OwnLists *registry = NULL  # the lists of all threads

mutex_init(&registry_guard, NULL)
common_resource().take = take
if own_lists_init(thread_ended):
    raise MemoryError("no key for the lists of threads")


cdef Block *take(Resource *resource, size_t size) noexcept nogil:
    return host_take(size)


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
    # Other threads may use the free blocks of the thread that has ended; `ledger` takes over its count.
    cdef OwnLists *lists = <OwnLists *>argument
    cdef OwnLists **at = &registry
    set_own_lists(NULL)
    share_all(lists)
    assert_that(lists.pooled == 0)
    lock(&registry_guard)
    while at[0] != lists:
        at = &at[0].next
    at[0] = lists.next
    fetch_add64(&ledger, lists.blocks)
    unlock(&registry_guard)
    free(lists)


cdef void share_some(OwnLists *lists, int index, int32_t count) noexcept nogil:
    # move the first `count` blocks of a list to the common pool
    cdef Block *first = lists.free[index]
    cdef Block *last = first
    if count == 0:
        return
    for _ in range(count - 1):
        last = last.next
    lists.free[index] = last.next
    lists.count[index] -= count
    assert_that((lists.free[index] == NULL) == (lists.count[index] == 0))
    add_own(&lists.pooled, -<int64_t>first.size * count)
    common_give(first, last, index, count)


cdef void share_all(OwnLists *lists) noexcept nogil:
    cdef int index
    for index in range(OWN_CLASSES):
        share_some(lists, index, lists.count[index])


cdef Block *refill(OwnLists *lists, int index) noexcept nogil:
    # one block for the caller, and up to half a list for later
    cdef int32_t count
    cdef Block *first = common_take(index, most_of(class_size(index)) // 2, &count)
    if first == NULL:
        return NULL
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
    cdef int32_t taken
    if 0 <= index < OWN_CLASSES and lists != NULL:
        block = lists.free[index]
        if block != NULL:
            assert_that(lists.count[index] > 0)
            lists.free[index] = block.next
            lists.count[index] -= 1
            add_own(&lists.pooled, -<int64_t>block.size)
        else:
            block = refill(lists, index)
    elif index >= 0:
        block = common_take(index, 1, &taken)
    else:
        block = block_new(size, CLASS_LARGE)
    if block != NULL:
        assert_that(block.size >= size and block.size_class == index)
        block.references = 1
        count(lists, 1)
    return block


cdef Block *host_take_apart(size_t size) noexcept nogil:
    cdef Block *block = block_new(size, CLASS_LARGE)
    if block != NULL:
        block.references = 1
        count(lists_of_thread(), 1)
    return block


cdef void host_give(Block *block) noexcept nogil:
    cdef int index = block.size_class
    cdef OwnLists *lists = lists_of_thread()
    assert_that(block.references == 0 and index < CLASSES)
    count(lists, -1)
    if spoils:
        memset(block.data, NONSENSE, block.size)
    if index == CLASS_LARGE:
        block_delete(block)
    elif index >= OWN_CLASSES or lists == NULL:
        common_give(block, block, index, 1)
    else:
        block.next = lists.free[index]
        lists.free[index] = block
        lists.count[index] += 1
        add_own(&lists.pooled, <int64_t>block.size)
        if lists.count[index] > most_of(block.size):
            share_some(lists, index, lists.count[index] // 2)


cdef int64_t host_trim() noexcept nogil:
    cdef Resource *memory = common_resource()
    cdef OwnLists *lists = lists_of_thread()
    cdef int64_t before = load64(&memory.held)
    if lists != NULL:
        share_all(lists)
    common_trim()
    return before - load64(&memory.held)


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
    return common_pooled() + sum_of_threads(False)


cdef int64_t host_free() noexcept nogil:
    return host_pooled() + common_aside()


def size_class(size: int) -> tuple[int, int]:
    """The class that serves `size` bytes and the bytes that it gives; (-1, size) beyond the largest."""
    cdef int index = class_of(size)
    return (index, class_size(index)) if index >= 0 else (index, size)
