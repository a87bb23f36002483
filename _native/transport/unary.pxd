# Unary methods that run without Python: one of the two kinds of service.

from libc.stdint cimport int64_t, uint8_t

from inferd._native.memory.resource cimport Block
from inferd._native.transport.stream cimport Conn, Service, Stream

cdef struct Unary:
    # Method.context of such a method
    void *context
    # Runs the call when the client has half-closed. Takes over one reference to `block`, which contains the one request
    # message (`data`, `size`), and stream.forwarded behind it. Answers by stream_reply or stream_refuse, now or later
    # on the same thread. `timeout_ns` is the client's, -1 for none. May set stream.call, which `abandon` gets when the
    # response is no longer wanted.
    void (*run)(void *context, Stream *stream, Block *block, const uint8_t *data, size_t size,
                int64_t timeout_ns) noexcept nogil
    void (*abandon)(void *call) noexcept nogil
    # Does what Service.place does; may be NULL.
    Block *(*place)(void *context, Stream *stream, const uint8_t *head, size_t head_size, size_t size) noexcept nogil

cdef Service UNARY

# Run those parked calls of this connection that may run now.
cdef void calls_resume(Conn *conn) noexcept nogil

# The rest is for all native calls, streams too.
# Whether the call needs this header.
cdef bint call_wants(Stream *stream, const uint8_t *name, size_t size) noexcept nogil
# The headers are complete: check the rights, and set stream.forwarded. False: the call has ended.
cdef bint call_admit(Stream *stream) noexcept nogil
# Take the next message: its bytes, behind which those of stream.forwarded lie, and a reference to the block that
# contains both.
cdef Block *message_take(Stream *stream, const uint8_t **data, size_t *size) noexcept nogil
