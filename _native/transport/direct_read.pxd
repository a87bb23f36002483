# Direct reads: bytes of a large message are read from the socket into the block where they stay.

from libc.stdint cimport uint8_t

from inferd._native.memory.resource cimport Block
from inferd._native.transport.stream cimport Conn
from inferd._native.transport.tls cimport Tls
from inferd._native.transport.turn cimport Turn

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
# Read from a non-blocking socket, and process the bytes, until there are no more or it is the turn of other
# connections. `buffer` is the common buffer, of MOST_PORTION bytes at least. False: the peer has closed its end, or the
# socket is broken.
cdef bint conn_read(Conn *conn, int fd, uint8_t *buffer, Turn turn) noexcept nogil
# Decrypt the bytes that TLS has been fed with, and process them. False: the peer has ended TLS, or violated it.
cdef bint conn_decrypt(Conn *conn, Tls *tls, uint8_t *buffer, size_t capacity) noexcept nogil
