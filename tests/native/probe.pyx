"""Schedulers with time as an argument: the native code without threads, sockets and clocks."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free

from inferd._native.assertion cimport CHECKED as ASSERTED
from inferd._native.atomic cimport fetch_add32
from inferd._native.protobuf.codec cimport Str
from inferd._native.request.lane cimport LANE_CLOSED, LANE_FULL, LANE_REFUSED, PUSHED, Pushed
from inferd._native.request.life cimport request_move
from inferd._native.request.request cimport (
    REQUEST_QUEUED,
    REQUEST_TAKEN,
    Correlation,
    Request,
    request_free,
    request_new,
    request_reserve,
    terms_begin,
    terms_limit,
)
from inferd._native.scheduling.adaptive cimport predictor_gap
from inferd._native.scheduling.dispatcher cimport (
    CONSUMER_AWAY,
    CONSUMER_IDLE,
    CONSUMER_WOKEN,
    GIVEN_END,
    Claim,
    Consumer,
    ResourcePool,
    claim_give,
    consumer_ask,
    consumer_wake,
    consumer_watched,
    dispatcher_decide,
    line_touch,
)
from inferd._native.scheduling.limiter cimport ClaimHandle
from inferd._native.scheduling.policy cimport NEVER as NEVER_NS, BatchPlan
from inferd._native.scheduling.queue cimport (
    Queue,
    QueueLane,
    queue_is_due,
    queue_put,
    queue_refuse,
    queue_take_out,
    queue_yield,
)
from inferd._native.scheduling.waking cimport consumer_clear, consumer_init
from inferd._native.sequences.batch cimport slots_cut, slots_plan
from inferd._native.sequences.entry cimport slots_push
from inferd._native.sequences.sequencer cimport SequenceLane
from inferd._native.sequences.slots cimport (
    Slots,
    slots_again,
    slots_close,
    slots_done,
    slots_evict,
    slots_expire,
    slots_leave,
    slots_remove,
    slots_request_done,
)
from inferd._native.timers cimport Timer, TimersHandle, timers_clear, timers_due, timers_have_room, timers_set
from inferd._native.transport.call_state cimport Receiving, ResponseState, receiving_move, response_move

NEVER = NEVER_NS
CHECKED = bool(ASSERTED)


def move_receiving(before: int, after: int) -> int:
    """Move the receiving side of a call; where it is then."""
    cdef Receiving state = <Receiving><int>before
    receiving_move(&state, <Receiving><int>after)
    return <int>state


def move_response(before: int, after: int) -> int:
    """Move the response of a call; where it is then."""
    cdef ResponseState state = <ResponseState><int>before
    response_move(&state, <ResponseState><int>after)
    return <int>state


cdef class QueueProbe:
    """A queue whose requests are numbers of rows of one input "x" of any width.

    Args:
        spec: an inferd.backends.api.ModelSpec with that input.
        max_queue, held, limiter: as for QueueLane.
    """

    cdef QueueLane handle
    cdef BatchPlan plan
    cdef TimersHandle timers
    cdef dict requests       # tag -> address of what is queued
    cdef readonly list ousted    # tags of those that the last push has made leave, as they waited

    def __init__(self, spec, *, max_queue: int = 0, held: int = 0, limiter=None):
        self.handle = QueueLane(spec, 1, max_queue=max_queue, held=held, limiter=limiter)
        self.timers = TimersHandle()
        self.requests = {}
        self.ousted = []

    def __dealloc__(self):
        cdef Request *request
        for address in self.requests.values() if self.requests is not None else ():
            request = <Request *><size_t>address
            if request.state == REQUEST_QUEUED:
                request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)
            request_free(request)

    cdef Request *forget(self, int tag) except NULL:
        cdef Request *request = <Request *><size_t>self.requests.pop(tag)
        timers_clear(&self.timers.timers, &request.timer)
        return request

    cdef list forget_all(self, Request *request):
        # the tags of a chain of requests that have been taken
        cdef Request *following
        taken = []
        while request != NULL:
            following = request.next
            if request.state != REQUEST_TAKEN:
                raise AssertionError("a request was taken that does not know it")
            taken.append(<int>request.id.size)
            request_free(self.forget(<int>request.id.size))
            request = following
        return taken

    def push(self, tag: int, rows: int, now: int, *, priority: int = 0, timeout_us: int = 0, width: int = 1,
             deadline: int = 0, client: int = 0):
        """Queue the request `tag` at the time `now`, in nanoseconds; why it was refused, None when it was not."""
        cdef Request *request = request_new()
        cdef Request *ousted
        cdef uint32_t level = 0
        cdef Pushed pushed
        if request == NULL or not timers_have_room(&self.timers.timers) or not request_reserve(
                request, &self.handle.lane.signature):
            raise MemoryError
        request.inputs[0].present = True
        request.inputs[0].rank = 2
        request.inputs[0].shape[0] = rows
        request.inputs[0].shape[1] = width
        request.rows = rows
        terms_begin(&request.terms, now)
        request.arrived_ns = request.queued_ns = now
        request.terms.priority = priority
        request.terms.timeout_us = timeout_us
        if deadline:
            terms_limit(&request.terms, now, deadline - now)
        request.origin.client = client
        pushed = queue_put(self.handle.queue(), request, &level, &ousted)
        self.ousted = self.forget_all(ousted)
        if pushed == LANE_REFUSED:
            queue_refuse(self.handle.queue(), request, level)
        if pushed != PUSHED:
            text = (
                "closed" if pushed == LANE_CLOSED else
                "lane full" if pushed == LANE_FULL else
                request.response.details.decode()
            )
            request_free(request)
            return text
        self.requests[tag] = <size_t>request
        request.id.size = tag
        if request.expires_ns:
            timers_set(&self.timers.timers, &request.timer, request.expires_ns)
            request.timer.owner = request
        return None

    def remove(self, tag: int) -> bool:
        """The client of this request has gone; False: an instance has it."""
        if tag not in self.requests:
            return False
        if not queue_take_out(self.handle.queue(), <Request *><size_t>self.requests[tag]):
            return False
        request_free(self.forget(tag))
        return True

    def expire(self, now: int) -> list[int]:
        """What the loop does when timers are due: the requests that are refused because their time is over."""
        cdef Timer *timer = timers_due(&self.timers.timers, now)
        cdef Request *request
        refused = []
        while timer != NULL:
            request = <Request *>timer.owner
            if request.yields:
                queue_yield(self.handle.queue(), request)
            elif queue_take_out(self.handle.queue(), request):
                refused.append(<int>request.id.size)
                request_free(self.forget(<int>request.id.size))
            timer = timers_due(&self.timers.timers, now)
        return refused

    def executed(self, rows: int, ns: int) -> None:
        """An instance has executed a batch of so many rows within so many nanoseconds."""
        if self.handle.lane.learn != NULL:
            self.handle.lane.learn(self.handle.lane, rows, ns)

    @property
    def predictor(self):
        """What has been learnt."""
        return self.handle.predictor()

    def gap(self, count: int) -> int:
        """How long the next request takes to come, as it has learnt, while so many wait."""
        return predictor_gap(&self.handle.queue().predictor, count)

    def take(self, now: int, *, idle: int = 0) -> list[int]:
        """What an instance that asks at this time gets, while so many others wait; nothing when it has to wait."""
        cdef Queue *queue = self.handle.queue()
        cdef Request *request = NULL
        queue.line.beside = idle
        queue.line.plan(&queue.line, now, &self.plan)
        if self.plan.count:
            request = queue.line.cut(&queue.line, now, &self.plan)
        return self.forget_all(request)

    @property
    def wake(self) -> tuple[int, int]:
        """After `take` had nothing: when to ask again at the latest, and the rows at which to ask earlier."""
        return (self.plan.wake_ns, self.plan.wake_rows)

    @property
    def why(self) -> str:
        """Why what was taken last was a batch."""
        return self.plan.why.decode() if self.plan.why != NULL else ""

    @property
    def pending(self) -> list[int]:
        """What waits, in the order of service."""
        cdef Request *request = self.handle.queue().levels.first
        waiting = []
        while request != NULL:
            waiting.append(<int>request.id.size)
            request = request.next
        return waiting

    def close(self) -> None:
        """Refuse further requests; what waits goes without delay."""
        self.handle.queue().closed = True


@cython.no_gc
cdef class DispatcherProbe:
    """The dispatcher of some queues, or each queue with its own, and consumers in them.

    Everything that happens takes the time and returns what the dispatcher decided: (consumer, tags) for each consumer
    that has been called, with None instead of tags for the end. A consumer that has been called is away until it asks
    again.

    Args:
        queues: whose dispatcher it is; several only with a limiter.
        consumers: (number of the queue, claim or None) of each.
    """

    cdef list queues
    cdef list claims
    cdef list lines          # of each consumer: the number of its queue
    cdef Consumer *consumers
    cdef int count

    def __init__(self, queues, consumers):
        cdef ClaimHandle claim
        cdef int i
        self.queues = list(queues)
        self.lines = [line for line, _ in consumers]
        self.claims = [claim for _, claim in consumers]
        self.count = len(self.lines)
        self.consumers = <Consumer *>calloc(self.count, sizeof(Consumer))
        if self.consumers == NULL:
            raise MemoryError
        for i in range(self.count):
            consumer_init(&self.consumers[i])
            self.consumers[i].index = i
            claim = self.claims[i]
            if claim is not None:
                self.consumers[i].claim = &claim.claim

    def __dealloc__(self):
        cdef int i
        for i in range(self.count):  # nobody waits in a queue that is freed
            if self.consumers[i].state == CONSUMER_IDLE:
                consumer_wake(&self.consumers[i], GIVEN_END)
            if self.consumers[i].claim != NULL:
                claim_give(self.consumers[i].claim)
        if self.count:
            self.decide(0, NULL)
        for i in range(self.count):
            consumer_clear(&self.consumers[i])
        free(self.consumers)

    cdef Queue *queue_of(self, int line):
        return (<QueueProbe>self.queues[line]).handle.queue()

    cdef list decide(self, int64_t now, Consumer *asking):
        cdef Consumer *called
        cdef Consumer *following
        out = []
        for line in range(len(self.queues)):
            called = dispatcher_decide(self.queue_of(line).dispatcher, now, asking, False)
            while called != NULL:
                following = called.next_woken
                called.chained = False
                if called.state == CONSUMER_WOKEN:
                    out.append((<int>called.index, self.fetch(called)))
                called = following
        return sorted(out, key=lambda each: each[0])

    cdef object fetch(self, Consumer *consumer):
        cdef Request *batch = consumer.batch
        consumer.state = CONSUMER_AWAY
        consumer.batch = NULL
        if consumer.given == GIVEN_END:
            return None
        return (<QueueProbe>self.queues[self.lines[consumer.index]]).forget_all(batch)

    def ask(self, consumer: int, now: int):
        """The instance of this consumer has nothing to do any more."""
        if self.consumers[consumer].retired:
            raise ValueError("it has been retired")
        consumer_ask(&self.consumers[consumer], &self.queue_of(self.lines[consumer]).line)
        return self.decide(now, &self.consumers[consumer])

    def wake(self, line: int, now: int):
        """Requests have been pushed into this queue."""
        if queue_is_due(self.queue_of(line)):
            line_touch(&self.queue_of(line).line)
        return self.decide(now, NULL)

    def look(self, line: int, now: int):
        """Requests have left this queue, it has been closed, or others wait behind others."""
        line_touch(&self.queue_of(line).line)
        return self.decide(now, NULL)

    def time_passes(self, now: int):
        """The threads of the consumers that watch the clock look, if it is time."""
        out = []
        for consumer in range(self.count):
            if self.consumers[consumer].state == CONSUMER_IDLE and self.consumers[consumer].watch_ns <= now:
                consumer_watched(&self.consumers[consumer])
                out += self.decide(now, &self.consumers[consumer])
        return sorted(out, key=lambda each: each[0])

    def retire(self, consumer: int, now: int):
        """The instance is to end; it is called if it waits."""
        called = []
        self.consumers[consumer].retired = True
        if self.consumers[consumer].state == CONSUMER_IDLE:
            consumer_wake(&self.consumers[consumer], GIVEN_END)
            called = [(consumer, self.fetch(&self.consumers[consumer]))]
        return called + self.decide(now, NULL)

    def resize(self, number: int, total: int, now: int):
        """There is more or less of the resource that all claims need as this one of theirs."""
        cdef ResourcePool *pool = (<ClaimHandle>self.claims[0]).claim.needs[number].pool
        pool.free += total - pool.total
        pool.total = total
        return self.decide(now, NULL)

    @property
    def idle(self) -> list[int]:
        """Consumers that wait."""
        return [consumer for consumer in range(self.count) if self.consumers[consumer].state == CONSUMER_IDLE]

    @property
    def overdue(self) -> int | None:
        """The consumer for which others leave resources free, as it was decided last."""
        cdef const Claim *claim = self.queue_of(0).dispatcher.overdue if self.queues else NULL
        for consumer in range(self.count):
            if claim != NULL and self.consumers[consumer].claim == claim:
                return consumer
        return None

    @property
    def watched(self) -> dict[int, int]:
        """For each queue for which a consumer watches the clock: until when."""
        return {
            self.lines[consumer]: self.consumers[consumer].watch_ns
            for consumer in range(self.count)
            if self.consumers[consumer].state == CONSUMER_IDLE and self.consumers[consumer].watch_ns != NEVER_NS
        }


cdef class TimersProbe:
    """Timers told apart by numbers from 0."""

    cdef TimersHandle timers
    cdef Timer *each
    cdef int count

    def __cinit__(self, count: int):
        self.count = count
        self.timers = TimersHandle()
        self.each = <Timer *>calloc(count, sizeof(Timer))
        if self.each == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.each)

    def set(self, number: int, due: int) -> None:
        """Set it, or move it when it is set."""
        if not timers_set(&self.timers.timers, &self.each[number], due):
            raise MemoryError

    def clear(self, number: int) -> None:
        """Take it out if it is in."""
        timers_clear(&self.timers.timers, &self.each[number])

    def due(self, now: int) -> list[int]:
        """The numbers of the timers that are due, in order; they leave the heap."""
        cdef Timer *timer = timers_due(&self.timers.timers, now)
        found = []
        while timer != NULL:
            found.append(timer - self.each)
            timer = timers_due(&self.timers.timers, now)
        return found


cdef class SlotsProbe:
    """The policy of sequence batching, for requests that have no tensors.

    Requests are known by the numbers that the caller gives them, from 1.
    """

    cdef SequenceLane handle
    cdef Slots *slots
    cdef dict taken          # number → address of what an instance has
    cdef dict waiting
    cdef dict texts          # name → the bytes of an id that is a text
    cdef int64_t notices

    def __init__(self, spec):
        self.handle = SequenceLane(spec, 1)
        self.slots = &self.handle.sequencer().slots
        self.taken = {}
        self.waiting = {}
        self.texts = {}

    cdef int name(self, int64_t sequence, Correlation *out) except -1:
        # 0: no id; below 0: a text, and not a number; thousands are the caller's
        cdef bytes text
        out.given = sequence != 0
        out.owner = abs(sequence) // 1000
        if sequence >= 0:
            out.number = abs(sequence) % 1000
        else:
            text = self.texts.setdefault(sequence, b"%d" % (-sequence % 1000))
            out.text = Str(<const char *>text, len(text))
        return 0

    cdef int64_t name_of(self, const Correlation *id) except? 0:
        if id.text.data != NULL:
            return -int(id.text.data[:id.text.size]) - 1000 * <int64_t>id.owner
        return <int64_t>(id.number + 1000 * id.owner)

    def push(self, number: int, sequence: int, now: int, *, start: bool = False, end: bool = False, rows: int = 1,
             timeout_us: int = 0, deadline: int = 0, stream: int = 0) -> str:
        """Queue a request; "" when it was taken in, else why not."""
        cdef Request *request = request_new()
        cdef Pushed pushed
        request_reserve(request, &self.handle.lane.signature)
        terms_begin(&request.terms, now)
        request.terms.priority = number
        self.name(sequence, &request.correlation)
        request.origin.stream = stream
        request.sequence_start = start
        request.sequence_end = end
        request.rows = rows
        request.terms.timeout_us = timeout_us
        if deadline:
            terms_limit(&request.terms, now, deadline - now)
        request.arrived_ns = request.queued_ns = now
        pushed = slots_push(self.slots, request, now)
        if pushed == PUSHED:
            self.waiting[number] = <uintptr_t>request
            return ""
        text = request.response.details.decode() if request.response.details != NULL else "closed or full"
        request_free(request)
        return text

    def take(self, instance: int, now: int) -> tuple[list[tuple[int, int, int]], int]:
        """A batch as (number, sequence, end reason) for each row, and when to ask again.

        The number of an idle row is 0; requests by which the model hears of an end count from -1 downwards.
        """
        cdef BatchPlan plan
        cdef Request *request = NULL
        cdef Request *following
        slots_plan(self.slots, instance, now, &plan)
        if plan.count:
            plan.wake_ns = NEVER_NS
            request = slots_cut(self.slots, instance, now, &plan)
        rows = []
        while request != NULL:
            following = request.next
            if request.sequenced.null:
                rows.append((0, 0, 0))
                request_free(request)
            else:
                self.notices += request.sequenced.unasked
                number = -self.notices if request.sequenced.unasked else <int64_t>request.terms.priority
                rows.append((number, self.name_of(&request.correlation), request.sequenced.end_reason))
                self.taken[number] = <uintptr_t>request
                self.waiting.pop(number, None)
            request = following
        return rows, plan.wake_ns

    def request_done(self, number: int, now: int) -> None:
        """An instance has answered the request."""
        cdef Request *request = <Request *><uintptr_t>self.taken.pop(number)
        slots_request_done(self.slots, request, now)
        if request.sequenced.unasked:
            fetch_add32(&self.handle.lane.in_flight, -1)
        request_free(request)

    def again(self, number: int, now: int) -> None:
        """An instance gives the request back to be run again."""
        self.waiting[number] = self.taken.pop(number)
        slots_again(self.slots, <Request *><uintptr_t>self.waiting[number], now)

    def remove(self, number: int, now: int) -> None:
        """Nobody waits for this request any more, which waits itself."""
        cdef Request *request = <Request *><uintptr_t>self.waiting.pop(number)
        if not slots_remove(self.slots, request, now):
            raise ValueError("the request does not wait")
        request_free(request)

    def expire(self, number: int, now: int) -> None:
        """The time of this request in the backlog is over."""
        slots_expire(self.slots, <Request *><uintptr_t>self.waiting[number], now)

    def expires(self, number: int) -> int:
        """When its time in the backlog is over; 0 when it is not limited."""
        return (<Request *><uintptr_t>self.waiting[number]).expires_ns

    def fallen(self) -> list[tuple[int, int]]:
        """(number, status) of what has failed in the lane since the last call."""
        cdef Request *request = self.slots.fallen
        cdef Request *following
        out = []
        self.slots.fallen = NULL
        while request != NULL:
            following = request.next
            out.append((request.terms.priority, request.response.status))
            self.waiting.pop(request.terms.priority, None)
            request_free(request)
            request = following
        return sorted(out)

    def evict(self, now: int) -> int:
        """End what has idled for too long; when to ask again."""
        return slots_evict(self.slots, now)

    def leave(self, stream: int, now: int) -> None:
        """A stream has ended."""
        slots_leave(self.slots, stream, now)

    def drain(self) -> None:
        """No further sequences."""
        self.handle.drain()

    def close(self, now: int) -> None:
        """No further requests."""
        slots_close(self.slots, now)

    def done(self, instance: int) -> bool:
        """Nothing will come for this instance any more."""
        return slots_done(self.slots, instance)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Sequences that live, those in the backlog, requests that wait, free slots."""
        return (self.slots.live, self.slots.backlog.count, self.slots.waiting, self.slots.vacant_count)
