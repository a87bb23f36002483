# The syntax of gRPC's own headers (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).

from libc.stdint cimport int64_t, uint8_t

from inferd._native.transport.nghttp2 cimport nghttp2_rcbuf, nghttp2_rcbuf_get_buf, nghttp2_vec

# A grpc-timeout value in nanoseconds; -1 if it is malformed. Values beyond 292 years are reduced to that.
cdef int64_t timeout_parse(const uint8_t *text, size_t size) noexcept nogil
# A grpc-message value: UTF-8 with everything but printable ASCII percent-encoded, cut before the character that would
# exceed MESSAGE_LIMIT. From malloc; NULL if there is no memory.
cdef char *message_encode(const char *text) noexcept nogil

# A value without leading and trailing spaces and tabs: gRPC lets a server strip them, and clients do send them.
cdef inline nghttp2_vec header_value(nghttp2_rcbuf *value) noexcept nogil:
    cdef nghttp2_vec text = nghttp2_rcbuf_get_buf(value)
    while text.len and (text.base[0] == c" " or text.base[0] == c"\t"):
        text.base += 1
        text.len -= 1
    while text.len and (text.base[text.len - 1] == c" " or text.base[text.len - 1] == c"\t"):
        text.len -= 1
    return text

# Conversion of metadata between Python pairs (str, str or bytes) and header bytes.
# One binary header may have several values, separated by commas.
cdef list metadata_pairs(const uint8_t *name, size_t name_size, const uint8_t *value, size_t value_size)
cdef list metadata_headers(object metadata)
