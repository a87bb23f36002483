# Request messages: from the bytes of a stream to the service of the call.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from inferd._native.transport.stream cimport Stream

# Process bytes of the call's body; `last`: they are in the last frame.
cdef void stream_receive(Stream *stream, const uint8_t *data, size_t size, bint last) noexcept nogil
# The client has half-closed the stream.
cdef void stream_half_closed(Stream *stream) noexcept nogil
# Give back the oldest received message, and with it the peer's flow control credit. The one message of a unary call
# stays charged until the call is answered.
cdef void stream_drop_message(Stream *stream) noexcept nogil
