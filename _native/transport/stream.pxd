# A call on a connection: its structures, its life and its answer.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free

from _native.chain cimport Chain, Link
from _native.memory.resource cimport Block, block_give
from _native.transport.budget cimport Budget
from _native.transport.client cimport Client
from _native.transport.compression cimport Encoding, Result
from _native.transport.nghttp2 cimport nghttp2_data_source, nghttp2_frame, nghttp2_nv, nghttp2_rcbuf, nghttp2_session
from _native.transport.outgoing cimport Outgoing, Output
from _native.transport.workers cimport Crew, Job

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

cdef enum:
    # what the request headers have said so far (Stream.seen)
    HEADER_POST = 1
    HEADER_TE = 2
    HEADER_GRPC = 4              # content-type application/grpc
    HEADER_BAD_TIMEOUT = 8
    HEADER_BAD_ENCODING = 16
    HEADER_TOO_LARGE = 32
    HEADER_ALL = 64              # they are complete

cdef struct HeaderField:
    nghttp2_rcbuf *name
    nghttp2_rcbuf *value

cdef struct Incoming:
    # one received message: of a call that is not native, or one that waits to be inflated
    Link link
    Block *block
    const uint8_t *data
    size_t size
    size_t counted           # in stream.queued_bytes
    bint compressed

cdef struct Partial:
    # a place in the list of streams whose request is incomplete
    Stream *stream           # NULL: not in the list
    Partial *previous
    Partial *next

cdef struct Stream:
    Link parked              # in Conn.parked
    Conn *conn
    int32_t id
    const Method *method     # NULL until the path is known
    int64_t arrived_ns       # when its headers began
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
    uint8_t *tail            # from malloc: bytes that a native call's message gets behind it
    size_t tail_size
    uint32_t messages        # received completely
    bint single              # the call has one request message
    int64_t begun_ns         # when what is being received began: the request when it is single, else the message
    size_t held              # bytes of messages that nobody has taken, of Host.held
    size_t charged           # bytes of messages, of Client.bytes
    Partial partial          # in Host.partials
    Chain incoming           # Incoming, complete
    size_t queued_bytes      # in complete messages that nobody has taken
    size_t withheld          # flow-control credit kept back because of them

    Encoding encoding        # of messages that are marked as compressed
    Chain packed             # Incoming, complete messages that wait for the one that is being inflated
    Job *inflating           # on a worker

    # the answer
    uint8_t accepted         # encodings that the client takes, as bits 1 << ENCODING_*
    Encoding answer_encoding  # ENCODING_IDENTITY: answers are not compressed
    int level                # zlib's, of the answers
    Chain uncompressed       # Outgoing that wait for the one that is being compressed
    Job *deflating           # on a worker
    size_t plain             # bytes in all of these
    Chain outgoing           # Outgoing, to be framed
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
    Stream *previous         # in Conn.open
    Stream *next

# Lists of these; see _native.list.

cdef struct Partials:
    Partial *first
    Partial *last

cdef struct Streams:
    Stream *first
    Stream *last

cdef struct Conns:
    Conn *first
    Conn *last

cdef struct Conn:
    Link waiting_link        # in Host.waiting
    nghttp2_session *session
    Host *host
    Client *client           # whose connection it is; NULL: clients have no limits
    const Gatekeeper *gatekeeper  # what its native calls must pass
    Conn *previous           # in Host.connections
    Conn *next
    Output output
    size_t output_limit      # of the `take_output` that is running
    size_t unsent            # bytes of all streams' answers that are not framed yet
    Streams open             # the latest first
    uint32_t streams         # their number
    Chain parked             # Stream, unary calls that wait until the peer reads
    bint waiting             # in host.waiting: calls of it wait for the host's budget
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
    int32_t frame_stream     # of the frame that came last, or is coming
    size_t frame_size        # its bytes when it is DATA without padding, else 0
    size_t frame_left        # so many of them have not come yet
    uint64_t answer_frames   # HEADERS and DATA framed so far
    Budget budget            # for frames that bring no call forward
    bint told                # the peer has read what conn_announce_shutdown sent

cdef enum:
    PREFIX = 5                       # bytes in front of each message
    MAX_NATIVES = 4
    NOT_NOTED = -1               # of Conn.taken_ns: answers have begun to wait, the clock was not looked at yet
    WRITABLE_BELOW = 64 << 10    # unsent bytes of a stream below which its call is told to go on

# What a worker has done for a stream, called on the loop. `message` holds what was inflated when the result is
# RESULT_OK, else still what came; `packed` is NULL when the plain message is to be sent. All of them are taken over.
ctypedef void (*inflated_fn)(Stream *stream, Incoming *message, Result result) noexcept nogil
ctypedef void (*deflated_fn)(Stream *stream, Outgoing *plain, Outgoing *packed) noexcept nogil

cdef struct CallHooks:
    # what becomes of calls that are not native; called while bytes are received or collected
    void (*begin)(Stream *stream) noexcept nogil         # the request headers are complete; may set stream.call
    void (*message)(Stream *stream) noexcept nogil       # one more message is in stream.incoming
    void (*half_closed)(Stream *stream) noexcept nogil
    void (*writable)(Stream *stream) noexcept nogil      # less than WRITABLE_BELOW is unsent again
    void (*closed)(Stream *stream, uint32_t error_code) noexcept nogil  # the stream is freed after this
    void (*pinged)(Conn *conn) noexcept nogil            # the peer has sent a PING, which is answered

