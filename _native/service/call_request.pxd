# The request of a native call.

from libc.stdint cimport int64_t, uint8_t

from inferd._native.memory.resource cimport Block, block_share
from inferd._native.request.record cimport Record
from inferd._native.request.request cimport Request
from inferd._native.service.submission cimport Submission, submit_call
from inferd._native.transport.stream cimport Stream


cdef inline void submit_for_call(Submission *submission, Request *request, const Stream *stream, Block *block,
                                 const uint8_t *data, size_t size, int64_t timeout_ns) noexcept nogil:
    # Submit a message of this call, see submit_call. The caller has set the request's sink.
    request.origin.user = stream.conn.user
    request.origin.identity = stream.conn.identity
    request.origin.client = stream.conn.client.number if stream.conn.client != NULL else 0
    submit_call(submission, request, block, data, size, stream.forwarded_size, timeout_ns, stream.caller,
                &stream.context)
    if request.record != NULL and stream.conn.peer != NULL:
        (<Record *>request.record).peer = block_share(stream.conn.peer)
