# What peers may make the server hold: answers that they do not read, requests that they do not finish.
#
# Answers. While more than UNSENT_LIMIT bytes of answers wait on one connection, its further calls are parked. The same
# holds for all connections together and Host.unsent_limit. What a call will answer is not known before it has run: it
# counts with the size of the largest recent answer. Who has taken an answer before may always have one call run, so
# peers that never read starve only each other.
#
# Requests. Bytes of messages count from their arrival until somebody takes the message (Host.held, Host.held_limit).
# Requests that are incomplete after a read stand in a list; when there is no more room, the oldest of them goes, so
# that who sends slowly loses before who sends now.

from _native.chain cimport chain_push, chain_remove
from _native.list cimport list_append, list_remove
from _native.transport.stream cimport Conn, Host, Stream

cdef enum:
    UNSENT_LIMIT = 4 << 20           # bytes of answers
    EXPECTED_FADES = 1024            # answers after which a large one has mostly been forgotten


cdef inline void reserve(Stream *stream) noexcept nogil:
    # the call runs: its answer is to be expected
    cdef Host *host = stream.conn.host
    stream.reserved = max(host.expected, <size_t>1)
    host.reserved += stream.reserved
    stream.conn.running += 1


cdef inline void release(Stream *stream) noexcept nogil:
    # the call runs no more: its answer is there, or will never be
    if stream.reserved:
        stream.conn.host.reserved -= stream.reserved
        stream.conn.running -= 1
        stream.reserved = 0


cdef inline void learn(Host *host, size_t size) noexcept nogil:
    # what to expect of the next answer
    host.expected = max(size, host.expected - host.expected // EXPECTED_FADES)


cdef inline bint host_has_room(const Host *host) noexcept nogil:
    cdef size_t held = host.unsent + host.reserved
    return host.unsent_limit == 0 or held == 0 or held + host.expected <= host.unsent_limit


cdef inline bint may_run(const Conn *conn) noexcept nogil:
    if conn.unsent > UNSENT_LIMIT:
        return False
    return host_has_room(conn.host) or (conn.reads and conn.unsent == 0 and conn.running == 0)


cdef inline void wait_for_host(Conn *conn) noexcept nogil:
    if not conn.waiting:
        conn.waiting = True
        chain_push(&conn.host.waiting, conn)


cdef inline void wait_no_more(Conn *conn) noexcept nogil:
    if conn.waiting:
        conn.waiting = False
        chain_remove(&conn.host.waiting, conn)


cdef inline void park(Stream *stream) noexcept nogil:
    chain_push(&stream.conn.parked, stream)
    wait_for_host(stream.conn)


cdef inline void unpark(Stream *stream) noexcept nogil:
    # if it is parked
    chain_remove(&stream.conn.parked, stream)


# --- requests

cdef inline void hold(Stream *stream, size_t size) noexcept nogil:
    # bytes of a message have come
    stream.held += size
    stream.conn.host.held += size
    if stream.conn.client != NULL:
        stream.charged += size
        stream.conn.client.bytes += size


cdef inline void let_go(Stream *stream, size_t size) noexcept nogil:
    # a message has been taken, or is gone
    stream.held -= size
    stream.conn.host.held -= size
    if stream.conn.client != NULL:
        stream.charged -= size
        stream.conn.client.bytes -= size


cdef inline void hand_over(Stream *stream) noexcept nogil:
    # the one message is taken by who answers the call: until then the client is charged for it
    stream.conn.host.held -= stream.held
    stream.held = 0


cdef inline bint holds_too_much(const Host *host) noexcept nogil:
    return host.held_limit != 0 and host.held > host.held_limit


cdef inline void partial_join(Stream *stream) noexcept nogil:
    if stream.partial.stream == NULL:
        stream.partial.stream = stream
        list_append(&stream.conn.host.partials, &stream.partial)


cdef inline void partial_leave(Stream *stream) noexcept nogil:
    if stream.partial.stream != NULL:
        stream.partial.stream = NULL
        list_remove(&stream.conn.host.partials, &stream.partial)
