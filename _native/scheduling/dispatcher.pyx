"""The dispatcher: which idle instance gets which batch, and when.

Instances that have nothing to do wait in lines, each as a *seat*. A line is where batches come from: all instances of
a stateless model share one, an instance whose slots hold sequences has its own. Whenever a request has come or left, a
seat asks, time has passed or resources have been given back, the lines that this is about are *touched*, and
`dispatcher_decide` gives batches to idle seats until no line has both. So nothing that anybody does can leave a request
beside an idle instance that may take it: there is no wake-up that could go to the wrong one or be used up.

Resources (the rate limiter) are granted here, before a seat is chosen: a line whose idle seats all lack some is put on
a list, and of all lines on it the seat with the smallest turn goes first as soon as its resources are free. One whose
resources are not free is passed over, so it never keeps those back that need others; one that needs much of a resource
can therefore wait long while others share it. An execution costs a claim as many turns as its priority is, so claims
that always have work execute in inverse proportion to their priorities. Who had no work for a while begins at the turn
that the others have come to, and so neither makes up for it nor waits for them.

A line in which requests wait for more of them to come has to be looked at when that is no longer worth while: one idle
seat watches the clock for it (`Line.watcher`), or the loop does.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from _native.list cimport list_append, list_prepend, list_remove
from _native.request.request cimport Request
from _native.scheduling.policy cimport NEVER, Plan
from _native.threads cimport mutex_destroy, mutex_init


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
    claim.held = sign > 0


cdef void grant(Dispatcher *self, Claim *claim) noexcept nogil:
    move(claim, 1)
    self.turn = max(self.turn, claim.turn)
    claim.turn += claim.priority


cdef void claim_give(Claim *claim) noexcept nogil:
    if claim.held:
        move(claim, -1)


cdef inline uint64_t turn_of(const Seat *seat) noexcept nogil:
    return seat.claim.turn if seat.claim != NULL else 0


cdef Seat *best_of(const Line *line) noexcept nogil:
    # the idle seat that goes first of those that can execute now; NULL: none can
    cdef Seat *seat = line.idle.first
    cdef Seat *best = NULL
    while seat != NULL:
        if (seat.claim == NULL or is_free(seat.claim)) and (best == NULL or turn_of(seat) < turn_of(best)):
            best = seat
        seat = seat.next
    return best


cdef Seat *best_lacking(const Dispatcher *self) noexcept nogil:
    # the same over all lines that lack resources
    cdef const Line *line = self.lacking.first
    cdef Seat *best = NULL
    cdef Seat *seat
    while line != NULL:
        seat = best_of(line)
        if seat != NULL and (best == NULL or turn_of(seat) < turn_of(best)):
            best = seat
        line = line.next
    return best


cdef void enlist(Line *line) noexcept nogil:
    # it has a batch, and waits for the resources from now on
    cdef Seat *seat = line.idle.first
    if line.lacking:
        return
    line.lacking = True
    list_append(&line.dispatcher.lacking, line)
    while seat != NULL:
        if seat.claim != NULL:
            seat.claim.turn = max(seat.claim.turn, line.dispatcher.turn)
        seat = seat.next


cdef void delist(Line *line) noexcept nogil:
    if line.lacking:
        line.lacking = False
        list_remove(&line.dispatcher.lacking, line)


# ---------------------------------------------------------------------------------------------------------------------
# Seats

cdef void seat_ask(Seat *seat, Line *line) noexcept nogil:
    if seat.claim != NULL:
        claim_give(seat.claim)
    seat.line = line
    seat.state = SEAT_IDLE
    seat.watch_ns = NEVER
    list_prepend(&line.idle, seat)
    line.idle_count += 1
    if line.lacking and seat.claim != NULL:
        seat.claim.turn = max(seat.claim.turn, line.dispatcher.turn)
    line_touch(line)


cdef inline void stand_up(Seat *seat) noexcept nogil:
    # it is idle no longer
    cdef Line *line = seat.line
    list_remove(&line.idle, seat)
    line.idle_count -= 1
    if line.watcher == seat:
        line.watcher = NULL
        line.watched_ns = NEVER
    seat.watch_ns = NEVER
    if line.idle_count == 0:
        line.watched_ns = NEVER  # who asks next looks himself
        delist(line)


cdef void seat_watched(Seat *seat) noexcept nogil:
    seat.watch_ns = NEVER
    if seat.line.watcher == seat:
        seat.line.watcher = NULL
        seat.line.watched_ns = NEVER
    line_touch(seat.line)


cdef void seat_call(Seat *seat, Given given) noexcept nogil:
    if seat.state == SEAT_IDLE:
        stand_up(seat)
        line_touch(seat.line)  # somebody else may have to watch
    seat.state = SEAT_CALLED
    seat.given = given


cdef inline Seat *tell(Seat *called, Seat *seat) noexcept nogil:
    # the chain with this one
    if seat.told:
        return called
    seat.told = True
    seat.next_called = called
    return seat


# ---------------------------------------------------------------------------------------------------------------------
# Decisions

cdef Seat *give(Seat *seat, Request *batch, const char *why, Seat *called) noexcept nogil:
    stand_up(seat)
    if seat.claim != NULL:
        grant(seat.line.dispatcher, seat.claim)
    seat.state = SEAT_CALLED
    seat.given = GIVEN_BATCH
    seat.batch = batch
    seat.why = why
    return tell(called, seat)


cdef Seat *call_all(Line *line, Seat *called) noexcept nogil:
    # nothing will come any more
    cdef Seat *seat
    while line.idle.first != NULL:
        seat = line.idle.first
        stand_up(seat)
        seat.state = SEAT_CALLED
        seat.given = GIVEN_END
        called = tell(called, seat)
    return called


cdef inline bint is_asking(const Seat *asking, const Line *line) noexcept nogil:
    return asking != NULL and asking.state == SEAT_IDLE and asking.line == line


cdef Seat *ready_seat(Line *line, Seat *asking, Seat **called) noexcept nogil:
    # an idle seat of a line without resources, preferably one that is awake; those that are found not to be ready are
    # called, to see why
    cdef Seat *seat
    if is_asking(asking, line):
        return asking
    while line.idle_count:
        seat = line.watcher if line.watcher != NULL else line.idle.first
        if seat.ready == NULL or seat.ready(seat):
            return seat
        stand_up(seat)
        seat.state = SEAT_CALLED
        seat.given = GIVEN_BACK
        called[0] = tell(called[0], seat)
    return NULL


cdef Seat *watch(Line *line, int64_t wake_ns, Seat *asking, bint by_loop, Seat *called) noexcept nogil:
    # have somebody look at that time, or before
    cdef Seat *seat
    if wake_ns == NEVER or line.idle_count == 0 or line.watched_ns <= wake_ns:
        return called
    line.watched_ns = wake_ns
    if is_asking(asking, line) and not (by_loop and asking.ready != NULL):
        seat = asking
    elif line.watcher != NULL:
        seat = line.watcher
    else:
        seat = line.idle.first
        if by_loop and seat.ready != NULL:
            return called
    if line.watcher != NULL:
        line.watcher.watch_ns = NEVER
    line.watcher = seat
    seat.watch_ns = wake_ns
    return called if seat == asking else tell(called, seat)


cdef Seat *settle(Line *line, int64_t wake_ns, Seat *asking, bint by_loop, Seat *called) noexcept nogil:
    # there is no batch in the line
    delist(line)
    if line.over:
        return call_all(line, called)
    return watch(line, wake_ns, asking, by_loop, called)


cdef inline void make_plan(Line *line, int64_t now, Plan *plan) noexcept nogil:
    # for an idle seat
    line.beside = line.idle_count - 1
    line.plan(line, now, plan)


cdef Seat *look(Line *line, int64_t now, Seat *asking, bint by_loop, Seat *called) noexcept nogil:
    # at a line without resources: give what there is
    cdef Plan plan
    cdef Request *batch
    cdef Seat *seat
    while line.idle_count:
        make_plan(line, now, &plan)
        if plan.count == 0:
            return settle(line, plan.wake_ns, asking, by_loop, called)
        seat = ready_seat(line, asking, &called)
        if seat == NULL:
            break
        batch = line.cut(line, now, &plan)
        if batch == NULL:
            return settle(line, plan.wake_ns, asking, by_loop, called)
        called = give(seat, batch, plan.why, called)
    return called


cdef Seat *look_limited(Line *line, int64_t now, Seat *asking, Seat *called) noexcept nogil:
    # the same where there are resources: its seats wait for their turn if there is something to give
    cdef Plan plan
    if line.idle_count == 0:
        return called
    make_plan(line, now, &plan)
    if plan.count == 0:
        return settle(line, plan.wake_ns, asking, False, called)
    enlist(line)
    return called


cdef Seat *grant_next(Seat *seat, int64_t now, Seat *called) noexcept nogil:
    # the seat whose turn it is gets a batch, if there still is one
    cdef Line *line = seat.line
    cdef Plan plan
    cdef Request *batch
    make_plan(line, now, &plan)
    batch = line.cut(line, now, &plan) if plan.count else NULL
    if batch == NULL:
        return settle(line, plan.wake_ns, NULL, False, called)
    called = give(seat, batch, plan.why, called)
    line_touch(line)  # what is left may be another one
    return called


cdef Seat *dispatcher_decide(Dispatcher *self, int64_t now, Seat *asking, bint by_loop) noexcept nogil:
    cdef Seat *called = NULL
    cdef Seat *seat
    cdef Line *line
    while True:
        while self.touched != NULL:
            line = self.touched
            self.touched = line.next_touched
            line.touched = False
            if self.limited:
                called = look_limited(line, now, asking, called)
            else:
                called = look(line, now, asking, by_loop, called)
        seat = best_lacking(self)
        if seat == NULL:
            return called
        called = grant_next(seat, now, called)
