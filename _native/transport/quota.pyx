"""The quota of a client: calls, streams and bytes beyond it are refused, with a text that names the client."""

from inferd._native.refusal cimport REFUSAL_CLIENT_LIMIT
from inferd._native.text cimport format_text
from inferd._native.transport.client cimport Client
from inferd._native.transport.errorinfo cimport stream_refuse
from inferd._native.transport.stream cimport Stream, stream_drop_request


cdef void refuse_call(Stream *stream) noexcept nogil:
    cdef const Client *client = stream.conn.client
    stream_refuse(stream, REFUSAL_CLIENT_LIMIT, format_text(
        "client %s has %u calls in flight, which is more than its limit of %u", client.name, client.calls,
        client.max_calls))


cdef bint quota_refuses_stream(Stream *stream) noexcept nogil:
    cdef Client *client = stream.conn.client
    if client == NULL:
        return False
    if client.streams < client.max_streams:
        client.streams += 1
        stream.lasting = True
        return False
    stream_refuse(stream, REFUSAL_CLIENT_LIMIT, format_text(
        "client %s has %u streams in flight, its limit is %u", client.name, client.streams, client.max_streams))
    return True


cdef bint quota_refuses_message(Stream *stream, size_t size) noexcept nogil:
    cdef const Client *client = stream.conn.client
    if client == NULL or size <= client.account.limit:
        return False
    stream_refuse(stream, REFUSAL_CLIENT_LIMIT, format_text(
        "client %s announces a message of %zu bytes, which is more than its limit of %zu", client.name, size,
        client.account.limit))
    return True


cdef void refuse_bytes(Stream *stream) noexcept nogil:
    cdef const Client *client = stream.conn.client
    stream_refuse(stream, REFUSAL_CLIENT_LIMIT, format_text(
        "client %s has %zu bytes in flight, which is more than its limit of %zu", client.name, client.account.total,
        client.account.limit))
    stream_drop_request(stream)
