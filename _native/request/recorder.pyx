"""The recorder of a server: chooses the requests that are recorded, and gives Python the records of ended ones."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy

from inferd._native.atomic cimport store32
from inferd._native.clock cimport now_ns
from inferd._native.front cimport front_enter, front_leave
from inferd._native.request.lane cimport LaneHandle
from inferd._native.request.record cimport Record, record_free
from inferd._native.threads cimport lock, mutex_destroy, mutex_init, unlock
from inferd._native.traceparent cimport write_hex

import os
import time


cdef str hexadecimal(const uint8_t *bytes, size_t size):
    cdef char out[32]
    write_hex(out, bytes, size)
    return out[:2 * size].decode()


cdef dict described(Record *record, int64_t offset):
    cdef size_t *sizes = record.text_sizes
    cdef dict out = {
        "model": record.texts[:sizes[0]].decode("utf-8", "replace"),
        "request_id": record.texts[sizes[0] + 1:sizes[0] + 1 + sizes[1]].decode("utf-8", "replace"),
        "error": record.texts[sizes[0] + sizes[1] + 2:sizes[0] + sizes[1] + 2 + sizes[2]].decode("utf-8", "replace"),
        "version": record.version, "status": record.status, "number": record.number, "parent": record.parent_number,
        "trace_id": hexadecimal(record.context.trace, 16), "span_id": hexadecimal(record.context.span, 8),
        "parent_id": hexadecimal(record.parent, 8), "joined": record.context.given,
        "traced": record.traced, "kept": record.kept, "accessed": record.accessed,
        "inner": record.inner, "cached": record.cached, "shared": record.shared, "stepped": record.stepped,
        "link": (hexadecimal(record.link.trace, 16), hexadecimal(record.link.span, 8)) if record.link.given else None,
        "rows": record.rows, "responses": record.responses, "received": record.received, "sent": record.sent,
        "batch": record.batch, "batch_rows": record.batch_rows, "batch_requests": record.batch_requests,
        "instance": record.instance.decode("utf-8", "replace"),
        "why": record.why.decode() if record.why != NULL else "",
        "method": "ModelInfer" if record.single else "ModelStreamInfer",
        "peer": record.peer.data.decode("utf-8", "replace") if record.peer != NULL else "",
        "tensors": <object>record.data if record.data != NULL else None,
    }
    for name, ns in (("arrived", record.arrived_ns), ("looked", record.looked_ns), ("found", record.found_ns),
                     ("queued", record.queued_ns), ("placed", record.placed_ns), ("taken", record.taken_ns),
                     ("input_end", record.input_end_ns), ("output_start", record.output_start_ns),
                     ("computed", record.computed_ns), ("first", record.first_ns), ("ended", record.ended_ns)):
        out[name] = ns + offset if ns else 0
    return out


cdef int sampling_set(Sampling *sampling, bint on, bint tensors, int64_t rate, int64_t count) except -1:
    front_enter()
    sampling.tensors = tensors
    sampling.rate = rate
    sampling.left = count
    sampling.seen = 0
    store32(&sampling.on, 1 if on else 0)
    front_leave()
    return 0


cdef class SamplingHandle:
    """Which requests of one model are traced."""

    def set(self, *, on: bool, tensors: bool, rate: int, count: int) -> None:
        """Trace one request in `rate` (0: none), at most `count` of these (-1: any number).

        Requests whose clients sample their traces are traced, too, while `on`, and do not count.
        """
        sampling_set(&self.sampling, on, tensors, rate, count)

    @property
    def left(self) -> int:
        """How many more of the requests that `rate` chooses are traced; -1: any number."""
        return self.sampling.left


cdef class RecorderHandle:
    """Records requests of a server. Used on the event loop, except for `take`."""

    def __cinit__(self):
        cdef bytes seed = os.urandom(16)
        memcpy(self.recorder.seed, <const char *>seed, 16)
        mutex_init(&self.recorder.guard, NULL)

    def __init__(self):
        self.own = []

    def __dealloc__(self):
        cdef Record *record = self.recorder.first
        cdef Record *following
        while record != NULL:
            following = record.next
            record_free(record)
            record = following
        mutex_destroy(&self.recorder.guard)

    def sample(self, *, on: bool, tensors: bool, rate: int, count: int) -> None:
        """Set which requests of models without a sampling of their own are traced; see `SamplingHandle.set`."""
        sampling_set(&self.recorder.sampling, on, tensors, rate, count)

    @property
    def left(self) -> int:
        """The same as `SamplingHandle.left`, of the server's sampling."""
        return self.recorder.sampling.left

    def assign(self, LaneHandle lane not None, SamplingHandle sampling) -> None:
        """Set the sampling of a model version; None: that of the server."""
        if sampling is not None and sampling not in self.own:
            self.own.append(sampling)  # because the lane has a plain pointer to it
        lane.lane.statistics.sampling = NULL if sampling is None else <void *>&sampling.sampling

    def keep(self, *, access_rate: int, slow_ns: int, log_slow_ns: int) -> None:
        """Set which requests are recorded for other reasons than their sampling.

        Args:
            access_rate: record one request in so many for the access log; 0: none.
            slow_ns: while traces are on, also keep those of requests that fail or take longer than this; 0: of none.
            log_slow_ns: record requests that take longer than this for the log; 0: none.
        """
        self.recorder.access_rate = access_rate
        self.recorder.slow_ns = slow_ns
        self.recorder.log_slow_ns = log_slow_ns

    def switch(self, on: bool) -> None:
        """Set whether any request may be recorded."""
        store32(&self.recorder.on, 1 if on else 0)

    @property
    def lost(self) -> int:
        """How many records were discarded because the list was full; `take` must then be called more often."""
        return self.recorder.lost

    def take(self) -> list[dict[str, object]]:
        """The records of requests that have ended since the last call, the oldest first.

        Times are in nanoseconds since 1970; 0: never. Any thread may call this, one at a time.
        """
        cdef Record *record
        cdef Record *following
        cdef int64_t offset = time.time_ns() - now_ns()
        cdef list out = []
        lock(&self.recorder.guard)
        record = self.recorder.first
        self.recorder.first = NULL
        self.recorder.last = NULL
        unlock(&self.recorder.guard)
        while record != NULL:
            following = record.next
            out.append(described(record, offset))
            lock(&self.recorder.guard)
            self.recorder.count -= 1
            self.recorder.bytes -= record.kept_bytes
            unlock(&self.recorder.guard)
            record_free(record)
            record = following
        return out
