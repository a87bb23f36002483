# Text that grows as it is written.

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, strlen

cdef struct Text:
    char *data               # from malloc
    size_t size
    size_t capacity
    bint failed              # there was no memory; nothing more is written

# The place where `size` bytes may be written; NULL: there is no memory.
cdef inline char *text_room(Text *text, size_t size) noexcept nogil:
    cdef size_t capacity = max(text.capacity, <size_t>(64 << 10))
    cdef char *grown
    if text.failed:
        return NULL
    while capacity < text.size + size:
        capacity *= 2
    if capacity > text.capacity:
        grown = <char *>realloc(text.data, capacity)
        if grown == NULL:
            text.failed = True
            return NULL
        text.data = grown
        text.capacity = capacity
    return text.data + text.size

cdef inline void put(Text *text, const char *data, size_t size) noexcept nogil:
    cdef char *at = text_room(text, size)
    if at != NULL:
        memcpy(at, data, size)
        text.size += size

cdef inline void put_text(Text *text, const char *data) noexcept nogil:
    put(text, data, strlen(data))

cdef inline void put_number(Text *text, uint64_t value) noexcept nogil:
    cdef char digits[20]
    cdef int at = 20
    while True:
        at -= 1
        digits[at] = <char>(c"0" + value % 10)
        value //= 10
        if value == 0:
            break
    put(text, digits + at, 20 - at)

# Write value / unit, exactly; `unit` is a power of ten. With `point`, whole numbers end with ".0".
cdef inline void put_scaled(Text *text, uint64_t value, uint64_t unit, bint point) noexcept nogil:
    cdef uint64_t rest = value % unit
    put_number(text, value // unit)
    if rest == 0:
        if point:
            put(text, ".0", 2)
        return
    put(text, ".", 1)
    while rest:
        unit //= 10
        put_number(text, rest // unit)
        rest %= unit
