# The output of a connection: pieces of an arena of its own, and of bodies that are not copied.

from libc.stdint cimport uint8_t, uint32_t

from inferd_client._native.linux cimport iovec

cdef enum:
    PIECES = 64              # of one write
    ARENA = 1 << 17          # copied bytes of one write

cdef struct Output:
    uint8_t *arena
    size_t used
    iovec pieces[PIECES]
    uint32_t first           # pieces before it are written
    uint32_t count

cdef enum Written:
    WROTE_ALL
    WOULD_BLOCK              # the socket accepts no more for now
    WRITE_FAILED             # the connection is gone

# Whether this number of further pieces and copied bytes fits.
cdef inline bint output_has_room(const Output *output, uint32_t pieces, size_t copied) noexcept nogil:
    return output.count + pieces <= PIECES and output.used + copied <= ARENA

cdef inline bint output_empty(const Output *output) noexcept nogil:
    return output.first == output.count

# There must be room.
cdef void output_refer(Output *output, const uint8_t *data, size_t size) noexcept nogil
cdef void output_copy(Output *output, const uint8_t *data, size_t size) noexcept nogil
cdef Written output_write(Output *output, int fd) noexcept nogil
