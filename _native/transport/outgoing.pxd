# What is on its way to the peer: gRPC messages waiting to be framed, and framed bytes waiting to be written.

from libc.stdint cimport uint8_t, uint32_t

from _native.chain cimport Link
from _native.memory.resource cimport Block
from _native.transport.ledger cimport Charge

cdef struct Segment:
    const uint8_t *data
    size_t size
    Block *block             # holds `data`, one reference

cdef struct Outgoing:
    # One length-prefixed gRPC message as a list of segments. The structure lies in a block together with its segments
    # and, after them, with whatever bytes the maker writes there (`room`).
    Link link
    Block *home
    Segment *segments
    uint32_t count           # segments in use
    uint32_t current         # the first segment not yet sent completely
    size_t offset            # bytes of it already sent
    size_t left              # bytes of all segments not yet sent
    size_t size              # bytes of all segments
    bint compress            # is to be compressed before it is framed
    Charge charge            # for all of it, until its last byte is framed
    uint8_t *room

# A message with space for so many segments and so many bytes at `room`; NULL when there is no memory.
cdef Outgoing *outgoing_new(uint32_t segments, size_t room) noexcept nogil
# Append bytes that lie in `block`; takes one more reference to it.
cdef void outgoing_add(Outgoing *message, Block *block, const uint8_t *data, size_t size) noexcept nogil
cdef void outgoing_free(Outgoing *message) noexcept nogil
# Write the five bytes in front of a gRPC message of `size` bytes.
cdef void write_message_prefix(uint8_t *out, size_t size) noexcept nogil


cdef struct Output:
    # bytes for the socket, in order: small ones copied together, large ones by reference
    Segment *pieces
    uint32_t count
    uint32_t capacity
    Block *scratch           # where small bytes are collected; NULL when there are none
    size_t used              # bytes of it in use
    size_t start             # where the piece now being collected began
    size_t size              # bytes of all pieces

cdef bint output_copy(Output *output, const uint8_t *data, size_t size) noexcept nogil
# The next `size` bytes of the message, advancing it.
cdef bint output_message(Output *output, Outgoing *message, size_t size) noexcept nogil
# Write to a socket that does not block. False: it takes no more now, or is broken, and the rest is still there.
cdef bint output_write(Output *output, int fd) noexcept nogil
# All pieces as objects with the buffer protocol; the output is empty afterwards.
cdef list output_take(Output *output)
cdef void output_clear(Output *output) noexcept nogil
