"""Ends transfers and calls that take too long: requests that do not arrive, responses that are not read, and calls that
have not begun at their deadline. Charges the output that waits for the socket (`conn_output_waits`).

A call has one timer for all of this. A call needs none if one read brings it whole and the peer takes its response at
once: the timer is set when a read ends before the request does, or output ends before the response does. Progress does
not move the timer: when it fires, the call is checked, and the timer is set again if necessary.
"""

from libc.stdint cimport INT64_MAX, SIZE_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport free

from inferd._native.refusal cimport REFUSAL_SLOW_REQUEST
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.timers cimport Timer, timers_clear, timers_set
from inferd._native.transport.call_state cimport RECEIVED_ALL, RECEIVING_HEADERS, RECEIVING_PREFIX
from inferd._native.transport.closing cimport CONN_PARTING
from inferd._native.transport.errorinfo cimport stream_expire, stream_refuse
from inferd._native.transport.eviction cimport conn_calm, conn_evict, stream_evict
from inferd._native.transport.ledger cimport (
    CALL_MEMORY,
    STAGE_ARRIVING,
    STAGE_FRAMED,
    charge_make,
    charge_release,
    charge_resize,
)
from inferd._native.transport.nghttp2 cimport NGHTTP2_CANCEL, NGHTTP2_INTERNAL_ERROR
from inferd._native.transport.outgoing cimport Outgoing, outgoing_keep, output_keep
from inferd._native.transport.quota cimport quota_refuses_bytes
from inferd._native.transport.stream cimport (
    Conn,
    Host,
    Stream,
    host_look,
    stream_abandon,
    stream_cut,
    stream_drop_request,
    stream_ended,
)

cdef enum:
    SMALL = 1 << 20                  # the first bytes of a message, which may come slowly
    SLOWEST = 16 << 10               # bytes a second, of these
    SLOWEST_OF_MORE = 256 << 10      # and of the rest, so that 2 GiB do not take days

cdef int64_t SECOND = 1000000000
cdef int64_t NEVER = INT64_MAX


# ---------------------------------------------------------------------------------------------------------------------
# What is due when

