# Size classes of host memory: four for each power of two, from 256 bytes to 1 GiB.
#
# So from 1 KiB on at most a fifth of a block is unused, and in a large block that fifth is address space only.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t

from inferd._native.memory.block cimport CLASS_LARGE

cdef extern from *:
    """
    static inline int inferd_log2(size_t n) { return 63 - __builtin_clzll((unsigned long long)n); }
    """
    int floor_log2 "inferd_log2"(size_t n) nogil

cdef enum:
    SMALLEST_LOG2 = 8
    LARGEST = 1 << 30
    CLASSES = 89
    OWN_CLASSES = 33          # the classes up to 64 KiB, for which each thread has lists of its own
    OWN_BYTES = 128 << 10     # the most bytes in such a list, which may always have two blocks
    OWN_BLOCKS = 32           # the most blocks in such a list

# The class that serves `size` bytes; CLASS_LARGE beyond the largest.
cdef inline int class_of(size_t size) noexcept nogil:
    cdef int log2
    if size <= (1 << SMALLEST_LOG2):
        return 0
    if size > LARGEST:
        return CLASS_LARGE
    log2 = floor_log2(size - 1)
    return (log2 - SMALLEST_LOG2) * 4 + <int>(((size - 1) >> (log2 - 2)) & 3) + 1

# The bytes of a block of this class.
cdef inline size_t class_size(int index) noexcept nogil:
    if index == 0:
        return 1 << SMALLEST_LOG2
    return <size_t>(4 + (index - 1) % 4 + 1) << (SMALLEST_LOG2 + (index - 1) // 4 - 2)

# How many blocks of this size a thread's own list has at most.
cdef inline int32_t most_of(size_t size) noexcept nogil:
    return <int32_t>min(max(<size_t>OWN_BYTES // size, <size_t>2), <size_t>OWN_BLOCKS)
