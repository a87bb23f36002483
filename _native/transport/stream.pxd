# A call on a connection: its structures, and the functions that answer it. Its states are in call_state.pxd.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

from inferd._native.chain cimport Chain, Link
from inferd._native.clock cimport now_ns
from inferd._native.front cimport PythonEvent, front_pause, front_resume
from inferd._native.memory.resource cimport Block
from inferd._native.memory.small cimport Smalls
from inferd._native.timers cimport Timer, Timers
from inferd._native.traceparent cimport TraceContext
from inferd._native.transport.budget cimport Budget
from inferd._native.transport.call_state cimport RESPONSE_NONE, RESPONSE_READY, Receiving, ResponseState
from inferd._native.transport.client cimport Client
from inferd._native.transport.closing cimport ConnState
from inferd._native.transport.compression cimport Encoding
from inferd._native.transport.ledger cimport Account, Charge
from inferd._native.transport.message cimport Incoming
from inferd._native.transport.message_compression cimport MessageOwner
from inferd._native.transport.nghttp2 cimport (
    nghttp2_data_source,
    nghttp2_frame,
    nghttp2_nv,
    nghttp2_rcbuf,
    nghttp2_session,
)
from inferd._native.transport.outgoing cimport Outgoing, Output
from inferd._native.transport.thread_pool cimport Job, ThreadPool

# The functions that serve the calls of a method: one table for each kind of service. The front calls them while it
# receives or collects bytes, and `closed` also when the transport ends a call.
cdef struct Service:
    bint single              # a call has one request message
    bint keeps_fields        # stream.fields are needed after `begin`: the service drops them
    int64_t reset_cost       # the cost of a reset by the peer, in frames; see budget.pxd
    # Whether to keep this header in stream.fields until `begin`; NULL: keep all.
    bint (*wants)(Stream *stream, const uint8_t *name, size_t size) noexcept nogil
    # The request headers are complete. May end the call, or set stream.call.
    void (*begin)(Stream *stream) noexcept nogil
    # The block for a large message of `size` bytes that begins with `head`; NULL: ordinary memory. May end the call.
    Block *(*place)(Stream *stream, const uint8_t *head, size_t head_size, size_t size) noexcept nogil
    void (*message)(Stream *stream) noexcept nogil       # one more message is in stream.incoming
    void (*half_closed)(Stream *stream) noexcept nogil   # the client sends no more messages
    void (*writable)(Stream *stream) noexcept nogil      # less than WRITABLE_BELOW is unsent again
    # The client's deadline has passed; NULL: the handler of the call checks it. Only while stream.call is set.
    void (*late)(Stream *stream) noexcept nogil
    # The response is no longer wanted, and the stream is or will be closed. Only while stream.call is set; clears it.
    void (*closed)(Stream *stream, uint32_t error_code) noexcept nogil

cdef enum:
    STATUSES = 17            # of gRPC

cdef struct CallCounts:
    # the calls of a method, with either kind of service
    uint64_t started
    uint64_t handled[STATUSES]   # by status; CANCELLED includes calls that the client reset

cdef struct Method:
    char *path
    size_t path_size
    const Service *service
    void *context            # for the service
    CallCounts counts

cdef enum:
    # what the request headers contain so far (Stream.seen)
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
    # A header of the previous call, at the same position. HPACK lets a client refer to a header that it sent before;
    # nghttp2 then returns the same buffers, and the header need not be parsed again.
    nghttp2_rcbuf *name      # references; NULL: none
    nghttp2_rcbuf *value
    size_t bytes             # counted as for MAX_HEADER_BYTES
    Method *method           # the native method in this header; NULL: none
    uint32_t seen            # bits of HEADER_* that it sets
    uint8_t accepted         # bits for Sender.accepted

cdef struct Receiver:
    # the message that is being received
    Receiving state
    uint8_t prefix[5]
    uint32_t prefix_size     # bytes of the prefix that have come
    Block *block             # NULL before the first byte of a message
    uint8_t *data
    size_t size              # as announced
    size_t room              # bytes at `data`: the announced size, or less while few bytes have come
    size_t received
    Charge charge            # for `room`
    int64_t begun_ns         # when the request of a call with one request message began, else when this message did
    uint32_t messages        # that are completely received

