"""One connection of the client, without Python, except for TLS: that is Python's `ssl`, on memory."""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memmove, memset
from posix.time cimport CLOCK_MONOTONIC, timespec
from posix.unistd cimport close, read, write

from inferd_client._native.atomic cimport atomic_load, atomic_store, futex_wait, futex_wake
from inferd_client._native.clock cimport now_ns
from inferd_client._native.linux cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, POLLIN, POLLOUT, SHUT_RDWR, eventfd, iovec, pollfd, ppoll, pthread_cond_destroy,
    pthread_cond_init, pthread_cond_signal, pthread_cond_t, pthread_cond_timedwait, pthread_condattr_init,
    pthread_condattr_setclock, pthread_condattr_t, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_unlock, readv, sched_yield, shutdown,
)
from inferd_client._native.nghttp2 cimport NGHTTP2_NO_ERROR, nghttp2_nv, nghttp2_session_get_stream_user_data
from inferd_client._native.output cimport WRITE_FAILED, WROTE_ALL, Written, output_empty, output_write
from inferd_client._native.pool cimport pool_give, pool_take
from inferd_client._native.session cimport (
    CONNECTION_LOST, STREAM_RESET, Ending, Exchange, Session, session_close, session_collect, session_ping,
    session_receive, session_reset, session_submit, session_wants_read,
)
from inferd_client._native.tls cimport tls_receive, tls_write

cdef enum:
    DIRECT_FROM = 32 << 10   # bytes of a message and of a frame from which a read of its own pays
    BEGINNING = 16 << 10     # bytes to read where a large message may begin

cdef uint64_t NEVER_NS = <uint64_t> 1 << 60


cdef void condition_open(pthread_cond_t *condition) noexcept nogil:
    cdef pthread_condattr_t attributes
    pthread_condattr_init(&attributes)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)
    pthread_cond_init(condition, &attributes)


cdef bint line_open(Line *line) noexcept nogil:
    line.session.header = keep_header
    line.session.data = keep_data
    line.session.ended = wire_ended
    line.session.in_order = True
    pthread_mutex_init(&line.lock, NULL)
    condition_open(&line.attendant)
    line.heard_ns = now_ns()
    line.buffer = <uint8_t *> malloc(READ_SIZE)
    line.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    return line.wake >= 0 and line.buffer != NULL


cdef void line_free(Line *line) noexcept nogil:
    session_close(&line.session)
    if line.fd >= 0:
        close(line.fd)
    if line.wake >= 0:
        close(line.wake)
    free(line.buffer)
    pthread_cond_destroy(&line.attendant)
    pthread_mutex_destroy(&line.lock)


cdef void wire_open(Wire *wire) noexcept nogil:
    wire.exchange.stream = -1


cdef void wire_free(Wire *wire) noexcept nogil:
    cdef Arrived *arrived
    while wire.first != NULL:
        arrived = wire.first
        wire.first = arrived.next
        pool_give(arrived.data, arrived.size, arrived.capacity)
        free(arrived)
    pool_give(wire.message, wire.message_size, wire.capacity)
    free(wire.text)
    free(wire.details)


# --- calls in flight

cdef bint line_submit(Line *line, Wire *wire, const nghttp2_nv *headers, size_t count) noexcept nogil:
    if line.dead or line.session.refusing or not session_submit(&line.session, &wire.exchange, headers, count):
        return False
    wire.in_flight = True
    wire.previous = NULL
    wire.next = line.flight
    if line.flight != NULL:
        line.flight.previous = wire
    line.flight = wire
    line.count += 1
    line.announcing += wire.announces
    line.timed += wire.deadline_ns != 0
    return True


cdef void take_off(Line *line, Wire *wire) noexcept nogil:
    if wire.previous != NULL:
        wire.previous.next = wire.next
    else:
        line.flight = wire.next
    if wire.next != NULL:
        wire.next.previous = wire.previous
    wire.in_flight = False
    line.count -= 1
    line.announcing -= wire.announces
    line.timed -= wire.deadline_ns != 0


cdef void announce(Line *line, Wire *wire) noexcept nogil:
    if wire.has_news:
        return
    wire.has_news = True
    wire.next_news = NULL
    if line.news == NULL:
        line.news = wire
    else:
        line.last_news.next_news = wire
    line.last_news = wire
    line_wake_reader(line)
    pthread_cond_signal(&line.attendant)


