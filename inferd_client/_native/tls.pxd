# TLS of a connection: Python's `ssl`, which reads and writes memory here, not the socket.

from libc.stdint cimport uint8_t

from inferd_client._native.output cimport Output, Written
from inferd_client._native.session cimport Session


cdef class Tls:
    cdef object connection   # ssl.SSLObject
    cdef object incoming     # ssl.MemoryBIO
    cdef object outgoing
    cdef object wants_read   # the exception for an incomplete read
    cdef bytes pending       # encrypted bytes that are not written yet
    cdef size_t written      # written bytes of `pending`

    # Process bytes from the socket.
    cdef int take(self, const uint8_t *data, size_t size) except -1
    # Decrypt: the number of bytes, 0 for none now, -1 if the peer has ended.
    cdef ssize_t read(self, uint8_t *out, size_t space) except -2
    # Encrypt the whole output, and write it.
    cdef Written write(self, Output *output, int fd) except *
    cdef int encrypt(self, Output *output) except -1

# For connections, whose `tls` is a Tls: process the bytes in a buffer with this capacity, which is reused for the
# decrypted bytes. False: the connection is unusable.
cdef bint tls_receive(void *tls, Session *session, uint8_t *buffer, size_t room, size_t size) noexcept with gil
cdef Written tls_write(void *tls, Output *output, int fd) noexcept with gil
