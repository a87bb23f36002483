# Output: gRPC messages that wait to be framed, and framed bytes that wait to be written.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from inferd._native.chain cimport Link
from inferd._native.memory.resource cimport Block
from inferd._native.transport.ledger cimport Charge

cdef struct Segment:
    const uint8_t *data
    size_t size
    Block *block             # contains `data`; one reference

cdef struct Outgoing:
    # One length-prefixed gRPC message as a list of segments. One block contains the structure, its segments
    # and, behind them, bytes that the maker writes (`room`).
    Link link
    Block *home
    Segment *segments
    uint32_t count           # segments in use
    uint32_t current         # the first segment that is not completely sent
    size_t offset            # bytes of this segment that are sent
    size_t left              # bytes of all segments that are not sent
    size_t size              # bytes of all segments
    bint compress            # to be compressed before it is framed
    Charge charge            # for the whole message, and the memory that it keeps alive, until its last byte is framed
    uint8_t *room

# A message with room for `segments` segments, and for `room` bytes at `room`; NULL if there is no memory.
cdef Outgoing *outgoing_new(uint32_t segments, size_t room) noexcept nogil
# Append bytes in `block`; takes one more reference to it.
cdef void outgoing_add(Outgoing *message, Block *block, const uint8_t *data, size_t size) noexcept nogil
cdef void outgoing_free(Outgoing *message) noexcept nogil
# The message has to wait. It is charged from now on for all memory that it keeps alive: the whole blocks of its
# segments. A segment that is a small part of its block is copied, so that the block can be freed.
cdef void outgoing_keep(Outgoing *message) noexcept nogil
cdef enum:
    PREFIX = 5               # bytes in front of each gRPC message

# Write them for a message of `size` bytes.
cdef void write_message_prefix(uint8_t *out, size_t size) noexcept nogil


cdef struct Output:
    # bytes for the socket, in order: small ones are copied together, large ones are referenced
    Segment *pieces
    uint32_t count
    uint32_t capacity
    Block *scratch           # where small bytes are collected; NULL: there are none
    size_t used              # used bytes of scratch
    size_t start             # where the piece that is being collected begins
    size_t size              # bytes of all pieces
    uint64_t taken           # bytes that have left it, ever

cdef bint output_copy(Output *output, const uint8_t *data, size_t size) noexcept nogil
# Append the next `size` bytes of the message, and advance it.
cdef bint output_message(Output *output, Outgoing *message, size_t size) noexcept nogil
# Write to a non-blocking socket. False: it accepts no more now, or is broken; the rest stays in the output.
cdef bint output_write(Output *output, int fd) noexcept nogil
# The output has to wait. Returns the bytes of memory that its pieces keep alive. As for messages, a piece that is a
# small part of its block is copied first.
cdef size_t output_keep(Output *output) noexcept nogil
# All pieces as objects with the buffer protocol; the output is empty afterwards.
cdef list output_take(Output *output)
# End the piece that is being collected. False: no memory.
cdef bint output_close(Output *output) noexcept nogil
# The first `size` bytes have left.
cdef void output_drop(Output *output, size_t size) noexcept nogil
cdef void output_clear(Output *output) noexcept nogil
