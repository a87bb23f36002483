"""One HTTP/2 connection: its socket, its nghttp2 session and what that calls, the slots of its calls.

`connection_receive` feeds nghttp2, which calls `on_close` for each call that ended; `connection_flush` lets nghttp2
serialise and writes. Bodies that stay until the end of the run are written from where they lie.
"""

import socket

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy
from posix.unistd cimport close, read

from bench.driver.call cimport MESSAGE_LIMIT, Call
from bench.driver.linux cimport EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLLIN, EPOLLOUT, epoll_ctl, epoll_event
from bench.driver.nghttp2 cimport *
from bench.driver.output cimport (
    ARENA, WRITE_FAILED, WROTE_ALL, Written, output_copy, output_empty, output_has_room, output_refer, output_write,
)

NGHTTP2 = NGHTTP2_VERSION.decode()

cdef enum:
    REFERENCE_FROM = 4096     # a body slice of this size is written from where it lies
    COPIED_SLICE = 1 << 14    # the largest DATA frames of the two kinds
    REFERENCED_SLICE = 1 << 20


# --- opening and closing

cdef int connection_open(Connection *connection, str address, int32_t window, uint32_t max_frame_size) except -1:
    cdef nghttp2_settings_entry[3] settings
    cdef epoll_event event
    settings[0] = nghttp2_settings_entry(NGHTTP2_SETTINGS_ENABLE_PUSH, 0)
    settings[1] = nghttp2_settings_entry(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, window)
    settings[2] = nghttp2_settings_entry(NGHTTP2_SETTINGS_MAX_FRAME_SIZE, max_frame_size)
    connection.fd = dial(address)
    connection.session = new_session(connection)
    connection.output.arena = <uint8_t *> calloc(1, ARENA)
    if connection.session == NULL or connection.output.arena == NULL:
        connection_close(connection)
        raise MemoryError
    nghttp2_submit_settings(connection.session, NGHTTP2_FLAG_NONE, settings, 3)
    nghttp2_session_set_local_window_size(connection.session, NGHTTP2_FLAG_NONE, 0, window)
    event.events = EPOLLIN
    event.data.ptr = connection
    epoll_ctl(connection.epoll, EPOLL_CTL_ADD, connection.fd, &event)
    connection_flush(connection)
    return 0