cdef void tell(Wire *wire, uint32_t word) noexcept nogil:
    """Wake the thread that waits for this call. With ENDED, the call may be gone when this returns."""
    atomic_store(&wire.word, word)
    futex_wake(&wire.word)


cdef void finish(Line *line, Wire *wire, Ending ending, uint32_t error) noexcept nogil:
    """The call has ended, even if the session still has it. If a thread waits for it, it may be gone afterwards."""
    take_off(line, wire)
    wire.ending = ending
    wire.error = error
    wire.done = True
    if wire.announces:
        announce(line, wire)
    elif wire.waiting:
        tell(wire, ENDED)


cdef void wire_ended(Session *session, Exchange *exchange, Ending ending, uint32_t error) noexcept nogil:
    cdef Wire *wire = <Wire *> exchange
    if wire.in_flight:
        finish(<Line *> session, wire, ending, error)
    else:
        wire.orphaned = False  # it may be gone after this


cdef void line_give_up(Line *line, Wire *wire, GivenUp why) noexcept nogil:
    if not wire.in_flight:
        return
    wire.given_up = why
    wire.locks = True  # so that it outlives its end
    session_reset(&line.session, &wire.exchange)
    line_flush(line)
    if wire.in_flight:
        # the socket takes no output: the session drops the call when the reset is written
        wire.orphaned = True
        finish(line, wire, STREAM_RESET, NGHTTP2_NO_ERROR)


cdef void line_kill(Line *line) noexcept nogil:
    if line.dead:
        return
    line.dead = True
    shutdown(line.fd, SHUT_RDWR)
    while line.flight != NULL:
        line.flight.orphaned = False
        finish(line, line.flight, CONNECTION_LOST, NGHTTP2_NO_ERROR)
    line_wake_reader(line)
    pthread_cond_signal(&line.attendant)


# --- callbacks of the session, with which its Line begins

cdef char *copied(const uint8_t *value, size_t size) noexcept nogil:
    cdef char *text = <char *> malloc(size + 1)
    if text != NULL:
        memcpy(text, value, size)
        text[size] = 0
    return text


cdef void keep_header(Session *session, Exchange *exchange, const uint8_t *name, size_t name_size,
                      const uint8_t *value, size_t value_size) noexcept nogil:
    cdef Wire *wire = <Wire *> exchange
    if name_size == 12 and memcmp(name, b"grpc-message", 12) == 0:
        free(wire.text)
        wire.text = copied(value, value_size)
    elif name_size == 23 and memcmp(name, b"grpc-status-details-bin", 23) == 0:
        free(wire.details)
        wire.details = copied(value, value_size)
    elif name_size == 13 and memcmp(name, b"grpc-encoding", 13) == 0 and value_size < sizeof(wire.encoding):
        memcpy(wire.encoding, value, value_size)
        wire.encoding[value_size] = 0


cdef bint keep_message(Line *line, Wire *wire) noexcept nogil:
    """A message is whole."""
    cdef Arrived *arrived = <Arrived *> calloc(1, sizeof(Arrived))
    if arrived == NULL:
        return False
    arrived.data = wire.message
    arrived.size = wire.message_size
    arrived.capacity = wire.capacity
    arrived.compressed = wire.prefix[0] != 0
    wire.message = NULL
    wire.prefix_size = 0
    if wire.first == NULL:
        wire.first = arrived
    else:
        wire.last.next = arrived
    wire.last = arrived
    wire.exchange.held = wire.many  # until it is taken
    if wire.many and wire.in_flight:
        if wire.announces:
            announce(line, wire)
        elif wire.waiting:
            tell(wire, LOOK)
    return True


cdef bint keep_data(Session *session, Exchange *exchange, const uint8_t *data, size_t size) noexcept nogil:
    cdef Line *line = <Line *> session
    cdef Wire *wire = <Wire *> exchange
    cdef size_t taken
    if not wire.in_flight or wire.given_up != NOT_GIVEN_UP:
        return True
    while size != 0:
        if wire.prefix_size < 5:
            taken = min(size, <size_t> (5 - wire.prefix_size))
            memcpy(wire.prefix + wire.prefix_size, data, taken)
            wire.prefix_size += <uint8_t> taken
            data += taken
            size -= taken
            if wire.prefix_size < 5:
                return True
            wire.message_size = (<size_t> wire.prefix[1] << 24 | <size_t> wire.prefix[2] << 16
                                 | <size_t> wire.prefix[3] << 8 | wire.prefix[4])
            wire.filled = 0
            if wire.message_size > line.limit:
                wire.given_up = TOO_LARGE
            else:
                wire.message = pool_take(wire.message_size, &wire.capacity)
                if wire.message == NULL:
                    wire.given_up = NO_MEMORY
            if wire.given_up != NOT_GIVEN_UP:
                session_reset(session, exchange)
                return True
        taken = min(size, wire.message_size - wire.filled)
        if data != wire.message + wire.filled:
            memmove(wire.message + wire.filled, data, taken)  # it may lie further back in the same memory
        wire.filled += taken
        data += taken
        size -= taken
        if wire.filled == wire.message_size and not keep_message(line, wire):
            return False
    return True


