"""Calls of methods that Python handles.

A new call comes to `Endpoint.on_call` (`inferd._native.transport.endpoint`). No method of a call blocks; a call has
events.
"""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from inferd._native.refusal cimport REFUSAL_LIMIT_EXCEEDED
from inferd._native.text cimport format_text
from inferd._native.transport.budget cimport COST_PYTHON_RESET
from inferd._native.transport.compression cimport ENCODING_UNKNOWN, Encoding, encoding_parse
from inferd._native.transport.errorinfo cimport stream_refuse
from inferd._native.transport.expiry cimport stream_watch
from inferd._native.transport.headers cimport header_value, metadata_headers, metadata_pairs
from inferd._native.transport.incoming cimport stream_drop_message
from inferd._native.transport.ledger cimport PYTHON_CALL_MEMORY, STAGE_EXECUTED, charge_make, charge_resize
from inferd._native.transport.nghttp2 cimport (
    NGHTTP2_INTERNAL_ERROR,
    NGHTTP2_NV_FLAG_NONE,
    nghttp2_nv,
    nghttp2_rcbuf_get_buf,
    nghttp2_vec,
)
from inferd._native.transport.outgoing cimport PREFIX, Outgoing, outgoing_add, outgoing_new, write_message_prefix
from inferd._native.transport.stream cimport (
    RECEIVED_ALL,
    WRITABLE_BELOW,
    Incoming,
    Stream,
    mark_dirty,
    stream_begin,
    stream_compress,
    stream_cut,
    stream_end,
    stream_ended,
    stream_inflates,
    stream_opened,
    stream_send,
    stream_unsent,
)

# The argument of Call.on_event.
EVENT_MESSAGE = "message"        # take_message will give one more
EVENT_HALF_CLOSE = "half-close"  # the client sends no more
EVENT_WRITABLE = "writable"      # little is unsent: the handler may write more
EVENT_DEADLINE = "deadline"      # the client's deadline has passed
EVENT_CLOSED = "closed"          # the stream is closed; closed_by says why
EVENT_CALL = "call"              # internal: a new call, for Endpoint.on_call


cdef class CallOwner:
    """The part of a connection that calls and the endpoint use."""

    cdef int has_output(self) except -1:
        return 0

    cdef int dispatch(self) except -1:
        return 0


cdef void *call_peer(const Stream *stream) noexcept nogil:
    with gil:
        peer = (<CallOwner>stream.conn.owner).peer
        Py_INCREF(peer)
        return <void *>peer


# ---------------------------------------------------------------------------------------------------------------------
# The service of methods that Python handles

cdef enum:
    HEADER_MEMORY = 4            # bytes of objects for each byte of the headers


cdef inline void note(Stream *stream, str kind) noexcept:
    if stream.call != NULL:  # else there was no memory for the call, and it has failed
        (<CallOwner>stream.conn.owner).events.append((<Call>stream.call, kind))


cdef void call_begins(Stream *stream) noexcept nogil:
    # Its charge lasts as long as the call: a stream needs memory without any message.
    cdef size_t memory = PYTHON_CALL_MEMORY + HEADER_MEMORY * stream.header_bytes
    charge_make(&stream.executed, &stream.conn.account, STAGE_EXECUTED, memory)
    with gil:
        try:
            call_new(stream, memory)
        except BaseException:
            stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the call"))
    stream_watch(stream)


cdef void message_arrived(Stream *stream) noexcept nogil:
    with gil:
        note(stream, EVENT_MESSAGE)


cdef void client_half_closed(Stream *stream) noexcept nogil:
    with gil:
        note(stream, EVENT_HALF_CLOSE)


cdef void little_unsent(Stream *stream) noexcept nogil:
    with gil:
        note(stream, EVENT_WRITABLE)


cdef void call_is_late(Stream *stream) noexcept nogil:
    with gil:
        note(stream, EVENT_DEADLINE)
    mark_dirty(stream.conn)


cdef void call_closed(Stream *stream, uint32_t error_code) noexcept nogil:
    with gil:
        note(stream, EVENT_CLOSED)
        (<Call>stream.call).closed_by = error_code
        (<Call>stream.call).stream = NULL
        Py_DECREF(<Call>stream.call)


