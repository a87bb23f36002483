"""The bridge: responses and callbacks from every other thread to the front, which owns the sinks.

Instance threads append chains of responses, and write to an eventfd if the front has not been signalled yet. The front
calls each sink's `deliver`, and frees the request after its final response. A sink hears of the end at most once: by
the final response, by DEADLINE_EXCEEDED from the timer, or not at all if it has left (`bridge_abandon`). If a
model's responses must be in order (`inferd._native.request.order`), early ones wait here.

The front can itself read a descriptor through which another process sends (a watched descriptor). So no thread has to
wake only to wake the front.

Only the owner of a request may free it. The front owns a request before it is queued, after the lane has returned it,
and after its final response came over the bridge. In between the lane owns the request, then the instance.
"""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from posix.unistd cimport close, write

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport exchange32, fetch_add32, store32
from inferd._native.clock cimport now_ns
from inferd._native.front cimport PythonEvent, front_enter, front_leave, python_post, python_run, python_withdraw
from inferd._native.memory.resource cimport block_give
from inferd._native.refusal cimport refusal_count, refusal_denies, refusal_usual
from inferd._native.request.accounting cimport account_failed, account_response
from inferd._native.request.lane cimport Lane
from inferd._native.request.life cimport request_end
from inferd._native.request.order cimport OrderEntry, ResponseOrder, order_hold, order_is_due, order_leave, order_next
from inferd._native.request.record cimport Record, record_end, record_response
from inferd._native.request.request cimport (
    REQUEST_NEW,
    Request,
    Response,
    request_abandon,
    request_expired,
    request_free,
    response_fail,
    response_free,
    response_move,
)
from inferd._native.request.statistics cimport FAILURE_CANCELED, FAILURE_REJECTED
from inferd._native.status cimport STATUS_CANCELLED, STATUS_DEADLINE_EXCEEDED, STATUS_INTERNAL, STATUS_OK
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.threads cimport lock, mutex_destroy, mutex_init, unlock
from inferd._native.timers cimport Timer, TimersHandle, timers_clear, timers_set
from inferd._native.transport.io cimport Source, io_forget, io_watch
from inferd._native.transport.io_thread cimport IoThreads, io_delivers

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    static inline int inferd_eventfd(void) { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); }
    static inline int inferd_epoll_new(void) { return epoll_create1(EPOLL_CLOEXEC); }
    static inline int inferd_epoll(int poll_fd, int operation, int fd, void *what, int once) {
        struct epoll_event e = {.events = EPOLLIN | (once ? (uint32_t)EPOLLET : 0u), .data = {.ptr = what}};
        return epoll_ctl(poll_fd, operation, fd, &e);
    }
    static inline int inferd_epoll_add(int poll_fd, int fd, void *what, int once) {
        return inferd_epoll(poll_fd, EPOLL_CTL_ADD, fd, what, once);
    }
    static inline void inferd_epoll_again(int poll_fd, int fd, void *what) {
        inferd_epoll(poll_fd, EPOLL_CTL_MOD, fd, what, 1);
    }
    static inline void inferd_epoll_remove(int poll_fd, int fd) { epoll_ctl(poll_fd, EPOLL_CTL_DEL, fd, NULL); }
    /* What is ready now; NULL among it for the eventfd. */
    static inline int inferd_epoll_ready(int poll_fd, void **ready, int room) {
        struct epoll_event events[room];
        int count = epoll_wait(poll_fd, events, room, 0);
        for (int i = 0; i < count; i++) ready[i] = events[i].data.ptr;
        return count;
    }
    """
    int make_epoll "inferd_epoll_new"() nogil
    int epoll_add "inferd_epoll_add"(int poll_fd, int fd, void *what, bint once) nogil
    void epoll_again "inferd_epoll_again"(int poll_fd, int fd, void *what) nogil
    void epoll_remove "inferd_epoll_remove"(int poll_fd, int fd) nogil
    int epoll_ready "inferd_epoll_ready"(int poll_fd, void **ready, int room) nogil
    int make_eventfd "inferd_eventfd"() nogil


cdef enum:
    MOST_READY = 16          # descriptors that are read in a round

# ---------------------------------------------------------------------------------------------------------------------
# Deadlines

cdef bint bridge_watch(Bridge *bridge, Request *request) noexcept nogil:
    cdef int64_t due = request.expires_ns
    if not request.inner and (due == 0 or 0 < request.terms.deadline_ns < due):
        due = request.terms.deadline_ns
    if due == 0:
        return True
    request.timer.fire = time_is_over
    request.timer.owner = request
    return timers_set(bridge.timers, &request.timer, due)


cdef void time_is_over(Timer *timer, int64_t now) noexcept nogil:
    cdef Request *request = <Request *>timer.owner
    cdef Bridge *bridge = <Bridge *>request.bridge
    if not request.inner and 0 < request.terms.deadline_ns <= now:
        end_early(request, STATUS_DEADLINE_EXCEEDED, "Deadline Exceeded")
        drop_if_queued(request)
    elif has_waited_enough(request):
        reject(request, now)
    elif request.terms.deadline_ns and not request.inner:
        timers_set(bridge.timers, timer, request.terms.deadline_ns)  # the timer has left the heap, so there is room


# ---------------------------------------------------------------------------------------------------------------------
# The end of a request

cdef void end_early(Request *request, int status, const char *details) noexcept nogil:
    # deliver an error to the sink as the end of the request, although its executor has not finished
    if request.record != NULL:
        (<Record *>request.record).status = status
    request.deliver(request.sink, NULL, status, details)


cdef void bridge_signal(Bridge *bridge) noexcept nogil:
    cdef uint64_t one = 1
    if exchange32(&bridge.signalled, 1) == 0:
        write(bridge.event_fd, &one, sizeof(one))


cdef void bridge_put(Bridge *bridge, Response *first, Response *last) noexcept nogil:
    last.next = NULL
    lock(&bridge.guard)
    if bridge.tail == NULL:
        bridge.head = first
    else:
        bridge.tail.next = first
    bridge.tail = last
    unlock(&bridge.guard)


cdef void bridge_return(Bridge *bridge, Response *first, Response *last) noexcept nogil:
    bridge_put(bridge, first, last)
    bridge_signal(bridge)


cdef void bridge_promise(Bridge *bridge) noexcept nogil:
    if io_delivers() and not bridge.promised:
        bridge.promised = exchange32(&bridge.signalled, 1) == 0


cdef void keep_promise(void *promising) noexcept nogil:
    cdef Bridge *bridge = <Bridge *>promising
    if bridge.promised:
        bridge.promised = False
        deliver_all(bridge)


cdef void bridge_post(Bridge *bridge, PostedCallback *callback) noexcept nogil:
    callback.next = NULL
    lock(&bridge.guard)
    if bridge.last_callback == NULL:
        bridge.first_callback = callback
    else:
        bridge.last_callback.next = callback
    bridge.last_callback = callback
    unlock(&bridge.guard)
    bridge_signal(bridge)


cdef bint bridge_attach(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil:
    return epoll_add(bridge.poll_fd, descriptor.fd, descriptor, descriptor.once) == 0


cdef void bridge_look_again(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil:
    epoll_again(bridge.poll_fd, descriptor.fd, descriptor)


cdef void bridge_detach(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil:
    lock(&bridge.reading)
    epoll_remove(bridge.poll_fd, descriptor.fd)
    unlock(&bridge.reading)


cdef void read_all(Bridge *bridge) noexcept nogil:
    # Hold the lock from before epoll_wait on, so that no reported descriptor is detached before it is read.
    cdef void *ready[MOST_READY]
    cdef WatchedDescriptor *descriptor
    cdef int i
    lock(&bridge.reading)
    for i in range(epoll_ready(bridge.poll_fd, ready, MOST_READY)):
        descriptor = <WatchedDescriptor *>ready[i]
        if descriptor != NULL and not descriptor.read(descriptor):
            epoll_remove(bridge.poll_fd, descriptor.fd)
    unlock(&bridge.reading)


cdef void finish(Request *request) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    cdef int32_t before
    if request.record != NULL:
        record_end(request)
    if request.sequenced.sequence != NULL:
        lane.sequences.request_done(lane, request)
    if request.order_entry != NULL:
        order_leave(request)
    if request_end(request, &(<Bridge *>request.bridge).admitted_count):
        request_free(request)
    if lane != NULL:
        before = fetch_add32(&lane.in_flight, -1)
        assert_that(before > 0)


cdef void drop_if_queued(Request *request) noexcept nogil:
    # The sink has left. A request that an instance has taken comes back over the bridge, and is freed then.
    cdef Lane *lane = <Lane *>request.lane
    request.sink = NULL
    request_abandon(request)
    if request.order_entry != NULL and leave_order(request):
        return
    if request.wait != NULL:
        request.wait.leave(request)
        finish(request)
    elif lane != NULL and lane.scheduler.remove(lane, request):
        account_failed(request, now_ns(), FAILURE_CANCELED)
        finish(request)


cdef void bridge_abandon(Request *request) noexcept nogil:
    timers_clear((<Bridge *>request.bridge).timers, &request.timer)
    drop_if_queued(request)


cdef bint has_waited_enough(Request *request) noexcept nogil:
    # True: the request has waited too long, and belongs to the front. False: it may wait on, or an instance has it.
    cdef Lane *lane = <Lane *>request.lane
    if request.wait != NULL:
        return request.wait.expire != NULL and request.wait.expire(request)
    if lane.scheduler.expire == NULL:
        return lane.scheduler.remove(lane, request)
    return lane.scheduler.expire(lane, request)


cdef void reject(Request *request, int64_t now) noexcept nogil:
    if request.order_entry != NULL:
        leave_order(request)
    request_expired(request)
    account_failed(request, now, FAILURE_REJECTED)
    bridge_deliver(<Bridge *>request.bridge, &request.response)


cdef void deliver_all(Bridge *bridge) noexcept nogil:
    cdef Response *response
    cdef Response *following
    cdef PostedCallback *callback
    cdef PostedCallback *next_callback
    store32(&bridge.signalled, 0)  # before the lists are read, so that later responses signal again
    lock(&bridge.guard)
    response = bridge.head
    callback = bridge.first_callback
    bridge.head = NULL
    bridge.tail = NULL
    bridge.first_callback = NULL
    bridge.last_callback = NULL
    unlock(&bridge.guard)
    while callback != NULL:
        next_callback = callback.next
        callback.run(callback)
        callback = next_callback
    while response != NULL:
        following = response.next
        bridge_deliver(bridge, response)
        response = following
    after_round(bridge)


cdef inline void after_round(Bridge *bridge) noexcept nogil:
    # a delivery may have submitted further requests
    if bridge.after != NULL:
        bridge.after(bridge.after_context)


cdef void bridge_deliver(Bridge *bridge, Response *response) noexcept nogil:
    cdef OrderEntry *entry = <OrderEntry *>response.request.order_entry
    if entry == NULL:
        pass_on(bridge, response)
        return
    order_hold(entry, response)
    deliver_due(bridge, entry.order)


cdef void note_failed(Bridge *bridge, const Request *request, Response *response) noexcept nogil:
    # A request that is made to answer another one passes its refusal on to that, which is counted.
    cdef bint unseen = request.state == REQUEST_NEW
    if response.status != STATUS_CANCELLED:
        if unseen and not response.refusal:
            response.refusal = refusal_usual(response.status)
        if response.refusal and request.sink != NULL and not request.inner and not request.is_warmup:
            refusal_count(response.refusal)
    if unseen and not refusal_denies(response.refusal):  # the authorizer notes those
        if bridge.noted < <uint32_t>NOTED_REFUSALS:
            bridge.notes[bridge.noted].status = response.status
            bridge.notes[bridge.noted].details = format_text("%s", text_or_no_memory(response.details))
            bridge.noted += 1
        else:
            bridge.more_refused += 1


cdef void pass_on(Bridge *bridge, Response *response) noexcept nogil:
    cdef Request *request = response.request
    cdef bint final = response.final
    if takes_one(request) and not resolve_single(request, response):
        return
    if request.signature != NULL and request.signature.decoupled and request.lane != NULL and request.taken_ns:
        account_response(request, response)
    if request.record != NULL:
        record_response(request, response)
    if final:
        timers_clear(bridge.timers, &request.timer)
        if response.status != STATUS_OK:
            note_failed(bridge, request, response)
    if request.sink != NULL:
        request.deliver(request.sink, response, response.status, text_or_no_memory(response.details))
    if response != &request.response:
        response_free(response)
    if final:
        finish(request)


# ---------------------------------------------------------------------------------------------------------------------
# Sinks that take one response: the model may send several

cdef inline bint takes_one(const Request *request) noexcept nogil:
    return request.single or request.signature == NULL or not request.signature.decoupled


cdef char *too_many(const Request *request) noexcept nogil:
    return format_text("model '%s' has given more than one response, the request takes only one",
                       request.signature.name.data)


cdef bint resolve_single(Request *request, Response *response) noexcept nogil:
    # False: nothing is delivered yet, and this function has taken over the response
    if not response.final:
        hold(request, response)
        return False
    if request.held != NULL:
        if response.status == STATUS_OK and not response.empty:
            response_fail(response, STATUS_INTERNAL, too_many(request))
        elif response.status == STATUS_OK:
            response_move(response, request.held)
            request.held = NULL
    elif response.status == STATUS_OK and response.empty and request.single and not request.is_step:
        response_fail(response, STATUS_INTERNAL, format_text(
            "model '%s' has ended the request without a response", request.signature.name.data))
    return True


cdef void hold(Request *request, Response *response) noexcept nogil:
    # keep the first response until the next one comes
    if request.sink == NULL or response.empty:
        response_free(response)
        return
    if request.held == NULL:
        block_give(response.ack)  # the model may send the next response, which shows whether this is the only one
        response.ack = NULL
        request.held = response
        return
    if request.is_warmup:  # its sink waits until the model has finished
        if request.held.status == STATUS_OK:
            response_fail(request.held, STATUS_INTERNAL, too_many(request))
        response_free(response)
        return
    # The request ends with an error, and the model learns that further responses are discarded.
    if response.status == STATUS_OK:
        response_fail(response, STATUS_INTERNAL, too_many(request))
    end_early(request, response.status, text_or_no_memory(response.details))
    response_free(response)
    bridge_abandon(request)


# ---------------------------------------------------------------------------------------------------------------------
# Responses in order

cdef void deliver_due(Bridge *bridge, ResponseOrder *order) noexcept nogil:
    # A delivery may add requests to the order and remove others, so the next one is looked up after each.
    cdef Response *response = order_next(order)
    while response != NULL:
        pass_on(bridge, response)
        response = order_next(order)


cdef bint leave_order(Request *request) noexcept nogil:
    # The sink has left, so the responses of the request hold up no others. True: its final response was held here, so
    # the request has ended.
    cdef Bridge *bridge = <Bridge *>request.bridge
    cdef ResponseOrder *order = (<OrderEntry *>request.order_entry).order
    cdef Response *held = order_leave(request)
    cdef Response *following
    cdef bint over = False
    while held != NULL:
        following = held.next
        over = held.final
        pass_on(bridge, held)
        held = following
    # Responses to other requests are delivered in the next round, because the caller may not be ready for deliveries.
    # The lane must stay until then.
    if order_is_due(order) and not order.posted:
        order.posted = True
        order.callback.run = order_callback
        fetch_add32(&(<Lane *>order.lane).in_flight, 1)
        bridge_post(bridge, &order.callback)
    return over


cdef void order_callback(PostedCallback *callback) noexcept nogil:
    cdef ResponseOrder *order = <ResponseOrder *>callback
    cdef Lane *lane = <Lane *>order.lane
    order.posted = False
    deliver_due(<Bridge *>order.bridge, order)
    fetch_add32(&lane.in_flight, -1)


cdef void drain(Bridge *bridge) noexcept nogil:
    # the responses that watched descriptors bring need no signal, because they are delivered now
    store32(&bridge.signalled, 1)
    read_all(bridge)
    deliver_all(bridge)


cdef void deliver_ready(Source *source, uint32_t events) noexcept nogil:
    drain(<Bridge *>source.owner)


cdef void tell_watchers(void *context) noexcept nogil:
    # the end of a round of the I/O thread
    cdef Bridge *bridge = <Bridge *>context
    after_round(bridge)
    if bridge.watched or bridge.noted:
        python_post(&bridge.timers.python, &bridge.news)


cdef int tell_news(PythonEvent *event) except -1:
    cdef BridgeHandle handle = <BridgeHandle>event.owner
    front_leave()
    if handle.on_news is not None:
        handle.on_news()
    return 0


@cython.no_gc_clear  # __dealloc__ and other users of the bridge need the timers
cdef class BridgeHandle:
    """The bridge to one event loop.

    Register `event_fd` with `drain` and `timers.fd` with `expire` as readers of the event loop.
    """

    def __cinit__(self):
        mutex_init(&self.bridge.guard, NULL)
        mutex_init(&self.bridge.reading, NULL)
        self.bridge.event_fd = self.bridge.poll_fd = -1
        self.bridge.news.run = tell_news
        self.bridge.news.owner = <void *>self
        self.timers = TimersHandle()
        self.bridge.timers = &self.timers.timers
        self.bridge.event_fd = make_eventfd()
        self.bridge.poll_fd = make_epoll()
        if (self.bridge.event_fd < 0 or self.bridge.poll_fd < 0
                # edge-triggered, so that the eventfd need never be read
                or epoll_add(self.bridge.poll_fd, self.bridge.event_fd, NULL, True) < 0):
            raise OSError(errno, "cannot make the descriptors of the bridge")

    def __dealloc__(self):
        cdef uint32_t i
        if self.timers is not None:
            python_withdraw(&self.timers.timers.python, &self.bridge.news)
        for i in range(self.bridge.noted):
            free(self.bridge.notes[i].details)
        if self.bridge.event_fd >= 0:
            close(self.bridge.event_fd)
        if self.bridge.poll_fd >= 0:
            close(self.bridge.poll_fd)
        mutex_destroy(&self.bridge.reading)
        mutex_destroy(&self.bridge.guard)

    def take_refusals(self) -> tuple[list[tuple[int, str]], int]:
        """Requests that were refused before an instance took them: some as (status, text), and the number of others.

        Requests that were refused for lack of rights are not among them.
        """
        cdef RefusalNote notes[NOTED_REFUSALS]
        cdef uint32_t count, i
        cdef int64_t more
        cdef list out = []
        front_enter()
        memcpy(notes, self.bridge.notes, sizeof(notes))
        count, more = self.bridge.noted, self.bridge.more_refused
        self.bridge.noted = 0
        self.bridge.more_refused = 0
        front_leave()
        for i in range(count):
            out.append((notes[i].status, text_or_no_memory(notes[i].details).decode("utf-8", "replace")))
            free(notes[i].details)
        return (out, more)

    def watch(self, on: bool) -> None:
        """Set whether `on_news` is called after each delivery of an I/O thread."""
        front_enter()
        self.bridge.watched = on
        front_leave()

    def deliver_on(self, IoThreads io) -> None:
        """Let an I/O thread that does not run deliver; None: the event loop delivers again.

        This calls `on_hand_over`, which lets the event loop watch for `TimersHandle.hear` instead of the descriptors of
        the bridge and the timers, or the other way round.
        """
        if io is not None:
            self.source.fd = self.bridge.poll_fd
            self.source.owner = <void *>&self.bridge
            self.source.ready = deliver_ready
            io.io.host.deliver = keep_promise
            io.io.host.after = tell_watchers
            io.io.host.bridge = &self.bridge
            if not io_watch(&io.io, &self.source):
                raise OSError(errno, "cannot watch the bridge")
        elif self.io is not None:
            io_forget(&self.io.io, &self.source)
            self.io.io.host.deliver = self.io.io.host.after = NULL
        self.io = io
        if self.on_hand_over is not None:
            self.on_hand_over(io is not None)

    @property
    def admitted_count(self) -> int:
        """Requests that were admitted and have not ended: queued, in execution, or on their way back."""
        cdef uint32_t now
        front_enter()
        now = self.bridge.admitted_count
        front_leave()
        return now

    @property
    def event_fd(self) -> int:
        """Readable when requests have finished, or a watched descriptor is readable."""
        return self.bridge.poll_fd

    def drain(self) -> None:
        """Read the watched descriptors, and deliver the responses that have come."""
        drain(&self.bridge)
        python_run(&self.timers.timers.python)

    def expire(self) -> None:
        """Fire the timers that are due, for example those of deadlines."""
        self.timers.fire()
        after_round(&self.bridge)
