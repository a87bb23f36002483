# The counters of a model version, read by the statistics RPC and by metrics.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.threads cimport Mutex

cdef extern from *:
    int leading_zeros "__builtin_clzll"(unsigned long long value) noexcept nogil

cdef struct Phases:
    # the phases of an executed request, in nanoseconds; all but `queue` are those of its whole batch
    uint64_t queue
    uint64_t input
    uint64_t infer
    uint64_t output

cdef struct Duration:
    uint64_t count
    uint64_t ns

cdef struct BatchStatistics:
    uint32_t rows
    Duration compute_input
    Duration compute_infer
    Duration compute_output

cdef enum:
    POWERS = 26              # bounds of every model: 1, 2, 4, ... 2^25 us
    QUEUE_TIMES = 27         # counters: one for each bound, and one for longer times
    TIMES = 64               # most counters of a histogram; the last one in use has no bound
    REASONS = 16             # most reasons for which batches leave that are counted separately
    RESPONSES = 1024         # most indexes of the responses to one request that are counted separately

cdef struct Bounds:
    # upper bounds of the histograms of times, ascending and inclusive
    int64_t ns[TIMES]        # INT64_MAX behind the last one
    uint32_t count
    uint8_t start[64]        # by the number of binary digits of a time in us: the index where to begin its search

cdef struct Histogram:
    uint64_t counts[TIMES]   # by the first bound that a time does not exceed

cdef enum Failure:
    # why a request failed, with Triton's categories
    FAILURE_REJECTED         # by a limit or a timeout of its queue
    FAILURE_CANCELED         # its client cancelled, or its deadline passed
    FAILURE_BACKEND          # the model failed
    FAILURE_OTHER
    FAILURES                 # the number of reasons

cdef struct ResponseStatistics:
    # statistics of a decoupled model's responses with one index
    Duration compute_infer   # from the previous response, or from the beginning of the execution
    Duration compute_output  # part of compute_infer, unless the model itself reports both
    Duration success
    Duration fail
    Duration empty
    Duration cancel

cdef struct Left:
    # the batches that left for one reason
    const char *why          # static text of the scheduler; NULL: unused entry
    uint64_t count

cdef struct Counters:
    # the fields of inference.ModelStatistics
    int64_t last_end_ns          # of the last executed batch, monotonic; 0: none
    int64_t last_hit_ns          # when the last request was answered from the response cache, monotonic; 0: none was
    uint64_t inference_count
    uint64_t execution_count
    Duration success
    Duration failures[FAILURES]
    Duration queue
    Duration compute_input
    Duration compute_infer
    Duration compute_output
    Duration cache_hit           # requests answered from the response cache, and the time of their lookups
    Duration cache_miss          # requests not found there, and the time of their lookups and of storing responses
    Histogram request_times      # requests that succeeded, by time from arrival
    Histogram queue_times        # by time in the queue
    Histogram input_times        # by time of their batches in each phase
    Histogram infer_times
    Histogram output_times
    Histogram first_times        # of a decoupled model: from arrival to the first response
    Histogram next_times         # from each response to the next
    Duration first_responses     # number and summed time
    Duration next_responses
    Left left[REASONS]
    BatchStatistics *batches     # ascending by rows
    uint32_t batch_count
    uint32_t batch_capacity
    ResponseStatistics *responses    # by index
    uint32_t response_count
    uint32_t response_capacity
    bint reported            # `responses` are those that the model itself reports

cdef struct Statistics:
    Mutex guard
    Bounds bounds
    void *sampling           # Sampling of this model; NULL: the server's
    Counters counters

cdef struct Execution:
    # one executed batch
    int64_t end_ns           # when it ended
    uint32_t rows            # that were executed together
    bint some                # at least one request succeeded, or is to be executed again
    uint32_t requests        # number of requests that succeeded and are counted
    uint32_t served_rows     # rows of all that succeeded
    uint64_t success_ns      # their time from arrival, summed
    uint64_t queue_ns        # their time in the queue, summed
    uint32_t request_times[TIMES]    # requests by time, see Counters.request_times
    uint32_t queue_times[TIMES]      # requests by time in the queue
    uint32_t longest         # greatest index in request_times
    uint32_t longest_queue   # greatest index in queue_times
    const char *why          # why the batch left, see Left; NULL: unknown
    uint64_t input_ns        # of the batch, for each phase
    uint64_t infer_ns
    uint64_t output_ns

