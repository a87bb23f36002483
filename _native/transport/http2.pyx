"""HTTP/2 of a server connection, on libnghttp2, without I/O and without Python.

`conn_receive` takes bytes from the socket, `conn_collect` gives bytes for it. In between, headers are read and
checked, messages assembled and native methods run (`inferd._native.transport.incoming`), and responses framed under
flow control (`inferd._native.transport.stream`). The `Service` of its method serves a call: natively
(`inferd._native.transport.unary`), or in Python (`inferd._native.transport.call`).

Request bytes are acknowledged (WINDOW_UPDATE) as they come, except those of a stream whose complete messages no
handler takes.

Floods. Frames that advance no call, including resets and streams that the server must reset because of the peer's
errors, are paid from a budget (`inferd._native.transport.budget`); a peer without budget is disconnected. nghttp2
limits CONTINUATION frames and queued acknowledgements.

Frames of closed streams. Some versions of nghttp2 keep closed streams, which costs memory with every call; others
forget them. So each connection remembers the numbers of a few. HEADERS of a stream that the peer has ended or
reset end the connection (STREAM_CLOSED), whether the response was sent or not. HEADERS of a stream that was answered
before the peer ended it were already on their way, and are ignored. So is DATA of any closed stream: nghttp2 does not
report it, and RFC 9113 section 5.1 allows to ignore it.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memset, strlen

from inferd._native.list cimport list_prepend, list_remove
from inferd._native.memory.resource cimport LIVE_CONNECTIONS, block_give, live_add
from inferd._native.memory.small cimport Smalls, small_give, small_resize, small_take
from inferd._native.refusal cimport REFUSAL_STOPPING
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.timers cimport timers_clear
from inferd._native.transport.budget cimport COST_FRAME, COST_SETTINGS, EARNED_BY_RESPONSE, budget_earn, budget_spend
from inferd._native.transport.call_state cimport RECEIVED_ALL
from inferd._native.transport.closing cimport (
    CONN_ANNOUNCED,
    CONN_DRAINING,
    CONN_GONE,
    CONN_LINGERING,
    CONN_OPEN,
    CONN_PARTING,
    CONN_SHUT,
    closing_allows,
    closing_break,
    closing_move,
)
from inferd._native.transport.errorinfo cimport stream_refuse
from inferd._native.transport.eviction cimport conn_calm, host_relieve
from inferd._native.transport.expiry cimport conn_collected, conn_watch
from inferd._native.transport.head cimport MAX_HEADER_BYTES, field_bytes, head_complete, head_field, head_forget
from inferd._native.transport.headers cimport header_value
from inferd._native.transport.http1 cimport HTTP1_RESPONSE, is_http1
from inferd._native.transport.incoming cimport stream_half_closed, stream_receive
from inferd._native.transport.ledger cimport account_exceeded, charge_release
from inferd._native.transport.nghttp2 cimport *
from inferd._native.transport.outgoing cimport output_clear, output_copy
from inferd._native.transport.stream cimport (
    REMEMBERED,
    Conn,
    Host,
    Stream,
    end_read,
    mark_dirty,
    stream_abandon,
    stream_closed,
    stream_cut,
    stream_drop_request,
    stream_ended,
    stream_frame,
    stream_new,
    stream_shut,
    unmark_dirty,
)
from inferd._native.transport.trim cimport host_note
from inferd._native.transport.unary cimport calls_resume

cdef enum:
    STREAM_WINDOW = 4 << 20          # request bytes a peer may send ahead on one stream
    CONNECTION_WINDOW = 16 << 20     # and on one connection
    MAX_FRAME = 256 << 10            # of received DATA
    FIRST_PORTION = 16 << 10         # bytes of a connection's reads until their pace is known
    MAX_SENT_FRAME = 64 << 10
    HEADER_BOMB = 256 << 10          # beyond this the connection ends: one byte of HPACK can stand for 4 KiB
    # The library's own limit on resets, 1,000 and then 33 a second, closes the connections of clients that cancel much.
    # Here resets are paid from the budget, so the library's limit is turned off.
    UNLIMITED_RESETS = 1 << 30
    SHOWN_OF_NAME = 256              # bytes of a header's name in a text
    CONTINUATIONS = 64               # of one header block; each read that ends inside a frame's head counts too
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
    /* since 1.50; older ones take such values anyway */
    extern void nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(nghttp2_option *, int)
        __attribute__((weak));
    static void inferd_allow_spaces(nghttp2_option *option) {
        if (nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation)
            nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(option, 1);
    }
    """
    void allow_resets "inferd_allow_resets"(nghttp2_option *option, long burst, long rate) nogil
    void limit_continuations "inferd_limit_continuations"(nghttp2_option *option, size_t count) nogil
    void allow_spaces "inferd_allow_spaces"(nghttp2_option *option) nogil


