"""Clients that speak HTTP/1 to this server: they get a response that names the right protocol."""

from libc.stdint cimport uint8_t
from libc.string cimport memcmp

cdef enum:
    LONGEST_METHOD = 16      # bytes

cdef bytes BODY = (
    b'{"error":"this port serves gRPC, which is HTTP/2; the request is HTTP/1. Use a gRPC client, such as '
    b'tritonclient.grpc, perf_analyzer -i grpc or grpcurl -plaintext."}\n')
cdef bytes RESPONSE = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(BODY), BODY))
cdef const char *HTTP1_RESPONSE = RESPONSE


cdef bint is_http1(const uint8_t *data, size_t size) noexcept nogil:
    # A request line begins with a method and a space, and ends with " HTTP/1" and a version. Its end may be missing,
    # and so may its beginning: the first bytes of POST may have passed as the preface of HTTP/2.
    cdef size_t i, method = 0
    while method < size and method < LONGEST_METHOD and c"A" <= data[method] <= c"Z":
        method += 1
    if method < size and data[method] != c" ":
        return False
    for i in range(method, size):
        if data[i] == c"\r" or data[i] == c"\n":
            return i >= 9 and memcmp(&data[i - 9], " HTTP/1.", 8) == 0
    return True
