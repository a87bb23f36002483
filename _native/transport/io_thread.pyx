"""The rounds of I/O threads: wait for descriptors, timers and responses, and process them without the GIL.

A round: the thread waits, enters the front, handles each descriptor that is ready, writes the output of its connections
that have some, and leaves the front. Between two descriptors it gives way to a thread that wants the front. Work for
Python is posted to the event loop (`inferd._native.front`), so nothing here waits for the interpreter.

A connection belongs to one thread from `take` to `Connection.on_lost`; only this thread reads and writes its socket
(`inferd._native.transport.sockets`). So several threads copy tensors at the same time, and take turns for the rest,
about a microsecond a request. The first thread alone has the timers, the thread pool and the responses of instances.
Output for the connections of another thread wakes that thread.
"""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from posix.unistd cimport close, read, write

from inferd._native.clock cimport now_ns
from inferd._native.front cimport (
    PythonEvent,
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
from inferd._native.transport.connection cimport Connection
from inferd._native.transport.eviction cimport host_relieve
from inferd._native.transport.expiry cimport conn_collected
from inferd._native.transport.io cimport RECEIVE_BUFFER, Io, Socket, Source, io_forget, io_watch
from inferd._native.transport.ledger cimport account_exceeded
from inferd._native.transport.sockets cimport encrypted, socket_flush, socket_leave, socket_ready, sockets_free_left
from inferd._native.transport.stream cimport Conn, Host, end_round, host_look, mark_dirty, unmark_dirty
from inferd._native.transport.thread_pool cimport thread_pool_drain
from inferd._native.transport.tls cimport TlsSession
from inferd._native.transport.trim cimport host_note
from inferd._native.transport.turn cimport MOST_PORTION

import threading

cdef extern from *:
    """
    #include <sched.h>
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    enum { INFERD_AT_ONCE = 64 };  /* descriptors of one round */
    typedef struct { void *source; uint32_t events; } inferd_ready;
    static inline int inferd_poll(int poll_fd, inferd_ready *ready, int timeout) {
        struct epoll_event events[INFERD_AT_ONCE];
        int count = epoll_wait(poll_fd, events, INFERD_AT_ONCE, timeout);
        for (int i = 0; i < count; i++) ready[i] = (inferd_ready){events[i].data.ptr, events[i].events};
        return count;
    }
    static inline int inferd_poll_make(void) { return epoll_create1(EPOLL_CLOEXEC); }
    static inline int inferd_wakeup(void) { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); }
    static __thread int inferd_delivers;  /* the thread's round still comes to Host.deliver */
    """
    enum:
        AT_ONCE "INFERD_AT_ONCE"
    ctypedef struct Ready "inferd_ready":
        void *source
        uint32_t events
    int sched_yield() nogil
    int poll_make "inferd_poll_make"() nogil
    int poll "inferd_poll"(int poll_fd, Ready *ready, int timeout) nogil
    int make_wakeup "inferd_wakeup"() nogil
    bint delivers "inferd_delivers"

cdef int64_t OBJECTS_WAIT_NS = 20000000


# ---------------------------------------------------------------------------------------------------------------------
# What the thread waits for beside sockets

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
# Objects of Python whose memory has been written to sockets. The thread of an instance that executes releases them; if
# none does, the event loop does it after a while.

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


cdef int await_events(const Io *io, Ready *ready) noexcept nogil:
    # To sleep and to be woken takes a virtual machine 10 to 50 microseconds: a thread that polls meanwhile is sooner.
    cdef int64_t until = 0
    cdef int count = 0
    if io.again:
        return poll(io.poll_fd, ready, 0)
    if io.busy_ns:
        until = now_ns() + io.busy_ns
        while count == 0:
            count = poll(io.poll_fd, ready, 0)
            if now_ns() >= until:
                break
            if count == 0:
                sched_yield()  # to other work on this core, perhaps the client
    return count if count else poll(io.poll_fd, ready, -1)


cdef void io_run(Io *io) noexcept nogil:
    global delivers
    cdef Ready ready[AT_ONCE]
    cdef int count, i
    cdef Source *source
    exact_timers()
    while True:
        count = await_events(io, ready)
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
        sockets_free_left(io)
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
    sockets_free_left(io)
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
        busy_ns: how long each polls for events before it sleeps, nanoseconds; 0: it sleeps at once.
    """

    def __cinit__(self, Endpoint endpoint not None, count: int = 1, busy_ns: int = 0):
        cdef int64_t busy = busy_ns
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
            self.more[i].busy_ns = busy
            self.io.others = &self.more[i]
        self.io.busy_ns = busy
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
