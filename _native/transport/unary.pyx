"""Native calls: checked when their headers are complete, run when their message is.

A complete call runs at once, unless so many responses wait on its own connection that the call is parked until the peer
has read some of them. Responses that the windows of their own streams hold back do not count: many users may share the
connection of a proxy, and one of them that does not read must not stop the others.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

from inferd._native.chain cimport chain_pop, chain_push
from inferd._native.memory.resource cimport Block
from inferd._native.refusal cimport REFUSAL_CARDINALITY
from inferd._native.text cimport format_text
from inferd._native.transport.budget cimport COST_FRAME
from inferd._native.transport.compression cimport ENCODING_UNKNOWN
from inferd._native.transport.errorinfo cimport stream_expire, stream_refuse
from inferd._native.transport.incoming cimport stream_drop_message
from inferd._native.transport.message cimport Incoming
from inferd._native.transport.stream cimport (
    Conn,
    Forwarding,
    Interceptor,
    Stream,
    conn_blocked,
    end_round,
    stream_compress,
    stream_drop_request,
    stream_time_left,
)

cdef enum:
    UNSENT_LIMIT = 4 << 20   # unsent bytes of responses above which a connection's further calls are parked


cdef bint call_wants(Stream *stream, const uint8_t *name, size_t size) noexcept nogil:
    cdef const Interceptor *interceptor = stream.conn.interceptor
    cdef const Forwarding *forwarding = &stream.conn.host.forwarding
    if interceptor.wants != NULL and interceptor.wants(interceptor.context, name, size):
        return True
    return forwarding.wants != NULL and forwarding.wants(forwarding.context, name, size)


cdef bint call_admit(Stream *stream) noexcept nogil:
    cdef const Interceptor *interceptor = stream.conn.interceptor
    cdef const Forwarding *forwarding = &stream.conn.host.forwarding
    stream_compress(stream, ENCODING_UNKNOWN, stream.conn.host.native_level)
    if interceptor.admits != NULL and not interceptor.admits(interceptor.context, stream):
        return False
    return forwarding.attach == NULL or stream.field_count == 0 or forwarding.attach(forwarding.context, stream)


cdef void begin_call(Stream *stream) noexcept nogil:
    call_admit(stream)


cdef Block *place(Stream *stream, const uint8_t *head, size_t head_size, size_t size) noexcept nogil:
    cdef const Unary *unary = <const Unary *>stream.method.context
    if unary.place == NULL:
        return NULL
    return unary.place(unary.context, stream, head, head_size, size)


cdef void nothing(Stream *stream) noexcept nogil:
    pass


cdef void half_closed(Stream *stream) noexcept nogil:
    if stream.incoming.first == NULL:
        stream_refuse(stream, REFUSAL_CARDINALITY, format_text("expected one request message, got none"))
    elif conn_blocked(stream.conn) > UNSENT_LIMIT:
        chain_push(&stream.conn.parked, stream)
    else:
        run(stream)


cdef void run(Stream *stream) noexcept nogil:
    cdef const Unary *unary = <const Unary *>stream.method.context
    cdef const uint8_t *data
    cdef size_t size
    cdef Block *block
    cdef int64_t left = stream_time_left(stream)
    if left == 0:
        stream_expire(stream)
        stream_drop_request(stream)
        return
    block = message_take(stream, &data, &size)
    unary.run(unary.context, stream, block, data, size, left)


cdef Block *message_take(Stream *stream, const uint8_t **data, size_t *size) noexcept nogil:
    cdef Incoming *message = <Incoming *>stream.incoming.first
    cdef Block *block = message.block
    data[0] = message.data
    size[0] = message.size
    if stream.forwarded_size:  # the block has room for that
        memcpy(<uint8_t *>message.data + message.size, stream.forwarded, stream.forwarded_size)
    message.block = NULL  # the caller has the block now; a call with one message keeps its charge
    stream_drop_message(stream)
    return block


cdef void closed(Stream *stream, uint32_t error_code) noexcept nogil:
    (<const Unary *>stream.method.context).abandon(stream.call)


cdef void calls_resume(Conn *conn) noexcept nogil:
    if conn.parked.first == NULL:
        return
    while conn.parked.first != NULL and conn_blocked(conn) <= UNSENT_LIMIT:
        run(<Stream *>chain_pop(&conn.parked))
    end_round(conn.host)


UNARY.single = True
UNARY.reset_cost = COST_FRAME
UNARY.wants = call_wants
UNARY.begin = begin_call
UNARY.place = place
UNARY.message = nothing
UNARY.half_closed = half_closed
UNARY.writable = nothing
UNARY.closed = closed
