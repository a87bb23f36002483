"""Direct reads: the bytes of a large message are read from the socket into the block where they stay.

While a DATA frame of a message is arriving, the number of the next bytes of the message, and their place, are known.
They are read to that place, and bytes behind them to the buffer that all connections share. nghttp2 gets the bytes from
wherever they are, in order, and counts and checks them as usual; `stream_receive` moves those that are not in place.
If the expectation is wrong, the cost is a copy.

A direct read pays only from some size on. For clients with smaller frames (16 KiB is common) one read takes
all bytes that there are.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t

from inferd._native.memory.resource cimport block_give, block_share
from inferd._native.transport.call_state cimport RECEIVING_MESSAGE
from inferd._native.transport.closing cimport CONN_PARTING
from inferd._native.transport.http2 cimport conn_receive
from inferd._native.transport.nghttp2 cimport nghttp2_session_get_stream_user_data
from inferd._native.transport.stream cimport Conn, Stream, conn_begin_syscall, conn_end_syscall, stream_ended
from inferd._native.transport.tls cimport Tls, tls_feed, tls_read
from inferd._native.transport.turn cimport TURN_BYTES, Turn, turn_goes_on, turn_read

cdef enum:
    HEAD = 9                 # bytes of a frame's head
    BEGINNING = 16 << 10     # bytes of a read in which a large message may begin; its bytes in it are copied
    DIRECT_FROM = 32 << 10   # bytes of a message and of a frame that are worth a read of their own

cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t readv(int fd, const iovec *parts, int count)


cdef Stream *large_message(const Conn *conn) noexcept nogil:
    # the stream of the arriving or last frame; NULL unless that frame and its message are large
    cdef Stream *stream
    if conn.session == NULL or conn.frame_size < DIRECT_FROM:
        return NULL
    stream = <Stream *>nghttp2_session_get_stream_user_data(conn.session, conn.frame_stream)
    if stream == NULL or stream_ended(stream) or stream.receiver.state != RECEIVING_MESSAGE:
        return NULL
    return stream if stream.receiver.size >= DIRECT_FROM else NULL


cdef ReadTarget conn_read_target(const Conn *conn, uint8_t *buffer) noexcept nogil:
    cdef Stream *stream = large_message(conn)
    cdef size_t left = stream.receiver.size - stream.receiver.received if stream != NULL else 0
    cdef size_t room = stream.receiver.room - stream.receiver.received if stream != NULL else 0
    cdef ReadTarget target
    if room and conn.frame_left:
        target.data = stream.receiver.data + stream.receiver.received
        target.size = min(room, conn.frame_left)
        target.block = stream.receiver.block
        target.behind = HEAD if left - target.size >= DIRECT_FROM else BEGINNING
    else:
        target.data = buffer
        target.size = HEAD if left >= DIRECT_FROM else BEGINNING
        target.block = NULL
        target.behind = 0
    return target


cdef void conn_received(Conn *conn, const ReadTarget *target, uint8_t *buffer, size_t size) noexcept nogil:
    cdef size_t filled = min(size, target.size)
    if target.block != NULL:
        block_share(target.block)  # the received bytes may end the call
    conn_receive(conn, target.data, filled)
    if size > filled:
        conn_receive(conn, buffer, size - filled)
    block_give(target.block)


cdef inline ReadTarget next_target(const Conn *conn, uint8_t *buffer, size_t capacity) noexcept nogil:
    cdef ReadTarget target = conn_read_target(conn, buffer)
    if target.block == NULL and conn.frame_size < DIRECT_FROM:
        target.size = capacity  # nothing large is coming, as far as is known
    return target


cdef inline void hold(const ReadTarget *target) noexcept nogil:
    # others may end the call to which the target belongs
    if target.block != NULL:
        block_share(target.block)


cdef bint conn_read(Conn *conn, int fd, uint8_t *buffer, Turn turn) noexcept nogil:
    cdef ReadTarget target
    cdef iovec parts[2]
    cdef size_t wanted
    cdef size_t total = 0
    cdef ssize_t size
    cdef bint paused, nothing
    while total < TURN_BYTES and conn.state < CONN_PARTING:
        target = next_target(conn, buffer, conn.portion)
        parts[0].iov_base = target.data
        parts[0].iov_len = target.size
        parts[1].iov_base = buffer
        parts[1].iov_len = target.behind
        wanted = target.size + target.behind
        hold(&target)
        paused = conn_begin_syscall(conn)
        size = readv(fd, parts, 2)
        nothing = size < 0 and (errno == EAGAIN or errno == EINTR)
        conn_end_syscall(conn, paused)
        turn_read(&turn, conn.host, size)
        if size > 0:
            conn_received(conn, &target, buffer, <size_t>size)
        block_give(target.block)
        if size <= 0:
            return nothing
        if not turn_goes_on(conn, &turn, <size_t>size, target.block == NULL) or <size_t>size < wanted:
            return True
        total += wanted
    return True


cdef bint conn_decrypt(Conn *conn, Tls *tls, uint8_t *buffer, size_t capacity) noexcept nogil:
    cdef ReadTarget target
    cdef Py_ssize_t size
    cdef bint paused
    while conn.state < CONN_PARTING:
        target = next_target(conn, buffer, capacity)
        hold(&target)
        paused = conn_begin_syscall(conn)
        size = tls_read(tls, target.data, target.size)
        conn_end_syscall(conn, paused)
        if size > 0:
            conn_received(conn, &target, buffer, <size_t>size)
        block_give(target.block)
        if size <= 0:
            return size == 0
    tls_feed(tls, NULL, 0)  # nothing more is read
    return True
