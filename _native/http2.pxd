# A gRPC server connection without I/O: bytes in, calls and bytes out. It knows no socket, no clock and no Python.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from _native.memory cimport Block
from _native.nghttp2 cimport nghttp2_nv, nghttp2_rcbuf, nghttp2_session
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
    unary_fn unary           # NULL: the call is handed to the host's hooks
    cancel_fn cancel
    void *context

cdef struct HeaderField:
    nghttp2_rcbuf *name
    nghttp2_rcbuf *value

cdef struct Incoming:
    # one received message of a call that is not native
    Incoming *next
    Block *block
    const uint8_t *data
    size_t size

cdef struct Stream:
    Conn *conn
    int32_t id
    const Method *method     # NULL until the path is known
    void *call               # set by the native method or by CallHooks.begin; NULL again once they have answered

    # the request headers
    uint32_t seen            # bits of HEADER_*
    size_t header_bytes
    int64_t timeout_ns       # -1: none
    HeaderField *fields      # custom metadata of a call that is not native
    uint32_t field_count
    uint32_t field_capacity
    char *path               # of a call that is not native

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
    nghttp2_nv *trailers     # custom trailing metadata, from malloc
    size_t trailer_count
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
    void *owner              # whom mark_dirty is about
    Conn *next_dirty
    bint dirty               # in host's list
    bint failed              # the session is beyond use
    bint told                # the peer has read what conn_announce_shutdown sent

cdef enum:
    MAX_NATIVES = 4
    WRITABLE_BELOW = 64 << 10    # unsent bytes of a stream below which its call is told to go on

cdef struct CallHooks:
    # what becomes of calls that are not native; called while bytes are received or collected
    void (*begin)(Stream *stream) noexcept nogil         # the request headers are complete; may set stream.call
    void (*message)(Stream *stream) noexcept nogil       # one more message is in first_in .. last_in
    void (*half_closed)(Stream *stream) noexcept nogil
    void (*writable)(Stream *stream) noexcept nogil      # less than WRITABLE_BELOW is unsent again
    void (*closed)(Stream *stream, uint32_t error_code) noexcept nogil  # the stream is freed after this

cdef struct Host:
    # what all connections of one event loop share
    Method natives[MAX_NATIVES]
    uint32_t native_count
    Method other             # every other path
    CallHooks hooks
    size_t max_message       # bytes of a request message; 0: unlimited
    uint32_t max_streams
    Conn *first_dirty        # connections with output that nobody has asked for yet
    void (*after_receive)(void *context) noexcept nogil  # called when a round of native calls has been made; or NULL
    void *after_context

# --- connections

# Begin a session; False when there is no memory. The Conn is zeroed, and stays where it is until conn_close.
cdef bint conn_open(Conn *conn, Host *host, void *owner) noexcept nogil
# End every call and free the session.
cdef void conn_close(Conn *conn) noexcept nogil
cdef void conn_receive(Conn *conn, const uint8_t *data, size_t size) noexcept nogil
# Frame what can be sent into conn.output, until that holds `limit` bytes.
cdef void conn_collect(Conn *conn, size_t limit) noexcept nogil
# The peer broke the protocol, or everything is said after conn_go_away.
cdef bint conn_finished(Conn *conn) noexcept nogil
# Ask the peer to open no more streams; then refuse further ones.
cdef void conn_announce_shutdown(Conn *conn) noexcept nogil
cdef void conn_go_away(Conn *conn) noexcept nogil
# End every call that is not answered yet with an error; the text is plain UTF-8.
cdef void conn_fail_calls(Conn *conn, int status, const char *details) noexcept nogil
cdef void mark_dirty(Conn *conn) noexcept nogil

# --- streams

# Answer a unary call with one message (taken over) and status OK.
cdef void stream_reply(Stream *stream, Outgoing *message) noexcept nogil
# End a call with an error; the text is plain UTF-8.
cdef void stream_fail(Stream *stream, int status, const char *details) noexcept nogil
# The same in steps: initial metadata, messages (taken over), final status with trailing metadata (from malloc, taken
# over; names and values may lie in the same allocation).
cdef void stream_begin(Stream *stream, const nghttp2_nv *metadata, size_t count) noexcept nogil
cdef void stream_send(Stream *stream, Outgoing *message) noexcept nogil
cdef void stream_end(Stream *stream, int status, const char *details, nghttp2_nv *trailers, size_t count) noexcept nogil
# Break the call off (RST_STREAM).
cdef void stream_reset(Stream *stream) noexcept nogil
# Give back the oldest received message, and with it the peer's credit for more.
cdef void stream_drop_message(Stream *stream) noexcept nogil
