# Arithmetic of shapes. Shapes from outside have been checked: their numbers of elements do not overflow.

from libc.stdint cimport int64_t, uint32_t

cdef inline int64_t elements_of(const int64_t *shape, uint32_t rank) noexcept nogil:
    cdef int64_t elements = 1
    cdef uint32_t i
    for i in range(rank):
        elements *= shape[i]
    return elements


# Convert a shape: `shape`, which fits the pattern `given`, becomes one that fits `wanted`. Both patterns have the same
# number of variable dimensions (-1), which keep their values in order, and the same number of elements.
cdef inline void reshape(const int64_t *given, uint32_t given_rank, const int64_t *wanted, uint32_t wanted_rank,
                         int64_t *shape) noexcept nogil:
    cdef int64_t values[16]
    cdef uint32_t count = 0
    cdef uint32_t i
    for i in range(given_rank):
        if given[i] == -1:
            values[count] = shape[i]
            count += 1
    count = 0
    for i in range(wanted_rank):
        shape[i] = wanted[i]
        if wanted[i] == -1:
            shape[i] = values[count]
            count += 1


# Whether `shape` has the dimensions of `pattern`, in which -1 stands for any.
cdef inline bint shape_fits(const int64_t *pattern, uint32_t pattern_rank, const int64_t *shape,
                            uint32_t rank) noexcept nogil:
    cdef uint32_t i
    if rank != pattern_rank:
        return False
    for i in range(rank):
        if pattern[i] != -1 and pattern[i] != shape[i]:
            return False
    return True


# The length to which an input is padded: the smallest bucket that is long enough. If there is none, the next power of
# two: it only decides which requests share a batch.
cdef inline int64_t bucket_of(const int64_t *buckets, uint32_t count, int64_t length) noexcept nogil:
    cdef int64_t size = 1
    cdef uint32_t i
    for i in range(count):
        if length <= buckets[i]:
            return buckets[i]
    while size < length:
        size *= 2
    return size
