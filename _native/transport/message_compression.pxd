# Compression and inflation of messages: small ones at once, large ones on the thread pool.

from inferd._native.transport.compression cimport Result
from inferd._native.transport.outgoing cimport Outgoing
from inferd._native.transport.stream cimport Incoming, Stream, deflated_fn, inflated_fn
from inferd._native.transport.workers cimport Job

# Inflate the message. True: done, `result` is set. False: `then` will be called with the message, and until then
# stream.inflating is set.
cdef bint message_inflate(Stream *stream, Incoming *message, Result *result, inflated_fn then) noexcept nogil
# Compress the message as set by `stream_compress`. Returns as message_inflate, with `deflated` and sender.deflating.
cdef bint message_deflate(Stream *stream, Outgoing *plain, Outgoing **deflated, deflated_fn then) noexcept nogil
# Abandon the job of a stream (stream.inflating or sender.deflating), if there is one. Its charge is released now. The
# result is discarded when the worker returns it, without a callback.
cdef void compression_abandon(Job **job) noexcept nogil
