# The state of an I/O thread, and the descriptors that it waits for. Its rounds are in `io_thread`, its sockets in
# `sockets`.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from inferd._native.front cimport PythonEvent
from inferd._native.timers cimport Timer
from inferd._native.transport.outgoing cimport Output
from inferd._native.transport.stream cimport Conn, Dirty, Host
from inferd._native.transport.tls cimport Tls

cdef extern from *:
    """
    #include <sys/epoll.h>
    static inline int inferd_poll_add(int poll_fd, int fd, void *source, uint32_t events) {
        struct epoll_event e = {.events = events, .data = {.ptr = source}};
        return epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &e);
    }
    static inline int inferd_poll_change(int poll_fd, int fd, void *source, uint32_t events) {
        struct epoll_event e = {.events = events, .data = {.ptr = source}};
        return epoll_ctl(poll_fd, EPOLL_CTL_MOD, fd, &e);
    }
    static inline void inferd_poll_remove(int poll_fd, int fd) { epoll_ctl(poll_fd, EPOLL_CTL_DEL, fd, NULL); }
    """
    enum:
        EPOLLIN
        EPOLLOUT
        EPOLLERR
        EPOLLHUP
        EPOLLONESHOT
    int poll_add "inferd_poll_add"(int poll_fd, int fd, void *source, uint32_t events) nogil
    int poll_change "inferd_poll_change"(int poll_fd, int fd, void *source, uint32_t events) nogil
    void poll_remove "inferd_poll_remove"(int poll_fd, int fd) nogil

cdef enum:
    RECEIVE_BUFFER = 256 << 10  # bytes of the buffer that sockets are read to

cdef struct Source:
    # a descriptor that the thread waits for; a member of the structure that it belongs to
    int fd
    void (*ready)(Source *source, uint32_t events) noexcept nogil   # within the front
    void *owner              # that structure, if it does not begin with the source

cdef struct Socket:
    # the socket of one connection
    Source source            # the first member
    Io *io
    Conn *conn               # NULL: the thread has left the socket
    Tls *tls                 # NULL: the socket is not encrypted
    bint full                # it takes no more output now
    bint waits               # the connection has been told that output waits
    bint ended               # the peer has closed its end: nothing more is read
    bint broken              # it has failed: nothing is read or written any more
    bint shut                # no other output than `last` will be written
    Output writing           # what a system call writes, outside of the front
    bint dropped             # it is to be left when its thread is back in the front
    Output last              # the last output of a connection that is shut; with TLS, encrypted
    Socket *next             # in Io.left

cdef struct Io:
    int poll_fd
    Source wakeup            # an eventfd
    bint woken               # it has been written
    bint again               # a connection has more to write than its turn allowed: do not wait
    bint stopping
    int64_t busy_ns          # how long it polls before it sleeps; 0: it sleeps at once
    Host *host
    uint8_t *buffer          # for reads
    uint8_t *encrypted       # the same, for bytes that are to be decrypted
    Dirty *dirty             # connections of this thread that have output
    Dirty own                # that list, unless it is the host's
    bint waits               # it waits for events, or is about to
    int ready                # descriptors of this round
    uint32_t sockets
    Io *others               # the next thread of the host, in a ring
    Socket *left             # sockets that are freed at the end of the round
    Timer objects            # set while Python objects wait for their release
    PythonEvent drained      # has the event loop release them


# Within the front, or before the thread runs: have it wait for a descriptor. False: the system refuses.
cdef inline bint io_watch(Io *io, Source *source) noexcept nogil:
    return poll_add(io.poll_fd, source.fd, source, <uint32_t>EPOLLIN) == 0


# Wait until the descriptor is readable, once. Each `io_await` waits for one more event, of either kind.
cdef inline bint io_watch_once(Io *io, Source *source) noexcept nogil:
    return poll_add(io.poll_fd, source.fd, source, <uint32_t>(EPOLLIN | EPOLLONESHOT)) == 0


cdef inline bint io_await(Io *io, Source *source, bint writable) noexcept nogil:
    cdef uint32_t events = <uint32_t>(EPOLLOUT | EPOLLONESHOT if writable else EPOLLIN | EPOLLONESHOT)
    return poll_change(io.poll_fd, source.fd, source, events) == 0


# Within the front: have it wait for the descriptor no more.
cdef inline void io_forget(Io *io, Source *source) noexcept nogil:
    poll_remove(io.poll_fd, source.fd)
