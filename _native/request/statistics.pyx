"""Counters of a model version, with the meaning of inference.ModelStatistics.

As in Triton, every request of a batch is charged the whole of the batch's compute phases, and `count` is the number of
requests; per batch size, `count` is the number of executions.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from inferd._native.clock cimport now_ns, wall_ms
from inferd._native.threads cimport lock, mutex_destroy, mutex_init, unlock

cdef enum:
    BATCH_SIZES = 1024       # batch sizes that are counted separately


cdef void statistics_init(Statistics *statistics) noexcept nogil:
    memset(statistics, 0, sizeof(Statistics))
    mutex_init(&statistics.guard, NULL)
    statistics_add_bounds(statistics, NULL, 0)


cdef void statistics_clear(Statistics *statistics) noexcept nogil:
    counters_clear(&statistics.counters)
    mutex_destroy(&statistics.guard)


cdef void counters_clear(Counters *copy) noexcept nogil:
    free(copy.batches)
    free(copy.responses)
    copy.batches = NULL
    copy.responses = NULL


# ---------------------------------------------------------------------------------------------------------------------
# Bounds of histograms

cdef bint bounds_add(Bounds *bounds, int64_t ns) noexcept nogil:
    cdef uint32_t i = 0
    while i < bounds.count and bounds.ns[i] < ns:
        i += 1
    if i < bounds.count and bounds.ns[i] == ns:
        return True
    if ns <= 0 or bounds.count == TIMES - 1:
        return False
    memmove(&bounds.ns[i + 1], &bounds.ns[i], (bounds.count - i) * sizeof(int64_t))
    bounds.ns[i] = ns
    bounds.count += 1
    return True


cdef bint statistics_add_bounds(Statistics *statistics, const int64_t *ns, uint32_t count) noexcept nogil:
    cdef Bounds *bounds = &statistics.bounds
    cdef bint room = True
    cdef uint32_t i
    if bounds.count == 0:
        for i in range(<uint32_t>POWERS):
            bounds_add(bounds, <int64_t>1000 << i)
    for i in range(count):
        room = bounds_add(bounds, ns[i]) and room
    for i in range(bounds.count, <uint32_t>TIMES):
        bounds.ns[i] = INT64_MAX
    for i in range(64):
        # the first bound that the shortest time of so many digits does not exceed
        bounds.start[i] = 0
        while i and i < 53 and bounds.ns[bounds.start[i]] < <int64_t>1 << (i + 10):
            bounds.start[i] += 1
        if i >= 53:
            bounds.start[i] = bounds.start[i - 1]
    return room


cdef inline void add(Duration *duration, uint64_t count, uint64_t ns) noexcept nogil:
    duration.count += count
    duration.ns += ns


cdef void statistics_failed(Statistics *statistics, Failure why, uint64_t count, uint64_t ns) noexcept nogil:
    lock(&statistics.guard)
    add(&statistics.counters.failures[<int>why], count, ns)
    unlock(&statistics.guard)


cdef inline void count_time(Duration *duration, Histogram *times, const Bounds *bounds, uint64_t ns) noexcept nogil:
    add(duration, 1, ns)
    times.counts[time_index(bounds, <int64_t>ns)] += 1


cdef void statistics_shared(Statistics *statistics, uint64_t ns) noexcept nogil:
    lock(&statistics.guard)
    count_time(&statistics.counters.success, &statistics.counters.request_times, &statistics.bounds, ns)
    unlock(&statistics.guard)


cdef void statistics_answered(Statistics *statistics, uint64_t ns, const Phases *phases) noexcept nogil:
    cdef Counters *counters = &statistics.counters
    cdef const Bounds *bounds = &statistics.bounds
    lock(&statistics.guard)
    count_time(&counters.success, &counters.request_times, bounds, ns)
    count_time(&counters.queue, &counters.queue_times, bounds, phases.queue)
    count_time(&counters.compute_input, &counters.input_times, bounds, phases.input)
    count_time(&counters.compute_infer, &counters.infer_times, bounds, phases.infer)
    count_time(&counters.compute_output, &counters.output_times, bounds, phases.output)
    unlock(&statistics.guard)


cdef void statistics_cache_hit(Statistics *statistics, int64_t at_ns, uint64_t lookup_ns) noexcept nogil:
    lock(&statistics.guard)
    statistics.counters.last_hit_ns = at_ns
    add(&statistics.counters.cache_hit, 1, lookup_ns)
    unlock(&statistics.guard)


cdef void statistics_cache_missed(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil:
    lock(&statistics.guard)
    add(&statistics.counters.cache_miss, count, ns)
    unlock(&statistics.guard)


cdef BatchStatistics *batch_of(Counters *counters, uint32_t rows) noexcept nogil:
    # the entry for this batch size, made when there is none; NULL when there is no room for one more
    cdef uint32_t low = 0
    cdef uint32_t high = counters.batch_count
    cdef uint32_t middle, capacity
    cdef BatchStatistics *grown
    while low < high:
        middle = (low + high) // 2
        if counters.batches[middle].rows < rows:
            low = middle + 1
        else:
            high = middle
    if low < counters.batch_count and counters.batches[low].rows == rows:
        return &counters.batches[low]
    if counters.batch_count == counters.batch_capacity:
        capacity = max(16, counters.batch_capacity * 2)
        if capacity > BATCH_SIZES:
            return NULL
        grown = <BatchStatistics *>realloc(counters.batches, capacity * sizeof(BatchStatistics))
        if grown == NULL:
            return NULL
        counters.batches = grown
        counters.batch_capacity = capacity
    memmove(&counters.batches[low + 1], &counters.batches[low],
            (counters.batch_count - low) * sizeof(BatchStatistics))
    memset(&counters.batches[low], 0, sizeof(BatchStatistics))
    counters.batches[low].rows = rows
    counters.batch_count += 1
    return &counters.batches[low]


cdef void count_left(Counters *counters, const char *why) noexcept nogil:
    cdef uint32_t i
    if why == NULL:
        return
    for i in range(<uint32_t>REASONS):
        if counters.left[i].why == NULL:
            counters.left[i].why = why
        if counters.left[i].why == why:
            counters.left[i].count += 1
            return


cdef void statistics_executed(Statistics *statistics, const Execution *execution) noexcept nogil:
    cdef Counters *counters = &statistics.counters
    cdef BatchStatistics *batch
    cdef const Bounds *bounds = &statistics.bounds
    cdef uint32_t requests = execution.requests
    cdef uint32_t i
    lock(&statistics.guard)
    counters.last_end_ns = execution.end_ns
    counters.inference_count += execution.served_rows
    counters.execution_count += 1
    add(&counters.success, requests, execution.success_ns)
    add(&counters.queue, requests, execution.queue_ns)
    for i in range(execution.longest + 1):
        counters.request_times.counts[i] += execution.request_times[i]
    for i in range(execution.longest_queue + 1):
        counters.queue_times.counts[i] += execution.queue_times[i]
    add(&counters.compute_input, requests, execution.input_ns * requests)
    add(&counters.compute_infer, requests, execution.infer_ns * requests)
    add(&counters.compute_output, requests, execution.output_ns * requests)
    counters.input_times.counts[time_index(bounds, <int64_t>execution.input_ns)] += requests
    counters.infer_times.counts[time_index(bounds, <int64_t>execution.infer_ns)] += requests
    counters.output_times.counts[time_index(bounds, <int64_t>execution.output_ns)] += requests
    count_left(counters, execution.why)
    batch = batch_of(counters, execution.rows)
    if batch != NULL:
        add(&batch.compute_input, 1, execution.input_ns)
        add(&batch.compute_infer, 1, execution.infer_ns)
        add(&batch.compute_output, 1, execution.output_ns)
    unlock(&statistics.guard)


cdef ResponseStatistics *responses_at(Counters *counters, uint32_t index) noexcept nogil:
    # the entry of this index, made when there is none; NULL beyond RESPONSES, or without memory
    cdef ResponseStatistics *grown
    cdef uint32_t capacity = max(<uint32_t>4, counters.response_capacity)
    if index >= RESPONSES:
        return NULL
    while capacity <= index:
        capacity *= 2
    if capacity > counters.response_capacity:
        grown = <ResponseStatistics *>realloc(counters.responses, capacity * sizeof(ResponseStatistics))
        if grown == NULL:
            return NULL
        memset(&grown[counters.response_capacity], 0,
               (capacity - counters.response_capacity) * sizeof(ResponseStatistics))
        counters.responses = grown
        counters.response_capacity = capacity
    counters.response_count = max(counters.response_count, index + 1)
    return &counters.responses[index]


cdef void count_response(Counters *counters, ResponseKind kind, uint32_t index, uint64_t infer_ns,
                         uint64_t output_ns) noexcept nogil:
    # which phases count for which kind is Triton's rule
    cdef ResponseStatistics *response = responses_at(counters, index)
    if response == NULL:
        return
    if kind != RESPONSE_CANCEL:
        add(&response.compute_infer, 1, infer_ns)
    if kind == RESPONSE_SUCCESS or (kind == RESPONSE_FAIL and output_ns):
        add(&response.compute_output, 1, output_ns)
    if kind == RESPONSE_SUCCESS:
        add(&response.success, 1, infer_ns + output_ns)
    elif kind == RESPONSE_FAIL:
        add(&response.fail, 1, infer_ns + output_ns)
    elif kind == RESPONSE_EMPTY:
        add(&response.empty, 1, infer_ns + output_ns)
    else:
        add(&response.cancel, 1, infer_ns + output_ns)


cdef void statistics_responded(Statistics *statistics, ResponseKind kind, uint32_t index, int64_t passed_ns,
                               int64_t compute_ns) noexcept nogil:
    cdef Counters *counters = &statistics.counters
    cdef uint32_t at = time_index(&statistics.bounds, passed_ns)
    lock(&statistics.guard)
    if kind == RESPONSE_SUCCESS and index == 0:
        counters.first_times.counts[at] += 1
        add(&counters.first_responses, 1, <uint64_t>passed_ns)
    elif kind == RESPONSE_SUCCESS:
        counters.next_times.counts[at] += 1
        add(&counters.next_responses, 1, <uint64_t>passed_ns)
    if not counters.reported:
        count_response(counters, kind, index, <uint64_t>compute_ns, 0)
    unlock(&statistics.guard)


cdef void statistics_reported(Statistics *statistics, ResponseKind kind, uint32_t index, uint64_t infer_ns,
                              uint64_t output_ns) noexcept nogil:
    cdef Counters *counters = &statistics.counters
    lock(&statistics.guard)
    if not counters.reported:
        counters.reported = True
        if counters.response_count:
            memset(counters.responses, 0, counters.response_count * sizeof(ResponseStatistics))
        counters.response_count = 0
    count_response(counters, kind, index, infer_ns, output_ns)
    unlock(&statistics.guard)


cdef bint statistics_read(Statistics *statistics, Counters *copy) noexcept nogil:
    cdef BatchStatistics *batches
    cdef ResponseStatistics *responses
    lock(&statistics.guard)
    copy[0] = statistics.counters
    batches = <BatchStatistics *>copied(copy.batches, copy.batch_count * sizeof(BatchStatistics))
    responses = <ResponseStatistics *>copied(copy.responses, copy.response_count * sizeof(ResponseStatistics))
    unlock(&statistics.guard)
    copy.batches = batches
    copy.responses = responses
    if batches == NULL or responses == NULL:
        counters_clear(copy)
        return False
    return True


cdef void *copied(const void *data, size_t size) noexcept nogil:
    cdef void *copy = malloc(max(size, <size_t>1))
    if copy != NULL and size:
        memcpy(copy, data, size)
    return copy


# ---------------------------------------------------------------------------------------------------------------------
# For Python

cdef inline tuple pair(const Duration *duration):
    return (duration.count, duration.ns)


cdef int64_t last_inference_ms(const Counters *counters) noexcept nogil:
    # since 1970; 0: never
    if counters.last_end_ns == 0:
        return 0
    return wall_ms() - (now_ns() - counters.last_end_ns) // 1_000_000


cdef int64_t statistics_last_used(Statistics *statistics) noexcept nogil:
    cdef int64_t last
    lock(&statistics.guard)
    last = max(statistics.counters.last_end_ns, statistics.counters.last_hit_ns)
    unlock(&statistics.guard)
    return last


cdef dict failures(const Counters *counters):
    return {
        "REJECTED": pair(&counters.failures[<int>FAILURE_REJECTED]),
        "CANCELED": pair(&counters.failures[<int>FAILURE_CANCELED]),
        "BACKEND": pair(&counters.failures[<int>FAILURE_BACKEND]),
        "OTHER": pair(&counters.failures[<int>FAILURE_OTHER]),
    }


cdef void statistics_queue_times(const Counters *counters, const Bounds *bounds, uint64_t *out) noexcept nogil:
    cdef uint64_t count = 0
    cdef uint32_t power = 0
    cdef uint32_t i
    for i in range(bounds.count):
        count += counters.queue_times.counts[i]
        if power < <uint32_t>POWERS and bounds.ns[i] == <int64_t>1000 << power:
            out[power] = count
            power += 1
            count = 0
    out[<uint32_t>POWERS] = count + counters.queue_times.counts[bounds.count]


cdef list queue_times(const Counters *counters, const Bounds *bounds):
    cdef uint64_t[QUEUE_TIMES] times
    cdef uint32_t i
    statistics_queue_times(counters, bounds, times)
    return [(1 << i if i < <uint32_t>POWERS else None, times[i]) for i in range(<uint32_t>QUEUE_TIMES)]


cdef list responses(const Counters *counters):
    cdef uint32_t i
    return [
        {
            "compute_infer": pair(&counters.responses[i].compute_infer),
            "compute_output": pair(&counters.responses[i].compute_output),
            "success": pair(&counters.responses[i].success),
            "fail": pair(&counters.responses[i].fail),
            "empty_response": pair(&counters.responses[i].empty),
            "cancel": pair(&counters.responses[i].cancel),
        }
        for i in range(counters.response_count)
    ]


cdef list batches(const Counters *counters):
    cdef uint32_t i
    return [
        (
            counters.batches[i].rows,
            pair(&counters.batches[i].compute_input),
            pair(&counters.batches[i].compute_infer),
            pair(&counters.batches[i].compute_output),
        )
        for i in range(counters.batch_count)
    ]


cdef tuple statistics_totals(Statistics *statistics):
    cdef Counters *counters = &statistics.counters
    cdef uint64_t succeeded
    cdef uint64_t failed = 0
    cdef uint64_t busy_ns = 0
    cdef uint32_t i
    lock(&statistics.guard)
    succeeded = counters.success.count
    for i in range(<uint32_t>FAILURES):
        failed += counters.failures[i].count
    for i in range(counters.batch_count):
        busy_ns += counters.batches[i].compute_infer.ns
    unlock(&statistics.guard)
    return succeeded, failed, busy_ns


cdef dict statistics_dict(Statistics *statistics):
    cdef Counters counters
    if not statistics_read(statistics, &counters):
        raise MemoryError
    try:
        failed = failures(&counters)
        return {
            "last_inference_ms": last_inference_ms(&counters),
            "inference_count": counters.inference_count,
            "execution_count": counters.execution_count,
            "success": pair(&counters.success),
            "fail": (sum([count for count, _ in failed.values()]), sum([ns for _, ns in failed.values()])),
            "failures": failed,
            "queue": pair(&counters.queue),
            "compute_input": pair(&counters.compute_input),
            "compute_infer": pair(&counters.compute_infer),
            "compute_output": pair(&counters.compute_output),
            "cache_hit": pair(&counters.cache_hit),
            "cache_miss": pair(&counters.cache_miss),
            "queue_times": queue_times(&counters, &statistics.bounds),
            "batches": batches(&counters),
            "responses": responses(&counters),
        }
    finally:
        counters_clear(&counters)
