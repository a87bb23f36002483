"""HTTP/2 and gRPC framing of a server connection, on libnghttp2, without I/O.

The owner of a connection reads from its socket into `Endpoint.receive_buffer`, calls `Connection.received`, and writes
what `Connection.take_output` gives. Everything else happens in between: headers are read and judged, messages put
together, native methods run, answers framed under flow control.

Back-pressure. Request bytes are acknowledged (WINDOW_UPDATE) as they come, except those of a stream whose complete
messages nobody takes. Answers are framed only when asked for, and asked for only while the socket takes them; while
more than UNSENT_LIMIT bytes of answers wait for a peer that does not read, its further unary calls wait too.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, strlen

from _native.headers cimport message_encode, metadata_headers, metadata_pair, timeout_parse
from _native.memory cimport LIVE_CONNECTIONS, LIVE_STREAMS, Block, block_give, block_take, live_add
from _native.nghttp2 cimport *
from _native.outgoing cimport (
    Outgoing,
    outgoing_add,
    outgoing_free,
    outgoing_new,
    output_clear,
    output_copy,
    output_message,
    output_take,
    write_message_prefix,
)
from _native.text cimport format_text, text_or_no_memory

cdef enum:
    RECEIVE_BUFFER = 256 << 10
    STREAM_WINDOW = 4 << 20          # request bytes a peer may send ahead on one stream
    CONNECTION_WINDOW = 16 << 20     # and on one connection
    MAX_FRAME = 256 << 10            # of received DATA
    MAX_SENT_FRAME = 64 << 10
    MAX_HEADER_BYTES = 16 << 10      # of one request, counted as in RFC 9113 section 6.5.2
    UNSENT_LIMIT = 4 << 20           # bytes of answers beyond which a connection's further unary calls wait
    QUEUED_LIMIT = 1 << 20           # bytes of complete messages beyond which a stream gets no more credit
    WRITABLE_BELOW = 64 << 10        # unsent bytes of a stream below which its call is told to go on
    ALIGNMENT = 64
    # Streams that a peer may reset at once, and per second after that, before the connection is closed. The library's
    # own 1,000 and 33 close the connections of clients that cancel much; a reset costs a few microseconds here.
    RESETS = 10000

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

# What Call.on_event is told.
EVENT_MESSAGE = "message"        # take_message will give one more
EVENT_HALF_CLOSE = "half-close"  # the client sends no more
EVENT_WRITABLE = "writable"      # little is unsent: go on writing
EVENT_CLOSED = "closed"          # the stream is gone; closed_by says how
cdef str EVENT_CALL = "call"     # internal: a new call, for Endpoint.on_call

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
    while stream.first_in != NULL:
        free(pop_incoming(stream))
    if stream.trailers != NULL:
        with gil:
            Py_DECREF(<object>stream.trailers)
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
            with gil:
                call_closed(<Call>stream.call, error_code)
    stream_free(stream)


cdef inline Stream *stream_of(nghttp2_session *session, int32_t id) noexcept nogil:
    return <Stream *>nghttp2_session_get_stream_user_data(session, id)


# ---------------------------------------------------------------------------------------------------------------------
# Answers

cdef inline void mark_dirty(Conn *conn) noexcept nogil:
    if not conn.dirty:
        conn.dirty = True
        conn.next_dirty = conn.host.first_dirty
        conn.host.first_dirty = conn


cdef void begin_answer(Stream *stream, const nghttp2_nv *headers, size_t count) noexcept nogil:
    cdef nghttp2_data_provider provider
    provider.source.ptr = stream
    provider.read_callback = read_answer
    stream.headers_sent = True
    nghttp2_submit_response(stream.conn.session, stream.id, headers, count, &provider)


cdef void go_on(Stream *stream) noexcept nogil:
    # there is something new to frame
    if not stream.headers_sent:
        begin_answer(stream, ANSWER, 2)
    elif stream.waiting:
        stream.waiting = False
        nghttp2_session_resume_data(stream.conn.session, stream.id)
    mark_dirty(stream.conn)


cdef void queue_message(Stream *stream, Outgoing *message) noexcept nogil:
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
    queue_message(stream, message)
    stream.ended = True
    stream.status = STATUS_OK
    go_on(stream)


cdef void stream_fail(Stream *stream, int status, const char *details) noexcept nogil:
    stream_end(stream, status, details, "200")


cdef void stream_end(Stream *stream, int status, const char *details, const char *http_status) noexcept nogil:
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
    cdef nghttp2_nv nv[5]
    cdef size_t count = 0
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
    if stream.trailers != NULL:
        with gil:
            submit_pairs(stream, nv, count, <list>stream.trailers, http_status != NULL)
    elif http_status != NULL:
        nghttp2_submit_response(stream.conn.session, stream.id, nv, count, NULL)
    else:
        nghttp2_submit_trailer(stream.conn.session, stream.id, nv, count)


cdef void submit_pairs(Stream *stream, const nghttp2_nv *fixed, size_t fixed_count, list pairs, bint whole) noexcept:
    # trailers with metadata
    cdef nghttp2_nv *nv = pairs_nv(fixed, fixed_count, pairs)
    if nv == NULL:
        return
    if whole:
        nghttp2_submit_response(stream.conn.session, stream.id, nv, fixed_count + len(pairs), NULL)
    else:
        nghttp2_submit_trailer(stream.conn.session, stream.id, nv, fixed_count + len(pairs))
    free(nv)


cdef nghttp2_nv *pairs_nv(const nghttp2_nv *fixed, size_t fixed_count, list pairs) noexcept:
    # from malloc; the pairs' bytes must stay until it is submitted, which copies them
    cdef nghttp2_nv *nv = <nghttp2_nv *>malloc((fixed_count + len(pairs)) * sizeof(nghttp2_nv))
    cdef size_t i = fixed_count
    cdef bytes name, value
    if nv == NULL:
        return NULL
    memcpy(nv, fixed, fixed_count * sizeof(nghttp2_nv))
    for name, value in pairs:
        nv[i].name = <uint8_t *><char *>name
        nv[i].namelen = len(name)
        nv[i].value = <uint8_t *><char *>value
        nv[i].valuelen = len(value)
        nv[i].flags = NGHTTP2_NV_FLAG_NONE
        i += 1
    return nv


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
        with gil:
            call_event(<Call>stream.call, EVENT_WRITABLE)
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
    stream.method = &host.python
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
        stream_end(stream, STATUS_INTERNAL, "the HTTP method of a gRPC call must be POST", "405")
    elif not stream.seen & HEADER_GRPC:
        stream_end(stream, STATUS_INTERNAL, "the content-type of a gRPC call must begin with application/grpc", "415")
    elif not stream.seen & HEADER_TE:
        stream_fail(stream, STATUS_INTERNAL, "a gRPC call must carry the header 'te: trailers'")
    elif stream.seen & HEADER_BAD_TIMEOUT:
        stream_fail(stream, STATUS_INTERNAL, "grpc-timeout must be at most 8 digits and one of H M S m u n")
    elif stream.seen & HEADER_BAD_ENCODING:
        stream_fail(stream, STATUS_UNIMPLEMENTED,
                    "the grpc-encoding of the request is not supported, accepted encodings: identity")
    elif stream.method.unary == NULL:
        with gil:
            call_new(stream)


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
        with gil:
            call_event(<Call>stream.call, EVENT_MESSAGE)


cdef Incoming *pop_incoming(Stream *stream) noexcept nogil:
    # the oldest message; its block is given back, the structure is the caller's to free
    cdef Incoming *message = stream.first_in
    stream.first_in = message.next
    if stream.first_in == NULL:
        stream.last_in = NULL
    stream.queued_bytes -= message.size
    block_give(message.block)
    return message


cdef void half_closed(Stream *stream) noexcept nogil:
    stream.remote_closed = True
    if stream.ended:
        return
    if stream.prefix_size != 0:
        stream_fail(stream, STATUS_INTERNAL, "the request ends in the middle of a message")
    elif stream.method.unary == NULL:
        with gil:
            call_event(<Call>stream.call, EVENT_HALF_CLOSE)
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


cdef class ReceiveBuffer:
    """Where all sockets of an endpoint are read to, one read at a time."""

    cdef Endpoint endpoint

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.endpoint.host.receive, <Py_ssize_t>self.endpoint.host.receive_size, 0,
                          flags)


cdef class Endpoint:
    """What the connections of one event loop share: native methods, limits, and the buffer that sockets are read to.

    Args:
        on_call: called with each new `Call`, that is for every path that is not a native method's.
        max_message: largest request message in bytes; 0 for no limit.
        max_streams: open streams that a connection may have.
    """

    def __init__(self, on_call, *, max_message: int = 0, max_streams: int = 256):
        self.on_call = on_call
        self.host.max_message = max_message
        self.host.max_streams = max_streams
        self.host.receive_size = RECEIVE_BUFFER
        self.host.receive = <uint8_t *>malloc(RECEIVE_BUFFER)
        if self.host.receive == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.host.native_count):
            free(self.host.natives[i].path)
        free(self.host.receive)

    cdef int add_native(self, bytes path, unary_fn unary, cancel_fn cancel, void *context) except -1:
        cdef Method *method = &self.host.natives[self.host.native_count]
        if self.host.native_count == MAX_NATIVES:
            raise ValueError(f"at most {MAX_NATIVES} native methods")
        method.path = <char *>malloc(len(path) + 1)
        if method.path == NULL:
            raise MemoryError
        memcpy(method.path, <const char *>path, len(path) + 1)
        method.path_size = len(path)
        method.unary = unary
        method.cancel = cancel
        method.context = context
        self.host.native_count += 1
        return 0

    def receive_buffer(self):
        """The writable buffer for the next read from a socket; valid until `Connection.received`."""
        cdef ReceiveBuffer buffer = ReceiveBuffer.__new__(ReceiveBuffer)
        buffer.endpoint = self
        return buffer

    def flush_dirty(self) -> None:
        """Call `flush` of every connection that has got output since it was last asked."""
        cdef Conn *conn
        while self.host.first_dirty != NULL:
            conn = self.host.first_dirty
            self.host.first_dirty = conn.next_dirty
            conn.dirty = False
            (<Connection>conn.owner).flush()


@cython.no_gc_clear  # __dealloc__ needs the endpoint; cycles go through the owner and can be cleared there
cdef class Connection:
    """One peer.

    Args:
        endpoint: what it belongs to.
        peer: who is at the other end, for handlers ("ipv4:127.0.0.1:40000").

    Set `flush` before the first byte. Call `close` when the peer is gone.
    """

    def __init__(self, Endpoint endpoint not None, peer: str = ""):
        cdef nghttp2_settings_entry settings[4]
        self.endpoint = endpoint
        self.peer = peer
        self.events = []
        self.conn.host = &endpoint.host
        self.conn.owner = <void *>self
        if nghttp2_session_server_new2(&self.conn.session, callbacks, &self.conn, options) != 0:
            raise MemoryError("no memory for an HTTP/2 session")
        live_add(LIVE_CONNECTIONS, 1)
        settings[0].settings_id = NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS
        settings[0].value = endpoint.host.max_streams
        settings[1].settings_id = NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE
        settings[1].value = STREAM_WINDOW
        settings[2].settings_id = NGHTTP2_SETTINGS_MAX_FRAME_SIZE
        settings[2].value = MAX_FRAME
        settings[3].settings_id = NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE
        settings[3].value = MAX_HEADER_BYTES
        nghttp2_submit_settings(self.conn.session, NGHTTP2_FLAG_NONE, settings, 4)
        nghttp2_session_set_local_window_size(self.conn.session, NGHTTP2_FLAG_NONE, 0, CONNECTION_WINDOW)

    def __dealloc__(self):
        self.free_session()

    cdef void forget_dirty(self):
        cdef Conn **link = &self.endpoint.host.first_dirty
        while link[0] != NULL and link[0] != &self.conn:
            link = &link[0].next_dirty
        if link[0] != NULL:
            link[0] = self.conn.next_dirty
            self.conn.dirty = False

    cdef void free_session(self):
        if self.conn.session == NULL:
            return
        self.forget_dirty()
        while self.conn.first_stream != NULL:
            stream_closed(self.conn.first_stream, NGHTTP2_CANCEL)
        nghttp2_session_del(self.conn.session)
        self.conn.session = NULL
        output_clear(&self.conn.output)
        live_add(LIVE_CONNECTIONS, -1)

    cdef int dispatch(self) except -1:
        cdef list events
        while self.events:
            events = self.events
            self.events = []
            for call, kind in events:
                if kind is EVENT_CALL:
                    self.endpoint.on_call(call)
                elif (<Call>call).on_event is not None:
                    (<Call>call).on_event(kind)
        return 0

    def received(self, size: int) -> None:
        """Process `size` bytes at the start of the endpoint's receive buffer."""
        cdef ssize_t result
        if not 0 <= size <= self.conn.host.receive_size:
            raise ValueError(f"the receive buffer has {self.conn.host.receive_size} bytes, got {size}")
        if self.conn.session == NULL or self.conn.failed:
            return
        result = nghttp2_session_mem_recv(self.conn.session, self.conn.host.receive, <size_t>size)
        if result < 0:
            self.conn.failed = True
        end_round(self.conn.host)
        self.dispatch()

    def take_output(self, limit: int = 1 << 20) -> list:
        """What to write to the socket now, as objects with the buffer protocol; about `limit` bytes at most."""
        cdef const uint8_t *data
        cdef ssize_t size
        if self.conn.session == NULL:
            return []
        self.conn.output_limit = limit
        while self.conn.output.size < self.conn.output_limit:
            size = nghttp2_session_mem_send(self.conn.session, &data)
            if size < 0 or (size > 0 and not output_copy(&self.conn.output, data, <size_t>size)):
                self.conn.failed = True
            if size <= 0 or self.conn.failed:
                break
        if self.conn.first_parked != NULL:
            run_parked(&self.conn)
            end_round(self.conn.host)
        self.dispatch()
        return output_take(&self.conn.output)

    @property
    def finished(self) -> bool:
        """The peer broke the protocol, or everything is said after `go_away`: close the socket."""
        return self.conn.session == NULL or self.conn.failed or not (
            nghttp2_session_want_read(self.conn.session) or nghttp2_session_want_write(self.conn.session))

    @property
    def streams(self) -> int:
        """Open streams."""
        return self.conn.streams

    @property
    def unsent(self) -> int:
        """Bytes of answers that flow control or a slow socket keeps back."""
        return self.conn.unsent

    def announce_shutdown(self) -> None:
        """Ask the peer to open no more streams; those that it opens meanwhile are still served."""
        if self.conn.session != NULL:
            nghttp2_submit_shutdown_notice(self.conn.session)
            mark_dirty(&self.conn)

    def go_away(self) -> None:
        """Refuse further streams; `finished` once the open ones are answered."""
        if self.conn.session != NULL:
            nghttp2_submit_goaway(self.conn.session, NGHTTP2_FLAG_NONE,
                                  nghttp2_session_get_last_proc_stream_id(self.conn.session), NGHTTP2_NO_ERROR, NULL, 0)
            mark_dirty(&self.conn)

    def close(self) -> None:
        """The peer is gone: end every call."""
        self.free_session()
        self.dispatch()
        self.flush = None


