# The head of a call: its request headers.

from _native.transport.nghttp2 cimport nghttp2_rcbuf, nghttp2_vec
from _native.transport.stream cimport Stream

cdef enum:
    MAX_HEADER_BYTES = 16 << 10      # of one request, counted as in RFC 9113 section 6.5.2

# One more header, in nghttp2's buffers and as it counts; an error code of nghttp2's, or 0.
cdef int head_field(Stream *stream, nghttp2_rcbuf *name_buffer, nghttp2_rcbuf *value_buffer, nghttp2_vec name,
                    nghttp2_vec value) noexcept nogil
# There are no more: the call begins, or ends with an error.
cdef void head_complete(Stream *stream) noexcept nogil
