"""The calls to other models in flight. The front makes, finds, cancels and ends each of them.

A call inherits the deadline of the request on whose behalf it is made, and is cancelled with it when the client leaves.
The number of the worker's life and the id that the worker has given to the call identify it; another worker may use the
same id.
"""

import logging

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from inferd._native.atomic cimport fetch_add32, load32
from inferd._native.clock cimport now_ns
from inferd._native.front cimport PythonEvent, front_leave, python_post
from inferd._native.memory.resource cimport Block, block_give
from inferd._native.request.bridge cimport PostedCallback, bridge_abandon
from inferd._native.request.lane cimport Lane
from inferd._native.request.life cimport request_is_queued
from inferd._native.request.record cimport record_inner
from inferd._native.request.request cimport (
    REQUEST_NEW,
    Request,
    Response,
    request_free,
    request_new,
    terms_lend,
)
from inferd._native.request.signature cimport Signature
from inferd._native.service.submission cimport CALLER_SERVER, Submission, submit_message
from inferd._native.status cimport STATUS_CANCELLED, STATUS_OK, STATUS_RESOURCE_EXHAUSTED, STATUS_UNIMPLEMENTED
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.threads cimport lock, unlock
from inferd.backends.python._bls_responses cimport (
    BlsCall,
    call_answer,
    call_drop_held,
    call_fail,
    call_refuse,
    call_send_held,
)
from inferd.backends.python._channel cimport (
    BLS_BUCKETS,
    Channel,
    Team,
    channel_break,
    channel_exhausted,
    channel_give,
    channel_life,
    channel_share,
)
from inferd.backends.python._grants cimport record_copy
from inferd.backends.python._side cimport side_record
from inferd.backends.python._slots cimport Slot, slot_find
from inferd.backends.python._wire cimport BLS_WINDOW, DECOUPLED, EMPTY, FINAL, IN_ARENA, BlsRecord, Head

logger = logging.getLogger("inferd.python")

cdef enum:
    MOST_CALLS = 4096        # in flight, of one worker
    MOST_CALL_BYTES = 1 << 30  # of their requests; one call alone may have more

cdef const char *TOO_MANY_CALLS = "too many calls to other models are under way, or they have too many bytes"


# ---------------------------------------------------------------------------------------------------------------------
# Requests of a worker

cdef bint may_call(Channel *channel, const Head *head) noexcept nogil:
    # counts the call if it may be made
    cdef bint may
    lock(&channel.guard)
    may = channel.call_count < MOST_CALLS and (
        channel.call_bytes == 0 or channel.call_bytes + head.size <= MOST_CALL_BYTES
    )
    if may:
        fetch_add32(&channel.call_count, 1)
        channel.call_bytes += head.size
    unlock(&channel.guard)
    return may


cdef void call_over(Channel *channel, uint64_t bytes) noexcept nogil:
    lock(&channel.guard)
    fetch_add32(&channel.call_count, -1)
    channel.call_bytes -= bytes
    unlock(&channel.guard)


