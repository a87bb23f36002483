"""Carries out the dispatcher's decisions (`inferd._native.scheduling.dispatcher`).

The thread of a waiting instance sleeps on a condition of its own. A thread that changes something takes the
dispatcher's lock, lets the dispatcher decide, releases the lock, and wakes exactly the threads that the decision names:
a thread that is woken before would run into the lock on its core, and sleep again. A woken thread finds its batch in
its consumer. Requests that come before it runs join the batch if the policy allows it.

A thread that takes a batch, sends it to another process and sleeps until the results come costs two thread switches for
each batch. So an instance whose work runs in another process lets the front begin batches while its thread sleeps
(`inferd._native.execution.remote`): the consumer is lent. If the front cannot continue with it, the thread is woken;
if there is no batch any more, the consumer is idle again. If requests wait for more requests, a timer of the front
replaces the thread's own wait. Brief instances are lent, too (`inferd._native.execution.brief`).
"""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from inferd._native.atomic cimport fetch_add32
from inferd._native.clock cimport now_ns
from inferd._native.request.bridge cimport Bridge, bridge_post
from inferd._native.request.callback cimport PostedCallback
from inferd._native.request.request cimport Request
from inferd._native.scheduling.dispatcher cimport (
    CONSUMER_AWAY,
    CONSUMER_IDLE,
    CONSUMER_LENT,
    CONSUMER_WOKEN,
    GIVEN_BACK,
    GIVEN_BATCH,
    GIVEN_END,
    Bell,
    claim_give,
    consumer_ask,
    consumer_wake,
    consumer_watched,
    dispatcher_decide,
    line_init,
    line_touch,
)
from inferd._native.scheduling.policy cimport NEVER, BatchPlan, plan_nothing
from inferd._native.threads cimport condition_destroy, condition_init, lock, notify_one, unlock, wait, wait_until
from inferd._native.timers cimport Timer, timers_clear, timers_set


cdef enum:
    RUNG_LATER = 8           # bells that are rung when the lock is released; further ones are rung before

cdef struct Ringing:
    # the threads that a decision wakes
    Bell *bells[RUNG_LATER]
    uint32_t count


cdef int consumer_init(Consumer *consumer) except -1:
    consumer.bell = <Bell *>malloc(sizeof(Bell))
    if consumer.bell == NULL:
        raise MemoryError
    condition_init(&consumer.bell.rung)
    consumer.bell.references = 1
    return 0


cdef void consumer_clear(Consumer *consumer) noexcept nogil:
    if consumer.bell != NULL:
        bell_give(consumer.bell)


cdef void bell_give(Bell *bell) noexcept nogil:
    if fetch_add32(&bell.references, -1) == 1:
        condition_destroy(&bell.rung)
        free(bell)


cdef inline void ring_later(Ringing *ringing, const Consumer *consumer) noexcept nogil:
    if ringing.count == RUNG_LATER:
        notify_one(&consumer.bell.rung)
        return
    fetch_add32(&consumer.bell.references, 1)
    ringing.bells[ringing.count] = consumer.bell
    ringing.count += 1


cdef inline void ring(Ringing *ringing) noexcept nogil:
    while ringing.count:
        ringing.count -= 1
        notify_one(&ringing.bells[ringing.count].rung)
        bell_give(ringing.bells[ringing.count])


cdef inline int64_t time_of(const Line *line) noexcept nogil:
    # now; 0 where no decision depends on the time: reading the clock takes as long as all the rest
    return now_ns() if line.timed or line.dispatcher.limited else 0


# ---------------------------------------------------------------------------------------------------------------------
# With the guard held