cdef struct Sender:
    # the response
    ResponseState state
    uint8_t accepted         # encodings that the client accepts, as bits 1 << ENCODING_*
    Encoding encoding        # ENCODING_IDENTITY: messages are not compressed
    int level                # zlib's
    Chain uncompressed       # Outgoing that wait until the one before is compressed
    Job *deflating           # on the thread pool
    size_t plain             # bytes of the messages that are being compressed or wait for that
    Chain outgoing           # Outgoing, to be framed
    size_t unsent            # bytes in them
    int64_t waits_ns         # since when the first of them waits for the peer; 0: it was not yet offered to the peer
    bint unkept              # the first message waits, and may keep memory that it is not charged for
    bint deferred            # nghttp2 asked for data, and there was none
    bint shut                # the stream's own flow control window is used up
    int status
    char *details            # percent-encoded, from malloc
    nghttp2_nv *trailers     # custom trailing metadata, from malloc
    size_t trailer_count

cdef struct Stream:
    Link parked              # in Conn.parked
    Conn *conn
    int32_t id
    Method *method           # NULL until the path is known
    int64_t arrived_ns       # when its first header came
    TraceContext context     # from its `traceparent`, if Host.traced
    nghttp2_rcbuf *baggage   # contains the baggage in `context`
    void *call               # the service's object for it; NULL: none, or the service has finished with the stream

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
    bint lasting             # it counts among the streams of its client
    uint64_t caller          # of a native call, set by the interceptor; 0: unknown
    uint8_t *forwarded       # from malloc: the headers that its request gets, encoded by the forwarding
    size_t forwarded_size

    Receiver receiver
    Incoming first           # the message of nearly all calls is here
    Chain incoming           # Incoming, complete
    Encoding encoding        # of messages that are marked as compressed
    Chain compressed         # Incoming, complete messages that wait until the one before is inflated
    Job *inflating           # on the thread pool
    size_t queued            # bytes of complete messages that no handler has taken
    size_t withheld          # flow control credit that is withheld because of them
    Charge with_handler      # for requests that the handler has taken and not answered

    Sender sender
    Timer timer              # for everything that may take too long, see expiry.pxd
    Stream *previous         # in Conn.open
    Stream *next

# Lists of these; see inferd._native.list.

cdef struct Streams:
    Stream *first
    Stream *last

cdef struct Conns:
    Conn *first
    Conn *last

cdef enum:
    REMEMBERED = 16
    KNOWN_FIELDS = 12

cdef enum:
    KEPT_TEXTS = 4

cdef struct ConnNews:
    # what Python has not heard of yet, about a connection itself
    PythonEvent event        # the first member
    uint32_t pings           # PINGs of the peer, without those before the latest response
    char *refused[KEPT_TEXTS]  # from malloc: why a call or the peer was refused
    uint32_t refusals        # how many of these there are
    bint shut                # the I/O thread sends nothing but the last output any more
    bint lost                # the I/O thread has left the socket: the peer is gone, or the connection has ended

