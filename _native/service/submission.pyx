"""Submission: the one entry for all requests for models: of front doors, streams, and the server itself."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp

from inferd._native.atomic cimport add_own, load32
from inferd._native.caching.coalescer cimport coalescer_enter, coalescer_settle
from inferd._native.clock cimport now_ns
from inferd._native.list cimport list_append, list_remove
from inferd._native.memory.resource cimport SHARED_WITH_NOBODY, Block
from inferd._native.protobuf.codec cimport (
    DECODE_OK,
    InferMessage,
    infer_decode,
    infer_message_add_parameters,
    infer_message_free,
    infer_message_init,
)
from inferd._native.refusal cimport REFUSAL_QUEUE_FULL, REFUSAL_SERVER_FULL
from inferd._native.request.accounting cimport account_failed
from inferd._native.request.bridge cimport Bridge, bridge_return, bridge_watch
from inferd._native.request.lane cimport LANE_CLOSED, LANE_FULL, PUSHED, Lane, Pushed
from inferd._native.request.life cimport request_admit, request_stop_waiting, request_wait
from inferd._native.request.order cimport order_enter, order_leave
from inferd._native.request.record cimport Record, Sampling, record_begin
from inferd._native.request.request cimport (
    REQUEST_NEW,
    Request,
    Wait,
    request_fail,
    request_refuse,
    terms_begin,
    terms_limit,
)
from inferd._native.request.statistics cimport FAILURE_OTHER
from inferd._native.scheduling.split cimport split_enter, split_refused
from inferd._native.sequences.sequence cimport correlation_hash
from inferd._native.service.access cimport (
    ALLOWED,
    INFERENCE,
    TRUSTED,
    AccessPolicy,
    Verdict,
    access_message,
    access_refusal,
    access_text,
)
from inferd._native.service.model_waits cimport ModelAsk, model_ask_end, model_waits_for, model_waits_resume
from inferd._native.service.table cimport table_find, table_route
from inferd._native.status cimport (
    STATUS_NOT_FOUND,
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAVAILABLE,
    STATUS_UNIMPLEMENTED,
)
from inferd._native.tensors.binding cimport request_bind, request_decode, request_identify
from inferd._native.text cimport format_text
from inferd._native.timers cimport timers_clear, timers_have_room
from inferd._native.traceparent cimport TraceContext

import secrets

cdef extern from *:
    """
    #define XXH_INLINE_ALL
    #include <xxhash.h>
    """
    uint64_t XXH3_64bits_withSeed(const void *data, size_t size, uint64_t seed) nogil

cdef enum:
    TOGETHER_NS = 50_000     # the longest time between the reads of two connections of one round
    WAKE_NS = 100_000        # the longest time that a request waits for others of its round

cdef uint64_t seed = secrets.randbits(64)  # so that a client cannot choose names that collide


cdef void submission_wake(void *context) noexcept nogil:
    cdef Submission *self = <Submission *>context
    cdef uint32_t i
    for i in range(self.touched_count):
        self.touched[i].scheduler.wake(self.touched[i])
    self.touched_count = 0
    if self.coalescer.stale.first != NULL:
        coalescer_settle(&self.coalescer)


cdef bint submission_after_read(void *context, int64_t at_ns, bint another) noexcept nogil:
    # If connections with a request or two each are read one after the other, each read would wake an instance that has
    # just gone to sleep. That costs more than all the rest, and makes batches of one request. So reads of several
    # connections that follow each other closely wake instances once in WAKE_NS, and at the end of the round.
    cdef Submission *self = <Submission *>context
    cdef bint together = another and 0 <= at_ns - self.read_ns < TOGETHER_NS
    self.read_ns = at_ns
    if self.touched_count == 0:
        return False
    if together and 0 <= at_ns - self.woken_ns < WAKE_NS:
        return True
    self.woken_ns = at_ns
    submission_wake(self)
    return False


cdef inline void touch(Submission *self, Lane *lane) noexcept nogil:
    cdef uint32_t i
    for i in range(self.touched_count):
        if self.touched[i] == lane:
            return
    if self.touched_count == TOUCHED:
        submission_wake(self)
    self.touched[self.touched_count] = lane
    self.touched_count += 1


cdef void drop_headers(Submission *self, InferMessage *message) noexcept nogil:
    # remove parameters with the names of headers that the client has written itself
    cdef uint32_t kept = 0
    cdef uint32_t i
    for i in range(message.parameter_count):
        if not self.is_header(self.is_header_context, <const uint8_t *>message.parameters[i].key.data,
                              message.parameters[i].key.size):
            message.parameters[kept] = message.parameters[i]
            kept += 1
    message.parameter_count = kept


cdef bint add_forwarded(Request *request, const uint8_t *data, size_t size) noexcept nogil:
    # add the forwarded headers of the call, which lie at `data`, to the parameters; False: no memory
    cdef InferMessage headers
    cdef bint done
    infer_message_init(&headers)
    done = infer_decode(data, size, &headers) == DECODE_OK and infer_message_add_parameters(&request.message, &headers)
    infer_message_free(&headers)
    if not done:
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
    return done


cdef enum Prepared:
    REFUSED                  # the request carries its error
    READY
    MISSED                   # its model is not loaded, and the request may wait for it


cdef Prepared prepare(Submission *self, Request *request, Block *block, const uint8_t *data, size_t size,
                      size_t forwarded, uint64_t caller) noexcept nogil:
    # decode, find the model, check
    if not request_decode(request, block, data, size):
        return REFUSED
    if self.is_header != NULL and request.message.parameter_count and caller != CALLER_SERVER:
        drop_headers(self, &request.message)
    if forwarded and not add_forwarded(request, data + size, forwarded):
        return REFUSED
    if self.access != NULL and caller != CALLER_SERVER and not may_use(self, request, caller):
        return REFUSED
    return bind(self, request, self.missed != NULL)


cdef inline Prepared bind(Submission *self, Request *request, bint may_wait) noexcept nogil:
    # find the model and check
    cdef Lane *lane
    cdef int status = STATUS_OK
    cdef char *details = NULL
    if may_wait and waits_behind(self, request):
        return MISSED
    lane = table_find(self.table, request.message.model_name, request.message.model_version, &status, &details)
    if lane == NULL:
        lane = find_by_sequence(self, request, &status, &details)
        if lane == NULL:
            return missing(request, status, details, may_wait)
    request.lane = lane
    if request.single and lane.signature.decoupled and not lane.signature.single_responses:
        request_fail(request, STATUS_UNIMPLEMENTED, format_text(
            "ModelInfer RPC doesn't support models with decoupled transaction policy: ask model '%s' by "
            "ModelStreamInfer", lane.signature.name.data))
        return REFUSED
    return READY if request_bind(request, &lane.signature, &self.regions) else REFUSED


cdef Prepared missing(Request *request, int status, char *details, bint may_wait) noexcept nogil:
    if may_wait and (status == STATUS_NOT_FOUND or status == STATUS_UNAVAILABLE):
        free(details)
        return MISSED
    request_fail(request, status, details)
    return REFUSED


cdef Lane *find_by_sequence(Submission *self, Request *request, int *status, char **details) noexcept nogil:
    # If the lookup depends on the sequence (status OK), the lane of the request's sequence. NULL: the error is set.
    if status[0] != STATUS_OK:
        return NULL
    request_identify(request)
    return table_route(self.table, request.message.model_name, request.message.model_version, &request.correlation,
                       request.sequence_start, status, details)


cdef bint may_use(Submission *self, Request *request, uint64_t caller) noexcept nogil:
    cdef const AccessPolicy *access = self.access
    cdef Verdict verdict = access_message(access, caller, INFERENCE, request.message.model_name)
    if verdict == ALLOWED:
        return True
    request_refuse(request, access_refusal(verdict),
                   access_text(access, verdict, INFERENCE, request.message.model_name))
    self.denied(self.access, request)
    return False


cdef inline uint64_t asker(const Request *request, uint64_t caller) noexcept nogil:
    # the known caller, by its token, else by its connection; 0: unknown
    return request.origin.identity if caller == 0 or caller == TRUSTED else caller


cdef inline void set_apart(const Submission *self, Request *request, uint64_t caller) noexcept nogil:
    # Known callers have sequences of their own. A model's call has the audience of the request that it serves.
    cdef uint64_t who
    if caller == CALLER_SERVER:
        return
    who = asker(request, caller)
    request.origin.caller = caller
    request.correlation.owner = 0 if self.sequences_shared else who
    request.origin.audience = who if self.responses_apart else 0


cdef inline void give_back(Request *request) noexcept nogil:
    # return a request that carries its error
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


cdef void record(Submission *self, Request *request, size_t size, const TraceContext *context) noexcept nogil:
    # after the checks, and before the request is queued
    cdef const Lane *lane = <const Lane *>request.lane
    record_begin(self.recorder, request, context,
                 <Sampling *>lane.statistics.sampling if lane != NULL else NULL)
    if request.record != NULL:
        (<Record *>request.record).received = size


cdef void submit_message(Submission *self, Request *request, Block *block, const uint8_t *data, size_t size,
                         int64_t timeout_ns, uint64_t caller, const TraceContext *context=NULL) noexcept nogil:
    submit_call(self, request, block, data, size, 0, timeout_ns, caller, context)


cdef void refuse_full(const Submission *self, Request *request, Block *block, const uint8_t *data,
                      size_t size) noexcept nogil:
    # Refuse as cheaply as possible. But the client of a stream needs the id to know which request failed.
    if request.single:
        request.block = block
    elif not request_decode(request, block, data, size):
        return
    request_refuse(request, REFUSAL_SERVER_FULL, format_text(
        "Exceeds maximum queue size: the server already holds %u requests, its limit",
        self.bridge.admitted_count))


cdef void submit_call(Submission *self, Request *request, Block *block, const uint8_t *data, size_t size,
                      size_t forwarded, int64_t timeout_ns, uint64_t caller,
                      const TraceContext *context) noexcept nogil:
    cdef int64_t now = now_ns()
    cdef Prepared prepared
    request.bridge = self.bridge
    request.arrived_ns = now
    if request.terms.asked_ns == 0:
        terms_begin(&request.terms, now)
    else:  # a model's call, with the terms of the request that it serves: its own time begins now
        request.terms.executable_ns = now
    if caller != CALLER_SERVER and self.bridge.admitted_count >= self.max_inflight:
        refuse_full(self, request, block, data, size)
        give_back(request)
        return
    request_admit(request, &self.bridge.admitted_count)
    set_apart(self, request, caller)
    prepared = prepare(self, request, block, data, size, forwarded, caller)
    if self.recorder != NULL and caller != CALLER_SERVER and load32(&self.recorder.on):
        record(self, request, size, context)
    if prepared == REFUSED:
        give_back(request)
        return
    if timeout_ns >= 0:
        terms_limit(&request.terms, now, timeout_ns)
    if prepared == MISSED:
        wait_for_model(self, request, caller)
        return
    if caller != CALLER_SERVER:
        add_own(&(<Lane *>request.lane).received, <int64_t>size)
    submit_request(self, request)


# ---------------------------------------------------------------------------------------------------------------------
# Requests for models that are loaded on demand

cdef inline uint64_t name_hash(Str name) noexcept nogil:
    return XXH3_64bits_withSeed(name.data, name.size, seed)


cdef inline Awaiting *awaiting_of(const Submission *self, Str name) noexcept nogil:
    return <Awaiting *>&self.awaiting[name_hash(name) % AWAITED]


cdef inline uint64_t sequence_hash(const Request *request) noexcept nogil:
    # with the model's name: sequences of different models often have the same id
    return correlation_hash(&request.correlation) ^ name_hash(request.message.model_name)


cdef bint waits_behind(const Submission *self, Request *request) noexcept nogil:
    # Whether an earlier request of its sequence waits for the model: this one must not overtake it. The model may just
    # have been loaded, and a departing version may still have an older sequence of this id.
    cdef const ModelAsk *other
    cdef uint64_t hash
    if awaiting_of(self, request.message.model_name).first == NULL:
        return False
    request_identify(request)
    if not request.correlation.given:
        return False
    hash = sequence_hash(request)
    other = self.sequences[hash % SEQUENCES].first
    while other != NULL:
        if other.sequence == hash:
            return True
        other = other.next
    return False


cdef void wait_for_model(Submission *self, Request *request, uint64_t caller) noexcept nogil:
    cdef ModelAsk *ask = NULL
    if request.terms.deadline_ns == 0 or timers_have_room(self.bridge.timers):
        ask = self.missed(self.missed_context, request, refuse_waiting, request.message.model_name,
                          caller == CALLER_SERVER, self.asked_by)
    if ask == NULL:
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        give_back(request)
        return
    ask.context = self
    request_wait(request, &FOR_MODEL, ask)
    list_append(awaiting_of(self, request.message.model_name), request)
    request_identify(request)
    if request.correlation.given:
        ask.sequence = sequence_hash(request)
        list_append(&self.sequences[ask.sequence % SEQUENCES], ask)
    if request.terms.deadline_ns:
        bridge_watch(self.bridge, request)


cdef void stop_waiting(Request *request) noexcept nogil:
    cdef ModelAsk *ask = <ModelAsk *>request.awaited
    cdef Submission *self = <Submission *>ask.context
    list_remove(awaiting_of(self, request.message.model_name), request)
    if request.correlation.given:
        list_remove(&self.sequences[ask.sequence % SEQUENCES], ask)
    request_stop_waiting(request, REQUEST_NEW)
    model_ask_end(ask)


cdef void refuse_waiting(void *waiter, int status, char *reason) noexcept nogil:
    cdef Request *request = <Request *>waiter
    stop_waiting(request)
    timers_clear((<Bridge *>request.bridge).timers, &request.timer)
    request_fail(request, status, reason)
    give_back(request)


cdef Wait FOR_MODEL = Wait(stop_waiting, NULL, NULL)


cdef bint waits_for(const Request *request, const Str *name) noexcept nogil:
    cdef Str wanted = request.message.model_name
    return name == NULL or (wanted.size == name.size and memcmp(wanted.data, name.data, name.size) == 0)


cdef void submission_resume(Submission *self, const Str *name, int status, const char *details) noexcept nogil:
    cdef int i
    if name != NULL:
        resume_those(self, awaiting_of(self, name[0]), name, status, details)
    else:
        for i in range(AWAITED):
            resume_those(self, &self.awaiting[i], NULL, status, details)
    model_waits_resume(&self.model_waits, name, status, details)


cdef bint submission_awaits(Submission *self, Str name) noexcept nogil:
    cdef const Request *request = awaiting_of(self, name).first
    while request != NULL:
        if waits_for(request, &name):
            return True
        request = request.next
    return model_waits_for(&self.model_waits, &name)


cdef void resume_those(Submission *self, Awaiting *awaiting, const Str *name, int status,
                       const char *details) noexcept nogil:
    cdef Request *request = awaiting.first
    cdef Request *following
    while request != NULL:
        following = request.next
        if waits_for(request, name):
            stop_waiting(request)
            timers_clear(self.bridge.timers, &request.timer)
            if status != STATUS_OK:
                request_fail(request, status, format_text("%s", details))
                give_back(request)
            elif bind(self, request, False) == READY:
                # so far it has waited for its model, not in the model's queue
                request.arrived_ns = request.terms.executable_ns = now_ns()
                submit_request(self, request)
            else:
                give_back(request)
        request = following


cdef bint is_own(const Request *request) noexcept nogil:
    # Whether the request has no tensor in memory of its client, who could change it. Only then it may be compared to
    # others.
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
        request.arrived_ns = request.terms.executable_ns = now_ns()
    if not timers_have_room(self.bridge.timers):
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        give_back(request)
        return
    if (lane.coalesces or lane.caches) and not request.is_warmup and is_own(request):
        work = coalescer_enter(&self.coalescer, request)
        if work != request:
            bridge_watch(self.bridge, request)
        if work == NULL:
            return
        request = work
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
    following = part.next
    whole.queued_ns = whole.terms.executable_ns
    part.bridge = self.bridge
    if not enter(self, part):  # the queue decides once, before any part is executed
        split_refused(whole, part)
        account_failed(whole, now_ns(), FAILURE_OTHER)
        give_back(whole)
        return
    if whole.terms.deadline_ns:
        bridge_watch(self.bridge, whole)
    while following != NULL:
        part = following
        following = part.next
        part.bridge = self.bridge
        part.follows = True
        push(self, part)


cdef inline void push(Submission *self, Request *request) noexcept nogil:
    if not enter(self, request):
        give_back(request)


cdef inline bint enter(Submission *self, Request *request) noexcept nogil:
    # False: the lane does not take it, and it carries the error
    cdef Lane *lane = <Lane *>request.lane
    cdef Pushed pushed
    if lane.order != NULL and not order_enter(lane.order, request):
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        return False
    request.queued_ns = request.terms.executable_ns
    pushed = lane.scheduler.push(lane, request)
    if pushed != PUSHED:
        refuse_pushed(request, pushed)
        return False
    if request.terms.deadline_ns or request.expires_ns:
        bridge_watch(self.bridge, request)
    touch(self, lane)
    return True


cdef void refuse_pushed(Request *request, Pushed pushed) noexcept nogil:
    # the lane did not take it
    cdef Lane *lane = <Lane *>request.lane
    if request.order_entry != NULL:
        order_leave(request)
    if pushed == LANE_FULL:
        request_refuse(request, REFUSAL_QUEUE_FULL, format_text(
            "Exceeds maximum queue size: model '%s' version %s has %u requests waiting, which is its limit",
            request.signature.name.data, request.signature.version_text.data, lane.max_queue))
    elif pushed == LANE_CLOSED:
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Request for unknown model: '%s' version %s is not at ready state",
            request.signature.name.data, request.signature.version_text.data))
    account_failed(request, now_ns(), FAILURE_OTHER)
