# What a model version has done, in plain counters; read by the statistics RPC and by metrics.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

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
    POWERS = 26              # bounds that every model has: 1, 2, 4, ... 2^25 us
    QUEUE_TIMES = 27         # counters: one for each bound, the last for times above all bounds
    TIMES = 64               # counters of a histogram at most; the last one in use has no bound
    REASONS = 16             # reasons of schedulers to let a batch go that are told apart
    RESPONSES = 1024         # indexes of the responses to one request that are told apart

cdef struct Bounds:
    # upper bounds of the histograms of times, ascending and inclusive
    int64_t ns[TIMES]        # INT64_MAX behind the last one
    uint32_t count
    uint8_t start[64]        # where to begin the search for a time of so many binary digits in us

cdef struct Histogram:
    uint64_t counts[TIMES]   # by the first bound that a time does not exceed

cdef enum Failure:
    # why a request failed, as Triton tells them apart
    FAILURE_REJECTED         # by a limit or a timeout of its queue
    FAILURE_CANCELED         # its client has left, or did not want to wait any longer
    FAILURE_BACKEND          # the model failed
    FAILURE_OTHER
    FAILURES                 # the number of reasons

cdef struct ResponseStatistics:
    # the responses of one index of a decoupled model
    Duration compute_infer   # from the response before it, or the beginning of the execution
    Duration success
    Duration fail
    Duration empty
    Duration cancel

cdef struct Left:
    # batches that left for one reason
    const char *why          # static text of the scheduler's; NULL: the entry is not used
    uint64_t count

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
    Histogram request_times      # served requests by their time from arrival
    Histogram queue_times        # in the queue
    Histogram input_times        # and those of their batches in each phase
    Histogram infer_times
    Histogram output_times
    Histogram first_times        # of a decoupled model: from arrival to the first response
    Histogram next_times         # and from each response to the next
    Duration first_responses     # how many, and their times together
    Duration next_responses
    Left left[REASONS]
    BatchStatistics *batches     # ascending by rows
    uint32_t batch_count
    uint32_t batch_capacity
    ResponseStatistics *responses    # by index
    uint32_t response_count
    uint32_t response_capacity

cdef struct Statistics:
    Mutex guard
    Bounds bounds
    void *sampling           # Sampling of this model's own; NULL: that of the server
    Counters counters

cdef struct Execution:
    # one executed batch
    int64_t end_ns           # when
    uint32_t rows            # that were executed together
    uint32_t requests        # that succeeded
    uint32_t served_rows     # of those
    uint64_t success_ns      # their time from arrival, summed
    uint64_t queue_ns        # their time in the queue, summed
    uint32_t request_times[TIMES]    # how many of them took how long
    uint32_t queue_times[TIMES]      # and waited how long
    uint32_t longest         # index of the longest of the former
    uint32_t longest_queue   # and of the latter
    const char *why          # it left, see Left; NULL: not told
    uint64_t input_ns        # of the batch in each phase
    uint64_t infer_ns
    uint64_t output_ns

cdef enum ResponseKind:
    RESPONSE_SUCCESS
    RESPONSE_FAIL
    RESPONSE_EMPTY           # it says only that it is the last
    RESPONSE_CANCEL          # nobody waited for it any more

# Where a time belongs in a histogram: the first bound that it does not exceed.
cdef inline uint32_t time_index(const Bounds *bounds, int64_t ns) noexcept nogil:
    cdef uint32_t i
    if ns <= bounds.ns[0]:
        return 0
    # ns // 1024 has as many binary digits as the microseconds have, or one less
    i = bounds.start[63 - leading_zeros(<unsigned long long>ns >> 10 | 1)]
    while ns > bounds.ns[i]:
        i += 1
    return i

cdef void statistics_init(Statistics *statistics) noexcept nogil
cdef void statistics_clear(Statistics *statistics) noexcept nogil
# Before anything is counted: have these upper bounds, in nanoseconds, beside the powers of two. False: too many.
cdef bint statistics_add_bounds(Statistics *statistics, const int64_t *ns, uint32_t count) noexcept nogil
# A response of a decoupled model: its index, the time since the request arrived (index 0) or since the response before
# it, and the time of that in which the model computed.
cdef void statistics_responded(Statistics *statistics, ResponseKind kind, uint32_t index, int64_t passed_ns,
                               int64_t compute_ns) noexcept nogil
# Requests that failed, and the time from arrival that they took together; `_native.request.accounting` has one for
# one.
cdef void statistics_failed(Statistics *statistics, Failure why, uint64_t count, uint64_t ns) noexcept nogil
# Requests that got the answer of another one, and the time from arrival that they took together.
cdef void statistics_shared(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil
cdef void statistics_cache_hit(Statistics *statistics, uint64_t lookup_ns) noexcept nogil
# `count` is 0 when only the time grows.
cdef void statistics_cache_missed(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil
cdef void statistics_executed(Statistics *statistics, const Execution *execution) noexcept nogil
# All counters as they are at one moment, for whoever exports them. False: no memory.
cdef bint statistics_read(Statistics *statistics, Counters *copy) noexcept nogil
# Free what such a copy has.
cdef void counters_clear(Counters *copy) noexcept nogil
# When the last batch was executed, in milliseconds since 1970; 0: never.
cdef int64_t last_inference_ms(const Counters *counters) noexcept nogil
# How many requests waited how long, by the bounds that every model has: QUEUE_TIMES numbers.
cdef void statistics_queue_times(const Counters *counters, const Bounds *bounds, uint64_t *out) noexcept nogil
# (requests that succeeded, that failed, ns in which batches computed); see _native.scheduling.lane.LaneHandle.totals.
cdef tuple statistics_totals(Statistics *statistics)
# All counters as a dict; see _native.scheduling.lane.LaneHandle.statistics.
cdef dict statistics_dict(Statistics *statistics)
