"""Calls of methods that Python handles.

A new call comes to `Endpoint.on_call` (`inferd._native.transport.endpoint`). No method of a call blocks. The
connection's thread notes what happens to a call, and the event loop hears of it as events of the call
(`inferd._native.front`).
"""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from inferd._native.front cimport PythonEvent, front_enter, front_leave, python_post, python_withdraw
from inferd._native.memory.resource cimport Block, block_give, block_share
from inferd._native.refusal cimport REFUSAL_LIMIT_EXCEEDED, Refusal, refusal_count, refusal_or_usual
from inferd._native.status cimport STATUS_DEADLINE_EXCEEDED
from inferd._native.text cimport format_text
from inferd._native.transport.budget cimport COST_PYTHON_RESET
from inferd._native.transport.call_state cimport RECEIVED_ALL
from inferd._native.transport.compression cimport ENCODING_UNKNOWN, Encoding, encoding_parse
from inferd._native.transport.errorinfo cimport stream_refuse
from inferd._native.transport.expiry cimport stream_watch
from inferd._native.transport.headers cimport header_value, metadata_headers, metadata_pairs
from inferd._native.transport.incoming cimport stream_drop_message
from inferd._native.transport.ledger cimport (
    PYTHON_CALL_MEMORY,
    STAGE_WITH_HANDLER,
    account_exceeded,
    charge_make,
    charge_resize,
)
from inferd._native.transport.message cimport Incoming
from inferd._native.transport.nghttp2 cimport (
    NGHTTP2_INTERNAL_ERROR,
    NGHTTP2_NV_FLAG_NONE,
    nghttp2_nv,
    nghttp2_rcbuf_get_buf,
    nghttp2_vec,
)
from inferd._native.transport.outgoing cimport (
    PREFIX,
    Outgoing,
    outgoing_add,
    outgoing_free,
    outgoing_new,
    write_message_prefix,
)
from inferd._native.transport.quota cimport quota_refuses_stream
from inferd._native.transport.stream cimport (
    WRITABLE_BELOW,
    Stream,
    mark_dirty,
    stream_begin,
    stream_compress,
    stream_cut,
    stream_drop_fields,
    stream_end,
    stream_ended,
    stream_inflates,
    stream_opened,
    stream_send,
    stream_unsent,
)

from inferd._native.transport.errorinfo import rich_status

STATUS_DETAILS = "grpc-status-details-bin"  # the trailing metadata of rich errors

# The argument of Call.on_event.
EVENT_MESSAGE = "message"        # take_message will give one more
EVENT_HALF_CLOSE = "half-close"  # the client sends no more
EVENT_WRITABLE = "writable"      # little is unsent: the handler may write more
EVENT_DEADLINE = "deadline"      # the client's deadline has passed
EVENT_CLOSED = "closed"          # the stream is closed; closed_by says why


cdef class CallOwner:
    """The part of a connection that calls and the endpoint use."""

    cdef int has_output(self) except -1:
        return 0

    cdef int dispatch(self) except -1:
        return 0

    cdef void look(self) noexcept:
        pass

    cdef object begin_call(self, Call call):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The service of methods that Python handles: notes what happens, for the event loop

cdef enum:
    HEADER_MEMORY = 4            # bytes of objects for each byte of the headers
    NEWS_CALL = 1
    NEWS_HALF_CLOSE = 2
    NEWS_WRITABLE = 4
    NEWS_DEADLINE = 8
    NEWS_CLOSED = 16


cdef inline void note(Stream *stream, uint32_t news) noexcept nogil:
    cdef CallLink *link = <CallLink *>stream.call
    if link != NULL:  # else there was no memory for the call, and it has failed
        link.news |= news
        python_post(&stream.conn.host.timers.python, &link.event)


cdef void call_begins(Stream *stream) noexcept nogil:
    # The charge lasts as long as the call, because a stream needs memory without any message.
    cdef size_t memory = PYTHON_CALL_MEMORY + HEADER_MEMORY * stream.header_bytes
    cdef CallLink *link = <CallLink *>calloc(1, sizeof(CallLink))
    charge_make(&stream.with_handler, &stream.conn.account, STAGE_WITH_HANDLER, memory)
    if link == NULL:
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the call"))
        return
    link.event.run = tell_call
    link.stream = stream
    link.memory = memory
    stream.call = link
    note(stream, NEWS_CALL)
    stream_watch(stream)


