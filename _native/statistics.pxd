# What a model version has done, in plain counters; read by the statistics RPC and by metrics.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.threads cimport Mutex

cdef extern from *:
    int leading_zeros "__builtin_clzll"(unsigned long long value) noexcept nogil

cdef struct Duration:
    uint64_t count
    uint64_t ns

cdef struct BatchStatistics:
    uint32_t rows
    Duration compute_input
    Duration compute_infer
    Duration compute_output

cdef enum:
    QUEUE_TIMES = 27         # bounds are 1, 2, 4, ... 2^25 us, and none

cdef struct Statistics:
    # the fields of inference.ModelStatistics
    Mutex guard
    int64_t last_inference_ms
    uint64_t inference_count
    uint64_t execution_count
    Duration success
    Duration fail
    Duration queue
    Duration compute_input
    Duration compute_infer
    Duration compute_output
    Duration cache_hit           # requests answered from the response cache, and the time of looking there
    Duration cache_miss          # the others, and the time of looking and of keeping the answer
    uint64_t queue_times[QUEUE_TIMES]    # served requests by their time in the queue, each bound inclusive
    BatchStatistics *batches     # ascending by rows
    uint32_t batch_count
    uint32_t batch_capacity

cdef struct Execution:
    # one executed batch
    uint32_t rows            # that were executed together
    uint32_t requests        # that succeeded
    uint32_t served_rows     # of those
    uint64_t success_ns      # their time from arrival, summed
    uint64_t queue_ns        # their time in the queue, summed
    uint32_t queue_times[QUEUE_TIMES]    # how many of them waited how long
    uint64_t input_ns        # of the batch in each phase
    uint64_t infer_ns
    uint64_t output_ns

# Where a time in the queue belongs in the histogram: the first bound that it does not exceed.
cdef inline uint32_t queue_time_index(int64_t ns) noexcept nogil:
    cdef uint64_t us
    if ns <= 1000:
        return 0
    us = <uint64_t>(ns - 1) // 1000
    return min(<uint32_t>(64 - leading_zeros(us)), <uint32_t>(QUEUE_TIMES - 1))

cdef void statistics_init(Statistics *statistics) noexcept nogil
cdef void statistics_clear(Statistics *statistics) noexcept nogil
# Count from zero again, while nobody counts.
cdef void statistics_reset(Statistics *statistics) noexcept nogil
# Requests that failed or were cancelled, and the time from arrival that they took together.
cdef void statistics_failed(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil
# Requests that got the answer of another one, and the time from arrival that they took together.
cdef void statistics_shared(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil
cdef void statistics_cache_hit(Statistics *statistics, uint64_t lookup_ns) noexcept nogil
# `count` is 0 when only the time grows.
cdef void statistics_cache_missed(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil
cdef void statistics_executed(Statistics *statistics, const Execution *execution) noexcept nogil
# A dict of the fields, durations as (count, ns), batches as a list of (rows, input, infer, output), the histogram of
# times in the queue as a list of (bound in us or None, count).
cdef dict statistics_dict(Statistics *statistics)
