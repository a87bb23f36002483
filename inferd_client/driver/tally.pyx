"""The outcomes of a run: counters, latencies, and the first few wrong calls."""

from libc.stdint cimport uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from inferd_client.driver.call cimport MESSAGE_LIMIT, Call
from inferd_client.driver.histogram cimport BUCKETS, Histogram, bucket_top, histogram_add, histogram_percentile
from inferd_client.driver.workload cimport CORRECT, WRONG_STATUS, Verdict

from inferd_client.driver.report import Latency, Report

cdef enum:
    PREFIX = 5               # bytes before a gRPC message

VERDICTS = ("correct", "status", "early deadline", "malformed", "model", "id", "outputs", "shape", "bytes")


cdef void keep_sample(Tally *tally, const Call *call, Verdict verdict) noexcept nogil:
    cdef Sample *sample
    if tally.sample_count == SAMPLES:
        return
    sample = &tally.samples[tally.sample_count]
    tally.sample_count += 1
    sample.index = call.index
    sample.verdict = verdict
    sample.grpc_status = call.exchange.grpc_status
    sample.timeout_us = call.timeout_us
    sample.elapsed_ns = call.elapsed_ns
    memcpy(sample.message, call.message, MESSAGE_LIMIT)


cdef void tally_response(Tally *tally, const Call *call, Verdict verdict) noexcept nogil:
    tally.answered += 1
    tally.statuses[call.exchange.grpc_status if 0 <= call.exchange.grpc_status < NO_STATUS else NO_STATUS] += 1
    tally.verdicts[<int> verdict] += 1
    histogram_add(&tally.latencies, call.elapsed_ns)
    if verdict != CORRECT:
        keep_sample(tally, call, verdict)


cdef void tally_reset(Tally *tally, const Call *call) noexcept nogil:
    tally.reset += 1
    keep_sample(tally, call, WRONG_STATUS)


cdef bint journal_add(Journal *journal, Call *call) noexcept nogil:
    cdef size_t capacity
    cdef void *grown
    if not journal.kept:
        return True
    if journal.count == journal.capacity:
        capacity = 2 * journal.capacity if journal.capacity else 1024
        grown = realloc(journal.entries, capacity * sizeof(Entry))
        if grown == NULL:
            return False
        journal.entries, journal.capacity = <Entry *> grown, capacity
    journal.entries[journal.count] = Entry(
        index=call.index, due_ns=call.due_ns, ended_ns=call.due_ns + call.elapsed_ns, sequence=call.sequence,
        response=call.response, response_size=call.response_size)
    call.response = NULL
    call.response_size = call.response_capacity = 0
    journal.count += 1
    return True


cdef list journal_take(Journal *journal):
    cdef size_t i
    cdef Entry *entry
    found = []
    for i in range(journal.count):
        entry = &journal.entries[i]
        response = entry.response[PREFIX:entry.response_size] if entry.response_size > PREFIX else b""
        found.append((entry.index, entry.due_ns, entry.ended_ns, entry.sequence, response))
        free(entry.response)
    free(journal.entries)
    journal.entries = NULL
    journal.count = journal.capacity = 0
    return found


cdef object tally_report(Tally *tally, list calls, uint64_t bytes_received, double seconds, double cpu_seconds):
    statuses, verdicts = list(tally.statuses), list(tally.verdicts)
    return Report(
        requests=tally.issued,
        answered=tally.answered,
        cancelled=tally.cancelled,
        reset=tally.reset,
        lost=tally.lost,
        correct=verdicts[<int> CORRECT],
        deadlines=tally.deadlines,
        statuses={-1 if i == NO_STATUS else i: count for i, count in enumerate(statuses) if count},
        wrong={VERDICTS[i]: count for i, count in enumerate(verdicts) if count and i != <int> CORRECT},
        samples=[describe(&tally.samples[<size_t> i]) for i in range(tally.sample_count)],
        seconds=seconds,
        rate=tally.answered / seconds if seconds else 0.0,
        bytes_sent=tally.bytes_sent,
        bytes_received=bytes_received,
        driver_cpu_seconds=cpu_seconds,
        latency=latency(&tally.latencies),
        histogram=buckets_of(&tally.latencies),
        calls=calls,
    )


cdef latency(const Histogram *found):
    mean = found.sum_ns / 1e3 / found.count if found.count else 0.0
    shares = [histogram_percentile(found, share) / 1e3 for share in (0.5, 0.9, 0.95, 0.99, 0.999)]
    return Latency(mean, *shares, found.max_ns / 1e3)


cdef list buckets_of(const Histogram *found):
    """The buckets that are not empty: their upper bounds in microseconds, and their calls."""
    return [(bucket_top(i) / 1e3, found.buckets[i]) for i in range(BUCKETS) if found.buckets[i]]


cdef describe(const Sample *sample):
    deadline = f", grpc-timeout {sample.timeout_us} µs" if sample.timeout_us else ""
    text = (<bytes> sample.message).decode("utf-8", "replace")
    what = f"wrong {VERDICTS[sample.verdict]}, grpc-status {sample.grpc_status} after {sample.elapsed_ns // 1000} µs"
    return f"request {sample.index}{deadline}: {what} {text!r}"
