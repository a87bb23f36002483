"""The sockets of connections: an I/O thread reads, writes and leaves them.

The thread leaves the front to read, write, decrypt and encrypt (`in_syscall`), if there are several threads. Meanwhile
others may end the connection's calls, but not the connection: `dropped` says that it is to end.

The owner of a socket opens and closes it.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdlib cimport free
from libc.string cimport memset
from posix.unistd cimport read

from inferd._native.front cimport python_post
from inferd._native.transport.closing cimport CONN_PARTING
from inferd._native.transport.direct_read cimport conn_decrypt, conn_read
from inferd._native.transport.expiry cimport conn_output_waits
from inferd._native.transport.http2 cimport (
    conn_close,
    conn_collect,
    conn_compresses,
    conn_end_calls,
    conn_end_round,
    conn_finished,
    conn_linger,
    conn_shut,
)
from inferd._native.transport.io cimport (
    EPOLLERR,
    EPOLLHUP,
    EPOLLIN,
    EPOLLOUT,
    RECEIVE_BUFFER,
    poll_change,
    poll_remove,
)
from inferd._native.transport.ledger cimport charge_release
from inferd._native.transport.outgoing cimport Output, output_clear, output_write
from inferd._native.transport.stream cimport Conn, conn_begin_syscall, conn_end_syscall, mark_dirty
from inferd._native.transport.tls cimport tls_feed, tls_finish, tls_free, tls_write
from inferd._native.transport.turn cimport TURN_BYTES, Turn, turn_goes_on, turn_of, turn_read

cdef extern from *:
    """
    #include <linux/sockios.h>
    #include <sys/ioctl.h>
    #include <sys/socket.h>
    static inline size_t inferd_in_kernel(int fd) {  /* bytes that the peer has not taken */
        int size = 0;
        return ioctl(fd, SIOCOUTQ, &size) == 0 && size > 0 ? (size_t)size : 0;
    }
    static inline void inferd_shut_writing(int fd) { shutdown(fd, SHUT_WR); }
    """
    size_t in_kernel "inferd_in_kernel"(int fd) nogil
    void shut_writing "inferd_shut_writing"(int fd) nogil

cdef enum:
    PREPARED = 1 << 20       # bytes of output prepared at a time
    WRITTEN_AT_MOST = 4 << 20  # bytes of one connection before others have their turn
    DISCARDED = 1 << 20      # bytes of a connection that has ended, read in a round
    UNREAD_TLS = 1 << 20     # bytes of TLS that a peer may leave unread


cdef void socket_ready(Source *source, uint32_t events) noexcept nogil:
    cdef Socket *socket = <Socket *>source
    if socket.conn != NULL and events & <uint32_t>(EPOLLERR | EPOLLHUP):
        socket.broken = True
    if socket.conn != NULL and events & <uint32_t>(EPOLLIN | EPOLLERR | EPOLLHUP):
        socket_read(socket)
    if socket.conn != NULL and events & <uint32_t>EPOLLOUT:
        ask_for_room(socket, False)
        mark_dirty(socket.conn)


cdef void ask_for_room(Socket *socket, bint full) noexcept nogil:
    if socket.full != full:
        socket.full = full
        socket_watch(socket)


cdef void socket_watch(Socket *socket) noexcept nogil:
    poll_change(socket.io.poll_fd, socket.source.fd, socket,
                (0 if socket.ended else <uint32_t>EPOLLIN) | (<uint32_t>EPOLLOUT if socket.full else 0))


cdef void socket_read(Socket *socket) noexcept nogil:
    cdef Conn *conn = socket.conn
    cdef bint goes_on
    if socket.ended:
        goes_on = False
    elif conn.state >= CONN_PARTING:
        goes_on = discard(socket)
    else:
        if socket.tls == NULL:
            goes_on = conn_read(conn, socket.source.fd, socket.io.buffer, turn_of(conn.host, socket.io.ready))
        else:
            goes_on = read_encrypted(socket)
        conn_end_round(conn)
    if socket.dropped:
        socket_leave(socket)
    elif goes_on:
        mark_dirty(conn)
    elif socket.broken:
        socket_leave(socket)
    else:
        socket_end(socket)


cdef void socket_end(Socket *socket) noexcept nogil:
    # The peer has closed its end, and may still read. The thread writes complete responses as far as the peer's windows
    # allow. The other calls are over.
    socket.ended = True
    socket_watch(socket)
    if not socket.shut:
        conn_end_calls(socket.conn)
        mark_dirty(socket.conn)
    elif not socket.last.size:
        socket_leave(socket)


cdef bint read_encrypted(Socket *socket) noexcept nogil:
    # Does what conn_read does. A portion is decrypted to its end, because the buffer serves all connections.
    cdef Conn *conn = socket.conn
    cdef Io *io = socket.io
    cdef size_t total = 0
    cdef size_t wanted
    cdef ssize_t size
    cdef Turn turn = turn_of(conn.host, io.ready)
    cdef bint paused, nothing
    while total < TURN_BYTES and conn.state < CONN_PARTING:
        wanted = conn.portion
        paused = conn_begin_syscall(conn)
        size = read(socket.source.fd, io.encrypted, wanted)
        nothing = size < 0 and (errno == EAGAIN or errno == EINTR)
        conn_end_syscall(conn, paused)
        turn_read(&turn, conn.host, size)
        if size <= 0:
            return nothing
        tls_feed(socket.tls, io.encrypted, <size_t>size)
        conn.received_ns = conn.host.now_ns  # although it may be a part of a record, of which nothing is known yet
        if not conn_decrypt(conn, socket.tls, io.buffer, RECEIVE_BUFFER):
            return False
        if socket.tls.encrypted.size > UNREAD_TLS:
            return False  # it demands answers of TLS, and does not read them
        if not turn_goes_on(conn, &turn, <size_t>size, True) or <size_t>size < wanted:
            return True
        total += wanted
    return True


cdef bint discard(Socket *socket) noexcept nogil:
    # read what a connection that has ended still gets; False: the peer has closed its end, or the socket is broken
    cdef size_t total = 0
    cdef ssize_t size
    while total < DISCARDED:
        size = read(socket.source.fd, socket.io.buffer, RECEIVE_BUFFER)
        if size <= 0:
            return size < 0 and (errno == EAGAIN or errno == EINTR)
        total += <size_t>size
    return True


cdef void socket_flush(Socket *socket) noexcept nogil:
    cdef Conn *conn = socket.conn
    cdef size_t turn = WRITTEN_AT_MOST
    if conn.stalled:
        socket_leave(socket)
        return
    if socket.shut:
        if socket.last.size and not socket.full:
            write_last(socket)
        return
    while not socket.full and not socket.dropped:
        conn_collect(conn, PREPARED)
        if conn.output.size + encrypted(socket) == 0:
            break
        if turn < conn.output.size:
            mark_dirty(conn)
            return
        turn -= conn.output.size
        if not socket_write(socket):
            ask_for_room(socket, True)
    if socket.full or socket.waits:
        socket.waits = socket.full
        conn_output_waits(conn, encrypted(socket), in_kernel(socket.source.fd) if socket.full else 0)
    if socket.dropped or conn.stalled:
        socket_leave(socket)
    elif (conn_finished(conn) or (socket.full and conn.state >= CONN_PARTING)
            or (socket.ended and not socket.full and not conn_compresses(conn))):
        socket_shut(socket)


cdef bint socket_write(Socket *socket) noexcept nogil:
    # write the prepared output; False: the socket is full, or broken
    cdef Conn *conn = socket.conn
    cdef bint whole, paused
    cdef bint good = True
    socket.writing = conn.output
    memset(&conn.output, 0, sizeof(Output))
    conn.output.taken = socket.writing.taken
    paused = conn_begin_syscall(conn)
    whole = write_out(socket, &good)
    conn_end_syscall(conn, paused)
    output_clear(&conn.output)  # nobody else prepares output: a head at most, whose connection has been evicted
    conn.output = socket.writing
    memset(&socket.writing, 0, sizeof(Output))
    if conn.stalled or not good:
        conn.stalled = True
        output_clear(&conn.output)
        return False
    return whole


cdef bint write_out(Socket *socket, bint *good) noexcept nogil:
    if socket.tls == NULL:
        return output_write(&socket.writing, socket.source.fd)
    while output_write(&socket.tls.encrypted, socket.source.fd):
        if socket.writing.size == 0:
            return True
        if not tls_write(socket.tls, &socket.writing):
            good[0] = False
            return False
    return False


cdef void socket_shut(Socket *socket) noexcept nogil:
    # The output is complete: shut the socket for writing behind it, and discard input until the peer closes its end. A
    # socket that is closed while the peer still sends, if only a WINDOW_UPDATE, resets the connection, and the peer
    # loses what it has not received.
    cdef Conn *conn = socket.conn
    socket.shut = True
    conn_collect(conn, PREPARED)
    socket.last = conn.output
    memset(&conn.output, 0, sizeof(Output))
    if socket.tls != NULL and not tls_finish(socket.tls, &socket.last):
        socket_leave(socket)
        return
    conn_shut(conn)
    conn.news.shut = True
    python_post(&conn.host.timers.python, &conn.news.event)
    write_last(socket)


cdef void write_last(Socket *socket) noexcept nogil:
    if socket.last.size and not output_write(&socket.last, socket.source.fd):
        ask_for_room(socket, True)
        return
    charge_release(&socket.conn.framed)
    if socket.ended:
        socket_leave(socket)
        return
    ask_for_room(socket, False)
    shut_writing(socket.source.fd)
    conn_linger(socket.conn)


cdef void socket_leave(Socket *socket) noexcept nogil:
    cdef Conn *conn = socket.conn
    cdef Io *io = socket.io
    if conn == NULL:
        return
    if conn.in_syscall:
        socket.dropped = True
        return
    io.sockets -= 1
    poll_remove(io.poll_fd, socket.source.fd)
    tls_free(socket.tls)
    socket.tls = NULL
    conn.news.lost = True
    python_post(&conn.host.timers.python, &conn.news.event)
    conn_close(conn)
    output_clear(&socket.last)
    conn.socket = NULL
    socket.conn = NULL
    socket.next = io.left
    io.left = socket


cdef void sockets_free_left(Io *io) noexcept nogil:
    cdef Socket *socket
    while io.left != NULL:
        socket = io.left
        io.left = socket.next
        free(socket)
