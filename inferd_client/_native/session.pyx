"""An nghttp2 session of a client, and its callbacks."""

from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from inferd_client._native.linux cimport iovec
from inferd_client._native.nghttp2 cimport *
from inferd_client._native.output cimport ARENA, output_copy, output_empty, output_has_room, output_refer

NGHTTP2 = NGHTTP2_VERSION.decode()

cdef enum:
    REFERENCE_FROM = 4096     # a slice of this size or more is written in place
    COPIED_SLICE = 1 << 14    # bytes of the largest DATA frame that is copied
    REFERENCED_SLICE = 1 << 20  # and of the largest that is written in place
    SPAN = 16                 # parts in one slice, at most
    LARGE = 1 << 16           # bytes of a body
    SMALL_PART = 256          # shorter parts are copied, even in a slice that is written in place


cdef bint session_open(Session *session, int32_t stream_window, int32_t window, uint32_t max_frame_size) noexcept nogil:
    cdef nghttp2_settings_entry[3] settings
    settings[0] = nghttp2_settings_entry(NGHTTP2_SETTINGS_ENABLE_PUSH, 0)
    settings[1] = nghttp2_settings_entry(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, stream_window)
    settings[2] = nghttp2_settings_entry(NGHTTP2_SETTINGS_MAX_FRAME_SIZE, max_frame_size)
    session.http2 = new_session(session)
    session.output.arena = <uint8_t *> calloc(1, ARENA)
    if session.http2 == NULL or session.output.arena == NULL:
        return False
    nghttp2_submit_settings(session.http2, NGHTTP2_FLAG_NONE, settings, 3)
    nghttp2_session_set_local_window_size(session.http2, NGHTTP2_FLAG_NONE, 0, window)
    return True


cdef nghttp2_session *new_session(Session *session) noexcept nogil:
    """NULL when there is no memory."""
    cdef nghttp2_session_callbacks *callbacks
    cdef nghttp2_option *option
    cdef nghttp2_session *http2 = NULL
    if nghttp2_session_callbacks_new(&callbacks) != 0:
        return NULL
    if nghttp2_option_new(&option) != 0:
        nghttp2_session_callbacks_del(callbacks)
        return NULL
    nghttp2_option_set_no_auto_window_update(option, 1)  # see on_data
    nghttp2_session_callbacks_set_on_begin_frame_callback(callbacks, on_begin_frame)
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header)
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data)
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close)
    nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, on_frame)
    nghttp2_session_callbacks_set_send_data_callback(callbacks, send_slice)
    nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, slice_limit)
    nghttp2_session_client_new2(&http2, callbacks, session, option)
    nghttp2_option_del(option)
    nghttp2_session_callbacks_del(callbacks)
    return http2


cdef void session_close(Session *session) noexcept nogil:
    nghttp2_session_del(session.http2)
    free(session.output.arena)
    session.http2 = NULL
    session.output.arena = NULL


cdef void session_terminate(Session *session) noexcept nogil:
    nghttp2_session_terminate_session(session.http2, NGHTTP2_NO_ERROR)


# --- calls of the owner

cdef bint session_submit(Session *session, Exchange *exchange, const nghttp2_nv *headers, size_t count) noexcept nogil:
    cdef nghttp2_data_provider provider
    cdef nghttp2_priority_spec after
    cdef nghttp2_priority_spec *priority = NULL
    cdef uint32_t i
    exchange.part = 0
    exchange.part_sent = exchange.unsent = 0
    for i in range(exchange.part_count):
        exchange.unsent += exchange.parts[i].iov_len
    exchange.began = False
    exchange.http_status = 0
    exchange.grpc_status = -1
    exchange.held = False
    exchange.unacknowledged = 0
    provider.source.ptr = exchange
    provider.read_callback = read_body
    if session.in_order and exchange.unsent >= LARGE:
        # A large body waits while the previous large body can be sent. Otherwise all would be sent concurrently, and
        # the server could answer none before it has received all.
        if session.last_large != 0 and nghttp2_session_get_stream_user_data(session.http2, session.last_large) != NULL:
            nghttp2_priority_spec_init(&after, session.last_large, NGHTTP2_DEFAULT_WEIGHT, 0)
            priority = &after
        exchange.stream = nghttp2_submit_request(session.http2, priority, headers, count, &provider, exchange)
        session.last_large = exchange.stream
    else:
        exchange.stream = nghttp2_submit_request(session.http2, NULL, headers, count, &provider, exchange)
    if exchange.stream < 0:
        session.refusing = True
    return exchange.stream >= 0


