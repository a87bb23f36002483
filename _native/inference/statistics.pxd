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

cdef enum Failure:
    # why a request failed, as Triton tells them apart
    FAILURE_REJECTED         # by a limit or a timeout of its queue
    FAILURE_CANCELED         # its client has left, or did not want to wait any longer
    FAILURE_BACKEND          # the model failed
    FAILURE_OTHER
    FAILURES                 # the number of reasons

cdef struct Counters:
    # the fields of inference.ModelStatistics
    int64_t last_end_ns          # of the last batch that was executed, monotonic; 0: there was none
    uint64_t inference_count
    uint64_t execution_count
    Duration success
    Duration failures[FAILURES]
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

cdef struct Statistics:
    Mutex guard
    Counters counters

cdef struct Execution:
    # one executed batch
    int64_t end_ns           # when
    uint32_t rows            # that were executed together
    uint32_t requests        # that succeeded
    uint32_t served_rows     # of those
    uint64_t success_ns      # their time from arrival, summed
    uint64_t queue_ns        # their time in the queue, summed
    uint32_t queue_times[QUEUE_TIMES]    # how many of them waited how long
    uint32_t longest         # index of the longest of these
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
# Requests that failed, and the time from arrival that they took together; `_native.inference.accounting` has one for
# one.
cdef void statistics_failed(Statistics *statistics, Failure why, uint64_t count, uint64_t ns) noexcept nogil
# Requests that got the answer of another one, and the time from arrival that they took together.
cdef void statistics_shared(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil
cdef void statistics_cache_hit(Statistics *statistics, uint64_t lookup_ns) noexcept nogil
# `count` is 0 when only the time grows.
cdef void statistics_cache_missed(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil
cdef void statistics_executed(Statistics *statistics, const Execution *execution) noexcept nogil
# All counters as they are at one moment, for whoever exports them; `batches` of the copy is from malloc. False: no
# memory.
cdef bint statistics_read(Statistics *statistics, Counters *copy) noexcept nogil
# The same as a dict; see _native.scheduling.lane.LaneHandle.statistics.
cdef dict statistics_dict(Statistics *statistics)
