# A call on a connection: its structures, its states, its life and its answer.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free

from _native.chain cimport Chain, Link
from _native.clock cimport now_ns
from _native.memory.resource cimport Block, block_give
from _native.memory.small cimport Smalls
from _native.timers cimport Timer, Timers
from _native.traceparent cimport TraceContext
from _native.transport.budget cimport Budget
from _native.transport.client cimport Client
from _native.transport.compression cimport Encoding, Result
from _native.transport.ledger cimport Account, Charge, charge_release
from _native.transport.nghttp2 cimport nghttp2_data_source, nghttp2_frame, nghttp2_nv, nghttp2_rcbuf, nghttp2_session
from _native.transport.outgoing cimport Outgoing, Output
from _native.transport.workers cimport Job, ThreadPool

# The states of a call. Each side has its own; a transition not in the table cannot happen.
#
#   receiving                  what comes                      next
#   RECEIVING_HEADERS          the end of the header block     RECEIVING_PREFIX
#   RECEIVING_PREFIX           the fifth byte of a prefix      RECEIVING_MESSAGE, or RECEIVING_PREFIX after no bytes
#                              the client's half-close         RECEIVED_ALL
#   RECEIVING_MESSAGE          its last byte                   RECEIVING_PREFIX
#                              the client's half-close         RECEIVED_ALL: the call has failed
#   RECEIVED_ALL               nothing
#
#   answer                     what is said                    next
#   ANSWER_NONE                initial metadata or a message   ANSWER_OPEN
#                              the status, no message          ANSWER_LAST: headers and trailers are one frame
#                              the status, messages that are   ANSWER_READY
#                              still being compressed
#   ANSWER_OPEN                a message                       ANSWER_OPEN
#                              the status                      ANSWER_LAST
#   ANSWER_READY               a message is compressed         ANSWER_LAST
#   ANSWER_LAST                nothing; what is queued leaves
#   any but ANSWER_CUT         the call is broken off          ANSWER_CUT: what is queued is dropped

cdef enum Receiving:
    RECEIVING_HEADERS        # the header block is not complete
    RECEIVING_PREFIX         # between messages, or within the five bytes in front of one
    RECEIVING_MESSAGE        # within a message
    RECEIVED_ALL             # the client has half-closed

cdef enum Answer:
    # from ANSWER_READY on the status is decided, and nothing more is queued
    ANSWER_NONE              # nothing was said
    ANSWER_OPEN              # the headers are submitted
    ANSWER_READY             # they will be, with the first message
    ANSWER_LAST              # they are
    ANSWER_CUT               # RST_STREAM is submitted

# How the calls of a method are served: a table for each kind of service. All are called on the loop, while bytes are
# received or collected, but for `closed`, which is also called where the transport ends a call.
cdef struct Service:
    bint single              # a call has one request message
    int64_t reset_cost       # frames that a reset by the peer costs, see budget.pxd
    # Whether this header is kept in stream.fields until `begin`; NULL: all are.
    bint (*wants)(Stream *stream, const uint8_t *name, size_t size) noexcept nogil
    # The request headers are complete. May end the call, or set stream.call.
    void (*begin)(Stream *stream) noexcept nogil
    # Where a large message of `size` bytes goes that begins with these; NULL: into ordinary memory. May end the call.
    Block *(*place)(Stream *stream, const uint8_t *head, size_t head_size, size_t size) noexcept nogil
    void (*message)(Stream *stream) noexcept nogil       # one more message is in stream.incoming
    void (*half_closed)(Stream *stream) noexcept nogil   # there will be no more
    void (*writable)(Stream *stream) noexcept nogil      # less than WRITABLE_BELOW is unsent again
    # The client's deadline has passed; NULL: who runs the call sees to that. Only while stream.call is set.
    void (*late)(Stream *stream) noexcept nogil
    # The answer is not wanted any more, the stream is over or will be. Only while stream.call is set, which it clears.
    void (*closed)(Stream *stream, uint32_t error_code) noexcept nogil

cdef enum:
    STATUSES = 17            # of gRPC

cdef struct CallCounts:
    # the calls of a method, whichever way they went
    uint64_t started
    uint64_t handled[STATUSES]   # by status; CANCELLED: also those that the client broke off