cdef struct Gatekeeper:
    # what native calls must pass; all NULL: nothing
    bint (*wants)(void *context, const uint8_t *name, size_t size) noexcept nogil  # keep this header until `admits`
    bint (*admits)(void *context, Stream *stream) noexcept nogil  # headers are complete; False: it has ended the call
    void *context

cdef struct Forwarding:
    # which headers of native calls become parameters of their requests; all NULL: none
    bint (*wants)(void *context, const uint8_t *name, size_t size) noexcept nogil  # keep this header until `attach`
    bint (*attach)(void *context, Stream *stream) noexcept nogil  # sets stream.tail; False: it has ended the call
    void *context

cdef struct Host:
    # what all connections of one event loop share
    Method natives[MAX_NATIVES]
    uint32_t native_count
    Method other             # every other path
    CallHooks hooks
    Gatekeeper gatekeeper
    Forwarding forwarding
    size_t max_message       # bytes of a request message; 0: unlimited
    size_t max_inflated      # the same after decompression
    int native_level         # zlib's, of the answers of native methods; 0: they are not compressed
    Crew *crew               # who inflates and compresses large messages; NULL: it is done at once
    # Where a large message goes that begins with these bytes; NULL, or answering NULL: into ordinary memory.
    Block *(*place)(void *context, const uint8_t *head, size_t head_size, size_t size) noexcept nogil
    void *place_context
    uint32_t max_streams
    size_t unsent_limit      # bytes of answers that wait for their peers, over all connections; 0: unlimited
    size_t unsent            # so many wait; a message counts as a whole until its last byte is framed
    size_t reserved          # so many are expected of the native calls that run
    size_t expected          # of one call: the largest answer, slowly forgotten
    Chain waiting            # Conn, whose calls wait for this budget
    uint64_t direct          # bytes of request messages that were read to where they stay, see receipt.pyx
    size_t held_limit        # bytes of request messages that are incomplete or not taken yet, over all connections
    size_t held              # so many are
    Partials partials        # streams whose request is incomplete, the oldest first
    int64_t receive_ns       # what a request may take to arrive, see host_expire; 0: any time
    Conns connections        # all, the latest first
    bint others_ran          # connections that are not being looked at have something to say: flush the dirty ones
    int64_t spare_frames     # per second and connection, frames that bring no call forward
    int64_t now_ns           # what the host's clock says; set before conn_open and conn_receive
    Conn *first_dirty        # connections with output that nobody has asked for yet
    void (*after_receive)(void *context) noexcept nogil  # called when a round of native calls has been made; or NULL
    void *after_context

# --- calls

# A new stream of the connection; NULL when there is no memory.
cdef Stream *stream_new(Conn *conn, int32_t id) noexcept nogil
# The stream is over, with or without an answer: tell who serves the call, and free it.
cdef void stream_closed(Stream *stream, uint32_t error_code) noexcept nogil
# The request's headers are not needed any more.
cdef void stream_drop_fields(Stream *stream) noexcept nogil

# --- answers

# Answer a unary call with one message (taken over) and status OK.
cdef void stream_reply(Stream *stream, Outgoing *message) noexcept nogil
# End a call with an error; the text is plain UTF-8.
cdef void stream_fail(Stream *stream, int status, const char *details) noexcept nogil
# The same, with an HTTP status other than 200 should the error be the whole answer.
cdef void stream_reject(Stream *stream, int status, const char *details, const char *http_status) noexcept nogil
# The same in steps: initial metadata, messages (taken over), final status with trailing metadata (from malloc, taken
# over; names and values may lie in the same allocation).
cdef void stream_begin(Stream *stream, const nghttp2_nv *metadata, size_t count) noexcept nogil
cdef void stream_send(Stream *stream, Outgoing *message, bint compressible) noexcept nogil
cdef void stream_end(Stream *stream, int status, const char *details, nghttp2_nv *trailers, size_t count) noexcept nogil
# Before the first of these: compress answers with zlib's `level` (0: do not), in `encoding` if the client takes it; an
# `encoding` of ENCODING_UNKNOWN leaves the choice open.
cdef void stream_compress(Stream *stream, Encoding encoding, int level) noexcept nogil
# Break the call off (RST_STREAM).
cdef void stream_reset(Stream *stream) noexcept nogil
# nghttp2's send_data callback for the frames of answers.
cdef int stream_frame(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t length,
                      nghttp2_data_source *source, void *user_data) noexcept nogil


cdef inline size_t stream_unsent(const Stream *stream) noexcept nogil:
    # bytes of answers that are not framed yet
    return stream.plain + stream.unsent


cdef inline bint stream_inflates(const Stream *stream) noexcept nogil:
    # a message is complete that nobody can take yet, because it or one before it is being inflated
    return stream.inflating != NULL or stream.packed.first != NULL


cdef inline int64_t stream_time_left(const Stream *stream) noexcept nogil:
    # nanoseconds until the client's deadline, which counts from the arrival of the headers; -1 when it set none
    cdef int64_t passed = stream.conn.host.now_ns - stream.arrived_ns
    if stream.timeout_ns < 0:
        return -1
    return stream.timeout_ns - passed if passed < stream.timeout_ns else 0


cdef inline void incoming_free(Incoming *message) noexcept nogil:
    block_give(message.block)
    free(message)


cdef inline void mark_dirty(Conn *conn) noexcept nogil:
    # the connection has something to say
    if not conn.dirty:
        conn.dirty = True
        conn.next_dirty = conn.host.first_dirty
        conn.host.first_dirty = conn
