"""Counters of a model version, with the meaning of inference.ModelStatistics.

As in Triton, every request of a batch is charged the whole of the batch's compute phases, and `count` is the number of
requests; per batch size, `count` is the number of executions.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from _native.clock cimport now_ns, wall_ms
from _native.threads cimport lock, mutex_destroy, mutex_init, unlock

cdef enum:
    BATCH_SIZES = 1024       # distinct batch sizes that are told apart


cdef void statistics_init(Statistics *statistics) noexcept nogil:
    memset(statistics, 0, sizeof(Statistics))
    mutex_init(&statistics.guard, NULL)


cdef void statistics_clear(Statistics *statistics) noexcept nogil:
    free(statistics.counters.batches)
    statistics.counters.batches = NULL
    mutex_destroy(&statistics.guard)


cdef inline void add(Duration *duration, uint64_t count, uint64_t ns) noexcept nogil:
    duration.count += count
    duration.ns += ns


cdef void statistics_failed(Statistics *statistics, Failure why, uint64_t count, uint64_t ns) noexcept nogil:
    lock(&statistics.guard)
    add(&statistics.counters.failures[<int>why], count, ns)
    unlock(&statistics.guard)


cdef void statistics_shared(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil:
    lock(&statistics.guard)
    add(&statistics.counters.success, count, ns)
    unlock(&statistics.guard)


cdef void statistics_cache_hit(Statistics *statistics, uint64_t lookup_ns) noexcept nogil:
    lock(&statistics.guard)
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


cdef void statistics_executed(Statistics *statistics, const Execution *execution) noexcept nogil:
    cdef Counters *counters = &statistics.counters
    cdef BatchStatistics *batch
    cdef uint32_t requests = execution.requests
    cdef uint32_t i
    lock(&statistics.guard)
    counters.last_end_ns = execution.end_ns
    counters.inference_count += execution.served_rows
    counters.execution_count += 1
    add(&counters.success, requests, execution.success_ns)
    add(&counters.queue, requests, execution.queue_ns)
    for i in range(execution.longest + 1):
        counters.queue_times[i] += execution.queue_times[i]
    add(&counters.compute_input, requests, execution.input_ns * requests)
    add(&counters.compute_infer, requests, execution.infer_ns * requests)
    add(&counters.compute_output, requests, execution.output_ns * requests)
    batch = batch_of(counters, execution.rows)
    if batch != NULL:
        add(&batch.compute_input, 1, execution.input_ns)
        add(&batch.compute_infer, 1, execution.infer_ns)
        add(&batch.compute_output, 1, execution.output_ns)
    unlock(&statistics.guard)


cdef bint statistics_read(Statistics *statistics, Counters *copy) noexcept nogil:
    cdef BatchStatistics *batches
    cdef size_t size
    lock(&statistics.guard)
    copy[0] = statistics.counters
    size = copy.batch_count * sizeof(BatchStatistics)
    batches = <BatchStatistics *>malloc(max(size, <size_t>1))
    if batches != NULL and size:
        memcpy(batches, copy.batches, size)
    unlock(&statistics.guard)
    copy.batches = batches
    return batches != NULL


# ---------------------------------------------------------------------------------------------------------------------
# For Python

cdef inline tuple pair(const Duration *duration):
    return (duration.count, duration.ns)


cdef int64_t last_inference_ms(const Counters *counters) noexcept nogil:
    # since 1970; 0: never
    cdef int64_t now = wall_ms()
    if counters.last_end_ns == 0:
        return 0
    return now - (now_ns() - counters.last_end_ns) // 1_000_000


cdef dict failures(const Counters *counters):
    return {
        "REJECTED": pair(&counters.failures[<int>FAILURE_REJECTED]),
        "CANCELED": pair(&counters.failures[<int>FAILURE_CANCELED]),
        "BACKEND": pair(&counters.failures[<int>FAILURE_BACKEND]),
        "OTHER": pair(&counters.failures[<int>FAILURE_OTHER]),
    }


cdef list queue_times(const Counters *counters):
    return [(1 << i if i < QUEUE_TIMES - 1 else None, counters.queue_times[i]) for i in range(QUEUE_TIMES)]


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
            "queue_times": queue_times(&counters),
            "batches": batches(&counters),
        }
    finally:
        free(counters.batches)