cdef inline Stream *stream_of(Conn *conn, int32_t id) noexcept nogil:
    # NULL: the stream is closed, or was never opened
    if conn.latest == NULL or conn.latest.id != id:
        conn.latest = <Stream *>nghttp2_session_get_stream_user_data(conn.session, id)
    return conn.latest


# Memory for nghttp2

cdef void *mem_malloc(size_t size, void *smalls) noexcept nogil:
    return small_take(<Smalls *>smalls, size)


cdef void mem_free(void *data, void *smalls) noexcept nogil:
    small_give(<Smalls *>smalls, data)


cdef void *mem_calloc(size_t count, size_t size, void *smalls) noexcept nogil:
    cdef void *data
    if size and count > <size_t>-1 // size:
        return NULL
    data = small_take(<Smalls *>smalls, count * size)
    return memset(data, 0, count * size) if data != NULL else NULL


cdef void *mem_realloc(void *data, size_t size, void *smalls) noexcept nogil:
    return small_resize(<Smalls *>smalls, data, size)


# ---------------------------------------------------------------------------------------------------------------------
# Request headers

cdef int begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream
    if frame.hd.type != NGHTTP2_HEADERS or frame.headers.cat != NGHTTP2_HCAT_REQUEST:
        return 0
    conn.last_stream = frame.hd.stream_id
    if conn.state >= CONN_DRAINING:
        return 0  # the GOAWAY that waits to be sent names an earlier one: the client asks another server for this call
    stream = stream_new(conn, frame.hd.stream_id)
    if stream == NULL:
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
    nghttp2_session_set_stream_user_data(session, frame.hd.stream_id, stream)
    stream.conn.latest = stream
    return 0


cdef int header(nghttp2_session *session, const nghttp2_frame *frame, nghttp2_rcbuf *name_buffer,
                nghttp2_rcbuf *value_buffer, uint8_t flags, void *user_data) noexcept nogil:
    cdef Stream *stream = stream_of(<Conn *>user_data, frame.hd.stream_id)
    cdef int result
    if stream == NULL:
        return 0
    if frame.headers.cat == NGHTTP2_HCAT_REQUEST:
        result = head_field(stream, name_buffer, value_buffer)
    else:
        result = 0
        stream.header_bytes += field_bytes(nghttp2_rcbuf_get_buf(name_buffer), header_value(value_buffer))
    if stream.header_bytes > HEADER_BOMB:
        conn_calm(stream.conn, "too_many_headers")
        return NGHTTP2_ERR_CALLBACK_FAILURE
    return result


cdef int invalid_header(nghttp2_session *session, const nghttp2_frame *frame, nghttp2_rcbuf *name_buffer,
                        nghttp2_rcbuf *value_buffer, uint8_t flags, void *user_data) noexcept nogil:
    cdef Stream *stream = stream_of(<Conn *>user_data, frame.hd.stream_id)
    cdef nghttp2_vec name = nghttp2_rcbuf_get_buf(name_buffer)
    cdef char *text
    if stream != NULL:
        text = format_text("a call has characters that HTTP/2 does not allow in the header '%.*s'",
                           <int>min(name.len, <size_t>SHOWN_OF_NAME), name.base)
        stream.conn.host.refused(stream.conn, text_or_no_memory(text))
        free(text)
    return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE  # a stream error


