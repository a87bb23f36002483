# TLS: OpenSSL between the bytes of one socket and those of its connection.
#
# OpenSSL does not see the socket, except during the handshake: it gets the received bytes from memory, a large read at
# a time, and its records are collected and written together.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from inferd._native.transport.outgoing cimport Output

cdef extern from *:
    """
    typedef struct ssl_st SSL;  /* as OpenSSL's headers, which only the module itself needs */
    typedef struct ssl_ctx_st SSL_CTX;
    """
    ctypedef struct SSL
    ctypedef struct SSL_CTX

cdef struct Tls:
    # the session of one socket; used by one thread at a time
    SSL *ssl
    const uint8_t *received  # bytes of the socket that OpenSSL has not read
    size_t left
    uint64_t fed             # bytes of the socket, ever
    uint64_t key_updates     # of the peer
    Output encrypted         # for the socket

cdef enum Handshaken:
    SHAKES_READ              # the handshake continues when the socket is readable
    SHAKES_WRITE             # or writable
    SHAKES_DONE
    SHAKES_FAILED

cdef enum:
    RECORDS = 256 << 10      # bytes that are encrypted before they are written

# Continue the handshake on the socket, which does not block. `why` gets the reason of a failure, from malloc, or NULL
# if the peer is gone. After SHAKES_DONE, the socket is read and written by others only.
cdef Handshaken tls_accept(Tls *tls, char **why) noexcept nogil
# Received bytes are for the next `tls_read`s, until one returns 0.
cdef void tls_feed(Tls *tls, const uint8_t *data, size_t size) noexcept nogil
# Decrypt `size` bytes at most. 0: nothing more has come; -1: the peer has ended its output, or violated TLS.
cdef Py_ssize_t tls_read(Tls *tls, uint8_t *out, size_t size) noexcept nogil
# Encrypt RECORDS bytes of the output, or all if there are fewer. False: no memory; the connection is lost.
cdef bint tls_write(Tls *tls, Output *output) noexcept nogil
# Encrypt all of the last output and the end of TLS (close_notify). Afterwards the output has the bytes for the socket.
cdef bint tls_finish(Tls *tls, Output *output) noexcept nogil
cdef void tls_free(Tls *tls) noexcept nogil


cdef class TlsContext:
    cdef SSL_CTX *context


cdef class TlsSession:
    cdef TlsContext context
    cdef Tls *tls                # NULL: the I/O thread has taken it over