cdef enum ResponseKind:
    RESPONSE_SUCCESS
    RESPONSE_FAIL
    RESPONSE_EMPTY           # contains nothing but the fact that it is the last
    RESPONSE_CANCEL          # nobody waited for it any more

# The index of a time in a histogram: the first bound that it does not exceed.
cdef inline uint32_t time_index(const Bounds *bounds, int64_t ns) noexcept nogil:
    cdef uint32_t i
    if ns <= bounds.ns[0]:
        return 0
    # ns // 1024 has as many binary digits as the time in microseconds, or one less
    i = bounds.start[63 - leading_zeros(<unsigned long long>ns >> 10 | 1)]
    while ns > bounds.ns[i]:
        i += 1
    return i

cdef void statistics_init(Statistics *statistics) noexcept nogil
cdef void statistics_clear(Statistics *statistics) noexcept nogil
# Before the first count: add these upper bounds, in nanoseconds, to the powers of two. False: too many.
cdef bint statistics_add_bounds(Statistics *statistics, const int64_t *ns, uint32_t count) noexcept nogil
# Count a response of a decoupled model: its index, the time since the request arrived (index 0) or since the previous
# response, and the part of it in which the model computed.
cdef void statistics_responded(Statistics *statistics, ResponseKind kind, uint32_t index, int64_t passed_ns,
                               int64_t compute_ns) noexcept nogil
# Count a response whose times the model reports. From the first report on only reports count, in ResponseStatistics.
cdef void statistics_reported(Statistics *statistics, ResponseKind kind, uint32_t index, uint64_t infer_ns,
                              uint64_t output_ns) noexcept nogil
# Count requests that failed, with their summed time from arrival; `inferd._native.request.accounting` has a function
# for a single one.
cdef void statistics_failed(Statistics *statistics, Failure why, uint64_t count, uint64_t ns) noexcept nogil
# Count a request that got its response from the cache, with its time from arrival.
cdef void statistics_shared(Statistics *statistics, uint64_t ns) noexcept nogil
# Count a request that was answered by other requests, or by several executions, with its time from arrival and the
# parts of it that were spent in the queue and in the phases.
cdef void statistics_answered(Statistics *statistics, uint64_t ns, const Phases *phases) noexcept nogil
# Count a request answered from the response cache at this time.
cdef void statistics_cache_hit(Statistics *statistics, int64_t at_ns, uint64_t lookup_ns) noexcept nogil
# Count misses of the response cache, with the time of their lookups and of storing; `count` 0: only the time.
cdef void statistics_cache_missed(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil
cdef void statistics_executed(Statistics *statistics, const Execution *execution) noexcept nogil
# Copy all counters, as they are at one moment. False: no memory.
cdef bint statistics_read(Statistics *statistics, Counters *copy) noexcept nogil
# Free the memory of such a copy.
cdef void counters_clear(Counters *copy) noexcept nogil
# The time of the last executed batch, in milliseconds since 1970; 0: never.
cdef int64_t last_inference_ms(const Counters *counters) noexcept nogil
# When a request was last executed, or answered from the response cache, monotonic; 0: never.
cdef int64_t statistics_last_used(Statistics *statistics) noexcept nogil
# Set `out` to QUEUE_TIMES numbers of requests by time in the queue, with the bounds that every model has.
cdef void statistics_queue_times(const Counters *counters, const Bounds *bounds, uint64_t *out) noexcept nogil
# (succeeded requests, failed requests, ns in which batches computed); see
# inferd._native.request.lane.LaneHandle.totals.
cdef tuple statistics_totals(Statistics *statistics)
# All counters as a dict; see inferd._native.request.lane.LaneHandle.statistics.
cdef dict statistics_dict(Statistics *statistics)
