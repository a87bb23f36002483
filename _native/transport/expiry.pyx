"""What takes too long: requests that do not arrive, answers that are not taken, and calls that have not begun at their
deadline."""

from libc.stdint cimport int64_t

from _native.status cimport STATUS_DEADLINE_EXCEEDED
from _native.text cimport format_text
from _native.transport.errorinfo cimport stream_refuse
from _native.transport.eviction cimport stream_evict
from _native.transport.http2 cimport conn_calm
from _native.transport.nghttp2 cimport NGHTTP2_CANCEL
from _native.transport.outgoing cimport Outgoing
from _native.transport.stream cimport (
    RECEIVED_ALL,
    RECEIVING_HEADERS,
    RECEIVING_PREFIX,
    Conn,
    Host,
    Stream,
    stream_abandon,
    stream_drop_request,
    stream_ended,
    stream_fail,
    stream_time_left,
)

cdef enum:
    SLOWEST = 16 << 10               # bytes a second of a large message

cdef int64_t SECOND = 1000000000


cdef void host_expire(Host *host) noexcept nogil:
    cdef Conn *conn = host.connections.first
    while conn != NULL:
        if conn.open.first != NULL and not conn.leaving:
            expire_calls(conn)
        conn = conn.next


cdef inline bint is_awaited(const Stream *stream) noexcept nogil:
    # the peer owes us more of a request that it has begun
    if stream.receiver.state == RECEIVED_ALL:
        return False
    return stream.single or stream.receiver.state != RECEIVING_PREFIX or stream.receiver.prefix_size != 0


cdef inline bint arrives_late(const Stream *stream) noexcept nogil:
    cdef const Host *host = stream.conn.host
    cdef int64_t allowed = host.receive_ns + <int64_t>stream.receiver.received * SECOND // SLOWEST
    return host.receive_ns != 0 and host.now_ns - stream.receiver.begun_ns > allowed


cdef inline bint is_taken_late(const Stream *stream) noexcept nogil:
    # the first response that waits has waited too long for what of it was taken
    cdef const Host *host = stream.conn.host
    cdef const Outgoing *message = <const Outgoing *>stream.sender.outgoing.first
    if host.send_ns == 0 or message == NULL:
        return False
    return host.now_ns - stream.sender.waits_ns > host.send_ns + (
        <int64_t>(message.size - message.left) * SECOND // SLOWEST)


cdef void expire_calls(Conn *conn) noexcept nogil:
    cdef Stream *stream = conn.open.first
    cdef bint late
    while stream != NULL:
        late = arrives_late(stream)
        if is_taken_late(stream):
            stream_evict(stream)
        elif stream.receiver.state == RECEIVING_HEADERS:
            if late:
                conn_calm(conn, "slow_headers")  # nothing else can come on this connection before they are complete
                return
        elif stream_ended(stream):
            pass
        elif stream.call == NULL and stream_time_left(stream) == 0:
            stream_fail(stream, STATUS_DEADLINE_EXCEEDED, "Deadline Exceeded")
            stream_drop_request(stream)
        elif late and is_awaited(stream):
            stream_abandon(stream, NGHTTP2_CANCEL)
            fail_late(stream)
            stream_drop_request(stream)
        stream = stream.next


cdef void fail_late(Stream *stream) noexcept nogil:
    stream_refuse(stream, STATUS_DEADLINE_EXCEEDED, "SLOW_REQUEST", format_text(
        "the request has not arrived within %d s: %zu bytes of its message have come",
        <int>((stream.conn.host.now_ns - stream.receiver.begun_ns) // SECOND), stream.receiver.received))