# ---------------------------------------------------------------------------------------------------------------------
# Frames

cdef bint spend(Conn *conn, int64_t cost) noexcept nogil:
    if budget_spend(&conn.budget, cost, conn.host.spare_frames, conn.host.now_ns):
        return True
    conn_calm(conn, "too_many_frames")
    return False


cdef inline int64_t frame_cost(Conn *conn, const nghttp2_frame *frame) noexcept nogil:
    # the cost of a received frame; 0 if it advances a call
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
        stream = stream_of(conn, frame.hd.stream_id)
        if stream != NULL and stream.method != NULL:
            return stream.method.service.reset_cost
    return COST_FRAME


cdef int begin_frame(nghttp2_session *session, const nghttp2_frame_hd *head, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    conn.frame_stream = head.stream_id
    conn.frame_size = head.length if head.type == NGHTTP2_DATA and not head.flags & NGHTTP2_FLAG_PADDED else 0
    conn.frame_left = conn.frame_size
    if head.type == NGHTTP2_HEADERS and head.stream_id <= conn.last_stream and is_over(conn, head.stream_id):
        nghttp2_session_terminate_session(session, NGHTTP2_STREAM_CLOSED)
    return 0


cdef void note_over(Conn *conn, int32_t stream_id) noexcept nogil:
    conn.over[conn.over_count % REMEMBERED] = stream_id
    conn.over_count += 1


cdef bint is_over(Conn *conn, int32_t stream_id) noexcept nogil:
    # whether the peer has ended or reset the stream; False for unknown streams
    cdef int i
    if stream_of(conn, stream_id) != NULL:
        return False  # nghttp2 checks this case
    for i in range(REMEMBERED):
        if conn.over[i] == stream_id and stream_id > 0:
            return True
    return False


cdef int data_received(nghttp2_session *session, uint8_t flags, int32_t stream_id, const uint8_t *data, size_t size,
                       void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream = stream_of(conn, stream_id)
    conn.frame_left -= min(size, conn.frame_left)
    conn.received += size
    if stream != NULL:
        stream_receive(stream, data, size, flags & NGHTTP2_FLAG_END_STREAM)
    return 0


cdef inline void look_at_window(Stream *stream) noexcept nogil:
    # the peer has changed the window of the stream
    stream_shut(stream, nghttp2_session_get_stream_remote_window_size(stream.conn.session, stream.id) <= 0)


cdef void look_at_windows(Conn *conn) noexcept nogil:
    # SETTINGS may change the windows of all streams
    cdef Stream *stream = conn.open.first
    conn.narrow = nghttp2_session_get_remote_settings(conn.session, NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE) == 0
    while stream != NULL:
        look_at_window(stream)
        stream = stream.next


cdef int frame_received(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream
    cdef int64_t cost = frame_cost(conn, frame)
    if cost and not spend(conn, cost):
        return NGHTTP2_ERR_CALLBACK_FAILURE
    if frame.hd.type == NGHTTP2_SETTINGS:
        conn.greeted = True
        if not frame.hd.flags & NGHTTP2_FLAG_ACK:
            look_at_windows(conn)
    if frame.hd.type == NGHTTP2_WINDOW_UPDATE and frame.hd.stream_id:
        stream = stream_of(conn, frame.hd.stream_id)
        if stream != NULL:
            look_at_window(stream)
    if frame.hd.type == NGHTTP2_RST_STREAM:
        note_over(conn, frame.hd.stream_id)
    if frame.hd.type == NGHTTP2_PING and not frame.hd.flags & NGHTTP2_FLAG_ACK:
        conn.host.pinged(conn)
    if frame.hd.type == NGHTTP2_PING and frame.hd.flags & NGHTTP2_FLAG_ACK:
        if memcmp(frame.ping.opaque_data, SHUTDOWN, 8) == 0:
            conn.told = True
    if frame.hd.type != NGHTTP2_HEADERS and frame.hd.type != NGHTTP2_DATA:
        return 0
    stream = stream_of(conn, frame.hd.stream_id)
    if stream == NULL:
        return 0
    if frame.hd.type == NGHTTP2_HEADERS and frame.headers.cat == NGHTTP2_HCAT_REQUEST:
        head_complete(stream)
    if frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
        stream_half_closed(stream)
    return 0


cdef int frame_sent(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream
    if frame.hd.type == NGHTTP2_DATA or frame.hd.type == NGHTTP2_HEADERS:
        conn.response_frames += 1
        budget_earn(&conn.budget, EARNED_BY_RESPONSE, conn.host.spare_frames)
    elif frame.hd.type == NGHTTP2_RST_STREAM and frame.rst_stream.error_code != NGHTTP2_NO_ERROR:
        spend(conn, COST_FRAME)  # the peer made an error, or opened more streams than it may
    elif frame.hd.type == NGHTTP2_GOAWAY:
        if conn.state == CONN_ANNOUNCED:
            # The answer to this PING comes behind all streams that the peer opened before it read the notice. It is
            # asked only now, because nghttp2 writes a PING before a GOAWAY that waits with it.
            nghttp2_submit_ping(session, NGHTTP2_FLAG_NONE, SHUTDOWN)
        if conn.state == CONN_PARTING and frame.goaway.error_code == NGHTTP2_ENHANCE_YOUR_CALM:
            closing_move(&conn.state, CONN_SHUT)
        if frame.goaway.error_code != NGHTTP2_NO_ERROR:
            tell_goaway(conn, &frame.goaway)
    if frame.hd.type == NGHTTP2_HEADERS and frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
        # The response is complete before the request: tell the client to stop sending.
        stream = stream_of(conn, frame.hd.stream_id)
        if stream != NULL and stream.receiver.state != RECEIVED_ALL:
            nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream.id, NGHTTP2_NO_ERROR)
    return 0


cdef int frame_not_sent(nghttp2_session *session, const nghttp2_frame *frame, int error,
                        void *user_data) noexcept nogil:
    # Such as headers of a response that are too large for the library: without them the client would wait for ever.
    cdef Stream *stream = NULL
    if frame.hd.type == NGHTTP2_HEADERS:
        stream = stream_of(<Conn *>user_data, frame.hd.stream_id)
    if stream != NULL:
        stream_cut(stream, NGHTTP2_INTERNAL_ERROR)
    return 0


cdef void tell_goaway(Conn *conn, const nghttp2_goaway *goaway) noexcept nogil:
    cdef char *text = format_text("GOAWAY %s %.*s", nghttp2_http2_strerror(goaway.error_code),
                                  <int>goaway.opaque_data_len, goaway.opaque_data)
    conn.host.refused(conn, text_or_no_memory(text))
    free(text)


cdef ssize_t frame_length(nghttp2_session *session, uint8_t type, int32_t stream_id, int32_t connection_window,
                          int32_t stream_window, uint32_t max_frame, void *user_data) noexcept nogil:
    (<Conn *>user_data).stream_window = stream_window
    return min(max_frame, <uint32_t>MAX_SENT_FRAME)


cdef int stream_close(nghttp2_session *session, int32_t stream_id, uint32_t error_code,
                      void *user_data) noexcept nogil:
    cdef Stream *stream = stream_of(<Conn *>user_data, stream_id)
    if stream != NULL:
        nghttp2_session_set_stream_user_data(session, stream_id, NULL)
        if stream.receiver.state == RECEIVED_ALL:
            note_over(stream.conn, stream_id)
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
nghttp2_session_callbacks_set_on_invalid_header_callback2(callbacks, invalid_header)
nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, data_received)
nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, frame_received)
nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, frame_sent)
nghttp2_session_callbacks_set_on_frame_not_send_callback(callbacks, frame_not_sent)
nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, stream_close)
nghttp2_session_callbacks_set_send_data_callback(callbacks, stream_frame)
nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, frame_length)
nghttp2_option_set_no_auto_window_update(options, 1)
nghttp2_option_set_no_closed_streams(options, 1)
allow_resets(options, UNLIMITED_RESETS, UNLIMITED_RESETS)
limit_continuations(options, CONTINUATIONS)
allow_spaces(options)


