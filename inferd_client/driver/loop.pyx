"""The loop: waits in epoll, starts calls on free slots when the schedule says so, counts them when they have ended."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC
from posix.unistd cimport close, read

from inferd_client._native.clock cimport now_ns
from inferd_client.driver.call cimport Call
from inferd_client._native.session cimport CONNECTION_LOST, STREAM_RESET, Ending
from inferd_client.driver.connection cimport (
    READ_SIZE, Connection, connection_bury, connection_close, connection_doom, connection_flush, connection_open,
    connection_receive, connection_refuses, connection_reset_doomed, connection_submit, slot_give, slot_take,
)
from inferd_client._native.linux cimport (
    EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLLIN, EPOLLOUT, TFD_CLOEXEC, TFD_NONBLOCK, TFD_TIMER_ABSTIME, epoll_create1,
    epoll_ctl, epoll_event, epoll_wait, itimerspec, sched_yield, timerfd_create, timerfd_settime,
)
from inferd_client.driver.schedule cimport schedule_draw, schedule_gap, schedule_goes_on
from inferd_client.driver.tally cimport journal_add, tally_response, tally_reset
from inferd_client.driver.workload cimport CORRECT, WRONG_STATUS, Verdict

cdef enum:
    EVENTS = 64


cdef int loop_open(Loop *loop, object dial, uint32_t connections, int32_t window, uint32_t max_frame_size) except -1:
    cdef Connection *connection
    cdef epoll_event event
    cdef uint32_t _i
    loop.epoll = epoll_create1(EPOLL_CLOEXEC)
    loop.timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
    if loop.epoll < 0 or loop.timer < 0:
        raise OSError("the driver gets no epoll or timerfd")
    event.events = EPOLLIN
    event.data.ptr = NULL
    epoll_ctl(loop.epoll, EPOLL_CTL_ADD, loop.timer, &event)
    loop.buffer = <uint8_t *> calloc(1, READ_SIZE)
    loop.connections = <Connection *> calloc(connections, sizeof(Connection))
    if loop.buffer == NULL or loop.connections == NULL:
        raise MemoryError
    for _i in range(connections):
        connection = &loop.connections[loop.connection_count]
        connection.owner = loop
        connection.ended = call_ended
        connection.epoll = loop.epoll
        connection.buffer = loop.buffer
        fd, tls = dial()
        loop.connection_count += 1  # closed with the others in any case
        connection_open(connection, fd, tls, window, max_frame_size)
    return 0


cdef void loop_close(Loop *loop) noexcept nogil:
    cdef uint32_t i
    for i in range(loop.connection_count):
        connection_close(&loop.connections[i])
    loop.connection_count = 0
    if loop.timer >= 0:
        close(loop.timer)
    if loop.epoll >= 0:
        close(loop.epoll)
    loop.timer = loop.epoll = -1
    free(loop.connections)
    free(loop.buffer)
    free(loop.journal.entries)
    loop.journal.entries = NULL
    loop.connections = NULL
    loop.buffer = NULL


# --- one call

cdef inline bint is_open(const Loop *loop) noexcept nogil:
    return loop.schedule.interval_ns != 0


cdef bint may_start(const Loop *loop) noexcept nogil:
    return not loop.no_memory and schedule_goes_on(&loop.schedule, loop.tally.issued)


cdef void start(Loop *loop, Connection *connection, Call *call, uint64_t due_ns) noexcept nogil:
    """Submit the next request on this slot; when the connection takes no more, the slot becomes free."""
    cdef int64_t reset_after
    call.index = loop.tally.issued
    call.due_ns = due_ns
    call.cancelled = False
    reset_after = schedule_draw(&loop.schedule, call)
    if not loop.prepare(loop.context, call):
        loop.no_memory = True
        slot_give(connection, call)
        return
    if not connection_submit(connection, call, loop.headers, loop.header_count):
        slot_give(connection, call)
        return
    if reset_after >= 0:
        connection_doom(connection, call, reset_after)
    loop.tally.issued += 1
    loop.tally.bytes_sent += call.head_size + call.body_size
    loop.tally.deadlines += call.timeout_us != 0


cdef Verdict verify(Loop *loop, Call *call) noexcept nogil:
    if loop.verify != NULL:
        return loop.verify(loop.context, call)
    return WRONG_STATUS if call.exchange.grpc_status > 0 or call.exchange.http_status != 200 else CORRECT


cdef void count(Loop *loop, Call *call, Ending ending) noexcept nogil:
    loop.tally.finished += 1
    call.elapsed_ns = now_ns() - call.due_ns
    if ending == CONNECTION_LOST:
        loop.tally.lost += 1
    elif call.cancelled:
        loop.tally.cancelled += 1
    elif ending == STREAM_RESET:
        tally_reset(&loop.tally, call)
    else:
        tally_response(&loop.tally, call, verify(loop, call))
        if not journal_add(&loop.journal, call):
            loop.no_memory = True


cdef inline bint unfinished(Loop *loop, const Call *call) noexcept nogil:
    return loop.unfinished != NULL and not loop.no_memory and loop.unfinished(loop.context, call)


cdef void call_ended(Connection *connection, Call *call, Ending ending) noexcept nogil:
    """Closed loop: the next call takes its place; likewise to end a sequence."""
    cdef Loop *loop = <Loop *> connection.owner
    count(loop, call, ending)
    if not is_open(loop) and not connection_refuses(connection) and (may_start(loop) or unfinished(loop, call)):
        start(loop, connection, call, now_ns())
    else:
        slot_give(connection, call)


# --- starting calls

cdef void fill(Loop *loop, Connection *connection) noexcept nogil:
    """Closed loop: start a call on every free slot."""
    while connection.free_calls != NULL and not connection_refuses(connection) and may_start(loop):
        start(loop, connection, slot_take(connection), now_ns())


cdef void set_timer(Loop *loop, uint64_t when_ns) noexcept nogil:
    """0 for never."""
    cdef itimerspec spec
    memset(&spec, 0, sizeof(spec))
    spec.it_value.tv_sec = when_ns // 1000000000
    spec.it_value.tv_nsec = when_ns % 1000000000
    timerfd_settime(loop.timer, TFD_TIMER_ABSTIME, &spec, NULL)


cdef void start_due(Loop *loop) noexcept nogil:
    """Open loop: start what is due while a slot is free, connection by connection, and set the timer for the next."""
    cdef Connection *connection
    cdef uint64_t now = now_ns()
    cdef uint32_t tried = 0
    while loop.next_due_ns <= now and tried < loop.connection_count and may_start(loop):
        connection = &loop.connections[loop.turn]
        loop.turn = (loop.turn + 1) % loop.connection_count
        if connection_refuses(connection) or connection.free_calls == NULL:
            tried += 1
            continue
        tried = 0
        start(loop, connection, slot_take(connection), loop.next_due_ns)
        loop.next_due_ns += schedule_gap(&loop.schedule, loop.tally.issued)
    set_timer(loop, loop.next_due_ns if loop.next_due_ns > now else 0)


# --- events

cdef inline void flush(Connection *connection) noexcept nogil:
    connection_flush(connection)
    connection_reset_doomed(connection)


cdef void loop_step(Loop *loop, int timeout_ms) noexcept nogil:
    cdef epoll_event events[EVENTS]
    cdef Connection *connection
    cdef uint64_t ticks
    cdef int i, found = epoll_wait(loop.epoll, events, EVENTS, timeout_ms)
    if found == 0 and loop.busy_poll:
        sched_yield()  # to other work on this core, perhaps the server
    for i in range(found):
        connection = <Connection *> events[i].data.ptr
        if connection == NULL:
            read(loop.timer, &ticks, 8)
        elif not connection.dead and events[i].events & ~<uint32_t> EPOLLOUT:
            connection_receive(connection)
    if is_open(loop):
        start_due(loop)
        for i in range(<int> loop.connection_count):
            flush(&loop.connections[i])
        return
    for i in range(found):
        if events[i].data.ptr != NULL:
            flush(<Connection *> events[i].data.ptr)


cdef bint any_alive(const Loop *loop) noexcept nogil:
    cdef uint32_t i
    for i in range(loop.connection_count):
        if not connection_refuses(&loop.connections[i]):
            return True
    return False


cdef void bury_stalled(Loop *loop) noexcept nogil:
    """Give up the calls in flight; their connections cannot be used again."""
    cdef Connection *connection
    cdef uint32_t i, j
    for i in range(loop.connection_count):
        connection = &loop.connections[i]
        for j in range(connection.capacity):
            if connection.calls[j].exchange.stream >= 0:
                connection_bury(connection)
                break


cdef bint signalled(Loop *loop) noexcept with gil:
    """Whether a signal's handler ends the run, as that of ^C does."""
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        Py_INCREF(error)
        loop.raised = <PyObject *> error
    return loop.raised != NULL


