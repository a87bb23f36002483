# What takes too long. A request, or a message of a stream of requests, may take Host.receive_ns to arrive and more for
# what of it has come, see expiry.pyx; a slower peer has the call ended, within headers the connection. A response may
# take Host.send_ns in the same way until it is taken. Calls that have not begun to run at the client's deadline end,
# and the service of others is told (Service.late).

from _native.transport.stream cimport Conn, Stream

# Look at the stream when the first of this may be so, whatever happens until then. Only what makes something due that
# was not, or sooner, need say so.
cdef void stream_watch(Stream *stream) noexcept nogil
# At the end of a round: the same for the calls that have begun in it and are not complete, or do not run.
cdef void conn_watch(Conn *conn) noexcept nogil
cdef void conn_watch_answers(Conn *conn) noexcept nogil

# After output was asked for, or could not be: the same for the calls whose answers have begun to wait for the peer.
cdef inline void conn_collected(Conn *conn) noexcept nogil:
    if conn.answered:
        conn.answered = False
        if conn.unsent:
            conn_watch_answers(conn)
