"""The packets of the side socket that are dealt with without the GIL: responses of senders, and memory."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from _native.atomic cimport load32
from _native.inference.bridge cimport Bridge, bridge_return
from _native.inference.request cimport (
    STATUS_INTERNAL,
    STATUS_OK,
    Request,
    Response,
    response_fail,
    response_free,
    response_new,
)
from _native.inference.response cimport response_complete
from _native.memory.arena cimport arena_take
from _native.memory.resource cimport Block, block_give, block_wrap
from _native.text cimport format_text
from _native.threads cimport lock, notify_all, unlock
from backends.python._channel cimport (
    Channel,
    Granted,
    Slot,
    channel_give,
    channel_disown,
    channel_share,
    credit_due,
    finish_detached,
    lease_at,
    lease_release,
    send_credit,
    side_send,
    slot_find,
)
from backends.python._grants cimport grant_holds, record_copy
from backends.python._responses cimport Origin, response_read
from backends.python._wire cimport (
    ALLOCATE,
    ALLOCATED,
    CREDIT,
    EMPTY,
    FINAL,
    FREE,
    IN_ARENA,
    PLACE_ARENA,
    RELEASE,
    RESPONSE,
    Head,
    ResponseRecord,
    TensorRecord,
)

cdef enum:
    MOST_GRANTS = 64         # that a worker may hold on the side socket at a time


# ---------------------------------------------------------------------------------------------------------------------
# Grants

cdef void side_allocate(Channel *channel, const Head *asked) noexcept nogil:
    cdef Head head
    cdef Granted *granted = <Granted *>malloc(sizeof(Granted))
    memset(&head, 0, sizeof(Head))
    head.kind = ALLOCATED
    head.id = asked.id
    head.code = 1
    if granted != NULL:
        granted.block = arena_take(channel.arena, asked.offset)
        if granted.block != NULL:
            granted.next = channel.side_grants
            channel.side_grants = granted
            head.code = 0
            head.offset = <uint64_t>(granted.block.data - channel.arena.base)
        else:
            free(granted)
    side_send(channel, &head, NULL, 0)


cdef void spend(Channel *channel, uint64_t offset) noexcept nogil:
    # the grant that holds this byte ends
    cdef Granted **link = &channel.side_grants
    cdef Granted *granted
    cdef const uint8_t *data = channel.arena.base + offset
    while link[0] != NULL:
        granted = link[0]
        if granted.block.data <= data < granted.block.data + granted.block.size:
            link[0] = granted.next
            block_give(granted.block)
            free(granted)
            return
        link = &granted.next


cdef void spend_named(Channel *channel, const uint8_t *record, size_t size) noexcept nogil:
    # the grants that the tensors of this response lie in
    cdef ResponseRecord head
    cdef TensorRecord tensor
    cdef size_t at = sizeof(ResponseRecord)
    cdef uint32_t _
    if size < sizeof(ResponseRecord) or channel.side_grants == NULL:
        return
    memcpy(&head, record, sizeof(ResponseRecord))
    for _ in range(head.tensors):
        if size - at < sizeof(TensorRecord):
            return
        memcpy(&tensor, record + at, sizeof(TensorRecord))
        if tensor.place == PLACE_ARENA:
            spend(channel, tensor.offset)
        at += sizeof(TensorRecord) + tensor.rank * sizeof(int64_t)
        if at > size:
            return


# ---------------------------------------------------------------------------------------------------------------------
# Responses of senders

cdef struct Receipt:
    # what is left to do when the client's side has done with a response
    Channel *channel
    uint64_t number


cdef void acknowledge(void *owner) noexcept nogil:
    cdef Receipt *receipt = <Receipt *>owner
    cdef Channel *channel = receipt.channel
    cdef Slot *slot
    cdef uint32_t credit = 0
    lock(&channel.guard)
    slot = slot_find(channel, receipt.number)
    if slot != NULL:
        slot.returned += 1
        credit = credit_due(slot)
    unlock(&channel.guard)
    send_credit(channel, receipt.number, credit)
    channel_give(channel)
    free(receipt)


cdef void take_credit_wish(Channel *channel, uint64_t number) noexcept nogil:
    cdef Slot *slot
    cdef uint32_t credit = 0
    lock(&channel.guard)
    slot = slot_find(channel, number)
    if slot != NULL:
        slot.asked = True
        credit = credit_due(slot)
    unlock(&channel.guard)
    send_credit(channel, number, credit)


cdef Block *receipt_new(Channel *channel, uint64_t number) noexcept nogil:
    # a block without content, whose end is credit for the sender
    cdef Receipt *receipt = <Receipt *>malloc(sizeof(Receipt))
    cdef Block *block
    if receipt == NULL:
        return NULL
    block = block_wrap(NULL, 0, acknowledge, receipt)
    if block == NULL:
        free(receipt)
        return NULL
    receipt.channel = channel_share(channel)
    receipt.number = number
    return block


cdef Block *copy_record(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    # NULL: it is not where it may be, or there is no memory
    cdef const Granted *granted = channel.side_grants
    if head.flags & IN_ARENA:
        while granted != NULL and not grant_holds(channel, granted.block, head.offset, head.size):
            granted = granted.next
        if granted == NULL:
            return NULL
        record = channel.arena.base + head.offset
    return record_copy(record, head.size)


cdef bint fill(Channel *channel, const Head *head, const uint8_t *record, Response *response) noexcept nogil:
    # False: the worker does not speak as it should
    cdef Origin origin
    cdef Block *grants[MOST_GRANTS]
    cdef const Granted *granted = channel.side_grants
    cdef uint8_t status
    cdef size_t used
    origin.record_block = copy_record(channel, head, record)
    if origin.record_block == NULL:
        return False
    origin.record = origin.record_block.data
    origin.size = head.size
    origin.arena = channel.arena
    origin.blocks = grants
    origin.count = 0
    while granted != NULL and origin.count < MOST_GRANTS:
        grants[origin.count] = granted.block
        origin.count += 1
        granted = granted.next
    used = response_read(&origin, 0, response, &status)
    block_give(response.receipt)
    response.receipt = receipt_new(channel, head.id)
    spend_named(channel, origin.record, origin.size)
    if head.flags & IN_ARENA:
        spend(channel, head.offset)
    block_give(origin.record_block)
    return used != 0


cdef void send_on(Response *response) noexcept nogil:
    # one that is not the final one
    cdef Request *request = response.request
    if load32(&request.abandoned):
        response_free(response)
        return
    if response.status == STATUS_OK:
        response_complete(response)
    bridge_return(<Bridge *>request.bridge, response, response)


cdef void finish(Channel *channel, uint64_t number) noexcept nogil:
    # the final response of a request is complete: it leaves now, or with DONE
    cdef Slot *slot
    cdef Request *over = NULL
    cdef int64_t taken_ns = 0
    lock(&channel.guard)
    slot = slot_find(channel, number)
    slot.busy = False
    if slot.detached:
        over = slot.request
        taken_ns = slot.taken_ns
    else:
        slot.finished = True
    unlock(&channel.guard)
    notify_all(&channel.changed)
    if over != NULL:
        finish_detached(channel, over, taken_ns)


cdef inline bint takes_one(const Request *request) noexcept nogil:
    return request.single or not request.signature.decoupled


cdef void take_response(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    # A response that is not final goes its way at once, unless the request takes only one: then it is kept as the final
    # one, and leaves when the sender says that it was.
    cdef Slot *slot
    cdef Request *request
    cdef Response *response = NULL
    cdef bint final = head.flags & FINAL
    cdef bint second = False
    cdef bint good = True
    lock(&channel.guard)
    slot = slot_find(channel, head.id)
    if slot == NULL or slot.finished:
        unlock(&channel.guard)
        spend_named(channel, record, 0 if head.flags & IN_ARENA else head.size)
        return
    slot.busy = True  # so that it stays, though the guard is not held
    request = slot.request
    if takes_one(request) and slot.answered:
        second = not head.flags & EMPTY
    else:
        response = &request.response
    if not head.flags & EMPTY:
        slot.answered = True
    unlock(&channel.guard)
    if second:
        response_fail(&request.response, STATUS_INTERNAL, format_text(
            "model '%s' has given more than one response, the request takes only one", request.signature.name.data))
        spend_named(channel, record, 0 if head.flags & IN_ARENA else head.size)
    elif response != NULL and not final and not takes_one(request):
        response = response_new(request)
        good = response != NULL
    if good and response != NULL:
        if head.flags & EMPTY:
            response.empty = True
        else:
            good = fill(channel, head, record, response)
    if not good:
        channel_disown(channel)  # its requests are answered when it has ended
    elif final:
        if request.response.status == STATUS_OK and not request.response.empty:
            response_complete(&request.response)
        finish(channel, head.id)
        return
    lock(&channel.guard)
    slot_find(channel, head.id).busy = False
    unlock(&channel.guard)
    notify_all(&channel.changed)
    if response == NULL or response == &request.response:
        return
    if good:
        send_on(response)
    else:
        response_free(response)


# ---------------------------------------------------------------------------------------------------------------------

cdef Block *side_record(Channel *channel, const Head *head) noexcept nogil:
    cdef Block *block = copy_record(channel, head, NULL)
    if block != NULL:
        spend(channel, head.offset)
    return block


cdef bint side_take(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    if head.kind == RESPONSE:
        take_response(channel, head, record)
    elif head.kind == ALLOCATE:
        side_allocate(channel, head)
    elif head.kind == FREE:
        spend(channel, head.offset)
    elif head.kind == CREDIT:
        take_credit_wish(channel, head.id)
    elif head.kind == RELEASE:
        lock(&channel.guard)
        lease_release(channel, head.id if head.id else lease_at(head.offset))
        unlock(&channel.guard)
    else:
        return False
    return True
