"""Eviction: when the server holds too much, it ends calls of the clients that hold most and progress least.

A full server makes no request wait. It frees at once what exceeds the limit, from the client whose calls owe most
together. A call owes the bytes of a request that was begun and does not come, and of responses that the peer does not
read. A debt is weighted by its age and by the progress since, so a trickle helps little, and a call that has just begun
owes nothing. The debts of a client add up over all its connections, so many small ones count as much as a large one. If
no client owes much, there are simply too many requests. Then the server ends calls of the client that holds most: on
that of its connections that holds most, the largest call first, and of equal ones the latest.

Framed output cannot be taken back from a stream: if it is the largest debt, its connection ends.

A client that exceeds its own limit of bytes loses the call that does so (`quota.pyx`). A peer that asks for too much
work, or whose headers come too slowly, loses its connection (`conn_calm`).
"""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport strlen

from inferd._native.refusal cimport REFUSAL_SERVER_BYTES
from inferd._native.text cimport format_text
from inferd._native.transport.call_state cimport RECEIVED_ALL
from inferd._native.transport.closing cimport CONN_DRAINING, CONN_PARTING, CONN_SHUT, closing_break, closing_move
from inferd._native.transport.errorinfo cimport stream_refuse
from inferd._native.transport.ledger cimport Account, account_exceeded, account_owed, charge_release
from inferd._native.transport.nghttp2 cimport (
    NGHTTP2_CANCEL,
    NGHTTP2_ENHANCE_YOUR_CALM,
    NGHTTP2_FLAG_NONE,
    nghttp2_session_get_last_proc_stream_id,
    nghttp2_submit_goaway,
)
from inferd._native.transport.outgoing cimport Outgoing, output_clear
from inferd._native.transport.stream cimport (
    Conn,
    Host,
    Receiver,
    Stream,
    mark_dirty,
    stream_abandon,
    stream_cut,
    stream_drop_request,
    stream_ended,
    stream_opened,
    stream_unsent,
)

cdef enum:
    GOOD_FAITH = 256 << 10   # bytes credited to every call, as if it had moved them
    RELIEF = 16              # eviction frees 1 / RELIEF of the limit, so that it runs seldom
    AT_ONCE = 32             # debtors that one pass over all calls finds

cdef double SECOND = 1e9
cdef double WORTH_NAMING = 1.0

cdef struct Debtor:
    Conn *conn
    Stream *stream           # NULL: the connection itself, by output that is framed
    double debt


# ---------------------------------------------------------------------------------------------------------------------
# Debts

cdef inline double weighed(size_t owed, int64_t for_ns, size_t moved) noexcept nogil:
    return <double>owed * (<double>for_ns / SECOND) / <double>(moved + GOOD_FAITH)


cdef double debt_of(const Stream *stream) noexcept nogil:
    cdef int64_t now = stream.conn.host.now_ns
    cdef const Receiver *receiver = &stream.receiver
    cdef const Outgoing *message = <const Outgoing *>stream.sender.outgoing.first
    cdef double debt = 0
    if receiver.charge.account != NULL and receiver.state != RECEIVED_ALL:
        debt += weighed(receiver.charge.bytes, now - receiver.begun_ns, receiver.received)
    if message != NULL and stream.sender.waits_ns:
        debt += weighed(stream.sender.unsent, now - stream.sender.waits_ns, message.size - message.left)
    return debt


cdef inline double debt_of_output(const Conn *conn) noexcept nogil:
    if conn.waits_ns == 0 or conn.framed.account == NULL:
        return 0
    return weighed(conn.framed.bytes, conn.host.now_ns - conn.waits_ns, <size_t>(conn.taken - conn.waits_from))


cdef inline double *debt_with(Conn *conn) noexcept nogil:
    # the sum of the client's debts, to which those of the connection are added
    return &conn.client.debt if conn.client != NULL else &conn.debt


cdef double *most_indebted(Host *host) noexcept nogil:
    # the highest sum of a client; NULL: no client owes WORTH_NAMING
    cdef Conn *conn = host.connections.first
    cdef const Stream *stream
    cdef double *found = NULL
    while conn != NULL:
        debt_with(conn)[0] = 0
        conn = conn.next
    conn = host.connections.first
    while conn != NULL:
        if account_owed(&conn.account):
            debt_with(conn)[0] += debt_of_output(conn)
            stream = conn.open.first
            while stream != NULL:
                debt_with(conn)[0] += debt_of(stream)
                stream = stream.next
            if debt_with(conn)[0] >= WORTH_NAMING and (found == NULL or debt_with(conn)[0] > found[0]):
                found = debt_with(conn)
        conn = conn.next
    return found


cdef int add_debtor(Debtor *worst, int count, Conn *conn, Stream *stream, double debt) noexcept nogil:
    # keep `worst` sorted, the largest debt first; returns the number of entries
    cdef int at
    if debt <= 0 or (count == AT_ONCE and debt <= worst[count - 1].debt):
        return count
    at = count if count < AT_ONCE else AT_ONCE - 1
    while at > 0 and worst[at - 1].debt < debt:
        worst[at] = worst[at - 1]
        at -= 1
    worst[at].conn = conn
    worst[at].stream = stream
    worst[at].debt = debt
    return min(count + 1, <int>AT_ONCE)