cdef Consumer *wake_chain(Consumer *woken, const Consumer *asking, bint in_front, Ringing *ringing) noexcept nogil:
    # Ring for the woken consumers, except `asking`. Returns those whose batches the front is to begin, as a chain.
    cdef Consumer *lent = NULL
    cdef Consumer *following
    while woken != NULL:
        following = woken.next_woken
        woken.chained = False
        if woken != asking:
            if in_front and woken.ready != NULL and woken.state == CONSUMER_WOKEN and woken.given == GIVEN_BATCH:
                woken.state = CONSUMER_LENT
                woken.next_woken = lent
                lent = woken
            else:
                ring_later(ringing, woken)
        woken = following
    return lent


cdef void decide(Line *line, Consumer *asking, Ringing *ringing) noexcept nogil:
    # on a thread
    wake_chain(dispatcher_decide(line.dispatcher, time_of(line), asking, False), asking, False, ringing)


cdef Consumer *decide_in_front(Line *line, Consumer *asking, Ringing *ringing) noexcept nogil:
    # the consumers that are to begin, as a chain
    cdef Consumer *lent = wake_chain(
        dispatcher_decide(line.dispatcher, time_of(line), asking, True), asking, True, ringing)
    if line.idle_count and line.watcher == NULL and line.watched_ns != NEVER:
        set_alarm(line, ringing)
    return lent


cdef void begin_all(Consumer *lent) noexcept nogil:
    # in the front, without the guard
    cdef Consumer *following
    cdef Request *batch
    while lent != NULL:
        following = lent.next_woken
        batch = lent.batch
        lent.batch = NULL
        lent.begin(lent, batch)
        lent = following


cdef void line_look(Line *line, bint in_front) noexcept nogil:
    cdef Dispatcher *dispatcher = line.dispatcher
    cdef Consumer *lent = NULL
    cdef Ringing ringing
    ringing.count = 0
    line_touch(line)
    if in_front:
        lent = decide_in_front(line, NULL, &ringing)
    else:
        decide(line, NULL, &ringing)
    unlock(&dispatcher.guard)
    ring(&ringing)
    begin_all(lent)


cdef void lines_look(Dispatcher *dispatcher, int64_t now) noexcept nogil:
    cdef Ringing ringing
    ringing.count = 0
    wake_chain(dispatcher_decide(dispatcher, now, NULL, False), NULL, False, &ringing)
    ring(&ringing)


# ---------------------------------------------------------------------------------------------------------------------
# On the instance's thread

cdef void await_waking(Line *line, Consumer *consumer, Ringing *ringing) noexcept nogil:
    while consumer.state != CONSUMER_WOKEN:
        ring(ringing)
        if consumer.watch_ns == NEVER:
            wait(&consumer.bell.rung, &line.dispatcher.guard)
            continue
        wait_until(&consumer.bell.rung, &line.dispatcher.guard, consumer.watch_ns)
        if consumer.state == CONSUMER_IDLE and consumer.watch_ns != NEVER and consumer.watch_ns <= now_ns():
            consumer_watched(consumer)
            decide(line, consumer, ringing)


cdef inline Request *fetch(Consumer *consumer) noexcept nogil:
    # the batch that the consumer was given
    cdef Request *batch = consumer.batch
    consumer.batch = NULL
    consumer.state = CONSUMER_AWAY
    return batch


cdef inline Request *take_at_once(Line *line, Consumer *consumer, Ringing *ringing) noexcept nogil:
    # Like a decision of the dispatcher in which this consumer goes first; only for lines without resources. NULL: no
    # batch.
    cdef Request *batch
    cdef int64_t now = time_of(line)
    cdef BatchPlan plan
    line.beside = line.idle_count
    line.plan(line, now, &plan)
    if plan.count == 0:
        return NULL
    batch = line.cut(line, now, &plan)
    consumer.why = plan.why
    if line.idle_count:
        line_touch(line)  # the remaining requests may be a batch for another consumer
    if line.dispatcher.touched != NULL:
        decide(line, NULL, ringing)
    return batch


