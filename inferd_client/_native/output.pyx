"""The output of a connection, gathered for one writev."""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t
from libc.string cimport memcpy

from inferd_client._native.linux cimport iovec, writev


cdef void output_refer(Output *output, const uint8_t *data, size_t size) noexcept nogil:
    output.pieces[output.count].iov_base = <void *> data
    output.pieces[output.count].iov_len = size
    output.count += 1


cdef void output_copy(Output *output, const uint8_t *data, size_t size) noexcept nogil:
    cdef uint8_t *place = output.arena + output.used
    cdef iovec *last
    memcpy(place, data, size)
    output.used += size
    if not output_empty(output):
        last = &output.pieces[output.count - 1]
        if <uint8_t *> last.iov_base + last.iov_len == place:
            last.iov_len += size
            return
    output_refer(output, place, size)


cdef Written output_write(Output *output, int fd) noexcept nogil:
    cdef ssize_t size
    cdef iovec *piece
    while not output_empty(output):
        size = writev(fd, &output.pieces[output.first], output.count - output.first)
        if size < 0:
            if errno == EINTR:
                continue
            return WOULD_BLOCK if errno == EAGAIN else WRITE_FAILED
        while size > 0:
            piece = &output.pieces[output.first]
            if <size_t> size < piece.iov_len:
                piece.iov_base = <uint8_t *> piece.iov_base + size
                piece.iov_len -= size
                break
            size -= piece.iov_len
            output.first += 1
    output.first = output.count = 0
    output.used = 0
    return WROTE_ALL
