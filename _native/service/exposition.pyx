"""The metrics of model versions as text, in the formats of Prometheus and OpenMetrics.

All samples of a family must be together, so each family is written for every version before the next family. The
counters of all versions are read first, each under its own lock; the text is written without the GIL.
"""

from libc.stddef cimport size_t
from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from inferd._native.atomic cimport load64
from inferd._native.request.lane cimport Lane, LaneHandle
from inferd._native.request.statistics cimport (
    FAILURE_BACKEND,
    FAILURE_CANCELED,
    FAILURE_OTHER,
    FAILURE_REJECTED,
    REASONS,
    TIMES,
    Bounds,
    Counters,
    Duration,
    Histogram,
    counters_clear,
    statistics_read,
)
from inferd._native.text_buffer cimport Text, put, put_number, put_scaled, put_text

cdef enum Kind:
    SUCCESS
    FAILURES_BY_REASON
    INFERENCES
    EXECUTIONS
    REQUEST_TIME
    QUEUE_TIME
    INPUT_TIME
    INFER_TIME
    OUTPUT_TIME
    PENDING
    CACHE_HITS
    CACHE_HIT_TIME
    CACHE_MISSES
    CACHE_MISS_TIME
    REQUEST_HISTOGRAM
    QUEUE_HISTOGRAM
    INPUT_HISTOGRAM
    INFER_HISTOGRAM
    OUTPUT_HISTOGRAM
    FIRST_HISTOGRAM
    NEXT_HISTOGRAM
    BATCH_HISTOGRAM
    BATCHES_BY_REASON
    RECEIVED_BYTES
    SENT_BYTES

KINDS = {
    "success": SUCCESS, "failures": FAILURES_BY_REASON, "inferences": INFERENCES, "executions": EXECUTIONS,
    "request": REQUEST_TIME, "queue": QUEUE_TIME, "compute_input": INPUT_TIME, "compute_infer": INFER_TIME,
    "compute_output": OUTPUT_TIME, "pending": PENDING, "cache_hits": CACHE_HITS, "cache_hit": CACHE_HIT_TIME,
    "cache_misses": CACHE_MISSES, "cache_miss": CACHE_MISS_TIME, "request_histogram": REQUEST_HISTOGRAM,
    "queue_histogram": QUEUE_HISTOGRAM, "compute_input_histogram": INPUT_HISTOGRAM,
    "compute_infer_histogram": INFER_HISTOGRAM, "compute_output_histogram": OUTPUT_HISTOGRAM,
    "first_response_histogram": FIRST_HISTOGRAM, "next_response_histogram": NEXT_HISTOGRAM,
    "batch_histogram": BATCH_HISTOGRAM, "batches": BATCHES_BY_REASON,
    "received": RECEIVED_BYTES, "sent": SENT_BYTES,
}
"""The kinds of families that `ModelMetrics.render` can write."""


# ---------------------------------------------------------------------------------------------------------------------
# Samples

cdef struct Exemplar:
    # the trace of one request
    int64_t ns               # the duration of the request
    const char *text         # written behind its bucket
    size_t size

cdef struct Version:
    # one model version, as it was read
    Lane *lane
    const char *labels       # model="m",version="1"
    size_t label_size
    size_t reason_place      # where the label "reason" belongs in `labels`, by its name
    uint32_t flags           # of HAS_*
    uint32_t pending
    Counters counters
    uint64_t received
    uint64_t sent
    const Bounds *bounds
    Exemplar *exemplars      # of the histogram of requests, ascending
    uint32_t exemplar_count

cdef enum:
    HAS_QUEUE = 1
    HAS_CACHE = 2
    HAS_STREAM = 4           # it may send several responses to a request

cdef struct Family:
    Kind kind
    const char *name         # of its samples
    size_t name_size
    uint64_t unit            # nanoseconds of the unit of its times
    int64_t bounds[TIMES]    # upper bounds of a histogram that are shown, INT64_MAX behind the last one
    bint point               # OpenMetrics: bounds are written as floating-point numbers


cdef void begin_sample(Text *text, const Family *family, const char *suffix, const Version *version) noexcept nogil:
    # write a sample up to its labels, without the closing brace
    put(text, family.name, family.name_size)
    put_text(text, suffix)
    put(text, "{", 1)
    put(text, version.labels, version.label_size)


