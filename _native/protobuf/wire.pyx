"""Protobuf wire primitives; the contract and the inline ones are in wire.pxd."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    MAX_VARINT_BYTES = 10
    MAX_TAG_BYTES = 5


cdef inline const uint8_t *read_bytes_of(const uint8_t *p, const uint8_t *end, int most,
                                         uint64_t *value) noexcept nogil:
    # a varint of at most so many bytes
    cdef uint64_t result = 0
    cdef uint64_t byte
    cdef int shift
    for shift in range(0, 7 * most, 7):
        if p == end:
            return NULL
        byte = p[0]
        p += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            value[0] = result
            return p
    return NULL


cdef const uint8_t *read_long_varint(const uint8_t *p, const uint8_t *end, uint64_t *value) noexcept nogil:
    return read_bytes_of(p, end, MAX_VARINT_BYTES, value)


cdef const uint8_t *read_long_uint32(const uint8_t *p, const uint8_t *end, uint32_t *value) noexcept nogil:
    cdef uint64_t result
    p = read_bytes_of(p, end, MAX_TAG_BYTES, &result)
    if p == NULL or result > <uint64_t>0xFFFFFFFF:
        return NULL
    value[0] = <uint32_t>result
    return p


cdef inline const uint8_t *skip_scalar(const uint8_t *p, const uint8_t *end, uint32_t tag) noexcept nogil:
    """Skip a value that is not a group; NULL also for wire types that protobuf does not define."""
    cdef uint64_t value
    cdef uint32_t size
    cdef uint32_t wire_type = tag & 7
    if wire_type == WIRE_VARINT:
        return read_varint(p, end, &value)
    if wire_type == WIRE_LEN:
        p = read_size(p, end, &size)
        return p + size if p != NULL else NULL
    if wire_type == WIRE_FIXED32:
        return p + 4 if end - p >= 4 else NULL
    if wire_type == WIRE_FIXED64:
        return p + 8 if end - p >= 8 else NULL
    return NULL


cdef const uint8_t *skip_field(const uint8_t *p, const uint8_t *end, uint32_t tag, int depth) noexcept nogil:
    # The groups that are open, innermost last. A loop with this small stack instead of recursion: the depth of a peer's
    # groups must not decide how much of the thread's stack is used.
    cdef uint32_t[MAX_DEPTH] open_groups
    cdef int level = 0
    cdef uint32_t wire_type
    while True:
        wire_type = tag & 7
        if wire_type == WIRE_GROUP:
            if depth + level >= MAX_DEPTH:
                return NULL
            open_groups[level] = tag >> 3
            level += 1
        elif wire_type == WIRE_END_GROUP:
            if level == 0 or open_groups[level - 1] != tag >> 3:
                return NULL
            level -= 1
        else:
            p = skip_scalar(p, end, tag)
            if p == NULL:
                return NULL
        if level == 0:
            return p
        p = read_tag(p, end, &tag)
        if p == NULL:
            return NULL


cdef inline bint is_continuation(uint8_t byte) noexcept nogil:
    return (byte & 0xC0) == 0x80


cdef inline int utf8_sequence(const uint8_t *p, size_t left) noexcept nogil:
    """Bytes of the well-formed multi-byte sequence at `p`, 0 if there is none (Unicode 15, table 3-7)."""
    cdef uint8_t lead = p[0]
    cdef uint8_t low = 0x80     # the bounds of the second byte, narrower after four of the lead bytes
    cdef uint8_t high = 0xBF
    cdef int size
    if 0xC2 <= lead <= 0xDF:
        size = 2
    elif 0xE0 <= lead <= 0xEF:
        size = 3
        if lead == 0xE0:
            low = 0xA0
        elif lead == 0xED:
            high = 0x9F
    elif 0xF0 <= lead <= 0xF4:
        size = 4
        if lead == 0xF0:
            low = 0x90
        elif lead == 0xF4:
            high = 0x8F
    else:
        return 0
    if left < <size_t>size or p[1] < low or p[1] > high:
        return 0
    if size > 2 and not is_continuation(p[2]):
        return 0
    if size > 3 and not is_continuation(p[3]):
        return 0
    return size


cdef bint utf8_valid(const uint8_t *p, const uint8_t *end) noexcept nogil:
    cdef uint64_t word
    cdef int size
    while p < end:
        if end - p >= 8:
            memcpy(&word, p, 8)
            if (word & HIGH_BITS) == 0:
                p += 8
                continue
        if p[0] < 0x80:
            p += 1
            continue
        size = utf8_sequence(p, end - p)
        if size == 0:
            return False
        p += size
    return True


cdef long long packed_varint_count(const uint8_t *p, const uint8_t *end) noexcept nogil:
    cdef long long count = 0
    cdef uint64_t word
    while p < end:
        if end - p >= 8:
            memcpy(&word, p, 8)
            if (word & HIGH_BITS) == 0:     # eight elements of one byte each
                p += 8
                count += 8
                continue
        p = read_varint(p, end, &word)
        if p == NULL:
            return -1
        count += 1
    return count
