# The sockets of connections, for the thread that serves them, within the front.

from libc.stdint cimport uint32_t

from inferd._native.transport.io cimport Io, Socket, Source

# The socket can be read or written, or has failed: what a Source calls.
cdef void socket_ready(Source *source, uint32_t events) noexcept nogil
# Write until all is written, the socket is full, or it is the turn of others.
cdef void socket_flush(Socket *socket) noexcept nogil
# The peer is gone, or must go: the owner closes the socket.
cdef void socket_leave(Socket *socket) noexcept nogil
# At the end of a round, when no descriptor that was reported refers to them.
cdef void sockets_free_left(Io *io) noexcept nogil


# Bytes of TLS that are not written yet.
cdef inline size_t encrypted(const Socket *socket) noexcept nogil:
    return socket.tls.encrypted.size if socket.tls != NULL else 0
