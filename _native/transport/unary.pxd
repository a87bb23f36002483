# Unary methods that run without Python: one of the two kinds of service.

from libc.stdint cimport int64_t, uint8_t

from _native.memory.resource cimport Block
from _native.transport.stream cimport Conn, Service, Stream

cdef struct Unary:
    # Method.context of such a method
    void *context
    # Called when the client has half-closed, with the one request message: a reference to `block`, which is taken over,
    # and its bytes. stream.forwarded is behind the message. The function answers by stream_reply or stream_fail, now or
    # later on the same thread. `timeout_ns` is the client's, -1 for none. The function may set stream.call, which
    # `cancel` gets if the answer is not wanted any more.
    void (*run)(void *context, Stream *stream, Block *block, const uint8_t *data, size_t size,
                int64_t timeout_ns) noexcept nogil
    void (*cancel)(void *call) noexcept nogil
    # The block for a large message that begins with these bytes; NULL: ordinary memory. May end the call. NULL: none.
    Block *(*place)(void *context, Stream *stream, const uint8_t *head, size_t head_size, size_t size) noexcept nogil

cdef Service UNARY

# Run those parked calls of this connection that may run now.
cdef void calls_resume(Conn *conn) noexcept nogil

# What native calls have in common, streams too: which headers they need; rights and forwarded headers, when the
# headers are complete (False: the call has ended); and the next message: a reference to its block and its bytes, with
# stream.forwarded behind them (NULL: no memory).
cdef bint call_wants(Stream *stream, const uint8_t *name, size_t size) noexcept nogil
cdef bint call_admit(Stream *stream) noexcept nogil
cdef Block *message_take(Stream *stream, const uint8_t **data, size_t *size) noexcept nogil
