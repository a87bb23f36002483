"""Connections, as objects for Python.

The owner of a connection reads from its socket into `Connection.receive_buffer`, or that of the `Endpoint`, calls
`Connection.received`, and writes what `Connection.take_output` returns. Calls of methods that are not native come to
`Endpoint.on_call` as `_native.transport.call.Call` objects.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from _native.memory.resource cimport Block, block_give, block_share
from _native.memory.small cimport smalls_clear
from _native.timers cimport TimersHandle, timers_clear, timers_fire
from _native.transport.call cimport PYTHON, Call, CallOwner
from _native.transport.client cimport ClientUse
from _native.transport.direct_read cimport ReadTarget, conn_read, conn_read_target, conn_received
from _native.transport.eviction cimport host_relieve
from _native.transport.expiry cimport conn_collected
from _native.transport.http2 cimport (
    conn_announce_shutdown,
    conn_calm,
    conn_close,
    conn_collect,
    conn_end_round,
    conn_fail_calls,
    conn_finished,
    conn_go_away,
    conn_open,
    conn_ping,
)
from _native.transport.ledger cimport (
    STAGE_ANSWERED,
    STAGE_ARRIVING,
    STAGE_EXECUTED,
    STAGE_INFLATING,
    STAGE_QUEUED,
    STAGE_UNSENT,
    STAGES,
    account_agrees,
    account_exceeded,
)
from _native.transport.outgoing cimport output_take, output_write
from _native.transport.stream cimport MAX_NATIVES, STATUSES, CallCounts, Conn, Method, end_round, host_look
from _native.transport.trim cimport host_note
from _native.transport.unary cimport UNARY, Unary
from _native.transport.workers cimport Workers, thread_pool_drain

from collections import deque

from _native.transport.call import EVENT_CALL

cdef enum:
    RECEIVE_BUFFER = 256 << 10

cdef str EVENT_PING = "ping"     # for Connection.on_ping, in place of an event of a call
cdef str EVENT_REFUSED = "refused"  # for Connection.on_refused, with the text in place of a call


cdef int64_t ask_clock(void *endpoint) noexcept nogil:
    with gil:
        return <int64_t>(<double>(<Endpoint>endpoint).own_clock() * 1e9)


cdef class ReceiveBuffer:
    """Where all sockets of an endpoint are read to, one read at a time."""

    cdef Endpoint endpoint

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.endpoint.receive, RECEIVE_BUFFER, 0, flags)


cdef class DirectBuffer:
    """Where the socket of a connection is read to next, decided each time that its memory is asked for."""

    cdef Connection connection

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef Connection connection = self.connection
        cdef ReadTarget target = conn_read_target(&connection.conn, connection.endpoint.receive)
        PyBuffer_FillInfo(buffer, self, target.data, <Py_ssize_t>target.size, 0, flags)
        buffer.internal = NULL if target.block == NULL else block_share(target.block)
        connection.target = target

    def __releasebuffer__(self, Py_buffer *buffer):
        block_give(<Block *>buffer.internal)


@cython.no_gc_clear  # connections need the timers until they are gone
cdef class Endpoint:
    """What the connections of one event loop share: native methods, limits, and the buffer that sockets are read to.

    Args:
        on_call: called with each new `Call`, that is for every path that is not a native method's.
        max_message: largest request message in bytes; 0 for no limit.
        max_streams: open streams that a connection may have.
        spare_frames: frames a second that a connection may send without bringing a call forward.
        max_inflated: largest request message after decompression; 0 for no limit but `max_message`.
        native_level: zlib's level for answers of native methods; 0 for not compressing them.
        workers: inflate and compress large messages, see `collect_jobs`; without them it is done at once.
        max_held: bytes of requests that are not answered, and of answers that are not taken, over all connections; when
            they are more, the calls of who holds most and moves least end. 0 for no limit.
        receive_timeout: seconds that a request may take to arrive, and one more for each 16 KiB of the first MiB that
            has come, and for each 256 KiB of the rest; 0 for any time.
        send_timeout: seconds that a client may take for a response, in the same way.
        timers: of the loop, on which the endpoint's are fired; None for some of its own, see `expire`.

    Set `clock`, a function that returns seconds, for another clock than time.monotonic(), with timers of its own.
    """

    def __init__(self, on_call, *, max_message: int = 0, max_streams: int = 256, spare_frames: int = 10_000,
                 max_inflated: int = 0, native_level: int = 0, Workers workers=None, max_held: int = 0,
                 receive_timeout: float = 0.0, send_timeout: float = 0.0, TimersHandle timers=None):
        self.on_call = on_call
        self.timers = TimersHandle() if timers is None else timers
        self.host.timers = &self.timers.timers
        self.host.max_message = max_message
        self.host.max_streams = max_streams
        self.host.spare_frames = spare_frames
        self.host.account.limit = max_held
        self.host.receive_ns = <int64_t>(receive_timeout * 1e9)
        self.host.send_ns = <int64_t>(send_timeout * 1e9)
        self.host.max_inflated = min(filter(None, (max_message, max_inflated)), default=0)
        self.host.native_level = native_level
        self.workers = workers
        if workers is not None:
            if workers.thread_pool.departed.within != NULL or workers.thread_pool.departed.total:
                raise ValueError("these workers are another endpoint's")
            self.host.thread_pool = &workers.thread_pool
            workers.thread_pool.departed.within = &self.host.account
        self.host.other.service = &PYTHON
        self.host.pinged = peer_pinged
        self.host.refused = peer_refused
        self.receive = <uint8_t *>malloc(RECEIVE_BUFFER)
        if self.receive == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.host.native_count):
            free(self.host.natives[i].path)
        if self.host.thread_pool != NULL:
            self.host.thread_pool.departed.within = NULL
        if self.host.timers != NULL:
            timers_clear(self.host.timers, &self.host.quiet)
        smalls_clear(&self.host.smalls)
        free(self.receive)

    def calls(self) -> dict[str, tuple[int, list[int]]]:
        """The calls of native methods by path: how many began, and how many ended with each gRPC status."""
        cdef const CallCounts *counts
        cdef dict out = {}
        cdef uint32_t i, status
        for i in range(self.host.native_count):
            counts = &self.host.natives[i].counts
            out[self.host.natives[i].path.decode()] = (
                counts.started, [counts.handled[status] for status in range(<uint32_t>STATUSES)])
        return out

    @property
    def resets(self) -> int:
        """Calls that were broken off, by clients or by the server."""
        return self.host.resets

    cdef int add_native(self, bytes path, Unary *unary) except -1:
        cdef Method *method = &self.host.natives[self.host.native_count]
        if self.host.native_count == MAX_NATIVES:
            raise ValueError(f"at most {MAX_NATIVES} native methods")
        method.path = <char *>malloc(len(path) + 1)
        if method.path == NULL:
            raise MemoryError
        memcpy(method.path, <const char *>path, len(path) + 1)
        method.path_size = len(path)
        method.service = &UNARY
        method.context = unary
        self.host.native_count += 1
        return 0

    @property
    def clock(self):
        """What says the time in seconds; None: time.monotonic()."""
        return self.own_clock

    @clock.setter
    def clock(self, function):
        self.own_clock = function
        self.host.clock = ask_clock
        if function is None:
            self.host.clock = NULL
        self.host.clock_context = <void *>self

    @property
    def on_dirty(self):
        """Called when `flush_dirty` must be called, after what else the loop is about to do; None: nobody is."""
        return self.dirty_hook

    @on_dirty.setter
    def on_dirty(self, function):
        self.dirty_hook = function
        self.host.rounds = function is not None

    def receive_buffer(self):
        """The writable buffer for the next read from a socket; valid until `Connection.received`."""
        cdef ReceiveBuffer buffer = ReceiveBuffer.__new__(ReceiveBuffer)
        buffer.endpoint = self
        return buffer

    @property
    def ledger(self) -> dict[str, int]:
        """Bytes that clients make the server hold, by the stage at which their messages are."""
        cdef const size_t *held = self.host.account.bytes
        return {
            "arriving": held[<int>STAGE_ARRIVING],
            "inflating": held[<int>STAGE_INFLATING],
            "queued": held[<int>STAGE_QUEUED],
            "executed": held[<int>STAGE_EXECUTED],
            "answered": held[<int>STAGE_ANSWERED],
            "unsent": held[<int>STAGE_UNSENT],
        }

    @property
    def held(self) -> int:
        """The sum of `ledger`."""
        return self.host.account.total

    @property
    def departed(self) -> int:
        """What of `held` belongs to calls that are over, and is let go of when a worker has finished with it."""
        return self.host.thread_pool.departed.total if self.host.thread_pool != NULL else 0

    def ledger_agrees(self) -> bool:
        """Whether what the server holds is what its connections hold, at each stage; for tests."""
        cdef const Conn *conn = self.host.connections.first
        cdef size_t total[STAGES]
        cdef bint agrees = account_agrees(&self.host.account)
        cdef int stage
        for stage in range(<int>STAGES):
            total[stage] = self.host.thread_pool.departed.bytes[stage] if self.host.thread_pool != NULL else 0
        while conn != NULL:
            agrees = agrees and account_agrees(&conn.account)
            for stage in range(<int>STAGES):
                total[stage] += conn.account.bytes[stage]
            conn = conn.next
        for stage in range(<int>STAGES):
            agrees = agrees and total[stage] == self.host.account.bytes[stage]
        return agrees

    @property
    def direct(self) -> int:
        """Bytes of request messages that were read from the socket to where they stay, without a copy."""
        return self.host.direct

    def expire(self) -> None:
        """Do what is due by the endpoint's clock, where nobody fires its timers."""
        host_look(&self.host)
        timers_fire(self.host.timers, self.host.now_ns)
        self.flush_dirty()

    def flush_dirty(self) -> None:
        """Call `flush` of every connection that has got output since it was last asked."""
        cdef Conn *conn
        cdef Connection connection
        if account_exceeded(&self.host.account):
            host_relieve(&self.host)
        self.host.others_ran = False  # this is what it asks for
        if self.host.waits:
            end_round(&self.host)
        while self.host.first_dirty != NULL:
            conn = self.host.first_dirty
            self.host.first_dirty = conn.next_dirty
            conn.dirty = False
            connection = <Connection>conn.owner
            connection.dispatch()  # events of jobs; a receiver may close the connection
            if connection.flush is not None:
                connection.flush()
            conn_collected(&connection.conn)
        host_note(&self.host)

    def collect_jobs(self) -> None:
        """Go on with the messages that the workers have finished; when their `event_fd` is readable."""
        host_look(&self.host)
        thread_pool_drain(&self.workers.thread_pool)
        end_round(&self.host)
        self.flush_dirty()


