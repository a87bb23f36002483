# Formatting of error texts without the GIL.

from libc.stdint cimport uint32_t

from inferd._native.protobuf.codec cimport Str

cdef extern from *:
    """
    #include <stdarg.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <inttypes.h>

    /* printf into memory from malloc; NULL if there is no memory */
    static char *inferd_format(const char *format, ...) {
        va_list arguments, again;
        va_start(arguments, format);
        va_copy(again, arguments);
        int size = vsnprintf(NULL, 0, format, arguments);
        va_end(arguments);
        char *text = size < 0 ? NULL : malloc((size_t)size + 1);
        if (text) vsnprintf(text, (size_t)size + 1, format, again);
        va_end(again);
        return text;
    }

    /* "[-1,16]" into a buffer; cut with "..." if it does not fit */
    static const char *inferd_shape(char *out, size_t room, int has_batch, const int64_t *dims, uint32_t rank) {
        size_t at = 0;
        out[at++] = '[';
        if (has_batch) { memcpy(out + at, "-1", 2); at += 2; }
        for (uint32_t i = 0; i < rank; i++) {
            if (at + 32 > room) { memcpy(out + at, "...", 3); at += 3; break; }
            at += (size_t)sprintf(out + at, at > 1 ? ",%" PRId64 : "%" PRId64, dims[i]);
        }
        out[at++] = ']';
        out[at] = 0;
        return out;
    }

    /* the text; "out of memory" if it is NULL */
    static inline const char *inferd_text(const char *text) { return text ? text : "out of memory"; }
    """
    char *format_text "inferd_format"(const char *format, ...) noexcept nogil
    const char *shape_text "inferd_shape"(char *out, size_t room, bint has_batch, const long *dims,
                                          unsigned int rank) noexcept nogil
    const char *text_or_no_memory "inferd_text"(const char *text) noexcept nogil


cdef enum:
    MOST_SHOWN = 256         # bytes

# How many bytes of a text that a peer chose are shown in a message. The rest is cut off between two characters: a
# message must be UTF-8, or clients cannot parse the response of a stream that contains it.
cdef inline int clip(Str text) noexcept nogil:
    cdef uint32_t size = text.size
    if size <= <uint32_t>MOST_SHOWN:
        return <int>size
    size = MOST_SHOWN
    while size and (text.data[size] & 0xc0) == 0x80:
        size -= 1
    return <int>size


# The message of an exception, or its type if the message is empty.
cdef inline str text_of(object error):
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__