cdef Request *take(Line *line, Consumer *consumer, Ringing *ringing) noexcept nogil:
    cdef Request *batch
    cdef const char *why
    if consumer.retired:
        if consumer.claim != NULL:
            claim_give(consumer.claim)
        consumer.given = GIVEN_END
        decide(line, NULL, ringing)
        return NULL
    if not line.dispatcher.limited:
        batch = take_at_once(line, consumer, ringing)
        if batch != NULL:
            return batch
    consumer_ask(consumer, line)
    decide(line, consumer, ringing)
    if consumer.state == CONSUMER_WOKEN:
        return fetch(consumer)
    await_waking(line, consumer, ringing)
    batch = fetch(consumer)
    if batch != NULL and line.grow != NULL:
        why = line.grow(line, time_of(line), batch)
        if why != NULL:
            consumer.why = why
            line_touch(line)
            decide(line, NULL, ringing)
    return batch


cdef inline Line *line_of(Lane *lane, const Consumer *consumer) noexcept nogil:
    return (<const BatchScheduler *>lane.scheduler).line(lane, consumer)


cdef Request *consumer_take(Lane *lane, Consumer *consumer) noexcept nogil:
    cdef Line *line = line_of(lane, consumer)
    cdef Request *batch
    cdef Ringing ringing
    if line == NULL:
        consumer.given = GIVEN_END
        return NULL
    ringing.count = 0
    lock(&line.dispatcher.guard)
    batch = take(line, consumer, &ringing)
    unlock(&line.dispatcher.guard)
    ring(&ringing)
    return batch


cdef Request *consumer_take_full(Lane *lane, Consumer *consumer) noexcept nogil:
    cdef Line *line = line_of(lane, consumer)
    cdef Request *batch = NULL
    cdef Ringing ringing
    if line == NULL or line.full == NULL or line.dispatcher.limited:
        return NULL
    ringing.count = 0
    lock(&line.dispatcher.guard)
    if not consumer.retired and line.idle_count == 0 and line.full(line):
        batch = take_at_once(line, consumer, &ringing)
    unlock(&line.dispatcher.guard)
    ring(&ringing)
    return batch


cdef struct Once:
    # a line of one batch, for one consumer
    Line line
    Request *batch


cdef void plan_once(Line *line, int64_t now, BatchPlan *plan) noexcept nogil:
    plan_nothing(plan)
    plan.count = (<Once *>line.owner).batch != NULL
    plan.why = "warm-up"


cdef Request *cut_once(Line *line, int64_t now, BatchPlan *plan) noexcept nogil:
    cdef Request *batch = (<Once *>line.owner).batch
    (<Once *>line.owner).batch = NULL
    return batch


cdef Request *consumer_hold(Consumer *consumer, Request *batch) noexcept nogil:
    cdef Once once
    cdef Ringing ringing
    if consumer.claim == NULL:
        consumer.why = "warm-up"
        return batch
    memset(&once, 0, sizeof(Once))
    line_init(&once.line, consumer.claim.dispatcher, &once)
    once.line.plan = plan_once
    once.line.cut = cut_once
    once.batch = batch
    ringing.count = 0
    lock(&consumer.claim.dispatcher.guard)
    consumer_ask(consumer, &once.line)
    decide(&once.line, consumer, &ringing)
    await_waking(&once.line, consumer, &ringing)
    batch = fetch(consumer)
    consumer.line = NULL
    unlock(&consumer.claim.dispatcher.guard)
    ring(&ringing)
    return batch


cdef void consumer_release(Consumer *consumer) noexcept nogil:
    cdef Dispatcher *dispatcher
    if consumer.claim == NULL:
        return
    dispatcher = consumer.claim.dispatcher
    lock(&dispatcher.guard)
    claim_give(consumer.claim)
    lines_look(dispatcher, now_ns())
    unlock(&dispatcher.guard)


