"""I/O threads wait for sockets, timers and responses, and process them without the GIL.

A round: the thread waits, enters the front, handles each descriptor that is ready, writes the output of its connections
that have some, and leaves the front. Between two descriptors it gives way to a thread that wants the front. Work for
Python is posted to the event loop (`inferd._native.front`), so nothing here waits for the interpreter.

A connection belongs to one thread from `take` on, until that tells `Connection.on_lost`; only this thread reads and
writes its socket. If there are several threads, each leaves the front to read, write, decrypt and encrypt (`in_call`):
so they copy tensors at the same time, and take turns for the rest, about a microsecond a request. Meanwhile others may
end the connection's calls, but not the connection: `dropped` says that it is to end. The first thread alone has the
timers, the thread pool and the responses of instances; output for the connections of another thread wakes that one.

The owner of a socket opens and closes it.
"""

cimport cython
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset
from posix.unistd cimport close, read, write

from inferd._native.front cimport (
    front_begin,
    front_end,
    front_enter,
    front_enter_nogil,
    front_hurry,
    front_leave,
    front_yield,
    python_post,
    python_withdraw,
)
from inferd._native.memory.owned cimport owned_drain, owned_promise, owned_waits
from inferd._native.threads cimport exact_timers, thread_name
from inferd._native.timers cimport Timer, timers_clear, timers_expire, timers_set
from inferd._native.transport.closing cimport CONN_PARTING
from inferd._native.transport.connection cimport Connection
from inferd._native.transport.direct_read cimport conn_decrypt, conn_read
from inferd._native.transport.eviction cimport host_relieve
from inferd._native.transport.expiry cimport conn_collected, conn_waits
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
from inferd._native.transport.ledger cimport account_exceeded, charge_release
from inferd._native.transport.outgoing cimport Output, output_clear, output_write
from inferd._native.transport.stream cimport (
    Host,
    conn_begin_call,
    conn_end_call,
    end_round,
    host_look,
    mark_dirty,
    unmark_dirty,
)
from inferd._native.transport.tls cimport TlsSession, tls_feed, tls_finish, tls_free, tls_write
from inferd._native.transport.trim cimport host_note
from inferd._native.transport.turn cimport MOST_PORTION, TURN_BYTES, Turn, turn_goes_on, turn_of, turn_read
from inferd._native.transport.workers cimport thread_pool_drain

import threading

cdef extern from *:
    """
    #include <linux/sockios.h>
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    #include <sys/ioctl.h>
    #include <sys/socket.h>
    enum { INFERD_AT_ONCE = 64 };  /* descriptors of one round */
    typedef struct { void *source; uint32_t events; } inferd_ready;
    static inline int inferd_poll_add(int poll_fd, int fd, void *source, uint32_t events) {
        struct epoll_event e = {.events = events, .data = {.ptr = source}};
        return epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &e);
    }
    static inline int inferd_poll_change(int poll_fd, int fd, void *source, uint32_t events) {
        struct epoll_event e = {.events = events, .data = {.ptr = source}};
        return epoll_ctl(poll_fd, EPOLL_CTL_MOD, fd, &e);
    }
    static inline void inferd_poll_remove(int poll_fd, int fd) { epoll_ctl(poll_fd, EPOLL_CTL_DEL, fd, NULL); }
    static inline int inferd_poll(int poll_fd, inferd_ready *ready, int timeout) {
        struct epoll_event events[INFERD_AT_ONCE];
        int count = epoll_wait(poll_fd, events, INFERD_AT_ONCE, timeout);
        for (int i = 0; i < count; i++) ready[i] = (inferd_ready){events[i].data.ptr, events[i].events};
        return count;
    }
    static inline int inferd_poll_make(void) { return epoll_create1(EPOLL_CLOEXEC); }
    static inline int inferd_wakeup(void) { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); }
    static inline size_t inferd_in_kernel(int fd) {  /* bytes that the peer has not taken */
        int size = 0;
        return ioctl(fd, SIOCOUTQ, &size) == 0 && size > 0 ? (size_t)size : 0;
    }
    static inline void inferd_shut_writing(int fd) { shutdown(fd, SHUT_WR); }
    static __thread int inferd_delivers;  /* the thread's round still comes to Host.deliver */
    """
    enum:
        EPOLLIN
        EPOLLOUT
        EPOLLERR
        EPOLLHUP
        EPOLLONESHOT
        AT_ONCE "INFERD_AT_ONCE"
    ctypedef struct Ready "inferd_ready":
        void *source
        uint32_t events
    int poll_make "inferd_poll_make"() nogil
    int poll_add "inferd_poll_add"(int poll_fd, int fd, void *source, uint32_t events) nogil
    int poll_change "inferd_poll_change"(int poll_fd, int fd, void *source, uint32_t events) nogil
    void poll_remove "inferd_poll_remove"(int poll_fd, int fd) nogil
    int poll "inferd_poll"(int poll_fd, Ready *ready, int timeout) nogil
    int make_wakeup "inferd_wakeup"() nogil
    size_t in_kernel "inferd_in_kernel"(int fd) nogil
    void shut_writing "inferd_shut_writing"(int fd) nogil
    bint delivers "inferd_delivers"

