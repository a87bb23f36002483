# gzip and deflate (zlib format) of whole gRPC messages (https://github.com/grpc/grpc/blob/master/doc/compression.md).

from libc.stdint cimport int32_t, uint8_t

from _native.memory.resource cimport Block
from _native.transport.outgoing cimport Outgoing

cdef enum Encoding:
    ENCODING_IDENTITY
    ENCODING_DEFLATE         # zlib format, RFC 1950
    ENCODING_GZIP            # RFC 1952
    ENCODING_UNKNOWN

cdef enum Result:
    RESULT_OK
    RESULT_CORRUPT
    RESULT_TRUNCATED
    RESULT_TOO_LARGE         # inflated beyond the limit
    RESULT_NO_MEMORY
    RESULT_CANCELLED

cdef struct Inflated:
    Block *block             # one reference
    uint8_t *data
    size_t size

# The encoding in a grpc-encoding header; the encodings in grpc-accept-encoding as the bits 1 << ENCODING_*.
cdef Encoding encoding_parse(const uint8_t *name, size_t size) noexcept nogil
cdef uint8_t encodings_parse(const uint8_t *names, size_t size) noexcept nogil
cdef const char *encoding_name(Encoding encoding) noexcept nogil

# Inflate one message to at most `limit` bytes (0: 4 GiB). `out` is set for RESULT_OK only. Ends early if *cancelled.
cdef Result inflate_message(Encoding encoding, const uint8_t *data, size_t size, size_t limit, int32_t *cancelled,
                            Inflated *out) noexcept nogil

# A compressed copy of an unsent message with its prefix. NULL if it would save less than 1/16, if there is no memory,
# or if *cancelled. `level` is zlib's, 1 to 9.
cdef Outgoing *deflate_message(Encoding encoding, int level, const Outgoing *message, int32_t *cancelled) noexcept nogil