cdef void sample(Text *text, const Family *family, const Version *version, uint64_t value) noexcept nogil:
    begin_sample(text, family, "", version)
    put(text, "} ", 2)
    put_number(text, value)
    put(text, "\n", 1)


cdef void labelled(Text *text, const Family *family, const Version *version, const char *label,
                   uint64_t value) noexcept nogil:
    put(text, family.name, family.name_size)
    put(text, "{", 1)
    put(text, version.labels, version.reason_place)
    put_text(text, ",reason=\"")
    put_text(text, label)
    put(text, "\"", 1)
    put(text, version.labels + version.reason_place, version.label_size - version.reason_place)
    put(text, "} ", 2)
    put_number(text, value)
    put(text, "\n", 1)


cdef void bucket(Text *text, const Family *family, const Version *version, uint64_t bound, uint64_t unit,
                 uint64_t count, const Exemplar *exemplar=NULL) noexcept nogil:
    # bound 0: the last bucket, without a bound
    begin_sample(text, family, "_bucket", version)
    put_text(text, ",le=\"")
    if bound:
        put_scaled(text, bound, unit, family.point)
    else:
        put_text(text, "+Inf")
    put(text, "\"} ", 3)
    put_number(text, count)
    if exemplar != NULL:
        put(text, exemplar.text, exemplar.size)
    put(text, "\n", 1)


cdef void sums(Text *text, const Family *family, const Version *version, uint64_t sum, uint64_t unit,
               uint64_t count) noexcept nogil:
    begin_sample(text, family, "_count", version)
    put(text, "} ", 2)
    put_number(text, count)
    put(text, "\n", 1)
    begin_sample(text, family, "_sum", version)
    put(text, "} ", 2)
    put_scaled(text, sum, unit, False)
    put(text, "\n", 1)


cdef const Exemplar *exemplar_of(const Family *family, const Version *version, int64_t low,
                                 int64_t high) noexcept nogil:
    # the exemplar of a request that took more than `low` and at most `high`; NULL: there is none
    cdef uint32_t i
    if not family.point or family.kind != REQUEST_HISTOGRAM:
        return NULL
    for i in range(version.exemplar_count):
        if low < version.exemplars[i].ns <= high:
            return &version.exemplars[i]
    return NULL


cdef void times(Text *text, const Family *family, const Version *version, const Histogram *histogram,
                uint64_t sum) noexcept nogil:
    # The shown bounds are a part of the bounds by which the version counts.
    cdef const Bounds *bounds = version.bounds
    cdef uint64_t count = 0
    cdef uint32_t shown = 0
    cdef int64_t low = 0     # the previous shown bound
    cdef uint32_t i
    for i in range(bounds.count):
        count += histogram.counts[i]
        while family.bounds[shown] < bounds.ns[i]:
            shown += 1       # this version does not count by this bound
        if family.bounds[shown] == bounds.ns[i]:
            bucket(text, family, version, <uint64_t>bounds.ns[i], family.unit, count,
                   exemplar_of(family, version, low, bounds.ns[i]))
            low = bounds.ns[i]
            shown += 1
    count += histogram.counts[bounds.count]
    bucket(text, family, version, 0, 1, count, exemplar_of(family, version, low, INT64_MAX))
    sums(text, family, version, sum, family.unit, count)


cdef void batch_sizes(Text *text, const Family *family, const Version *version) noexcept nogil:
    # bounds are the powers of two up to 1024
    cdef const Counters *counters = &version.counters
    cdef uint64_t bound = 1
    cdef uint64_t count = 0
    cdef uint64_t rows = 0
    cdef uint32_t i = 0
    while True:
        while i < counters.batch_count and counters.batches[i].rows <= bound:
            count += counters.batches[i].compute_infer.count
            rows += counters.batches[i].compute_infer.count * counters.batches[i].rows
            i += 1
        bucket(text, family, version, bound, 1, count)
        if bound >= 1024:
            break
        bound *= 2
    while i < counters.batch_count:
        count += counters.batches[i].compute_infer.count
        rows += counters.batches[i].compute_infer.count * counters.batches[i].rows
        i += 1
    bucket(text, family, version, 0, 1, count)
    sums(text, family, version, rows, 1, count)


