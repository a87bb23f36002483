"""Carrying out what the dispatcher decides (`_native.scheduling.dispatcher`).

The thread of an instance that waits is asleep on a condition of its own. Whoever changes something, on whatever thread,
has the dispatcher decide, under its guard, and calls exactly the threads that it names. What a thread has been given it
finds in its seat. Between that and the moment when it runs more requests may have come: they join its batch if the
policy lets them.

A thread that takes a batch, sends it to another process and sleeps until its results come costs two changes of threads
for each batch. So an instance whose work is done elsewhere lets the loop begin batches while its thread sleeps
(`_native.execution.remote`): the seat is lent. If the loop cannot go on with it, or there is nothing to take any more,
the thread is called, or the seat is idle again. Where requests wait to become a batch, a timer of the loop then stands
for the thread's own waiting.
"""

from libc.stdint cimport int64_t
from libc.string cimport memset

from _native.atomic cimport fetch_add32
from _native.clock cimport now_ns
from _native.request.bridge cimport Bridge, bridge_post
from _native.request.errand cimport Errand
from _native.request.request cimport Request
from _native.scheduling.dispatcher cimport (
    GIVEN_BACK,
    GIVEN_BATCH,
    GIVEN_END,
    SEAT_AWAY,
    SEAT_CALLED,
    SEAT_IDLE,
    SEAT_LENT,
    claim_give,
    dispatcher_decide,
    line_init,
    line_touch,
    seat_ask,
    seat_call,
    seat_watched,
)
from _native.scheduling.policy cimport NEVER, Plan, plan_nothing
from _native.threads cimport condition_destroy, condition_init, lock, notify_one, unlock, wait, wait_until
from _native.timers cimport Timer, timers_clear, timers_set


cdef void seat_init(Seat *seat) noexcept nogil:
    condition_init(&seat.called)


cdef void seat_clear(Seat *seat) noexcept nogil:
    condition_destroy(&seat.called)


cdef inline int64_t time_of(const Line *line) noexcept nogil:
    # now, where somebody looks at it: asking the clock takes as long as all the rest
    return now_ns() if line.timed or line.dispatcher.limited else 0


# ---------------------------------------------------------------------------------------------------------------------
# With the guard held

cdef Seat *call(Seat *called, const Seat *asking, bint on_loop) noexcept nogil:
    # those that have been called, but for who asks; the loop's own, which are to begin, as a chain
    cdef Seat *lent = NULL
    cdef Seat *following
    while called != NULL:
        following = called.next_called
        called.told = False
        if called != asking:
            if on_loop and called.ready != NULL and called.state == SEAT_CALLED and called.given == GIVEN_BATCH:
                called.state = SEAT_LENT
                called.next_called = lent
                lent = called
            else:
                notify_one(&called.called)
        called = following
    return lent


cdef void decide(Line *line, Seat *asking) noexcept nogil:
    # on a thread
    call(dispatcher_decide(line.dispatcher, time_of(line), asking, False), asking, False)


cdef Seat *decide_on_loop(Line *line, Seat *asking) noexcept nogil:
    # the seats that are to begin, as a chain
    cdef Seat *lent = call(dispatcher_decide(line.dispatcher, time_of(line), asking, True), asking, True)
    if line.idle_count and line.watcher == NULL and line.watched_ns != NEVER:
        set_alarm(line)
    return lent


cdef void begin_all(Seat *lent) noexcept nogil:
    # on the loop, without the guard
    cdef Seat *following
    cdef Request *batch
    while lent != NULL:
        following = lent.next_called
        batch = lent.batch
        lent.batch = NULL
        lent.begin(lent, batch)
        lent = following


cdef void line_look(Line *line, bint on_loop) noexcept nogil:
    cdef Dispatcher *dispatcher = line.dispatcher
    cdef Seat *lent = NULL
    line_touch(line)
    if on_loop:
        lent = decide_on_loop(line, NULL)
    else:
        decide(line, NULL)
    unlock(&dispatcher.guard)
    begin_all(lent)