cdef struct Method:
    char *path
    size_t path_size
    const Service *service
    void *context            # the service's
    CallCounts counts

cdef enum:
    # what the request headers have said so far (Stream.seen)
    HEADER_POST = 1
    HEADER_TE = 2
    HEADER_GRPC = 4              # content-type application/grpc
    HEADER_BAD_TIMEOUT = 8
    HEADER_BAD_ENCODING = 16
    HEADER_TOO_LARGE = 32

cdef struct HeaderField:
    nghttp2_rcbuf *name
    nghttp2_rcbuf *value

cdef struct KnownField:
    # A header of the last call, at the same place among its headers. HPACK lets a client name a header that it has sent
    # before, and nghttp2 gives the same buffers for it then: what it says need not be read again.
    nghttp2_rcbuf *name      # references; NULL: nothing is known
    nghttp2_rcbuf *value
    size_t bytes             # as MAX_HEADER_BYTES counts them
    Method *method           # native, that it names; NULL: none
    uint32_t seen            # bits of HEADER_* that it sets
    uint8_t accepted         # bits for Sender.accepted

cdef struct Incoming:
    # one complete request message that nobody has taken
    Link link
    Block *block
    const uint8_t *data
    size_t size
    Charge charge
    bint compressed
    bint embedded            # in its stream; else from malloc

cdef struct Receiver:
    # the message being received
    Receiving state
    uint8_t prefix[5]
    uint32_t prefix_size     # bytes of it that have come
    Block *block             # NULL before the first byte of a message
    uint8_t *data
    size_t size              # as announced
    size_t room              # bytes at `data`: as many as announced, or fewer while little has come
    size_t received
    Charge charge            # for `room`
    int64_t begun_ns         # when what is being received began: the request when it is single, else the message
    uint32_t messages        # received completely

cdef struct Sender:
    # the answer
    Answer state
    uint8_t accepted         # encodings that the client takes, as bits 1 << ENCODING_*
    Encoding encoding        # ENCODING_IDENTITY: messages are not compressed
    int level                # zlib's
    Chain uncompressed       # Outgoing that wait for the one that is being compressed
    Job *deflating           # on a worker
    size_t plain             # bytes in all of these
    Chain outgoing           # Outgoing, to be framed
    size_t unsent            # bytes in them
    int64_t waits_ns         # since when the first of them waits for the peer; 0: it was not offered yet
    bint deferred            # nghttp2 asked for data when there was none
    int status
    char *details            # percent-encoded, from malloc
    nghttp2_nv *trailers     # custom trailing metadata, from malloc
    size_t trailer_count

cdef struct Stream:
    Link parked              # in Conn.parked
    Conn *conn
    int32_t id
    Method *method           # NULL until the path is known
    int64_t arrived_ns       # when its headers began
    TraceContext context     # of its `traceparent`, where Host.traced
    nghttp2_rcbuf *baggage   # to which that refers
    void *call               # the service's; NULL: it has none, or has done with the stream

    # the head
    uint32_t seen            # bits of HEADER_*
    uint32_t header_count
    size_t header_bytes
    int64_t timeout_ns       # -1: none
    HeaderField *fields      # custom metadata, until the service has begun the call
    uint32_t field_count
    uint32_t field_capacity
    char *path               # of a call that is not native
    bint single              # the call has one request message
    uint64_t caller          # of a native call, as the interceptor found; 0: nobody known
    uint8_t *forwarded       # from malloc: headers that its request carries, as the forwarding has written them
    size_t forwarded_size

    Receiver receiver
    Incoming first           # embedded: the message of nearly all calls
    Chain incoming           # Incoming, complete
    Encoding encoding        # of messages that are marked as compressed
    Chain compressed         # Incoming, complete messages that wait for the one that is being inflated
    Job *inflating           # on a worker
    size_t queued            # bytes of complete messages that nobody has taken
    size_t withheld          # flow-control credit kept back because of them
    Charge executed          # of requests that are taken and not answered

    Sender sender
    Timer timer              # of all that may take too long, see expiry.pxd
    Stream *previous         # in Conn.open
    Stream *next

