# Clients that speak HTTP/1.

from libc.stdint cimport uint8_t

# The whole response to such a client.
cdef const char *HTTP1_RESPONSE
# Whether bytes that are not HTTP/2 are a part of a request line of HTTP/1.
cdef bint is_http1(const uint8_t *data, size_t size) noexcept nogil