cdef struct Conn:
    nghttp2_session *session
    Host *host
    Client *client           # the client of the connection; NULL: unknown
    Account account          # the bytes that the connection makes the server hold
    const Interceptor *interceptor  # the check of its native calls
    Conn *previous           # in Host.connections
    Conn *next
    Output output
    size_t output_limit      # of the `conn_collect` that is running
    Charge framed            # for framed output that the socket does not take
    Timer timer              # set while output waits for the socket, see conn_output_waits in expiry.pxd
    int64_t waits_ns         # since when it waits; 0: none waits
    uint64_t waits_from      # bytes of output that had been taken by then
    uint64_t waits_until     # bytes of output that must be taken to count as progress
    uint64_t taken           # bytes of output that have been taken, as far as is known
    size_t unsent            # bytes of all streams' responses that are not framed yet
    size_t shut              # of these, bytes held back by the windows of their own streams; they delay no other one
    bint narrow              # the peer opens streams with a window of 0 bytes
    int32_t stream_window    # of the stream whose frame is being made
    bint responded           # responses were added since the peer was last offered output
    Streams open             # the latest first
    uint32_t streams         # their number
    Stream *latest           # the stream of the last callback of nghttp2; NULL: it is closed
    size_t received          # bytes of DATA for which the peer has not yet got connection credit back
    KnownField known[KNOWN_FIELDS]  # the first headers of calls
    Chain parked             # Stream, unary calls that wait until the peer reads
    void *owner              # the CallOwner; not a reference
    ConnNews news
    void *socket             # the Socket, if an I/O thread reads and writes it; else the owner does
    Block *peer              # contains the peer's address, for records; NULL: unknown
    int64_t user             # of the process at the other end of a unix socket; -1: unknown
    uint64_t identity        # of the client, by certificate or user; 0: unknown
    double debt              # of a connection without a client; eviction computes it
    Conn *next_dirty
    Dirty *writer            # of the thread that writes its output
    bint in_syscall          # its thread is in a system call for it, outside of the front: see io_thread.pyx
    bint dirty               # in the list of its writer
    ConnState state          # how far the end of the connection has come
    bint stalled             # the peer took no output for too long: the socket is closed, and the output discarded
    bint http1               # the peer speaks HTTP/1: the last output is an HTTP/1 response
    bint greeted             # the preface and the peer's first SETTINGS have come
    int64_t received_ns      # when the peer last sent anything
    size_t portion           # bytes of a read, unless a large message is read to its place
    int32_t frame_stream     # of the last frame, or the one that is arriving
    size_t frame_size        # its size if it is DATA without padding, else 0
    size_t frame_left        # bytes of it that have not come
    uint64_t response_frames  # HEADERS and DATA framed so far
    uint64_t pinged_frames   # the same when the latest PING of the peer came
    Budget budget            # for frames that advance no call
    int32_t last_stream      # the latest that the peer has opened
    int32_t last_served      # the latest that `conn_go_away` has named, and no later GOAWAY may name a later one
    int32_t watched          # the latest for which conn_watch has set a timer, if it needs one
    int32_t over[REMEMBERED]  # the latest that the peer has ended or reset
    uint32_t over_count      # entries written to `over` so far; `over` is a ring
    bint told                # the peer has read the GOAWAY of conn_announce_shutdown

cdef enum:
    MAX_NATIVES = 4
    WRITABLE_BELOW = 64 << 10    # unsent bytes of a stream below which its call may continue

cdef struct Interceptor:
    # the check of native calls; all NULL: none
    bint (*wants)(void *context, const uint8_t *name, size_t size) noexcept nogil  # keep this header until `admits`
    bint (*admits)(void *context, Stream *stream) noexcept nogil  # headers are complete; False: it has ended the call
    void *context

cdef struct Forwarding:
    # passes headers of native calls on to their requests; all NULL: none
    bint (*wants)(void *context, const uint8_t *name, size_t size) noexcept nogil  # keep this header until `attach`
    bint (*attach)(void *context, Stream *stream) noexcept nogil  # sets stream.forwarded; False: it has ended the call
    void *context

cdef struct Dirty:
    # connections with output that was not collected yet
    Conn *first
    Conn *now                # those that are being flushed