cdef bint conn_open(Conn *conn, Host *host, void *owner) noexcept nogil:
    cdef nghttp2_mem memory = nghttp2_mem(&host.smalls, mem_malloc, mem_free, mem_calloc, mem_realloc)
    conn.host = host
    conn.writer = &host.dirty
    conn.owner = owner
    conn.user = -1
    conn.account.within = &host.account
    conn.interceptor = &host.interceptor
    conn.received_ns = host.now_ns
    conn.portion = FIRST_PORTION
    conn.budget.filled_ns = host.now_ns
    conn.budget.left = host.spare_frames
    if nghttp2_session_server_new3(&conn.session, callbacks, conn, options, &memory) != 0:
        conn.session = NULL
        return False
    if not greet(conn):
        nghttp2_session_del(conn.session)
        conn.session = NULL
        return False
    live_add(LIVE_CONNECTIONS, 1)
    list_prepend(&host.connections, conn)
    host.connection_count += 1
    host_note(host)
    return True


cdef inline bint greet(Conn *conn) noexcept nogil:
    # The first frames. False: there is no memory for them. A client without them might wait for ever.
    cdef nghttp2_settings_entry settings[4]
    settings[0].settings_id = NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS
    settings[0].value = conn.host.max_streams
    settings[1].settings_id = NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE
    settings[1].value = STREAM_WINDOW
    settings[2].settings_id = NGHTTP2_SETTINGS_MAX_FRAME_SIZE
    settings[2].value = MAX_FRAME
    settings[3].settings_id = NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE
    settings[3].value = MAX_HEADER_BYTES
    return (nghttp2_submit_settings(conn.session, NGHTTP2_FLAG_NONE, settings, 4) == 0
            and nghttp2_session_set_local_window_size(conn.session, NGHTTP2_FLAG_NONE, 0, CONNECTION_WINDOW) == 0)