cdef BlsCall *call_new(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    cdef Block *block
    cdef BlsCall *call
    cdef BlsRecord bls
    if head.flags & IN_ARENA:
        block = side_record(channel, head)
    else:
        block = record_copy(record, head.size)
        if block == NULL:
            channel_exhausted(channel)
    if block == NULL:
        return NULL
    if head.size < sizeof(BlsRecord) or head.id == 0:
        channel_break(channel, "sent a call that cannot be read")
        block_give(block)
        return NULL
    memcpy(&bls, block.data, sizeof(BlsRecord))
    if bls.message_size > head.size - sizeof(BlsRecord):
        channel_break(channel, "sent a call that cannot be read")
        block_give(block)
        return NULL
    if not may_call(channel, head):
        call_refuse(channel, channel_life(channel), head.id, TOO_MANY_CALLS, FINAL)
        block_give(block)
        return NULL
    call = <BlsCall *>calloc(1, sizeof(BlsCall))
    if call == NULL:
        channel_exhausted(channel)
        call_over(channel, head.size)
        block_give(block)
        return NULL
    call.block = block
    call.data = block.data + sizeof(BlsRecord)
    call.size = bls.message_size
    call.bytes = head.size
    call.life = channel_life(channel)
    call.id = head.id
    call.decoupled = head.flags & DECOUPLED
    call.timeout_ns = <int64_t>min(bls.timeout_us, <uint64_t>1 << 52) * 1000 if bls.timeout_us else -1
    call.credit = BLS_WINDOW
    call.channel = channel_share(channel)
    call.parent = bls.parent
    call.callback.run = call_make
    return call


# ---------------------------------------------------------------------------------------------------------------------
# Calls in flight

cdef inline BlsCall **calls_of(Channel *channel, uint64_t id) noexcept nogil:
    # the list of the calls whose ids share a bucket with this one
    return <BlsCall **>&channel.bls_calls[id % BLS_BUCKETS]


cdef inline BlsCall **family_of(Channel *channel, uint64_t parent) noexcept nogil:
    # the list of the calls on behalf of requests whose numbers share a bucket with this one
    return <BlsCall **>&channel.bls_families[parent % BLS_BUCKETS]


cdef void enter(BlsCall *call) noexcept nogil:
    # the call is in flight from now on
    cdef BlsCall **family
    call.next = calls_of(call.channel, call.id)[0]
    calls_of(call.channel, call.id)[0] = call
    if call.parent:
        family = family_of(call.channel, call.parent)
        call.sibling = family[0]
        call.sibling_link = family
        if call.sibling != NULL:
            call.sibling.sibling_link = &call.sibling
        family[0] = call


cdef void remove(BlsCall *call) noexcept nogil:
    # the call has ended
    cdef BlsCall **link = calls_of(call.channel, call.id)
    while link[0] != call:
        link = &link[0].next
    link[0] = call.next
    if call.parent:
        call.sibling_link[0] = call.sibling
        if call.sibling != NULL:
            call.sibling.sibling_link = call.sibling_link
    call_drop_held(call)
    forget(call)


cdef BlsCall *call_find(Channel *channel, uint64_t life, uint64_t id) noexcept nogil:
    cdef BlsCall *call = calls_of(channel, id)[0]
    while call != NULL and not (call.id == id and call.life == life):
        call = call.next
    return call


cdef void forget(BlsCall *call) noexcept nogil:
    call_over(call.channel, call.bytes)
    if call.loading != NULL:
        channel_give(call.loading)
    channel_give(call.channel)
    free(call)


# ---------------------------------------------------------------------------------------------------------------------
# The life of a call

cdef void note_loading(BlsCall *call, Channel *loading) noexcept nogil:
    if loading != NULL:
        call.loading = channel_share(loading)


cdef inline Channel *loading_behind(const BlsCall *call, const Request *served) noexcept nogil:
    # the channel of the model whose load waits for this request: one of a warm-up, or of a call on behalf of such a
    # request
    if served.is_warmup:
        return call.channel
    return (<BlsCall *>served.sink).loading if served.deliver == deliver and served.sink != NULL else NULL


cdef bint inherit(BlsCall *call, Request *request) noexcept nogil:
    # The call takes over origin, deadline and trace of the request that it serves; False: no client waits for that
    # request.
    cdef Slot *slot
    cdef bint waits = True
    if call.parent == 0:
        note_loading(call, call.channel)  # the model may call from `initialize`
        return True
    lock(&call.channel.guard)
    slot = slot_find(&call.channel.slots, call.parent)
    if slot != NULL:
        waits = not load32(&slot.request.abandonment.happened)
        note_loading(call, loading_behind(call, slot.request))
        record_inner(request, slot.request)
        request.origin = slot.request.origin
        terms_lend(&request.terms, &slot.request.terms, now_ns())
    unlock(&call.channel.guard)
    return waits


cdef bint waits_for_itself(BlsCall *call) noexcept nogil:
    # Whether every instance of the called model executes a request that waits for this call, directly or through
    # others. Each instance executes one batch at a time, so the walk meets none twice. An instance of a decoupled model
    # may be free at any time, so the walk ends there.
    cdef const Lane *called = <const Lane *>call.request.lane
    cdef const Team *team = NULL
    cdef int32_t waiting = 0
    cdef Channel *channel
    cdef Slot *slot
    while call != NULL:
        channel = call.channel
        lock(&channel.guard)
        slot = slot_find(&channel.slots, call.parent) if call.parent and channel.executing else NULL
        if slot == NULL or (<const Lane *>slot.request.lane).signature.decoupled:
            call = NULL
        else:
            if slot.request.lane == called:
                waiting += 1
                team = channel.team
            call = <BlsCall *>slot.request.sink if slot.request.deliver == deliver else NULL
        unlock(&channel.guard)
    return team != NULL and waiting >= load32(&team.hopeful)


cdef set told_circles = set()


cdef struct Circle:
    PythonEvent event        # the first member
    char *caller             # from malloc, as the next
    char *called


cdef void tell_circle(const BlsCall *call) noexcept nogil:
    cdef const Signature *called = &(<const Lane *>call.request.lane).signature
    cdef Circle *circle = <Circle *>calloc(1, sizeof(Circle))
    if circle == NULL:
        return
    circle.event.run = warn_of_circle
    circle.caller = format_text("%s", call.channel.model)
    circle.called = format_text("%.*s", <int>called.name.size, called.name.data)
    python_post(&(<Submission *>call.channel.submission).bridge.timers.python, &circle.event)


cdef int warn_of_circle(PythonEvent *event) except -1:
    # once for each pair of models
    cdef Circle *circle = <Circle *>event
    front_leave()
    names = (text_or_no_memory(circle.caller).decode(), text_or_no_memory(circle.called).decode())
    free(circle.caller)
    free(circle.called)
    free(circle)
    if names in told_circles:
        return 0
    told_circles.add(names)
    logger.warning(
        "model '%s' calls '%s', and every instance of '%s' waits for this call: it ends with the deadline of the "
        "request that it serves; more instances (instance_group) let such calls through", *names, names[1])
    return 0


cdef void call_make(PostedCallback *callback) noexcept nogil:
    cdef BlsCall *call = <BlsCall *>callback
    cdef Channel *channel = call.channel
    cdef Submission *submission = <Submission *>channel.submission
    cdef Request *request
    cdef uint64_t life = call.life
    cdef uint64_t id = call.id
    cdef bint lives = life == channel_life(channel)  # otherwise it has ended since the attendant read the call
    if not lives or call_find(channel, call.life, call.id) != NULL:
        if lives:
            channel_break(channel, "made two calls of one number")
        block_give(call.block)
        forget(call)
        return
    enter(call)
    request = request_new()
    if request == NULL:
        block_give(call.block)
        end_with_error(call, STATUS_RESOURCE_EXHAUSTED, "no memory for the request")
        return
    if not inherit(call, request):
        request_free(request)
        block_give(call.block)
        end_with_error(call, STATUS_CANCELLED, "no client waits for the request that the model made the call for")
        return
    request.single = not call.decoupled
    request.deliver = deliver
    request.sink = call
    request.origin.user = -1  # a model may not use regions of clients
    call.request = request
    submission.asked_by = call.loading.model if call.loading != NULL else NULL
    channel_share(channel)
    # The response may come at once, and end the call.
    submit_message(submission, request, call.block, call.data, call.size, call.timeout_ns, CALLER_SERVER)
    submission.asked_by = NULL
    call = call_find(channel, life, id)
    if call != NULL and call.request != NULL and request_is_queued(call.request) and waits_for_itself(call):
        tell_circle(call)
    channel_give(channel)


cdef void deliver(void *sink, Response *response, int status, const char *details) noexcept nogil:
    cdef BlsCall *call = <BlsCall *>sink
    cdef bint final = response == NULL or response.final
    if final:
        call.request = NULL
    if status == STATUS_OK:
        call_answer(call, response, final)
    elif status == STATUS_UNIMPLEMENTED and response != NULL and asks_for_too_few(response.request):
        call_fail(call, status, details, FINAL | DECOUPLED)
    elif response != NULL and response.request.state == REQUEST_NEW:
        call_fail(call, status, details, FINAL | EMPTY)
    else:
        call_fail(call, status, details, FINAL if final else 0)
    if final and call.first_held == NULL:
        remove(call)


cdef inline bint asks_for_too_few(const Request *request) noexcept nogil:
    # the call takes one response, the model gives any number: see submit_message
    cdef const Lane *lane = <const Lane *>request.lane
    return request.single and lane != NULL and lane.signature.decoupled and not lane.signature.single_responses


cdef void call_credit(Channel *channel, uint64_t life, uint64_t id, uint32_t credit) noexcept nogil:
    cdef BlsCall *call = call_find(channel, life, id)
    if call == NULL:
        return
    if credit > BLS_WINDOW - call.credit:
        channel_break(channel, "gave back more responses of a call than it had got")
        return
    call.credit += credit
    call_send_held(call)
    if call.first_held == NULL and call.request == NULL:
        remove(call)


# ---------------------------------------------------------------------------------------------------------------------
# The end of calls

cdef void call_leave(BlsCall *call) noexcept nogil:
    cdef Request *request = call.request
    call.request = NULL
    if request != NULL:
        bridge_abandon(request)


cdef void end_with_error(BlsCall *call, int status, const char *details) noexcept nogil:
    call.credit = 1  # so that the error can be sent
    call_drop_held(call)
    call_fail(call, status, details, FINAL)
    remove(call)


cdef void call_cancel(BlsCall *call) noexcept nogil:
    if call != NULL:
        call_leave(call)
        end_with_error(call, STATUS_CANCELLED, "the call was cancelled")


cdef void calls_cancel(Channel *channel, uint64_t life, uint64_t parent) noexcept nogil:
    cdef BlsCall *call = family_of(channel, parent)[0]
    cdef BlsCall *following
    while call != NULL:
        following = call.sibling
        if call.life == life and call.parent == parent:
            call_cancel(call)
        call = following


cdef void calls_leave(Channel *channel, uint64_t life) noexcept nogil:
    cdef BlsCall *call
    cdef BlsCall *following
    cdef int bucket
    for bucket in range(BLS_BUCKETS):
        call = <BlsCall *>channel.bls_calls[bucket]
        while call != NULL:
            following = call.next
            if call.life == life:
                call_leave(call)
                remove(call)
            call = following
