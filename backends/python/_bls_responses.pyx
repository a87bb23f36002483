"""The responses to calls to other models, on their way to the worker.

At most BLS_WINDOW responses of a call are on the way to the worker. Later ones wait here, together with their
acknowledgements, so that a decoupled model does not run ahead of the model that calls it.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strlen

from inferd._native.memory.arena cimport arena_take
from inferd._native.memory.resource cimport Block, block_give, block_share, block_take
from inferd._native.request.request cimport Response
from inferd._native.service.encoding cimport encoded_size, encoded_write
from inferd._native.status cimport (
    STATUS_CANCELLED,
    STATUS_INVALID_ARGUMENT,
    STATUS_NOT_FOUND,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAVAILABLE,
    STATUS_UNIMPLEMENTED,
)
from inferd._native.threads cimport lock, unlock
from inferd.backends.python._channel cimport Channel, calls_send, channel_exhausted, channel_life
from inferd.backends.python._loans cimport LOAN_MESSAGE, loan_begin
from inferd.backends.python._wire cimport (
    BLS_RESPONSE,
    CODE_CANCELLED,
    CODE_INTERNAL,
    CODE_INVALID_ARG,
    CODE_NOT_FOUND,
    CODE_UNAVAILABLE,
    CODE_UNSUPPORTED,
    EMPTY,
    FAILED,
    FINAL,
    IN_ARENA,
    PACKET,
    Head,
)

cdef enum:
    LONGEST_TEXT = 32 << 10

cdef const char *TOO_MANY_RESPONSES = "the model keeps too many responses of other models"


# ---------------------------------------------------------------------------------------------------------------------
# Responses as packets

cdef void call_answer(BlsCall *call, const Response *response, bint final) noexcept nogil:
    cdef Head head
    cdef Block *record = NULL
    cdef size_t size
    memset(&head, 0, sizeof(Head))
    head.flags = FINAL if final else 0
    if response.empty:
        head.flags |= EMPTY
        pass_on(call, &head, NULL, response.ack)
        return
    size = encoded_size(response)
    if size + sizeof(Head) > PACKET:
        head.flags |= IN_ARENA
        record = arena_take(call.channel.arena, size)
    elif size:
        record = block_take(size)
    if record == NULL or size >> 32:
        block_give(record)
        call_fail(call, STATUS_RESOURCE_EXHAUSTED, "no memory for the response, or it exceeds 4 GiB",
                  FINAL if final else 0)
        return
    encoded_write(response, record.data)
    head.size = <uint32_t>size
    pass_on(call, &head, record, response.ack)


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


cdef void call_fail(BlsCall *call, int status, const char *details, uint32_t flags) noexcept nogil:
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


# ---------------------------------------------------------------------------------------------------------------------
# In order, and as the credit allows

cdef void pass_on(BlsCall *call, Head *head, Block *record, Block *ack) noexcept nogil:
    # Send in order, as the credit allows. Takes the record over.
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
    held.ack = NULL
    if ack != NULL:
        held.ack = block_share(ack)
    if call.last_held == NULL:
        call.first_held = held
    else:
        call.last_held.next = held
    call.last_held = held


cdef void call_send_held(BlsCall *call) noexcept nogil:
    cdef Held *held
    while call.first_held != NULL and call.credit:
        held = call.first_held
        call.first_held = held.next
        if call.first_held == NULL:
            call.last_held = NULL
        call.credit -= 1
        send(call, &held.head, held.record)
        block_give(held.ack)
        free(held)


cdef void call_drop_held(BlsCall *call) noexcept nogil:
    cdef Held *held
    while call.first_held != NULL:
        held = call.first_held
        call.first_held = held.next
        block_give(held.record)
        block_give(held.ack)
        free(held)
    call.last_held = NULL


# ---------------------------------------------------------------------------------------------------------------------
# To the worker

cdef void send(BlsCall *call, Head *head, Block *record) noexcept nogil:
    # takes the record over; a record in the arena is lent to the worker until RELEASE
    cdef Channel *channel = call.channel
    if head.flags & IN_ARENA:
        head.offset = <uint64_t>(record.data - channel.arena.base)
        if lend_message(channel, call.life, record, head.offset):
            calls_send(channel, call.life, head, NULL, 0)
        else:
            call_refuse(channel, call.life, call.id, TOO_MANY_RESPONSES, head.flags & FINAL)
    elif record == NULL:
        calls_send(channel, call.life, head, NULL, 0)
    else:
        calls_send(channel, call.life, head, record.data, head.size)
        block_give(record)


cdef bint lend_message(Channel *channel, uint64_t life, Block *block, uint64_t offset) noexcept nogil:
    # takes the block over; False: the worker has the maximum of messages, or has ended
    cdef bint lent
    lock(&channel.guard)
    lent = (channel.calls.fd >= 0 and channel_life(channel) == life
            and loan_begin(&channel.loans, LOAN_MESSAGE, block, offset))
    unlock(&channel.guard)
    if not lent:
        block_give(block)
    return lent


cdef void call_refuse(Channel *channel, uint64_t life, uint64_t id, const char *text, uint32_t flags) noexcept nogil:
    cdef Head head
    memset(&head, 0, sizeof(Head))
    head.kind = BLS_RESPONSE
    head.flags = <uint8_t>(FAILED | flags)
    head.code = CODE_UNAVAILABLE
    head.id = id
    head.size = <uint32_t>strlen(text)
    calls_send(channel, life, &head, text, head.size)