cdef void conn_close(Conn *conn) noexcept nogil:
    if conn.session == NULL:
        return
    unmark_dirty(conn)
    while conn.open.first != NULL:
        stream_closed(conn.open.first, NGHTTP2_CANCEL)
    list_remove(&conn.host.connections, conn)
    conn.host.connection_count -= 1
    host_note(conn.host)
    head_forget(conn)
    if conn.timer.slot:
        timers_clear(conn.host.timers, &conn.timer)
    charge_release(&conn.framed)
    nghttp2_session_del(conn.session)
    conn.session = NULL
    output_clear(&conn.output)
    block_give(conn.peer)
    conn.peer = NULL
    closing_move(&conn.state, CONN_GONE)
    live_add(LIVE_CONNECTIONS, -1)


cdef void conn_receive(Conn *conn, const uint8_t *data, size_t size) noexcept nogil:
    cdef ssize_t result
    if conn.session == NULL or conn.state >= CONN_PARTING:
        return
    conn.received_ns = conn.host.now_ns
    if conn.frame_left == 0:
        conn.frame_size = 0  # that frame has ended; nghttp2 does not report frames that it ignores
    result = nghttp2_session_mem_recv(conn.session, data, size)
    if conn.received:
        nghttp2_session_consume_connection(conn.session, conn.received)
        conn.received = 0
    if result == NGHTTP2_ERR_FLOODED or result == TOO_MANY_CONTINUATIONS:
        conn_calm(conn, "too_many_frames")
    elif result == NGHTTP2_ERR_BAD_CLIENT_MAGIC and is_http1(data, size):
        closing_move(&conn.state, CONN_PARTING)
        conn.http1 = True
        conn.host.refused(conn, "it speaks HTTP/1, this port serves gRPC only")
        mark_dirty(conn)
    elif result < 0 and conn.state < CONN_PARTING:
        closing_break(&conn.state)
        conn.host.refused(conn, nghttp2_strerror(<int>result))


