"""Submission: the one way in, for everything that asks a model: front doors, streams, and the server itself."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from _native.caching.coalescer cimport coalescer_enter
from _native.clock cimport now_ns
from _native.inference.accounting cimport account_failed
from _native.inference.binding cimport request_bind, request_decode, request_identify
from _native.inference.bridge cimport Bridge, bridge_return, bridge_watch
from _native.inference.request cimport (
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNIMPLEMENTED,
    STATUS_UNAVAILABLE,
    Request,
    request_fail,
)
from _native.inference.statistics cimport FAILURE_OTHER
from _native.inference.table cimport table_find, table_route
from _native.inference.timers cimport timers_have_room
from _native.memory.resource cimport SHARED_WITH_NOBODY, Block
from _native.scheduling.lane cimport LANE_CLOSED, LANE_FULL, PUSHED, Lane, Pushed
from _native.scheduling.order cimport order_enter, order_leave
from _native.scheduling.split cimport split_enter
from _native.text cimport format_text
from _native.transport.access cimport ALLOWED, Gate, Verdict, gate_model, gate_status, gate_text

cdef int64_t FOREVER = 0x7fffffffffffffff


cdef void submission_wake(void *context) noexcept nogil:
    cdef Submission *self = <Submission *>context
    cdef uint32_t i
    for i in range(self.touched_count):
        self.touched[i].scheduler.wake(self.touched[i])
    self.touched_count = 0


cdef inline void touch(Submission *self, Lane *lane) noexcept nogil:
    cdef uint32_t i
    for i in range(self.touched_count):
        if self.touched[i] == lane:
            return
    if self.touched_count == TOUCHED:
        submission_wake(self)
    self.touched[self.touched_count] = lane
    self.touched_count += 1


cdef bint prepare(Submission *self, Request *request, Block *block, const uint8_t *data, size_t size,
                  uint64_t caller) noexcept nogil:
    # decode, find the model, check; False: the request carries its error
    cdef Lane *lane
    cdef int status = STATUS_OK
    cdef char *details = NULL
    if not request_decode(request, block, data, size):
        return False
    if self.gate != NULL and caller != CALLER_SERVER and not may_use(self.gate, request, caller):
        return False
    lane = table_find(self.table, request.message.model_name, request.message.model_version, &status, &details)
    if lane == NULL:
        lane = find_by_sequence(self, request, &status, &details)
        if lane == NULL:
            request_fail(request, status, details)
            return False
    request.lane = lane
    if request.single and lane.signature.decoupled and not lane.signature.single_answers:
        request_fail(request, STATUS_UNIMPLEMENTED, format_text(
            "ModelInfer RPC doesn't support models with decoupled transaction policy: ask model '%s' by "
            "ModelStreamInfer", lane.signature.name.data))
        return False
    return request_bind(request, &lane.signature, &self.regions)


cdef Lane *find_by_sequence(Submission *self, Request *request, int *status, char **details) noexcept nogil:
    # where what the table says depends on it
    if status[0] != STATUS_OK:
        return NULL
    request_identify(request)
    return table_route(self.table, request.message.model_name, request.message.model_version, &request.correlation,
                       request.sequence_start, status, details)


cdef bint may_use(const Gate *gate, Request *request, uint64_t caller) noexcept nogil:
    cdef Verdict verdict = gate_model(gate, caller, request.message.model_name)
    if verdict != ALLOWED:
        request_fail(request, gate_status(gate, verdict), gate_text(gate, verdict, 0, request.message.model_name))
    return verdict == ALLOWED


cdef inline void give_back(Request *request) noexcept nogil:
    # it carries its error
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


cdef void submit_message(Submission *self, Request *request, Block *block, const uint8_t *data, size_t size,
                         int64_t timeout_ns, uint64_t caller) noexcept nogil:
    cdef int64_t now = now_ns()
    request.bridge = self.bridge
    request.arrived_ns = now
    if caller != CALLER_SERVER and self.max_inflight and self.bridge.in_house >= self.max_inflight:
        request.block = block
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Exceeds maximum queue size: the server has %u requests in the house, which is its limit",
            self.bridge.in_house))
        request.response.reason = "SERVER_FULL"
        give_back(request)
        return
    request.admitted = True
    self.bridge.in_house += 1
    if not prepare(self, request, block, data, size, caller):
        give_back(request)
        return
    if timeout_ns >= 0:
        request.deadline_ns = now + timeout_ns if timeout_ns < FOREVER - now else FOREVER
    submit_request(self, request)


cdef bint is_own(const Request *request) noexcept nogil:
    # no client can change it any more, or waits for a result in its memory: it may be compared with others
    cdef uint32_t i
    cdef const Block *block
    for i in range(request.signature.input_count):
        block = request.inputs[i].block if request.inputs[i].present else NULL
        if block != NULL and block.sharing != SHARED_WITH_NOBODY:
            return False
    return request.placements == NULL


cdef void submit_request(Submission *self, Request *request) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    cdef Request *work
    request.bridge = self.bridge
    if request.arrived_ns == 0:
        request.arrived_ns = now_ns()
    request.queued_ns = request.arrived_ns
    if not timers_have_room(&self.bridge.timers):
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        give_back(request)
        return
    if (lane.coalesces or lane.caches) and not request.rehearsed and is_own(request):
        work = coalescer_enter(&self.coalescer, request)
        if work != request and request.deadline_ns:
            bridge_watch(self.bridge, request)
        if work == NULL:
            return
        request = work
        request.bridge = self.bridge
        request.queued_ns = request.arrived_ns
    submit_work(self, request)


cdef void submit_work(Submission *self, Request *request) noexcept nogil:
    cdef const Lane *lane = <const Lane *>request.lane
    if lane.signature.splits and request.rows > lane.signature.max_batch_size:
        push_parts(self, request)
    else:
        push(self, request)


cdef void push_parts(Submission *self, Request *whole) noexcept nogil:
    cdef Request *part = split_enter(whole)
    cdef Request *following
    if part == NULL:
        request_fail(whole, STATUS_RESOURCE_EXHAUSTED, NULL)
        give_back(whole)
        return
    if whole.deadline_ns:
        bridge_watch(self.bridge, whole)
    while part != NULL:
        following = part.next
        part.bridge = self.bridge
        part.queued_ns = part.arrived_ns
        push(self, part)
        part = following


cdef void push(Submission *self, Request *request) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    cdef Pushed pushed
    if lane.order != NULL and not order_enter(lane.order, request):
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        give_back(request)
        return
    pushed = lane.scheduler.push(lane, request)
    if pushed != PUSHED:
        refuse(request, pushed)
        give_back(request)
        return
    if request.deadline_ns or request.expires_ns:
        bridge_watch(self.bridge, request)
    touch(self, lane)


cdef void refuse(Request *request, Pushed pushed) noexcept nogil:
    # the lane did not take it
    cdef Lane *lane = <Lane *>request.lane
    if request.turn != NULL:
        order_leave(request)
    if pushed == LANE_FULL:
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Exceeds maximum queue size: model '%s' version %s has %u requests waiting, which is its limit",
            request.signature.name.data, request.signature.version_text.data, lane.max_queue))
        request.response.reason = "QUEUE_FULL"
    elif pushed == LANE_CLOSED:
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Request for unknown model: '%s' version %s is not at ready state",
            request.signature.name.data, request.signature.version_text.data))
    account_failed(request, now_ns(), FAILURE_OTHER)
