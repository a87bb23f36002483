# Turns: how long an I/O thread reads one connection before it reads others.
#
# A turn ends after some time, because a message has its cost however small it is, and so has a record of TLS: bytes do
# not measure it. The bytes of one read follow the pace of the connection, so that a read takes no longer than a turn.
# The pace is that of the bytes before, which may have been cheaper: MOST_PORTION bounds what that costs others.

from libc.stdint cimport int64_t

from inferd._native.transport.stream cimport Conn, Host, host_look

cdef enum:
    TURN_BYTES = 512 << 10   # at most
    LEAST_PORTION = 1 << 10  # bytes of a read, at least; fewer are not worth a look at the clock
    MOST_PORTION = 64 << 10
    ROUND_NS = 1_000_000     # shared by the connections that are ready together
    LONGEST_TURN_NS = 200_000
    SHORTEST_TURN_NS = 20_000

cdef struct Turn:
    int64_t ns               # its length
    int64_t end_ns
    int64_t read_ns          # the end of its last read; other threads move the host's time meanwhile

# The turn of one of so many connections that are ready; it begins now.
cdef inline Turn turn_of(const Host *host, int ready) noexcept nogil:
    cdef Turn turn
    turn.ns = min(max(ROUND_NS // max(ready, 1), SHORTEST_TURN_NS), LONGEST_TURN_NS)
    turn.read_ns = host.now_ns
    turn.end_ns = host.now_ns + turn.ns
    return turn

# Bytes have been read, and will be processed: their time begins.
cdef inline void turn_read(Turn *turn, Host *host, ssize_t size) noexcept nogil:
    if size >= LEAST_PORTION:
        host_look(host)
        turn.read_ns = host.now_ns

# `size` bytes have been processed. Returns whether the turn goes on. If they were a portion, the connection's next one
# is what could be processed in a turn at their pace.
cdef inline bint turn_goes_on(Conn *conn, const Turn *turn, size_t size, bint as_portion) noexcept nogil:
    cdef Host *host = conn.host
    cdef size_t pace
    if size < LEAST_PORTION:
        return True
    host_look(host)
    if as_portion:
        pace = size * <size_t>turn.ns // <size_t>max(host.now_ns - turn.read_ns, 1)
        conn.portion = min(max(pace, <size_t>LEAST_PORTION), <size_t>MOST_PORTION)
    return host.now_ns < turn.end_ns