# Lists of these; see _native.list.

cdef struct Streams:
    Stream *first
    Stream *last

cdef struct Conns:
    Conn *first
    Conn *last

cdef enum:
    REMEMBERED = 16
    KNOWN_FIELDS = 12

cdef struct Conn:
    nghttp2_session *session
    Host *host
    Client *client           # whose connection it is; NULL: not known
    Account account          # what it makes the server hold
    const Interceptor *interceptor  # what its native calls must pass
    Conn *previous           # in Host.connections
    Conn *next
    Output output
    size_t output_limit      # of the `take_output` that is running
    size_t unsent            # bytes of all streams' answers that are not framed yet
    bint answered            # some of them have come since the peer was offered what there is
    Streams open             # the latest first
    uint32_t streams         # their number
    Stream *latest           # that nghttp2 has called back for; NULL: it is over
    size_t received          # bytes of DATA for which the connection has not got credit again yet
    KnownField known[KNOWN_FIELDS]  # the first headers of calls
    Chain parked             # Stream, unary calls that wait until the peer reads
    void *owner              # whom mark_dirty is about
    int64_t user             # whose process is at the other end of a unix socket; -1: not known
    uint64_t identity        # who that is, by certificate or user; 0: not known
    Conn *next_dirty
    bint dirty               # in host's list
    bint failed              # the session is beyond use
    bint leaving             # nothing more is read or answered: a GOAWAY is the last frame
    bint left                # it has been framed
    bint http1               # the peer speaks HTTP/1: the last thing that is written is an answer in it
    bint greeted             # the preface and the peer's first SETTINGS have come
    int64_t received_ns      # when the peer last sent anything
    int32_t frame_stream     # of the frame that came last, or is coming
    size_t frame_size        # its bytes when it is DATA without padding, else 0
    size_t frame_left        # so many of them have not come yet
    uint64_t answer_frames   # HEADERS and DATA framed so far
    Budget budget            # for frames that bring no call forward
    int32_t last_stream      # the latest that the peer has opened
    int32_t over[REMEMBERED]  # the latest that it has ended or reset
    uint32_t over_count      # so many have been noted in turn
    bint told                # the peer has read what conn_announce_shutdown sent

cdef enum:
    PREFIX = 5                       # bytes in front of each message
    MAX_NATIVES = 4
    WRITABLE_BELOW = 64 << 10    # unsent bytes of a stream below which its call is told to go on

# What a worker has done for a stream, called on the loop. `message` holds what was inflated when the result is
# RESULT_OK, else still what came; `deflated` is NULL when the plain message is to be sent. All of them are taken over.
ctypedef void (*inflated_fn)(Stream *stream, Incoming *message, Result result) noexcept nogil
ctypedef void (*deflated_fn)(Stream *stream, Outgoing *plain, Outgoing *deflated) noexcept nogil

cdef struct Interceptor:
    # what native calls must pass; all NULL: nothing
    bint (*wants)(void *context, const uint8_t *name, size_t size) noexcept nogil  # keep this header until `admits`
    bint (*admits)(void *context, Stream *stream) noexcept nogil  # headers are complete; False: it has ended the call
    void *context

cdef struct Forwarding:
    # which headers native calls forward to their requests; all NULL: none
    bint (*wants)(void *context, const uint8_t *name, size_t size) noexcept nogil  # keep this header until `attach`
    bint (*attach)(void *context, Stream *stream) noexcept nogil  # sets stream.forwarded; False: it has ended the call
    void *context

