# Ends transfers and calls that take too long, and charges the output that waits for the socket:
# * A request, or a message of a stream of requests, that does not arrive within Host.receive_ns; bytes that have come
#   add time (see expiry.pyx). The call ends; if its headers are late, the connection ends.
# * A response that flow control holds back and the peer does not take within Host.send_ns, computed in the same way.
#   Framed output that the socket does not take has the same time; then the connection ends. All framed output of a
#   connection together has one charge, Conn.framed, as long as some of it waits for the socket.
# * A call that has not begun to run at the client's deadline. A running call is left to its service, which Service.late
#   tells of the deadline.

from libc.stddef cimport size_t

from inferd._native.transport.stream cimport Conn, Stream

# Set the stream's timer to the earliest of these times. Call this when something new becomes due, or something becomes
# due sooner; other events need no call.
cdef void stream_watch(Stream *stream) noexcept nogil
# Output of the connection waits for the socket: `handed` bytes that have left conn.output, and all that are still
# there. Sets Conn.framed to the memory that they keep alive and `beside` bytes more, such as those in the kernel's
# queue; releases it when nothing waits any more (`handed` is 0, and there is no output). Call this whenever that
# changes.
cdef void conn_output_waits(Conn *conn, size_t handed, size_t beside) noexcept nogil
# At the end of a round: stream_watch for the calls that began in it and are not complete, or do not run.
cdef void conn_watch(Conn *conn) noexcept nogil
cdef void conn_watch_responses(Conn *conn) noexcept nogil

# After an attempt to collect output: stream_watch for the calls whose responses now wait for the peer.
cdef inline void conn_collected(Conn *conn) noexcept nogil:
    if conn.responded:
        conn.responded = False
        if conn.unsent:
            conn_watch_responses(conn)