cdef void lines_look(Dispatcher *dispatcher, int64_t now) noexcept nogil:
    call(dispatcher_decide(dispatcher, now, NULL, False), NULL, False)


# ---------------------------------------------------------------------------------------------------------------------
# On the instance's thread

cdef void await_call(Line *line, Seat *seat) noexcept nogil:
    while seat.state != SEAT_CALLED:
        if seat.watch_ns == NEVER:
            wait(&seat.called, &line.dispatcher.guard)
            continue
        wait_until(&seat.called, &line.dispatcher.guard, seat.watch_ns)
        if seat.state == SEAT_IDLE and seat.watch_ns != NEVER and seat.watch_ns <= now_ns():
            seat_watched(seat)
            decide(line, seat)


cdef inline Request *fetch(Seat *seat) noexcept nogil:
    # what it has been given
    cdef Request *batch = seat.batch
    seat.batch = NULL
    seat.state = SEAT_AWAY
    return batch


cdef inline Request *take_at_once(Line *line, Seat *seat) noexcept nogil:
    # What the dispatcher would decide if it asked, where it goes first in any case: without resources. NULL: nothing.
    cdef Request *batch
    cdef int64_t now = time_of(line)
    cdef Plan plan
    line.beside = line.idle_count
    line.plan(line, now, &plan)
    if plan.count == 0:
        return NULL
    batch = line.cut(line, now, &plan)
    seat.why = plan.why
    if line.idle_count:
        line_touch(line)  # what is left may be a batch for another
    if line.dispatcher.touched != NULL:
        decide(line, NULL)
    return batch


cdef Request *take(Line *line, Seat *seat) noexcept nogil:
    cdef Request *batch
    cdef const char *why
    if seat.retired:
        if seat.claim != NULL:
            claim_give(seat.claim)
        seat.given = GIVEN_END
        decide(line, NULL)
        return NULL
    if not line.dispatcher.limited:
        batch = take_at_once(line, seat)
        if batch != NULL:
            return batch
    seat_ask(seat, line)
    decide(line, seat)
    if seat.state == SEAT_CALLED:
        return fetch(seat)
    await_call(line, seat)
    batch = fetch(seat)
    if batch != NULL and line.grow != NULL:
        why = line.grow(line, time_of(line), batch)
        if why != NULL:
            seat.why = why
            line_touch(line)
            decide(line, NULL)
    return batch


cdef Request *seat_take(Lane *lane, Seat *seat) noexcept nogil:
    cdef Line *line = lane.scheduler.line(lane, seat)
    cdef Request *batch
    if line == NULL:
        seat.given = GIVEN_END
        return NULL
    lock(&line.dispatcher.guard)
    batch = take(line, seat)
    unlock(&line.dispatcher.guard)
    return batch


cdef struct Once:
    # a line of one batch, for one seat
    Line line
    Request *batch


cdef void plan_once(Line *line, int64_t now, Plan *plan) noexcept nogil:
    plan_nothing(plan)
    plan.count = (<Once *>line.owner).batch != NULL
    plan.why = "warm-up"


cdef Request *cut_once(Line *line, int64_t now, Plan *plan) noexcept nogil:
    cdef Request *batch = (<Once *>line.owner).batch
    (<Once *>line.owner).batch = NULL
    return batch


cdef Request *seat_hold(Seat *seat, Request *batch) noexcept nogil:
    cdef Once once
    if seat.claim == NULL:
        seat.why = "warm-up"
        return batch
    memset(&once, 0, sizeof(Once))
    line_init(&once.line, seat.claim.dispatcher, &once)
    once.line.plan = plan_once
    once.line.cut = cut_once
    once.batch = batch
    lock(&seat.claim.dispatcher.guard)
    seat_ask(seat, &once.line)
    decide(&once.line, seat)
    await_call(&once.line, seat)
    batch = fetch(seat)
    seat.line = NULL
    unlock(&seat.claim.dispatcher.guard)
    return batch


