"""Packets of the side socket that are handled without the GIL: responses of senders, and memory."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from inferd._native.atomic cimport load32
from inferd._native.memory.resource cimport Block, block_give, block_wrap
from inferd._native.request.bridge cimport Bridge, bridge_put, bridge_signal
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request, Response, response_fail, response_free, response_new
from inferd._native.request.statistics cimport RESPONSE_CANCEL, ResponseKind, statistics_reported
from inferd._native.status cimport STATUS_INTERNAL, STATUS_OK
from inferd._native.tensors.completion cimport response_complete
from inferd._native.text cimport format_text
from inferd._native.threads cimport lock, notify_all, unlock
from inferd.backends.python._channel cimport (
    Channel,
    channel_break,
    channel_exhausted,
    channel_give,
    channel_share,
    finish_detached,
    send_credit,
    side_send,
)
from inferd.backends.python._grants cimport allocated, lend, lent_record, record_copy
from inferd.backends.python._loans cimport (
    LOAN_MESSAGE,
    LOAN_PACKET,
    Kept,
    Loan,
    LoanKind,
    execution_release,
    kept_give,
    loan_end,
    loan_find,
)
from inferd.backends.python._responses cimport ResponseSource, response_read
from inferd.backends.python._slots cimport (
    READ_FURTHER,
    READ_NOTHING,
    READ_OWN,
    READ_SURPLUS,
    Reading,
    Slot,
    slot_ask,
    slot_credit,
    slot_find,
    slot_read,
    slot_response,
    slot_return,
)
from inferd.backends.python._wire cimport (
    ALLOCATE,
    CREDIT,
    EMPTY,
    FINAL,
    FREE,
    IN_ARENA,
    PLACE_ARENA,
    RELEASE,
    RESPONSE,
    STATISTICS,
    Head,
    ResponseRecord,
    StatisticsRecord,
    TensorRecord,
)

# ---------------------------------------------------------------------------------------------------------------------
# Grants

cdef void side_allocate(Channel *channel, const Head *asked) noexcept nogil:
    cdef Head head = allocated(channel, asked.id, lend(channel, LOAN_PACKET, asked.offset))
    side_send(channel, 0, &head, NULL, 0)


cdef bint spend(Channel *channel, LoanKind kind, uint64_t offset) noexcept nogil:
    # end the loan of this kind that contains this byte; False: there is none
    cdef Block *block = NULL
    cdef Loan *loan
    lock(&channel.guard)
    loan = loan_find(&channel.loans, kind, offset, 1)
    if loan != NULL:
        block = loan_end(&channel.loans, loan)
    unlock(&channel.guard)
    block_give(block)
    return block != NULL


cdef void spend_named(Channel *channel, const Head *head, const Block *record) noexcept nogil:
    # end the grants that contain a response: its record, of which this is a copy, and its tensors
    cdef ResponseRecord response
    cdef TensorRecord tensor
    cdef size_t at = sizeof(ResponseRecord)
    cdef uint32_t _
    if channel.loans.of_kind[<int>LOAN_PACKET] == 0:  # this thread is the only one that lends and ends these
        return
    if head.flags & IN_ARENA:
        spend(channel, LOAN_PACKET, head.offset)
    if head.size < sizeof(ResponseRecord):
        return
    memcpy(&response, record.data, sizeof(ResponseRecord))
    for _ in range(response.tensors):
        if head.size < at + sizeof(TensorRecord):
            return
        memcpy(&tensor, record.data + at, sizeof(TensorRecord))
        if tensor.place == PLACE_ARENA:
            spend(channel, LOAN_PACKET, tensor.offset)
        at += sizeof(TensorRecord) + tensor.rank * sizeof(int64_t)


cdef void take_release(Channel *channel, const Head *head) noexcept nogil:
    # the worker releases a message, known by its place, or an execution, known by its number
    cdef const char *rule = NULL
    cdef Kept *kept
    if head.id == 0:
        if not spend(channel, LOAN_MESSAGE, head.offset):
            channel_break(channel, "released memory that it does not have")
        return
    lock(&channel.guard)
    kept = execution_release(&channel.loans, head.id, &rule)
    unlock(&channel.guard)
    kept_give(kept)
    if rule != NULL:
        channel_break(channel, rule)


# ---------------------------------------------------------------------------------------------------------------------
# Responses of senders

cdef struct Acknowledgement:
    # the work that is left when the client's side has finished with a response
    Channel *channel
    uint64_t number


cdef void acknowledge(void *owner) noexcept nogil:
    cdef Acknowledgement *ack = <Acknowledgement *>owner
    cdef Channel *channel = ack.channel
    cdef Slot *slot
    cdef uint32_t credit = 0
    lock(&channel.guard)
    slot = slot_find(&channel.slots, ack.number)
    if slot != NULL:
        slot_return(slot, 1)
        credit = slot_credit(slot)
    unlock(&channel.guard)
    send_credit(channel, ack.number, credit)
    channel_give(channel)
    free(ack)


cdef void take_credit_wish(Channel *channel, uint64_t number) noexcept nogil:
    cdef Slot *slot
    cdef uint32_t credit = 0
    lock(&channel.guard)
    slot = slot_find(&channel.slots, number)
    if slot != NULL:
        slot_ask(slot)
        credit = slot_credit(slot)
    unlock(&channel.guard)
    send_credit(channel, number, credit)


cdef Block *ack_new(Channel *channel, uint64_t number) noexcept nogil:
    # a block without content; giving it back is credit for the sender
    cdef Acknowledgement *ack = <Acknowledgement *>malloc(sizeof(Acknowledgement))
    cdef Block *block
    if ack == NULL:
        return NULL
    block = block_wrap(NULL, 0, acknowledge, ack)
    if block == NULL:
        free(ack)
        return NULL
    ack.channel = channel_share(channel)
    ack.number = number
    return block


cdef Block *record_of(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    # a private copy; NULL: the worker is ended
    cdef Block *block
    if head.flags & IN_ARENA:
        return lent_record(channel, LOAN_PACKET, head)
    block = record_copy(record, head.size)
    if block == NULL:
        channel_exhausted(channel)
    return block


cdef bint fill(Channel *channel, const Head *head, Block *record, Response *response) noexcept nogil:
    # False: the worker is ended
    cdef ResponseSource source
    cdef uint8_t status
    source.record_block = record
    source.record = record.data
    source.size = head.size
    source.arena = channel.arena
    source.guard = &channel.guard
    source.loans = &channel.loans
    source.kind = LOAN_PACKET
    if response_read(&source, 0, response, &status) == 0:
        channel_break(channel, "sent a response that cannot be read")
        return False
    block_give(response.ack)
    response.ack = ack_new(channel, head.id)
    return True


cdef void send_on(Channel *channel, Response *response) noexcept nogil:
    # return a response that is not the final one; `side_signal` follows
    cdef Request *request = response.request
    if load32(&request.abandonment.happened):
        response_free(response)
        return
    if response.status == STATUS_OK:
        response_complete(response)
    channel.unsignalled = request.bridge
    bridge_put(<Bridge *>request.bridge, response, response)


cdef void side_signal(Channel *channel) noexcept nogil:
    if channel.unsignalled != NULL:
        bridge_signal(<Bridge *>channel.unsignalled)
        channel.unsignalled = NULL


cdef bint read_into(Channel *channel, const Head *head, Block *record, Request *request,
                    Reading reading) noexcept nogil:
    # read a RESPONSE into the response that it belongs to; False: the worker is ended
    cdef Response *response = &request.response
    if reading == READ_SURPLUS:
        response_fail(response, STATUS_INTERNAL, format_text(
            "model '%s' has given more than one response, the request takes only one", request.signature.name.data))
    elif reading == READ_FURTHER:
        response = response_new(request)
        if response == NULL:
            channel_exhausted(channel)
            return False
        if not fill(channel, head, record, response):
            response_free(response)
            return False
        send_on(channel, response)
    elif head.flags & EMPTY:
        response.empty = response.empty or reading == READ_OWN
    elif not fill(channel, head, record, response):
        return False
    if head.flags & FINAL and response.status == STATUS_OK and not response.empty:
        response_complete(response)
    return True


cdef void finish_reading(Channel *channel, const Head *head, Reading reading) noexcept nogil:
    # end the request, if it has its final response and DONE has come
    cdef Slot *slot
    cdef Request *over = NULL
    cdef int64_t taken_ns
    cdef uint32_t credit = 0
    lock(&channel.guard)
    slot = slot_find(&channel.slots, head.id)
    taken_ns = slot.taken_ns
    if slot_read(slot, head.flags):
        over = slot.request
    elif reading == READ_SURPLUS:
        slot_return(slot, 1)  # the response is discarded, so no client will acknowledge it
        credit = slot_credit(slot)
    unlock(&channel.guard)
    notify_all(&channel.changed)
    send_credit(channel, head.id, credit)
    if over != NULL:
        finish_detached(channel, over, taken_ns)


cdef void take_response(Channel *channel, const Head *head, const uint8_t *data) noexcept nogil:
    # A response that is not final is returned at once, unless the request takes only one: then it is kept as the final
    # one, and returned when the sender has sent FINAL.
    cdef const char *rule
    cdef Request *request = NULL
    cdef Reading reading
    cdef Head said = head[0]
    cdef Block *record = record_of(channel, head, data)
    if record == NULL:
        return
    lock(&channel.guard)
    rule = slot_response(&channel.slots, head.id, head.flags, &reading)
    if rule == NULL and reading != READ_NOTHING:
        request = slot_find(&channel.slots, head.id).request
    unlock(&channel.guard)
    if rule != NULL:
        channel_break(channel, rule)
    elif request != NULL:
        if not read_into(channel, head, record, request, reading):
            said.flags &= <uint8_t>~FINAL  # the request is answered when the worker has ended
        finish_reading(channel, &said, reading)
    spend_named(channel, head, record)
    block_give(record)


# ---------------------------------------------------------------------------------------------------------------------

cdef void take_statistics(Channel *channel, const Head *head, const uint8_t *data) noexcept nogil:
    cdef StatisticsRecord record
    cdef Slot *slot
    cdef Lane *lane
    if head.size != sizeof(StatisticsRecord) or head.flags & IN_ARENA or head.code > <int>RESPONSE_CANCEL:
        channel_break(channel, "sent statistics that cannot be read")
        return
    memcpy(&record, data, sizeof(StatisticsRecord))
    lock(&channel.guard)
    lane = channel.lane
    slot = slot_find(&channel.slots, head.id)
    if slot != NULL and slot.request.is_warmup:
        lane = NULL
    unlock(&channel.guard)
    if lane != NULL:
        statistics_reported(&lane.statistics, <ResponseKind>head.code, record.index, record.infer_ns, record.output_ns)


cdef Block *side_record(Channel *channel, const Head *head) noexcept nogil:
    cdef Block *block = lent_record(channel, LOAN_PACKET, head)
    if block != NULL:
        spend(channel, LOAN_PACKET, head.offset)
    return block


cdef bint side_take(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    if head.kind == RESPONSE:
        take_response(channel, head, record)
    elif head.kind == ALLOCATE:
        side_allocate(channel, head)
    elif head.kind == FREE:
        if not spend(channel, LOAN_PACKET, head.offset):
            channel_break(channel, "gave back memory that it does not have")
    elif head.kind == CREDIT:
        take_credit_wish(channel, head.id)
    elif head.kind == RELEASE:
        take_release(channel, head)
    elif head.kind == STATISTICS:
        take_statistics(channel, head, record)
    else:
        return False
    return True