cdef enum:
    RECEIVE_BUFFER = 256 << 10  # bytes of the buffer that sockets are read to
    PREPARED = 1 << 20       # bytes of output prepared at a time
    WRITTEN_AT_MOST = 4 << 20  # bytes of one connection before others have their turn
    DISCARDED = 1 << 20      # bytes of a connection that has ended, read in a round
    ANSWERS = 1 << 20        # bytes of TLS that a peer may leave unread

cdef int64_t OBJECTS_WAIT_NS = 20000000


# ---------------------------------------------------------------------------------------------------------------------
# What the thread waits for

cdef bint io_watch(Io *io, Source *source) noexcept nogil:
    return poll_add(io.poll_fd, source.fd, source, <uint32_t>EPOLLIN) == 0


cdef bint io_watch_once(Io *io, Source *source) noexcept nogil:
    return poll_add(io.poll_fd, source.fd, source, <uint32_t>(EPOLLIN | EPOLLONESHOT)) == 0


cdef bint io_await(Io *io, Source *source, bint writable) noexcept nogil:
    cdef uint32_t events = <uint32_t>(EPOLLOUT | EPOLLONESHOT if writable else EPOLLIN | EPOLLONESHOT)
    return poll_change(io.poll_fd, source.fd, source, events) == 0


cdef void io_forget(Io *io, Source *source) noexcept nogil:
    poll_remove(io.poll_fd, source.fd)


cdef void io_wake(void *context) noexcept nogil:
    cdef Io *io = <Io *>context
    cdef uint64_t one = 1
    if not io.woken:
        io.woken = True
        write(io.wakeup.fd, &one, sizeof(one))


cdef void was_woken(Source *source, uint32_t events) noexcept nogil:
    cdef Io *io = <Io *>source.owner
    cdef uint64_t count
    read(source.fd, &count, sizeof(count))
    io.woken = False


cdef void time_has_come(Source *source, uint32_t events) noexcept nogil:
    timers_expire((<Io *>source.owner).host.timers)


cdef void jobs_are_done(Source *source, uint32_t events) noexcept nogil:
    thread_pool_drain((<Io *>source.owner).host.thread_pool)


# ---------------------------------------------------------------------------------------------------------------------
# Sockets

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
    # The peer has closed its end, and may still read. The thread writes complete answers as far as the peer's windows
    # allow. The other calls are over.
    socket.ended = True
    socket_watch(socket)
    if not socket.shut:
        conn_end_calls(socket.conn)
        mark_dirty(socket.conn)
    elif not socket.last.size:
        socket_leave(socket)