cdef void failures(Text *text, const Family *family, const Version *version) noexcept nogil:
    cdef const Counters *counters = &version.counters
    labelled(text, family, version, "REJECTED", counters.failures[<int>FAILURE_REJECTED].count)
    labelled(text, family, version, "CANCELED", counters.failures[<int>FAILURE_CANCELED].count)
    labelled(text, family, version, "BACKEND", counters.failures[<int>FAILURE_BACKEND].count)
    labelled(text, family, version, "OTHER", counters.failures[<int>FAILURE_OTHER].count)


cdef void batches(Text *text, const Family *family, const Version *version) noexcept nogil:
    cdef uint32_t i
    for i in range(<uint32_t>REASONS):
        if version.counters.left[i].why != NULL:
            labelled(text, family, version, version.counters.left[i].why, version.counters.left[i].count)


cdef inline uint64_t us(Duration duration) noexcept nogil:
    return duration.ns // 1000


cdef void describe(Text *text, const Family *family, const Version *version) noexcept nogil:
    cdef const Counters *counters = &version.counters
    cdef Kind kind = family.kind
    if kind == SUCCESS:
        sample(text, family, version, counters.success.count)
    elif kind == FAILURES_BY_REASON:
        failures(text, family, version)
    elif kind == INFERENCES:
        sample(text, family, version, counters.inference_count)
    elif kind == EXECUTIONS:
        sample(text, family, version, counters.execution_count)
    elif kind == REQUEST_TIME:
        sample(text, family, version, us(counters.success))
    elif kind == QUEUE_TIME:
        sample(text, family, version, us(counters.queue))
    elif kind == INPUT_TIME:
        sample(text, family, version, us(counters.compute_input))
    elif kind == INFER_TIME:
        sample(text, family, version, us(counters.compute_infer))
    elif kind == OUTPUT_TIME:
        sample(text, family, version, us(counters.compute_output))
    elif kind == PENDING:
        if version.flags & HAS_QUEUE:
            sample(text, family, version, version.pending)
    elif kind == CACHE_HITS:
        if version.flags & HAS_CACHE:
            sample(text, family, version, counters.cache_hit.count)
    elif kind == CACHE_HIT_TIME:
        if version.flags & HAS_CACHE:
            sample(text, family, version, us(counters.cache_hit))
    elif kind == CACHE_MISSES:
        if version.flags & HAS_CACHE:
            sample(text, family, version, counters.cache_miss.count)
    elif kind == CACHE_MISS_TIME:
        if version.flags & HAS_CACHE:
            sample(text, family, version, us(counters.cache_miss))
    elif kind == RECEIVED_BYTES:
        sample(text, family, version, version.received)
    elif kind == SENT_BYTES:
        sample(text, family, version, version.sent)
    elif kind == BATCHES_BY_REASON:
        batches(text, family, version)
    elif kind == BATCH_HISTOGRAM:
        batch_sizes(text, family, version)
    else:
        describe_times(text, family, version)


cdef void describe_times(Text *text, const Family *family, const Version *version) noexcept nogil:
    cdef const Counters *counters = &version.counters
    cdef Kind kind = family.kind
    cdef bint streams = version.flags & HAS_STREAM != 0
    if kind == QUEUE_HISTOGRAM:
        times(text, family, version, &counters.queue_times, counters.queue.ns)
    elif kind == INPUT_HISTOGRAM:
        times(text, family, version, &counters.input_times, counters.compute_input.ns)
    elif kind == INFER_HISTOGRAM:
        times(text, family, version, &counters.infer_times, counters.compute_infer.ns)
    elif kind == OUTPUT_HISTOGRAM:
        times(text, family, version, &counters.output_times, counters.compute_output.ns)
    elif kind == FIRST_HISTOGRAM and streams:
        times(text, family, version, &counters.first_times, counters.first_responses.ns)
    elif kind == REQUEST_HISTOGRAM or kind == FIRST_HISTOGRAM:
        # the first response of a model that sends one is its final response
        times(text, family, version, &counters.request_times, counters.success.ns)
    elif streams:
        times(text, family, version, &counters.next_times, counters.next_responses.ns)


# ---------------------------------------------------------------------------------------------------------------------
# For Python

