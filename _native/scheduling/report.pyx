"""inference.ModelStatisticsResponse, encoded from the counters of lanes.

Clients ask a server of ten thousand models for all of them every few seconds, and the event loop has other calls to
serve. So no Python object is made of a counter, and only the counters that the message has are read.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from inferd._native.protobuf.codec cimport Str
from inferd._native.protobuf.writing cimport (
    MESSAGE_BYTES,
    NUMBER_BYTES,
    TEXT_BYTES,
    Buffer,
    framed,
    put_number,
    put_tag,
    put_text,
    reserve,
)
from inferd._native.request.lane cimport Lane, LaneHandle
from inferd._native.request.statistics cimport (
    FAILURE_BACKEND,
    FAILURE_CANCELED,
    FAILURE_OTHER,
    FAILURE_REJECTED,
    FAILURES,
    POWERS,
    QUEUE_TIMES,
    BatchStatistics,
    Counters,
    Duration,
    ResponseStatistics,
    Statistics,
    last_inference_ms,
    statistics_queue_times,
)
from inferd._native.threads cimport lock, unlock

cdef enum:
    # The most bytes that each part of the message takes, without its texts.
    DURATION_BYTES = MESSAGE_BYTES + 2 * NUMBER_BYTES
    DURATIONS_BYTES = MESSAGE_BYTES + 8 * DURATION_BYTES
    FAILURE_BYTES = MESSAGE_BYTES + TEXT_BYTES + 8 + DURATION_BYTES
    TIME_BYTES = MESSAGE_BYTES + 2 * NUMBER_BYTES
    ADAPTIVE_BYTES = MESSAGE_BYTES + 4 * NUMBER_BYTES + DURATION_BYTES
    MEMORY_BYTES = MESSAGE_BYTES + TEXT_BYTES + 2 * NUMBER_BYTES
    BATCH_BYTES = MESSAGE_BYTES + NUMBER_BYTES + 3 * DURATION_BYTES
    RESPONSE_BYTES = 2 * MESSAGE_BYTES + TEXT_BYTES + 10 + 6 * DURATION_BYTES
    # of each version, without its batches, responses and memory
    VERSION_BYTES = (MESSAGE_BYTES + 2 * TEXT_BYTES + 3 * NUMBER_BYTES + DURATIONS_BYTES + FAILURES * FAILURE_BYTES
                     + QUEUE_TIMES * TIME_BYTES + ADAPTIVE_BYTES)

cdef struct Adaptive:
    uint64_t numbers[4]      # in the order of the message's fields
    Duration waited


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the message. Each function returns the end of what it wrote; there is room.

cdef inline uint8_t *put_duration(uint8_t *out, uint32_t field, const Duration *duration) noexcept nogil:
    cdef uint8_t *length = put_tag(out, field)
    return framed(length, put_number(put_number(length + 1, 1, duration.count), 2, duration.ns))


cdef uint8_t *put_durations(uint8_t *out, const Counters *counters) noexcept nogil:
    cdef uint8_t *length = put_tag(out, 6)
    cdef Duration fail
    cdef int i
    fail.count = fail.ns = 0
    for i in range(<int>FAILURES):
        fail.count += counters.failures[i].count
        fail.ns += counters.failures[i].ns
    out = put_duration(length + 1, 1, &counters.success)
    out = put_duration(out, 2, &fail)
    out = put_duration(out, 3, &counters.queue)
    out = put_duration(out, 4, &counters.compute_input)
    out = put_duration(out, 5, &counters.compute_infer)
    out = put_duration(out, 6, &counters.compute_output)
    out = put_duration(out, 7, &counters.cache_hit)
    return framed(length, put_duration(out, 8, &counters.cache_miss))


cdef uint8_t *put_batch(uint8_t *out, const BatchStatistics *batch) noexcept nogil:
    cdef uint8_t *length = put_tag(out, 7)
    out = put_number(length + 1, 1, batch.rows)
    out = put_duration(out, 2, &batch.compute_input)
    out = put_duration(out, 3, &batch.compute_infer)
    return framed(length, put_duration(out, 4, &batch.compute_output))


cdef uint8_t *put_response(uint8_t *out, uint32_t index, const ResponseStatistics *response) noexcept nogil:
    cdef uint8_t *length = put_tag(out, 9)
    cdef uint8_t *value
    cdef char digits[10]
    cdef int at = 10
    while True:
        at -= 1
        digits[at] = <char>(c"0" + index % 10)
        index //= 10
        if index == 0:
            break
    value = put_tag(put_text(length + 1, 1, digits + at, 10 - at), 2)
    out = put_duration(value + 1, 1, &response.compute_infer)
    out = put_duration(out, 2, &response.compute_output)
    out = put_duration(out, 3, &response.success)
    out = put_duration(out, 4, &response.fail)
    out = put_duration(out, 5, &response.empty)
    return framed(length, framed(value, put_duration(out, 6, &response.cancel)))


cdef uint8_t *put_failure(uint8_t *out, const char *reason, size_t size, const Duration *duration) noexcept nogil:
    cdef uint8_t *length = put_tag(out, 1001)
    return framed(length, put_duration(put_text(length + 1, 1, reason, size), 2, duration))


cdef uint8_t *put_queue_times(uint8_t *out, Statistics *statistics) noexcept nogil:
    cdef uint64_t[QUEUE_TIMES] times
    cdef uint8_t *length
    cdef uint32_t i
    statistics_queue_times(&statistics.counters, &statistics.bounds, times)
    for i in range(<uint32_t>QUEUE_TIMES):
        length = put_tag(out, 1002)
        out = put_number(length + 1, 1, <uint64_t>1 << i if i < <uint32_t>POWERS else <uint64_t>0)
        out = framed(length, put_number(out, 2, times[i]))
    return out


cdef uint8_t *put_adaptive(uint8_t *out, const Adaptive *adaptive) noexcept nogil:
    cdef uint8_t *length = put_tag(out, 1003)
    cdef uint32_t i
    out = length + 1
    for i in range(4):
        out = put_number(out, i + 1, adaptive.numbers[i])
    return framed(length, put_duration(out, 5, &adaptive.waited))


cdef uint8_t *put_counters(uint8_t *out, Statistics *statistics) noexcept nogil:
    # The counters of a version. The caller holds their lock.
    cdef const Counters *counters = &statistics.counters
    cdef uint32_t i
    out = put_number(out, 3, <uint64_t>last_inference_ms(counters))
    out = put_number(out, 4, counters.inference_count)
    out = put_number(out, 5, counters.execution_count)
    out = put_durations(out, counters)
    for i in range(counters.batch_count):
        out = put_batch(out, &counters.batches[i])
    for i in range(counters.response_count):
        out = put_response(out, i, &counters.responses[i])
    out = put_failure(out, b"REJECTED", 8, &counters.failures[<int>FAILURE_REJECTED])
    out = put_failure(out, b"CANCELED", 8, &counters.failures[<int>FAILURE_CANCELED])
    out = put_failure(out, b"BACKEND", 7, &counters.failures[<int>FAILURE_BACKEND])
    out = put_failure(out, b"OTHER", 5, &counters.failures[<int>FAILURE_OTHER])
    return put_queue_times(out, statistics)


# ---------------------------------------------------------------------------------------------------------------------
# Versions

cdef uint8_t *begin_version(Buffer *buffer, Lane *lane, size_t more) noexcept nogil:
    # Write the name and the counters of a version, with room for `more` bytes behind them; returns the end. NULL: no
    # memory. The caller writes the length of the entry at the byte behind buffer.size.
    cdef Statistics *statistics = &lane.statistics
    cdef Str name = lane.signature.name
    cdef Str version = lane.signature.version_text
    cdef uint8_t *out = NULL
    lock(&statistics.guard)
    more += <size_t>name.size + version.size + VERSION_BYTES
    more += <size_t>statistics.counters.batch_count * BATCH_BYTES
    more += <size_t>statistics.counters.response_count * RESPONSE_BYTES
    if reserve(buffer, more):
        out = put_tag(buffer.data + buffer.size, 1) + 1
        out = put_text(out, 1, name.data, name.size)
        out = put_text(out, 2, version.data, version.size)
        out = put_counters(out, statistics)
    unlock(&statistics.guard)
    return out


cdef Adaptive adaptive_of(dict learnt) except *:
    cdef Adaptive adaptive
    adaptive.numbers[0] = learnt["gap_ns"]
    adaptive.numbers[1] = learnt["fixed_ns"]
    adaptive.numbers[2] = learnt["row_ns"]
    adaptive.numbers[3] = learnt["target"]
    count, ns = learnt["waited"]
    adaptive.waited.count, adaptive.waited.ns = count, ns
    return adaptive


cdef uint8_t *put_memory(uint8_t *out, bytes kind, uint64_t number, uint64_t size):
    cdef uint8_t *length = put_tag(out, 8)
    out = put_text(length + 1, 1, kind, len(kind))
    return framed(length, put_number(put_number(out, 2, number), 3, size))


cdef int add_version(Buffer *buffer, LaneHandle handle, dict learnt, object memory) except -1:
    cdef list kinds = [(kind.encode(), number, size) for kind, number, size in memory] if memory else []
    cdef size_t more = 0
    cdef uint8_t *length
    cdef uint8_t *out
    cdef Adaptive adaptive
    memset(&adaptive, 0, sizeof(Adaptive))
    if learnt is not None:
        adaptive = adaptive_of(learnt)
    for kind, _, _ in kinds:
        more += MEMORY_BYTES + len(kind)
    out = begin_version(buffer, handle.lane, more)
    if out == NULL:
        raise MemoryError
    if learnt is not None:
        out = put_adaptive(out, &adaptive)
    for kind, number, size in kinds:
        out = put_memory(out, kind, number, size)
    length = buffer.data + buffer.size + 1
    buffer.size = <size_t>(framed(length, out) - buffer.data)
    return 0


def encode_statistics(versions) -> bytes:
    """Entries of a ModelStatisticsResponse; for each version its lane, the estimates of its adaptive delay, its
    memory."""
    cdef Buffer buffer
    memset(&buffer, 0, sizeof(Buffer))
    try:
        for lane, learnt, memory in versions:
            add_version(&buffer, lane, learnt, memory)
        return buffer.data[:buffer.size] if buffer.size else b""
    finally:
        free(buffer.data)
