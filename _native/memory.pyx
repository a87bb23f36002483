"""Host memory for messages and tensors: reference-counted blocks from a pool of size classes.

A block is taken with one reference, shared, and given back; the last reference returns it to the free list of its size
class, where the next message of that size finds it already mapped. That matters: a fresh 600 kB allocation costs some
150 page faults, several times the cost of copying the tensor.

Size classes are four per power of two, from 256 bytes to 64 MiB, so at most a fifth of a block is unused. Larger blocks
are not pooled. The pool keeps at most POOL_LIMIT free bytes; beyond that, blocks are freed. From MAPPED_FROM on a block
has a memory mapping of its own, so that freeing it returns it to the system and leaves no hole in the heap.
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from _native.atomic cimport fetch_add32, fetch_add64, load64
from _native.threads cimport Mutex, lock, mutex_init, unlock


cdef extern from *:
    """
    #include <stdlib.h>
    #ifdef NDEBUG
    #define INFERD_DEBUG 0
    #else
    #define INFERD_DEBUG 1
    #endif
    #include <sys/mman.h>
    static inline void *inferd_map(size_t size) {
        void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return address == MAP_FAILED ? NULL : address;
    }
    static inline int inferd_log2(size_t n) { return 63 - __builtin_clzll((unsigned long long)n); }
    """
    const bint DEBUG "INFERD_DEBUG"
    int floor_log2 "inferd_log2"(size_t n) nogil
    void *aligned_alloc(size_t alignment, size_t size) nogil
    void *map_memory "inferd_map"(size_t size) nogil
    int munmap(void *address, size_t size) nogil

cdef enum:
    ALIGNMENT = 64            # a cache line; also what vector instructions want
    SMALLEST_LOG2 = 8
    LARGEST = 64 << 20
    CLASSES = 73
    CLASS_LARGE = -1
    CLASS_FOREIGN = -2
    POOL_LIMIT = 128 << 20
    MAPPED_FROM = 1 << 20

cdef struct SizeClass:
    Mutex guard
    Block *free

cdef SizeClass pool[CLASSES]
cdef int64_t pooled_bytes = 0
cdef int64_t live[LIVE_KINDS]

cdef int _index
for _index in range(CLASSES):
    mutex_init(&pool[_index].guard, NULL)
    pool[_index].free = NULL


cdef void live_add(Live kind, int64_t n) noexcept nogil:
    fetch_add64(&live[<int>kind], n)


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


cdef Block *block_new(size_t size, int size_class) noexcept nogil:
    # head and data in one allocation: the head fills the cache line in front of the data
    cdef size_t total
    cdef Block *block
    if size > <size_t>-1 - 4 * ALIGNMENT:
        return NULL
    total = (ALIGNMENT + size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)
    block = <Block *>(map_memory(total) if total >= MAPPED_FROM else aligned_alloc(ALIGNMENT, total))
    if block == NULL:
        return NULL
    block.data = <uint8_t *>block + ALIGNMENT
    block.size = total - ALIGNMENT
    block.size_class = size_class
    block.sharing = SHARED_WITH_NOBODY
    return block


cdef inline void block_delete(Block *block) noexcept nogil:
    if block.size + ALIGNMENT >= MAPPED_FROM:
        munmap(block, block.size + ALIGNMENT)
    else:
        free(block)


cdef Block *block_take(size_t size) noexcept nogil:
    cdef int index = class_of(size)
    cdef Block *block = NULL
    if index >= 0:
        lock(&pool[index].guard)
        block = pool[index].free
        if block != NULL:
            pool[index].free = block.next
        unlock(&pool[index].guard)
        if block != NULL:
            fetch_add64(&pooled_bytes, -<int64_t>block.size)
        else:
            block = block_new(class_size(index), index)
    else:
        block = block_new(size, CLASS_LARGE)
    if block != NULL:
        block.references = 1
        live_add(LIVE_BLOCKS, 1)
    return block


cdef Block *block_wrap(const void *data, size_t size, release_fn release, void *owner) noexcept nogil:
    cdef Block *block = <Block *>malloc(sizeof(Block))
    if block == NULL:
        return NULL
    block.data = <uint8_t *>data
    block.size = size
    block.references = 1
    block.size_class = CLASS_FOREIGN
    block.sharing = SHARED_WITH_NOBODY
    block.release = release
    block.owner = owner
    live_add(LIVE_BLOCKS, 1)
    return block


cdef Block *block_share(Block *block) noexcept nogil:
    fetch_add32(&block.references, 1)
    return block


cdef void block_give(Block *block) noexcept nogil:
    cdef int index
    if block == NULL or fetch_add32(&block.references, -1) != 1:
        return
    live_add(LIVE_BLOCKS, -1)
    index = block.size_class
    if index == CLASS_FOREIGN:
        block.release(block.owner)
        free(block)
    elif index == CLASS_LARGE or load64(&pooled_bytes) + <int64_t>block.size > POOL_LIMIT:
        block_delete(block)
    else:
        if DEBUG:
            memset(block.data, 0xA5, block.size)  # nobody may read a block that was given back
        fetch_add64(&pooled_bytes, <int64_t>block.size)
        lock(&pool[index].guard)
        block.next = pool[index].free
        pool[index].free = block
        unlock(&pool[index].guard)


cdef bint block_own(Block **block, const uint8_t **data, size_t size) noexcept nogil:
    cdef Block *own
    if block[0].sharing == SHARED_WITH_NOBODY:
        return True
    own = block_take(size)
    if own == NULL:
        return False
    memcpy(own.data, data[0], size)
    block_give(block[0])
    block[0] = own
    data[0] = own.data
    return True


cdef void release_object(void *owner) noexcept nogil:
    with gil:
        Py_DECREF(<object>owner)


cdef Block *block_of_object(object owner, const void *data, size_t size):
    cdef Block *block = block_wrap(data, size, release_object, <void *>owner)
    if block != NULL:
        Py_INCREF(owner)
    return block


cdef class BlockView:
    """Read-only buffer over part of a block, for handing its bytes to Python without a copy."""

    def __init__(self):
        raise TypeError("BlockView cannot be created from Python")

    def __dealloc__(self):
        block_give(self.block)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *>self.data, self.size, 1, flags & ~PyBUF_WRITABLE)

    def __len__(self):
        return self.size


cdef BlockView block_view(Block *block, const uint8_t *data, size_t size):
    cdef BlockView view = BlockView.__new__(BlockView)
    view.block = block_share(block)
    view.data = data
    view.size = <Py_ssize_t>size
    return view


def live_counters() -> dict[str, int]:
    """Native objects alive now, by kind. All are zero when no connection is open and no model is loaded."""
    return {
        "blocks": load64(&live[<int>LIVE_BLOCKS]),
        "requests": load64(&live[<int>LIVE_REQUESTS]),
        "streams": load64(&live[<int>LIVE_STREAMS]),
        "connections": load64(&live[<int>LIVE_CONNECTIONS]),
        "lanes": load64(&live[<int>LIVE_LANES]),
        "arenas": load64(&live[<int>LIVE_ARENAS]),
    }


def pooled() -> int:
    """Free bytes that the pool keeps for reuse."""
    return load64(&pooled_bytes)


def trim() -> int:
    """Return all free blocks of the pool to the system; the number of bytes freed."""
    cdef int index
    cdef Block *block
    cdef Block *following
    cdef int64_t freed = 0
    for index in range(CLASSES):
        lock(&pool[index].guard)
        block = pool[index].free
        pool[index].free = NULL
        unlock(&pool[index].guard)
        while block != NULL:
            following = block.next
            freed += <int64_t>block.size
            block_delete(block)
            block = following
    fetch_add64(&pooled_bytes, -freed)
    return freed


# For tests: a block as Python sees it.

def _take(size: int):
    """A view over a new block of `size` bytes; the view holds the only reference."""
    cdef size_t wanted = size
    cdef Block *block = block_take(wanted)
    cdef BlockView view
    if block == NULL:
        raise MemoryError(f"no memory for a block of {size} bytes")
    view = block_view(block, block.data, wanted)
    block_give(block)
    return view


def _size_class(size: int) -> tuple[int, int]:
    """The class that serves `size` bytes and the bytes that it gives; (-1, size) beyond the largest."""
    cdef int index = class_of(size)
    return (index, class_size(index)) if index >= 0 else (index, size)