cdef void seat_release(Seat *seat) noexcept nogil:
    cdef Dispatcher *dispatcher
    if seat.claim == NULL:
        return
    dispatcher = seat.claim.dispatcher
    lock(&dispatcher.guard)
    claim_give(seat.claim)
    lines_look(dispatcher, now_ns())
    unlock(&dispatcher.guard)


cdef void seat_retire(Lane *lane, Seat *seat) noexcept nogil:
    cdef Line *line = lane.scheduler.line(lane, seat)
    if line == NULL:
        return
    lock(&line.dispatcher.guard)
    seat.retired = True
    if seat.state == SEAT_IDLE and seat.line == line:
        seat_call(seat, GIVEN_END)
        notify_one(&seat.called)
        decide(line, NULL)
    unlock(&line.dispatcher.guard)


# ---------------------------------------------------------------------------------------------------------------------
# On the loop

cdef Request *seat_next(Seat *seat) noexcept nogil:
    cdef Line *line = seat.line
    cdef Request *batch = NULL
    cdef Seat *lent = NULL
    lock(&line.dispatcher.guard)
    if seat.retired or not seat.ready(seat):
        seat_call(seat, GIVEN_END if seat.retired else GIVEN_BACK)
        notify_one(&seat.called)
    else:
        seat_ask(seat, line)
        lent = decide_on_loop(line, seat)
        if seat.state == SEAT_CALLED and seat.given == GIVEN_BATCH:
            seat.state = SEAT_LENT
            batch = seat.batch
            seat.batch = NULL
        elif seat.state == SEAT_CALLED:
            notify_one(&seat.called)
    unlock(&line.dispatcher.guard)
    begin_all(lent)
    return batch


cdef void seat_recall(Seat *seat, Request *batch) noexcept nogil:
    cdef Dispatcher *dispatcher = seat.line.dispatcher
    lock(&dispatcher.guard)
    seat.batch = batch
    seat_call(seat, GIVEN_BATCH if batch != NULL else GIVEN_BACK)
    notify_one(&seat.called)
    unlock(&dispatcher.guard)


cdef void set_alarm(Line *line) noexcept nogil:
    # with the guard: the loop looks at watched_ns, or before
    cdef Lane *lane = <Lane *>line.owner
    cdef bint was_set = line.alarm.slot != 0
    if was_set and line.alarm.due_ns <= line.watched_ns:
        return  # who looks too early looks again
    if not was_set:
        fetch_add32(&lane.in_flight, 1)  # the lane stays until then
    line.alarm.fire = look
    line.alarm.owner = line
    if not timers_set((<Bridge *>line.bridge).timers, &line.alarm, line.watched_ns):
        fetch_add32(&lane.in_flight, -1)
        line.watcher = line.idle.first  # threads have clocks of their own
        line.watcher.watch_ns = line.watched_ns
        notify_one(&line.watcher.called)


cdef void look(Timer *timer, int64_t now) noexcept nogil:
    cdef Line *line = <Line *>timer.owner
    cdef Lane *lane = <Lane *>line.owner
    lock(&line.dispatcher.guard)
    if line.watcher == NULL:
        line.watched_ns = NEVER
    line_look(line, True)
    fetch_add32(&lane.in_flight, -1)


cdef void line_silence(Line *line) noexcept nogil:
    if line.alarm.owner != NULL:  # there has been one
        fetch_add32(&(<Lane *>line.owner).in_flight, 1)
        line.silence.run = end_alarm
        line.silence.owner = line
        bridge_post(<Bridge *>line.bridge, &line.silence)


cdef void end_alarm(Errand *errand) noexcept nogil:
    cdef Line *line = <Line *>errand.owner
    cdef Lane *lane = <Lane *>line.owner
    if line.alarm.slot:
        timers_clear((<Bridge *>line.bridge).timers, &line.alarm)
        fetch_add32(&lane.in_flight, -1)
    fetch_add32(&lane.in_flight, -1)
