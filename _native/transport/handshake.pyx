"""The handshake of TLS of one socket: the I/O thread waits for the socket, and the thread pool does the cryptography.

A handshake takes up to some milliseconds of a core, so it is a job of its client, like the compression of a message:
many handshakes of one client delay neither connections nor another client's handshake.
"""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free

from inferd._native.atomic cimport load32, store32
from inferd._native.front cimport PythonEvent, front_enter, front_leave, python_post
from inferd._native.transport.io cimport Io, Source, io_await, io_forget, io_watch_once
from inferd._native.transport.io_thread cimport IoThreads
from inferd._native.transport.stream cimport Host
from inferd._native.transport.thread_pool cimport Job, thread_pool_submit, thread_pool_withdraw
from inferd._native.transport.tls cimport (
    SHAKES_DONE,
    SHAKES_FAILED,
    SHAKES_READ,
    SHAKES_WRITE,
    TlsContext,
    TlsSession,
    tls_accept,
)

cdef extern from "<sys/socket.h>" nogil:
    int SHUT_RDWR
    int shutdown(int fd, int how)

cdef enum:
    COST = 1 << 20           # as many bytes of compression take about the time of a handshake


cdef void socket_is_ready(Source *source, uint32_t events) noexcept nogil:
    cdef Shaking *shaking = <Shaking *>source.owner
    cdef Io *io = shaking.io
    if load32(&shaking.job.cancelled):
        has_shaken(&shaking.job)
    elif io.host.thread_pool == NULL or not thread_pool_submit(io.host.thread_pool, &shaking.job, shaking.client):
        shake(&shaking.job)
        has_shaken(&shaking.job)


cdef uint64_t shake(Job *job) noexcept nogil:
    cdef Shaking *shaking = <Shaking *>job
    job.whole = True
    if load32(&job.cancelled):
        return 0
    shaking.state = tls_accept(shaking.tls, &shaking.why)
    return COST


cdef void has_shaken(Job *job) noexcept nogil:
    # Also called when the pool closes before a thread has taken the job: then the handshake has failed.
    cdef Shaking *shaking = <Shaking *>job
    cdef bint goes_on = job.whole and not load32(&job.cancelled)
    job.whole = False
    if goes_on and (shaking.state == SHAKES_READ or shaking.state == SHAKES_WRITE):
        if io_await(shaking.io, &shaking.source, shaking.state == SHAKES_WRITE):
            return
        goes_on = False
    if not goes_on:
        shaking.state = SHAKES_FAILED
    io_forget(shaking.io, &shaking.source)
    python_post(&shaking.io.host.timers.python, &shaking.over)


cdef int is_over(PythonEvent *event) except -1:
    cdef Handshake handshake = <Handshake>event.owner
    front_leave()
    on_over, handshake.on_over = handshake.on_over, None
    Py_DECREF(handshake)
    on_over()
    return 0


cdef class Handshake(TlsSession):
    """The handshake of an accepted socket. It begins with the first bytes of the client.

    Args:
        thread: waits for the socket, and lives until the handshake is over.
        context: of the listener.
        fd: the socket, which does not block. The owner keeps it open until `on_over` is called.
        client: whose share of the thread pool it uses.
        on_over: called on the event loop once: the handshake is done, or has failed.

    Raises:
        OSError: the system refuses to watch the socket.
        MemoryError: there is no memory for TLS.
    """

    def __init__(self, IoThreads thread not None, TlsContext context not None, fd: int, client: int, on_over):
        cdef bint watched
        TlsSession.__init__(self, context, fd)
        self.thread = thread
        self.shaking.io = &thread.io
        self.shaking.tls = self.tls
        self.shaking.client = client
        self.shaking.job.run = shake
        self.shaking.job.done = has_shaken
        self.shaking.source.fd = fd
        self.shaking.source.owner = &self.shaking
        self.shaking.source.ready = socket_is_ready
        self.shaking.over.run = is_over
        self.shaking.over.owner = <void *>self
        self.shaking.state = SHAKES_FAILED
        self.on_over = on_over
        Py_INCREF(self)  # until `is_over`
        front_enter()
        watched = io_watch_once(&thread.io, &self.shaking.source)
        front_leave()
        if not watched:
            Py_DECREF(self)
            raise OSError(errno, "cannot watch the socket")

    def __dealloc__(self):
        free(self.shaking.why)

    def abort(self) -> None:
        """Give up: shut the socket down, and have the handshake fail soon; at once if the threads have ended."""
        cdef Host *host = self.shaking.io.host
        front_enter()
        if not self.shaking.over.posted and self.on_over is not None:
            store32(&self.shaking.job.cancelled, 1)
            shutdown(self.shaking.source.fd, SHUT_RDWR)
            if host.wake == NULL or (
                    host.thread_pool != NULL and thread_pool_withdraw(host.thread_pool, &self.shaking.job)):
                has_shaken(&self.shaking.job)
        front_leave()

    @property
    def done(self) -> bool:
        """Whether it is over, and has succeeded."""
        return self.shaking.state == SHAKES_DONE

    @property
    def failure(self) -> str | None:
        """OpenSSL's reason why it has failed; None: the client is gone, or it has not failed."""
        return None if self.shaking.why == NULL else self.shaking.why.decode("utf-8", "replace")
