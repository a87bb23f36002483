"""The head of a call: its request headers, read one by one and checked when they are complete.

Most calls of a connection have the same headers, so the meaning of each is remembered, see KnownField.
"""

from libc.stdint cimport uint32_t
from libc.stdlib cimport realloc
from libc.string cimport memcmp

from inferd._native.refusal cimport REFUSAL_LIMIT_EXCEEDED, REFUSAL_NOT_SERVED, REFUSAL_PROTOCOL
from inferd._native.text cimport format_text
from inferd._native.traceparent cimport traceparent_read
from inferd._native.transport.call_state cimport RECEIVING_PREFIX, receiving_move
from inferd._native.transport.compression cimport ENCODING_UNKNOWN, encoding_parse, encodings_parse
from inferd._native.transport.errorinfo cimport stream_refuse, stream_refuse_http
from inferd._native.transport.expiry cimport stream_watch
from inferd._native.transport.headers cimport header_value, timeout_parse
from inferd._native.transport.nghttp2 cimport *
from inferd._native.transport.quota cimport quota_refuses_call
from inferd._native.transport.stream cimport (
    HEADER_BAD_ENCODING,
    HEADER_BAD_TIMEOUT,
    HEADER_GRPC,
    HEADER_POST,
    HEADER_TE,
    HEADER_TOO_LARGE,
    KNOWN_FIELDS,
    Conn,
    HeaderField,
    Host,
    KnownField,
    Method,
    Stream,
    stream_drop_fields,
    stream_ended,
)


cdef enum:
    KNOWN_BYTES = 256        # the largest header that is remembered


cdef inline bint equals(nghttp2_vec text, const char *literal, size_t size) noexcept nogil:
    return text.len == size and memcmp(text.base, literal, size) == 0


cdef int head_read(Stream *stream, nghttp2_rcbuf *name_buffer, nghttp2_rcbuf *value_buffer) noexcept nogil:
    cdef nghttp2_vec name = nghttp2_rcbuf_get_buf(name_buffer)
    cdef nghttp2_vec value = header_value(value_buffer)
    cdef KnownField field = KnownField(name_buffer, value_buffer, field_bytes(name, value), NULL, 0, 0)
    cdef uint32_t at = stream.header_count
    stream.header_count += 1
    stream.header_bytes += field.bytes
    if stream.header_bytes > MAX_HEADER_BYTES:
        stream.seen |= HEADER_TOO_LARGE
        return 0
    if not is_common(stream.conn.host, name, value, &field):
        return read_own(stream, name_buffer, value_buffer, name, value)
    head_take(stream, &field)
    if at < <uint32_t>KNOWN_FIELDS and field.bytes <= KNOWN_BYTES:
        remember(&stream.conn.known[at], &field)
    return 0


cdef bint is_common(Host *host, nghttp2_vec name, nghttp2_vec value, KnownField *field) noexcept nogil:
    # whether the header means the same in every call; `field` gets the meaning
    if equals(name, ":path", 5):
        field.method = native_of(host, value)
        return field.method != NULL
    if equals(name, ":method", 7):
        field.seen = HEADER_POST if equals(value, "POST", 4) else 0
    elif equals(name, "te", 2):
        field.seen = HEADER_TE if equals(value, "trailers", 8) else 0
    elif equals(name, "content-type", 12):
        field.seen = HEADER_GRPC if is_grpc(value) else 0
    elif equals(name, "grpc-accept-encoding", 20):
        field.accepted = encodings_parse(value.base, value.len)
    else:
        return name.len == 0 or name.base[0] == c":"
    return True


cdef int read_own(Stream *stream, nghttp2_rcbuf *name_buffer, nghttp2_rcbuf *value_buffer, nghttp2_vec name,
                  nghttp2_vec value) noexcept nogil:
    # a header whose meaning is this call's own
    if equals(name, ":path", 5):
        return take_path(stream, value)
    if equals(name, "grpc-timeout", 12):
        stream.timeout_ns = timeout_parse(value.base, value.len)
        if stream.timeout_ns < 0:
            stream.seen |= HEADER_BAD_TIMEOUT
    elif equals(name, "grpc-encoding", 13):
        stream.encoding = encoding_parse(value.base, value.len)
        if stream.encoding == ENCODING_UNKNOWN:
            stream.seen |= HEADER_BAD_ENCODING
    elif stream.method != NULL:
        if stream.conn.host.traced and (name.len == 11 or name.len == 7):
            note_trace(stream, name, value, value_buffer)
        if stream.method.service.wants == NULL or stream.method.service.wants(stream, name.base, name.len):
            return keep_field(stream, name_buffer, value_buffer)
    return 0


