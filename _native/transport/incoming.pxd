# Request messages: from the bytes of a stream to the method that serves the call.

from libc.stdint cimport uint8_t

from _native.transport.stream cimport Conn, Host, Stream

# Bytes of the call's body have come; `last`: of the DATA frame that ends it.
cdef void stream_receive(Stream *stream, const uint8_t *data, size_t size, bint last) noexcept nogil
# The client sends no more.
cdef void stream_half_closed(Stream *stream) noexcept nogil
# Give back the oldest received message, and with it the peer's credit for more.
cdef void stream_drop_message(Stream *stream) noexcept nogil
# The call has ended: what has come of its message is of no use any more.
cdef void stream_drop_request(Stream *stream) noexcept nogil
# Run what of this connection's parked calls may run now.
cdef void calls_resume(Conn *conn) noexcept nogil
# The same for every connection that waits for the host's budget, one call of each in turn.
cdef void calls_resume_all(Host *host) noexcept nogil


cdef inline void end_round(Host *host) noexcept nogil:
    # native calls have been made
    if host.after_receive != NULL:
        host.after_receive(host.after_context)
