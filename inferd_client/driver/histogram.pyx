"""Latencies, counted in buckets of a constant relative width."""

from libc.stdint cimport uint32_t, uint64_t


cdef uint64_t bucket_top(uint32_t bucket) noexcept nogil:
    if bucket < 2 * SUB_BUCKETS:
        return bucket
    cdef uint32_t shift = bucket // SUB_BUCKETS - 1
    return ((<uint64_t> (bucket - shift * SUB_BUCKETS) + 1) << shift) - 1


cdef uint64_t histogram_percentile(const Histogram *histogram, double share) noexcept nogil:
    cdef uint64_t seen = 0, wanted = <uint64_t> (share * histogram.count + 0.5)
    cdef uint32_t i
    for i in range(<uint32_t> BUCKETS):
        seen += histogram.buckets[i]
        if seen >= wanted and seen > 0:
            return min(bucket_top(i), histogram.max_ns)
    return 0