cdef struct Host:
    # shared by all connections of one front
    Method natives[MAX_NATIVES]
    uint32_t native_count
    Method other             # every other path
    void (*pinged)(Conn *conn) noexcept nogil            # the peer has sent a PING, which is answered
    void (*refused)(Conn *conn, const char *text) noexcept nogil  # an HTTP/2 violation has ended one call, or all
    Interceptor interceptor
    Forwarding forwarding
    Account account          # the bytes that all connections make the server hold
    Smalls smalls            # allocates memory of sessions and calls
    size_t max_message       # bytes of a request message
    size_t max_inflated      # the same after decompression
    int native_level         # zlib's, for responses of native methods; 0: no compression
    ThreadPool *thread_pool  # inflates and compresses large messages; NULL: the front does that
    bint traced              # Stream.context is needed
    uint32_t max_streams
    uint64_t direct          # bytes of request messages that were read directly, see direct_read.pyx
    int64_t receive_ns       # the time for a request to arrive, see expiry.pxd; INT64_MAX: no limit
    int64_t send_ns          # the same for the peer to take a response
    Timers *timers           # of the front
    Conns connections        # all, the latest first
    uint32_t connection_count
    size_t peak              # maximum of host_kept since memory was last returned
    Timer quiet              # set while clients make the server hold much less than `peak`
    uint64_t resets          # calls that either side reset
    int64_t spare_frames     # limit of frames that advance no call, for each connection and second
    int64_t now_ns           # the host's time at the last `host_look`
    int64_t (*clock)(void *context) noexcept nogil       # NULL: the system's
    void *clock_context
    Dirty dirty              # where connections are that no other thread writes
    # Called after each read that may have brought native calls; `another`: the read before was of another connection.
    # Returns True to put off the wake-ups for these calls until `end_round`, together with those of more connections.
    # NULL: native calls wake nobody.
    bint (*after_read)(void *context, int64_t now_ns, bint another) noexcept nogil
    # Does the wake-ups that were put off. The endpoint calls it after each round.
    void (*end_round)(void *context) noexcept nogil
    void *round_context
    # Set while I/O threads deliver for a bridge. Each thread calls `deliver` before it writes, for responses that calls
    # of its round have already got, and `after` at the end of a round.
    void (*deliver)(void *bridge) noexcept nogil
    void (*after)(void *bridge) noexcept nogil
    void *bridge
    bint rounds              # the owner ends a round after reads of several connections
    # Python has made output outside of a round: the I/O thread is to flush it soon. NULL: the event loop does that.
    void (*wake)(void *context) noexcept nogil
    void *wake_context
    bint waits               # wake-ups are put off until `end_round`
    const Conn *reader       # the last connection that was read; it may be gone

# Read the clock. Call this before conn_open, conn_receive and any other event.
cdef inline void host_look(Host *host) noexcept nogil:
    host.now_ns = now_ns() if host.clock == NULL else host.clock(host.clock_context)

# --- calls

# A new stream of the connection; NULL when there is no memory.
cdef Stream *stream_new(Conn *conn, int32_t id) noexcept nogil
# The stream is closed, with or without a response: tell the service, and free the stream.
cdef void stream_closed(Stream *stream, uint32_t error_code) noexcept nogil
# Free the request's headers.
cdef void stream_drop_fields(Stream *stream) noexcept nogil
# Free the received part of the request. The call has ended.
cdef void stream_drop_request(Stream *stream) noexcept nogil
# Tell the service to stop serving the call.
cdef void stream_abandon(Stream *stream, uint32_t error_code) noexcept nogil

# --- responses

# Answer a unary call with one message (taken over) and status OK.
cdef void stream_reply(Stream *stream, Outgoing *message) noexcept nogil
# Set the final status of a call, with this HTTP status if the status is the whole response; the text is plain UTF-8.
# Errors that the server finds go by stream_refuse and stream_expire (errorinfo.pxd).
cdef void stream_finish(Stream *stream, int status, const char *details, const char *http_status) noexcept nogil
# A response in steps: initial metadata, messages (taken over), final status with trailing metadata (from malloc, taken
# over; names and values may be in the same allocation).
cdef void stream_begin(Stream *stream, const nghttp2_nv *metadata, size_t count) noexcept nogil
cdef void stream_send(Stream *stream, Outgoing *message, bint compressible) noexcept nogil
cdef void stream_end(Stream *stream, int status, const char *details, nghttp2_nv *trailers, size_t count) noexcept nogil
# Compress responses with zlib's `level` (0: do not), in `encoding` if the client accepts it; ENCODING_UNKNOWN leaves
# the choice open. Call this before the first step.
cdef void stream_compress(Stream *stream, Encoding encoding, int level) noexcept nogil
# Reset the call (RST_STREAM with this code); waiting responses are discarded.
cdef void stream_cut(Stream *stream, uint32_t error_code) noexcept nogil
# nghttp2's send_data callback, for the frames of responses.
cdef int stream_frame(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t length,
                      nghttp2_data_source *source, void *user_data) noexcept nogil