# --- reading and writing

cdef Wire *arriving(const Line *line) noexcept nogil:
    """The call to which the next bytes belong, if they are many."""
    cdef Wire *wire
    if line.session.frame_left < DIRECT_FROM or line.tls != NULL:
        return NULL
    wire = <Wire *> nghttp2_session_get_stream_user_data(line.session.http2, line.session.frame_stream)
    if wire == NULL or not wire.in_flight or wire.given_up != NOT_GIVEN_UP or wire.message == NULL:
        return NULL
    return wire if wire.message_size - wire.filled >= DIRECT_FROM else NULL


cdef void line_receive(Line *line) noexcept nogil:
    cdef iovec parts[2]
    cdef Wire *wire
    cdef ssize_t size, direct
    cdef size_t wanted
    while not line.dead:
        # One call reads the bytes of a large message to their place, and the bytes behind it into the buffer. It reads
        # little where a large message may begin, because the bytes of that in the buffer have to be copied.
        wire = arriving(line)
        parts[0] = iovec(NULL, 0)
        if wire != NULL:
            wire.locks = True  # its memory stays during the processing, whatever frames are in it
            parts[0] = iovec(wire.message + wire.filled,
                             min(line.session.frame_left, wire.message_size - wire.filled))
        parts[1] = iovec(line.buffer, BEGINNING if line.session.frame_size >= DIRECT_FROM and line.tls == NULL
                         else READ_SIZE)
        wanted = parts[0].iov_len + parts[1].iov_len
        size = readv(line.fd, &parts[wire == NULL], 1 + (wire != NULL))
        if size < 0 and (errno == EAGAIN or errno == EINTR):
            return
        if size <= 0:
            line_kill(line)
            return
        line.heard_ns = now_ns()
        line.pinged_ns = 0
        if line.tls != NULL:
            if not tls_receive(line.tls, &line.session, line.buffer, READ_SIZE, size):
                line_kill(line)
        else:
            direct = min(size, <ssize_t> parts[0].iov_len)
            if (direct != 0 and not session_receive(&line.session, <uint8_t *> parts[0].iov_base, direct)
                    or size > direct and not session_receive(&line.session, line.buffer, size - direct)):
                line_kill(line)
        if <size_t> size < wanted:
            return


cdef void line_flush(Line *line) noexcept nogil:
    cdef Written written
    while not line.dead:
        if not session_collect(&line.session):
            line_kill(line)
            return
        if output_empty(&line.session.output) and not (line.blocked and line.tls != NULL):
            line.blocked = False
            if not session_wants_read(&line.session):
                line_kill(line)  # the peer has broken the protocol, and got a GOAWAY; or has ended the connection
            return
        if line.tls != NULL:
            written = tls_write(line.tls, &line.session.output, line.fd)
        else:
            written = output_write(&line.session.output, line.fd)
        if written == WRITE_FAILED:
            line_kill(line)
            return
        if output_empty(&line.session.output):
            line.emptied += 1
        line.blocked = written != WROTE_ALL
        if line.blocked:
            line_wake_reader(line)  # it must poll for writing, too
            return


# --- time

cdef void expire(Line *line, uint64_t now) noexcept nogil:
    cdef Wire *wire = line.flight
    cdef Wire *following
    cdef uint32_t count
    while wire != NULL:
        following = wire.next
        if wire.deadline_ns != 0 and wire.deadline_ns <= now:
            count = line.count
            line_give_up(line, wire, EXPIRED)
            if line.count != count - 1:
                following = line.flight  # other calls have ended with it, too
        wire = following