cdef void remember(KnownField *known, const KnownField *field) noexcept nogil:
    forget(known)
    known[0] = field[0]
    nghttp2_rcbuf_incref(known.name)
    nghttp2_rcbuf_incref(known.value)


cdef inline void forget(KnownField *known) noexcept nogil:
    if known.name != NULL:
        nghttp2_rcbuf_decref(known.name)
        nghttp2_rcbuf_decref(known.value)
        known.name = NULL
        known.value = NULL


cdef void head_forget(Conn *conn) noexcept nogil:
    cdef uint32_t i
    for i in range(<uint32_t>KNOWN_FIELDS):
        forget(&conn.known[i])


cdef inline bint is_grpc(nghttp2_vec value) noexcept nogil:
    # "application/grpc", with a subtype ("+proto") or parameters (";...") or without
    return value.len >= 16 and memcmp(value.base, "application/grpc", 16) == 0 and (
        value.len == 16 or value.base[16] == c"+" or value.base[16] == c";")


cdef Method *native_of(Host *host, nghttp2_vec path) noexcept nogil:
    cdef uint32_t i
    for i in range(host.native_count):
        if host.natives[i].path_size == path.len and memcmp(host.natives[i].path, path.base, path.len) == 0:
            return &host.natives[i]
    return NULL


cdef int take_path(Stream *stream, nghttp2_vec path) noexcept nogil:
    # take the path of a method that is not native
    stream.method = &stream.conn.host.other
    stream.single = stream.method.service.single
    stream.path = format_text("%.*s", <int>path.len, path.base)
    return 0 if stream.path != NULL else NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE


cdef void note_trace(Stream *stream, nghttp2_vec name, nghttp2_vec value, nghttp2_rcbuf *value_buffer) noexcept nogil:
    # the trace headers of W3C; of several baggage headers the first one counts
    if equals(name, "traceparent", 11):
        traceparent_read(&stream.context, value.base, value.len)
    elif equals(name, "baggage", 7) and stream.baggage == NULL:
        nghttp2_rcbuf_incref(value_buffer)
        stream.baggage = value_buffer
        stream.context.baggage = value.base
        stream.context.baggage_size = value.len


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


cdef void head_complete(Stream *stream) noexcept nogil:
    receiving_move(&stream.receiver.state, RECEIVING_PREFIX)
    if stream_ended(stream):
        pass  # while its headers came: the server stops, or needs memory
    elif stream.seen & HEADER_TOO_LARGE:
        text = format_text("the request headers exceed %d bytes", <int>MAX_HEADER_BYTES)
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, text)
    elif not stream.seen & HEADER_POST:
        text = format_text("the HTTP method of a gRPC call must be POST")
        stream_refuse_http(stream, REFUSAL_PROTOCOL, text, "405")
    elif not stream.seen & HEADER_GRPC:
        text = format_text("the content-type of a gRPC call must begin with application/grpc")
        stream_refuse_http(stream, REFUSAL_PROTOCOL, text, "415")
    elif not stream.seen & HEADER_TE:
        stream_refuse(stream, REFUSAL_PROTOCOL, format_text("a gRPC call must carry the header 'te: trailers'"))
    elif stream.seen & HEADER_BAD_TIMEOUT:
        stream_refuse(stream, REFUSAL_PROTOCOL, format_text(
            "grpc-timeout must be at most 8 digits and one of H M S m u n"))
    elif stream.seen & HEADER_BAD_ENCODING:
        stream_refuse(stream, REFUSAL_NOT_SERVED, format_text(
            "the grpc-encoding of the request is not supported, accepted encodings: identity, deflate, gzip"))
    elif not quota_refuses_call(stream):
        stream.method.service.begin(stream)
    if stream.call == NULL or not stream.method.service.keeps_fields:
        stream_drop_fields(stream)
    if stream.id <= stream.conn.watched:
        stream_watch(stream)  # conn_watch does this for the calls that began in this read