cdef void go_on(Loop *loop, uint64_t now) noexcept nogil:
    """Run until all started calls have ended and none may start, or until the run stalls."""
    cdef uint64_t moved_ns = now, finished = loop.tally.finished
    while loop.tally.finished < loop.tally.issued or (may_start(loop) and any_alive(loop)):
        loop_step(loop, 0 if loop.busy_poll else TICK_MS)
        now = now_ns()
        if loop.tally.finished != finished or (is_open(loop) and loop.tally.finished == loop.tally.issued):
            finished = loop.tally.finished
            moved_ns = now
        elif now - moved_ns > loop.stall_ns:
            bury_stalled(loop)
            break
        if now - loop.looked_ns > TICK_MS * <uint64_t> 1000000:
            loop.looked_ns = now
            if signalled(loop):
                bury_stalled(loop)
                break


cdef void finish(Loop *loop) noexcept nogil:
    """End sequences whose slots are idle."""
    cdef Connection *connection
    cdef Call *call
    cdef uint32_t i, _j
    for i in range(loop.connection_count):
        connection = &loop.connections[i]
        for _j in range(connection.capacity):
            if connection.free_calls == NULL or connection_refuses(connection):
                break
            call = slot_take(connection)
            if unfinished(loop, call):
                start(loop, connection, call, now_ns())
            else:
                slot_give(connection, call)
        flush(connection)


cdef void loop_run(Loop *loop) noexcept nogil:
    cdef uint64_t now = now_ns()
    cdef uint32_t i
    loop.next_due_ns = loop.started_ns = now
    if is_open(loop):
        start_due(loop)
    for i in range(loop.connection_count):
        if not is_open(loop):
            fill(loop, &loop.connections[i])
        flush(&loop.connections[i])
    go_on(loop, now)
    loop.counted_ns = now_ns()
    if loop.unfinished != NULL and is_open(loop) and loop.raised == NULL:
        # these come outside of the rate, and are not counted
        loop.counted = loop.tally
        loop.schedule.interval_ns = 0
        loop.journal.kept = False
        finish(loop)
        go_on(loop, now_ns())
        loop.tally = loop.counted
    set_timer(loop, 0)
