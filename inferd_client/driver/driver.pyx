"""The driver for Python: connections that are kept from run to run."""

import time
from array import array

from cpython.ref cimport Py_CLEAR
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from inferd_client._native.clock cimport now_ns
from inferd_client.driver.connection cimport (
    MOST_HEADERS, Connection, connection_give_slots, connection_refuses, connection_take_slots,
)
from inferd_client.driver.loop cimport TICK_MS, Loop, loop_close, loop_open, loop_run, loop_step
from inferd_client._native.nghttp2 cimport (
    NGHTTP2_NV_FLAG_NO_COPY_NAME, NGHTTP2_NV_FLAG_NO_COPY_VALUE, NGHTTP2_NV_FLAG_NO_INDEX, nghttp2_nv,
)
from inferd_client.driver.schedule cimport Schedule
from inferd_client.driver.splitmix cimport mix
from inferd_client.driver.tally cimport journal_take, tally_report
from inferd_client.driver.workload cimport CORRECT, Workload

from inferd_client._connecting import Options, opened, target_of
from inferd_client.driver.report import Answered, Progress

INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
HANDSHAKE_SECONDS = 10


cdef class Driver:
    """Connections to one server, opened at once with the HTTP/2 handshake done.

    Args:
        address: "host:port", or "unix:PATH".
        connections: how many.
        window: flow-control window, in bytes, of each stream and of each connection.
        max_frame_size: the largest frame the server may send, in bytes.
        context: an ssl.SSLContext; None: plain text.
        busy_poll: poll during a run instead of sleeping, which takes a core.

    Raises:
        OSError: a connection cannot be made.
        ValueError: the address has another form.
        TimeoutError: a server does not answer the handshake within 10 seconds.
    """
    cdef Loop loop
    cdef readonly str address
    cdef str authority
    cdef bint secure
    cdef object unfinished  # the report of a run that an exception ended

    def __cinit__(self, str address, *, uint32_t connections=1, int32_t window=(1 << 30) - 1,
                  uint32_t max_frame_size=16384, context=None, bint busy_poll=False):
        self.loop.epoll = self.loop.timer = -1
        self.loop.busy_poll = busy_poll
        if connections == 0:
            raise ValueError("expected at least one connection, got 0")
        self.address = address
        target, options = target_of(address), Options(context)
        self.authority = target.authority
        self.secure = context is not None

        def dial():
            sock, tls = opened(target, options, HANDSHAKE_SECONDS)
            return sock.detach(), tls

        loop_open(&self.loop, dial, connections, window, max_frame_size)
        self._shake_hands()

    def __dealloc__(self):
        loop_close(&self.loop)

    cdef _shake_hands(self):
        give_up = time.monotonic() + HANDSHAKE_SECONDS
        while not self._all_ready():
            if time.monotonic() > give_up:
                raise TimeoutError(f"{self.address} does not answer the HTTP/2 handshake")
            with nogil:
                loop_step(&self.loop, TICK_MS)

    cdef bint _all_ready(self) except -1:
        cdef uint32_t i
        for i in range(self.loop.connection_count):
            if self.loop.connections[i].dead:
                raise ConnectionError(f"{self.address} closed a connection during the HTTP/2 handshake")
            if not self.loop.connections[i].session.ready:
                return False
        return True

    def run(self, Workload workload not None, *, uint32_t in_flight=1, uint32_t more=0, uint64_t requests=0,
            double seconds=0.0, double rate=0.0, bint scattered=False, gaps=(), bint listed=False,
            str path=INFER_PATH, str method="POST", headers=(), double cancel_fraction=0.0,
            double deadline_fraction=0.0, deadline_us=(100, 20_000), uint64_t seed=1, double stall_seconds=30.0):
        """Drive the server and report; needs `requests`, `seconds` or both (whichever ends first).

        Args:
            in_flight: calls in flight on each connection; with `rate` the most there may be.
            more: how many connections have one call more in flight than the others.
            rate: requests per second over all connections; 0 is the closed loop.
            scattered: with `rate`, requests come independently of each other instead of at fixed intervals.
            gaps: seconds between requests, used in turn, in place of `rate`; at least one is above 0.
            listed: the report lists the answered calls, with their responses.
            headers: further headers of each request, pairs of bytes.
            cancel_fraction: this share of the calls is to be reset, half of them as soon as they are written, half
                after up to 2 * in_flight other calls of their connection have ended; a response may come before that.
            deadline_fraction: this share of the calls carries a grpc-timeout, drawn log-uniformly from `deadline_us`.
            seed: of everything random.
            stall_seconds: if no call ends for this long, those in flight are lost and the run ends.

        Raises:
            ConnectionError: every connection was lost in an earlier run.
            BaseException: what a signal's handler raises, such as KeyboardInterrupt. `interrupted` then has the report
                of the calls answered before; calls in flight are lost, and so are their connections.
        """
        cdef Loop *loop = &self.loop
        if requests == 0 and seconds <= 0:
            raise ValueError("expected requests or seconds, got neither")
        if not 0 < deadline_us[0] <= deadline_us[1] or in_flight == 0 or workload.prepare == NULL:
            raise ValueError("expected 0 < deadline_us[0] <= deadline_us[1], in_flight >= 1 and a usable workload")
        kept = self._set_headers(path, method, headers), array("Q", [round(gap * 1e9) for gap in gaps])
        if gaps and not 0 < max(kept[1]):
            raise ValueError("expected a gap above 0")
        loop.prepare, loop.verify, loop.context = workload.prepare, workload.verify, workload.context
        loop.unfinished = workload.unfinished
        loop.stall_ns = <uint64_t> (stall_seconds * 1e9)
        loop.schedule = Schedule(
            seed=mix(seed), limit=requests,
            end_ns=now_ns() + <uint64_t> (seconds * 1e9) if seconds > 0 else 0,
            interval_ns=<uint64_t> (1e9 / rate) if rate > 0 else 1 if gaps else 0, scattered=scattered,
            gaps=NULL, gap_count=len(gaps),
            cancel_share=<uint32_t> (cancel_fraction * 65536), cancel_span=2 * in_flight,
            deadline_share=<uint32_t> (deadline_fraction * 65536),
            deadline_low_us=deadline_us[0], deadline_high_us=deadline_us[1])
        if gaps:
            loop.schedule.gaps = <const uint64_t *> <size_t> kept[1].buffer_info()[0]
        memset(&loop.tally, 0, sizeof(loop.tally))
        loop.journal.kept = listed
        loop.no_memory = False
        self.unfinished = None
        try:
            self._take_slots(in_flight, more)
            cpu_started = time.thread_time()
            with nogil:
                loop_run(loop)
            cpu = time.thread_time() - cpu_started
            elapsed = <double> (loop.counted_ns - loop.started_ns) / 1e9
        finally:
            self._give_slots()
        if loop.raised != NULL:
            raised = <object> loop.raised
            Py_CLEAR(loop.raised)
            self.unfinished = self._report(elapsed, cpu)
            raise raised
        del kept
        return self._report(elapsed, cpu)

    cdef _set_headers(self, str path, str method, further):
        """Fill the header block; the strings it returns must live as long as the block is used."""
        headers = [(b":method", method.encode()), (b":scheme", b"https" if self.secure else b"http"),
                   (b":authority", self.authority.encode()), (b":path", path.encode()),
                   (b"content-type", b"application/grpc"), (b"te", b"trailers"), *further, (b"grpc-timeout", b"")]
        if len(headers) > MOST_HEADERS:
            raise ValueError(f"expected at most {MOST_HEADERS - 7} further headers, got {len(headers) - 7}")
        self.loop.header_count = <uint32_t> len(headers)
        for i, (name, value) in enumerate(headers):
            self.loop.headers[<size_t> i] = nghttp2_nv(
                <uint8_t *> <char *> (<bytes> name), <uint8_t *> <char *> (<bytes> value), len(name), len(value),
                NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE)
        self.loop.headers[self.loop.header_count - 1].flags |= NGHTTP2_NV_FLAG_NO_INDEX
        return headers

    cdef _take_slots(self, uint32_t in_flight, uint32_t more):
        cdef Connection *connection
        cdef uint32_t i
        if not self.alive:
            raise ConnectionError(f"{self.address} has closed every connection")
        for i in range(self.loop.connection_count):
            connection = &self.loop.connections[i]
            connection.keeps_responses = self.loop.verify != NULL or self.loop.journal.kept
            connection.in_turn = self.loop.unfinished != NULL
            if not connection_take_slots(connection, in_flight + (i < more)):
                raise MemoryError

    cdef _give_slots(self):
        cdef uint32_t i
        for i in range(self.loop.connection_count):
            connection_give_slots(&self.loop.connections[i])

    cdef _report(self, double elapsed, double cpu):
        cdef uint64_t bytes_received = 0
        cdef uint32_t i
        cdef bint no_memory = self.loop.no_memory
        for i in range(self.loop.connection_count):
            bytes_received += self.loop.connections[i].session.bytes_received
            no_memory = no_memory or self.loop.connections[i].no_memory
        if no_memory:
            raise MemoryError("the driver has no memory for another request or response")
        calls = [Answered(*each) for each in journal_take(&self.loop.journal)]
        return tally_report(&self.loop.tally, calls, bytes_received, elapsed, cpu)

    def interrupted(self):
        """The report of the last run if an exception ended it, of what was answered before; else None."""
        return self.unfinished

    @property
    def progress(self):
        """Counters of the running run."""
        cdef uint64_t wrong = self.loop.tally.answered - self.loop.tally.verdicts[<int> CORRECT]
        return Progress(self.loop.tally.issued, self.loop.tally.finished, wrong)

    def idle(self, double seconds):
        """Keep the connections open without a call, answering the server's pings."""
        cdef int64_t end_ns = now_ns() + <int64_t> (seconds * 1e9)
        self.loop.schedule.interval_ns = 0
        with nogil:
            while now_ns() < end_ns:
                loop_step(&self.loop, TICK_MS)

    @property
    def alive(self):
        """Connections that take further calls."""
        cdef uint32_t i, count = 0
        for i in range(self.loop.connection_count):
            count += not connection_refuses(&self.loop.connections[i])
        return count

    def close(self):
        """Send GOAWAY on every connection and close it."""
        loop_close(&self.loop)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