cdef class ModelMetrics:
    """Reads the counters of model versions at one moment, and writes them.

    Args:
        versions: a tuple for each version: its lane; its labels as escaped text; whether it has a queue; whether it
            has a cache; whether it may send several responses to a request.
    """

    cdef Version *versions
    cdef uint32_t count
    cdef list kept           # objects that the structures point into

    def __init__(self, list versions not None):
        cdef Version *version
        cdef bytes encoded
        self.kept = [versions]
        self.versions = <Version *>malloc(max(1, len(versions)) * sizeof(Version))
        if self.versions == NULL:
            raise MemoryError
        for lane, labels, queue, cache, streams in versions:
            version = &self.versions[self.count]
            memset(version, 0, sizeof(Version))
            version.lane = (<LaneHandle?>lane).lane
            encoded = labels
            version.labels = <const char *>encoded
            version.label_size = len(encoded)
            version.reason_place = <size_t>encoded.rindex(b",version=")
            version.flags = HAS_QUEUE * bool(queue) + HAS_CACHE * bool(cache) + HAS_STREAM * bool(streams)
            version.bounds = &version.lane.statistics.bounds
            self.count += 1

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.count):
            counters_clear(&self.versions[i].counters)
            free(self.versions[i].exemplars)
        free(self.versions)

    def read(self) -> None:
        """Read all counters.

        Raises:
            MemoryError: there is no memory for the copies.
        """
        cdef uint32_t i
        cdef bint good = True
        with nogil:
            for i in range(self.count):
                counters_clear(&self.versions[i].counters)
                good = statistics_read(&self.versions[i].lane.statistics, &self.versions[i].counters) and good
                self.versions[i].received = <uint64_t>load64(&self.versions[i].lane.received)
                self.versions[i].sent = <uint64_t>load64(&self.versions[i].lane.sent)
                if self.versions[i].flags & HAS_QUEUE:
                    self.versions[i].pending = self.versions[i].lane.scheduler.pending(self.versions[i].lane)
        if not good:
            raise MemoryError

    def illustrate(self, uint32_t index, list exemplars not None) -> None:
        """Set the exemplars in the request histogram of a version, for the format of OpenMetrics.

        Args:
            index: of the version.
            exemplars: the duration of a request in nanoseconds, ascending, and the text behind its bucket.

        Raises:
            IndexError: there is no such version.
        """
        cdef Version *version
        cdef bytes text
        cdef int64_t ns
        if index >= self.count:
            raise IndexError(f"expected a version below {self.count}, got {index}")
        version = &self.versions[index]
        free(version.exemplars)
        version.exemplar_count = 0
        version.exemplars = <Exemplar *>malloc(max(1, len(exemplars)) * sizeof(Exemplar))
        if version.exemplars == NULL:
            raise MemoryError
        self.kept.append(exemplars)
        for ns, text in exemplars:
            version.exemplars[version.exemplar_count].ns = ns
            version.exemplars[version.exemplar_count].text = text
            version.exemplars[version.exemplar_count].size = len(text)
            version.exemplar_count += 1

    def render(self, str kind not None, bytes name not None, uint64_t unit, bounds, bint point, uint32_t first=0,
               last=None) -> bytes:
        """The samples of one family for the versions from `first` on, up to before `last`.

        Args:
            kind: one of KINDS.
            name: of the samples, without the suffixes of histograms.
            unit: nanoseconds in the unit of its times, a power of ten.
            bounds: of a histogram of times: at most 63 upper bounds in nanoseconds, ascending. Those by which a version
                counts are shown.
            point: write bounds as OpenMetrics requires.
        """
        cdef Family family
        cdef Text text
        cdef uint32_t end = self.count if last is None else min(<uint32_t>last, self.count)
        cdef uint32_t i
        memset(&text, 0, sizeof(Text))
        memset(&family, 0, sizeof(Family))
        family.kind = KINDS[kind]
        family.name = name
        family.name_size = len(name)
        family.unit = unit
        family.point = point
        for i in range(<uint32_t>TIMES):
            family.bounds[i] = INT64_MAX
        for i, bound in enumerate(bounds[:TIMES - 1]):
            family.bounds[i] = bound
        with nogil:
            for i in range(first, end):
                describe(&text, &family, &self.versions[i])
        try:
            if text.failed:
                raise MemoryError
            return text.data[:text.size] if text.size else b""
        finally:
            free(text.data)
