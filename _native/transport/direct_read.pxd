# Direct reads: where the bytes of a connection are read to.

from libc.stdint cimport uint8_t

from _native.memory.resource cimport Block
from _native.transport.stream cimport Conn

cdef struct ReadTarget:
    # where a read goes
    uint8_t *data
    size_t size
    Block *block             # holds `data`, without a reference for it; NULL: it is the buffer of all connections
    size_t behind            # bytes that may be read along with it, to that buffer

# Where the next read from the connection's socket goes: to the place of a message, or to `buffer`.
cdef ReadTarget conn_read_target(const Conn *conn, uint8_t *buffer) noexcept nogil
# So many bytes have been read to there, those beyond its size to `buffer`: process them. Nothing has happened to the
# connection since the target was asked for.
cdef void conn_received(Conn *conn, const ReadTarget *target, uint8_t *buffer, size_t size) noexcept nogil
# Read from a socket that does not block, and process what comes, until there is no more or the other connections should
# have their turn. `buffer` is that of all connections, of `capacity` bytes.
cdef void conn_read(Conn *conn, int fd, uint8_t *buffer, size_t capacity) noexcept nogil
