# A gRPC server connection without I/O: bytes in, calls and bytes out. It knows no socket and no clock.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from _native.memory cimport Block
from _native.nghttp2 cimport nghttp2_rcbuf, nghttp2_session
from _native.outgoing cimport Outgoing, Output

# A unary method that is handled without Python: it gets the one request message (a reference to `block` that it owns,
# and the bytes in it) once the client has half-closed, and answers by stream_reply or stream_fail, now or later on the
# same thread. `timeout_ns` is the client's, -1 for none. It may set stream.call, which is handed to `cancel_fn` when
# the stream ends before the answer.
ctypedef void (*unary_fn)(void *context, Stream *stream, Block *block, const uint8_t *data, size_t size,
                          int64_t timeout_ns) noexcept nogil
ctypedef void (*cancel_fn)(void *call) noexcept nogil

cdef struct Method:
    char *path
    size_t path_size
    unary_fn unary           # NULL: Python handles the call
    cancel_fn cancel
    void *context

cdef struct HeaderField:
    nghttp2_rcbuf *name
    nghttp2_rcbuf *value

cdef struct Incoming:
    # one received message of a call that Python handles
    Incoming *next
    Block *block
    const uint8_t *data
    size_t size

cdef struct Stream:
    Conn *conn
    int32_t id
    const Method *method     # NULL until the path is known
    void *call               # of a native method: its business; else the Call object (one reference)

    # the request headers
    uint32_t seen            # bits of HEADER_*
    size_t header_bytes
    int64_t timeout_ns       # -1: none
    HeaderField *fields      # custom metadata; for calls that Python handles
    uint32_t field_count
    uint32_t field_capacity
    char *path               # of a call that Python handles

    # the message being received
    uint8_t prefix[5]
    uint32_t prefix_size
    Block *block
    uint8_t *data
    size_t size
    size_t received
    uint32_t messages        # received completely
    Incoming *first_in
    Incoming *last_in
    size_t queued_bytes      # in complete messages that nobody has taken
    size_t withheld          # flow-control credit kept back because of them

    # the answer
    Outgoing *first_out
    Outgoing *last_out
    size_t unsent            # bytes in them
    bint headers_sent
    bint waiting             # nghttp2 asked for data when there was none
    bint ended               # status is final; nothing more will be queued
    bint remote_closed       # the client has half-closed
    int status
    char *details            # percent-encoded, from malloc
    void *trailers           # list of header pairs (one reference), NULL for none
    Stream *next_parked
    Stream *next             # of the connection's open streams
    Stream *previous

cdef struct Conn:
    nghttp2_session *session
    Host *host
    Output output
    size_t output_limit      # of the `take_output` that is running
    size_t unsent            # bytes of all streams' answers that are not framed yet
    Stream *first_stream     # open streams
    uint32_t streams         # their number
    Stream *first_parked     # unary calls that wait until the peer reads
    Stream *last_parked
    void *owner              # the Connection; not a reference
    Conn *next_dirty
    bint dirty               # in host's list
    bint failed              # the session is beyond use

cdef enum:
    MAX_NATIVES = 4

cdef struct Host:
    # what all connections of one event loop share
    Method natives[MAX_NATIVES]
    uint32_t native_count
    Method python            # every other path
    uint8_t *receive         # where sockets are read to, one at a time
    size_t receive_size
    size_t max_message       # bytes of a request message; 0: unlimited
    uint32_t max_streams
    Conn *first_dirty        # connections with output that nobody has asked for yet
    void (*after_receive)(void *context) noexcept nogil  # called when a round of native calls has been made; or NULL
    void *after_context

# Answer a unary call with one message (taken over) and status OK.
cdef void stream_reply(Stream *stream, Outgoing *message) noexcept nogil
# End a call with an error; the text is plain UTF-8.
cdef void stream_fail(Stream *stream, int status, const char *details) noexcept nogil


cdef class Endpoint:
    cdef Host host
    cdef object on_call      # called with each new Call
    cdef public object on_dirty  # called when flush_dirty has become necessary
    cdef int add_native(self, bytes path, unary_fn unary, cancel_fn cancel, void *context) except -1


cdef class Connection:
    cdef Conn conn
    cdef Endpoint endpoint
    cdef public object flush     # called without arguments when there is output to take
    cdef readonly object peer
    cdef list events             # (Call, kind) for the calls' owners
    cdef int dispatch(self) except -1
    cdef void forget_dirty(self)
    cdef void free_session(self)


cdef class Call:
    cdef Stream *stream      # NULL once the stream is closed
    cdef readonly Connection connection
    cdef readonly str path
    cdef readonly tuple metadata
    cdef readonly int64_t timeout_ns
    cdef readonly object closed_by   # HTTP/2 error code with which the stream closed; None while it is open
    cdef public object on_event      # called with one of the EVENT_* names
    cdef Stream *open_stream(self) except NULL
    cdef void touched(self)
