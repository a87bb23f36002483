"""Endpoints: the state that the connections of one front share, as objects for Python."""

import math

cimport cython
from libc.stdint cimport INT64_MAX, SIZE_MAX, UINT32_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from inferd._native.front cimport front_enter, front_leave, python_post, python_run
from inferd._native.memory.small cimport smalls_clear
from inferd._native.text cimport format_text
from inferd._native.timers cimport TimersHandle, timers_clear, timers_fire
from inferd._native.transport.call cimport PYTHON, CallOwner
from inferd._native.transport.eviction cimport host_relieve
from inferd._native.transport.expiry cimport conn_collected
from inferd._native.transport.ledger cimport (
    STAGE_ARRIVING,
    STAGE_COMPRESSING,
    STAGE_FRAMED,
    STAGE_INFLATING,
    STAGE_UNSENT,
    STAGE_WAITING,
    STAGE_WITH_HANDLER,
    STAGES,
    account_agrees,
    account_exceeded,
)
from inferd._native.transport.stream cimport (
    KEPT_TEXTS,
    MAX_NATIVES,
    STATUSES,
    CallCounts,
    Conn,
    Method,
    Service,
    end_round,
    host_look,
)
from inferd._native.transport.thread_pool cimport PoolThreads, thread_pool_drain
from inferd._native.transport.trim cimport host_note

cdef size_t LARGEST_MESSAGE = UINT32_MAX  # the length of a gRPC message has four bytes


cdef int64_t ask_clock(void *endpoint) noexcept nogil:
    with gil:
        return <int64_t>(<double>(<Endpoint>endpoint).own_clock() * 1e9)