# ---------------------------------------------------------------------------------------------------------------------
# Calls that Python handles

cdef void call_event(Call call, str kind) noexcept:
    call.connection.events.append((call, kind))


cdef void call_new(Stream *stream) noexcept:
    cdef Call call = Call.__new__(Call)
    cdef nghttp2_vec name, value
    cdef uint32_t i
    cdef list metadata = []
    for i in range(stream.field_count):
        name = nghttp2_rcbuf_get_buf(stream.fields[i].name)
        value = nghttp2_rcbuf_get_buf(stream.fields[i].value)
        metadata.append(metadata_pair(name.base, name.len, value.base, value.len))
    drop_fields(stream)
    call.stream = stream
    call.connection = <Connection>stream.conn.owner
    call.path = stream.path.decode("ascii", "replace")
    call.metadata = tuple(metadata)
    call.timeout_ns = stream.timeout_ns
    Py_INCREF(call)
    stream.call = <void *>call
    call_event(call, EVENT_CALL)


cdef void call_closed(Call call, uint32_t error_code) noexcept:
    call.stream.call = NULL
    call.stream = NULL
    call.closed_by = error_code
    call_event(call, EVENT_CLOSED)
    Py_DECREF(call)


cdef class Call:
    """One call of a method that Python handles: messages in, messages and a status out, nothing waits.

    `on_event` is called with an EVENT_* name, never from inside a method of the call.
    """

    def __init__(self):
        raise TypeError("Call cannot be created from Python")

    cdef Stream *open_stream(self) except NULL:
        if self.stream == NULL or self.stream.ended:
            raise ConnectionError("the call is over")
        return self.stream

    cdef void touched(self):
        if self.connection.endpoint.on_dirty is not None:
            self.connection.endpoint.on_dirty()

    def take_message(self) -> bytes | None:
        """The next request message, None when there is none now."""
        cdef Incoming *message
        cdef bytes out
        if self.stream == NULL or self.stream.first_in == NULL:
            return None
        message = self.stream.first_in
        out = (<const char *>message.data)[:message.size]
        free(pop_incoming(self.stream))
        if self.stream.withheld and self.stream.queued_bytes < QUEUED_LIMIT:
            nghttp2_session_consume_stream(self.stream.conn.session, self.stream.id, self.stream.withheld)
            self.stream.withheld = 0
            mark_dirty(self.stream.conn)
            self.touched()
        return out

    @property
    def half_closed(self) -> bool:
        """The client sends no more messages than those that can be taken now."""
        return self.stream == NULL or self.stream.remote_closed

    @property
    def open(self) -> bool:
        """Messages and a status can still be sent."""
        return self.stream != NULL and not self.stream.ended

    @property
    def writable(self) -> bool:
        """So little is unsent that the next message may be sent; else wait for EVENT_WRITABLE or EVENT_CLOSED."""
        return self.stream == NULL or self.stream.unsent < WRITABLE_BELOW

    def send_headers(self, metadata=()) -> None:
        """Send the initial metadata, pairs of key and value; once, before the first message."""
        cdef Stream *stream = self.open_stream()
        cdef list pairs = metadata_headers(metadata)
        cdef nghttp2_nv *nv
        if stream.headers_sent:
            raise ValueError("the initial metadata has been sent")
        nv = pairs_nv(ANSWER, 2, pairs)
        if nv == NULL:
            raise MemoryError
        begin_answer(stream, nv, 2 + len(pairs))
        free(nv)
        mark_dirty(stream.conn)
        self.touched()

    def send_message(self, message: bytes) -> None:
        """Queue one response message."""
        cdef Stream *stream = self.open_stream()
        cdef size_t size = len(message)
        cdef Outgoing *out
        if size > 0xffffffff:
            raise ValueError("a gRPC message is smaller than 4 GiB")
        out = outgoing_new(1, 5 + size)
        if out == NULL:
            raise MemoryError(f"no memory for a message of {size} bytes")
        write_message_prefix(out.room, size)
        memcpy(out.room + 5, <const char *>message, size)
        outgoing_add(out, out.home, out.room, 5 + size)
        queue_message(stream, out)
        go_on(stream)
        self.touched()

    def end(self, status: int, details: str = "", metadata=()) -> None:
        """Send the final status, with trailing metadata; once."""
        cdef Stream *stream = self.open_stream()
        cdef list pairs = metadata_headers(metadata)
        cdef bytes text = details.encode("utf-8", "replace").replace(b"\0", b" ")
        if not 0 <= status <= 16:
            raise ValueError(f"a gRPC status code is 0 to 16, got {status}")
        if pairs:
            Py_INCREF(pairs)
            stream.trailers = <void *>pairs
        stream_end(stream, status, text, "200")
        self.touched()

    def reset(self) -> None:
        """Break the call off (RST_STREAM)."""
        cdef Stream *stream = self.open_stream()
        stream.ended = True
        nghttp2_submit_rst_stream(stream.conn.session, NGHTTP2_FLAG_NONE, stream.id, NGHTTP2_INTERNAL_ERROR)
        mark_dirty(stream.conn)
        self.touched()
