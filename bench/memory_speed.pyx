"""For tests and measurements of memory: a pool that needs no GPU, random takes and gives without the GIL, and the time
of a take and a give in several threads."""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap

from inferd._native.memory.pool cimport Backing, PooledMemory
from inferd._native.memory.resource cimport Block, BlockView, Memory, block_give, block_share, block_view, resource_take

cdef extern from *:
    """
    #include <time.h>
    static inline long inferd_thread_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return t.tv_sec * 1000000000L + t.tv_nsec;
    }
    """
    long thread_ns "inferd_thread_ns"() noexcept nogil


cdef void *map_slab(void *context, size_t size, void **mark) noexcept nogil:
    cdef void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)
    return NULL if address == MAP_FAILED else address


cdef void unmap_slab(void *context, void *address, size_t size, void *mark) noexcept nogil:
    munmap(address, size)


cdef class MappedMemory(PooledMemory):
    """A pool of host memory: each slab is a mapping of its own, of the kind that processes can share.

    Args:
        limit: the most bytes that it holds.
        slab_size: bytes of a mapping, unless a block is larger.
    """

    def __cinit__(self, limit: int, slab_size: int = 32 << 20):
        cdef Backing backing
        memset(&backing, 0, sizeof(Backing))
        backing.obtain = map_slab
        backing.release = unmap_slab
        self.make("mapped", limit, slab_size, &backing)


cdef struct Alive:
    Block *block
    size_t size


cdef inline uint64_t next_random(uint64_t *state) noexcept nogil:
    # xorshift64
    cdef uint64_t x = state[0]
    x ^= x << 13
    x ^= x >> 7
    x ^= x << 17
    state[0] = x
    return x


cdef bint keep(Alive *alive, Block *block, size_t size, bint readable) noexcept nogil:
    # mark both ends of the requested bytes with the block's address
    cdef uint64_t mark = <uint64_t>block
    alive.block = block
    alive.size = size
    if readable and size >= 16:
        memcpy(block.data, &mark, 8)
        memcpy(block.data + size - 8, &mark, 8)
    return block.size >= size and <uint64_t>block.data % 256 == 0


cdef bint is_intact(const Alive *alive, bint readable) noexcept nogil:
    cdef uint64_t first = <uint64_t>alive.block, last = first
    if readable and alive.size >= 16:
        memcpy(&first, alive.block.data, 8)
        memcpy(&last, alive.block.data + alive.size - 8, 8)
    return first == <uint64_t>alive.block and last == first


def random_operations(Memory memory not None, seed: int, operations: int, most: int, largest: int, readable: bool):
    """Take and give blocks at random, and check that each belonged to its taker alone.

    Args:
        seed: of the random numbers, not 0.
        operations: takes and gives.
        most: blocks alive at a time.
        largest: bytes of a block; sizes are spread over the powers of two.
        readable: the CPU can read the memory; then both ends of each block are marked and checked.

    Returns:
        How many blocks were wrong (too small, not aligned, written by another), and how many takes found no memory.
    """
    cdef uint64_t state = seed
    cdef int64_t left = operations
    cdef size_t biggest = largest
    cdef size_t size
    cdef int room = most, count = 0, at
    cdef bint marked = readable
    cdef int64_t wrong = 0, refused = 0
    cdef Block *block
    cdef Alive *alive = <Alive *>malloc(room * sizeof(Alive))
    if alive == NULL:
        raise MemoryError
    with nogil:
        while left:
            left -= 1
            if count < room and next_random(&state) % 2:
                size = 1 + next_random(&state) % (biggest >> (next_random(&state) % 12))
                block = resource_take(memory.resource, size)
                if block == NULL:
                    refused += 1
                    continue
                if not keep(&alive[count], block, size, marked):
                    wrong += 1
                count += 1
            elif count:
                at = <int>(next_random(&state) % <uint64_t>count)
                if not is_intact(&alive[at], marked):
                    wrong += 1
                block_give(block_share(alive[at].block))
                block_give(alive[at].block)
                count -= 1
                alive[at] = alive[count]
        for at in range(count):
            if not is_intact(&alive[at], marked):
                wrong += 1
            block_give(alive[at].block)
    free(alive)
    return wrong, refused


def pair_ns(Memory memory not None, size_t size, long loops) -> float:
    """Nanoseconds of CPU time to take a block and to give it back, the mean over `loops`.

    The time includes spinning for a lock, but not waiting for a core. Call it from several threads at once.
    """
    cdef Block *block = NULL
    cdef long start
    with nogil:
        start = thread_ns()
        for _ in range(loops):
            block = resource_take(memory.resource, size)
            if block == NULL:
                break
            block_give(block)
        start = thread_ns() - start
    if block == NULL:
        raise MemoryError
    return start / <double> loops


def view_of(Memory memory not None, size: int):
    """A block that only this view holds, not the memory's object: so does a response."""
    cdef Block *block = resource_take(memory.resource, size)
    cdef BlockView view
    if block == NULL:
        raise MemoryError
    view = block_view(block, block.data, size)
    block_give(block)
    return view