cdef bint read_encrypted(Socket *socket) noexcept nogil:
    # as conn_read; a portion is decrypted to its end, because the buffer serves all connections
    cdef Conn *conn = socket.conn
    cdef Io *io = socket.io
    cdef size_t total = 0
    cdef size_t wanted
    cdef ssize_t size
    cdef Turn turn = turn_of(conn.host, io.ready)
    cdef bint paused, nothing
    while total < TURN_BYTES and conn.state < CONN_PARTING:
        wanted = conn.portion
        paused = conn_begin_call(conn)
        size = read(socket.source.fd, io.encrypted, wanted)
        nothing = size < 0 and (errno == EAGAIN or errno == EINTR)
        conn_end_call(conn, paused)
        turn_read(&turn, conn.host, size)
        if size <= 0:
            return nothing
        tls_feed(socket.tls, io.encrypted, <size_t>size)
        if not conn_decrypt(conn, socket.tls, io.buffer, RECEIVE_BUFFER):
            return False
        if socket.tls.encrypted.size > ANSWERS:
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
    # write until all is written, the socket is full, or it is the turn of others
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
        conn_waits(conn, encrypted(socket), in_kernel(socket.source.fd) if socket.full else 0)
    if socket.dropped or conn.stalled:
        socket_leave(socket)
    elif (conn_finished(conn) or (socket.full and conn.state >= CONN_PARTING)
            or (socket.ended and not socket.full and not conn_compresses(conn))):
        socket_shut(socket)


cdef inline size_t encrypted(const Socket *socket) noexcept nogil:
    return socket.tls.encrypted.size if socket.tls != NULL else 0


cdef bint socket_write(Socket *socket) noexcept nogil:
    # write the prepared output; False: the socket is full, or broken
    cdef Conn *conn = socket.conn
    cdef bint whole, paused
    cdef bint good = True
    socket.writing = conn.output
    memset(&conn.output, 0, sizeof(Output))
    conn.output.taken = socket.writing.taken
    paused = conn_begin_call(conn)
    whole = write_out(socket, &good)
    conn_end_call(conn, paused)
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
    # the peer is gone, or must go: the owner closes the socket
    cdef Conn *conn = socket.conn
    cdef Io *io = socket.io
    if conn == NULL:
        return
    if conn.in_call:
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


cdef void free_left(Io *io) noexcept nogil:
    # at the end of a round, when no descriptor that was reported refers to them
    cdef Socket *socket
    while io.left != NULL:
        socket = io.left
        io.left = socket.next
        free(socket)


# ---------------------------------------------------------------------------------------------------------------------
# Objects of Python whose memory has been written to sockets. An instance that executes lets go of them; when none does,
# the event loop is told after a while.

cdef void look_at_objects(Io *io) noexcept nogil:
    if io.objects.slot == 0 and owned_waits():
        timers_set(io.host.timers, &io.objects, io.host.now_ns + OBJECTS_WAIT_NS)  # if this fails: the next time


cdef void tell_of_objects(Timer *timer, int64_t now) noexcept nogil:
    cdef Io *io = <Io *>timer.owner
    if owned_waits():
        python_post(&io.host.timers.python, &io.drained)


cdef int let_go_of_objects(PythonEvent *event) except -1:
    front_leave()
    owned_drain()
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Rounds

cdef void flush_all(Io *io) noexcept nogil:
    # the output of all connections that have some, and what is due at the end of a round
    global delivers
    cdef Host *host = io.host
    cdef Conn *conn
    end_round(host)
    delivers = False
    if host.deliver != NULL:
        host.deliver(host.bridge)
    if account_exceeded(&host.account):
        host_relieve(host)
    wake_others(io)
    io.dirty.now = io.dirty.first
    io.dirty.first = NULL
    while io.dirty.now != NULL:
        conn = io.dirty.now
        io.dirty.now = conn.next_dirty
        conn.dirty = False
        if conn.socket != NULL:
            socket_flush(<Socket *>conn.socket)
        conn_collected(conn)
        front_yield()
    if account_exceeded(&host.account):
        host_relieve(host)  # of output that sockets have not taken
    end_round(host)  # of calls that waited until their peer took output
    wake_others(io)
    io.again = io.dirty.first != NULL  # those that have more to write than their turn allows
    host_note(host)
    look_at_objects(io)


cdef void wake_others(Io *io) noexcept nogil:
    # threads whose connections have got output
    cdef Io *other = io.others
    while other != io:
        if other.waits and other.dirty.first != NULL:
            io_wake(other)
        other = other.others