cdef Service PYTHON
PYTHON.reset_cost = COST_PYTHON_RESET
PYTHON.begin = call_begins
PYTHON.message = message_arrived
PYTHON.half_closed = client_half_closed
PYTHON.writable = little_unsent
PYTHON.late = call_is_late
PYTHON.closed = call_closed


cdef int call_new(Stream *stream, size_t memory) except -1:
    cdef Call call = Call.__new__(Call)
    cdef nghttp2_vec name, value
    cdef uint32_t i
    cdef list metadata = []
    for i in range(stream.field_count):
        name = nghttp2_rcbuf_get_buf(stream.fields[i].name)
        value = header_value(stream.fields[i].value)
        metadata += metadata_pairs(name.base, name.len, value.base, value.len)
    call.stream = stream
    call.connection = <CallOwner>stream.conn.owner
    call.path = stream.path.decode("ascii", "replace")
    call.metadata = tuple(metadata)
    call.timeout_ns = stream.timeout_ns
    call.memory = memory
    Py_INCREF(call)
    stream.call = <void *>call
    note(stream, EVENT_CALL)
    return 0


class CallOverError(ConnectionError):
    """A handler used a call that is over: answered, reset, refused by the transport, or left by its client. The output
    is discarded."""


# ---------------------------------------------------------------------------------------------------------------------
# Calls, for their handlers

cdef nghttp2_nv *nv_of(list pairs) except? NULL:
    # header pairs with their bytes in one allocation from malloc; NULL without an exception for no pairs
    cdef size_t size = len(pairs) * sizeof(nghttp2_nv)
    cdef bytes name, value
    cdef nghttp2_nv *nv
    cdef uint8_t *at
    cdef size_t i = 0
    if not pairs:
        return NULL
    for name, value in pairs:
        size += len(name) + len(value)
    nv = <nghttp2_nv *>malloc(size)
    if nv == NULL:
        raise MemoryError
    at = <uint8_t *>(nv + len(pairs))
    for name, value in pairs:
        nv[i].flags = NGHTTP2_NV_FLAG_NONE
        nv[i].name = at
        nv[i].namelen = len(name)
        memcpy(at, <const char *>name, len(name))
        at += len(name)
        nv[i].value = at
        nv[i].valuelen = len(value)
        memcpy(at, <const char *>value, len(value))
        at += len(value)
        i += 1
    return nv


