"""TLS of a connection: Python's `ssl`, which reads and writes memory here, not the socket."""

from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint32_t

from inferd_client._native.linux cimport MSG_NOSIGNAL, send
from inferd_client._native.output cimport WOULD_BLOCK, WRITE_FAILED, WROTE_ALL, Output, Written
from inferd_client._native.session cimport Session, session_receive


cdef class Tls:
    """A connection whose handshake is done.

    Args:
        connection: an ssl.SSLObject.
        incoming: the ssl.MemoryBIO it reads from.
        outgoing: the ssl.MemoryBIO it writes to.
    """

    def __init__(self, connection, incoming, outgoing):
        self.connection = connection
        self.incoming = incoming
        self.outgoing = outgoing
        self.pending = b""
        import ssl  # imported only when needed
        self.wants_read = ssl.SSLWantReadError

    cdef int take(self, const uint8_t *data, size_t size) except -1:
        self.incoming.write(PyMemoryView_FromMemory(<char *> data, size, PyBUF_READ))
        return 0

    cdef ssize_t read(self, uint8_t *out, size_t space) except -2:
        try:
            return self.connection.read(space, PyMemoryView_FromMemory(<char *> out, space, PyBUF_WRITE)) or -1
        except self.wants_read:
            return 0

    cdef Written write(self, Output *output, int fd) except *:
        cdef ssize_t size
        while True:
            while self.written < <size_t> len(self.pending):
                size = send(fd, <const char *> self.pending + self.written, len(self.pending) - self.written,
                            MSG_NOSIGNAL)
                if size >= 0:
                    self.written += size
                elif errno != EINTR:
                    return WOULD_BLOCK if errno == EAGAIN else WRITE_FAILED
            self.encrypt(output)
            self.pending = self.outgoing.read()
            self.written = 0
            if not self.pending:
                return WROTE_ALL

    cdef int encrypt(self, Output *output) except -1:
        cdef uint32_t i
        for i in range(output.first, output.count):
            self.connection.write(PyMemoryView_FromMemory(
                <char *> output.pieces[i].iov_base, output.pieces[i].iov_len, PyBUF_READ))
        output.first = output.count = 0
        output.used = 0
        return 0


cdef bint tls_receive(void *tls, Session *session, uint8_t *buffer, size_t room, size_t size) noexcept with gil:
    cdef ssize_t found
    try:
        (<Tls> tls).take(buffer, size)
        while True:
            found = (<Tls> tls).read(buffer, room)
            if found <= 0:
                return found == 0
            if not session_receive(session, buffer, found):
                return False
    except Exception:
        return False


cdef Written tls_write(void *tls, Output *output, int fd) noexcept with gil:
    try:
        return (<Tls> tls).write(output, fd)
    except Exception:
        return WRITE_FAILED
