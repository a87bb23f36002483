# Latencies in nanoseconds: 128 linear buckets in each power of two, so that a bucket is within 0.8 % of its values.

from libc.stdint cimport uint32_t, uint64_t

cdef extern from *:
    int clz "__builtin_clzll"(unsigned long long) noexcept nogil

cdef enum:
    SUB_BITS = 7
    SUB_BUCKETS = 1 << SUB_BITS     # per power of two
    BUCKETS = (64 - SUB_BITS + 1) * SUB_BUCKETS

cdef struct Histogram:
    uint64_t count
    uint64_t sum_ns
    uint64_t max_ns
    uint64_t buckets[BUCKETS]

cdef inline uint32_t bucket_of(uint64_t ns) noexcept nogil:
    if ns < 2 * SUB_BUCKETS:
        return <uint32_t> ns
    cdef int shift = 63 - clz(ns) - SUB_BITS
    return <uint32_t> (<uint64_t> shift * SUB_BUCKETS + (ns >> shift))

cdef uint64_t bucket_top(uint32_t bucket) noexcept nogil

cdef inline void histogram_add(Histogram *histogram, uint64_t ns) noexcept nogil:
    histogram.count += 1
    histogram.sum_ns += ns
    histogram.max_ns = max(histogram.max_ns, ns)
    histogram.buckets[bucket_of(ns)] += 1

# The smallest bound of a bucket that `share` of the values do not exceed, at most the largest value; 0 without values.
cdef uint64_t histogram_percentile(const Histogram *histogram, double share) noexcept nogil
