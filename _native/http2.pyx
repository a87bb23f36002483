"""HTTP/2 and gRPC framing of a server connection, on libnghttp2, without I/O and without Python.

`conn_receive` takes what came from the socket, `conn_collect` gives what goes there. Everything else happens in
between: headers are read and judged, messages put together, native methods run, answers framed under flow control.
Calls of methods that are not native are handed to `CallHooks`; `_native.connection` makes Python objects of them.

Back-pressure. Request bytes are acknowledged (WINDOW_UPDATE) as they come, except those of a stream whose complete
messages nobody takes. Answers are framed only when asked for, and asked for only while the socket takes them; while
more than UNSENT_LIMIT bytes of answers wait for a peer that does not read, its further unary calls wait too.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, strlen

from _native.headers cimport message_encode, timeout_parse
from _native.memory cimport LIVE_CONNECTIONS, LIVE_STREAMS, Block, block_give, block_take, live_add
from _native.nghttp2 cimport *
from _native.outgoing cimport (
    Outgoing,
    outgoing_free,
    output_clear,
    output_copy,
    output_message,
)
from _native.text cimport format_text, text_or_no_memory

cdef enum:
    STREAM_WINDOW = 4 << 20          # request bytes a peer may send ahead on one stream
    CONNECTION_WINDOW = 16 << 20     # and on one connection
    MAX_FRAME = 256 << 10            # of received DATA
    MAX_SENT_FRAME = 64 << 10
    MAX_HEADER_BYTES = 16 << 10      # of one request, counted as in RFC 9113 section 6.5.2
    UNSENT_LIMIT = 4 << 20           # bytes of answers beyond which a connection's further unary calls wait
    QUEUED_LIMIT = 1 << 20           # bytes of complete messages beyond which a stream gets no more credit
    ALIGNMENT = 64
    FIXED_TRAILERS = 5       # :status, content-type, grpc-accept-encoding, grpc-status, grpc-message
    # Streams that a peer may reset at once, and per second after that, before the connection is closed. The library's
    # own 1,000 and 33 close the connections of clients that cancel much; a reset costs a few microseconds here.
    RESETS = 10000

cdef const uint8_t *SHUTDOWN = <const uint8_t *><const char *>b"shutdown"  # opaque data of a PING

cdef enum:
    # what the request headers have said so far (Stream.seen)
    HEADER_POST = 1
    HEADER_TE = 2
    HEADER_GRPC = 4              # content-type application/grpc
    HEADER_BAD_TIMEOUT = 8
    HEADER_BAD_ENCODING = 16
    HEADER_TOO_LARGE = 32

cdef enum:
    # gRPC status codes of framing errors
    STATUS_OK = 0
    STATUS_RESOURCE_EXHAUSTED = 8
    STATUS_UNIMPLEMENTED = 12
    STATUS_INTERNAL = 13

cdef extern from *:
    """
    #define INFERD_NV(name, value) {(uint8_t *)name, (uint8_t *)value, sizeof(name) - 1, sizeof(value) - 1, \\
        NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE}
    static const nghttp2_nv inferd_answer[2] = {
        INFERD_NV(":status", "200"), INFERD_NV("content-type", "application/grpc")};
    static const nghttp2_nv inferd_accepted[1] = {INFERD_NV("grpc-accept-encoding", "identity")};
    static const char *const inferd_status_text[17] = {
        "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"};
    /* since 1.57, and in distributions' security updates of older versions */
    extern void nghttp2_option_set_stream_reset_rate_limit(nghttp2_option *, uint64_t, uint64_t)
        __attribute__((weak));
    static void inferd_allow_resets(nghttp2_option *option, uint64_t burst, uint64_t rate) {
        if (nghttp2_option_set_stream_reset_rate_limit)
            nghttp2_option_set_stream_reset_rate_limit(option, burst, rate);
    }
    """
    const nghttp2_nv ANSWER "inferd_answer"[2]
    const nghttp2_nv ACCEPTED "inferd_accepted"[1]
    const char *STATUS_TEXT "inferd_status_text"[17]
    void allow_resets "inferd_allow_resets"(nghttp2_option *option, long burst, long rate) nogil


# ---------------------------------------------------------------------------------------------------------------------
# Streams

cdef Stream *stream_new(Conn *conn, int32_t id) noexcept nogil:
    cdef Stream *stream = <Stream *>calloc(1, sizeof(Stream))
    if stream == NULL:
        return NULL
    stream.conn = conn
    stream.id = id
    stream.timeout_ns = -1
    stream.next = conn.first_stream
    if stream.next != NULL:
        stream.next.previous = stream
    conn.first_stream = stream
    conn.streams += 1
    live_add(LIVE_STREAMS, 1)
    return stream


cdef void stream_free(Stream *stream) noexcept nogil:
    cdef Conn *conn = stream.conn
    unpark(stream)
    if stream.previous == NULL:
        conn.first_stream = stream.next
    else:
        stream.previous.next = stream.next
    if stream.next != NULL:
        stream.next.previous = stream.previous
    conn.streams -= 1
    conn.unsent -= stream.unsent
    drop_answer(stream)
    drop_fields(stream)
    block_give(stream.block)
    stream.withheld = 0
    while stream.first_in != NULL:
        stream_drop_message(stream)
    free(stream.trailers)
    free(stream.details)
    free(stream.path)
    free(stream)
    live_add(LIVE_STREAMS, -1)


cdef void drop_answer(Stream *stream) noexcept nogil:
    cdef Outgoing *message
    while stream.first_out != NULL:
        message = stream.first_out
        stream.first_out = message.next
        outgoing_free(message)
    stream.last_out = NULL
    stream.unsent = 0


cdef void drop_fields(Stream *stream) noexcept nogil:
    cdef uint32_t i
    for i in range(stream.field_count):
        nghttp2_rcbuf_decref(stream.fields[i].name)
        nghttp2_rcbuf_decref(stream.fields[i].value)
    free(stream.fields)
    stream.fields = NULL
    stream.field_count = 0
    stream.field_capacity = 0


cdef void stream_closed(Stream *stream, uint32_t error_code) noexcept nogil:
    # the stream is over, with or without an answer
    if stream.call != NULL:
        if stream.method.unary != NULL:
            stream.method.cancel(stream.call)
        else:
            stream.conn.host.hooks.closed(stream, error_code)
    stream_free(stream)


cdef inline Stream *stream_of(nghttp2_session *session, int32_t id) noexcept nogil:
    return <Stream *>nghttp2_session_get_stream_user_data(session, id)


# ---------------------------------------------------------------------------------------------------------------------
# Answers

cdef void mark_dirty(Conn *conn) noexcept nogil:
    if not conn.dirty:
        conn.dirty = True
        conn.next_dirty = conn.host.first_dirty
        conn.host.first_dirty = conn


cdef void stream_begin(Stream *stream, const nghttp2_nv *metadata, size_t count) noexcept nogil:
    cdef nghttp2_data_provider provider
    cdef nghttp2_nv *headers
    provider.source.ptr = stream
    provider.read_callback = read_answer
    stream.headers_sent = True
    if count == 0:
        nghttp2_submit_response(stream.conn.session, stream.id, ANSWER, 2, &provider)
    else:
        headers = <nghttp2_nv *>malloc((2 + count) * sizeof(nghttp2_nv))
        if headers == NULL:
            stream_reset(stream)
            return
        memcpy(headers, ANSWER, 2 * sizeof(nghttp2_nv))
        memcpy(headers + 2, metadata, count * sizeof(nghttp2_nv))
        nghttp2_submit_response(stream.conn.session, stream.id, headers, 2 + count, &provider)
        free(headers)
    mark_dirty(stream.conn)


cdef void go_on(Stream *stream) noexcept nogil:
    # there is something new to frame
    if not stream.headers_sent:
        stream_begin(stream, NULL, 0)
    elif stream.waiting:
        stream.waiting = False
        nghttp2_session_resume_data(stream.conn.session, stream.id)
    mark_dirty(stream.conn)


cdef void append(Stream *stream, Outgoing *message) noexcept nogil:
    message.next = NULL
    if stream.last_out == NULL:
        stream.first_out = message
    else:
        stream.last_out.next = message
    stream.last_out = message
    stream.unsent += message.left
    stream.conn.unsent += message.left


cdef void stream_reply(Stream *stream, Outgoing *message) noexcept nogil:
    if stream.ended:
        outgoing_free(message)
        return
    append(stream, message)
    stream.ended = True
    stream.status = STATUS_OK
    go_on(stream)


cdef void stream_send(Stream *stream, Outgoing *message) noexcept nogil:
    append(stream, message)
    go_on(stream)


cdef void stream_fail(Stream *stream, int status, const char *details) noexcept nogil:
    finish(stream, status, details, "200")


cdef void stream_end(Stream *stream, int status, const char *details, nghttp2_nv *trailers,
                     size_t count) noexcept nogil:
    if stream.ended:
        free(trailers)
        return
    stream.trailers = trailers
    stream.trailer_count = count
    finish(stream, status, details, "200")


cdef void stream_reset(Stream *stream) noexcept nogil:
    stream.ended = True
    nghttp2_submit_rst_stream(stream.conn.session, NGHTTP2_FLAG_NONE, stream.id, NGHTTP2_INTERNAL_ERROR)
    mark_dirty(stream.conn)


cdef void finish(Stream *stream, int status, const char *details, const char *http_status) noexcept nogil:
    # final status; without any answer before it, headers and trailers are one frame ("Trailers-Only")
    if stream.ended:
        return
    stream.ended = True
    stream.status = status
    if details != NULL and details[0] != 0:
        stream.details = message_encode(details)
    if stream.headers_sent:
        go_on(stream)
    else:
        stream.headers_sent = True
        submit_trailers(stream, http_status)
        mark_dirty(stream.conn)


cdef inline void set_nv(nghttp2_nv *nv, const char *name, const char *value) noexcept nogil:
    nv.name = <uint8_t *>name
    nv.namelen = strlen(name)
    nv.value = <uint8_t *>value
    nv.valuelen = strlen(value)
    nv.flags = NGHTTP2_NV_FLAG_NONE


cdef void submit_trailers(Stream *stream, const char *http_status) noexcept nogil:
    # `http_status` is given when the trailers are the whole answer
    cdef nghttp2_nv few[FIXED_TRAILERS]
    cdef nghttp2_nv *nv = few
    cdef size_t count = 0
    if stream.trailer_count:
        nv = <nghttp2_nv *>malloc((FIXED_TRAILERS + stream.trailer_count) * sizeof(nghttp2_nv))
        if nv == NULL:
            nghttp2_submit_rst_stream(stream.conn.session, NGHTTP2_FLAG_NONE, stream.id, NGHTTP2_INTERNAL_ERROR)
            return
    if http_status != NULL:
        set_nv(&nv[0], ":status", http_status)
        nv[1] = ANSWER[1]
        count = 2
        if stream.seen & HEADER_BAD_ENCODING:
            nv[2] = ACCEPTED[0]
            count = 3
    set_nv(&nv[count], "grpc-status", STATUS_TEXT[stream.status])
    count += 1
    if stream.details != NULL:
        set_nv(&nv[count], "grpc-message", stream.details)
        count += 1
    if stream.trailer_count:
        memcpy(nv + count, stream.trailers, stream.trailer_count * sizeof(nghttp2_nv))
    count += stream.trailer_count
    if http_status != NULL:
        nghttp2_submit_response(stream.conn.session, stream.id, nv, count, NULL)
    else:
        nghttp2_submit_trailer(stream.conn.session, stream.id, nv, count)
    if nv != few:
        free(nv)


# --- nghttp2 asks for answer bytes

cdef ssize_t read_answer(nghttp2_session *session, int32_t stream_id, uint8_t *buffer, size_t length,
                         uint32_t *flags, nghttp2_data_source *source, void *user_data) noexcept nogil:
    # how many bytes the next DATA frame takes; send_answer will put them there
    cdef Stream *stream = <Stream *>source.ptr
    cdef size_t size = min(length, stream.unsent)
    if size == 0 and not stream.ended:
        stream.waiting = True
        return NGHTTP2_ERR_DEFERRED
    flags[0] |= NGHTTP2_DATA_FLAG_NO_COPY
    if stream.ended and size == stream.unsent:
        flags[0] |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM
        submit_trailers(stream, NULL)
    return <ssize_t>size


cdef int send_answer(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t length,
                     nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream = <Stream *>source.ptr
    cdef Outgoing *message
    cdef size_t part
    cdef size_t before = stream.unsent
    if not output_copy(&conn.output, head, 9):
        return NGHTTP2_ERR_CALLBACK_FAILURE
    stream.unsent -= length
    conn.unsent -= length
    while length:
        message = stream.first_out
        part = min(length, message.left)
        if not output_message(&conn.output, message, part):
            return NGHTTP2_ERR_CALLBACK_FAILURE
        length -= part
        if message.left == 0:
            stream.first_out = message.next
            if stream.first_out == NULL:
                stream.last_out = NULL
            outgoing_free(message)
    if stream.method.unary == NULL and stream.call != NULL and before >= WRITABLE_BELOW > stream.unsent:
        conn.host.hooks.writable(stream)
    return 0 if conn.output.size < conn.output_limit else NGHTTP2_ERR_PAUSE


cdef ssize_t frame_length(nghttp2_session *session, uint8_t type, int32_t stream_id, int32_t connection_window,
                          int32_t stream_window, uint32_t max_frame, void *user_data) noexcept nogil:
    return min(max_frame, <uint32_t>MAX_SENT_FRAME)


cdef int frame_sent(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    # a call that is answered before the client has finished sending: tell it to stop
    cdef Stream *stream
    if frame.hd.type == NGHTTP2_HEADERS and frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
        stream = stream_of(session, frame.hd.stream_id)
        if stream != NULL and not stream.remote_closed:
            nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream.id, NGHTTP2_NO_ERROR)
    return 0


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
    if stream == NULL or frame.headers.cat != NGHTTP2_HCAT_REQUEST:
        return 0
    stream.header_bytes += name.len + value.len + 32
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
        if not equals(value, "identity", 8):
            stream.seen |= HEADER_BAD_ENCODING
    elif equals(name, "grpc-accept-encoding", 20):
        pass  # answers are never compressed
    elif name.len and name.base[0] != c":" and stream.method != NULL and stream.method.unary == NULL:
        return keep_field(stream, name_buffer, value_buffer)
    return 0


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
    cdef char *text
    if stream.seen & HEADER_TOO_LARGE:
        text = format_text("the request headers exceed %d bytes", <int>MAX_HEADER_BYTES)
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, text_or_no_memory(text))
        free(text)
    elif not stream.seen & HEADER_POST:
        finish(stream, STATUS_INTERNAL, "the HTTP method of a gRPC call must be POST", "405")
    elif not stream.seen & HEADER_GRPC:
        finish(stream, STATUS_INTERNAL, "the content-type of a gRPC call must begin with application/grpc", "415")
    elif not stream.seen & HEADER_TE:
        stream_fail(stream, STATUS_INTERNAL, "a gRPC call must carry the header 'te: trailers'")
    elif stream.seen & HEADER_BAD_TIMEOUT:
        stream_fail(stream, STATUS_INTERNAL, "grpc-timeout must be at most 8 digits and one of H M S m u n")
    elif stream.seen & HEADER_BAD_ENCODING:
        stream_fail(stream, STATUS_UNIMPLEMENTED,
                    "the grpc-encoding of the request is not supported, accepted encodings: identity")
    elif stream.method.unary == NULL:
        stream.conn.host.hooks.begin(stream)
        drop_fields(stream)


# ---------------------------------------------------------------------------------------------------------------------
# Request messages

cdef int data_received(nghttp2_session *session, uint8_t flags, int32_t stream_id, const uint8_t *data, size_t size,
                       void *user_data) noexcept nogil:
    cdef Stream *stream = stream_of(session, stream_id)
    nghttp2_session_consume_connection(session, size)
    if stream == NULL:
        return 0
    if stream.queued_bytes < QUEUED_LIMIT:
        nghttp2_session_consume_stream(session, stream_id, size)
    else:
        stream.withheld += size
    deframe(stream, data, size)
    return 0


cdef void deframe(Stream *stream, const uint8_t *data, size_t size) noexcept nogil:
    cdef size_t part
    while size and not stream.ended:
        if stream.prefix_size < 5:
            stream.prefix[stream.prefix_size] = data[0]
            stream.prefix_size += 1
            data += 1
            size -= 1
            if stream.prefix_size == 5:
                begin_message(stream)
            continue
        part = min(size, stream.size - stream.received)
        memcpy(stream.data + stream.received, data, part)
        stream.received += part
        data += part
        size -= part
        if stream.received == stream.size:
            end_message(stream)


cdef void begin_message(Stream *stream) noexcept nogil:
    cdef size_t limit = stream.conn.host.max_message
    cdef size_t room
    cdef char *text
    stream.size = (<size_t>stream.prefix[1] << 24 | <size_t>stream.prefix[2] << 16
                   | <size_t>stream.prefix[3] << 8 | <size_t>stream.prefix[4])
    stream.received = 0
    if stream.prefix[0] != 0:
        stream_fail(stream, STATUS_INTERNAL,
                    "a message is marked as compressed but the call declares no grpc-encoding")
        return
    if stream.method.unary != NULL and stream.messages == 1:
        stream_fail(stream, STATUS_UNIMPLEMENTED, "expected one request message, got more")
        return
    if limit and stream.size > limit:
        text = format_text("Received message larger than max (%zu vs. %zu)", stream.size, limit)
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, text_or_no_memory(text))
        free(text)
        return
    # The message ends at a cache line: so does, in nearly all requests, the last tensor, and a tensor whose size is a
    # multiple of the line begins at one and is used in place.
    room = (stream.size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)
    stream.block = block_take(room)
    if stream.block == NULL:
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the request message")
        return
    stream.data = stream.block.data + (room - stream.size)
    if stream.size == 0:
        end_message(stream)


cdef void end_message(Stream *stream) noexcept nogil:
    cdef Incoming *message
    stream.messages += 1
    stream.prefix_size = 0
    if stream.method.unary != NULL:
        return  # kept until the client half-closes
    message = <Incoming *>malloc(sizeof(Incoming))
    if message == NULL:
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the request message")
        return
    message.next = NULL
    message.block = stream.block
    message.data = stream.data
    message.size = stream.size
    stream.block = NULL
    if stream.last_in == NULL:
        stream.first_in = message
    else:
        stream.last_in.next = message
    stream.last_in = message
    stream.queued_bytes += message.size
    if stream.call != NULL:
        stream.conn.host.hooks.message(stream)


cdef void stream_drop_message(Stream *stream) noexcept nogil:
    cdef Incoming *message = stream.first_in
    stream.first_in = message.next
    if stream.first_in == NULL:
        stream.last_in = NULL
    stream.queued_bytes -= message.size
    block_give(message.block)
    free(message)
    if stream.withheld and stream.queued_bytes < QUEUED_LIMIT:
        nghttp2_session_consume_stream(stream.conn.session, stream.id, stream.withheld)
        stream.withheld = 0
        mark_dirty(stream.conn)


cdef void half_closed(Stream *stream) noexcept nogil:
    stream.remote_closed = True
    if stream.ended:
        return
    if stream.prefix_size != 0:
        stream_fail(stream, STATUS_INTERNAL, "the request ends in the middle of a message")
    elif stream.method.unary == NULL:
        stream.conn.host.hooks.half_closed(stream)
    elif stream.messages == 0:
        stream_fail(stream, STATUS_UNIMPLEMENTED, "expected one request message, got none")
    elif stream.conn.unsent > UNSENT_LIMIT:
        park(stream)
    else:
        run_native(stream)


cdef void run_native(Stream *stream) noexcept nogil:
    cdef Block *block = stream.block
    stream.block = NULL
    stream.method.unary(stream.method.context, stream, block, stream.data, stream.size, stream.timeout_ns)


# --- unary calls of a peer that does not read its answers

cdef void park(Stream *stream) noexcept nogil:
    cdef Conn *conn = stream.conn
    stream.next_parked = NULL
    if conn.last_parked == NULL:
        conn.first_parked = stream
    else:
        conn.last_parked.next_parked = stream
    conn.last_parked = stream


cdef void unpark(Stream *stream) noexcept nogil:
    # take it out of the list, if it is there
    cdef Conn *conn = stream.conn
    cdef Stream *before = NULL
    cdef Stream *at = conn.first_parked
    while at != NULL and at != stream:
        before = at
        at = at.next_parked
    if at == NULL:
        return
    if before == NULL:
        conn.first_parked = at.next_parked
    else:
        before.next_parked = at.next_parked
    if conn.last_parked == at:
        conn.last_parked = before


cdef inline void end_round(Host *host) noexcept nogil:
    if host.after_receive != NULL:
        host.after_receive(host.after_context)


cdef void run_parked(Conn *conn) noexcept nogil:
    cdef Stream *stream
    while conn.first_parked != NULL and conn.unsent <= UNSENT_LIMIT:
        stream = conn.first_parked
        conn.first_parked = stream.next_parked
        if conn.first_parked == NULL:
            conn.last_parked = NULL
        run_native(stream)


# ---------------------------------------------------------------------------------------------------------------------
# Sessions

cdef int frame_received(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Stream *stream
    if frame.hd.type == NGHTTP2_PING and frame.hd.flags & NGHTTP2_FLAG_ACK:
        if memcmp(frame.ping.opaque_data, SHUTDOWN, 8) == 0:
            (<Conn *>user_data).told = True
        return 0
    if frame.hd.type != NGHTTP2_HEADERS and frame.hd.type != NGHTTP2_DATA:
        return 0
    stream = stream_of(session, frame.hd.stream_id)
    if stream == NULL:
        return 0
    if frame.hd.type == NGHTTP2_HEADERS and frame.headers.cat == NGHTTP2_HCAT_REQUEST:
        headers_complete(stream)
    if frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
        half_closed(stream)
    return 0


cdef int stream_close(nghttp2_session *session, int32_t stream_id, uint32_t error_code,
                      void *user_data) noexcept nogil:
    cdef Stream *stream = stream_of(session, stream_id)
    if stream != NULL:
        nghttp2_session_set_stream_user_data(session, stream_id, NULL)
        stream_closed(stream, error_code)
    return 0


cdef nghttp2_session_callbacks *callbacks
cdef nghttp2_option *options
if nghttp2_session_callbacks_new(&callbacks) != 0 or nghttp2_option_new(&options) != 0:
    raise MemoryError
nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, begin_headers)
nghttp2_session_callbacks_set_on_header_callback2(callbacks, header)
nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, data_received)
nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, frame_received)
nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, frame_sent)
nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, stream_close)
nghttp2_session_callbacks_set_send_data_callback(callbacks, send_answer)
nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, frame_length)
nghttp2_option_set_no_auto_window_update(options, 1)
nghttp2_option_set_no_closed_streams(options, 1)
allow_resets(options, RESETS, RESETS)


cdef bint conn_open(Conn *conn, Host *host, void *owner) noexcept nogil:
    cdef nghttp2_settings_entry settings[4]
    conn.host = host
    conn.owner = owner
    if nghttp2_session_server_new2(&conn.session, callbacks, conn, options) != 0:
        conn.session = NULL
        return False
    live_add(LIVE_CONNECTIONS, 1)
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
    while conn.first_stream != NULL:
        stream_closed(conn.first_stream, NGHTTP2_CANCEL)
    nghttp2_session_del(conn.session)
    conn.session = NULL
    output_clear(&conn.output)
    live_add(LIVE_CONNECTIONS, -1)


cdef void conn_receive(Conn *conn, const uint8_t *data, size_t size) noexcept nogil:
    if conn.session == NULL or conn.failed:
        return
    if nghttp2_session_mem_recv(conn.session, data, size) < 0:
        conn.failed = True
    end_round(conn.host)


cdef void conn_collect(Conn *conn, size_t limit) noexcept nogil:
    cdef const uint8_t *data
    cdef ssize_t size
    if conn.session == NULL:
        return
    conn.output_limit = limit
    while conn.output.size < limit:
        size = nghttp2_session_mem_send(conn.session, &data)
        if size < 0 or (size > 0 and not output_copy(&conn.output, data, <size_t>size)):
            conn.failed = True
        if size <= 0 or conn.failed:
            break
    if conn.first_parked != NULL:
        run_parked(conn)
        end_round(conn.host)


cdef bint conn_finished(Conn *conn) noexcept nogil:
    return conn.session == NULL or conn.failed or not (
        nghttp2_session_want_read(conn.session) or nghttp2_session_want_write(conn.session))


cdef void conn_announce_shutdown(Conn *conn) noexcept nogil:
    if conn.session != NULL:
        nghttp2_submit_shutdown_notice(conn.session)
        # when this comes back, so has every stream that the peer opened before it knew
        nghttp2_submit_ping(conn.session, NGHTTP2_FLAG_NONE, SHUTDOWN)
        mark_dirty(conn)


cdef void conn_go_away(Conn *conn) noexcept nogil:
    if conn.session != NULL:
        nghttp2_submit_goaway(conn.session, NGHTTP2_FLAG_NONE,
                              nghttp2_session_get_last_proc_stream_id(conn.session), NGHTTP2_NO_ERROR, NULL, 0)
        mark_dirty(conn)


cdef void conn_fail_calls(Conn *conn, int status, const char *details) noexcept nogil:
    cdef Stream *stream = conn.first_stream
    while stream != NULL:
        if stream.method != NULL and not stream.ended:
            unpark(stream)
            if stream.method.unary != NULL and stream.call != NULL:
                stream.method.cancel(stream.call)
                stream.call = NULL
            stream_fail(stream, status, details)
        stream = stream.next
