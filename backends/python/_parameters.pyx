"""The parameters of a request as JSON text, without the GIL.

Parameters that steer the server itself (sequence_id and its flags, priority, timeout, triton_*) have accessors of their
own and are left out, as in Triton. Of parameters with the same key the last one counts.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcmp, memcpy, strlen

from inferd._native.protobuf.codec cimport (
    PARAMETER_BOOL,
    PARAMETER_DOUBLE,
    PARAMETER_INT64,
    PARAMETER_STRING,
    PARAMETER_UINT64,
    Parameter,
    Str,
    parameter_find,
)
from inferd._native.request.request cimport Request

cdef extern from *:
    """
    #include <inttypes.h>
    #include <math.h>
    #include <stdint.h>
    #include <stdio.h>
    static inline int inferd_json_signed(char *out, int64_t n) { return sprintf(out, "%" PRId64, n); }
    static inline int inferd_json_unsigned(char *out, uint64_t n) { return sprintf(out, "%" PRIu64, n); }
    /* NaN and Infinity as Python's json reads them */
    static inline int inferd_json_double(char *out, double x) {
        if (isnan(x)) return sprintf(out, "NaN");
        if (isinf(x)) return sprintf(out, x > 0 ? "Infinity" : "-Infinity");
        int size = sprintf(out, "%.17g", x);
        for (int i = 0; i < size; i++) if (out[i] == '.' || out[i] == 'e') return size;
        return size + sprintf(out + size, ".0");
    }
    static inline int inferd_json_escape(char *out, unsigned char c) { return sprintf(out, "\\\\u%04x", c); }
    """
    int write_signed "inferd_json_signed"(char *out, long long n) noexcept nogil
    int write_unsigned "inferd_json_unsigned"(char *out, unsigned long long n) noexcept nogil
    int write_double "inferd_json_double"(char *out, double x) noexcept nogil
    int write_escape "inferd_json_escape"(char *out, unsigned char c) noexcept nogil

cdef enum:
    MANY = 64                # parameters beyond which duplicates are not looked for: bounds the time that they take


cdef struct Text:
    # where JSON is written; without `out` it is only measured
    uint8_t *out
    size_t size


cdef inline void put(Text *text, const void *data, size_t size) noexcept nogil:
    if text.out != NULL and size:
        memcpy(text.out + text.size, data, size)
    text.size += size


cdef void put_string(Text *text, Str value) noexcept nogil:
    cdef char escape[8]
    cdef uint32_t i
    cdef uint32_t plain = 0
    cdef unsigned char c
    put(text, b'"', 1)
    for i in range(value.size):
        c = <unsigned char>value.data[i]
        if c >= 0x20 and c != c'"' and c != c"\\":
            continue
        put(text, value.data + plain, i - plain)
        plain = i + 1
        put(text, escape, <size_t>write_escape(escape, c))
    put(text, value.data + plain, value.size - plain)
    put(text, b'"', 1)


cdef void put_value(Text *text, const Parameter *parameter) noexcept nogil:
    cdef char number[40]
    if parameter.kind == PARAMETER_STRING:
        put_string(text, parameter.text)
    elif parameter.kind == PARAMETER_BOOL:
        if parameter.integer:
            put(text, b"true", 4)
        else:
            put(text, b"false", 5)
    elif parameter.kind == PARAMETER_DOUBLE:
        put(text, number, <size_t>write_double(number, parameter.real))
    elif parameter.kind == PARAMETER_UINT64:
        put(text, number, <size_t>write_unsigned(number, <unsigned long long>parameter.integer))
    elif parameter.kind == PARAMETER_INT64:
        put(text, number, <size_t>write_signed(number, parameter.integer))
    else:
        put(text, b"null", 4)


cdef inline bint is_key(Str key, const char *name) noexcept nogil:
    return key.size == strlen(name) and memcmp(key.data, name, key.size) == 0


cdef bint is_ours(Str key) noexcept nogil:
    return (is_key(key, "sequence_id") or is_key(key, "sequence_start") or is_key(key, "sequence_end")
            or is_key(key, "priority") or is_key(key, "timeout")
            or (key.size >= 7 and memcmp(key.data, b"triton_", 7) == 0))


cdef size_t write_object(const Request *request, uint8_t *out) noexcept nogil:
    cdef const Parameter *parameter
    cdef Text text
    cdef uint32_t count = request.message.parameter_count
    cdef uint32_t i
    text.out = out
    text.size = 0
    for i in range(count):
        parameter = &request.message.parameters[i]
        if is_ours(parameter.key) or (count <= MANY and i + 1 < count and parameter_find(
                parameter + 1, count - i - 1, parameter.key.data, parameter.key.size) != NULL):
            continue
        if text.size:
            put(&text, b",", 1)
        else:
            put(&text, b"{", 1)
        put_string(&text, parameter.key)
        put(&text, b":", 1)
        put_value(&text, parameter)
    if text.size:
        put(&text, b"}", 1)
    return text.size


cdef size_t parameters_size(const Request *request) noexcept nogil:
    return write_object(request, NULL) if request.message.parameter_count else 0


cdef void parameters_write(const Request *request, uint8_t *out) noexcept nogil:
    if request.message.parameter_count:
        write_object(request, out)