cdef int dial(str address) except -1:
    """A connected non-blocking socket's descriptor, owned by the caller."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # TCP's grows by itself
        sock.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock.detach()


cdef nghttp2_session *new_session(Connection *connection) noexcept nogil:
    """NULL when there is no memory."""
    cdef nghttp2_session_callbacks *callbacks
    cdef nghttp2_session *session = NULL
    if nghttp2_session_callbacks_new(&callbacks) != 0:
        return NULL
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header)
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data)
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close)
    nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, on_frame)
    nghttp2_session_callbacks_set_send_data_callback(callbacks, send_slice)
    nghttp2_session_callbacks_set_data_source_read_length_callback(callbacks, slice_limit)
    nghttp2_session_client_new(&session, callbacks, connection)
    nghttp2_session_callbacks_del(callbacks)
    return session


cdef void connection_close(Connection *connection) noexcept nogil:
    if connection.session != NULL and not connection.dead:
        nghttp2_session_terminate_session(connection.session, NGHTTP2_NO_ERROR)
        connection_flush(connection)
    if not connection.dead:
        connection.dead = connection.refusing = True
        close(connection.fd)
    nghttp2_session_del(connection.session)
    free(connection.output.arena)
    connection.session = NULL
    connection.output.arena = NULL


# --- slots for calls

cdef bint connection_take_slots(Connection *connection, uint32_t count) noexcept nogil:
    cdef uint32_t i
    connection.closed = connection.bytes_received = 0
    connection.doomed_count = 0
    connection.free_calls = NULL
    connection.calls = <Call *> calloc(count, sizeof(Call))
    connection.doomed = <Call **> calloc(count, sizeof(Call *))
    if connection.calls == NULL or connection.doomed == NULL:
        return False
    connection.capacity = count
    for i in range(count):
        connection.calls[i].doom = -1
        slot_give(connection, &connection.calls[i])
    return True


cdef void connection_give_slots(Connection *connection) noexcept nogil:
    cdef uint32_t i
    for i in range(connection.capacity):
        free(connection.calls[i].scratch)
        free(connection.calls[i].answer)
    free(connection.calls)
    free(connection.doomed)
    connection.capacity = connection.doomed_count = 0
    connection.calls = connection.free_calls = NULL
    connection.doomed = NULL


cdef bint connection_submit(Connection *connection, Call *call, const nghttp2_nv *headers) noexcept nogil:
    cdef nghttp2_nv block[HEADERS]
    cdef nghttp2_data_provider provider
    cdef size_t count = HEADERS - 1
    memcpy(block, headers, sizeof(block))
    if call.timeout_us != 0:
        block[count].value = <uint8_t *> call.timeout_text
        block[count].valuelen = snprintf(call.timeout_text, 16, b"%uu", call.timeout_us)
        count += 1
    call.sent = 0
    call.answer_size = 0
    call.http_status = 0
    call.grpc_status = -1
    call.message[0] = 0
    provider.source.ptr = call
    provider.read_callback = read_body
    call.stream = nghttp2_submit_request(connection.session, NULL, block, count, &provider, call)
    if call.stream < 0:
        connection.refusing = True
    return call.stream >= 0


cdef void connection_doom(Connection *connection, Call *call, uint64_t after) noexcept nogil:
    call.cancel_at = connection.closed + after
    call.doom = <int32_t> connection.doomed_count
    connection.doomed[connection.doomed_count] = call
    connection.doomed_count += 1


cdef void connection_spare(Connection *connection, Call *call) noexcept nogil:
    cdef Call *last
    if call.doom < 0:
        return
    connection.doomed_count -= 1
    last = connection.doomed[connection.doomed_count]
    connection.doomed[call.doom] = last
    last.doom = call.doom
    call.doom = -1


cdef void connection_reset_doomed(Connection *connection) noexcept nogil:
    cdef uint32_t i = 0
    cdef Call *call
    cdef bint any_due = False
    if connection.dead:
        return
    while i < connection.doomed_count:
        call = connection.doomed[i]
        if call.cancel_at <= connection.closed:
            connection_spare(connection, call)
            call.cancelled = True
            nghttp2_submit_rst_stream(connection.session, NGHTTP2_FLAG_NONE, call.stream, NGHTTP2_CANCEL)
            any_due = True
        else:
            i += 1
    if any_due:
        connection_flush(connection)


# --- nghttp2 callbacks; user_data is the Connection

cdef ssize_t read_body(nghttp2_session *session, int32_t stream, uint8_t *out, size_t space, uint32_t *flags,
                       nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Call *call = <Call *> source.ptr
    cdef size_t size = min(call.body_size - call.sent, space)
    if size == call.body_size - call.sent:
        flags[0] |= NGHTTP2_DATA_FLAG_EOF
    if call.body_stays and size >= REFERENCE_FROM:
        flags[0] |= NGHTTP2_DATA_FLAG_NO_COPY
    else:
        memcpy(out, call.body + call.sent, size)
        call.sent += size
    return size


cdef int send_slice(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t size,
                    nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Connection *connection = <Connection *> user_data
    cdef Call *call = <Call *> source.ptr
    # nghttp2_session_mem_send goes on after this until a frame comes that is copied: leave room for that one
    if not output_has_room(&connection.output, 3, 9 + 2 * COPIED_SLICE):
        return NGHTTP2_ERR_WOULDBLOCK
    output_copy(&connection.output, head, 9)
    output_refer(&connection.output, call.body + call.sent, size)
    call.sent += size
    return 0


cdef ssize_t slice_limit(nghttp2_session *session, uint8_t frame_type, int32_t stream, int32_t session_window,
                         int32_t stream_window, uint32_t frame_limit, void *user_data) noexcept nogil:
    cdef Call *call = <Call *> nghttp2_session_get_stream_user_data(session, stream)
    if call == NULL or not call.body_stays:
        frame_limit = min(frame_limit, <uint32_t> COPIED_SLICE)
    return min(min(session_window, stream_window), <int32_t> min(frame_limit, <uint32_t> REFERENCED_SLICE))


cdef int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name, size_t name_size,
                   const uint8_t *value, size_t value_size, uint8_t flags, void *user_data) noexcept nogil:
    cdef Call *call = <Call *> nghttp2_session_get_stream_user_data(session, frame.hd.stream_id)
    if call == NULL:
        return 0
    if name_size == 11 and memcmp(name, b"grpc-status", 11) == 0:
        call.grpc_status = parse_number(value, value_size)
    elif name_size == 7 and memcmp(name, b":status", 7) == 0:
        call.http_status = parse_number(value, value_size)
    elif name_size == 12 and memcmp(name, b"grpc-message", 12) == 0:
        value_size = min(value_size, <size_t> (MESSAGE_LIMIT - 1))
        memcpy(call.message, value, value_size)
        call.message[value_size] = 0
    return 0


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


cdef int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *data, size_t size,
                 void *user_data) noexcept nogil:
    cdef Connection *connection = <Connection *> user_data
    cdef Call *call
    cdef uint8_t *grown
    cdef size_t wanted
    connection.bytes_received += size
    if not connection.keeps_answers:
        return 0
    call = <Call *> nghttp2_session_get_stream_user_data(session, stream)
    if call == NULL:
        return 0
    wanted = call.answer_size + size
    if wanted > call.answer_capacity:
        wanted = max(2 * wanted, <size_t> 1024)
        grown = <uint8_t *> realloc(call.answer, wanted)
        if grown == NULL:
            connection.no_memory = True
            return NGHTTP2_ERR_CALLBACK_FAILURE
        call.answer = grown
        call.answer_capacity = wanted
    memcpy(call.answer + call.answer_size, data, size)
    call.answer_size += size
    return 0


cdef int on_close(nghttp2_session *session, int32_t stream, uint32_t error, void *user_data) noexcept nogil:
    cdef Connection *connection = <Connection *> user_data
    cdef Call *call = <Call *> nghttp2_session_get_stream_user_data(session, stream)
    if call != NULL:
        end(connection, call, STREAM_RESET if call.grpc_status < 0 and error != NGHTTP2_NO_ERROR else STREAM_CLOSED)
    return 0


cdef void end(Connection *connection, Call *call, Ending ending) noexcept nogil:
    connection.closed += 1
    connection_spare(connection, call)
    connection.ended(connection, call, ending)


cdef int on_frame(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Connection *connection = <Connection *> user_data
    if frame.hd.type == NGHTTP2_SETTINGS:
        connection.ready = True
    elif frame.hd.type == NGHTTP2_GOAWAY:
        connection.refusing = True
    return 0


# --- reading and writing

cdef void connection_receive(Connection *connection) noexcept nogil:
    cdef ssize_t size = read(connection.fd, connection.buffer, READ_SIZE)
    if size < 0 and (errno == EAGAIN or errno == EINTR):
        return
    if size <= 0 or nghttp2_session_mem_recv(connection.session, connection.buffer, size) < 0:
        connection_bury(connection)


cdef void collect(Connection *connection) noexcept nogil:
    """Let nghttp2 serialise as much as one write takes."""
    cdef const uint8_t *data
    cdef ssize_t size
    # nghttp2 returns one frame at a time; a copied one is at most COPIED_SLICE bytes and its header
    while output_has_room(&connection.output, 2, 2 * COPIED_SLICE):
        size = nghttp2_session_mem_send(connection.session, &data)
        if size < 0:
            connection_bury(connection)
        if size <= 0:
            return
        output_copy(&connection.output, data, size)


cdef void connection_flush(Connection *connection) noexcept nogil:
    cdef Written written
    while not connection.dead:
        collect(connection)
        if output_empty(&connection.output):
            poll_write(connection, False)
            return
        written = output_write(&connection.output, connection.fd)
        if written == WRITE_FAILED:
            connection_bury(connection)
        if written != WROTE_ALL:
            poll_write(connection, True)
            return


cdef void poll_write(Connection *connection, bint wanted) noexcept nogil:
    cdef epoll_event event
    if connection.polls_write == wanted or connection.dead:
        return
    connection.polls_write = wanted
    event.events = EPOLLIN | EPOLLOUT if wanted else EPOLLIN
    event.data.ptr = connection
    epoll_ctl(connection.epoll, EPOLL_CTL_MOD, connection.fd, &event)


cdef void connection_bury(Connection *connection) noexcept nogil:
    cdef uint32_t i
    if connection.dead:
        return
    connection.dead = connection.refusing = True
    close(connection.fd)
    for i in range(connection.capacity):
        if connection.calls[i].stream >= 0:
            end(connection, &connection.calls[i], CONNECTION_LOST)
