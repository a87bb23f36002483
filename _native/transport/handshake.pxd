# The handshake of TLS of one socket: the I/O thread waits for the socket, and the thread pool does the cryptography.

from libc.stdint cimport uint64_t

from inferd._native.front cimport PythonEvent
from inferd._native.transport.io cimport Io, Source
from inferd._native.transport.io_thread cimport IoThreads
from inferd._native.transport.thread_pool cimport Job
from inferd._native.transport.tls cimport Handshaken, Tls, TlsSession

cdef struct Shaking:
    Job job                  # the first member
    Source source
    Io *io
    Tls *tls
    uint64_t client          # whose turn in the thread pool it takes
    Handshaken state
    char *why                # of a failure, from malloc; NULL: the peer is gone, or there is none
    PythonEvent over


cdef class Handshake(TlsSession):
    cdef Shaking shaking
    cdef IoThreads thread
    cdef object on_over
