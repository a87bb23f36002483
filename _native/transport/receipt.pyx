"""Direct receipt: the bytes of a large message are read from the socket into the block where they stay.

While a DATA frame of a message is coming, it is known how many bytes of the message come next, and where they belong.
So they are read to there, and what is behind them to the buffer that all connections share. nghttp2 is fed from wherever
bytes are, in their order, counts and judges them as ever, and `stream_receive` moves what is not in its place: nothing
but a copy depends on what was expected to come.

A read of its own pays from some size on only. Clients whose frames are below it (16 KiB is common) are read as many
bytes at a time as there are.
"""

from libc.stdint cimport uint8_t

from _native.memory.resource cimport block_give, block_share
from _native.transport.http2 cimport conn_receive
from _native.transport.nghttp2 cimport nghttp2_session_get_stream_user_data
from _native.transport.stream cimport PREFIX, Conn, Stream

cdef enum:
    HEAD = 9                 # bytes of a frame's head
    BEGINNING = 16 << 10     # bytes that are read where a large message may begin; those of it are copied
    DIRECT_FROM = 32 << 10   # bytes that are worth a read of their own
    READ_AT_MOST = 512 << 10  # bytes before others have their turn

cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t readv(int fd, const iovec *parts, int count)


cdef size_t message_left(const Conn *conn, Stream **stream) noexcept nogil:
    # bytes that the message of the frame that came last, or is coming, still wants; 0 when it has no place
    if conn.session == NULL or conn.frame_size < DIRECT_FROM:
        return 0
    stream[0] = <Stream *>nghttp2_session_get_stream_user_data(conn.session, conn.frame_stream)
    if stream[0] == NULL or stream[0].ended or stream[0].block == NULL or stream[0].prefix_size < PREFIX:
        return 0
    return stream[0].size - stream[0].received


cdef Landing conn_landing(const Conn *conn, uint8_t *buffer) noexcept nogil:
    cdef Stream *stream = NULL
    cdef Landing landing
    cdef size_t left = message_left(conn, &stream)
    cdef size_t coming = min(left, conn.frame_left)
    if coming >= DIRECT_FROM:
        landing.data = stream.data + stream.received
        landing.size = coming
        landing.block = stream.block
        landing.behind = HEAD if left > coming else BEGINNING
    else:
        landing.data = buffer
        landing.size = HEAD if left >= DIRECT_FROM and conn.frame_left == 0 else BEGINNING
        landing.block = NULL
        landing.behind = 0
    return landing


cdef void conn_received(Conn *conn, const Landing *landing, uint8_t *buffer, size_t size) noexcept nogil:
    cdef size_t landed = min(size, landing.size)
    if landing.block != NULL:
        block_share(landing.block)  # what comes may end the call
    conn_receive(conn, landing.data, landed)
    if size > landed:
        conn_receive(conn, buffer, size - landed)
    block_give(landing.block)


cdef void conn_read(Conn *conn, int fd, uint8_t *buffer, size_t capacity) noexcept nogil:
    cdef Landing landing
    cdef iovec parts[2]
    cdef size_t wanted
    cdef size_t total = 0
    cdef ssize_t size
    while total < READ_AT_MOST and not conn.failed and not conn.leaving:
        landing = conn_landing(conn, buffer)
        if landing.block == NULL and conn.frame_size < DIRECT_FROM:
            landing.size = capacity  # nothing large is coming, as far as is known
        parts[0].iov_base = landing.data
        parts[0].iov_len = landing.size
        parts[1].iov_base = buffer
        parts[1].iov_len = landing.behind
        wanted = landing.size + landing.behind
        size = readv(fd, parts, 2)
        if size <= 0:
            return  # the caller's next read tells it why
        conn_received(conn, &landing, buffer, <size_t>size)
        if <size_t>size < wanted:
            return
        total += wanted
