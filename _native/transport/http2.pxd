# A gRPC server connection without I/O: bytes in, calls and bytes out. It has no socket, no clock and no Python.

from libc.stdint cimport uint8_t

from inferd._native.transport.stream cimport Conn, Host

# Begin a session; False if there is no memory. The Conn is zeroed, and must not move until conn_close.
cdef bint conn_open(Conn *conn, Host *host, void *owner) noexcept nogil
# End every call and free the session.
cdef void conn_close(Conn *conn) noexcept nogil
# Process bytes of the peer. Call conn_end_round after all bytes that came together: it starts the new native calls.
cdef void conn_receive(Conn *conn, const uint8_t *data, size_t size) noexcept nogil
cdef void conn_end_round(Conn *conn) noexcept nogil
# Frame output into conn.output, until that holds `limit` bytes.
cdef void conn_collect(Conn *conn, size_t limit) noexcept nogil
# Whether nothing is left to send: the peer violated the protocol, or all is framed after conn_go_away.
cdef bint conn_finished(Conn *conn) noexcept nogil
# End the calls, when all output has been collected or no more can be; see closing.pxd for the states.
cdef void conn_shut(Conn *conn) noexcept nogil
# The owner has shut the socket for writing. False: it is too early for that.
cdef bint conn_linger(Conn *conn) noexcept nogil
# Ask the peer to open no more streams (announce); refuse further ones (go away). Repeated calls have no effect.
cdef void conn_announce_shutdown(Conn *conn) noexcept nogil
cdef void conn_go_away(Conn *conn, const char *debug) noexcept nogil
# Send a PING. Any byte of the peer counts as its answer (received_ns).
cdef void conn_ping(Conn *conn) noexcept nogil
# End every unanswered call with an error; the text is plain UTF-8.
cdef void conn_fail_calls(Conn *conn, const char *details) noexcept nogil
# End every unanswered call, because the peer has closed its end. Complete responses can still be collected.
cdef void conn_end_calls(Conn *conn) noexcept nogil
# Whether responses are being compressed, or wait for that.
cdef bint conn_compresses(const Conn *conn) noexcept nogil
