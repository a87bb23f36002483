"""Connections, as objects for Python.

An I/O thread (`inferd._native.transport.io_thread`) reads and writes the socket of a connection. Without one, the owner
gives the peer's bytes to `Connection.receive`, or has them read by `Connection.read`, and sends what
`Connection.take_output` returns. Calls of methods that are not native come to `Endpoint.on_call` as
`inferd._native.transport.call.Call` objects.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free

from inferd._native.front cimport PythonEvent, front_enter, front_leave, python_run, python_withdraw
from inferd._native.memory.resource cimport Block, block_give, text_block
from inferd._native.transport.call cimport Call, CallOwner
from inferd._native.transport.client cimport ClientUse
from inferd._native.transport.closing cimport CONN_PARTING, ConnState
from inferd._native.transport.direct_read cimport conn_read
from inferd._native.transport.endpoint cimport Endpoint, InterceptorHandle
from inferd._native.transport.eviction cimport conn_calm
from inferd._native.transport.http2 cimport (
    conn_announce_shutdown,
    conn_close,
    conn_collect,
    conn_end_round,
    conn_fail_calls,
    conn_finished,
    conn_go_away,
    conn_open,
    conn_ping,
    conn_receive,
)
from inferd._native.transport.outgoing cimport output_take, output_write
from inferd._native.transport.stream cimport ConnNews, host_look
from inferd._native.transport.turn cimport MOST_PORTION, Turn, turn_of

STATES = ("open", "announced", "draining", "parting", "shut", "lingering", "gone")  # ConnState of closing.pxd, in order


cdef int tell_connection(PythonEvent *event) except -1:
    # The event loop hears what has happened to the connection itself.
    cdef Connection connection = <Connection>event.owner
    cdef ConnNews news
    cdef list texts
    cdef uint32_t i
    news = connection.conn.news
    connection.conn.news.refusals = connection.conn.news.pings = 0
    connection.conn.news.shut = connection.conn.news.lost = False
    front_leave()
    texts = []
    for i in range(news.refusals):
        if news.refused[i] != NULL:
            texts.append(news.refused[i].decode("utf-8", "replace"))
            free(news.refused[i])
    for text in texts:
        if connection.on_refused is not None:
            connection.on_refused(text)
    for _ in range(news.pings):
        if connection.on_ping is not None:
            connection.on_ping()
    if news.shut and connection.on_shut is not None:
        connection.on_shut()
    if news.lost and connection.on_lost is not None:
        connection.on_lost()
    return 0


@cython.no_gc_clear  # __dealloc__ needs the endpoint; cycles go through the owner and can be cleared there
cdef class Connection(CallOwner):
    """The connection of one peer.

    Args:
        endpoint: the endpoint that it belongs to.
        peer: the address of the peer, for handlers and logs ("ipv4:127.0.0.1:40000").
        user: the user of the peer's process, on a unix socket; -1 if it is not known.
        identity: a number for the peer's certificate or user; 0 if neither is known.
        use: the counts and limits of its client; None: it has no limits.
        interceptor: the check of its native calls, in place of the endpoint's.

    Set `flush` before the first byte. `on_ping`, when set, is called for each PING of the peer; of PINGs that came
    before Python heard of them, only for those behind the latest response. `on_refused` is called with the reason when
    the server refuses a call, or the peer, because of an HTTP/2 error. Call `close` when the peer is gone. If an I/O
    thread has its socket, set `on_shut` and `on_lost` instead of `flush`: they are called when the thread has shut the
    socket for writing, or will do so behind the last output, and when it has left the socket.
    """

    def __init__(self, Endpoint endpoint not None, peer: str = "", user: int = -1, ClientUse use=None,
                 InterceptorHandle interceptor=None, identity: int = 0):
        cdef bint opened
        cdef Block *address = text_block(peer) if peer else NULL
        self.endpoint = endpoint
        self.peer = peer
        self.conn.news.event.run = tell_connection
        self.conn.news.event.owner = <void *>self
        front_enter()
        host_look(&endpoint.host)
        opened = conn_open(&self.conn, &endpoint.host, <void *>self)
        if opened:
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
            self.conn.peer = address
        front_leave()
        if not opened:
            block_give(address)
            raise MemoryError("no memory for an HTTP/2 session")

    def __dealloc__(self):
        cdef uint32_t i
        front_enter()
        conn_close(&self.conn)
        if self.endpoint is not None:
            python_withdraw(&self.endpoint.timers.timers.python, &self.conn.news.event)
        for i in range(self.conn.news.refusals):
            free(self.conn.news.refused[i])
        front_leave()

    cdef void look(self) noexcept:
        host_look(&self.endpoint.host)

    cdef object begin_call(self, Call call):
        self.endpoint.on_call(call)

    cdef int has_output(self) except -1:
        if self.endpoint.host.wake != NULL:
            self.endpoint.host.wake(self.endpoint.host.wake_context)
        return 0

    cdef int dispatch(self) except -1:
        if self.endpoint.host.wake != NULL:
            return 0  # the event loop waits for the events
        return python_run(&self.endpoint.timers.timers.python)

    cdef int leave(self, bint output) except -1:
        # leave the front after an operation that may have made output
        if output and self.endpoint.host.wake != NULL:
            self.endpoint.host.wake(self.endpoint.host.wake_context)
        front_leave()
        return 0

    def receive(self, data) -> None:
        """Process bytes of the peer, of any object with the buffer protocol."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        front_enter()
        host_look(&self.endpoint.host)
        conn_receive(&self.conn, <const uint8_t *>view.buf, <size_t>view.len)
        conn_end_round(&self.conn)
        self.leave(True)
        PyBuffer_Release(&view)
        self.dispatch()

    def read(self, fd: int) -> bool:
        """Read from a socket that does not block, as an I/O thread does in one turn of the connection.

        False: the peer has closed its end, or the socket is broken.
        """
        cdef uint8_t buffer[MOST_PORTION]
        cdef int socket = fd
        cdef bint goes_on
        cdef Turn turn
        front_enter()
        host_look(&self.endpoint.host)
        turn = turn_of(&self.endpoint.host, 1)
        with nogil:
            goes_on = conn_read(&self.conn, socket, buffer, turn)
            conn_end_round(&self.conn)
        self.leave(True)
        self.dispatch()
        return goes_on

    def collect_output(self, limit: int = 1 << 20) -> int:
        """Prepare the output for the socket, about `limit` bytes at most; returns the number of prepared bytes."""
        cdef size_t most = limit
        cdef size_t size
        front_enter()
        host_look(&self.endpoint.host)
        conn_collect(&self.conn, most)
        size = self.conn.output.size
        front_leave()
        self.dispatch()
        return size

    def write(self, fd: int) -> bool:
        """Write the prepared output to a socket that does not block.

        False: the socket is full, or broken; `take_ready` has the rest.
        """
        cdef bint whole
        front_enter()
        whole = output_write(&self.conn.output, fd)
        front_leave()
        return whole

    def take_ready(self) -> list:
        """The prepared output, as objects with the buffer protocol."""
        front_enter()
        try:
            return output_take(&self.conn.output)
        finally:
            front_leave()

    def take_output(self, limit: int = 1 << 20) -> list:
        """The output for the socket, as objects with the buffer protocol; about `limit` bytes at most."""
        self.collect_output(limit)
        return self.take_ready()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to send: the peer broke the protocol, or all output after `go_away` was taken."""
        cdef bint finished
        front_enter()
        finished = conn_finished(&self.conn)
        front_leave()
        return finished

    @property
    def state(self) -> str:
        """How far the end of the connection has come: one of STATES."""
        cdef ConnState now
        front_enter()
        now = self.conn.state
        front_leave()
        return STATES[<int>now]

    @property
    def parting(self) -> bool:
        """Whether the connection reads and answers no more: `take_output` returns its last bytes."""
        cdef bint now
        front_enter()
        now = self.conn.state >= CONN_PARTING
        front_leave()
        return now

    @property
    def http1(self) -> bool:
        """Whether the peer speaks HTTP/1. The remaining output is an error that names the right protocol."""
        cdef bint now
        front_enter()
        now = self.conn.http1
        front_leave()
        return now

    @property
    def told(self) -> bool:
        """Whether the peer has read what `announce_shutdown` sent: then it opens no streams any more."""
        cdef bint now
        front_enter()
        now = self.conn.told
        front_leave()
        return now

    @property
    def streams(self) -> int:
        """Open streams."""
        cdef uint32_t now
        front_enter()
        now = self.conn.streams
        front_leave()
        return now

    @property
    def unsent(self) -> int:
        """Bytes of responses that wait for flow control or a slow socket."""
        cdef size_t now
        front_enter()
        now = self.conn.unsent
        front_leave()
        return now

    @property
    def received_at(self) -> float:
        """When the peer last sent anything, in seconds on the endpoint's clock."""
        cdef int64_t now
        front_enter()
        now = self.conn.received_ns
        front_leave()
        return now * 1e-9

    @property
    def greeted(self) -> bool:
        """Whether the peer speaks HTTP/2: its preface and first SETTINGS have come."""
        cdef bint now
        front_enter()
        now = self.conn.greeted
        front_leave()
        return now

    @property
    def response_frames(self) -> int:
        """Frames with headers or data that have been sent."""
        cdef uint64_t now
        front_enter()
        now = self.conn.response_frames
        front_leave()
        return now

    @property
    def pinged_frames(self) -> int:
        """`response_frames` when the peer's latest PING came."""
        cdef uint64_t now
        front_enter()
        now = self.conn.pinged_frames
        front_leave()
        return now

    def ping(self) -> None:
        """Send a PING; when the peer answers it, `received_at` moves."""
        front_enter()
        conn_ping(&self.conn)
        self.leave(True)

    def calm(self, reason: str) -> None:
        """End the connection: a GOAWAY ENHANCE_YOUR_CALM with this text is the last frame, then it is `finished`."""
        cdef bytes text = reason.encode()
        front_enter()
        conn_calm(&self.conn, text)
        self.leave(True)

    def announce_shutdown(self) -> None:
        """Ask the peer to open no more streams. Streams that it opens until it reads this are still served."""
        front_enter()
        conn_announce_shutdown(&self.conn)
        self.leave(True)

    def go_away(self, reason: str = "") -> None:
        """Refuse further streams. The connection is `finished` after the responses to the open ones."""
        cdef bytes text = reason.encode()
        front_enter()
        conn_go_away(&self.conn, text)
        self.leave(True)

    def fail_calls(self, details: str) -> None:
        """End every call without a response, native ones too, with this status."""
        cdef bytes text = details.encode()
        front_enter()
        conn_fail_calls(&self.conn, text)
        self.leave(True)

    def close(self) -> None:
        """End every call, because the peer is gone."""
        front_enter()
        conn_close(&self.conn)
        self.leave(True)
        self.flush = None
        self.dispatch()
