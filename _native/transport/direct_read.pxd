# Direct reads: bytes of a large message are read from the socket into the block where they stay.

from libc.stdint cimport int64_t, uint8_t

from inferd._native.memory.resource cimport Block
from inferd._native.transport.stream cimport Conn, Host
from inferd._native.transport.tls cimport Tls

# A turn of a connection ends after so many bytes, or some time: a message has its cost however small it is, and so has
# a record of TLS. Connections that are ready together share ROUND_NS.
cdef enum:
    READ_AT_MOST = 512 << 10
    LEAST_PORTION = 1 << 10
    ROUND_NS = 1_000_000
    LONGEST_TURN_NS = 200_000
    SHORTEST_TURN_NS = 20_000

# The time that begins now for one of so many connections.
cdef Turn turn_of(const Host *host, int ready) noexcept nogil

cdef struct Turn:
    int64_t ns
    int64_t end_ns

cdef struct ReadTarget:
    # the destination of a read
    uint8_t *data
    size_t size
    Block *block             # contains `data`; holds no reference. NULL: the common buffer of all connections
    size_t behind            # bytes after `size` that the same read may put into that buffer

# The destination of the next read from the connection's socket: the block of a message, or `buffer`.
cdef ReadTarget conn_read_target(const Conn *conn, uint8_t *buffer) noexcept nogil
# Process `size` bytes that were read to the target; those beyond the target's size are in `buffer`. Nothing else
# may be read between conn_read_target and this call.
cdef void conn_received(Conn *conn, const ReadTarget *target, uint8_t *buffer, size_t size) noexcept nogil
# After a read: look at the clock, unless its `size` bytes are too few to matter.
cdef void turn_look(Host *host, ssize_t size) noexcept nogil
# Whether the turn goes on after `size` bytes have been processed, since `turn_look`. The connection's portion becomes
# the bytes that could be processed in a turn at their pace, at most `capacity`.
cdef bint turn_goes_on(Conn *conn, const Turn *turn, size_t size, size_t capacity) noexcept nogil
# Read from a non-blocking socket, and process the bytes, until there are no more or it is the turn of other
# connections. `buffer` is the common buffer, of `capacity` bytes, of which one read fills the connection's portion.
# False: the peer has closed its end, or the socket is broken.
cdef bint conn_read(Conn *conn, int fd, uint8_t *buffer, size_t capacity, Turn turn) noexcept nogil
# Decrypt the bytes that TLS has been fed with, and process them. False: the peer has ended TLS, or violated it.
cdef bint conn_decrypt(Conn *conn, Tls *tls, uint8_t *buffer, size_t capacity) noexcept nogil
