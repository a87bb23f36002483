"""HTTP/2 of a server connection, on libnghttp2, without I/O and without Python.

`conn_receive` takes what came from the socket, `conn_collect` gives what goes there. In between, headers are read and
judged, messages put together and native methods run (`_native.transport.incoming`), answers framed under flow control
(`_native.transport.stream`). Calls of methods that are not native are handed to `CallHooks`;
`_native.transport.connection` makes Python objects of them.

Request bytes are acknowledged (WINDOW_UPDATE) as they come, except those of a stream whose complete messages nobody
takes.

Floods. Frames that bring no call forward, resets and what the server must reset for the peer's faults among them, come
out of a budget (`_native.transport.budget`); a peer that has spent it is sent away. CONTINUATION frames and queued
acknowledgements are limited by nghttp2.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, strlen

from _native.inference.request cimport (
    STATUS_DEADLINE_EXCEEDED,
    STATUS_INTERNAL,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNIMPLEMENTED,
)
from _native.list cimport list_prepend, list_remove
from _native.memory.resource cimport LIVE_CONNECTIONS, live_add
from _native.text cimport format_text, text_or_no_memory
from _native.transport.backpressure cimport unpark, wait_no_more
from _native.transport.budget cimport (
    COST_FRAME,
    COST_PYTHON_RESET,
    COST_SETTINGS,
    EARNED_BY_ANSWER,
    budget_earn,
    budget_spend,
)
from _native.transport.client cimport Client
from _native.transport.compression cimport ENCODING_UNKNOWN, encoding_parse, encodings_parse
from _native.transport.errorinfo cimport stream_refuse
from _native.transport.headers cimport timeout_parse
from _native.transport.incoming cimport (
    calls_resume,
    calls_resume_all,
    end_round,
    stream_drop_request,
    stream_half_closed,
    stream_receive,
)
from _native.transport.nghttp2 cimport *
from _native.transport.outgoing cimport output_clear, output_copy
from _native.transport.stream cimport (
    HEADER_ALL,
    HEADER_BAD_ENCODING,
    HEADER_BAD_TIMEOUT,
    HEADER_GRPC,
    HEADER_POST,
    HEADER_TE,
    HEADER_TOO_LARGE,
    NOT_NOTED,
    Conn,
    Forwarding,
    Gatekeeper,
    HeaderField,
    Host,
    Stream,
    mark_dirty,
    stream_closed,
    stream_compress,
    stream_drop_fields,
    stream_fail,
    stream_frame,
    stream_new,
    stream_reject,
    stream_time_left,
)

cdef enum:
    STREAM_WINDOW = 4 << 20          # request bytes a peer may send ahead on one stream
    CONNECTION_WINDOW = 16 << 20     # and on one connection
    MAX_FRAME = 256 << 10            # of received DATA
    MAX_SENT_FRAME = 64 << 10
    MAX_HEADER_BYTES = 16 << 10      # of one request, counted as in RFC 9113 section 6.5.2
    HEADER_BOMB = 256 << 10          # beyond this the connection ends: one byte of HPACK can stand for 4 KiB
    # The library's own limit on resets, 1,000 and then 33 a second, closes the connections of clients that cancel much.
    # Here resets come out of the budget, so the library's is set out of reach.
    UNLIMITED_RESETS = 1 << 30
    SLOWEST = 16 << 10               # bytes a second of a large request
    CONTINUATIONS = 64               # of one header block; each read that ends inside of a frame's head counts too
    TOO_MANY_CONTINUATIONS = -905    # nghttp2's code; older headers lack the name

cdef const uint8_t *SHUTDOWN = <const uint8_t *><const char *>b"shutdown"  # opaque data of a PING

cdef extern from *:
    """
    /* since 1.57, and in distributions' security updates of older versions */
    extern void nghttp2_option_set_stream_reset_rate_limit(nghttp2_option *, uint64_t, uint64_t)
        __attribute__((weak));
    static void inferd_allow_resets(nghttp2_option *option, uint64_t burst, uint64_t rate) {
        if (nghttp2_option_set_stream_reset_rate_limit)
            nghttp2_option_set_stream_reset_rate_limit(option, burst, rate);
    }
    extern void nghttp2_option_set_max_continuations(nghttp2_option *, size_t) __attribute__((weak));
    static void inferd_limit_continuations(nghttp2_option *option, size_t count) {
        if (nghttp2_option_set_max_continuations)
            nghttp2_option_set_max_continuations(option, count);
    }
    """
    void allow_resets "inferd_allow_resets"(nghttp2_option *option, long burst, long rate) nogil
    void limit_continuations "inferd_limit_continuations"(nghttp2_option *option, size_t count) nogil


cdef inline Stream *stream_of(nghttp2_session *session, int32_t id) noexcept nogil:
    return <Stream *>nghttp2_session_get_stream_user_data(session, id)


# ---------------------------------------------------------------------------------------------------------------------
# Request headers

cdef int begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Stream *stream
    if frame.hd.type != NGHTTP2_HEADERS or frame.headers.cat != NGHTTP2_HCAT_REQUEST:
        return 0
    stream = stream_new(<Conn *>user_data, frame.hd.stream_id)
    if stream == NULL:
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
    nghttp2_session_set_stream_user_data(session, frame.hd.stream_id, stream)
    return 0


cdef inline bint equals(nghttp2_vec text, const char *literal, size_t size) noexcept nogil:
    return text.len == size and memcmp(text.base, literal, size) == 0


cdef int header(nghttp2_session *session, const nghttp2_frame *frame, nghttp2_rcbuf *name_buffer,
                nghttp2_rcbuf *value_buffer, uint8_t flags, void *user_data) noexcept nogil:
    cdef Stream *stream = stream_of(session, frame.hd.stream_id)
    cdef nghttp2_vec name = nghttp2_rcbuf_get_buf(name_buffer)
    cdef nghttp2_vec value = nghttp2_rcbuf_get_buf(value_buffer)
    if stream == NULL:
        return 0
    stream.header_bytes += name.len + value.len + 32
    if stream.header_bytes > HEADER_BOMB:
        conn_calm(stream.conn, "too_many_headers")
        return NGHTTP2_ERR_CALLBACK_FAILURE
    if frame.headers.cat != NGHTTP2_HCAT_REQUEST:
        return 0
    if stream.header_bytes > MAX_HEADER_BYTES:
        stream.seen |= HEADER_TOO_LARGE
    elif equals(name, ":path", 5):
        return find_method(stream, value)
    elif equals(name, ":method", 7):
        if equals(value, "POST", 4):
            stream.seen |= HEADER_POST
    elif equals(name, "te", 2):
        if equals(value, "trailers", 8):
            stream.seen |= HEADER_TE
    elif equals(name, "content-type", 12):
        if is_grpc(value):
            stream.seen |= HEADER_GRPC
    elif equals(name, "grpc-timeout", 12):
        stream.timeout_ns = timeout_parse(value.base, value.len)
        if stream.timeout_ns < 0:
            stream.seen |= HEADER_BAD_TIMEOUT
    elif equals(name, "grpc-encoding", 13):
        stream.encoding = encoding_parse(value.base, value.len)
        if stream.encoding == ENCODING_UNKNOWN:
            stream.seen |= HEADER_BAD_ENCODING
    elif equals(name, "grpc-accept-encoding", 20):
        stream.accepted |= encodings_parse(value.base, value.len)
    elif name.len and name.base[0] != c":" and stream.method != NULL and is_kept(stream, name):
        return keep_field(stream, name_buffer, value_buffer)
    return 0


cdef inline bint is_kept(Stream *stream, nghttp2_vec name) noexcept nogil:
    cdef const Gatekeeper *gatekeeper = stream.conn.gatekeeper
    cdef const Forwarding *forwarding = &stream.conn.host.forwarding
    if stream.method.unary == NULL:
        return True
    if gatekeeper.wants != NULL and gatekeeper.wants(gatekeeper.context, name.base, name.len):
        return True
    return forwarding.wants != NULL and forwarding.wants(forwarding.context, name.base, name.len)


cdef inline bint is_grpc(nghttp2_vec value) noexcept nogil:
    # "application/grpc", with a subtype ("+proto") or parameters (";...") or without
    return value.len >= 16 and memcmp(value.base, "application/grpc", 16) == 0 and (
        value.len == 16 or value.base[16] == c"+" or value.base[16] == c";")


cdef int find_method(Stream *stream, nghttp2_vec path) noexcept nogil:
    cdef Host *host = stream.conn.host
    cdef uint32_t i
    for i in range(host.native_count):
        if host.natives[i].path_size == path.len and memcmp(host.natives[i].path, path.base, path.len) == 0:
            stream.method = &host.natives[i]
            stream.single = True
            return 0
    stream.method = &host.other
    stream.path = format_text("%.*s", <int>path.len, path.base)
    return 0 if stream.path != NULL else NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE


cdef int keep_field(Stream *stream, nghttp2_rcbuf *name, nghttp2_rcbuf *value) noexcept nogil:
    cdef HeaderField *grown
    cdef uint32_t capacity
    if stream.field_count == stream.field_capacity:
        capacity = max(8, stream.field_capacity * 2)
        grown = <HeaderField *>realloc(stream.fields, capacity * sizeof(HeaderField))
        if grown == NULL:
            return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
        stream.fields = grown
        stream.field_capacity = capacity
    nghttp2_rcbuf_incref(name)
    nghttp2_rcbuf_incref(value)
    stream.fields[stream.field_count].name = name
    stream.fields[stream.field_count].value = value
    stream.field_count += 1
    return 0


cdef void headers_complete(Stream *stream) noexcept nogil:
    cdef const Client *client = stream.conn.client
    cdef char *text
    stream.seen |= HEADER_ALL
    if stream.seen & HEADER_TOO_LARGE:
        text = format_text("the request headers exceed %d bytes", <int>MAX_HEADER_BYTES)
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, text_or_no_memory(text))
        free(text)
    elif not stream.seen & HEADER_POST:
        stream_reject(stream, STATUS_INTERNAL, "the HTTP method of a gRPC call must be POST", "405")
    elif not stream.seen & HEADER_GRPC:
        stream_reject(stream, STATUS_INTERNAL, "the content-type of a gRPC call must begin with application/grpc",
                      "415")
    elif not stream.seen & HEADER_TE:
        stream_fail(stream, STATUS_INTERNAL, "a gRPC call must carry the header 'te: trailers'")
    elif stream.seen & HEADER_BAD_TIMEOUT:
        stream_fail(stream, STATUS_INTERNAL, "grpc-timeout must be at most 8 digits and one of H M S m u n")
    elif stream.seen & HEADER_BAD_ENCODING:
        stream_fail(stream, STATUS_UNIMPLEMENTED,
                    "the grpc-encoding of the request is not supported, accepted encodings: identity, deflate, gzip")
    elif client != NULL and client.max_calls and client.calls > client.max_calls:
        stream_refuse(stream, STATUS_RESOURCE_EXHAUSTED, "CLIENT_LIMIT", format_text(
            "client %s has %u calls in flight, which is more than its limit of %u", client.name, client.calls,
            client.max_calls))
    elif stream.method.unary != NULL:
        stream_compress(stream, ENCODING_UNKNOWN, stream.conn.host.native_level)
        enter(stream)
        stream_drop_fields(stream)
    else:
        stream.conn.host.hooks.begin(stream)
        stream_drop_fields(stream)


cdef inline void enter(Stream *stream) noexcept nogil:
    # a native call, before its message
    cdef const Gatekeeper *gatekeeper = stream.conn.gatekeeper
    cdef const Forwarding *forwarding = &stream.conn.host.forwarding
    if gatekeeper.admits != NULL and not gatekeeper.admits(gatekeeper.context, stream):
        return
    if forwarding.attach != NULL and stream.field_count:
        forwarding.attach(forwarding.context, stream)


# ---------------------------------------------------------------------------------------------------------------------
# Frames

cdef bint spend(Conn *conn, int64_t cost) noexcept nogil:
    if budget_spend(&conn.budget, cost, conn.host.spare_frames, conn.host.now_ns):
        return True
    conn_calm(conn, "too_many_frames")
    return False


cdef int64_t frame_cost(nghttp2_session *session, const nghttp2_frame *frame) noexcept nogil:
    # of a received frame, as far as it brings no call forward
    cdef Stream *stream
    cdef bint empty
    if frame.hd.type == NGHTTP2_HEADERS:
        return 0  # a call; or trailers, which end one
    if frame.hd.type == NGHTTP2_DATA:
        empty = frame.hd.length == frame.data.padlen and not frame.hd.flags & NGHTTP2_FLAG_END_STREAM
        return COST_FRAME if empty else 0
    if frame.hd.type == NGHTTP2_SETTINGS and not frame.hd.flags & NGHTTP2_FLAG_ACK:
        return COST_SETTINGS
    if frame.hd.type == NGHTTP2_RST_STREAM:
        stream = stream_of(session, frame.hd.stream_id)
        if stream != NULL and stream.method != NULL and stream.method.unary == NULL:
            return COST_PYTHON_RESET
    return COST_FRAME


cdef int begin_frame(nghttp2_session *session, const nghttp2_frame_hd *head, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    conn.frame_stream = head.stream_id
    conn.frame_size = head.length if head.type == NGHTTP2_DATA and not head.flags & NGHTTP2_FLAG_PADDED else 0
    conn.frame_left = conn.frame_size
    return 0


cdef int data_received(nghttp2_session *session, uint8_t flags, int32_t stream_id, const uint8_t *data, size_t size,
                       void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream = stream_of(session, stream_id)
    conn.frame_left -= min(size, conn.frame_left)
    nghttp2_session_consume_connection(session, size)
    if stream != NULL:
        stream_receive(stream, data, size, flags & NGHTTP2_FLAG_END_STREAM)
    return 0


cdef int frame_received(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream
    cdef int64_t cost = frame_cost(session, frame)
    if cost and not spend(conn, cost):
        return NGHTTP2_ERR_CALLBACK_FAILURE
    if frame.hd.type == NGHTTP2_SETTINGS:
        conn.greeted = True
    if frame.hd.type == NGHTTP2_PING and not frame.hd.flags & NGHTTP2_FLAG_ACK:
        conn.host.hooks.pinged(conn)
    if frame.hd.type == NGHTTP2_PING and frame.hd.flags & NGHTTP2_FLAG_ACK:
        if memcmp(frame.ping.opaque_data, SHUTDOWN, 8) == 0:
            conn.told = True
    if frame.hd.type != NGHTTP2_HEADERS and frame.hd.type != NGHTTP2_DATA:
        return 0
    stream = stream_of(session, frame.hd.stream_id)
    if stream == NULL:
        return 0
    if frame.hd.type == NGHTTP2_HEADERS and frame.headers.cat == NGHTTP2_HCAT_REQUEST:
        headers_complete(stream)
    if frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
        stream_half_closed(stream)
    return 0


cdef int frame_sent(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream
    if frame.hd.type == NGHTTP2_DATA or frame.hd.type == NGHTTP2_HEADERS:
        conn.answer_frames += 1
        budget_earn(&conn.budget, EARNED_BY_ANSWER, conn.host.spare_frames)
    elif frame.hd.type == NGHTTP2_RST_STREAM and frame.rst_stream.error_code != NGHTTP2_NO_ERROR:
        spend(conn, COST_FRAME)  # the peer's fault, or it opens more streams than it may
    elif frame.hd.type == NGHTTP2_GOAWAY and conn.leaving:
        conn.left = True
    if frame.hd.type == NGHTTP2_HEADERS and frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
        # a call that is answered before the client has finished sending: tell it to stop
        stream = stream_of(session, frame.hd.stream_id)
        if stream != NULL and not stream.remote_closed:
            nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream.id, NGHTTP2_NO_ERROR)
    return 0


cdef ssize_t frame_length(nghttp2_session *session, uint8_t type, int32_t stream_id, int32_t connection_window,
                          int32_t stream_window, uint32_t max_frame, void *user_data) noexcept nogil:
    return min(max_frame, <uint32_t>MAX_SENT_FRAME)


cdef int stream_close(nghttp2_session *session, int32_t stream_id, uint32_t error_code,
                      void *user_data) noexcept nogil:
    cdef Stream *stream = stream_of(session, stream_id)
    if stream != NULL:
        nghttp2_session_set_stream_user_data(session, stream_id, NULL)
        stream_closed(stream, error_code)
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Sessions

cdef nghttp2_session_callbacks *callbacks
cdef nghttp2_option *options
if nghttp2_session_callbacks_new(&callbacks) != 0 or nghttp2_option_new(&options) != 0:
    raise MemoryError
nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, begin_headers)
nghttp2_session_callbacks_set_on_begin_frame_callback(callbacks, begin_frame)
nghttp2_session_callbacks_set_on_header_callback2(callbacks, header)
nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, data_received)
nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, frame_received)
nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, frame_sent)
nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, stream_close)
nghttp2_session_callbacks_set_send_data_callback(callbacks, stream_frame)
nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, frame_length)
nghttp2_option_set_no_auto_window_update(options, 1)
nghttp2_option_set_no_closed_streams(options, 1)
allow_resets(options, UNLIMITED_RESETS, UNLIMITED_RESETS)
limit_continuations(options, CONTINUATIONS)


cdef bint conn_open(Conn *conn, Host *host, void *owner) noexcept nogil:
    cdef nghttp2_settings_entry settings[4]
    conn.host = host
    conn.owner = owner
    conn.user = -1
    conn.gatekeeper = &host.gatekeeper
    conn.received_ns = host.now_ns
    conn.budget.filled_ns = host.now_ns
    conn.budget.left = host.spare_frames
    if nghttp2_session_server_new2(&conn.session, callbacks, conn, options) != 0:
        conn.session = NULL
        return False
    live_add(LIVE_CONNECTIONS, 1)
    list_prepend(&host.connections, conn)
    settings[0].settings_id = NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS
    settings[0].value = host.max_streams
    settings[1].settings_id = NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE
    settings[1].value = STREAM_WINDOW
    settings[2].settings_id = NGHTTP2_SETTINGS_MAX_FRAME_SIZE
    settings[2].value = MAX_FRAME
    settings[3].settings_id = NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE
    settings[3].value = MAX_HEADER_BYTES
    nghttp2_submit_settings(conn.session, NGHTTP2_FLAG_NONE, settings, 4)
    nghttp2_session_set_local_window_size(conn.session, NGHTTP2_FLAG_NONE, 0, CONNECTION_WINDOW)
    return True


cdef void conn_close(Conn *conn) noexcept nogil:
    cdef Conn **link
    if conn.session == NULL:
        return
    link = &conn.host.first_dirty
    while link[0] != NULL and link[0] != conn:
        link = &link[0].next_dirty
    if link[0] != NULL:
        link[0] = conn.next_dirty
        conn.dirty = False
    while conn.open.first != NULL:
        stream_closed(conn.open.first, NGHTTP2_CANCEL)
    wait_no_more(conn)
    list_remove(&conn.host.connections, conn)
    nghttp2_session_del(conn.session)
    conn.session = NULL
    output_clear(&conn.output)
    calls_resume_all(conn.host)
    live_add(LIVE_CONNECTIONS, -1)


cdef void conn_receive(Conn *conn, const uint8_t *data, size_t size) noexcept nogil:
    cdef ssize_t result
    if conn.session == NULL or conn.failed or conn.leaving:
        return
    conn.received_ns = conn.host.now_ns
    if conn.frame_left == 0:
        conn.frame_size = 0  # that frame is over; of one that is ignored, nghttp2 tells nothing
    result = nghttp2_session_mem_recv(conn.session, data, size)
    if result == NGHTTP2_ERR_FLOODED or result == TOO_MANY_CONTINUATIONS:
        conn_calm(conn, "too_many_frames")
    elif result < 0 and not conn.leaving:
        conn.failed = True


cdef void conn_end_round(Conn *conn) noexcept nogil:
    if conn.session != NULL:
        end_round(conn.host)
        calls_resume_all(conn.host)


cdef void conn_collect(Conn *conn, size_t limit) noexcept nogil:
    cdef const uint8_t *data
    cdef ssize_t size
    if conn.session == NULL:
        return
    conn.output_limit = limit
    if conn.taken_ns == NOT_NOTED:
        conn.taken_ns = conn.host.now_ns
    while conn.output.size < limit and not conn.left:
        size = nghttp2_session_mem_send(conn.session, &data)
        if size < 0 or (size > 0 and not output_copy(&conn.output, data, <size_t>size)):
            conn.failed = True
        if size <= 0 or conn.failed:
            break
    if conn.parked.first != NULL:
        calls_resume(conn)
        end_round(conn.host)
    calls_resume_all(conn.host)


cdef bint conn_finished(Conn *conn) noexcept nogil:
    return conn.session == NULL or conn.failed or conn.left or not (
        nghttp2_session_want_read(conn.session) or nghttp2_session_want_write(conn.session))


cdef void conn_announce_shutdown(Conn *conn) noexcept nogil:
    if conn.session != NULL:
        nghttp2_submit_shutdown_notice(conn.session)
        # when this comes back, so has every stream that the peer opened before it knew
        nghttp2_submit_ping(conn.session, NGHTTP2_FLAG_NONE, SHUTDOWN)
        mark_dirty(conn)


cdef void conn_go_away(Conn *conn, const char *debug) noexcept nogil:
    if conn.session != NULL:
        nghttp2_submit_goaway(conn.session, NGHTTP2_FLAG_NONE,
                              nghttp2_session_get_last_proc_stream_id(conn.session), NGHTTP2_NO_ERROR,
                              <const uint8_t *>debug, strlen(debug))
        mark_dirty(conn)


cdef void conn_ping(Conn *conn) noexcept nogil:
    if conn.session != NULL:
        nghttp2_submit_ping(conn.session, NGHTTP2_FLAG_NONE, NULL)
        mark_dirty(conn)


cdef void conn_calm(Conn *conn, const char *debug) noexcept nogil:
    if conn.session == NULL or conn.leaving:
        return
    conn.leaving = True
    if nghttp2_submit_goaway(conn.session, NGHTTP2_FLAG_NONE, nghttp2_session_get_last_proc_stream_id(conn.session),
                             NGHTTP2_ENHANCE_YOUR_CALM, <const uint8_t *>debug, strlen(debug)) != 0:
        conn.failed = True
    mark_dirty(conn)


cdef void conn_fail_calls(Conn *conn, int status, const char *details) noexcept nogil:
    cdef Stream *stream = conn.open.first
    while stream != NULL:
        if stream.method != NULL and not stream.ended:
            unpark(stream)
            if stream.method.unary != NULL and stream.call != NULL:
                stream.method.cancel(stream.call)
                stream.call = NULL
            stream_fail(stream, status, details)
        stream = stream.next


# ---------------------------------------------------------------------------------------------------------------------
# Time

cdef inline bint is_awaited(const Stream *stream) noexcept nogil:
    # the peer owes us more of a request that it has begun
    return stream.prefix_size != 0 or (stream.single and not stream.remote_closed)


cdef void host_expire(Host *host) noexcept nogil:
    cdef Conn *conn = host.connections.first
    while conn != NULL:
        if conn.open.first != NULL and not conn.leaving:
            expire_calls(conn)
        conn = conn.next


cdef void expire_calls(Conn *conn) noexcept nogil:
    cdef Host *host = conn.host
    cdef Stream *stream = conn.open.first
    cdef int64_t allowed
    cdef bint late
    while stream != NULL:
        allowed = host.receive_ns + <int64_t>stream.received * 1000000000 // SLOWEST
        late = host.receive_ns != 0 and host.now_ns - stream.begun_ns > allowed
        if not stream.seen & HEADER_ALL:
            if late:
                conn_calm(conn, "slow_headers")  # nothing else can come on this connection before they are complete
                return
        elif stream.ended:
            pass
        elif stream.method.unary != NULL and stream.call == NULL and stream_time_left(stream) == 0:
            stream_fail(stream, STATUS_DEADLINE_EXCEEDED, "Deadline Exceeded")
            stream_drop_request(stream)
        elif late and is_awaited(stream):
            fail_late(stream)
            stream_drop_request(stream)
        stream = stream.next


cdef void fail_late(Stream *stream) noexcept nogil:
    stream_refuse(stream, STATUS_DEADLINE_EXCEEDED, "SLOW_REQUEST", format_text(
        "the request has not arrived within %d s: %zu bytes of its message have come",
        <int>((stream.conn.host.now_ns - stream.begun_ns) // 1000000000), stream.received))
