# The head of a call: its request headers.

from libc.stdint cimport uint32_t

from inferd._native.transport.nghttp2 cimport nghttp2_rcbuf, nghttp2_vec
from inferd._native.transport.stream cimport KNOWN_FIELDS, Conn, KnownField, Stream

cdef enum:
    MAX_HEADER_BYTES = 16 << 10      # of one request, counted as in RFC 9113 section 6.5.2

cdef inline size_t field_bytes(nghttp2_vec name, nghttp2_vec value) noexcept nogil:
    return name.len + value.len + 32


cdef inline void head_take(Stream *stream, const KnownField *field) noexcept nogil:
    # a header that has the same meaning in every call
    stream.seen |= field.seen
    stream.sender.accepted |= field.accepted
    if field.method != NULL:
        stream.method = field.method
        stream.single = field.method.service.single
        field.method.counts.started += 1


cdef int head_read(Stream *stream, nghttp2_rcbuf *name_buffer, nghttp2_rcbuf *value_buffer) noexcept nogil


cdef inline int head_field(Stream *stream, nghttp2_rcbuf *name_buffer, nghttp2_rcbuf *value_buffer) noexcept nogil:
    # process one more header; returns an error code of nghttp2, or 0
    cdef uint32_t at = stream.header_count
    cdef const KnownField *known
    if at >= <uint32_t>KNOWN_FIELDS:
        return head_read(stream, name_buffer, value_buffer)
    known = &stream.conn.known[at]
    if (known.value != value_buffer or known.name != name_buffer
            or stream.header_bytes + known.bytes > MAX_HEADER_BYTES):
        return head_read(stream, name_buffer, value_buffer)
    stream.header_count = at + 1
    stream.header_bytes += known.bytes
    head_take(stream, known)
    return 0

# Release what the connection remembers of its calls' headers.
cdef void head_forget(Conn *conn) noexcept nogil
# The headers are complete: the call begins, or ends with an error.
cdef void head_complete(Stream *stream) noexcept nogil
