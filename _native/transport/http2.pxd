# A gRPC server connection without I/O: bytes in, calls and bytes out. It knows no socket, no clock and no Python.

from libc.stdint cimport uint8_t

from _native.transport.stream cimport Conn, Host

# Begin a session; False when there is no memory. The Conn is zeroed, and stays where it is until conn_close.
cdef bint conn_open(Conn *conn, Host *host, void *owner) noexcept nogil
# End every call and free the session.
cdef void conn_close(Conn *conn) noexcept nogil
# Process bytes of the peer; after all that come together, conn_end_round: the native calls that they made begin.
cdef void conn_receive(Conn *conn, const uint8_t *data, size_t size) noexcept nogil
cdef void conn_end_round(Conn *conn) noexcept nogil
# Frame what can be sent into conn.output, until that holds `limit` bytes.
cdef void conn_collect(Conn *conn, size_t limit) noexcept nogil
# The peer broke the protocol, or everything is said after conn_go_away.
cdef bint conn_finished(Conn *conn) noexcept nogil
# Ask the peer to open no more streams; then refuse further ones.
cdef void conn_announce_shutdown(Conn *conn) noexcept nogil
cdef void conn_go_away(Conn *conn, const char *debug) noexcept nogil
# Send a PING; its answer counts as any other byte of the peer (received_ns).
cdef void conn_ping(Conn *conn) noexcept nogil
# Send the peer away (GOAWAY ENHANCE_YOUR_CALM) and be finished.
cdef void conn_calm(Conn *conn, const char *debug) noexcept nogil
# End every call that is not answered yet with an error; the text is plain UTF-8.
cdef void conn_fail_calls(Conn *conn, int status, const char *details) noexcept nogil