cdef void session_reset(Session *session, Exchange *exchange) noexcept nogil:
    nghttp2_submit_rst_stream(session.http2, NGHTTP2_FLAG_NONE, exchange.stream, NGHTTP2_CANCEL)


cdef void session_resume(Session *session, Exchange *exchange) noexcept nogil:
    nghttp2_session_resume_data(session.http2, exchange.stream)


cdef void session_release(Session *session, Exchange *exchange) noexcept nogil:
    if exchange.unacknowledged != 0 and exchange.stream >= 0:
        nghttp2_session_consume_stream(session.http2, exchange.stream, exchange.unacknowledged)
    exchange.unacknowledged = 0
    exchange.held = False


cdef void session_ping(Session *session) noexcept nogil:
    nghttp2_submit_ping(session.http2, NGHTTP2_FLAG_NONE, NULL)


cdef bint session_receive(Session *session, const uint8_t *data, size_t size) noexcept nogil:
    return nghttp2_session_mem_recv(session.http2, data, size) >= 0


cdef bint session_collect(Session *session) noexcept nogil:
    cdef const uint8_t *data
    cdef ssize_t size
    # nghttp2 returns one frame at a time; a copied one is at most COPIED_SLICE bytes and its header
    while output_has_room(&session.output, 2, 2 * COPIED_SLICE):
        size = nghttp2_session_mem_send(session.http2, &data)
        if size <= 0:
            return size == 0
        output_copy(&session.output, data, size)
    return True


cdef bint session_wants_write(Session *session) noexcept nogil:
    return not output_empty(&session.output) or nghttp2_session_want_write(session.http2) != 0


cdef bint session_wants_read(Session *session) noexcept nogil:
    return nghttp2_session_want_read(session.http2) != 0


# --- the body

cdef size_t span(const Exchange *exchange, size_t space) noexcept nogil:
    """How many of the unsent bytes the next slice takes: at most `space`, from at most SPAN parts."""
    cdef size_t size = 0
    cdef uint32_t i, last
    if exchange.part_count - exchange.part <= SPAN:
        return min(exchange.unsent, space)
    last = exchange.part + SPAN
    for i in range(exchange.part, last):
        size += exchange.parts[i].iov_len
    return min(size - exchange.part_sent, space)


cdef inline const uint8_t *next_piece(Exchange *exchange, size_t wanted, size_t *size) noexcept nogil:
    """The next piece of the body, which then counts as sent."""
    cdef const iovec *part = &exchange.parts[exchange.part]
    cdef const uint8_t *data = <const uint8_t *> part.iov_base + exchange.part_sent
    size[0] = min(wanted, part.iov_len - exchange.part_sent)
    exchange.part_sent += size[0]
    exchange.unsent -= size[0]
    if exchange.part_sent == part.iov_len:
        exchange.part += 1
        exchange.part_sent = 0
    return data


