# A gRPC server connection without I/O: bytes in, calls and bytes out. It knows no socket, no clock and no Python.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from _native.budget cimport Budget
from _native.compression cimport Encoding
from _native.memory cimport Block
from _native.nghttp2 cimport nghttp2_nv, nghttp2_rcbuf, nghttp2_session
from _native.outgoing cimport Outgoing, Output
from _native.workers cimport Crew, Job

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
    # one received message: of a call that is not native, or one that waits to be inflated
    Incoming *next
    Block *block
    const uint8_t *data
    size_t size
    bint compressed

cdef struct Stream:
    Conn *conn
    int32_t id
    const Method *method     # NULL until the path is known
    uint64_t caller          # who makes a native call, as the gatekeeper found; 0: nobody known
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

    Encoding encoding        # of messages that are marked as compressed
    Incoming *first_packed   # complete messages that wait for the one that is being inflated
    Incoming *last_packed
    Job *inflating           # on a worker

    # the answer
    uint8_t accepted         # encodings that the client takes, as bits 1 << ENCODING_*
    Encoding answer_encoding  # ENCODING_IDENTITY: answers are not compressed
    int level                # zlib's, of the answers
    Outgoing *first_plain    # messages that wait for the one that is being compressed
    Outgoing *last_plain
    Job *deflating           # on a worker
    size_t plain             # bytes in all of these
    Outgoing *first_out
    Outgoing *last_out
    size_t unsent            # bytes in them
    size_t reserved          # of the host's budget, for the answer of a native call that runs
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
    Conn *next_waiting
    bint waiting             # in host's list: calls of it wait for the host's budget
    bint reads               # it has taken at least one answer completely
    uint32_t running         # native calls that run
    int64_t taken_ns         # when answers began to wait, or their bytes were last framed
    void *owner              # whom mark_dirty is about
    int64_t user             # whose process is at the other end of a unix socket; -1: not known
    Conn *next_dirty
    bint dirty               # in host's list
    bint failed              # the session is beyond use
    bint leaving             # nothing more is read or answered: a GOAWAY is the last frame
    bint left                # it has been framed
    bint greeted             # the preface and the peer's first SETTINGS have come
    int64_t received_ns      # when the peer last sent anything
    uint64_t answer_frames   # HEADERS and DATA framed so far
    Budget budget            # for frames that bring no call forward
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
    void (*pinged)(Conn *conn) noexcept nogil            # the peer has sent a PING, which is answered

cdef struct Gatekeeper:
    # what native calls must pass; all NULL: nothing
    bint (*wants)(void *context, const uint8_t *name, size_t size) noexcept nogil  # keep this header until `admits`
    bint (*admits)(void *context, Stream *stream) noexcept nogil  # headers are complete; False: it has ended the call
    void *context

cdef struct Host:
    # what all connections of one event loop share
    Method natives[MAX_NATIVES]
    uint32_t native_count
    Method other             # every other path
    CallHooks hooks
    Gatekeeper gatekeeper
    size_t max_message       # bytes of a request message; 0: unlimited
    size_t max_inflated      # the same after decompression
    int native_level         # zlib's, of the answers of native methods; 0: they are not compressed
    Crew *crew               # who inflates and compresses large messages; NULL: it is done at once
    uint32_t max_streams
    size_t unsent_limit      # bytes of answers that wait for their peers, over all connections; 0: unlimited
    size_t unsent            # so many wait; a message counts as a whole until its last byte is framed
    size_t reserved          # so many are expected of the native calls that run
    size_t expected          # of one call: the largest answer, slowly forgotten
    Conn *first_waiting      # whose calls wait for this budget
    Conn *last_waiting
    bint others_ran          # calls of connections that are not being looked at have run: flush the dirty ones
    int64_t spare_frames     # per second and connection, frames that bring no call forward
    int64_t now_ns           # what the host's clock says; set before conn_open and conn_receive
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
cdef void conn_go_away(Conn *conn, const char *debug) noexcept nogil
# Send a PING; its answer counts as any other byte of the peer (received_ns).
cdef void conn_ping(Conn *conn) noexcept nogil
# Send the peer away (GOAWAY ENHANCE_YOUR_CALM) and be finished.
cdef void conn_calm(Conn *conn, const char *debug) noexcept nogil
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
cdef void stream_send(Stream *stream, Outgoing *message, bint compressible) noexcept nogil
cdef void stream_end(Stream *stream, int status, const char *details, nghttp2_nv *trailers, size_t count) noexcept nogil
# Before the first of these: compress answers with zlib's `level` (0: do not), in `encoding` if the client takes it; an
# `encoding` of ENCODING_UNKNOWN leaves the choice open.
cdef void stream_compress(Stream *stream, Encoding encoding, int level) noexcept nogil
# Bytes of answers that are not framed yet.
cdef size_t stream_unsent(const Stream *stream) noexcept nogil
# A message is complete that nobody can take yet, because it or one before it is being inflated.
cdef bint stream_inflates(const Stream *stream) noexcept nogil
# The result of jobs may have begun native calls.
cdef void jobs_done(Host *host) noexcept nogil
# Break the call off (RST_STREAM).
cdef void stream_reset(Stream *stream) noexcept nogil
# Give back the oldest received message, and with it the peer's credit for more.
cdef void stream_drop_message(Stream *stream) noexcept nogil