cdef void message_arrived(Stream *stream) noexcept nogil:
    if stream.call != NULL:
        (<CallLink *>stream.call).messages += 1
        note(stream, 0)


cdef void client_half_closed(Stream *stream) noexcept nogil:
    note(stream, NEWS_HALF_CLOSE)


cdef void little_unsent(Stream *stream) noexcept nogil:
    note(stream, NEWS_WRITABLE)


cdef void call_is_late(Stream *stream) noexcept nogil:
    note(stream, NEWS_DEADLINE)
    mark_dirty(stream.conn)


cdef void closed(Stream *stream, uint32_t error_code) noexcept nogil:
    cdef CallLink *link = <CallLink *>stream.call
    link.closed_by = error_code
    note(stream, NEWS_CLOSED)
    link.stream = NULL
    if link.news & NEWS_CALL:  # Python has never heard of it
        python_withdraw(&stream.conn.host.timers.python, &link.event)
        free(link)


cdef Service PYTHON
PYTHON.keeps_fields = True
PYTHON.reset_cost = COST_PYTHON_RESET
PYTHON.begin = call_begins
PYTHON.message = message_arrived
PYTHON.half_closed = client_half_closed
PYTHON.writable = little_unsent
PYTHON.late = call_is_late
PYTHON.closed = closed


# ---------------------------------------------------------------------------------------------------------------------
# The event loop hears of it

cdef int tell_call(PythonEvent *event) except -1:
    cdef CallLink *link = <CallLink *>event
    cdef uint32_t news, messages
    cdef Call call
    try:
        news, messages = link.news, link.messages
        link.news = link.messages = 0
        if link.call == NULL:
            if not begin_handler(link):
                return 0
            news |= NEWS_CALL
        call = <Call>link.call
        if news & NEWS_CLOSED:
            call.closed_by = link.closed_by
            call.link = NULL
            Py_DECREF(call)
            free(link)
    finally:
        front_leave()
    if news & NEWS_CALL:
        call.connection.begin_call(call)
    while messages and hears(call):
        messages -= 1
        call.on_event(EVENT_MESSAGE)
    if news & NEWS_HALF_CLOSE and hears(call):
        call.on_event(EVENT_HALF_CLOSE)
    if news & NEWS_WRITABLE and hears(call):
        call.on_event(EVENT_WRITABLE)
    if news & NEWS_DEADLINE:
        if hears(call):
            call.on_event(EVENT_DEADLINE)
        elif call.open:  # its handler has not begun
            try:
                call.expire()
            except CallOverError:  # it has ended meanwhile
                pass
    if news & NEWS_CLOSED and hears(call):
        call.on_event(EVENT_CLOSED)
    return 0


cdef inline bint hears(Call call):
    return call.on_event is not None


cdef bint begin_handler(CallLink *link) except -1:
    # Make the Call. False: the call has failed, and reaches no handler.
    cdef Stream *stream = link.stream
    cdef Call call
    if stream_ended(stream):
        link.news = NEWS_CALL  # so that `closed` frees the link
        return False
    try:
        call = call_new(stream, link)
    except MemoryError:
        link.news = NEWS_CALL
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the call"))
        (<CallOwner>stream.conn.owner).has_output()
        return False
    Py_INCREF(call)
    link.call = <void *>call
    return True


