"""One HTTP/2 connection: its socket, its session with callbacks, the slots of its calls.

`connection_receive` feeds the session, which calls `call_ended`; `connection_flush` lets it serialise and writes.
Bodies that stay until the end of the run are written in place.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_CLEAR, Py_INCREF
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy
from posix.unistd cimport close, read

from inferd_client._native.linux cimport (
    EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLLIN, EPOLLOUT, epoll_ctl, epoll_event, iovec,
)
from inferd_client._native.nghttp2 cimport nghttp2_nv
from inferd_client._native.output cimport WRITE_FAILED, WROTE_ALL, Written, output_empty, output_write
from inferd_client._native.session cimport (
    CONNECTION_LOST, Ending, Exchange, Session, session_close, session_collect, session_open, session_receive,
    session_reset, session_submit, session_terminate,
)
from inferd_client._native.tls cimport tls_receive, tls_write
from inferd_client.driver.call cimport MESSAGE_LIMIT, Call

# --- opening and closing

cdef int connection_open(Connection *connection, int fd, object tls, int32_t window, uint32_t max_frame_size) except -1:
    cdef epoll_event event
    connection.session.header = keep_message
    connection.session.data = keep_response
    connection.session.ended = call_ended
    connection.fd = fd
    if tls is not None:
        Py_INCREF(tls)
        connection.tls = <PyObject *> tls
    if not session_open(&connection.session, window, window, max_frame_size):
        connection_close(connection)
        raise MemoryError
    event.events = EPOLLIN
    event.data.ptr = connection
    epoll_ctl(connection.epoll, EPOLL_CTL_ADD, connection.fd, &event)
    connection_flush(connection)
    return 0


cdef void connection_close(Connection *connection) noexcept nogil:
    if not connection.dead:
        if connection.session.http2 != NULL and connection.session.output.arena != NULL:
            session_terminate(&connection.session)
            connection_flush(connection)
        if not connection.dead:
            connection.dead = True
            close(connection.fd)
    session_close(&connection.session)
    if connection.tls != NULL:
        with gil:
            Py_CLEAR(connection.tls)


# --- slots for calls

cdef bint connection_take_slots(Connection *connection, uint32_t count) noexcept nogil:
    cdef uint32_t i
    connection.closed = connection.session.bytes_received = 0
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
        free(connection.calls[i].response)
    free(connection.calls)
    free(connection.doomed)
    connection.capacity = connection.doomed_count = 0
    connection.calls = connection.free_calls = NULL
    connection.doomed = NULL


cdef bint connection_submit(Connection *connection, Call *call, const nghttp2_nv *headers,
                            uint32_t count) noexcept nogil:
    cdef nghttp2_nv block[MOST_HEADERS]
    memcpy(block, headers, count * sizeof(nghttp2_nv))
    count -= 1
    if call.timeout_us != 0:
        block[count].value = <uint8_t *> call.timeout_text
        block[count].valuelen = snprintf(call.timeout_text, 16, b"%uu", call.timeout_us)
        count += 1
    call.response_size = 0
    call.message[0] = 0
    call.parts[0] = iovec(<void *> call.head, call.head_size)
    call.parts[1] = iovec(<void *> call.body, call.body_size)
    call.exchange.parts = &call.parts[call.head_size == 0]
    call.exchange.part_count = 1 + (call.head_size != 0)
    call.exchange.stays = call.body_stays
    call.exchange.goes_on = False
    return session_submit(&connection.session, &call.exchange, block, count)


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
            session_reset(&connection.session, &call.exchange)
            any_due = True
        else:
            i += 1
    if any_due:
        connection_flush(connection)


# --- callbacks of the session, with which its Connection begins

cdef void keep_message(Session *session, Exchange *exchange, const uint8_t *name, size_t name_size,
                       const uint8_t *value, size_t value_size) noexcept nogil:
    cdef Call *call = <Call *> exchange
    if name_size == 12 and memcmp(name, b"grpc-message", 12) == 0:
        value_size = min(value_size, <size_t> (MESSAGE_LIMIT - 1))
        memcpy(call.message, value, value_size)
        call.message[value_size] = 0


cdef bint keep_response(Session *session, Exchange *exchange, const uint8_t *data, size_t size) noexcept nogil:
    cdef Connection *connection = <Connection *> session
    cdef Call *call = <Call *> exchange
    cdef uint8_t *grown
    cdef size_t wanted = call.response_size + size
    if not connection.keeps_responses:
        return True
    if wanted > call.response_capacity:
        wanted = max(2 * wanted, <size_t> 1024)
        grown = <uint8_t *> realloc(call.response, wanted)
        if grown == NULL:
            connection.no_memory = True
            return False
        call.response = grown
        call.response_capacity = wanted
    memcpy(call.response + call.response_size, data, size)
    call.response_size += size
    return True


cdef void call_ended(Session *session, Exchange *exchange, Ending ending, uint32_t error) noexcept nogil:
    end(<Connection *> session, <Call *> exchange, ending)


cdef void end(Connection *connection, Call *call, Ending ending) noexcept nogil:
    connection.closed += 1
    connection_spare(connection, call)
    connection.ended(connection, call, ending)


# --- reading and writing

cdef void connection_receive(Connection *connection) noexcept nogil:
    cdef ssize_t size = read(connection.fd, connection.buffer, READ_SIZE)
    if size < 0 and (errno == EAGAIN or errno == EINTR):
        return
    if size <= 0 or not feed_session(connection, size):
        connection_bury(connection)


cdef inline bint feed_session(Connection *connection, ssize_t size) noexcept nogil:
    if connection.tls != NULL:
        return tls_receive(<void *> connection.tls, &connection.session, connection.buffer, READ_SIZE, size)
    return session_receive(&connection.session, connection.buffer, size)


cdef void connection_flush(Connection *connection) noexcept nogil:
    cdef Written written
    while not connection.dead:
        if not session_collect(&connection.session):
            connection_bury(connection)
            return
        if output_empty(&connection.session.output) and not (connection.polls_write and connection.tls != NULL):
            poll_write(connection, False)
            return
        if connection.tls != NULL:
            written = tls_write(<void *> connection.tls, &connection.session.output, connection.fd)
        else:
            written = output_write(&connection.session.output, connection.fd)
        if written == WRITE_FAILED:
            connection_bury(connection)
        if written != WROTE_ALL:
            poll_write(connection, True)
            return
        poll_write(connection, False)


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
    connection.dead = True
    close(connection.fd)
    for i in range(connection.capacity):
        if connection.calls[i].exchange.stream >= 0:
            end(connection, &connection.calls[i], CONNECTION_LOST)
