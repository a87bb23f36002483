"""The dispatcher: which idle instance gets which batch, and when.

Instances that have nothing to do wait in lines, each as a *consumer*. A line is where batches come from: all instances
of a stateless model share one, an instance whose slots hold sequences has its own. When a request comes or leaves, a
consumer asks, time passes or resources are given back, the lines concerned are *touched*, and `dispatcher_decide` gives
batches to idle consumers until no touched line has both. So no request is left beside an idle instance that may take
it: no wake-up can reach the wrong thread or get lost.

The dispatcher also grants resources (the rate limiter). A line that has a batch is put on a list, to wait for
resources. Of all consumers on the list whose resources are free, the one with the smallest virtual time goes first. A
consumer whose resources are not free is passed over, so that free resources do not lie idle. One that needs much of a
resource could wait for ever while others share it: once the virtual time of the others is ahead by PATIENCE of its
executions, the consumer is *overdue*, and the others leave it the resources that it needs. An execution adds a claim's
priority to its virtual time, so claims that always have work execute in inverse proportion to their priorities. A claim
without work for a while continues at the virtual time that the others have reached: it neither catches up nor waits for
them.

When the requests of a line wait for more requests, the line must be looked at again once that no longer pays: one idle
consumer watches the clock for it (`Line.watcher`), or the front does.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from inferd._native.assertion cimport assert_that
from inferd._native.list cimport list_append, list_prepend, list_remove
from inferd._native.request.request cimport Request
from inferd._native.scheduling.policy cimport NEVER, BatchPlan
from inferd._native.threads cimport mutex_destroy, mutex_init


cdef enum:
    PATIENCE = 8             # so many of its executions may others be ahead before a consumer is overdue


cdef void dispatcher_init(Dispatcher *self, bint limited) noexcept nogil:
    memset(self, 0, sizeof(Dispatcher))
    mutex_init(&self.guard, NULL)
    self.limited = limited


cdef void dispatcher_clear(Dispatcher *self) noexcept nogil:
    mutex_destroy(&self.guard)


cdef void line_init(Line *line, Dispatcher *dispatcher, void *owner) noexcept nogil:
    line.dispatcher = dispatcher
    line.owner = owner
    line.watched_ns = NEVER


# ---------------------------------------------------------------------------------------------------------------------
# Resources

cdef bint is_free(const Claim *claim) noexcept nogil:
    cdef uint32_t i
    for i in range(claim.need_count):
        if claim.needs[i].pool.free < claim.needs[i].count:
            return False
    return True


cdef inline void move(Claim *claim, int64_t sign) noexcept nogil:
    # resources out of the pools to the claim, or back
    cdef uint32_t i
    for i in range(claim.need_count):
        claim.needs[i].pool.free -= sign * claim.needs[i].count
        assert_that(claim.needs[i].pool.free <= claim.needs[i].pool.total)
    claim.held = sign > 0


cdef void grant(Dispatcher *self, Claim *claim) noexcept nogil:
    assert_that(not claim.held and is_free(claim))
    move(claim, 1)
    self.virtual_time = max(self.virtual_time, claim.virtual_time)
    claim.virtual_time += claim.priority


cdef void claim_give(Claim *claim) noexcept nogil:
    if claim.held:
        move(claim, -1)


cdef inline uint64_t virtual_time_of(const Consumer *consumer) noexcept nogil:
    return consumer.claim.virtual_time if consumer.claim != NULL else 0


cdef inline bint needs_same(const Claim *a, const Claim *b) noexcept nogil:
    cdef uint32_t i, k
    for i in range(a.need_count):
        for k in range(b.need_count):
            if a.needs[i].pool == b.needs[k].pool and a.needs[i].count and b.needs[k].count:
                return True
    return False


cdef inline bint may_have(const Dispatcher *self, const Claim *claim) noexcept nogil:
    if not is_free(claim):
        return False
    return self.overdue == NULL or self.overdue == claim or not needs_same(self.overdue, claim)


cdef inline bint can_ever(const Claim *claim) noexcept nogil:
    cdef uint32_t i
    for i in range(claim.need_count):
        if claim.needs[i].pool.total < claim.needs[i].count:
            return False
    return True


cdef void find_overdue(Dispatcher *self) noexcept nogil:
    # find, of the claims whose lines have been passed over for too long, the one that is furthest behind
    cdef const Line *line = self.lacking.first
    cdef const Consumer *consumer
    cdef const Claim *claim
    self.overdue = NULL
    while line != NULL:
        consumer = line.idle.first
        while consumer != NULL:
            claim = consumer.claim
            if (claim != NULL and can_ever(claim)
                    and line.passed_since + PATIENCE * claim.priority < self.virtual_time
                    and (self.overdue == NULL or claim.virtual_time < self.overdue.virtual_time)):
                self.overdue = claim
            consumer = consumer.next
        line = line.next


cdef Consumer *best_of(const Line *line) noexcept nogil:
    # the idle consumer that goes first of those that can execute now; NULL: none can
    cdef Consumer *consumer = line.idle.first
    cdef Consumer *best = NULL
    while consumer != NULL:
        if ((consumer.claim == NULL or may_have(line.dispatcher, consumer.claim))
                and (best == NULL or virtual_time_of(consumer) < virtual_time_of(best))):
            best = consumer
        consumer = consumer.next
    return best


cdef Consumer *best_lacking(Dispatcher *self) noexcept nogil:
    # the idle consumer that goes first, over all lines that lack resources; NULL: none can execute now
    cdef const Line *line = self.lacking.first
    cdef Consumer *best = NULL
    cdef Consumer *consumer
    find_overdue(self)
    while line != NULL:
        consumer = best_of(line)
        if consumer != NULL and (best == NULL or virtual_time_of(consumer) < virtual_time_of(best)):
            best = consumer
        line = line.next
    return best


cdef void enlist(Line *line) noexcept nogil:
    # the line has a batch, and waits for resources from now on
    cdef Consumer *consumer = line.idle.first
    if line.lacking:
        return
    line.lacking = True
    line.passed_since = line.dispatcher.virtual_time
    list_append(&line.dispatcher.lacking, line)
    while consumer != NULL:
        if consumer.claim != NULL:
            consumer.claim.virtual_time = max(consumer.claim.virtual_time, line.dispatcher.virtual_time)
        consumer = consumer.next


cdef void delist(Line *line) noexcept nogil:
    if line.lacking:
        line.lacking = False
        list_remove(&line.dispatcher.lacking, line)


# ---------------------------------------------------------------------------------------------------------------------
# Consumers

cdef void consumer_ask(Consumer *consumer, Line *line) noexcept nogil:
    if consumer.claim != NULL:
        claim_give(consumer.claim)
    assert_that(consumer.state != CONSUMER_IDLE)
    consumer.line = line
    consumer.state = CONSUMER_IDLE
    consumer.watch_ns = NEVER
    list_prepend(&line.idle, consumer)
    line.idle_count += 1
    if line.lacking and consumer.claim != NULL:
        consumer.claim.virtual_time = max(consumer.claim.virtual_time, line.dispatcher.virtual_time)
    line_touch(line)


cdef inline void leave_line(Consumer *consumer) noexcept nogil:
    # the consumer is idle no longer
    cdef Line *line = consumer.line
    assert_that(consumer.state == CONSUMER_IDLE and line.idle_count > 0)
    list_remove(&line.idle, consumer)
    line.idle_count -= 1
    if line.watcher == consumer:
        line.watcher = NULL
        line.watched_ns = NEVER
    consumer.watch_ns = NEVER
    if line.idle_count == 0:
        line.watched_ns = NEVER  # the next consumer that asks makes a new plan
        delist(line)


cdef void consumer_watched(Consumer *consumer) noexcept nogil:
    consumer.watch_ns = NEVER
    if consumer.line.watcher == consumer:
        consumer.line.watcher = NULL
        consumer.line.watched_ns = NEVER
    line_touch(consumer.line)


cdef void consumer_wake(Consumer *consumer, Given given) noexcept nogil:
    if consumer.state == CONSUMER_IDLE:
        leave_line(consumer)
        line_touch(consumer.line)  # another consumer may have to watch
    consumer.state = CONSUMER_WOKEN
    consumer.given = given


cdef inline Consumer *tell(Consumer *woken, Consumer *consumer) noexcept nogil:
    # add the consumer to the chain
    if consumer.chained:
        return woken
    consumer.chained = True
    consumer.next_woken = woken
    return consumer


# ---------------------------------------------------------------------------------------------------------------------
# Decisions

cdef Consumer *give(Consumer *consumer, Request *batch, const char *why, Consumer *woken) noexcept nogil:
    leave_line(consumer)
    if consumer.claim != NULL:
        grant(consumer.line.dispatcher, consumer.claim)
    consumer.state = CONSUMER_WOKEN
    consumer.given = GIVEN_BATCH
    consumer.batch = batch
    consumer.why = why
    return tell(woken, consumer)


cdef Consumer *wake_all(Line *line, Consumer *woken) noexcept nogil:
    # no batch will come any more
    cdef Consumer *consumer
    while line.idle.first != NULL:
        consumer = line.idle.first
        leave_line(consumer)
        consumer.state = CONSUMER_WOKEN
        consumer.given = GIVEN_END
        woken = tell(woken, consumer)
    return woken


cdef inline bint is_asking(const Consumer *asking, const Line *line) noexcept nogil:
    return asking != NULL and asking.state == CONSUMER_IDLE and asking.line == line


cdef Consumer *ready_consumer(Line *line, Consumer *asking, Consumer **woken) noexcept nogil:
    # An idle consumer of a line without resources, preferably one that is awake. Consumers that are not ready are
    # woken, so that their threads get ready.
    cdef Consumer *consumer
    if is_asking(asking, line):
        return asking
    while line.idle_count:
        consumer = line.watcher if line.watcher != NULL else line.idle.first
        if consumer.ready == NULL or consumer.ready(consumer):
            return consumer
        leave_line(consumer)
        consumer.state = CONSUMER_WOKEN
        consumer.given = GIVEN_BACK
        woken[0] = tell(woken[0], consumer)
    return NULL


cdef Consumer *watch(Line *line, int64_t wake_ns, Consumer *asking, bint by_front, Consumer *woken) noexcept nogil:
    # Set the alarm: a consumer, or the front, looks at the line at `wake_ns` or before. An earlier alarm stays, also
    # when the request that it was set for has left: it costs one look, after which this function sets the later time.
    cdef Consumer *consumer
    if wake_ns == NEVER or line.idle_count == 0 or line.watched_ns <= wake_ns:
        return woken
    line.watched_ns = wake_ns
    if is_asking(asking, line) and not (by_front and asking.ready != NULL):
        consumer = asking
    elif line.watcher != NULL:
        consumer = line.watcher
    else:
        consumer = line.idle.first
        if by_front and consumer.ready != NULL:
            return woken
    if line.watcher != NULL:
        line.watcher.watch_ns = NEVER
    line.watcher = consumer
    consumer.watch_ns = wake_ns
    return woken if consumer == asking else tell(woken, consumer)


cdef Consumer *watch_or_end(Line *line, int64_t wake_ns, Consumer *asking, bint by_front,
                            Consumer *woken) noexcept nogil:
    # there is no batch in the line
    delist(line)
    if line.over:
        return wake_all(line, woken)
    return watch(line, wake_ns, asking, by_front, woken)


cdef inline void make_plan(Line *line, int64_t now, BatchPlan *plan) noexcept nogil:
    # for an idle consumer
    line.beside = line.idle_count - 1
    line.plan(line, now, plan)


cdef Consumer *look(Line *line, int64_t now, Consumer *asking, bint by_front, Consumer *woken) noexcept nogil:
    # look at a line without resources: give out its batches
    cdef BatchPlan plan
    cdef Request *batch
    cdef Consumer *consumer
    while line.idle_count:
        make_plan(line, now, &plan)
        if plan.count == 0:
            return watch_or_end(line, plan.wake_ns, asking, by_front, woken)
        consumer = ready_consumer(line, asking, &woken)
        if consumer == NULL:
            break
        batch = line.cut(line, now, &plan)
        if batch == NULL:
            return watch_or_end(line, plan.wake_ns, asking, by_front, woken)
        woken = give(consumer, batch, plan.why, woken)
    return woken


cdef Consumer *look_limited(Line *line, int64_t now, Consumer *asking, Consumer *woken) noexcept nogil:
    # look at a line with resources: if it has a batch, its consumers wait for their turn
    cdef BatchPlan plan
    if line.idle_count == 0:
        return woken
    make_plan(line, now, &plan)
    if plan.count == 0:
        return watch_or_end(line, plan.wake_ns, asking, False, woken)
    enlist(line)
    return woken


cdef Consumer *grant_next(Consumer *consumer, int64_t now, Consumer *woken) noexcept nogil:
    # the consumer whose turn it is gets a batch, if there still is one
    cdef Line *line = consumer.line
    cdef BatchPlan plan
    cdef Request *batch
    make_plan(line, now, &plan)
    batch = line.cut(line, now, &plan) if plan.count else NULL
    if batch == NULL:
        return watch_or_end(line, plan.wake_ns, NULL, False, woken)
    woken = give(consumer, batch, plan.why, woken)
    line.passed_since = line.dispatcher.virtual_time
    line_touch(line)  # the remaining requests may be another batch
    return woken


cdef Consumer *dispatcher_decide(Dispatcher *self, int64_t now, Consumer *asking, bint by_front) noexcept nogil:
    cdef Consumer *woken = NULL
    cdef Consumer *consumer
    cdef Line *line
    while True:
        while self.touched != NULL:
            line = self.touched
            self.touched = line.next_touched
            line.touched = False
            if self.limited:
                woken = look_limited(line, now, asking, woken)
            else:
                woken = look(line, now, asking, by_front, woken)
        consumer = best_lacking(self)
        if consumer == NULL:
            return woken
        woken = grant_next(consumer, now, woken)