cdef bint io_delivers() noexcept nogil:
    return delivers


cdef void io_run(Io *io) noexcept nogil:
    global delivers
    cdef Ready ready[AT_ONCE]
    cdef int count, i
    cdef Source *source
    exact_timers()
    while True:
        count = poll(io.poll_fd, ready, 0 if io.again else -1)
        front_enter_nogil()
        io.waits = False
        io.ready = count
        delivers = True
        host_look(io.host)
        for i in range(count):
            if i:
                host_look(io.host)  # deadlines count from the read of their call, not from the beginning of the round
            source = <Source *>ready[i].source
            source.ready(source, ready[i].events)
            front_yield()
        flush_all(io)
        if io.host.after != NULL:
            io.host.after(io.host.bridge)
        free_left(io)
        io.waits = True
        if io.stopping:
            front_leave()
            return
        front_leave()


cdef int io_begin(Io *io, Host *host, Io *others) except -1:
    io.host = host
    io.others = others
    io.waits = True
    io.wakeup.fd = -1
    io.poll_fd = poll_make()
    io.wakeup.fd = make_wakeup()
    io.wakeup.owner = io
    io.wakeup.ready = was_woken
    io.objects.fire = tell_of_objects
    io.objects.owner = io
    io.drained.run = let_go_of_objects
    if io.poll_fd < 0 or io.wakeup.fd < 0 or not io_watch(io, &io.wakeup):
        raise OSError(errno, "cannot make the descriptors of an I/O thread")
    io.buffer = <uint8_t *>malloc(RECEIVE_BUFFER)
    io.encrypted = <uint8_t *>malloc(MOST_PORTION)
    if io.buffer == NULL or io.encrypted == NULL:
        raise MemoryError
    return 0


cdef void io_close(Io *io) noexcept:
    free_left(io)
    free(io.buffer)
    free(io.encrypted)
    if io.wakeup.fd >= 0:
        close(io.wakeup.fd)
    if io.poll_fd >= 0:
        close(io.poll_fd)


