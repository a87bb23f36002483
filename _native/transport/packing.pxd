# Where messages are compressed and inflated: at once when they are small, else on a worker.

from _native.transport.compression cimport Result
from _native.transport.outgoing cimport Outgoing
from _native.transport.stream cimport Incoming, Stream, deflated_fn, inflated_fn

# Inflate the message. True: it has been done at once, `result` is set. False: `then` is called with the message, and
# until then stream.inflating is set.
cdef bint pack_inflate(Stream *stream, Incoming *message, Result *result, inflated_fn then) noexcept nogil
# Compress the message as `stream_compress` has chosen; the same with `packed` and stream.deflating.
cdef bint pack_deflate(Stream *stream, Outgoing *plain, Outgoing **packed, deflated_fn then) noexcept nogil
# The stream ends: what a worker has of it is dropped when it comes back, without calling anybody.
cdef void pack_abandon(Stream *stream) noexcept nogil
