# The batch sizes that a configuration prefers.

from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    MAX_PREFERRED = 64

cdef struct Preferred:
    uint32_t sizes[MAX_PREFERRED]
    uint32_t count
    uint32_t largest
    bint named               # by the configuration; else the largest batch is the only preferred one


# Take the sizes of a specification; ValueError when there are more than are served.
cdef inline int preferred_set(Preferred *preferred, object sizes, uint32_t max_rows) except -1:
    if len(sizes) > MAX_PREFERRED:
        raise ValueError(f"{len(sizes)} preferred batch sizes, at most {MAX_PREFERRED} are served")
    preferred.named = bool(sizes)
    preferred.count = 0
    preferred.largest = 0
    for size in sizes or (max_rows,):
        preferred.sizes[preferred.count] = size
        preferred.largest = max(preferred.largest, preferred.sizes[preferred.count])
        preferred.count += 1
    return 0


cdef inline bint is_preferred(const Preferred *preferred, uint64_t rows) noexcept nogil:
    cdef uint32_t i
    for i in range(preferred.count):
        if preferred.sizes[i] == rows:
            return True
    return False


# The smallest preferred size above `rows`, at most `most`.
cdef inline uint64_t next_preferred(const Preferred *preferred, uint64_t rows, uint64_t most) noexcept nogil:
    cdef uint64_t best = most
    cdef uint32_t i
    for i in range(preferred.count):
        if rows < preferred.sizes[i] < best:
            best = preferred.sizes[i]
    return best