@cython.no_gc_clear  # connections need the timers until they are gone
cdef class Endpoint:
    """The state that the connections of one front share: native methods and limits.

    Args:
        on_call: called with each new `Call`: each call whose path is not a native method's.
        max_message: largest request message in bytes; None: no limit.
        max_streams: open streams that a connection may have.
        spare_frames: frames per second that a connection may send without advancing a call.
        max_inflated: largest request message after decompression; None: no limit but `max_message`.
        native_level: zlib's level for responses of native methods; 0 for not compressing them.
        pool_threads: inflate and compress large messages, see `collect_jobs`; without them the I/O thread does that
            itself.
        max_held_bytes: of requests without a response, and of responses that clients have not read, over all
            connections. Beyond it, the server ends calls of the clients that hold most and progress least. None: no
            limit.
        receive_timeout: seconds that a request may take to arrive, with one more second for each 16 KiB of the first
            MiB that has come, and for each 256 KiB of the rest; infinity: any time.
        send_timeout: seconds that a client may take for a response, in the same way.
        timers: the timers of the event loop; None: timers of the endpoint, see `expire`.

    Set `clock` to a function that returns seconds to replace time.monotonic(); not together with `timers`.
    """

    def __init__(self, on_call, *, max_message: int | None = None, max_streams: int = 256, spare_frames: int = 10_000,
                 max_inflated: int | None = None, native_level: int = 0, PoolThreads pool_threads=None,
                 max_held_bytes: int | None = None, receive_timeout: float = math.inf,
                 send_timeout: float = math.inf,
                 TimersHandle timers=None):
        self.on_call = on_call
        self.timers = TimersHandle() if timers is None else timers
        self.host.timers = &self.timers.timers
        self.host.max_message = LARGEST_MESSAGE if max_message is None else max_message
        self.host.max_streams = max_streams
        self.host.spare_frames = spare_frames
        self.host.account.limit = SIZE_MAX if max_held_bytes is None else max_held_bytes
        self.host.receive_ns = INT64_MAX if receive_timeout == math.inf else <int64_t>(receive_timeout * 1e9)
        self.host.send_ns = INT64_MAX if send_timeout == math.inf else <int64_t>(send_timeout * 1e9)
        self.host.max_inflated = min(self.host.max_message, LARGEST_MESSAGE if max_inflated is None else max_inflated)
        self.host.native_level = native_level
        self.pool_threads = pool_threads
        if pool_threads is not None:
            if pool_threads.thread_pool.departed.within != NULL or pool_threads.thread_pool.departed.total:
                raise ValueError("these threads belong to another endpoint")
            self.host.thread_pool = &pool_threads.thread_pool
            pool_threads.thread_pool.departed.within = &self.host.account
        self.host.other.service = &PYTHON
        self.host.pinged = peer_pinged
        self.host.refused = peer_refused

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.host.native_count):
            free(self.host.natives[i].path)
        if self.host.thread_pool != NULL:
            self.host.thread_pool.departed.within = NULL
        if self.host.timers != NULL:
            timers_clear(self.host.timers, &self.host.quiet)
        smalls_clear(&self.host.smalls)

    def calls(self) -> dict[str, tuple[int, list[int]]]:
        """The calls of native methods by path: how many began, and how many ended with each gRPC status."""
        cdef CallCounts counts
        cdef dict out = {}
        cdef uint32_t i, status
        for i in range(self.host.native_count):
            front_enter()
            counts = self.host.natives[i].counts
            front_leave()
            out[self.host.natives[i].path.decode()] = (
                counts.started, [counts.handled[status] for status in range(<uint32_t>STATUSES)])
        return out

    @property
    def resets(self) -> int:
        """Calls that clients or the server have reset."""
        cdef uint64_t now
        front_enter()
        now = self.host.resets
        front_leave()
        return now

    cdef int add_native(self, bytes path, const Service *service, void *context) except -1:
        cdef Method *method = &self.host.natives[self.host.native_count]
        if self.host.native_count == MAX_NATIVES:
            raise ValueError(f"at most {MAX_NATIVES} native methods")
        method.path = <char *>malloc(len(path) + 1)
        if method.path == NULL:
            raise MemoryError
        memcpy(method.path, <const char *>path, len(path) + 1)
        method.path_size = len(path)
        method.service = service
        method.context = context
        self.host.native_count += 1
        return 0

    @property
    def clock(self):
        """The function that returns the time in seconds; None: time.monotonic()."""
        return self.own_clock

    @clock.setter
    def clock(self, function):
        self.own_clock = function
        self.host.clock = ask_clock
        if function is None:
            self.host.clock = NULL
        self.host.clock_context = <void *>self

    @property
    def rounds(self) -> bool:
        """Whether requests of several reads are begun together, when `flush_dirty` is called; an I/O thread sets it."""
        return self.host.rounds

    @rounds.setter
    def rounds(self, value: bool):
        self.host.rounds = value

    @property
    def streams(self) -> int:
        """Open streams of all connections."""
        cdef const Conn *conn
        cdef int64_t total = 0
        front_enter()
        conn = self.host.connections.first
        while conn != NULL:
            total += conn.streams
            conn = conn.next
        front_leave()
        return total

    @property
    def ledger(self) -> dict[str, int]:
        """Bytes that clients make the server hold, by the stage at which their messages are."""
        cdef size_t held[STAGES]
        front_enter()
        memcpy(held, self.host.account.bytes, sizeof(held))
        front_leave()
        return {
            "arriving": held[<int>STAGE_ARRIVING],
            "inflating": held[<int>STAGE_INFLATING],
            "queued": held[<int>STAGE_WAITING],
            "executed": held[<int>STAGE_WITH_HANDLER],
            "answered": held[<int>STAGE_COMPRESSING],
            "unsent": held[<int>STAGE_UNSENT],
            "framed": held[<int>STAGE_FRAMED],
        }

    @property
    def held(self) -> int:
        """The sum of `ledger`."""
        return self.host.account.total

    @property
    def departed(self) -> int:
        """The part of `held` whose calls have ended: a thread of the pool still uses it."""
        return self.host.thread_pool.departed.total if self.host.thread_pool != NULL else 0

    def ledger_agrees(self) -> bool:
        """Whether the server's account is the sum of its connections' accounts, at each stage; for tests."""
        cdef const Conn *conn
        cdef size_t total[STAGES]
        cdef bint agrees
        cdef int stage
        front_enter()
        agrees = account_agrees(&self.host.account)
        for stage in range(<int>STAGES):
            total[stage] = self.host.thread_pool.departed.bytes[stage] if self.host.thread_pool != NULL else 0
        conn = self.host.connections.first
        while conn != NULL:
            agrees = agrees and account_agrees(&conn.account)
            for stage in range(<int>STAGES):
                total[stage] += conn.account.bytes[stage]
            conn = conn.next
        for stage in range(<int>STAGES):
            agrees = agrees and total[stage] == self.host.account.bytes[stage]
        front_leave()
        return agrees

    @property
    def send_timeout(self) -> float:
        """Seconds that a peer may take for a response; infinity: any time."""
        return math.inf if self.host.send_ns == INT64_MAX else self.host.send_ns * 1e-9

    @property
    def direct(self) -> int:
        """Bytes of request messages that were read from the socket to where they stay, without a copy."""
        return self.host.direct

    def expire(self) -> None:
        """Fire the timers that are due by the endpoint's clock, if the endpoint has timers of its own."""
        host_look(&self.host)
        timers_fire(self.host.timers, self.host.now_ns)
        python_run(&self.host.timers.python)
        self.flush_dirty()

    def flush_dirty(self) -> None:
        """Call `flush` of every connection that has got output since its last flush. An I/O thread does this itself."""
        cdef Conn *conn
        cdef CallOwner connection
        if account_exceeded(&self.host.account):
            host_relieve(&self.host)
        if self.host.waits:
            end_round(&self.host)
        while self.host.dirty.first != NULL:
            conn = self.host.dirty.first
            self.host.dirty.first = conn.next_dirty
            conn.dirty = False
            connection = <CallOwner>conn.owner
            connection.dispatch()  # events of jobs; a receiver may close the connection
            if connection.flush is not None:
                connection.flush()
            conn_collected(conn)
        host_note(&self.host)
        python_run(&self.host.timers.python)

    def collect_jobs(self) -> None:
        """Continue with the messages that the thread pool has finished. Call this when their `event_fd` is readable."""
        host_look(&self.host)
        thread_pool_drain(&self.pool_threads.thread_pool)
        end_round(&self.host)
        self.flush_dirty()


cdef class InterceptorHandle:
    """The check of native calls: none here, subclasses set one
    (`inferd._native.service.authorizer.ListenerInterceptor`)."""


# ---------------------------------------------------------------------------------------------------------------------
# Events of connections

cdef void peer_pinged(Conn *conn) noexcept nogil:
    # A response pays for the PINGs before it. This is noted at once, because Python may hear late of several PINGs
    # together, with responses between them.
    if conn.pinged_frames != conn.response_frames:
        conn.pinged_frames = conn.response_frames
        conn.news.pings = 0
    conn.news.pings += 1
    python_post(&conn.host.timers.python, &conn.news.event)


cdef void peer_refused(Conn *conn, const char *text) noexcept nogil:
    if conn.news.refusals == KEPT_TEXTS:
        return
    conn.news.refused[conn.news.refusals] = format_text("%s", text)
    conn.news.refusals += 1
    python_post(&conn.host.timers.python, &conn.news.event)
