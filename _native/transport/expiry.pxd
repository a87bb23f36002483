# Ends what takes too long:
# * A request, or a message of a stream of requests, that does not arrive within Host.receive_ns, and more time for the
#   bytes that have come (see expiry.pyx). The call ends; if it is the headers that are late, the connection does.
# * A response that the peer does not take within Host.send_ns, computed in the same way. This is for what flow control
#   holds back. What is framed, and the socket does not take, has the same time; then the connection ends.
# * A call that has not begun to run at the client's deadline. A call that runs is the service's: Service.late tells it.

from libc.stddef cimport size_t

from _native.transport.stream cimport Conn, Stream

# Set the stream's timer to the earliest of these times. To be called when something becomes due that was not, or
# becomes due sooner; other events need no call.
cdef void stream_watch(Stream *stream) noexcept nogil
# Of the connection's output, `handed` bytes that have left conn.output, and all that are still there, wait for the
# socket; `beside` bytes are behind that, as in the kernel's queue. To be called whenever that changes; 0 and no output:
# nothing waits any more.
cdef void conn_waits(Conn *conn, size_t handed, size_t beside) noexcept nogil
# At the end of a round: the same for the calls that began in it and are not complete, or do not run.
cdef void conn_watch(Conn *conn) noexcept nogil
cdef void conn_watch_answers(Conn *conn) noexcept nogil

# After output was collected, or could not be: the same for the calls whose responses now wait for the peer.
cdef inline void conn_collected(Conn *conn) noexcept nogil:
    if conn.answered:
        conn.answered = False
        if conn.unsent:
            conn_watch_answers(conn)
