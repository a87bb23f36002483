"""Counters of a model version, with the meaning of inference.ModelStatistics.

As in Triton, every request of a batch is charged the whole of the batch's compute phases, and `count` is the number of
requests; per batch size, `count` is the number of executions.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memset

from _native.clock cimport wall_ms
from _native.threads cimport lock, mutex_destroy, mutex_init, unlock

cdef enum:
    BATCH_SIZES = 1024       # distinct batch sizes that are told apart


cdef void statistics_init(Statistics *statistics) noexcept nogil:
    memset(statistics, 0, sizeof(Statistics))
    mutex_init(&statistics.guard, NULL)


cdef void statistics_clear(Statistics *statistics) noexcept nogil:
    free(statistics.batches)
    statistics.batches = NULL
    mutex_destroy(&statistics.guard)


cdef void statistics_reset(Statistics *statistics) noexcept nogil:
    statistics_clear(statistics)
    statistics_init(statistics)


cdef inline void add(Duration *duration, uint64_t count, uint64_t ns) noexcept nogil:
    duration.count += count
    duration.ns += ns


cdef void statistics_failed(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil:
    lock(&statistics.guard)
    add(&statistics.fail, count, ns)
    unlock(&statistics.guard)


cdef void statistics_shared(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil:
    lock(&statistics.guard)
    add(&statistics.success, count, ns)
    unlock(&statistics.guard)


cdef void statistics_cache_hit(Statistics *statistics, uint64_t lookup_ns) noexcept nogil:
    lock(&statistics.guard)
    add(&statistics.cache_hit, 1, lookup_ns)
    unlock(&statistics.guard)


cdef void statistics_cache_missed(Statistics *statistics, uint64_t count, uint64_t ns) noexcept nogil:
    lock(&statistics.guard)
    add(&statistics.cache_miss, count, ns)
    unlock(&statistics.guard)


cdef BatchStatistics *batch_of(Statistics *statistics, uint32_t rows) noexcept nogil:
    # the entry for this batch size, made when there is none; NULL when there is no room for one more
    cdef uint32_t low = 0
    cdef uint32_t high = statistics.batch_count
    cdef uint32_t middle, capacity
    cdef BatchStatistics *grown
    while low < high:
        middle = (low + high) // 2
        if statistics.batches[middle].rows < rows:
            low = middle + 1
        else:
            high = middle
    if low < statistics.batch_count and statistics.batches[low].rows == rows:
        return &statistics.batches[low]
    if statistics.batch_count == statistics.batch_capacity:
        capacity = max(16, statistics.batch_capacity * 2)
        if capacity > BATCH_SIZES:
            return NULL
        grown = <BatchStatistics *>realloc(statistics.batches, capacity * sizeof(BatchStatistics))
        if grown == NULL:
            return NULL
        statistics.batches = grown
        statistics.batch_capacity = capacity
    memmove(&statistics.batches[low + 1], &statistics.batches[low],
            (statistics.batch_count - low) * sizeof(BatchStatistics))
    memset(&statistics.batches[low], 0, sizeof(BatchStatistics))
    statistics.batches[low].rows = rows
    statistics.batch_count += 1
    return &statistics.batches[low]


cdef void statistics_executed(Statistics *statistics, const Execution *execution) noexcept nogil:
    cdef BatchStatistics *batch
    cdef uint32_t requests = execution.requests
    cdef uint32_t i
    lock(&statistics.guard)
    statistics.last_inference_ms = wall_ms()
    statistics.inference_count += execution.served_rows
    statistics.execution_count += 1
    add(&statistics.success, requests, execution.success_ns)
    add(&statistics.queue, requests, execution.queue_ns)
    for i in range(QUEUE_TIMES):
        statistics.queue_times[i] += execution.queue_times[i]
    add(&statistics.compute_input, requests, execution.input_ns * requests)
    add(&statistics.compute_infer, requests, execution.infer_ns * requests)
    add(&statistics.compute_output, requests, execution.output_ns * requests)
    batch = batch_of(statistics, execution.rows)
    if batch != NULL:
        add(&batch.compute_input, 1, execution.input_ns)
        add(&batch.compute_infer, 1, execution.infer_ns)
        add(&batch.compute_output, 1, execution.output_ns)
    unlock(&statistics.guard)


cdef inline tuple pair(const Duration *duration):
    return (duration.count, duration.ns)


cdef dict statistics_dict(Statistics *statistics):
    cdef uint32_t i
    lock(&statistics.guard)
    try:
        return {
            "last_inference_ms": statistics.last_inference_ms,
            "inference_count": statistics.inference_count,
            "execution_count": statistics.execution_count,
            "success": pair(&statistics.success),
            "fail": pair(&statistics.fail),
            "queue": pair(&statistics.queue),
            "compute_input": pair(&statistics.compute_input),
            "compute_infer": pair(&statistics.compute_infer),
            "compute_output": pair(&statistics.compute_output),
            "cache_hit": pair(&statistics.cache_hit),
            "cache_miss": pair(&statistics.cache_miss),
            "queue_times": [
                (1 << i if i < QUEUE_TIMES - 1 else None, statistics.queue_times[i]) for i in range(QUEUE_TIMES)
            ],
            "batches": [
                (
                    statistics.batches[i].rows,
                    pair(&statistics.batches[i].compute_input),
                    pair(&statistics.batches[i].compute_infer),
                    pair(&statistics.batches[i].compute_output),
                )
                for i in range(statistics.batch_count)
            ],
        }
    finally:
        unlock(&statistics.guard)