@cython.no_gc_clear  # __dealloc__ and the threads need the endpoint
cdef class IoThreads:
    """Serve the sockets of an endpoint's connections, its timers and its thread pool.

    Args:
        endpoint: served by these threads only, from `start` to `stop`.
        count: how many.
    """

    def __cinit__(self, Endpoint endpoint not None, count: int = 1):
        cdef uint32_t i
        self.endpoint = endpoint
        self.threads = []
        self.io.poll_fd = self.io.wakeup.fd = -1
        self.more = <Io *>calloc(max(count, 1), sizeof(Io))
        if self.more == NULL:
            raise MemoryError
        io_begin(&self.io, &endpoint.host, &self.io)
        self.io.dirty = &endpoint.host.dirty
        for i in range(<uint32_t>max(count - 1, 0)):
            self.count += 1
            io_begin(&self.more[i], &endpoint.host, self.io.others)
            self.more[i].dirty = &self.more[i].own
            self.io.others = &self.more[i]
        self.timers.fd = endpoint.host.timers.fd
        self.timers.owner = &self.io
        self.timers.ready = time_has_come
        self.jobs.fd = endpoint.host.thread_pool.event_fd if endpoint.host.thread_pool != NULL else -1
        self.jobs.owner = &self.io
        self.jobs.ready = jobs_are_done

    def __dealloc__(self):
        cdef uint32_t i
        io_close(&self.io)
        for i in range(self.count):
            io_close(&self.more[i])
        free(self.more)

    def start(self) -> None:
        """Start the threads. From now on only the event loop may use the endpoint beside them."""
        if not io_watch(&self.io, &self.timers) or (
                self.jobs.fd >= 0 and not io_watch(&self.io, &self.jobs)):
            raise OSError(errno, "cannot watch the timers")
        self.io.host.rounds = True
        self.io.host.wake = io_wake
        self.io.host.wake_context = &self.io
        owned_promise(True)
        try:
            for number in range(self.count + 1):
                thread = threading.Thread(target=self._run, args=(number,), name=f"inferd-io-{number}", daemon=True)
                front_begin()
                self.threads.append(thread)
                thread.start()
        except BaseException:
            front_end()
            self.threads.pop()
            self._end()
            raise

    def _run(self, number: int) -> None:
        cdef Io *io = &self.io if number == 0 else &self.more[number - 1]
        thread_name(b"inferd-io")
        front_hurry()
        with nogil:
            io_run(io)

    def stop(self) -> None:
        """End the threads, and leave all sockets. The event loop has the endpoint to itself again."""
        cdef Conn *conn
        cdef Conn *following
        if not self.threads:
            return
        self._end()
        conn = self.io.host.connections.first
        while conn != NULL:
            following = conn.next
            if conn.socket != NULL:
                socket_leave(<Socket *>conn.socket)
            conn = following

    def _end(self) -> None:
        """End the threads that run."""
        cdef Io *io = &self.io
        front_enter()
        while self.threads:
            io.stopping = True
            io_wake(io)
            io = io.others
            if io == &self.io:
                break
        front_leave()
        for thread in self.threads:
            thread.join()
            front_end()
        self.threads.clear()
        while True:
            io.stopping = False
            timers_clear(io.host.timers, &io.objects)
            python_withdraw(&io.host.timers.python, &io.drained)
            io = io.others
            if io == &self.io:
                break
        owned_promise(False)
        owned_drain()
        io_forget(&self.io, &self.timers)
        if self.jobs.fd >= 0:
            io_forget(&self.io, &self.jobs)
        self.io.host.wake = NULL
        self.io.host.rounds = False

    cdef Io *choose(self) noexcept:
        # the thread with fewest sockets
        cdef Io *chosen = &self.io
        cdef Io *io = self.io.others
        while io != &self.io:
            if io.sockets < chosen.sockets:
                chosen = io
            io = io.others
        return chosen

    def take(self, Connection connection not None, fd: int, TlsSession session=None) -> None:
        """Read and write this socket, which does not block, for the connection. The owner keeps both until `on_lost`.

        Args:
            session: of TLS, after its handshake; without one the socket is not encrypted.

        Raises:
            OSError: the system refuses to watch it, or the threads have ended.
        """
        cdef Conn *conn = &connection.conn
        cdef Socket *socket
        cdef bint watched
        if not self.threads:
            raise OSError("the threads of the server have ended")
        socket = <Socket *>calloc(1, sizeof(Socket))
        if socket == NULL:
            raise MemoryError("no memory for a connection")
        socket.source.fd = fd
        socket.source.ready = socket_ready
        socket.conn = conn
        front_enter()
        socket.io = self.choose()
        unmark_dirty(conn)
        conn.writer = socket.io.dirty
        conn.socket = socket
        watched = io_watch(socket.io, &socket.source)
        if not watched:
            conn.socket = NULL
            conn.writer = &conn.host.dirty
        else:
            socket.io.sockets += 1
            if session is not None:
                socket.tls = session.tls
                session.tls = NULL
                mark_dirty(conn)  # the client has chosen HTTP/2: the server's SETTINGS need not wait
                io_wake(socket.io)
        front_leave()
        if not watched:
            free(socket)
            raise OSError(errno, "cannot watch the socket")

    def drop(self, Connection connection not None) -> None:
        """Leave the connection's socket: its calls end, and `on_lost` is called. No effect if it was left."""
        cdef Io *io
        front_enter()
        if connection.conn.socket != NULL:
            io = (<Socket *>connection.conn.socket).io
            socket_leave(<Socket *>connection.conn.socket)
            io_wake(io)  # the thread frees the socket
        front_leave()

    def unwritten(self, Connection connection not None) -> int:
        """Bytes of output that the socket has not accepted yet."""
        cdef Socket *socket
        cdef size_t size
        front_enter()
        socket = <Socket *>connection.conn.socket
        size = connection.conn.output.size
        if socket != NULL:
            size += socket.writing.size + socket.last.size + encrypted(socket)
        front_leave()
        return size
