# gRPC's own header syntax (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).

from libc.stdint cimport int64_t, uint8_t

# A grpc-timeout value in nanoseconds, -1 when it is malformed. Values beyond 292 years are cut to that.
cdef int64_t timeout_parse(const uint8_t *text, size_t size) noexcept nogil
# A grpc-message value: UTF-8 with everything but printable ASCII percent-encoded, cut before the character that would
# make it longer than MESSAGE_LIMIT. From malloc, NULL when there is no memory.
cdef char *message_encode(const char *text) noexcept nogil

# Metadata between Python pairs (str, str or bytes) and header bytes.
# A binary value may be several, joined by commas.
cdef list metadata_pairs(const uint8_t *name, size_t name_size, const uint8_t *value, size_t value_size)
cdef list metadata_headers(object metadata)
