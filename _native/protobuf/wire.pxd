# Protobuf wire primitives.
#
# A reader takes the position and the end of the enclosing message, and returns the position behind what it read. It
# returns NULL for bytes that official protobuf does not accept; every caller checks for this. No function reads at or
# past `end`, allocates, recurses or takes the GIL.

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum WireType:
    WIRE_VARINT = 0
    WIRE_FIXED64 = 1
    WIRE_LEN = 2
    WIRE_GROUP = 3
    WIRE_END_GROUP = 4
    WIRE_FIXED32 = 5

# The limit of nested messages, map entries and groups together, within the outermost message.
cdef enum:
    MAX_DEPTH = 100

cdef extern from *:
    """
    #define inferd_likely(x) __builtin_expect(!!(x), 1)
    #define inferd_varint_size(v) ((size_t)((9 * (64 - __builtin_clzll((v) | 1)) + 64) / 64))
    #define INFERD_HIGH_BITS 0x8080808080808080ULL
    """
    bint likely "inferd_likely"(bint condition) noexcept nogil
    # The size of a varint in bytes, 1 to 10.
    size_t varint_size "inferd_varint_size"(uint64_t value) noexcept nogil
    # The bits that are clear in eight bytes of ASCII, and in eight varints of one byte.
    const uint64_t HIGH_BITS "INFERD_HIGH_BITS"

# The cases of the readers below with more than one byte.
cdef const uint8_t *read_long_varint(const uint8_t *p, const uint8_t *end, uint64_t *value) noexcept nogil
cdef const uint8_t *read_long_uint32(const uint8_t *p, const uint8_t *end, uint32_t *value) noexcept nogil

# Skip the value of a field whose tag was just read. `depth` counts the messages around it, without the outermost. A
# group is skipped with everything in it, up to its matching end.
cdef const uint8_t *skip_field(const uint8_t *p, const uint8_t *end, uint32_t tag, int depth) noexcept nogil

# Whether the bytes are well-formed UTF-8 (no overlong form, no surrogate, nothing above U+10FFFF).
cdef bint utf8_valid(const uint8_t *p, const uint8_t *end) noexcept nogil

# The number of elements in the body of a packed repeated varint field; -1 if it is malformed.
cdef long long packed_varint_count(const uint8_t *p, const uint8_t *end) noexcept nogil


# The value of a varint field: at most 10 bytes, bits above 64 are dropped.
cdef inline const uint8_t *read_varint(const uint8_t *p, const uint8_t *end, uint64_t *value) noexcept nogil:
    if likely(p < end and p[0] < 0x80):
        value[0] = p[0]
        return p + 1
    return read_long_varint(p, end, value)


# A tag: at most 5 bytes, at most 32 bits, its field number not 0.
cdef inline const uint8_t *read_tag(const uint8_t *p, const uint8_t *end, uint32_t *tag) noexcept nogil:
    if likely(p < end and p[0] < 0x80):
        tag[0] = p[0]
        p += 1
    else:
        p = read_long_uint32(p, end, tag)
        if p == NULL:
            return NULL
    return p if likely(tag[0] > 7) else NULL


# The length of a length-delimited field: at most 5 bytes, and no more than what is left before `end`.
cdef inline const uint8_t *read_size(const uint8_t *p, const uint8_t *end, uint32_t *size) noexcept nogil:
    if likely(p < end and p[0] < 0x80):
        size[0] = p[0]
        p += 1
    else:
        p = read_long_uint32(p, end, size)
        if p == NULL:
            return NULL
    return p if likely(size[0] <= <size_t>(end - p)) else NULL


# Whether there are at most 16 bytes, all of them ASCII. Nearly every name is like that.
cdef inline bint is_short_ascii(const uint8_t *p, size_t size) noexcept nogil:
    cdef uint64_t first, last
    cdef uint32_t first_half, last_half
    cdef uint8_t bits = 0
    cdef size_t i
    if size > 16:
        return False
    if size >= 8:       # two loads that overlap unless size is 16
        memcpy(&first, p, 8)
        memcpy(&last, p + size - 8, 8)
        return ((first | last) & HIGH_BITS) == 0
    if size >= 4:
        memcpy(&first_half, p, 4)
        memcpy(&last_half, p + size - 4, 4)
        return ((first_half | last_half) & <uint32_t>HIGH_BITS) == 0
    for i in range(size):
        bits |= p[i]
    return bits < 0x80


# A length-delimited field that must hold well-formed UTF-8.
cdef inline const uint8_t *read_text(const uint8_t *p, const uint8_t *end, const char **data,
                                     uint32_t *size) noexcept nogil:
    p = read_size(p, end, size)
    if p == NULL or not (is_short_ascii(p, size[0]) or utf8_valid(p, p + size[0])):
        return NULL
    data[0] = <const char *>p
    return p + size[0]


cdef inline const uint8_t *read_fixed64(const uint8_t *p, const uint8_t *end, uint64_t *value) noexcept nogil:
    if end - p < 8:
        return NULL
    memcpy(value, p, 8)
    return p + 8


# Write a varint and return its end. The caller has made room for varint_size(value) bytes.
cdef inline uint8_t *write_varint(uint8_t *out, uint64_t value) noexcept nogil:
    while value >= 0x80:
        out[0] = <uint8_t>(value | 0x80)
        out += 1
        value >>= 7
    out[0] = <uint8_t>value
    return out + 1


# Write the tag (one byte: field numbers up to 15) and the length of a length-delimited field.
cdef inline uint8_t *write_prefix(uint8_t *out, uint32_t tag, uint64_t size) noexcept nogil:
    out[0] = <uint8_t>tag
    return write_varint(out + 1, size)


# The size of a length-delimited field whose tag takes one byte, with tag and length.
cdef inline size_t field_size(uint64_t size) noexcept nogil:
    return 1 + varint_size(size) + size
