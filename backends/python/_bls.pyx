"""Business logic scripting: calls that a model makes to other models.

A call is a serialized ModelInferRequest, and goes the way of every other message: decoded in place, checked with the
same words, queued. The loop itself reads it from the socket of calls, so that no other thread must wake; one that is
too large for a packet comes on the side socket, and an errand brings it to the loop. What becomes of it is sent to the
worker from there, as a serialized ModelInferResponse. No thread waits for it, so calls may be nested as deep as they
like: a model waits in its own worker, and only its own instance is taken meanwhile.

A call lends from the request on whose behalf it is made the deadline, and ends with it when the client leaves. At most
BLS_WINDOW responses of a call are on the way to the worker; those behind them wait here, and the receipts of the
responses with them, so that a decoupled model does not run ahead of the model that asked it.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strlen

from _native.atomic cimport fetch_add32, load32
from _native.clock cimport now_ns
from _native.memory.arena cimport arena_take
from _native.memory.resource cimport Block, block_give, block_share, block_take
from _native.request.bridge cimport Errand, Inlet, bridge_abandon, bridge_attach, bridge_detach, bridge_post
from _native.request.record cimport record_inner
from _native.request.request cimport REQUEST_NEW, Request, Response, request_free, request_new
from _native.scheduling.lane cimport Lane
from _native.service.answer cimport answer_size, answer_write_to
from _native.service.submission cimport CALLER_SERVER, Submission, submit_message
from _native.status cimport (
    STATUS_CANCELLED,
    STATUS_INVALID_ARGUMENT,
    STATUS_NOT_FOUND,
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAVAILABLE,
    STATUS_UNIMPLEMENTED,
)
from _native.threads cimport lock, unlock
from backends.python._channel cimport (
    BLS_BUCKETS,
    Channel,
    calls_send,
    channel_break,
    channel_exhausted,
    channel_give,
    channel_share,
    packet_poll,
)
from backends.python._grants cimport record_copy
from backends.python._loans cimport LOAN_MESSAGE, loan_begin
from backends.python._side cimport side_record
from backends.python._slots cimport Slot, slot_find
from backends.python._wire cimport (
    BLS_CANCEL,
    BLS_CREDIT,
    BLS_REQUEST,
    BLS_RESPONSE,
    BLS_WINDOW,
    CODE_CANCELLED,
    CODE_INTERNAL,
    CODE_INVALID_ARG,
    CODE_NOT_FOUND,
    CODE_UNAVAILABLE,
    CODE_UNSUPPORTED,
    DECOUPLED,
    EMPTY,
    FAILED,
    FINAL,
    IN_ARENA,
    PACKET,
    BlsRecord,
    Head,
)

cdef enum:
    LONGEST_TEXT = 32 << 10
    MOST_PACKETS = 32        # that are read in one go
    MOST_CALLS = 4096        # of a worker under way
    MOST_CALL_BYTES = 1 << 30  # of their requests
    MOST_WISHES = 1 << 16    # changes of calls that the loop has not seen yet

cdef const char *TOO_MANY_CALLS = "too many calls to other models are under way"
cdef const char *TOO_MANY_RESPONSES = "the model keeps too many responses of other models"

cdef struct Held:
    # a response that waits for credit
    Held *next
    Head head
    Block *record            # with the bytes, or with the lease to be
    Block *receipt

cdef struct BlsCall:
    Errand errand
    Channel *channel
    uint64_t life            # of the worker that makes it
    uint64_t id
    bint decoupled
    int64_t timeout_ns       # from when it came; -1: none
    Block *block             # holds the message
    const uint8_t *data
    size_t size
    uint64_t bytes           # that it counts in the limit
    uint64_t parent          # number of the request on whose behalf it is made; 0: none
    # all on the loop
    Request *request         # NULL: over
    BlsCall *next
    uint32_t credit
    Held *first_held
    Held *last_held

cdef struct Wish:
    # something for the loop about the calls of a channel
    Errand errand
    Channel *channel
    uint64_t life            # of the worker whose calls they are
    uint64_t id              # of the call; 0: all calls
    uint64_t parent          # all calls on behalf of this request, if it is not 0
    uint32_t credit          # 0: it is not wanted any more


# ---------------------------------------------------------------------------------------------------------------------
# From the worker, on the socket of calls

cdef void bls_open(Channel *channel) noexcept nogil:
    if channel.submission == NULL:
        return
    channel.inlet.fd = channel.calls.fd
    channel.inlet.owner = channel
    channel.inlet.read = read_calls
    if not bridge_attach((<Submission *>channel.submission).bridge, &channel.inlet):
        channel_exhausted(channel)  # its calls would wait forever


cdef void bls_close(Channel *channel) noexcept nogil:
    if channel.inlet.fd >= 0:
        bridge_detach((<Submission *>channel.submission).bridge, &channel.inlet)
        channel.inlet.fd = -1


cdef bint read_calls(Inlet *inlet) noexcept nogil:
    cdef Channel *channel = <Channel *>inlet.owner
    cdef ssize_t size
    cdef int _
    for _ in range(MOST_PACKETS):
        size = packet_poll(inlet.fd, channel.calls_packet, PACKET)
        if size < 0:
            return True
        if size == 0:
            return False
        if load32(&channel.deaf) or not read_call(channel, <size_t>size):
            return False
    return True


cdef bint read_call(Channel *channel, size_t size) noexcept nogil:
    # one packet; False: the worker is ended
    cdef Head head
    cdef BlsCall *call
    if size < sizeof(Head):
        channel_break(channel, "sent a packet without a head")
        return False
    memcpy(&head, channel.calls_packet, sizeof(Head))
    if head.flags & IN_ARENA or head.size != size - sizeof(Head):
        channel_break(channel, "sent a packet that does not fit its head")
        return False
    if head.kind == BLS_CREDIT:
        give_credit(channel, channel.life, head.id, credit_of(&head))
    elif head.kind == BLS_CANCEL:
        cancel(find(channel, channel.life, head.id))
    elif head.kind == BLS_REQUEST:
        call = new_call(channel, &head, channel.calls_packet + sizeof(Head))
        if call != NULL:
            make_call(&call.errand)
    else:
        channel_break(channel, "sent a packet of an unknown kind on the socket of calls")
        return False
    return True


cdef inline uint32_t credit_of(const Head *head) noexcept nogil:
    return <uint32_t>max(<uint64_t>1, min(head.offset, <uint64_t>BLS_WINDOW + 1))


# ---------------------------------------------------------------------------------------------------------------------
# From the worker, on the side socket

cdef bint bls_take(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    cdef BlsCall *call
    if head.kind == BLS_REQUEST:
        if channel.submission == NULL:
            channel_break(channel, "calls another model, and there is no server around it")
            return True
        call = new_call(channel, head, record)
        if call != NULL:
            bridge_post((<Submission *>channel.submission).bridge, &call.errand)
    elif head.kind == BLS_CREDIT:
        wish(channel, head.id, 0, credit_of(head))
    elif head.kind == BLS_CANCEL:
        wish(channel, head.id, 0, 0)
    else:
        return False
    return True


cdef void bls_abandon(Channel *channel) noexcept nogil:
    wish(channel, 0, 0, 0)


cdef void bls_leave(Channel *channel, uint64_t number) noexcept nogil:
    # Later: another request cannot be abandoned from within what is told here. On another thread than the loop's the
    # request has not been sent to the worker yet, so that it does not matter what is seen.
    if channel.call_count:
        wish(channel, 0, number, 0)


cdef void wish(Channel *channel, uint64_t id, uint64_t parent, uint32_t credit) noexcept nogil:
    cdef Wish *one
    if channel.submission == NULL:
        return
    if id and load32(&channel.wishes) >= MOST_WISHES:
        channel_break(channel, "changes its calls faster than that can be done")
        return
    one = <Wish *>calloc(1, sizeof(Wish))
    if one == NULL:
        channel_exhausted(channel)
        return
    fetch_add32(&channel.wishes, 1)
    one.life = channel.life
    one.errand.run = grant_wish
    one.channel = channel_share(channel)
    one.id = id
    one.parent = parent
    one.credit = credit
    bridge_post((<Submission *>channel.submission).bridge, &one.errand)


cdef bint may_call(Channel *channel, const Head *head) noexcept nogil:
    # counts it
    cdef bint may
    lock(&channel.guard)
    may = channel.call_count < MOST_CALLS and channel.call_bytes + head.size <= MOST_CALL_BYTES
    if may:
        channel.call_count += 1
        channel.call_bytes += head.size
    unlock(&channel.guard)
    return may


cdef void call_over(Channel *channel, uint64_t bytes) noexcept nogil:
    lock(&channel.guard)
    channel.call_count -= 1
    channel.call_bytes -= bytes
    unlock(&channel.guard)


cdef void refuse_call(Channel *channel, uint64_t id) noexcept nogil:
    cdef const char *text = TOO_MANY_CALLS
    cdef Head head
    memset(&head, 0, sizeof(Head))
    head.kind = BLS_RESPONSE
    head.flags = FAILED | FINAL
    head.code = CODE_UNAVAILABLE
    head.id = id
    head.size = <uint32_t>strlen(text)
    calls_send(channel, &head, text, head.size)


cdef BlsCall *new_call(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    # NULL: it was refused, or the worker is ended
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
        refuse_call(channel, head.id)
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
    call.life = channel.life
    call.id = head.id
    call.decoupled = head.flags & DECOUPLED
    call.timeout_ns = <int64_t>min(bls.timeout_us, <uint64_t>1 << 52) * 1000 if bls.timeout_us else -1
    call.credit = BLS_WINDOW
    call.channel = channel_share(channel)
    call.parent = bls.parent
    call.errand.run = make_call
    return call


# ---------------------------------------------------------------------------------------------------------------------
# On the loop

cdef bint inherit(BlsCall *call, Request *request) noexcept nogil:
    # the deadline and the trace; False: nobody waits for the request on whose behalf the call is made
    cdef Slot *slot
    cdef int64_t left
    cdef bint waits = True
    if call.parent == 0:
        return True
    lock(&call.channel.guard)
    slot = slot_find(&call.channel.slots, call.parent)
    if slot != NULL:
        waits = not load32(&slot.request.abandonment.happened)
        record_inner(request, slot.request)
        request.asker.client = slot.request.asker.client
        if slot.request.deadline_ns:
            left = max(<int64_t>0, slot.request.deadline_ns - now_ns())
            call.timeout_ns = left if call.timeout_ns < 0 else min(left, call.timeout_ns)
    unlock(&call.channel.guard)
    return waits


cdef void make_call(Errand *errand) noexcept nogil:
    cdef BlsCall *call = <BlsCall *>errand
    cdef Channel *channel = call.channel
    cdef Request *request
    if call.life != channel.life or find(channel, call.life, call.id) != NULL:
        if call.life == channel.life:  # else its worker has ended since the attendant has read it
            channel_break(channel, "made two calls of one number")
        block_give(call.block)
        forget(call)
        return
    call.next = calls_of(channel, call.id)[0]
    calls_of(channel, call.id)[0] = call
    request = request_new()
    if request == NULL:
        block_give(call.block)
        end_with_error(call, STATUS_RESOURCE_EXHAUSTED, "no memory for the request")
        return
    if not inherit(call, request):
        request_free(request)
        block_give(call.block)
        end_with_error(call, STATUS_CANCELLED, "nobody waits for the request on whose behalf the call is made")
        return
    request.single = not call.decoupled
    request.deliver = deliver
    request.sink = call
    request.asker.user = -1
    call.request = request
    submit_message(<Submission *>channel.submission, request, call.block, call.data, call.size, call.timeout_ns,
                   CALLER_SERVER)


cdef inline BlsCall **calls_of(Channel *channel, uint64_t id) noexcept nogil:
    # the list of the calls that have such an id
    return <BlsCall **>&channel.bls_calls[id % BLS_BUCKETS]


cdef BlsCall *find(Channel *channel, uint64_t life, uint64_t id) noexcept nogil:
    # NULL: it is over
    cdef BlsCall *call = calls_of(channel, id)[0]
    while call != NULL and not (call.id == id and call.life == life):
        call = call.next
    return call


cdef void give_credit(Channel *channel, uint64_t life, uint64_t id, uint32_t credit) noexcept nogil:
    cdef BlsCall *call = find(channel, life, id)
    if call == NULL:
        return
    if credit > BLS_WINDOW - call.credit:
        channel_break(channel, "gave back more responses of a call than it had got")
        return
    call.credit += credit
    send_held(call)


cdef void cancel(BlsCall *call) noexcept nogil:
    if call != NULL:
        leave(call)
        end_with_error(call, STATUS_CANCELLED, "the call was cancelled")


cdef void cancel_all_of(Channel *channel, uint64_t life, uint64_t parent) noexcept nogil:
    cdef BlsCall *call
    cdef BlsCall *following
    cdef int bucket
    for bucket in range(BLS_BUCKETS):
        call = <BlsCall *>channel.bls_calls[bucket]
        while call != NULL:
            following = call.next
            if call.life == life and call.parent == parent:
                cancel(call)
            call = following


cdef void leave_all(Channel *channel, uint64_t life) noexcept nogil:
    cdef BlsCall *call
    cdef BlsCall *following
    cdef int bucket
    for bucket in range(BLS_BUCKETS):
        call = <BlsCall *>channel.bls_calls[bucket]
        while call != NULL:
            following = call.next
            if call.life == life:
                leave(call)
                remove(call)
            call = following


cdef void grant_wish(Errand *errand) noexcept nogil:
    cdef Wish *one = <Wish *>errand
    if one.id and one.life != one.channel.life:
        pass  # its worker has ended since then
    elif one.parent:
        cancel_all_of(one.channel, one.life, one.parent)
    elif one.id == 0:
        leave_all(one.channel, one.life)
    elif one.credit:
        give_credit(one.channel, one.life, one.id, one.credit)
    else:
        cancel(find(one.channel, one.life, one.id))
    fetch_add32(&one.channel.wishes, -1)
    channel_give(one.channel)
    free(one)


cdef void leave(BlsCall *call) noexcept nogil:
    cdef Request *request = call.request
    call.request = NULL
    if request != NULL:
        bridge_abandon(request)


cdef void remove(BlsCall *call) noexcept nogil:
    # it is over
    cdef BlsCall **link = calls_of(call.channel, call.id)
    while link[0] != call:
        link = &link[0].next
    link[0] = call.next
    drop_held(call)
    forget(call)


cdef void forget(BlsCall *call) noexcept nogil:
    call_over(call.channel, call.bytes)
    channel_give(call.channel)
    free(call)


cdef void deliver(void *sink, Response *response, int status, const char *details) noexcept nogil:
    cdef BlsCall *call = <BlsCall *>sink
    cdef bint final = response == NULL or response.final
    if final:
        call.request = NULL
    if status == STATUS_OK:
        answer(call, response, final)
    elif status == STATUS_UNIMPLEMENTED and response != NULL and asks_for_too_few(response.request):
        answer_error(call, status, details, FINAL | DECOUPLED)
    elif response != NULL and response.request.state == REQUEST_NEW:
        answer_error(call, status, details, FINAL | EMPTY)
    else:
        answer_error(call, status, details, FINAL if final else 0)
    if final and call.first_held == NULL:
        remove(call)


cdef inline bint asks_for_too_few(const Request *request) noexcept nogil:
    # one response, of a model that gives any number: see submit_message
    cdef const Lane *lane = <const Lane *>request.lane
    return request.single and lane != NULL and lane.signature.decoupled and not lane.signature.single_answers


cdef uint32_t code_of_status(int status) noexcept nogil:
    if status == STATUS_NOT_FOUND:
        return CODE_NOT_FOUND
    if status == STATUS_INVALID_ARGUMENT:
        return CODE_INVALID_ARG
    if status == STATUS_UNAVAILABLE:
        return CODE_UNAVAILABLE
    if status == STATUS_UNIMPLEMENTED:
        return CODE_UNSUPPORTED
    if status == STATUS_CANCELLED:
        return CODE_CANCELLED
    return CODE_INTERNAL


cdef void answer_error(BlsCall *call, int status, const char *details, uint32_t flags) noexcept nogil:
    cdef Head head
    cdef size_t size = min(strlen(details), <size_t>LONGEST_TEXT)
    cdef Block *record = block_take(max(<size_t>1, size))
    if record == NULL:
        channel_exhausted(call.channel)
        return
    memcpy(record.data, details, size)
    memset(&head, 0, sizeof(Head))
    head.flags = <uint8_t>(FAILED | flags)
    head.code = <uint16_t>code_of_status(status)
    head.size = <uint32_t>size
    pass_on(call, &head, record, NULL)


cdef void end_with_error(BlsCall *call, int status, const char *details) noexcept nogil:
    call.credit = 1  # it may be sent
    drop_held(call)
    answer_error(call, status, details, FINAL)
    remove(call)


cdef void drop_held(BlsCall *call) noexcept nogil:
    cdef Held *held
    while call.first_held != NULL:
        held = call.first_held
        call.first_held = held.next
        block_give(held.record)
        block_give(held.receipt)
        free(held)
    call.last_held = NULL


cdef void answer(BlsCall *call, const Response *response, bint final) noexcept nogil:
    cdef Head head
    cdef Block *record = NULL
    cdef size_t size
    memset(&head, 0, sizeof(Head))
    head.flags = FINAL if final else 0
    if response.empty:
        head.flags |= EMPTY
        pass_on(call, &head, NULL, response.receipt)
        return
    size = answer_size(response)
    if size + sizeof(Head) > PACKET:
        head.flags |= IN_ARENA
        record = arena_take(call.channel.arena, size)
    elif size:
        record = block_take(size)
    if record == NULL or size >> 32:
        block_give(record)
        answer_error(call, STATUS_RESOURCE_EXHAUSTED, "no memory for the response, or it exceeds 4 GiB",
                     FINAL if final else 0)
        return
    answer_write_to(response, record.data)
    head.size = <uint32_t>size
    pass_on(call, &head, record, response.receipt)


# ---------------------------------------------------------------------------------------------------------------------
# To the worker

cdef void pass_on(BlsCall *call, Head *head, Block *record, Block *receipt) noexcept nogil:
    # takes the record; in order, and as the credit allows
    cdef Held *held
    head.kind = BLS_RESPONSE
    head.id = call.id
    if call.first_held == NULL and call.credit:
        call.credit -= 1
        send(call, head, record)
        return
    held = <Held *>malloc(sizeof(Held))
    if held == NULL:
        block_give(record)
        channel_exhausted(call.channel)
        return
    held.next = NULL
    held.head = head[0]
    held.record = record
    held.receipt = NULL
    if receipt != NULL:
        held.receipt = block_share(receipt)
    if call.last_held == NULL:
        call.first_held = held
    else:
        call.last_held.next = held
    call.last_held = held


cdef void send_held(BlsCall *call) noexcept nogil:
    cdef Held *held
    while call.first_held != NULL and call.credit:
        held = call.first_held
        call.first_held = held.next
        if call.first_held == NULL:
            call.last_held = NULL
        call.credit -= 1
        send(call, &held.head, held.record)
        block_give(held.receipt)
        free(held)
    if call.first_held == NULL and call.request == NULL:
        remove(call)


cdef void send(BlsCall *call, Head *head, Block *record) noexcept nogil:
    # takes the record; one in the arena is the worker's until RELEASE
    cdef Channel *channel = call.channel
    if call.life != channel.life:
        block_give(record)
    elif head.flags & IN_ARENA:
        head.offset = <uint64_t>(record.data - channel.arena.base)
        if lend_message(channel, record, head.offset):
            calls_send(channel, head, NULL, 0)
        else:
            refuse_message(channel, head)
    elif record == NULL:
        calls_send(channel, head, NULL, 0)
    else:
        calls_send(channel, head, record.data, head.size)
        block_give(record)


cdef bint lend_message(Channel *channel, Block *block, uint64_t offset) noexcept nogil:
    # takes the block; False: the worker has as many as it may, or is gone
    cdef bint lent
    lock(&channel.guard)
    lent = channel.calls.fd >= 0 and loan_begin(&channel.ledger, LOAN_MESSAGE, block, offset)
    unlock(&channel.guard)
    if not lent:
        block_give(block)
    return lent


cdef void refuse_message(Channel *channel, Head *head) noexcept nogil:
    # an error in the place of a response that cannot be lent
    cdef const char *text = TOO_MANY_RESPONSES
    head.flags = <uint8_t>(FAILED | (head.flags & FINAL))
    head.code = CODE_UNAVAILABLE
    head.offset = 0
    head.size = <uint32_t>strlen(text)
    calls_send(channel, head, text, head.size)