cdef inline int64_t time_for(const Stream *stream, int64_t beginning_ns, size_t moved) noexcept nogil:
    # when a transfer of which `moved` bytes have moved is late; the streams of a connection share its bandwidth
    cdef size_t small = min(moved, <size_t>SMALL)
    cdef int64_t rate = max(<int64_t>SLOWEST, <int64_t>SLOWEST_OF_MORE // max(<int64_t>stream.conn.streams, 1))
    return beginning_ns + <int64_t>small * SECOND // SLOWEST + <int64_t>(moved - small) * SECOND // rate


cdef inline bint is_awaited(const Stream *stream) noexcept nogil:
    # the peer owes us more of a request that it has begun, and may send it
    if stream.receiver.state == RECEIVED_ALL or stream_ended(stream) or stream.withheld:
        return False
    return stream.single or stream.receiver.state != RECEIVING_PREFIX or stream.receiver.prefix_size != 0


cdef int64_t arrives_by(const Stream *stream) noexcept nogil:
    # when the arriving message must be complete
    cdef const Host *host = stream.conn.host
    if host.receive_ns == NEVER or not is_awaited(stream):
        return NEVER
    return time_for(stream, stream.receiver.begun_ns + host.receive_ns, stream.receiver.received)


cdef int64_t taken_by(const Stream *stream) noexcept nogil:
    # when the peer must have taken the first waiting response
    cdef const Host *host = stream.conn.host
    cdef const Outgoing *message = <const Outgoing *>stream.sender.outgoing.first
    if host.send_ns == NEVER or message == NULL or stream.sender.waits_ns == 0:
        return NEVER
    return time_for(stream, stream.sender.waits_ns + host.send_ns, message.size - message.left)


cdef int64_t ends_by(const Stream *stream) noexcept nogil:
    # the client's deadline, unless the service watches it; nothing can end before the headers are complete
    if stream.timeout_ns < 0 or stream.receiver.state == RECEIVING_HEADERS or stream_ended(stream):
        return NEVER
    if stream.call != NULL and stream.method.service.late == NULL:
        return NEVER
    return stream.arrived_ns + min(stream.timeout_ns, NEVER - stream.arrived_ns)


cdef int64_t written_by(const Conn *conn) noexcept nogil:
    # when the socket must have taken the waiting output
    cdef size_t moved = <size_t>(conn.taken - conn.waits_from)
    if conn.host.send_ns == NEVER or conn.waits_ns == 0:
        return NEVER
    return conn.waits_ns + conn.host.send_ns + <int64_t>moved * SECOND // SLOWEST


# ---------------------------------------------------------------------------------------------------------------------
# The timers

cdef void stream_watch(Stream *stream) noexcept nogil:
    cdef int64_t due = min(min(arrives_by(stream), taken_by(stream)), ends_by(stream))
    if due == NEVER or (stream.timer.slot and stream.timer.due_ns <= due):
        return
    stream.timer.fire = timer_fired
    stream.timer.owner = stream
    if not timers_set(stream.conn.host.timers, &stream.timer, due):  # without a timer it could stay for ever
        stream_abandon(stream, NGHTTP2_INTERNAL_ERROR)
        stream_cut(stream, NGHTTP2_INTERNAL_ERROR)


cdef void conn_watch(Conn *conn) noexcept nogil:
    # the latest streams are the first
    cdef Stream *stream = conn.open.first
    cdef int32_t watched = conn.watched
    if stream != NULL:
        conn.watched = max(watched, stream.id)
    while stream != NULL and stream.id > watched:
        if stream.call == NULL or stream.receiver.state != RECEIVED_ALL:
            charge_beginning(stream)
            stream_watch(stream)
        stream = stream.next


cdef inline void charge_beginning(Stream *stream) noexcept nogil:
    # an incomplete call takes memory before the first byte of its message, from which on the message has a charge
    if stream_ended(stream):
        return
    if stream.receiver.state < RECEIVED_ALL and stream.receiver.messages == 0 and (
            stream.receiver.charge.account == NULL and stream.with_handler.account == NULL):
        charge_make(&stream.receiver.charge, &stream.conn.account, STAGE_ARRIVING, CALL_MEMORY)
    quota_refuses_bytes(stream)


cdef void conn_watch_responses(Conn *conn) noexcept nogil:
    cdef Stream *stream = conn.open.first
    host_look(conn.host)
    while stream != NULL:
        if stream.sender.outgoing.first != NULL:
            if stream.sender.waits_ns == 0:
                stream.sender.waits_ns = conn.host.now_ns
                stream.sender.unkept = True
            # at the limit it waits for its turn at the socket, not for the peer: a copy would be for nothing
            if stream.sender.unkept and conn.output.size < conn.output_limit:
                stream.sender.unkept = False
                outgoing_keep(<Outgoing *>stream.sender.outgoing.first)
            stream_watch(stream)  # also when one response was framed whole and the next was not
        stream = stream.next


cdef void conn_output_waits(Conn *conn, size_t handed, size_t beside) noexcept nogil:
    # There is progress when all bytes have gone that waited at one time; then the bytes that wait now get a new time.
    cdef size_t waiting = handed + conn.output.size
    cdef size_t memory
    # records have heads, so with TLS more may wait than was taken
    conn.taken = max(conn.taken, conn.output.taken - min(<uint64_t>handed, conn.output.taken))
    if conn.session == NULL:
        return
    if waiting == 0:
        charge_release(&conn.framed)
        conn.waits_ns = 0
        if conn.timer.slot:
            timers_clear(conn.host.timers, &conn.timer)
        return
    conn.output_limit = SIZE_MAX  # what is beyond the last one waits for the peer now
    if conn.unsent:
        conn_watch_responses(conn)
    memory = output_keep(&conn.output) + handed + beside
    if conn.framed.account == NULL:
        charge_make(&conn.framed, &conn.account, STAGE_FRAMED, memory)
    else:
        charge_resize(&conn.framed, memory)
    if conn.waits_ns == 0 or conn.taken >= conn.waits_until:
        host_look(conn.host)
        conn.waits_ns = conn.host.now_ns
        conn.waits_from = conn.taken
        conn.waits_until = conn.taken + waiting
    if conn.timer.slot == 0:
        conn.timer.fire = look_at_output
        conn.timer.owner = conn
        watch_output(conn)


cdef void watch_output(Conn *conn) noexcept nogil:
    cdef int64_t due = written_by(conn)
    if due != NEVER and not timers_set(conn.host.timers, &conn.timer, due):
        conn_evict(conn)  # without a timer it could stay for ever


cdef void look_at_output(Timer *timer, int64_t now) noexcept nogil:
    cdef Conn *conn = <Conn *>timer.owner
    cdef char *text
    conn.host.now_ns = now
    if written_by(conn) > now:
        watch_output(conn)
        return
    text = format_text("its end of the connection has taken no output for %.3g s",
                       <double>(now - conn.waits_ns) / SECOND)
    conn.host.refused(conn, text_or_no_memory(text))
    free(text)
    conn_evict(conn)


cdef void timer_fired(Timer *timer, int64_t now) noexcept nogil:
    cdef Stream *stream = <Stream *>timer.owner
    cdef Conn *conn = stream.conn
    conn.host.now_ns = now
    if conn.state >= CONN_PARTING:
        return
    if taken_by(stream) <= now:
        stream_evict(stream)
    elif stream.receiver.state == RECEIVING_HEADERS and arrives_by(stream) <= now:
        conn_calm(conn, "slow_headers")  # nothing else can come on this connection before they are complete
        return
    elif ends_by(stream) <= now:
        end_late(stream)
    elif arrives_by(stream) <= now:
        stream_abandon(stream, NGHTTP2_CANCEL)
        fail_late(stream)
        stream_drop_request(stream)
    stream_watch(stream)


cdef void end_late(Stream *stream) noexcept nogil:
    stream.timeout_ns = -1  # report it once
    if stream.call != NULL:
        stream.method.service.late(stream)
        return
    stream_expire(stream)
    stream_drop_request(stream)


cdef void fail_late(Stream *stream) noexcept nogil:
    cdef double seconds = <double>(stream.conn.host.now_ns - stream.receiver.begun_ns) / SECOND
    cdef char *text
    if stream.single and stream.receiver.messages:
        text = format_text("the request has not arrived within %.3g s: its message is complete, but not its stream: "
                           "END_STREAM is missing", seconds)
    else:
        text = format_text("the request has not arrived within %.3g s: %zu bytes of its message have come", seconds,
                           stream.receiver.received)
    stream_refuse(stream, REFUSAL_SLOW_REQUEST, text)
