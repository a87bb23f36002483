"""Calls: their life, and the framing of their responses on libnghttp2.

Responses are framed only while the socket takes output. The messages of a response keep their order: a message that is
being compressed holds up those behind it.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strlen

from inferd._native.assertion cimport assert_that
from inferd._native.chain cimport Chain, chain_pop, chain_push, chain_remove
from inferd._native.list cimport list_prepend, list_remove
from inferd._native.memory.resource cimport LIVE_STREAMS, block_give, live_add
from inferd._native.memory.small cimport small_give, small_take
from inferd._native.status cimport STATUS_CANCELLED, STATUS_INTERNAL, STATUS_OK, STATUS_RESOURCE_EXHAUSTED
from inferd._native.timers cimport timers_clear
from inferd._native.transport.call_state cimport (
    RESPONSE_CUT,
    RESPONSE_LAST,
    RESPONSE_OPEN,
    RESPONSE_READY,
    response_move,
)
from inferd._native.transport.closing cimport closing_break
from inferd._native.transport.compression cimport (
    ENCODING_DEFLATE,
    ENCODING_GZIP,
    ENCODING_IDENTITY,
    ENCODING_UNKNOWN,
    encoding_name,
)
from inferd._native.transport.headers cimport message_encode
from inferd._native.transport.ledger cimport (
    MESSAGE_MEMORY,
    STAGE_COMPRESSING,
    STAGE_UNSENT,
    Stage,
    charge_make,
    charge_release,
)
from inferd._native.transport.message cimport Incoming, incoming_free
from inferd._native.transport.message_compression cimport MessageOwner, compression_abandon, message_deflate
from inferd._native.transport.nghttp2 cimport *
from inferd._native.transport.outgoing cimport Outgoing, outgoing_free, output_copy, output_message

cdef enum:
    COMPRESS_FROM = 1 << 10          # bytes of a response below which compressing does not pay
    FIXED_TRAILERS = 5       # :status, content-type, grpc-accept-encoding, grpc-status, grpc-message

cdef extern from *:
    """
    #define INFERD_NV(name, value) {(uint8_t *)name, (uint8_t *)value, sizeof(name) - 1, sizeof(value) - 1, \\
        NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE}
    static const nghttp2_nv inferd_response_headers[2] = {
        INFERD_NV(":status", "200"), INFERD_NV("content-type", "application/grpc")};
    static const nghttp2_nv inferd_accepted[1] = {INFERD_NV("grpc-accept-encoding", "identity, deflate, gzip")};
    static const char *const inferd_status_text[17] = {
        "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"};
    """
    const nghttp2_nv RESPONSE_HEADERS "inferd_response_headers"[2]
    const nghttp2_nv ACCEPTED "inferd_accepted"[1]
    const char *STATUS_TEXT "inferd_status_text"[17]


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef Stream *stream_new(Conn *conn, int32_t id) noexcept nogil:
    cdef Stream *stream = <Stream *>small_take(&conn.host.smalls, sizeof(Stream))
    if stream == NULL:
        return NULL
    memset(stream, 0, sizeof(Stream))
    stream.conn = conn
    stream.id = id
    stream.timeout_ns = -1
    stream.arrived_ns = conn.host.now_ns
    stream.receiver.begun_ns = conn.host.now_ns
    stream.sender.shut = conn.narrow
    if conn.client != NULL:
        conn.client.calls += 1
    list_prepend(&conn.open, stream)
    conn.streams += 1
    live_add(LIVE_STREAMS, 1)
    return stream


cdef void stream_free(Stream *stream) noexcept nogil:
    cdef Conn *conn = stream.conn
    assert_that(stream.call == NULL and conn.streams > 0)
    list_remove(&conn.open, stream)
    if conn.latest == stream:
        conn.latest = NULL
    conn.streams -= 1
    if conn.client != NULL:
        assert_that(conn.client.calls > 0 and conn.client.streams >= <uint32_t>stream.lasting)
        conn.client.calls -= 1
        conn.client.streams -= stream.lasting
    stream_drop_request(stream)
    drop_response(stream)
    stream_drop_fields(stream)
    if stream.timer.slot:
        timers_clear(conn.host.timers, &stream.timer)
    free(stream.sender.trailers)
    free(stream.sender.details)
    free(stream.path)
    free(stream.forwarded)
    if stream.baggage != NULL:
        nghttp2_rcbuf_decref(stream.baggage)
    small_give(&conn.host.smalls, stream)
    live_add(LIVE_STREAMS, -1)


cdef inline void drop_incoming(Chain *messages) noexcept nogil:
    while messages.first != NULL:
        incoming_free(<Incoming *>chain_pop(messages))


cdef inline void drop_outgoing(Chain *messages) noexcept nogil:
    while messages.first != NULL:
        outgoing_free(<Outgoing *>chain_pop(messages))


cdef void stream_drop_request(Stream *stream) noexcept nogil:
    if stream.conn.parked.first != NULL:
        chain_remove(&stream.conn.parked, stream)
    if stream.inflating != NULL:
        compression_abandon(&stream.inflating)
    drop_incoming(&stream.compressed)
    drop_incoming(&stream.incoming)
    stream.queued = 0
    charge_release(&stream.receiver.charge)
    block_give(stream.receiver.block)
    stream.receiver.block = NULL
    stream.receiver.room = stream.receiver.received = stream.receiver.size = 0
    charge_release(&stream.with_handler)


cdef inline void drop_response(Stream *stream) noexcept nogil:
    # discard the messages that are not framed yet
    if stream.sender.deflating != NULL:
        compression_abandon(&stream.sender.deflating)
    drop_outgoing(&stream.sender.uncompressed)
    drop_outgoing(&stream.sender.outgoing)
    assert_that(stream.conn.unsent >= stream_unsent(stream))
    stream.conn.unsent -= stream_unsent(stream)
    if stream.sender.shut:
        assert_that(stream.conn.shut >= stream.sender.unsent)
        stream.conn.shut -= stream.sender.unsent
    stream.sender.plain = 0
    stream.sender.unsent = 0


cdef void stream_abandon(Stream *stream, uint32_t error_code) noexcept nogil:
    if stream.call != NULL:
        stream.method.service.closed(stream, error_code)
        stream.call = NULL


cdef void stream_drop_fields(Stream *stream) noexcept nogil:
    cdef uint32_t i
    if stream.fields == NULL:
        return
    for i in range(stream.field_count):
        nghttp2_rcbuf_decref(stream.fields[i].name)
        nghttp2_rcbuf_decref(stream.fields[i].value)
    free(stream.fields)
    stream.fields = NULL
    stream.field_count = 0
    stream.field_capacity = 0


cdef void stream_closed(Stream *stream, uint32_t error_code) noexcept nogil:
    if stream.method != NULL:
        stream.method.counts.handled[stream.sender.status if stream_ended(stream) else STATUS_CANCELLED] += 1
    stream.conn.host.resets += error_code != NGHTTP2_NO_ERROR
    stream_abandon(stream, error_code)
    stream_free(stream)


# ---------------------------------------------------------------------------------------------------------------------
# Responses

cdef inline void check(Stream *stream, int result) noexcept nogil:
    # `result` of a function of nghttp2 that submits something: it fails when there is no memory
    if result != 0:
        stream_cut(stream, NGHTTP2_INTERNAL_ERROR)


cdef void stream_begin(Stream *stream, const nghttp2_nv *metadata, size_t count) noexcept nogil:
    cdef nghttp2_data_provider provider
    cdef nghttp2_nv *headers
    provider.source.ptr = stream
    provider.read_callback = read_response
    response_move(&stream.sender.state, RESPONSE_LAST if stream_ended(stream) else RESPONSE_OPEN)
    if count == 0 and stream.sender.encoding == ENCODING_IDENTITY:
        check(stream, nghttp2_submit_response(stream.conn.session, stream.id, RESPONSE_HEADERS, 2, &provider))
    else:
        headers = <nghttp2_nv *>malloc((3 + count) * sizeof(nghttp2_nv))
        if headers == NULL:
            stream_cut(stream, NGHTTP2_INTERNAL_ERROR)
            return
        memcpy(headers, RESPONSE_HEADERS, 2 * sizeof(nghttp2_nv))
        if count:  # else `metadata` may be NULL, which memcpy forbids
            memcpy(headers + 2, metadata, count * sizeof(nghttp2_nv))
        count += 2
        if stream.sender.encoding != ENCODING_IDENTITY:
            set_nv(&headers[count], "grpc-encoding", encoding_name(stream.sender.encoding))
            count += 1
        check(stream, nghttp2_submit_response(stream.conn.session, stream.id, headers, count, &provider))
        free(headers)
    mark_dirty(stream.conn)


cdef void send_further(Stream *stream) noexcept nogil:
    # there is something new to frame
    if not stream_opened(stream):
        stream_begin(stream, NULL, 0)
    elif stream.sender.deferred:
        stream.sender.deferred = False
        check(stream, nghttp2_session_resume_data(stream.conn.session, stream.id))
    mark_dirty(stream.conn)


cdef inline void hold(Stream *stream, Outgoing *message, Stage stage) noexcept nogil:
    # the server holds it until it is framed
    stream.conn.unsent += message.left
    charge_make(&message.charge, &stream.conn.account, stage, message.size + MESSAGE_MEMORY)


cdef void append(Stream *stream, Outgoing *message) noexcept nogil:
    if stream.sender.outgoing.first == NULL:
        stream.sender.waits_ns = 0
        stream.conn.responded = True
    chain_push(&stream.sender.outgoing, message)
    stream.sender.unsent += message.left
    if stream.sender.shut:
        stream.conn.shut += message.left
    hold(stream, message, STAGE_UNSENT)


cdef void stream_reply(Stream *stream, Outgoing *message) noexcept nogil:
    if stream_ended(stream):
        outgoing_free(message)
        return
    decide(stream, STATUS_OK)
    stream_send(stream, message, True)


cdef inline void decide(Stream *stream, int status) noexcept nogil:
    # the status is known: the request is answered
    response_move(&stream.sender.state, RESPONSE_LAST if stream.sender.state == RESPONSE_OPEN else RESPONSE_READY)
    stream.sender.status = status
    charge_release(&stream.with_handler)


cdef void stream_send(Stream *stream, Outgoing *message, bint compressible) noexcept nogil:
    message.compress = (compressible and stream.sender.encoding != ENCODING_IDENTITY
                        and message.left >= COMPRESS_FROM)
    if message.compress or stream.sender.plain:
        add_plain(stream, message)
    else:
        send_plain(stream, message)


cdef void stream_end(Stream *stream, int status, const char *details, nghttp2_nv *trailers,
                     size_t count) noexcept nogil:
    if stream_ended(stream):
        free(trailers)
        return
    stream.sender.trailers = trailers
    stream.sender.trailer_count = count
    stream_finish(stream, status, details, "200")


cdef void stream_cut(Stream *stream, uint32_t error_code) noexcept nogil:
    if stream.sender.state == RESPONSE_CUT:
        return
    if error_code == NGHTTP2_ENHANCE_YOUR_CALM:
        stream.sender.status = STATUS_RESOURCE_EXHAUSTED
    elif not stream_ended(stream):
        stream.sender.status = STATUS_INTERNAL
    response_move(&stream.sender.state, RESPONSE_CUT)
    stream_drop_request(stream)
    drop_response(stream)
    if nghttp2_submit_rst_stream(stream.conn.session, NGHTTP2_FLAG_NONE, stream.id, error_code) != 0:
        closing_break(&stream.conn.state)  # the peer would wait for ever
    mark_dirty(stream.conn)


cdef void stream_finish(Stream *stream, int status, const char *details, const char *http_status) noexcept nogil:
    # final status; if it is the whole response, headers and trailers are one frame ("Trailers-Only")
    if stream_ended(stream):
        return
    decide(stream, status)
    if details != NULL and details[0] != 0:
        stream.sender.details = message_encode(details)
    if stream_opened(stream) or stream.sender.plain:
        send_further(stream)
    else:
        response_move(&stream.sender.state, RESPONSE_LAST)
        submit_trailers(stream, http_status)
        mark_dirty(stream.conn)


cdef inline void set_nv(nghttp2_nv *nv, const char *name, const char *value) noexcept nogil:
    nv.name = <uint8_t *>name
    nv.namelen = strlen(name)
    nv.value = <uint8_t *>value
    nv.valuelen = strlen(value)
    nv.flags = NGHTTP2_NV_FLAG_NONE


cdef void submit_trailers(Stream *stream, const char *http_status) noexcept nogil:
    # `http_status` is given when the trailers are the whole response
    cdef nghttp2_nv few[FIXED_TRAILERS]
    cdef nghttp2_nv *nv = few
    cdef size_t count = 0
    if stream.sender.trailer_count:
        nv = <nghttp2_nv *>malloc((FIXED_TRAILERS + stream.sender.trailer_count) * sizeof(nghttp2_nv))
        if nv == NULL:
            stream_cut(stream, NGHTTP2_INTERNAL_ERROR)
            return
    if http_status != NULL:
        set_nv(&nv[0], ":status", http_status)
        nv[1] = RESPONSE_HEADERS[1]
        count = 2
        if stream.seen & HEADER_BAD_ENCODING:
            nv[2] = ACCEPTED[0]
            count = 3
    set_nv(&nv[count], "grpc-status", STATUS_TEXT[stream.sender.status])
    count += 1
    if stream.sender.details != NULL:
        set_nv(&nv[count], "grpc-message", stream.sender.details)
        count += 1
    if stream.sender.trailer_count:
        memcpy(nv + count, stream.sender.trailers, stream.sender.trailer_count * sizeof(nghttp2_nv))
    count += stream.sender.trailer_count
    if http_status != NULL:
        check(stream, nghttp2_submit_response(stream.conn.session, stream.id, nv, count, NULL))
    else:
        check(stream, nghttp2_submit_trailer(stream.conn.session, stream.id, nv, count))
    if nv != few:
        free(nv)


# --- nghttp2 asks for bytes of a response

cdef ssize_t read_response(nghttp2_session *session, int32_t stream_id, uint8_t *buffer, size_t length,
                           uint32_t *flags, nghttp2_data_source *source, void *user_data) noexcept nogil:
    # how many bytes the next DATA frame takes; stream_frame will put them there
    cdef Stream *stream = <Stream *>source.ptr
    cdef size_t size = min(length, stream.sender.unsent)
    cdef bint last = stream.sender.state == RESPONSE_LAST and not stream.sender.plain
    if stream.sender.state == RESPONSE_CUT or (size == 0 and not last):
        stream.sender.deferred = True
        return NGHTTP2_ERR_DEFERRED
    flags[0] |= NGHTTP2_DATA_FLAG_NO_COPY
    if last and size == stream.sender.unsent:
        flags[0] |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM
        submit_trailers(stream, NULL)
        if stream.sender.state == RESPONSE_CUT:
            return NGHTTP2_ERR_DEFERRED  # there was no memory for them
    return <ssize_t>size


cdef int stream_frame(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t length,
                      nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Conn *conn = <Conn *>user_data
    cdef Stream *stream = <Stream *>source.ptr
    cdef Outgoing *message
    cdef size_t part
    cdef size_t before = stream_unsent(stream)
    if not output_copy(&conn.output, head, 9):
        return NGHTTP2_ERR_CALLBACK_FAILURE
    if stream.sender.shut and length:
        stream_shut(stream, False)
    assert_that(length <= stream.sender.unsent and length <= conn.unsent)
    stream.sender.unsent -= length
    conn.unsent -= length
    if conn.stream_window <= <int32_t>length:
        stream_shut(stream, True)  # even if nothing waits now: the next response will
    while length:
        message = <Outgoing *>stream.sender.outgoing.first
        part = min(length, message.left)
        if not output_message(&conn.output, message, part):
            return NGHTTP2_ERR_CALLBACK_FAILURE
        length -= part
        if message.left == 0:
            chain_pop(&stream.sender.outgoing)
            outgoing_free(message)
            stream.sender.waits_ns = conn.host.now_ns
    tell_writable(stream, before)
    return 0 if conn.output.size < conn.output_limit else NGHTTP2_ERR_PAUSE


cdef inline void tell_writable(Stream *stream, size_t before) noexcept nogil:
    if stream.call != NULL and before >= WRITABLE_BELOW > stream_unsent(stream):
        stream.method.service.writable(stream)


# ---------------------------------------------------------------------------------------------------------------------
# Compression of responses

cdef void stream_compress(Stream *stream, Encoding encoding, int level) noexcept nogil:
    stream.sender.level = level
    stream.sender.encoding = ENCODING_IDENTITY
    if level == 0:
        return
    if encoding == ENCODING_UNKNOWN:
        encoding = ENCODING_GZIP if stream.sender.accepted >> <int>ENCODING_GZIP & 1 else ENCODING_DEFLATE
    if stream.sender.accepted >> <int>encoding & 1:
        stream.sender.encoding = encoding


cdef void add_plain(Stream *stream, Outgoing *message) noexcept nogil:
    chain_push(&stream.sender.uncompressed, message)
    stream.sender.plain += message.left
    hold(stream, message, STAGE_COMPRESSING)
    compress_next(stream)


cdef void compress_next(Stream *stream) noexcept nogil:
    # one message at a time, to keep their order
    cdef MessageOwner owner = message_owner(stream, &stream.sender.deflating)
    cdef Outgoing *message
    cdef Outgoing *deflated
    while stream.sender.uncompressed.first != NULL and stream.sender.deflating == NULL:
        message = <Outgoing *>chain_pop(&stream.sender.uncompressed)
        if not message.compress:
            compressed(stream, message, NULL)
        elif message_deflate(&owner, message, stream.sender.encoding, stream.sender.level, &deflated,
                             compressed_later):
            compressed(stream, message, deflated)


cdef void compressed_later(void *call, Outgoing *plain, Outgoing *deflated) noexcept nogil:
    compressed(<Stream *>call, plain, deflated)
    compress_next(<Stream *>call)


cdef void compressed(Stream *stream, Outgoing *plain, Outgoing *deflated) noexcept nogil:
    # send the oldest waiting message, plain or compressed
    cdef size_t before = stream_unsent(stream)
    assert_that(plain.left <= stream.sender.plain and plain.left <= stream.conn.unsent)
    stream.sender.plain -= plain.left
    stream.conn.unsent -= plain.left
    charge_release(&plain.charge)
    if deflated == NULL:
        send_plain(stream, plain)
    else:
        outgoing_free(plain)
        append(stream, deflated)
        send_further(stream)
    tell_writable(stream, before)


cdef void send_plain(Stream *stream, Outgoing *message) noexcept nogil:
    if stream.sender.state == RESPONSE_READY:
        stream.sender.encoding = ENCODING_IDENTITY  # the one message is not compressed, so no encoding is announced
    append(stream, message)
    send_further(stream)
