# Ends calls when the server holds more bytes than it may, and connections whose peers ask for too much.

from inferd._native.transport.stream cimport Conn, Host, Stream

# If the server holds more than it may, end calls until it holds clearly less. Call this between rounds, when no
# response is being delivered and no bytes are being received. Other connections than the current one may then have
# output.
cdef void host_relieve(Host *host) noexcept nogil
# End this call because of what it holds.
cdef void stream_evict(Stream *stream) noexcept nogil
# The peer does not read the framed bytes: discard the connection's output, and end the connection with its calls.
cdef void conn_evict(Conn *conn) noexcept nogil
# Send GOAWAY ENHANCE_YOUR_CALM and finish the connection.
cdef void conn_calm(Conn *conn, const char *debug) noexcept nogil