cdef void consumer_retire(Lane *lane, Consumer *consumer) noexcept nogil:
    cdef Line *line = line_of(lane, consumer)
    cdef Ringing ringing
    if line == NULL:
        return
    ringing.count = 0
    lock(&line.dispatcher.guard)
    consumer.retired = True
    if consumer.state == CONSUMER_IDLE and consumer.line == line:
        consumer_wake(consumer, GIVEN_END)
        ring_later(&ringing, consumer)
        decide(line, NULL, &ringing)
    unlock(&line.dispatcher.guard)
    ring(&ringing)


# ---------------------------------------------------------------------------------------------------------------------
# In the front

cdef Request *consumer_next(Consumer *consumer) noexcept nogil:
    cdef Line *line = consumer.line
    cdef Request *batch = NULL
    cdef Consumer *lent = NULL
    cdef Ringing ringing
    ringing.count = 0
    lock(&line.dispatcher.guard)
    if consumer.retired or not consumer.ready(consumer):
        consumer_wake(consumer, GIVEN_END if consumer.retired else GIVEN_BACK)
        ring_later(&ringing, consumer)
    else:
        consumer_ask(consumer, line)
        lent = decide_in_front(line, consumer, &ringing)
        if consumer.state == CONSUMER_WOKEN and consumer.given == GIVEN_BATCH:
            consumer.state = CONSUMER_LENT
            batch = consumer.batch
            consumer.batch = NULL
        elif consumer.state == CONSUMER_WOKEN:
            ring_later(&ringing, consumer)
    unlock(&line.dispatcher.guard)
    ring(&ringing)
    begin_all(lent)
    return batch


cdef void consumer_recall(Consumer *consumer, Request *batch) noexcept nogil:
    cdef Dispatcher *dispatcher = consumer.line.dispatcher
    cdef Ringing ringing
    ringing.count = 0
    lock(&dispatcher.guard)
    consumer.batch = batch
    consumer_wake(consumer, GIVEN_BATCH if batch != NULL else GIVEN_BACK)
    ring_later(&ringing, consumer)
    unlock(&dispatcher.guard)
    ring(&ringing)


cdef void set_alarm(Line *line, Ringing *ringing) noexcept nogil:
    # With the guard held: have the front look at watched_ns, or before.
    cdef Lane *lane = <Lane *>line.owner
    cdef bint was_set = line.alarm.slot != 0
    if was_set and line.alarm.due_ns <= line.watched_ns:
        return  # after looking too early, the front sets the alarm again
    if not was_set:
        fetch_add32(&lane.in_flight, 1)  # keeps the lane alive until then
    line.alarm.fire = alarm_fired
    line.alarm.owner = line
    if not timers_set((<Bridge *>line.bridge).timers, &line.alarm, line.watched_ns):
        fetch_add32(&lane.in_flight, -1)
        line.watcher = line.idle.first  # no memory for the timer: a thread watches the clock
        line.watcher.watch_ns = line.watched_ns
        ring_later(ringing, line.watcher)


cdef void alarm_fired(Timer *timer, int64_t now) noexcept nogil:
    cdef Line *line = <Line *>timer.owner
    cdef Lane *lane = <Lane *>line.owner
    lock(&line.dispatcher.guard)
    if line.watcher == NULL:
        line.watched_ns = NEVER
    line_look(line, True)
    fetch_add32(&lane.in_flight, -1)


cdef void line_silence(Line *line) noexcept nogil:
    if line.alarm.owner != NULL:  # the alarm was set at least once
        fetch_add32(&(<Lane *>line.owner).in_flight, 1)
        line.silence.run = end_alarm
        line.silence.owner = line
        bridge_post(<Bridge *>line.bridge, &line.silence)


cdef void end_alarm(PostedCallback *callback) noexcept nogil:
    cdef Line *line = <Line *>callback.owner
    cdef Lane *lane = <Lane *>line.owner
    if line.alarm.slot:
        timers_clear((<Bridge *>line.bridge).timers, &line.alarm)
        fetch_add32(&lane.in_flight, -1)
    fetch_add32(&lane.in_flight, -1)
