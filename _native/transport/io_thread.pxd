# I/O threads: read and write sockets, and do all work of the front that follows, without the GIL.

from libc.stdint cimport uint8_t, uint32_t

from inferd._native.front cimport PythonEvent
from inferd._native.timers cimport Timer
from inferd._native.transport.endpoint cimport Endpoint
from inferd._native.transport.outgoing cimport Output
from inferd._native.transport.stream cimport Conn, Dirty, Host
from inferd._native.transport.tls cimport Tls

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
    bint broken              # neither does it take anything
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
    Host *host
    uint8_t *buffer          # for reads
    uint8_t *encrypted       # the same, for bytes that are to be decrypted
    Dirty *dirty             # connections of this thread that have output
    Dirty own                # that list, unless it is the host's
    bint waits               # for events, or soon
    int ready                # descriptors of this round
    uint32_t sockets
    Io *others               # the next thread of the host, in a ring
    Socket *left             # sockets that are freed at the end of the round
    Timer objects            # set while objects of Python wait to be let go of
    PythonEvent drained      # the event loop is to do that

# Within the front, or before the thread runs: have it wait for a descriptor. False: the system refuses.
cdef bint io_watch(Io *io, Source *source) noexcept nogil
# The same for one event: then `io_await`, with another event, has it wait for one more.
cdef bint io_watch_once(Io *io, Source *source) noexcept nogil
cdef bint io_await(Io *io, Source *source, bint writable) noexcept nogil
# Within the front: begin a round soon, because output was made outside of one; `context` is the Io.
cdef void io_wake(void *context) noexcept nogil
# Whether the caller is an I/O thread that will call Host.deliver in this round.
cdef bint io_delivers() noexcept nogil
# Within the front: have it wait for the descriptor no more.
cdef void io_forget(Io *io, Source *source) noexcept nogil


cdef class IoThreads:
    cdef Io io                   # the first thread's
    cdef Io *more                # the others'
    cdef uint32_t count          # of the others
    cdef readonly Endpoint endpoint
    cdef list threads
    cdef Source timers
    cdef Source jobs
    cdef Io *choose(self) noexcept