cdef Call call_new(Stream *stream, CallLink *link):
    cdef Call call = Call.__new__(Call)
    cdef nghttp2_vec name, value
    cdef uint32_t i
    cdef list metadata = []
    for i in range(stream.field_count):
        name = nghttp2_rcbuf_get_buf(stream.fields[i].name)
        value = header_value(stream.fields[i].value)
        metadata += metadata_pairs(name.base, name.len, value.base, value.len)
    stream_drop_fields(stream)
    call.link = link
    call.connection = <CallOwner>stream.conn.owner
    call.path = stream.path.decode("ascii", "replace")
    call.metadata = tuple(metadata)
    call.timeout_ns = stream.timeout_ns
    call.memory = link.memory
    return call


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

    cdef Stream *enter(self) noexcept:
        # Enter the front. NULL: the stream is closed.
        front_enter()
        self.connection.look()
        return self.link.stream if self.link != NULL else NULL

    cdef Stream *enter_open(self) except NULL:
        # Enter the front, if messages and a status can still be sent.
        cdef Stream *stream = self.enter()
        if stream == NULL or stream_ended(stream):
            front_leave()
            raise CallOverError("the call is over")
        return stream

    cdef int leave(self, bint output) except -1:
        if output:
            self.connection.has_output()
        front_leave()
        return 0

    def take_message(self) -> bytes | None:
        """The next request message, None when there is none now."""
        cdef Stream *stream = self.enter()
        cdef const Incoming *message
        cdef Block *block = NULL
        cdef const char *data
        cdef size_t size
        cdef bint output = False
        if stream != NULL and stream.incoming.first != NULL:
            message = <const Incoming *>stream.incoming.first
            block = block_share(message.block)
            data = <const char *>message.data
            size = message.size
            stream_drop_message(stream)
            output = stream.conn.dirty
        self.leave(output)
        if block == NULL:
            return None
        try:
            return data[:size]  # outside of the front: a client may send gigabytes, and others must not wait meanwhile
        finally:
            block_give(block)

    @property
    def half_closed(self) -> bool:
        """The client sends no more messages than those that can be taken now."""
        cdef const Stream *stream = self.enter()
        cdef bint closed = stream == NULL or (
            stream.receiver.state == RECEIVED_ALL and not stream_inflates(stream))
        front_leave()
        return closed

    @property
    def inflating(self) -> bool:
        """Complete messages have come that cannot be taken yet: they are being inflated, or wait for that."""
        cdef const Stream *stream = self.enter()
        cdef bint inflates = stream != NULL and stream_inflates(stream)
        front_leave()
        return inflates

    @property
    def open(self) -> bool:
        """Messages and a status can still be sent."""
        cdef const Stream *stream = self.enter()
        cdef bint is_open = stream != NULL and not stream_ended(stream)
        front_leave()
        return is_open

    @property
    def writable(self) -> bool:
        """So little is unsent that the next message may be sent; else wait for EVENT_WRITABLE or EVENT_CLOSED."""
        cdef const Stream *stream = self.enter()
        cdef bint may_write = stream == NULL or stream_unsent(stream) < WRITABLE_BELOW
        front_leave()
        return may_write

    def expect_one(self) -> None:
        """Expect one request message: the client has as much time for it as in a native call."""
        cdef Stream *stream = self.enter()
        if stream != NULL:
            stream.single = True
            stream_watch(stream)
        front_leave()

    def count_as_stream(self) -> bool:
        """Count the call among the streams of its client until it is closed. False: there are as many as may be, and
        the call has been refused."""
        cdef Stream *stream = self.enter_open()
        cdef bint refused = quota_refuses_stream(stream)
        self.leave(refused)
        return not refused

    def hold(self, size: int) -> None:
        """Charge the call for `size` more bytes of unanswered requests or unsent responses; for fewer when `size` is
        negative. The end of the call releases the charge."""
        cdef Py_ssize_t more = size
        cdef Stream *stream
        cdef bint exceeds = False
        if more < -<Py_ssize_t>self.held:
            raise ValueError(f"the call holds {self.held} bytes, got {size}")
        stream = self.enter()
        if stream != NULL and not stream_ended(stream):
            self.held = <size_t>(<Py_ssize_t>self.held + more)
            charge_resize(&stream.with_handler, <size_t>(<Py_ssize_t>stream.with_handler.bytes + more))
            exceeds = account_exceeded(&stream.conn.host.account)  # an I/O thread ends calls at the end of its round
        self.leave(exceeds)

    def let_go(self) -> None:
        """Release the charge of the request messages: the handler has taken what it needs of them."""
        cdef Stream *stream = self.enter()
        if stream != NULL and not stream_ended(stream):
            charge_resize(&stream.with_handler, self.memory + self.held)
        front_leave()

    def set_compression(self, encoding: str, level: int = 6) -> None:
        """Compress messages from now on, if the client takes the encoding; before the headers are sent.

        Args:
            encoding: "gzip", "deflate", "identity", or "" for the best that the client takes.
            level: zlib's.

        Raises:
            ValueError: the encoding is unknown, or the headers have been sent.
        """
        cdef bytes name = encoding.encode()
        cdef int wanted_level = level
        cdef Encoding wanted = encoding_parse(<const uint8_t *><const char *>name, len(name))
        cdef Stream *stream = self.enter_open()
        try:
            if stream_opened(stream):
                raise ValueError("the initial metadata has been sent")
            if encoding and wanted == ENCODING_UNKNOWN:
                raise ValueError(f"expected gzip, deflate or identity, got {encoding!r}")
            stream_compress(stream, wanted, wanted_level)
        finally:
            self.leave(False)

    def send_headers(self, metadata=()) -> None:
        """Send the initial metadata, pairs of key and value; once, before the first message."""
        cdef list pairs = metadata_headers(metadata)
        cdef nghttp2_nv *nv = nv_of(pairs)
        cdef Stream *stream
        try:
            stream = self.enter_open()
            try:
                if stream_opened(stream):
                    raise ValueError("the initial metadata has been sent")
                stream_begin(stream, nv, len(pairs))
            finally:
                self.leave(True)
        finally:
            free(nv)

    def send_message(self, message: bytes, compress: bool = True) -> None:
        """Queue one response message; with `compress`, as `set_compression` says."""
        cdef size_t size = len(message)
        cdef bint compressible = compress
        cdef Stream *stream
        cdef Outgoing *out
        if not self.open:
            raise CallOverError("the call is over")
        if size > 0xffffffff:
            raise ValueError("a gRPC message is smaller than 4 GiB")
        out = outgoing_new(1, PREFIX + size)
        if out == NULL:
            raise MemoryError(f"no memory for a message of {size} bytes")
        write_message_prefix(out.room, size)
        memcpy(out.room + PREFIX, <const char *>message, size)
        outgoing_add(out, out.home, out.room, PREFIX + size)
        try:
            stream = self.enter_open()
        except CallOverError:  # it has ended meanwhile
            outgoing_free(out)
            raise
        stream_send(stream, out, compressible)
        self.leave(True)

    def end(self, status: int, details: str = "", metadata=()) -> None:
        """Send the final status, with trailing metadata; once."""
        self.finish(status, details, tuple(metadata), <Refusal>0)

    def refuse(self, status: int, details: str, refusal: int = 0, metadata=()) -> None:
        """End the call with an error and its details (google.rpc.Status), and count the refusal.

        Args:
            status: a gRPC status code.
            details: its text.
            refusal: a number of the table of refusals; 0: the usual one of the status.
            metadata: trailing metadata, in addition.
        """
        told = rich_status(status, details, refusal)
        self.finish(status, details, (*metadata, (STATUS_DETAILS, told)) if told else tuple(metadata),
                    refusal_or_usual(<Refusal><int>refusal, status))

    def expire(self, metadata=()) -> None:
        """End the call because its deadline has passed, which is no refusal."""
        cdef str text = "Deadline Exceeded"
        details = (STATUS_DETAILS, rich_status(STATUS_DEADLINE_EXCEEDED, text))
        self.finish(STATUS_DEADLINE_EXCEEDED, text, (*metadata, details), <Refusal>0)

    cdef int finish(self, int status, str details, tuple metadata, Refusal refusal) except -1:
        # `refusal` is counted; REFUSAL_NONE: nothing is
        cdef list pairs = metadata_headers(metadata)
        cdef bytes text = details.encode("utf-8", "replace").replace(b"\0", b" ")
        cdef nghttp2_nv *nv
        cdef Stream *stream
        if not 0 <= status <= 16:
            raise ValueError(f"a gRPC status code is 0 to 16, got {status}")
        try:
            nv = nv_of(pairs)
        except MemoryError:  # the client must not wait for the status because there is no memory for the metadata
            nv, pairs = NULL, []
        try:
            stream = self.enter_open()
        except CallOverError:
            free(nv)
            raise
        if refusal:
            refusal_count(refusal)
        stream_end(stream, status, text, nv, len(pairs))
        return self.leave(True)

    def reset(self) -> None:
        """Reset the call (RST_STREAM)."""
        stream_cut(self.enter_open(), NGHTTP2_INTERNAL_ERROR)
        self.leave(True)