cdef ssize_t read_body(nghttp2_session *http2, int32_t stream, uint8_t *out, size_t space, uint32_t *flags,
                       nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Exchange *exchange = <Exchange *> source.ptr
    cdef size_t size = span(exchange, space), left = size, taken
    cdef const uint8_t *data
    exchange.began = True
    if size == exchange.unsent:
        if not exchange.goes_on:
            flags[0] |= NGHTTP2_DATA_FLAG_EOF
        elif size == 0:
            return NGHTTP2_ERR_DEFERRED
    if exchange.stays and size >= REFERENCE_FROM:
        flags[0] |= NGHTTP2_DATA_FLAG_NO_COPY
        return size
    while left != 0:
        data = next_piece(exchange, left, &taken)
        memcpy(out, data, taken)
        out += taken
        left -= taken
    return size


cdef int send_slice(nghttp2_session *http2, nghttp2_frame *frame, const uint8_t *head, size_t size,
                    nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Session *session = <Session *> user_data
    cdef Exchange *exchange = <Exchange *> source.ptr
    cdef const uint8_t *data
    cdef size_t taken
    cdef uint32_t parts = min(exchange.part_count - exchange.part, <uint32_t> SPAN)
    # nghttp2_session_mem_send then continues up to a copied frame: leave room for that one
    if not output_has_room(&session.output, 2 * parts + 1, 9 + SPAN * SMALL_PART + 2 * COPIED_SLICE):
        return NGHTTP2_ERR_WOULDBLOCK
    output_copy(&session.output, head, 9)
    while size != 0:
        data = next_piece(exchange, size, &taken)
        if taken < SMALL_PART:
            output_copy(&session.output, data, taken)
        else:
            output_refer(&session.output, data, taken)
        size -= taken
    return 0


cdef ssize_t slice_limit(nghttp2_session *http2, uint8_t frame_type, int32_t stream, int32_t session_window,
                         int32_t stream_window, uint32_t frame_limit, void *user_data) noexcept nogil:
    cdef Exchange *exchange = <Exchange *> nghttp2_session_get_stream_user_data(http2, stream)
    if exchange == NULL or not exchange.stays:
        frame_limit = min(frame_limit, <uint32_t> COPIED_SLICE)
    return min(min(session_window, stream_window), <int32_t> min(frame_limit, <uint32_t> REFERENCED_SLICE))


# --- the response

cdef int32_t parse_number(const uint8_t *text, size_t size) noexcept nogil:
    """A short decimal number; 999 for anything else."""
    cdef int32_t number = 0
    cdef size_t i
    if size == 0 or size > 3:
        return 999
    for i in range(size):
        if not 48 <= text[i] <= 57:
            return 999
        number = number * 10 + (text[i] - 48)
    return number


cdef int on_begin_frame(nghttp2_session *http2, const nghttp2_frame_hd *head, void *user_data) noexcept nogil:
    cdef Session *session = <Session *> user_data
    session.frame_left = 0
    if head.type == NGHTTP2_DATA:
        session.frame_stream = head.stream_id
        session.frame_size = head.length
        session.frame_left = 0 if head.flags & NGHTTP2_FLAG_PADDED else head.length
    return 0


cdef int on_header(nghttp2_session *http2, const nghttp2_frame *frame, const uint8_t *name, size_t name_size,
                   const uint8_t *value, size_t value_size, uint8_t flags, void *user_data) noexcept nogil:
    cdef Session *session = <Session *> user_data
    cdef Exchange *exchange = <Exchange *> nghttp2_session_get_stream_user_data(http2, frame.hd.stream_id)
    if exchange == NULL:
        return 0
    if name_size == 11 and memcmp(name, b"grpc-status", 11) == 0:
        exchange.grpc_status = parse_number(value, value_size)
    elif name_size == 7 and memcmp(name, b":status", 7) == 0:
        exchange.http_status = parse_number(value, value_size)
    elif session.header != NULL:
        session.header(session, exchange, name, name_size, value, value_size)
    return 0


cdef int on_data(nghttp2_session *http2, uint8_t flags, int32_t stream, const uint8_t *data, size_t size,
                 void *user_data) noexcept nogil:
    cdef Session *session = <Session *> user_data
    cdef Exchange *exchange = <Exchange *> nghttp2_session_get_stream_user_data(http2, stream)
    session.bytes_received += size
    session.frame_left -= min(size, session.frame_left)
    if exchange != NULL and session.data != NULL and not session.data(session, exchange, data, size):
        return NGHTTP2_ERR_CALLBACK_FAILURE
    if exchange != NULL and exchange.held:
        # other responses on the connection continue
        exchange.unacknowledged += size
        nghttp2_session_consume_connection(http2, size)
    else:
        nghttp2_session_consume(http2, stream, size)
    return 0


cdef int on_close(nghttp2_session *http2, int32_t stream, uint32_t error, void *user_data) noexcept nogil:
    cdef Session *session = <Session *> user_data
    cdef Exchange *exchange = <Exchange *> nghttp2_session_get_stream_user_data(http2, stream)
    if exchange == NULL:
        return 0
    exchange.stream = -1
    session.ended(session, exchange,
                  STREAM_RESET if exchange.grpc_status < 0 and error != NGHTTP2_NO_ERROR else STREAM_CLOSED, error)
    return 0


cdef int on_frame(nghttp2_session *http2, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Session *session = <Session *> user_data
    cdef Exchange *exchange
    if frame.hd.type == NGHTTP2_SETTINGS:
        session.ready = True
    elif frame.hd.type == NGHTTP2_GOAWAY:
        session.refusing = True
    elif frame.hd.type == NGHTTP2_PING and frame.hd.flags & NGHTTP2_FLAG_ACK:
        session.pongs += 1
    elif frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
        exchange = <Exchange *> nghttp2_session_get_stream_user_data(http2, frame.hd.stream_id)
        if exchange != NULL and exchange.goes_on:
            nghttp2_submit_rst_stream(http2, NGHTTP2_FLAG_NONE, frame.hd.stream_id, NGHTTP2_NO_ERROR)
    return 0