cdef class InterceptorHandle:
    """What native calls must pass; nothing, until a guard is put there (`_native.service.access.Authorizer.guard`)."""


@cython.no_gc_clear  # __dealloc__ needs the endpoint; cycles go through the owner and can be cleared there
cdef class Connection(CallOwner):
    """One peer.

    Args:
        endpoint: what it belongs to.
        peer: who is at the other end, for handlers ("ipv4:127.0.0.1:40000").
        user: whose process that is, on a unix socket; -1 when it is not known.
        identity: a number that stands for whoever has this certificate or is this user; 0 when nobody knows.
        use: what the limits of its client count; None for no such limits.
        interceptor: what its native calls must pass instead of what the endpoint's must.

    Set `flush` before the first byte; `on_ping`, when set, is called for each PING of the peer, and `on_refused` with
    the reason when a call, or the peer, is turned away for breaking HTTP/2. Call `close` when the peer is gone.
    """

    def __init__(self, Endpoint endpoint not None, peer: str = "", user: int = -1, ClientUse use=None,
                 InterceptorHandle interceptor=None, identity: int = 0):
        self.endpoint = endpoint
        self.peer = peer
        self.events = deque()
        host_look(&endpoint.host)
        if not conn_open(&self.conn, &endpoint.host, <void *>self):
            raise MemoryError("no memory for an HTTP/2 session")
        self.conn.user = user
        self.conn.identity = identity
        if use is not None:
            self.use = use
            self.conn.client = &use.client
            self.conn.account.within = &use.client.account
            use.client.account.within = &endpoint.host.account
        if interceptor is not None:
            self.interceptor = interceptor
            self.conn.interceptor = &interceptor.interceptor

    def __dealloc__(self):
        conn_close(&self.conn)

    cdef int has_output(self) except -1:
        if self.endpoint.dirty_hook is not None:
            self.endpoint.dirty_hook()
        return 0

    cdef int dispatch(self) except -1:
        if self.endpoint.host.others_ran:
            self.endpoint.host.others_ran = False
            self.has_output()
        # when a receiver raises, the events behind it wait for the next call: none is lost
        while self.events:
            call, kind = self.events.popleft()
            if kind is EVENT_CALL:
                # else it was reset, or failed, in the read in which it began: nobody has heard of it
                if (<Call>call).open:
                    self.endpoint.on_call(call)
            elif kind is EVENT_PING:
                if self.on_ping is not None:
                    self.on_ping()
            elif kind is EVENT_REFUSED:
                if self.on_refused is not None:
                    self.on_refused(call)
            elif (<Call>call).on_event is not None:
                (<Call>call).on_event(kind)
        return 0

    cdef int take_read_target(self, ReadTarget *target) except -1:
        # where the bytes are that have been read
        cdef ReadTarget now
        target[0] = self.target
        self.target.data = NULL
        if target.data == NULL:
            target.data = self.endpoint.receive
            target.size = RECEIVE_BUFFER
            target.block = NULL
        elif target.block != NULL:
            now = conn_read_target(&self.conn, self.endpoint.receive)
            if now.data != target.data or now.size != target.size:
                raise RuntimeError("something has happened to the connection since its receive buffer was asked for")
        return 0

    def receive_buffer(self):
        """The writable buffer for reads from this connection's socket, instead of the endpoint's: each time that its
        memory is asked for, it has that for the next read, valid until `received`. Much of a large message is read to
        where it stays."""
        cdef DirectBuffer buffer = DirectBuffer.__new__(DirectBuffer)
        buffer.connection = self
        return buffer

    def received(self, size: int, fd: int = -1) -> None:
        """Process `size` bytes at the start of the receive buffer.

        When they filled this connection's buffer, read on from the socket `fd`, which does not block, and process that
        too; what then still is in the socket, the end of the stream and errors are left to the caller.
        """
        cdef ReadTarget target
        cdef size_t count
        cdef int socket = fd
        self.take_read_target(&target)
        if not 0 <= size <= <Py_ssize_t>target.size:
            raise ValueError(f"the receive buffer has {target.size} bytes, got {size}")
        count = size
        host_look(&self.endpoint.host)
        if target.block != NULL or count == target.size:
            with nogil:  # much is read and copied
                self.take_in(&target, count, socket)
        else:
            self.take_in(&target, count, -1)  # soon done: another thread would keep the interpreter for longer
        self.dispatch()

    cdef void take_in(self, const ReadTarget *target, size_t count, int socket) noexcept nogil:
        conn_received(&self.conn, target, self.endpoint.receive, count)
        if socket >= 0 and count == target.size:
            conn_read(&self.conn, socket, self.endpoint.receive, RECEIVE_BUFFER)
        conn_end_round(&self.conn)

    def collect_output(self, limit: int = 1 << 20) -> int:
        """Make ready what is to be written to the socket now, about `limit` bytes at most; how many bytes that are."""
        host_look(&self.endpoint.host)
        conn_collect(&self.conn, limit)
        self.dispatch()
        return self.conn.output.size

    def write_output(self, int fd) -> bool:
        """Write what is ready to a socket that does not block. False: it takes no more now; `take_ready` has the rest.
        """
        return output_write(&self.conn.output, fd)

    def take_ready(self) -> list:
        """What is ready, as objects with the buffer protocol."""
        return output_take(&self.conn.output)

    def take_output(self, limit: int = 1 << 20) -> list:
        """What to write to the socket now, as objects with the buffer protocol; about `limit` bytes at most."""
        self.collect_output(limit)
        return self.take_ready()

    @property
    def finished(self) -> bool:
        """The peer broke the protocol, or everything is said after `go_away`: close the socket."""
        return conn_finished(&self.conn)

    @property
    def http1(self) -> bool:
        """The peer speaks HTTP/1; what remains to be written is an answer that says what to speak instead."""
        return self.conn.http1

    @property
    def told(self) -> bool:
        """The peer has read what `announce_shutdown` sent: it opens no more streams, and none is on its way."""
        return self.conn.told

    @property
    def streams(self) -> int:
        """Open streams."""
        return self.conn.streams

    @property
    def unsent(self) -> int:
        """Bytes of answers that flow control or a slow socket keeps back."""
        return self.conn.unsent

    @property
    def received_at(self) -> float:
        """When the peer last sent anything, in seconds on the endpoint's clock."""
        return self.conn.received_ns * 1e-9

    @property
    def greeted(self) -> bool:
        """The peer speaks HTTP/2: its preface and first SETTINGS have come."""
        return self.conn.greeted

    @property
    def answer_frames(self) -> int:
        """Frames with headers or data that have been sent."""
        return self.conn.answer_frames

    def ping(self) -> None:
        """Send a PING; when the peer answers it, `received_at` moves."""
        conn_ping(&self.conn)

    def calm(self, reason: str) -> None:
        """Send the peer away: a GOAWAY ENHANCE_YOUR_CALM with this text is the last frame, then it is `finished`."""
        cdef bytes text = reason.encode()
        conn_calm(&self.conn, text)

    def announce_shutdown(self) -> None:
        """Ask the peer to open no more streams; those that it opens meanwhile are still served."""
        conn_announce_shutdown(&self.conn)

    def go_away(self, reason: str = "") -> None:
        """Refuse further streams; `finished` once the open ones are answered."""
        cdef bytes text = reason.encode()
        conn_go_away(&self.conn, text)

    def fail_calls(self, status: int, details: str) -> None:
        """End every call that is not answered yet, native ones too, with this status."""
        cdef bytes text = details.encode()
        conn_fail_calls(&self.conn, status, text)

    def close(self) -> None:
        """The peer is gone: end every call."""
        conn_close(&self.conn)
        self.target.data = NULL
        self.flush = None
        self.dispatch()


# ---------------------------------------------------------------------------------------------------------------------
# What libnghttp2 tells of the peer

cdef void peer_pinged(Conn *conn) noexcept nogil:
    with gil:
        (<Connection>conn.owner).events.append((None, EVENT_PING))


cdef void peer_refused(Conn *conn, const char *text) noexcept nogil:
    with gil:
        (<Connection>conn.owner).events.append((text.decode("utf-8", "replace"), EVENT_REFUSED))