cdef void conn_end_round(Conn *conn) noexcept nogil:
    if conn.session != NULL:
        end_read(conn)
        if account_exceeded(&conn.host.account):
            host_relieve(conn.host)
        conn_watch(conn)
        host_note(conn.host)


cdef void conn_collect(Conn *conn, size_t limit) noexcept nogil:
    cdef const uint8_t *data
    cdef ssize_t size
    if conn.session == NULL:
        return
    conn.output_limit = limit
    if conn.http1 and conn.state == CONN_PARTING:
        output_copy(&conn.output, <const uint8_t *>HTTP1_RESPONSE, strlen(HTTP1_RESPONSE))
        closing_move(&conn.state, CONN_SHUT)
    while conn.output.size < limit and conn.state < CONN_SHUT:
        size = nghttp2_session_mem_send(conn.session, &data)
        if size < 0 or (size > 0 and not output_copy(&conn.output, data, <size_t>size)):
            closing_break(&conn.state)
        if size <= 0:
            break
    conn_collected(conn)
    calls_resume(conn)


cdef bint conn_finished(Conn *conn) noexcept nogil:
    return conn.session == NULL or conn.state >= CONN_SHUT or not (
        nghttp2_session_want_read(conn.session) or nghttp2_session_want_write(conn.session))


cdef void conn_shut(Conn *conn) noexcept nogil:
    if conn.session == NULL or conn.state > CONN_SHUT:
        return
    closing_break(&conn.state)
    conn.frame_size = 0  # no more direct reads
    conn.frame_left = 0
    conn.waits_ns = 0  # the last output has a time limit of its own (Farewell)
    if conn.timer.slot:
        timers_clear(conn.host.timers, &conn.timer)
    while conn.open.first != NULL:
        stream_closed(conn.open.first, NGHTTP2_CANCEL)


cdef bint conn_linger(Conn *conn) noexcept nogil:
    if conn.session == NULL or not closing_allows(conn.state, CONN_LINGERING):
        return False
    closing_move(&conn.state, CONN_LINGERING)
    return True


cdef void conn_announce_shutdown(Conn *conn) noexcept nogil:
    if conn.session != NULL and conn.state == CONN_OPEN:
        closing_move(&conn.state, CONN_ANNOUNCED)
        nghttp2_submit_shutdown_notice(conn.session)  # when it is sent, `frame_sent` asks for the answer
        mark_dirty(conn)


cdef void conn_go_away(Conn *conn, const char *debug) noexcept nogil:
    if conn.session != NULL and conn.state < CONN_DRAINING:
        closing_move(&conn.state, CONN_DRAINING)
        conn.last_served = nghttp2_session_get_last_proc_stream_id(conn.session)
        nghttp2_submit_goaway(conn.session, NGHTTP2_FLAG_NONE, conn.last_served, NGHTTP2_NO_ERROR,
                              <const uint8_t *>debug, strlen(debug))
        mark_dirty(conn)


cdef void conn_ping(Conn *conn) noexcept nogil:
    if conn.session != NULL:
        nghttp2_submit_ping(conn.session, NGHTTP2_FLAG_NONE, NULL)
        mark_dirty(conn)


cdef void conn_fail_calls(Conn *conn, const char *details) noexcept nogil:
    cdef Stream *stream = conn.open.first
    while stream != NULL:
        if stream.method != NULL and not stream_ended(stream):
            stream_abandon(stream, NGHTTP2_CANCEL)
            stream_refuse(stream, REFUSAL_STOPPING, format_text("%s", details))
            stream_drop_request(stream)
        stream = stream.next


cdef void conn_end_calls(Conn *conn) noexcept nogil:
    cdef Stream *stream = conn.open.first
    while stream != NULL:
        if not stream_ended(stream):
            stream_abandon(stream, NGHTTP2_CANCEL)
            stream_drop_request(stream)
        stream = stream.next


cdef bint conn_compresses(const Conn *conn) noexcept nogil:
    cdef const Stream *stream = conn.open.first
    while stream != NULL:
        if stream.sender.plain:
            return True
        stream = stream.next
    return False