cdef class Call:
    """One call of a method that Python handles: messages in, messages and a status out; no method blocks.

    `on_event` is called with an EVENT_* name, never from inside a method of the call.
    """

    def __init__(self):
        raise TypeError("Call cannot be created from Python")

    cdef Stream *open_stream(self) except NULL:
        if self.stream == NULL or stream_ended(self.stream):
            raise CallOverError("the call is over")
        return self.stream

    def take_message(self) -> bytes | None:
        """The next request message, None when there is none now."""
        cdef Incoming *message
        cdef bytes out
        if self.stream == NULL or self.stream.incoming.first == NULL:
            return None
        message = <Incoming *>self.stream.incoming.first
        out = (<const char *>message.data)[:message.size]
        stream_drop_message(self.stream)
        if self.stream.conn.dirty:
            self.connection.has_output()
        return out

    @property
    def half_closed(self) -> bool:
        """The client sends no more messages than those that can be taken now."""
        return self.stream == NULL or (
            self.stream.receiver.state == RECEIVED_ALL and not stream_inflates(self.stream))

    @property
    def inflating(self) -> bool:
        """Complete messages have come that cannot be taken yet: they are being inflated, or wait for that."""
        return self.stream != NULL and stream_inflates(self.stream)

    @property
    def open(self) -> bool:
        """Messages and a status can still be sent."""
        return self.stream != NULL and not stream_ended(self.stream)

    @property
    def writable(self) -> bool:
        """So little is unsent that the next message may be sent; else wait for EVENT_WRITABLE or EVENT_CLOSED."""
        return self.stream == NULL or stream_unsent(self.stream) < WRITABLE_BELOW

    def expect_one(self) -> None:
        """Expect one request message: the client has as much time for it as in a native call."""
        if self.stream != NULL:
            self.stream.single = True
            stream_watch(self.stream)

    def hold(self, size: int) -> None:
        """Charge the call for `size` more bytes of unanswered requests or unsent responses; for fewer when `size` is
        negative. The end of the call releases the charge."""
        cdef Stream *stream = self.stream
        if stream == NULL or stream_ended(stream):
            return
        if size < -<Py_ssize_t>self.held:
            raise ValueError(f"the call holds {self.held} bytes, got {size}")
        self.held = <size_t>(<Py_ssize_t>self.held + <Py_ssize_t>size)
        charge_resize(&stream.executed, <size_t>(<Py_ssize_t>stream.executed.bytes + <Py_ssize_t>size))

    def let_go(self) -> None:
        """Release the charge of the request messages: the handler has taken what it needs of them."""
        cdef Stream *stream = self.stream
        if stream != NULL and not stream_ended(stream):
            charge_resize(&stream.executed, self.memory + self.held)

    def set_compression(self, encoding: str, level: int = 6) -> None:
        """Compress messages from now on, if the client takes the encoding; before the headers are sent.

        Args:
            encoding: "gzip", "deflate", "identity", or "" for the best that the client takes.
            level: zlib's.

        Raises:
            ValueError: the encoding is unknown, or the headers have been sent.
        """
        cdef Stream *stream = self.open_stream()
        cdef bytes name = encoding.encode()
        cdef Encoding wanted
        if stream_opened(stream):
            raise ValueError("the initial metadata has been sent")
        wanted = encoding_parse(<const uint8_t *><const char *>name, len(name))
        if encoding and wanted == ENCODING_UNKNOWN:
            raise ValueError(f"expected gzip, deflate or identity, got {encoding!r}")
        stream_compress(stream, wanted, level)

    def send_headers(self, metadata=()) -> None:
        """Send the initial metadata, pairs of key and value; once, before the first message."""
        cdef Stream *stream = self.open_stream()
        cdef list pairs = metadata_headers(metadata)
        cdef nghttp2_nv *nv
        if stream_opened(stream):
            raise ValueError("the initial metadata has been sent")
        nv = nv_of(pairs)
        stream_begin(stream, nv, len(pairs))
        free(nv)
        self.connection.has_output()

    def send_message(self, message: bytes, compress: bool = True) -> None:
        """Queue one response message; with `compress`, as `set_compression` says."""
        cdef Stream *stream = self.open_stream()
        cdef size_t size = len(message)
        cdef Outgoing *out
        if size > 0xffffffff:
            raise ValueError("a gRPC message is smaller than 4 GiB")
        out = outgoing_new(1, PREFIX + size)
        if out == NULL:
            raise MemoryError(f"no memory for a message of {size} bytes")
        write_message_prefix(out.room, size)
        memcpy(out.room + PREFIX, <const char *>message, size)
        outgoing_add(out, out.home, out.room, PREFIX + size)
        stream_send(stream, out, compress)
        self.connection.has_output()

    def end(self, status: int, details: str = "", metadata=()) -> None:
        """Send the final status, with trailing metadata; once."""
        cdef Stream *stream = self.open_stream()
        cdef list pairs = metadata_headers(metadata)
        cdef bytes text = details.encode("utf-8", "replace").replace(b"\0", b" ")
        cdef nghttp2_nv *nv
        if not 0 <= status <= 16:
            raise ValueError(f"a gRPC status code is 0 to 16, got {status}")
        try:
            nv = nv_of(pairs)
        except MemoryError:  # the client must not wait for the status because there is no memory for the metadata
            nv, pairs = NULL, []
        stream_end(stream, status, text, nv, len(pairs))
        self.connection.has_output()

    def reset(self) -> None:
        """Reset the call (RST_STREAM)."""
        stream_cut(self.open_stream(), NGHTTP2_INTERNAL_ERROR)
        self.connection.has_output()
