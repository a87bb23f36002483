# One HTTP/2 connection and the slots of its calls.

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from inferd_client.driver.call cimport Call
from inferd_client._native.nghttp2 cimport nghttp2_nv
from inferd_client._native.session cimport Ending, Session

cdef enum:
    READ_SIZE = 1 << 18
    MOST_HEADERS = 32        # of a request

# A call has ended. Its slot belongs to the callee, which starts another call on it or gives it back.
ctypedef void (*call_ended_fn)(Connection *connection, Call *call, Ending ending) noexcept nogil

cdef struct Connection:
    Session session
    void *owner
    call_ended_fn ended
    int epoll                # where it is polled
    uint8_t *buffer          # READ_SIZE bytes to read into, of the owner
    bint keeps_responses     # otherwise the bytes of responses are dropped
    int fd
    PyObject *tls            # a Tls, or NULL
    bint dead
    bint polls_write         # registered for EPOLLOUT
    bint no_memory           # for a response; the connection is dead
    Call *calls
    uint32_t capacity
    Call *free_calls
    Call *last_free
    bint in_turn             # free slots are used in turn: each has a state of its own
    uint64_t closed          # calls that ended here
    Call **doomed            # calls that will be reset
    uint32_t doomed_count

# Begin the handshake on a socket, which then belongs to the connection, with its Tls or None. owner, ended, epoll and
# buffer are set. Raises MemoryError.
cdef int connection_open(Connection *connection, int fd, object tls, int32_t window, uint32_t max_frame_size) except -1
# Send GOAWAY, close the connection and free what connection_open made.
cdef void connection_close(Connection *connection) noexcept nogil

# Make slots for this number of calls, and reset the counters. False if there is no memory.
cdef bint connection_take_slots(Connection *connection, uint32_t count) noexcept nogil
cdef void connection_give_slots(Connection *connection) noexcept nogil

# No further calls are possible: GOAWAY was received, or the connection is dead.
cdef inline bint connection_refuses(const Connection *connection) noexcept nogil:
    return connection.dead or connection.session.refusing

cdef inline Call *slot_take(Connection *connection) noexcept nogil:
    # there is a free slot
    cdef Call *call = connection.free_calls
    connection.free_calls = call.next_free
    return call

cdef inline void slot_give(Connection *connection, Call *call) noexcept nogil:
    call.exchange.stream = -1
    if connection.in_turn and connection.free_calls != NULL:
        call.next_free = NULL
        connection.last_free.next_free = call
        connection.last_free = call
        return
    call.next_free = connection.free_calls
    if call.next_free == NULL:
        connection.last_free = call
    connection.free_calls = call

# Start the call, whose request is prepared. False: the connection takes no more. The last header is grpc-timeout.
cdef bint connection_submit(Connection *connection, Call *call, const nghttp2_nv *headers,
                            uint32_t count) noexcept nogil
# Reset the call after this number of others have ended.
cdef void connection_doom(Connection *connection, Call *call, uint64_t after) noexcept nogil
cdef void connection_spare(Connection *connection, Call *call) noexcept nogil
# Reset the doomed calls whose time has come, if their requests are on the wire.
cdef void connection_reset_doomed(Connection *connection) noexcept nogil

# Read once from the socket, and report the calls that end.
cdef void connection_receive(Connection *connection) noexcept nogil
# Let nghttp2 serialise, and write, until nothing is left or the socket is full.
cdef void connection_flush(Connection *connection) noexcept nogil
# The connection is gone: its calls in flight are lost.
cdef void connection_bury(Connection *connection) noexcept nogil
