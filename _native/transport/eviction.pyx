"""Eviction: when the server holds too much, calls of clients that hold most and progress least end; all others go on.

Nobody waits because the server is full. What exceeds the limit is freed at once, from the calls whose peers owe most:
bytes of a request that was announced and does not come, and of responses that the peer does not read. A call's debt is
weighted by its age and by its progress since, so a trickle helps little, and a call that has just begun owes nothing.
If nobody owes much, there are simply too many requests. Then calls of the connection that holds most end, the largest
first, and of equal ones the latest.
"""

from libc.stdint cimport int64_t

from _native.status cimport STATUS_RESOURCE_EXHAUSTED
from _native.text cimport format_text
from _native.transport.errorinfo cimport stream_refuse
from _native.transport.ledger cimport account_exceeded, account_owed
from _native.transport.nghttp2 cimport NGHTTP2_CANCEL, NGHTTP2_ENHANCE_YOUR_CALM
from _native.transport.outgoing cimport Outgoing
from _native.transport.stream cimport (
    RECEIVING_MESSAGE,
    Conn,
    Host,
    Receiver,
    Stream,
    stream_abandon,
    stream_cut,
    stream_drop_request,
    stream_ended,
    stream_opened,
    stream_unsent,
)

cdef enum:
    GOOD_FAITH = 256 << 10   # bytes that every call is thought to have moved
    RELIEF = 16              # the part of the limit that is made free, so that this is seldom done
    AT_ONCE = 32             # calls that are found in one look at all of them

cdef double SECOND = 1e9
cdef double WORTH_NAMING = 1.0

cdef struct Debtor:
    Stream *stream
    double debt


# ---------------------------------------------------------------------------------------------------------------------
# Who owes

cdef inline double weighed(size_t owed, int64_t for_ns, size_t moved) noexcept nogil:
    return <double>owed * (<double>for_ns / SECOND) / <double>(moved + GOOD_FAITH)


cdef double debt_of(const Stream *stream) noexcept nogil:
    cdef int64_t now = stream.conn.host.now_ns
    cdef const Receiver *receiver = &stream.receiver
    cdef const Outgoing *message = <const Outgoing *>stream.sender.outgoing.first
    cdef double debt = 0
    if receiver.state == RECEIVING_MESSAGE:
        debt += weighed(receiver.room, now - receiver.begun_ns, receiver.received)
    if message != NULL and stream.sender.waits_ns:
        debt += weighed(stream.sender.unsent, now - stream.sender.waits_ns, message.size - message.left)
    return debt


cdef int find_debtors(const Host *host, Debtor *worst) noexcept nogil:
    # up to AT_ONCE of them, who owes most first; their number
    cdef const Conn *conn = host.connections.first
    cdef Stream *stream
    cdef double debt
    cdef int count = 0
    cdef int at
    while conn != NULL:
        stream = conn.open.first if account_owed(&conn.account) else NULL
        while stream != NULL:
            debt = debt_of(stream)
            if debt >= WORTH_NAMING and (count < AT_ONCE or debt > worst[count - 1].debt):
                at = count if count < AT_ONCE else AT_ONCE - 1
                while at > 0 and worst[at - 1].debt < debt:
                    worst[at] = worst[at - 1]
                    at -= 1
                worst[at].stream = stream
                worst[at].debt = debt
                count = min(count + 1, <int>AT_ONCE)
            stream = stream.next
        conn = conn.next
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Who holds

cdef Conn *greediest(const Host *host) noexcept nogil:
    cdef Conn *found = host.connections.first
    cdef Conn *conn = found
    while conn != NULL:
        if conn.account.total > found.account.total:
            found = conn
        conn = conn.next
    return found


cdef inline size_t held(const Stream *stream) noexcept nogil:
    return stream.receiver.charge.bytes * (stream.receiver.charge.account != NULL) + stream.queued + (
        stream.executed.bytes * (stream.executed.account != NULL)) + stream_unsent(stream)


cdef Stream *largest(const Conn *conn) noexcept nogil:
    cdef Stream *found = NULL
    cdef Stream *stream = conn.open.first
    cdef size_t most = 0
    while stream != NULL:
        if held(stream) > most:
            most = held(stream)
            found = stream
        stream = stream.next
    return found


# ---------------------------------------------------------------------------------------------------------------------

cdef void stream_evict(Stream *stream) noexcept nogil:
    cdef const Host *host = stream.conn.host
    stream_abandon(stream, NGHTTP2_CANCEL)
    if stream_ended(stream) or stream_opened(stream):
        # a status would have to wait behind what the peer does not take
        stream_cut(stream, NGHTTP2_ENHANCE_YOUR_CALM)
        return
    # without what it holds now: that is less than the limit already if others have been evicted before this one
    stream_refuse(stream, STATUS_RESOURCE_EXHAUSTED, "SERVER_FULL", format_text(
        "the requests and answers that the server held had more bytes than its limit of %zu", host.account.limit))
    stream_drop_request(stream)


cdef inline size_t evictable(const Host *host) noexcept nogil:
    # Without what jobs hold that run for calls which are over: no eviction gives that back, only their end.
    return host.account.total - (host.thread_pool.departed.total if host.thread_pool != NULL else 0)


cdef void host_relieve(Host *host) noexcept nogil:
    cdef size_t enough = host.account.limit - host.account.limit // RELIEF
    cdef Debtor debtors[AT_ONCE]
    cdef size_t half
    cdef Stream *stream
    cdef Conn *conn
    cdef int count = AT_ONCE
    cdef int i
    if not account_exceeded(&host.account) or evictable(host) <= enough:
        return
    host.others_ran = True
    while evictable(host) > enough and count == AT_ONCE:
        count = find_debtors(host, debtors)
        for i in range(count):
            if evictable(host) > enough:
                stream_evict(debtors[i].stream)
    while evictable(host) > enough:
        conn = greediest(host)
        if conn == NULL:
            return
        half = conn.account.total // 2
        stream = largest(conn)
        while stream != NULL and evictable(host) > enough and conn.account.total > half:
            stream_evict(stream)
            stream = largest(conn)
        if stream == NULL:
            return