cdef uint64_t line_tick(Line *line) noexcept nogil:
    cdef uint64_t now = now_ns(), due = NEVER_NS, ping
    cdef Wire *wire
    if line.dead:
        return 0
    if line.timed != 0:
        expire(line, now)
        wire = line.flight
        while wire != NULL:
            if wire.deadline_ns != 0:
                due = min(due, wire.deadline_ns)
            wire = wire.next
    if line.ping_every_ns != 0 and (line.count != 0 or line.ping_idle) and not line.dead:
        if line.pinged_ns != 0:
            ping = line.pinged_ns + line.ping_timeout_ns
            if ping <= now:
                line_kill(line)
                return 0
        else:
            ping = line.heard_ns + line.ping_every_ns
            if ping <= now:
                session_ping(&line.session)
                line.pinged_ns = now
                line_flush(line)
                ping = now + line.ping_timeout_ns
        due = min(due, ping)
    return 0 if due == NEVER_NS else due


# --- turns

cdef void line_wake_reader(Line *line) noexcept nogil:
    cdef uint64_t one = 1
    if line.polling:
        line.polling = False
        write(line.wake, &one, 8)


cdef int poll_busily(pollfd *polled, uint64_t ns) noexcept nogil:
    """Poll for so many nanoseconds without sleeping, because to wake a thread takes longer than to poll."""
    cdef timespec none
    cdef uint64_t now = now_ns(), until = now + ns
    cdef int found = 0
    memset(&none, 0, sizeof(none))
    while found == 0 and now < until:
        found = ppoll(polled, 2, &none, NULL)
        if found == 0:
            sched_yield()  # to other work on this core, perhaps the server
        now = now_ns()
    return found


cdef bint line_turn(Line *line, uint64_t until_ns) noexcept nogil:
    cdef pollfd polled[2]
    cdef timespec wait
    cdef uint64_t ticks, now, due
    cdef uint64_t busy = line.busy_ns
    cdef uint32_t count = line.count
    cdef int found = 0
    due = line_tick(line)
    if line.dead or line.count != count:
        return True  # first handle the calls that have ended with it
    if due == 0 or (until_ns != 0 and until_ns < due):
        due = until_ns
    now = now_ns()
    line.wakes_ns = due if due != 0 else NEVER_NS
    due = 0 if due == 0 else due - now if due > now else 1
    if due != 0:
        busy = min(busy, due)
        wait.tv_sec = (due - busy) // 1000000000
        wait.tv_nsec = (due - busy) % 1000000000
    memset(polled, 0, sizeof(polled))
    polled[0].fd = line.fd
    polled[0].events = POLLIN | POLLOUT if line.blocked else POLLIN
    polled[1].fd = line.wake
    polled[1].events = POLLIN
    line.polling = True
    pthread_mutex_unlock(&line.lock)
    if busy:
        found = poll_busily(polled, busy)
    if found == 0:
        found = ppoll(polled, 2, NULL if due == 0 else &wait, NULL)
    pthread_mutex_lock(&line.lock)
    line.polling = False
    if found < 0:
        return False
    if polled[1].revents:
        read(line.wake, &ticks, 8)
    if polled[0].revents & ~POLLOUT:
        line_receive(line)
    if not line.dead and (polled[0].revents or not line.blocked):
        line_flush(line)
    return True


cdef void line_hand_over(Line *line) noexcept nogil:
    cdef Wire *wire = line.flight
    if line.reading:
        return
    if line.news != NULL or line.announcing != 0:
        pthread_cond_signal(&line.attendant)
    while wire != NULL:
        if wire.waiting:
            wire.locks = True  # it must read, or, if it has ended by then, have another thread read
            tell(wire, LOOK)
            return
        wire = wire.next


cdef void line_attend(Line *line, uint64_t until_ns) noexcept nogil:
    cdef timespec until
    until.tv_sec = until_ns // 1000000000
    until.tv_nsec = until_ns % 1000000000
    pthread_cond_timedwait(&line.attendant, &line.lock, &until)


cdef bint line_wait(Line *line, Wire *wire, uint64_t until_ns) noexcept nogil:
    wire.waiting = True
    wire.locks = False
    atomic_store(&wire.word, 0)
    pthread_mutex_unlock(&line.lock)
    futex_wait(&wire.word, 0, until_ns)
    if atomic_load(&wire.word) == ENDED and not wire.locks:
        return True
    pthread_mutex_lock(&line.lock)
    wire.waiting = False
    return False