cdef struct Host:
    # what all connections of one event loop share
    Method natives[MAX_NATIVES]
    uint32_t native_count
    Method other             # every other path
    void (*pinged)(Conn *conn) noexcept nogil            # the peer has sent a PING, which is answered
    void (*refused)(Conn *conn, const char *text) noexcept nogil  # it has broken HTTP/2, a call or all are over
    Interceptor interceptor
    Forwarding forwarding
    Account account          # what all connections make the server hold
    Smalls smalls            # memory of sessions and calls
    size_t max_message       # bytes of a request message; 0: unlimited
    size_t max_inflated      # the same after decompression
    int native_level         # zlib's, of the answers of native methods; 0: they are not compressed
    ThreadPool *thread_pool  # who inflates and compresses large messages; NULL: it is done at once
    bint traced              # somebody asks for Stream.context
    uint32_t max_streams
    uint64_t direct          # bytes of request messages that were read to where they stay, see direct_read.pyx
    int64_t receive_ns       # what a request may take to arrive, see expiry.pxd; 0: any time
    int64_t send_ns          # the same for an answer to be taken
    Timers *timers           # of the loop
    Conns connections        # all, the latest first
    uint32_t connection_count
    size_t peak              # the most that clients made the server keep since memory was given back
    Timer quiet              # set while they make it keep much less
    uint64_t resets          # calls that were broken off, by either side
    bint others_ran          # connections that are not being looked at have something to say: flush the dirty ones
    int64_t spare_frames     # per second and connection, frames that bring no call forward
    int64_t now_ns           # what the host's clock said when `host_look` was called last
    int64_t (*clock)(void *context) noexcept nogil       # NULL: the system's
    void *clock_context
    Conn *first_dirty        # connections with output that nobody has asked for yet
    void (*after_receive)(void *context) noexcept nogil  # called when a round of native calls has been made; or NULL
    void *after_context

# See what time it is: before conn_open, conn_receive and whatever else brings something in.
cdef inline void host_look(Host *host) noexcept nogil:
    host.now_ns = now_ns() if host.clock == NULL else host.clock(host.clock_context)

# --- calls

# A new stream of the connection; NULL when there is no memory.
cdef Stream *stream_new(Conn *conn, int32_t id) noexcept nogil
# The stream is over, with or without an answer: tell who serves the call, and free it.
cdef void stream_closed(Stream *stream, uint32_t error_code) noexcept nogil
# The request's headers are not needed any more.
cdef void stream_drop_fields(Stream *stream) noexcept nogil
# The call has ended: what has come of its request is of no use any more.
cdef void stream_drop_request(Stream *stream) noexcept nogil
# Nobody is to serve the call any more.
cdef void stream_abandon(Stream *stream, uint32_t error_code) noexcept nogil

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
# Break the call off (RST_STREAM with this code); the answers that wait are dropped.
cdef void stream_cut(Stream *stream, uint32_t error_code) noexcept nogil
# nghttp2's send_data callback for the frames of answers.
cdef int stream_frame(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t length,
                      nghttp2_data_source *source, void *user_data) noexcept nogil


cdef inline bint stream_ended(const Stream *stream) noexcept nogil:
    # its status is decided, or it is broken off
    return stream.sender.state >= ANSWER_READY


cdef inline bint stream_opened(const Stream *stream) noexcept nogil:
    # its headers are submitted
    return stream.sender.state != ANSWER_NONE and stream.sender.state != ANSWER_READY


cdef inline size_t stream_unsent(const Stream *stream) noexcept nogil:
    # bytes of answers that are not framed yet
    return stream.sender.plain + stream.sender.unsent


cdef inline bint stream_inflates(const Stream *stream) noexcept nogil:
    # a message is complete that nobody can take yet, because it or one before it is being inflated
    return stream.inflating != NULL or stream.compressed.first != NULL


cdef inline int64_t stream_time_left(const Stream *stream) noexcept nogil:
    # nanoseconds until the client's deadline, which counts from the arrival of the headers; -1 when it set none
    cdef int64_t passed = stream.conn.host.now_ns - stream.arrived_ns
    if stream.timeout_ns < 0:
        return -1
    return stream.timeout_ns - passed if passed < stream.timeout_ns else 0


cdef inline void incoming_free(Incoming *message) noexcept nogil:
    charge_release(&message.charge)
    block_give(message.block)
    message.block = NULL
    if not message.embedded:
        free(message)


cdef inline void mark_dirty(Conn *conn) noexcept nogil:
    # the connection has something to say
    if not conn.dirty:
        conn.dirty = True
        conn.next_dirty = conn.host.first_dirty
        conn.host.first_dirty = conn


cdef inline void end_round(Host *host) noexcept nogil:
    # native calls have been made
    if host.after_receive != NULL:
        host.after_receive(host.after_context)
