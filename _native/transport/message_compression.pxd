# Where messages are compressed and inflated: at once when they are small, else on a worker.

from _native.transport.compression cimport Result
from _native.transport.outgoing cimport Outgoing
from _native.transport.stream cimport Incoming, Stream, deflated_fn, inflated_fn
from _native.transport.workers cimport Job

# Inflate the message. True: it has been done at once, `result` is set. False: `then` is called with the message, and
# until then stream.inflating is set.
cdef bint message_inflate(Stream *stream, Incoming *message, Result *result, inflated_fn then) noexcept nogil
# Compress the message as `stream_compress` has chosen; the same with `deflated` and sender.deflating.
cdef bint message_deflate(Stream *stream, Outgoing *plain, Outgoing **deflated, deflated_fn then) noexcept nogil
# What a worker has of a stream (stream.inflating, sender.deflating) is not wanted any more: it is dropped when it comes
# back, without calling anybody, and its charge is released now. Nothing when there is no job.
cdef void compression_abandon(Job **job) noexcept nogil
