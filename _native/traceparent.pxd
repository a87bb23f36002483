# W3C trace context: the header `traceparent`, 00-<trace: 32 hexadecimal digits>-<span: 16>-<flags: 2>.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t
from libc.string cimport memcpy

cdef enum:
    TRACEPARENT = 55         # bytes of the header
    MOST_BAGGAGE = 8192      # bytes of baggage that are passed on at most, the limit of W3C

cdef struct TraceContext:
    uint8_t trace[16]
    uint8_t span[8]
    uint8_t flags            # 1: sampled
    bint given
    const uint8_t *baggage   # the header `baggage`, in memory of another owner; NULL: there is none
    size_t baggage_size

cdef inline int hex_digit(uint8_t c) noexcept nogil:
    if c"0" <= c <= c"9":
        return c - c"0"
    if c"a" <= c <= c"f":
        return c - c"a" + 10
    return -1

cdef inline bint read_hex(uint8_t *out, const uint8_t *text, size_t size) noexcept nogil:
    # False: there are other characters
    cdef size_t i
    for i in range(size):
        if hex_digit(text[2 * i]) < 0 or hex_digit(text[2 * i + 1]) < 0:
            return False
        out[i] = <uint8_t>(hex_digit(text[2 * i]) << 4 | hex_digit(text[2 * i + 1]))
    return True

cdef inline bint all_zero(const uint8_t *bytes, size_t size) noexcept nogil:
    cdef size_t i
    for i in range(size):
        if bytes[i]:
            return False
    return True

# Read a `traceparent`; False: it is malformed. Versions after 00 may have more fields behind these.
cdef inline bint traceparent_read(TraceContext *context, const uint8_t *text, size_t size) noexcept nogil:
    # Does not change the baggage.
    cdef uint8_t version
    context.given = False
    if size < TRACEPARENT or text[2] != c"-" or text[35] != c"-" or text[52] != c"-":
        return False
    if not read_hex(&version, text, 1) or version == 255:
        return False
    if size > TRACEPARENT and (version == 0 or text[TRACEPARENT] != c"-"):
        return False
    if not (read_hex(context.trace, text + 3, 16) and read_hex(context.span, text + 36, 8)
            and read_hex(&context.flags, text + 53, 1)):
        return False
    context.given = not all_zero(context.trace, 16) and not all_zero(context.span, 8)
    return context.given

cdef inline void write_hex(char *out, const uint8_t *bytes, size_t size) noexcept nogil:
    cdef const char *digits = "0123456789abcdef"
    cdef size_t i
    for i in range(size):
        out[2 * i] = digits[bytes[i] >> 4]
        out[2 * i + 1] = digits[bytes[i] & 15]

# Whether baggage is passed on: printable ASCII within the limit of W3C that can stand between quotes without escaping.
cdef inline bint is_baggage(const uint8_t *text, size_t size) noexcept nogil:
    cdef size_t i
    if size > MOST_BAGGAGE:
        return False
    for i in range(size):
        if not 0x20 <= text[i] <= 0x7e or text[i] == c'"' or text[i] == c"\\":
            return False
    return size > 0

# Writes TRACEPARENT bytes, without a terminating zero.
cdef inline void traceparent_write(const TraceContext *context, char *out) noexcept nogil:
    memcpy(out, <const char *>"00-", 3)
    write_hex(out + 3, context.trace, 16)
    out[35] = c"-"
    write_hex(out + 36, context.span, 8)
    out[52] = c"-"
    write_hex(out + 53, &context.flags, 1)
