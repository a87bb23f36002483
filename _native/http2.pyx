"""HTTP/2 and gRPC framing of a server connection, on libnghttp2, without I/O and without Python.

`conn_receive` takes what came from the socket, `conn_collect` gives what goes there. Everything else happens in
between: headers are read and judged, messages put together, native methods run, answers framed under flow control.
Compressed messages are inflated, and answers compressed, in the order of their stream; large ones on workers, whose
results come in between rounds.
Calls of methods that are not native are handed to `CallHooks`; `_native.connection` makes Python objects of them.

Back-pressure. Request bytes are acknowledged (WINDOW_UPDATE) as they come, except those of a stream whose complete
messages nobody takes. Answers are framed only when asked for, and asked for only while the socket takes them; while
more than UNSENT_LIMIT bytes of answers wait for a peer that does not read, its further unary calls wait too. The same
holds for all peers together and Host.unsent_limit. There a running call counts with the size of the largest recent
answer, and who has taken an answer before may always have one call run: peers that never read starve only each other.

Floods. Frames that bring no call forward, resets and what the server must reset for the peer's faults among them, come
out of a budget (`_native.budget`); a peer that has spent it is sent away. CONTINUATION frames and queued
acknowledgements are limited by nghttp2.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, strlen

from _native.atomic cimport store32
from _native.budget cimport COST_FRAME, COST_PYTHON_RESET, COST_SETTINGS, EARNED_BY_ANSWER, budget_earn, budget_spend
from _native.compression cimport (
    ENCODING_DEFLATE,
    ENCODING_GZIP,
    ENCODING_IDENTITY,
    ENCODING_UNKNOWN,
    RESULT_CANCELLED,
    RESULT_NO_MEMORY,
    RESULT_OK,
    RESULT_TOO_LARGE,
    RESULT_TRUNCATED,
    Encoding,
    Inflated,
    Result,
    deflate_message,
    encoding_name,
    encoding_parse,
    encodings_parse,
    inflate_message,
)
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
from _native.workers cimport Job, crew_submit

cdef enum:
    STREAM_WINDOW = 4 << 20          # request bytes a peer may send ahead on one stream
    CONNECTION_WINDOW = 16 << 20     # and on one connection
    MAX_FRAME = 256 << 10            # of received DATA
    MAX_SENT_FRAME = 64 << 10
    MAX_HEADER_BYTES = 16 << 10      # of one request, counted as in RFC 9113 section 6.5.2
    HEADER_BOMB = 256 << 10          # beyond this the connection ends: one byte of HPACK can stand for 4 KiB
    UNSENT_LIMIT = 4 << 20           # bytes of answers beyond which a connection's further unary calls wait
    NOT_NOTED = -1           # of Conn.taken_ns: answers have begun to wait, the clock was not looked at yet
    EXPECTED_FADES = 1024            # answers after which a large one has mostly been forgotten
    QUEUED_LIMIT = 1 << 20           # bytes of complete messages beyond which a stream gets no more credit
    ALIGNMENT = 64
    COMPRESS_FROM = 1 << 10          # bytes of an answer below which compressing does not pay
    COMPRESS_HERE = 8 << 10          # bytes up to which an answer is compressed at once, on the calling thread
    INFLATE_HERE = 16 << 10          # the same for received messages
    INFLATED_HERE = 64 << 10         # and for what becomes of them
    FIXED_TRAILERS = 5       # :status, content-type, grpc-accept-encoding, grpc-status, grpc-message
    # The library's own limit on resets, 1,000 and then 33 a second, closes the connections of clients that cancel much.
    # Here resets come out of the budget, so the library's is set out of reach.
    UNLIMITED_RESETS = 1 << 30
    CONTINUATIONS = 64               # of one header block; each read that ends inside of a frame's head counts too
    TOO_MANY_CONTINUATIONS = -905    # nghttp2's code; older headers lack the name

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
    static const nghttp2_nv inferd_accepted[1] = {INFERD_NV("grpc-accept-encoding", "identity, deflate, gzip")};
    static const char *const inferd_status_text[17] = {
        "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"};
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
    const nghttp2_nv ANSWER "inferd_answer"[2]
    const nghttp2_nv ACCEPTED "inferd_accepted"[1]
    const char *STATUS_TEXT "inferd_status_text"[17]
    void allow_resets "inferd_allow_resets"(nghttp2_option *option, long burst, long rate) nogil
    void limit_continuations "inferd_limit_continuations"(nghttp2_option *option, size_t count) nogil


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
    conn.unsent -= stream_unsent(stream)
    release(stream)
    drop_compression(stream)
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
        stream.conn.host.unsent -= message.size
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
    if count == 0 and stream.answer_encoding == ENCODING_IDENTITY:
        nghttp2_submit_response(stream.conn.session, stream.id, ANSWER, 2, &provider)
    else:
        headers = <nghttp2_nv *>malloc((3 + count) * sizeof(nghttp2_nv))
        if headers == NULL:
            stream_reset(stream)
            return
        memcpy(headers, ANSWER, 2 * sizeof(nghttp2_nv))
        memcpy(headers + 2, metadata, count * sizeof(nghttp2_nv))
        count += 2
        if stream.answer_encoding != ENCODING_IDENTITY:
            set_nv(&headers[count], "grpc-encoding", encoding_name(stream.answer_encoding))
            count += 1
        nghttp2_submit_response(stream.conn.session, stream.id, headers, count, &provider)
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
    if stream.conn.unsent == 0:
        stream.conn.taken_ns = NOT_NOTED
    stream.unsent += message.left
    stream.conn.unsent += message.left
    stream.conn.host.unsent += message.size
    release(stream)


cdef inline void send(Stream *stream, Outgoing *message, bint compressible) noexcept nogil:
    message.compress = (compressible and stream.answer_encoding != ENCODING_IDENTITY
                        and message.left >= COMPRESS_FROM)
    if message.compress or stream.plain:
        add_plain(stream, message)
    else:
        release_plain(stream, message)


cdef void stream_reply(Stream *stream, Outgoing *message) noexcept nogil:
    if stream.ended:
        outgoing_free(message)
        return
    learn(stream.conn.host, message.left)
    stream.ended = True
    stream.status = STATUS_OK
    send(stream, message, True)


cdef void stream_send(Stream *stream, Outgoing *message, bint compressible) noexcept nogil:
    send(stream, message, compressible)


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
    if stream.headers_sent or stream.plain:
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
    if size == 0 and (stream.plain or not stream.ended):
        stream.waiting = True
        return NGHTTP2_ERR_DEFERRED
    flags[0] |= NGHTTP2_DATA_FLAG_NO_COPY
    if stream.ended and size == stream.unsent and not stream.plain:
        flags[0] |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM
        submit_trailers(stream, NULL)
    return <ssize_t>size


cdef int send_answer(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t length,
                     nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream = <Stream *>source.ptr
    cdef Outgoing *message
    cdef size_t part
    cdef size_t before = stream_unsent(stream)
    if not output_copy(&conn.output, head, 9):
        return NGHTTP2_ERR_CALLBACK_FAILURE
    stream.unsent -= length
    conn.unsent -= length
    conn.taken_ns = conn.host.now_ns
    if stream.unsent == 0 and stream.ended:
        conn.reads = True
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
            conn.host.unsent -= message.size
            outgoing_free(message)
    tell_writable(stream, before)
    return 0 if conn.output.size < conn.output_limit else NGHTTP2_ERR_PAUSE


cdef inline void tell_writable(Stream *stream, size_t before) noexcept nogil:
    if stream.method.unary == NULL and stream.call != NULL and before >= WRITABLE_BELOW > stream_unsent(stream):
        stream.conn.host.hooks.writable(stream)


cdef ssize_t frame_length(nghttp2_session *session, uint8_t type, int32_t stream_id, int32_t connection_window,
                          int32_t stream_window, uint32_t max_frame, void *user_data) noexcept nogil:
    return min(max_frame, <uint32_t>MAX_SENT_FRAME)


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
    cdef Gatekeeper *gatekeeper = &stream.conn.host.gatekeeper
    return stream.method.unary == NULL or (
        gatekeeper.wants != NULL and gatekeeper.wants(gatekeeper.context, name.base, name.len))


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
                    "the grpc-encoding of the request is not supported, accepted encodings: identity, deflate, gzip")
    elif stream.method.unary != NULL:
        stream_compress(stream, ENCODING_UNKNOWN, stream.conn.host.native_level)
        if stream.conn.host.gatekeeper.admits != NULL:
            stream.conn.host.gatekeeper.admits(stream.conn.host.gatekeeper.context, stream)
            drop_fields(stream)
    else:
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
    if stream.prefix[0] > 1:
        stream_fail(stream, STATUS_INTERNAL, "the first byte of a gRPC message must be 0 or 1")
        return
    if stream.prefix[0] and stream.encoding == ENCODING_IDENTITY:
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
    if stream.method.unary != NULL and not stream.prefix[0]:
        return  # kept until the client half-closes
    message = <Incoming *>malloc(sizeof(Incoming))
    if message == NULL:
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the request message")
        return
    message.next = NULL
    message.block = stream.block
    message.data = stream.data
    message.size = stream.size
    message.compressed = stream.prefix[0]
    stream.block = NULL
    stream.queued_bytes += message.size
    if message.compressed or stream_inflates(stream):
        add_incoming(&stream.first_packed, &stream.last_packed, message)
        inflate_next(stream)
    else:
        message_ready(stream, message)


cdef inline void add_incoming(Incoming **first, Incoming **last, Incoming *message) noexcept nogil:
    message.next = NULL
    if first[0] == NULL:
        first[0] = message
    else:
        last[0].next = message
    last[0] = message


cdef void message_ready(Stream *stream, Incoming *message) noexcept nogil:
    # takes it over
    if stream.method.unary != NULL:
        stream.block = message.block
        stream.data = <uint8_t *>message.data
        stream.size = message.size
        stream.queued_bytes = 0
        free(message)
        return
    add_incoming(&stream.first_in, &stream.last_in, message)
    if stream.call != NULL:
        stream.conn.host.hooks.message(stream)


cdef void stream_drop_message(Stream *stream) noexcept nogil:
    cdef Incoming *message = stream.first_in
    stream.first_in = message.next
    stream.queued_bytes -= message.size
    block_give(message.block)
    free(message)
    inflate_next(stream)
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
    elif stream_inflates(stream):
        pass  # inflate_next comes back
    elif stream.method.unary == NULL:
        stream.conn.host.hooks.half_closed(stream)
    elif stream.messages == 0:
        stream_fail(stream, STATUS_UNIMPLEMENTED, "expected one request message, got none")
    elif not may_run(stream.conn):
        park(stream)
    else:
        run_native(stream)


cdef void run_native(Stream *stream) noexcept nogil:
    cdef Block *block = stream.block
    cdef Host *host = stream.conn.host
    stream.block = NULL
    stream.reserved = max(host.expected, <size_t>1)
    host.reserved += stream.reserved
    stream.conn.running += 1
    stream.method.unary(stream.method.context, stream, block, stream.data, stream.size, stream.timeout_ns)


# --- unary calls of peers that do not read their answers

cdef void learn(Host *host, size_t size) noexcept nogil:
    # what to expect of the next answer
    host.expected = max(size, host.expected - host.expected // EXPECTED_FADES)


cdef void release(Stream *stream) noexcept nogil:
    # the call runs no more: its answer is there, or will never be
    if stream.reserved:
        stream.conn.host.reserved -= stream.reserved
        stream.conn.running -= 1
        stream.reserved = 0


cdef bint fits(Host *host) noexcept nogil:
    cdef size_t held = host.unsent + host.reserved
    return host.unsent_limit == 0 or held == 0 or held + host.expected <= host.unsent_limit


cdef bint may_run(Conn *conn) noexcept nogil:
    if conn.unsent > UNSENT_LIMIT:
        return False
    return fits(conn.host) or (conn.reads and conn.unsent == 0 and conn.running == 0)


cdef void wait_for_host(Conn *conn) noexcept nogil:
    cdef Host *host = conn.host
    if conn.waiting:
        return
    conn.waiting = True
    conn.next_waiting = NULL
    if host.last_waiting == NULL:
        host.first_waiting = conn
    else:
        host.last_waiting.next_waiting = conn
    host.last_waiting = conn


cdef void wait_no_more(Conn *conn) noexcept nogil:
    cdef Host *host = conn.host
    cdef Conn *before = NULL
    cdef Conn *at = host.first_waiting
    if not conn.waiting:
        return
    while at != conn:
        before = at
        at = at.next_waiting
    if before == NULL:
        host.first_waiting = at.next_waiting
    else:
        before.next_waiting = at.next_waiting
    if host.last_waiting == at:
        host.last_waiting = before
    conn.waiting = False


cdef void run_waiting(Host *host) noexcept nogil:
    # one call of each connection in turn, as long as there is room
    cdef Conn *conn
    cdef bint ran = False
    while host.first_waiting != NULL and fits(host):
        conn = host.first_waiting
        wait_no_more(conn)
        if conn.first_parked != NULL and conn.unsent <= UNSENT_LIMIT:
            run_first_parked(conn)
            ran = True
            if conn.first_parked != NULL:
                wait_for_host(conn)
    if ran:
        host.others_ran = True
        end_round(host)


cdef void run_first_parked(Conn *conn) noexcept nogil:
    cdef Stream *stream = conn.first_parked
    conn.first_parked = stream.next_parked
    if conn.first_parked == NULL:
        conn.last_parked = NULL
    run_native(stream)


cdef void park(Stream *stream) noexcept nogil:
    cdef Conn *conn = stream.conn
    stream.next_parked = NULL
    if conn.last_parked == NULL:
        conn.first_parked = stream
    else:
        conn.last_parked.next_parked = stream
    conn.last_parked = stream
    wait_for_host(conn)


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
    while conn.first_parked != NULL and may_run(conn):
        run_first_parked(conn)
    if conn.first_parked != NULL:
        wait_for_host(conn)


# ---------------------------------------------------------------------------------------------------------------------
# Compression: one message of a stream at a time each way, so that their order stays; those behind it wait

cdef struct Inflation:
    Job job
    Stream *stream           # NULL: it is gone
    Incoming *message
    Encoding encoding
    size_t limit
    Result result
    Inflated out

cdef struct Deflation:
    Job job
    Stream *stream           # NULL: it is gone
    Outgoing *plain
    Outgoing *packed         # NULL: the plain one is sent
    Encoding encoding
    int level

cdef int32_t NEVER = 0       # for what is done at once


cdef void drop_incoming(Incoming *message) noexcept nogil:
    block_give(message.block)
    free(message)


cdef void drop_compression(Stream *stream) noexcept nogil:
    # what waits; what a worker has is dropped when it comes back
    cdef Incoming *message
    cdef Outgoing *plain
    if stream.inflating != NULL:
        (<Inflation *>stream.inflating).stream = NULL
        store32(&stream.inflating.cancelled, 1)
        stream.inflating = NULL
    if stream.deflating != NULL:
        stream.conn.host.unsent -= (<Deflation *>stream.deflating).plain.size
        (<Deflation *>stream.deflating).stream = NULL
        store32(&stream.deflating.cancelled, 1)
        stream.deflating = NULL
    while stream.first_packed != NULL:
        message = stream.first_packed
        stream.first_packed = message.next
        drop_incoming(message)
    while stream.first_plain != NULL:
        plain = stream.first_plain
        stream.first_plain = plain.next
        stream.conn.host.unsent -= plain.size
        outgoing_free(plain)


cdef void jobs_done(Host *host) noexcept nogil:
    end_round(host)


# --- requests

cdef bint stream_inflates(const Stream *stream) noexcept nogil:
    return stream.inflating != NULL or stream.first_packed != NULL


cdef void inflate_next(Stream *stream) noexcept nogil:
    if stream_inflates(stream):
        inflate_rest(stream)


cdef void inflate_rest(Stream *stream) noexcept nogil:
    # Go on with what waits, as far as somebody takes it: inflated messages are bounded like others.
    cdef Incoming *message
    while stream.first_packed != NULL and stream.inflating == NULL and not stream.ended and (
            stream.first_in == NULL or stream.queued_bytes < QUEUED_LIMIT):
        message = stream.first_packed
        stream.first_packed = message.next
        if message.compressed:
            inflate(stream, message)
        else:
            message_ready(stream, message)
    mark_dirty(stream.conn)
    if stream.remote_closed and not stream_inflates(stream):
        half_closed(stream)


cdef void inflate(Stream *stream, Incoming *message) noexcept nogil:
    cdef Host *host = stream.conn.host
    cdef size_t limit = host.max_inflated
    cdef Inflated out
    cdef Result result
    if host.crew != NULL:
        limit = min(limit if limit else <size_t>INFLATED_HERE, <size_t>INFLATED_HERE)
    if host.crew == NULL or message.size <= INFLATE_HERE:
        result = inflate_message(stream.encoding, message.data, message.size, limit, &NEVER, &out)
        if result != RESULT_TOO_LARGE or limit == host.max_inflated:
            inflated(stream, message, result, &out)
            return
    if not begin_inflation(stream, message):
        inflated(stream, message, RESULT_NO_MEMORY, NULL)


cdef bint begin_inflation(Stream *stream, Incoming *message) noexcept nogil:
    cdef Inflation *inflation = <Inflation *>calloc(1, sizeof(Inflation))
    if inflation == NULL:
        return False
    inflation.job.run = run_inflation
    inflation.job.done = inflation_done
    inflation.stream = stream
    inflation.message = message
    inflation.encoding = stream.encoding
    inflation.limit = stream.conn.host.max_inflated
    inflation.result = RESULT_CANCELLED
    stream.inflating = &inflation.job
    crew_submit(stream.conn.host.crew, &inflation.job)
    return True


cdef void run_inflation(Job *job) noexcept nogil:
    cdef Inflation *inflation = <Inflation *>job
    inflation.result = inflate_message(inflation.encoding, inflation.message.data, inflation.message.size,
                                       inflation.limit, &job.cancelled, &inflation.out)


cdef void inflation_done(Job *job) noexcept nogil:
    cdef Inflation *inflation = <Inflation *>job
    cdef Stream *stream = inflation.stream
    if stream == NULL:
        if inflation.result == RESULT_OK:
            block_give(inflation.out.block)
        drop_incoming(inflation.message)
    else:
        # still `inflating` meanwhile, so that nobody overtakes it
        inflated(stream, inflation.message, inflation.result, &inflation.out)
        stream.inflating = NULL
        inflate_rest(stream)
    free(inflation)


cdef void inflated(Stream *stream, Incoming *message, Result result, const Inflated *out) noexcept nogil:
    # takes the message over, and what it became
    stream.queued_bytes -= message.size
    if result != RESULT_OK:
        drop_incoming(message)
        inflating_failed(stream, result)
        return
    block_give(message.block)
    message.block = out.block
    message.data = out.data
    message.size = out.size
    stream.queued_bytes += message.size
    message_ready(stream, message)


cdef void inflating_failed(Stream *stream, Result result) noexcept nogil:
    cdef char *text
    if result == RESULT_TOO_LARGE:
        text = format_text("Received message larger than max after decompression (limit %zu)",
                           stream.conn.host.max_inflated)
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, text_or_no_memory(text))
        free(text)
    elif result == RESULT_NO_MEMORY:
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the decompressed request message")
    else:
        text = format_text("a request message could not be decompressed: its %s data is %s",
                           encoding_name(stream.encoding),
                           <const char *>("truncated" if result == RESULT_TRUNCATED else "corrupt"))
        stream_fail(stream, STATUS_INTERNAL, text_or_no_memory(text))
        free(text)


# --- answers

cdef void stream_compress(Stream *stream, Encoding encoding, int level) noexcept nogil:
    stream.level = level
    stream.answer_encoding = ENCODING_IDENTITY
    if level == 0:
        return
    if encoding == ENCODING_UNKNOWN:
        encoding = ENCODING_GZIP if stream.accepted >> <int>ENCODING_GZIP & 1 else ENCODING_DEFLATE
    if stream.accepted >> <int>encoding & 1:
        stream.answer_encoding = encoding


cdef size_t stream_unsent(const Stream *stream) noexcept nogil:
    return stream.plain + stream.unsent


cdef void add_plain(Stream *stream, Outgoing *message) noexcept nogil:
    message.next = NULL
    if stream.first_plain == NULL:
        stream.first_plain = message
    else:
        stream.last_plain.next = message
    stream.last_plain = message
    stream.plain += message.left
    stream.conn.unsent += message.left
    stream.conn.host.unsent += message.size
    compress_next(stream)


cdef void compress_next(Stream *stream) noexcept nogil:
    cdef Outgoing *message
    while stream.first_plain != NULL and stream.deflating == NULL:
        message = stream.first_plain
        stream.first_plain = message.next
        if not message.compress:
            compressed(stream, message, NULL)
        elif (message.left <= COMPRESS_HERE or stream.conn.host.crew == NULL
                or not begin_deflation(stream, message)):
            compressed(stream, message, deflate_message(stream.answer_encoding, stream.level, message, &NEVER))


cdef bint begin_deflation(Stream *stream, Outgoing *message) noexcept nogil:
    cdef Deflation *deflation = <Deflation *>calloc(1, sizeof(Deflation))
    if deflation == NULL:
        return False
    deflation.job.run = run_deflation
    deflation.job.done = deflation_done
    deflation.stream = stream
    deflation.plain = message
    deflation.encoding = stream.answer_encoding
    deflation.level = stream.level
    stream.deflating = &deflation.job
    crew_submit(stream.conn.host.crew, &deflation.job)
    return True


cdef void run_deflation(Job *job) noexcept nogil:
    cdef Deflation *deflation = <Deflation *>job
    deflation.packed = deflate_message(deflation.encoding, deflation.level, deflation.plain, &job.cancelled)


cdef void deflation_done(Job *job) noexcept nogil:
    cdef Deflation *deflation = <Deflation *>job
    cdef Stream *stream = deflation.stream
    if stream == NULL:
        outgoing_free(deflation.plain)
        if deflation.packed != NULL:
            outgoing_free(deflation.packed)
    else:
        stream.deflating = NULL
        compressed(stream, deflation.plain, deflation.packed)
        compress_next(stream)
    free(deflation)


cdef void compressed(Stream *stream, Outgoing *plain, Outgoing *packed) noexcept nogil:
    # the oldest waiting message is to be sent, as it is or compressed
    cdef size_t before = stream_unsent(stream)
    stream.plain -= plain.left
    stream.conn.unsent -= plain.left
    stream.conn.host.unsent -= plain.size
    if packed == NULL:
        release_plain(stream, plain)
    else:
        outgoing_free(plain)
        append(stream, packed)
        go_on(stream)
    tell_writable(stream, before)


cdef void release_plain(Stream *stream, Outgoing *message) noexcept nogil:
    if not stream.headers_sent and stream.method.unary != NULL:
        stream.answer_encoding = ENCODING_IDENTITY  # the one answer is not compressed, so none is announced
    append(stream, message)
    go_on(stream)


# ---------------------------------------------------------------------------------------------------------------------
# Sessions

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
allow_resets(options, UNLIMITED_RESETS, UNLIMITED_RESETS)
limit_continuations(options, CONTINUATIONS)


cdef bint conn_open(Conn *conn, Host *host, void *owner) noexcept nogil:
    cdef nghttp2_settings_entry settings[4]
    conn.host = host
    conn.owner = owner
    conn.user = -1
    conn.received_ns = host.now_ns
    conn.budget.filled_ns = host.now_ns
    conn.budget.left = host.spare_frames
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
    wait_no_more(conn)
    nghttp2_session_del(conn.session)
    conn.session = NULL
    output_clear(&conn.output)
    run_waiting(conn.host)
    live_add(LIVE_CONNECTIONS, -1)


cdef void conn_receive(Conn *conn, const uint8_t *data, size_t size) noexcept nogil:
    cdef ssize_t result
    if conn.session == NULL or conn.failed or conn.leaving:
        return
    conn.received_ns = conn.host.now_ns
    result = nghttp2_session_mem_recv(conn.session, data, size)
    if result == NGHTTP2_ERR_FLOODED or result == TOO_MANY_CONTINUATIONS:
        conn_calm(conn, "too_many_frames")
    elif result < 0 and not conn.leaving:
        conn.failed = True
    end_round(conn.host)
    run_waiting(conn.host)


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
    if conn.first_parked != NULL:
        run_parked(conn)
        end_round(conn.host)
    run_waiting(conn.host)


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
    cdef Stream *stream = conn.first_stream
    while stream != NULL:
        if stream.method != NULL and not stream.ended:
            unpark(stream)
            if stream.method.unary != NULL and stream.call != NULL:
                stream.method.cancel(stream.call)
                stream.call = NULL
            stream_fail(stream, status, details)
        stream = stream.next
