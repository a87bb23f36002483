# The quota of a client: what all its connections may use together (its limit of connections is enforced in
# server/front/connection_limits.py). Each function returns whether it has refused the call, and says so to the client.

from libc.stddef cimport size_t

from inferd._native.transport.client cimport Client
from inferd._native.transport.ledger cimport account_exceeded
from inferd._native.transport.stream cimport Stream, stream_ended

# The headers of a call are complete: are more calls of its client open than may be?
cdef inline bint quota_refuses_call(Stream *stream) noexcept nogil:
    cdef const Client *client = stream.conn.client
    if client == NULL or client.calls <= client.max_calls:
        return False
    refuse_call(stream)
    return True


# More bytes are charged to the connection of a call: are those of its client more than may be?
cdef inline bint quota_refuses_bytes(Stream *stream) noexcept nogil:
    cdef const Client *client = stream.conn.client
    if client == NULL or not account_exceeded(&client.account) or stream_ended(stream):
        return False
    refuse_bytes(stream)
    return True

# A call is a stream: count it among those of its client, until it is closed, unless there are as many as may be.
cdef bint quota_refuses_stream(Stream *stream) noexcept nogil
# A message of `size` bytes is announced: is it alone more than its client may have?
cdef bint quota_refuses_message(Stream *stream, size_t size) noexcept nogil

cdef void refuse_call(Stream *stream) noexcept nogil
cdef void refuse_bytes(Stream *stream) noexcept nogil
