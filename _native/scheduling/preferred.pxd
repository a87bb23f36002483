# The preferred batch sizes of a configuration.

from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    MAX_PREFERRED = 64

cdef struct Preferred:
    uint32_t sizes[MAX_PREFERRED]    # ascending
    uint32_t count
    uint32_t largest
    bint named               # False: the largest batch, for which every batch waits anyway, is the only preferred size


# Read the sizes of a specification; none, and Triton's default of max_batch_size, mean the same. ValueError if there
# are more than are served.
cdef inline int preferred_set(Preferred *preferred, object sizes, uint32_t max_rows) except -1:
    cdef list ascending = sorted(set(sizes)) or [max_rows]
    if len(ascending) > MAX_PREFERRED:
        raise ValueError(f"{len(ascending)} preferred batch sizes, at most {MAX_PREFERRED} are served")
    preferred.named = ascending != [max_rows]
    preferred.count = 0
    for size in ascending:
        preferred.sizes[preferred.count] = size
        preferred.count += 1
    preferred.largest = preferred.sizes[preferred.count - 1]
    return 0


# For callers that count rows from 0 on: index of the first size that `rows` do not exceed, starting at the index for
# fewer rows; preferred.count if they exceed all.
cdef inline uint32_t preferred_from(const Preferred *preferred, uint32_t at, uint64_t rows) noexcept nogil:
    while at < preferred.count and preferred.sizes[at] < rows:
        at += 1
    return at
