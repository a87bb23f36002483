# gzip and deflate (zlib format) of whole gRPC messages (https://github.com/grpc/grpc/blob/master/doc/compression.md).

from libc.stdint cimport uint8_t, uint32_t

from inferd._native.memory.resource cimport Block
from inferd._native.transport.outgoing cimport Outgoing
from inferd._native.transport.zlib cimport z_stream

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
    RESULT_MORE              # not finished: run the next slice

cdef struct Inflated:
    Block *block             # one reference
    uint8_t *data
    size_t size

# The encoding in a grpc-encoding header; the encodings in grpc-accept-encoding as the bits 1 << ENCODING_*.
cdef Encoding encoding_parse(const uint8_t *name, size_t size) noexcept nogil
cdef uint8_t encodings_parse(const uint8_t *names, size_t size) noexcept nogil
cdef const char *encoding_name(Encoding encoding) noexcept nogil

cdef struct Mapping:
    # the first cache line of a mapping
    size_t size

cdef struct Room:
    # memory that grows
    uint8_t *data
    size_t used
    size_t capacity
    size_t limit             # of the capacity
    size_t behind            # bytes behind the capacity that are not written here
    Block *block             # from the pool; NULL: a mapping
    Mapping *mapping

cdef struct Inflater:
    # one message that is being inflated; must not move
    z_stream stream
    Room room
    Encoding encoding
    size_t ahead             # bytes in front of the message, so that it ends at a cache line like any other message
    bint begun

cdef struct Deflater:
    # one message that is being compressed; must not move
    z_stream stream
    Room room
    const Outgoing *message
    uint32_t segment         # the next to be compressed
    size_t at                # and where in it
    bint begun

# Inflate one message to at most `limit` bytes. `out` is set for RESULT_OK only; its block has room for `behind` more
# bytes behind the message.
cdef Result inflate_message(Encoding encoding, const uint8_t *data, size_t size, size_t limit, size_t behind,
                            Inflated *out) noexcept nogil
# Inflate a message a slice at a time: begin, slices while they return RESULT_MORE, end. The caller zeroes the Inflater
# and keeps `data`. `worked`: the bytes that the slice has made.
cdef Result inflater_begin(Inflater *self, Encoding encoding, const uint8_t *data, size_t size,
                           size_t limit, size_t behind) noexcept nogil
cdef Result inflater_slice(Inflater *self, size_t *worked, Inflated *out) noexcept nogil
cdef void inflater_end(Inflater *self) noexcept nogil

# A compressed copy of an unsent message with its prefix. NULL if it would save less than 1/16, or if there is no
# memory. `level` is zlib's, 1 to 9.
cdef Outgoing *deflate_message(Encoding encoding, int level, const Outgoing *message) noexcept nogil
# Compress a message a slice at a time; False: it does not pay. `out` is set when the last slice returns RESULT_OK.
# `worked`: the bytes that the slice has read.
cdef bint deflater_begin(Deflater *self, Encoding encoding, int level, const Outgoing *message) noexcept nogil
cdef Result deflater_slice(Deflater *self, size_t *worked, Outgoing **out) noexcept nogil
cdef void deflater_end(Deflater *self) noexcept nogil
