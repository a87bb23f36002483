# Request messages: from the bytes of a stream to the service of the call.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from _native.transport.stream cimport Stream

# Bytes of the call's body have come; `last`: in a frame behind which there will be no more.
cdef void stream_receive(Stream *stream, const uint8_t *data, size_t size, bint last) noexcept nogil
# The client sends no more.
cdef void stream_half_closed(Stream *stream) noexcept nogil
# Give back the oldest received message, and with it the peer's credit for more. The one message of a call stays charged
# until the call is answered.
cdef void stream_drop_message(Stream *stream) noexcept nogil