cdef inline bint stream_ended(const Stream *stream) noexcept nogil:
    # the status is final, or the call is reset
    return stream.sender.state >= RESPONSE_READY


cdef inline bint stream_opened(const Stream *stream) noexcept nogil:
    # the headers are submitted
    return stream.sender.state != RESPONSE_NONE and stream.sender.state != RESPONSE_READY


cdef inline size_t stream_unsent(const Stream *stream) noexcept nogil:
    # bytes of responses that are not framed yet
    return stream.sender.plain + stream.sender.unsent


cdef inline size_t conn_blocked(const Conn *conn) noexcept nogil:
    # unsent bytes that wait for the connection: its window, its socket, or their turn
    return conn.unsent - conn.shut


cdef inline void stream_shut(Stream *stream, bint shut) noexcept nogil:
    # the stream's own window is used up, or open again
    if shut == stream.sender.shut:
        return
    stream.sender.shut = shut
    if shut:
        stream.conn.shut += stream.sender.unsent
    else:
        stream.conn.shut -= stream.sender.unsent


cdef inline bint stream_inflates(const Stream *stream) noexcept nogil:
    # a complete message cannot be taken yet, because it or one before it is being inflated
    return stream.inflating != NULL or stream.compressed.first != NULL


cdef inline MessageOwner message_owner(Stream *stream, Job **job) noexcept nogil:
    # `job` is where the stream has the job that inflates or compresses the message
    cdef Conn *conn = stream.conn
    # a connection without a client counts as a client
    cdef uint64_t client = conn.client.number if conn.client != NULL else <uintptr_t>conn
    return MessageOwner(stream, job, client, &conn.account, conn.host.thread_pool)


cdef inline int64_t stream_time_left(const Stream *stream) noexcept nogil:
    # nanoseconds until the client's deadline, counted from the arrival of the headers; -1: there is none
    cdef int64_t passed = stream.conn.host.now_ns - stream.arrived_ns
    if stream.timeout_ns < 0:
        return -1
    return stream.timeout_ns - passed if passed < stream.timeout_ns else 0


cdef inline void mark_dirty(Conn *conn) noexcept nogil:
    # the connection has output
    if not conn.dirty:
        conn.dirty = True
        conn.next_dirty = conn.writer.first
        conn.writer.first = conn


# Around a system call of the connection's thread, or a cipher: others may have the front meanwhile, and end calls of
# the connection, but not the connection. Pass the result of `conn_begin_syscall` to `conn_end_syscall`.
cdef inline bint conn_begin_syscall(Conn *conn) noexcept nogil:
    conn.in_syscall = True
    return front_pause()


cdef inline void conn_end_syscall(Conn *conn, bint paused) noexcept nogil:
    front_resume(paused)
    conn.in_syscall = False


cdef inline bint leave_dirty(Conn *conn, Conn **link) noexcept nogil:
    while link[0] != NULL and link[0] != conn:
        link = &link[0].next_dirty
    if link[0] == NULL:
        return False
    link[0] = conn.next_dirty
    return True


cdef inline void unmark_dirty(Conn *conn) noexcept nogil:
    if conn.dirty:
        conn.dirty = False
        if not leave_dirty(conn, &conn.writer.first):
            leave_dirty(conn, &conn.writer.now)


cdef inline void end_round(Host *host) noexcept nogil:
    # do the wake-ups of the native calls of this round
    host.waits = False
    if host.end_round != NULL:
        host.end_round(host.round_context)


cdef inline void end_read(const Conn *conn) noexcept nogil:
    # do the wake-ups of this read, or leave them until other connections have been read
    cdef Host *host = conn.host
    cdef bint another = host.reader != conn
    host.reader = conn
    if not host.rounds:
        end_round(host)
    elif host.after_read != NULL and host.after_read(host.round_context, host.now_ns, another) and not host.waits:
        host.waits = True
