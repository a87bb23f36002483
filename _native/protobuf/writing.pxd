# Writes messages field by field into memory that grows.
#
# Each function returns the end of what it wrote; the caller has made room. The size of a message is written when the
# message is complete, into a byte that was reserved for it.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memmove

from inferd._native.protobuf.wire cimport WIRE_LEN, varint_size, write_varint

cdef enum:
    # Enough bytes for a field: its tag of at most two bytes, and its size or value.
    TEXT_BYTES = 7           # and the bytes of the text
    NUMBER_BYTES = 12
    MESSAGE_BYTES = 7        # and the bytes of the message

cdef struct Buffer:
    uint8_t *data            # from malloc
    size_t size
    size_t capacity

# Make room for so many further bytes. False: no memory.
cdef inline bint reserve(Buffer *buffer, size_t size) noexcept nogil:
    cdef size_t capacity = max(2 * buffer.capacity, buffer.size + size)
    cdef uint8_t *grown
    if buffer.size + size <= buffer.capacity:
        return True
    grown = <uint8_t *>realloc(buffer.data, capacity)
    if grown == NULL:
        return False
    buffer.data = grown
    buffer.capacity = capacity
    return True

# The tag of a length-delimited field.
cdef inline uint8_t *put_tag(uint8_t *out, uint32_t field) noexcept nogil:
    return write_varint(out, field << 3 | <uint32_t>WIRE_LEN)

# A varint field; 0 is not written.
cdef inline uint8_t *put_number(uint8_t *out, uint32_t field, uint64_t value) noexcept nogil:
    if value == 0:
        return out
    return write_varint(write_varint(out, field << 3), value)

cdef inline uint8_t *put_text(uint8_t *out, uint32_t field, const char *data, size_t size) noexcept nogil:
    out = write_varint(put_tag(out, field), size)
    memcpy(out, data, size)
    return out + size

# End a message that begins one byte behind `length` and ends at `end`: write its size to `length`. If the size takes
# more than that byte, move the message. Returns its end.
cdef inline uint8_t *framed(uint8_t *length, uint8_t *end) noexcept nogil:
    cdef size_t size = <size_t>(end - length) - 1
    cdef size_t more = varint_size(size) - 1
    if more:
        memmove(length + 1 + more, length + 1, size)
    write_varint(length, size)
    return end + more