cdef int find_debtors(Host *host, const double *together, Debtor *worst) noexcept nogil:
    # the largest debts of that client, up to AT_ONCE; returns their number
    cdef Conn *conn = host.connections.first
    cdef Stream *stream
    cdef int count = 0
    while conn != NULL:
        if debt_with(conn) == together and account_owed(&conn.account):
            count = add_debtor(worst, count, conn, NULL, debt_of_output(conn))
            stream = conn.open.first
            while stream != NULL:
                count = add_debtor(worst, count, conn, stream, debt_of(stream))
                stream = stream.next
        conn = conn.next
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Holders

cdef inline const Account *account_with(Conn *conn) noexcept nogil:
    return &conn.client.account if conn.client != NULL else &conn.account


cdef Conn *greediest(const Host *host) noexcept nogil:
    # the connection that holds most, of the client that holds most
    cdef Conn *found = host.connections.first
    cdef Conn *conn = found
    cdef const Account *most
    cdef const Account *account
    while conn != NULL:
        account = account_with(conn)
        most = account_with(found)
        if account.total > most.total or (account == most and conn.account.total > found.account.total):
            found = conn
        conn = conn.next
    return found


cdef inline size_t held(const Stream *stream) noexcept nogil:
    return stream.receiver.charge.bytes * (stream.receiver.charge.account != NULL) + stream.queued + (
        stream.with_handler.bytes * (stream.with_handler.account != NULL)) + stream_unsent(stream)


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
        # a status would have to wait behind bytes that the peer does not take
        stream_cut(stream, NGHTTP2_ENHANCE_YOUR_CALM)
        return
    # The text does not say what the server holds now: earlier evictions may have brought that below the limit.
    stream_refuse(stream, REFUSAL_SERVER_BYTES, format_text(
        "the requests and responses that the server held had more bytes than its limit of %zu", host.account.limit))
    stream_drop_request(stream)


cdef void conn_evict(Conn *conn) noexcept nogil:
    cdef Stream *stream = conn.open.first
    closing_break(&conn.state)
    conn.stalled = True
    while stream != NULL:
        stream_abandon(stream, NGHTTP2_CANCEL)
        stream_cut(stream, NGHTTP2_CANCEL)
        stream = stream.next
    output_clear(&conn.output)
    charge_release(&conn.framed)
    conn.waits_ns = 0
    mark_dirty(conn)


cdef void conn_calm(Conn *conn, const char *debug) noexcept nogil:
    cdef int32_t last
    if conn.session == NULL or conn.state >= CONN_PARTING:
        return
    last = conn.last_served if conn.state == CONN_DRAINING else nghttp2_session_get_last_proc_stream_id(conn.session)
    closing_move(&conn.state, CONN_PARTING)
    if nghttp2_submit_goaway(conn.session, NGHTTP2_FLAG_NONE, last, NGHTTP2_ENHANCE_YOUR_CALM,
                             <const uint8_t *>debug, strlen(debug)) != 0:
        closing_break(&conn.state)
    mark_dirty(conn)


cdef inline void evict(const Debtor *debtor) noexcept nogil:
    if debtor.stream == NULL or debtor.conn.state >= CONN_SHUT:
        conn_evict(debtor.conn)
    else:
        stream_evict(debtor.stream)


cdef inline size_t evictable(const Host *host) noexcept nogil:
    # Without the bytes held by jobs of calls that are over: only the end of the job frees them, no eviction does.
    return host.account.total - (host.thread_pool.departed.total if host.thread_pool != NULL else 0)


cdef void relieve_of_debtors(Host *host, size_t enough) noexcept nogil:
    cdef Debtor debtors[AT_ONCE]
    cdef double *together
    cdef double owed, half
    cdef int count, i
    while evictable(host) > enough:
        together = most_indebted(host)
        if together == NULL:
            return
        count = find_debtors(host, together, debtors)
        owed = together[0]
        half = owed / 2
        for i in range(count):
            if evictable(host) <= enough or owed < half:
                break
            owed -= debtors[i].debt
            evict(&debtors[i])


cdef void relieve_of_holders(Host *host, size_t enough) noexcept nogil:
    cdef size_t half
    cdef Stream *stream
    cdef Conn *conn
    while evictable(host) > enough:
        conn = greediest(host)
        if conn == NULL or conn.account.total == 0:
            return
        half = conn.account.total // 2
        stream = largest(conn)
        while stream != NULL and evictable(host) > enough and conn.account.total > half:
            stream_evict(stream)
            stream = largest(conn)
        if stream == NULL and evictable(host) > enough:
            if conn.framed.account == NULL:
                return
            conn_evict(conn)


cdef void host_relieve(Host *host) noexcept nogil:
    cdef size_t enough = host.account.limit - host.account.limit // RELIEF
    if not account_exceeded(&host.account) or evictable(host) <= enough:
        return
    relieve_of_debtors(host, enough)
    relieve_of_holders(host, enough)
