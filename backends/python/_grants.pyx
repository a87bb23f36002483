"""Memory that a worker may use while it executes: granted with the EXECUTE, as much as before, or when the worker
asks."""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from inferd._native.atomic cimport load32
from inferd._native.execution.batch cimport NativeBatch
from inferd._native.memory.arena cimport arena_holds, arena_take
from inferd._native.memory.resource cimport Block, block_give, block_take
from inferd._native.request.request cimport Request
from inferd._native.threads cimport lock, unlock
from inferd.backends.python._channel cimport MSG_DONTWAIT, Channel, channel_break, channel_exhausted, packet_send
from inferd.backends.python._loans cimport LOAN_OUTPUT, LoanKind, loan_begin, loan_end_one, loan_find
from inferd.backends.python._wire cimport ALLOCATED, IN_ARENA, Head, aligned

cdef enum:
    SPARE = 4096             # bytes of a grant beyond the expected size
    FORGET = 16              # batches after which a large output is mostly forgotten


cdef Block *lend(Channel *channel, LoanKind kind, uint64_t size) noexcept nogil:
    cdef Block *block = arena_take(channel.arena, size)
    cdef bint lent
    if block == NULL:
        return NULL
    lock(&channel.guard)
    lent = loan_begin(&channel.loans, kind, block, <uint64_t>(block.data - channel.arena.base))
    unlock(&channel.guard)
    if lent:
        return block
    block_give(block)
    return NULL


cdef Block *lent_record(Channel *channel, LoanKind kind, const Head *head) noexcept nogil:
    # The thread that reads packets which name loans of a kind also ends these loans, so this one lasts during the copy.
    cdef Block *copy
    cdef bint lent
    lock(&channel.guard)
    lent = loan_find(&channel.loans, kind, head.offset, head.size) != NULL
    unlock(&channel.guard)
    if not lent:
        channel_break(channel, "sent a packet that lies where it may not")
        return NULL
    copy = record_copy(channel.arena.base + head.offset, head.size)
    if copy == NULL:
        channel_exhausted(channel)
    return copy


cdef Block *grant(Channel *channel, uint64_t size) noexcept nogil:
    return lend(channel, LOAN_OUTPUT, size)


cdef void grants_end(Channel *channel) noexcept nogil:
    cdef Block *block
    channel.execute_block = NULL
    # Only the caller lends and ends loans of this kind; `end_loans` ends all of the worker's.
    while load32(<const int32_t *>&channel.loans.of_kind[<int>LOAN_OUTPUT]):
        lock(&channel.guard)
        block = loan_end_one(&channel.loans, LOAN_OUTPUT)
        unlock(&channel.guard)
        block_give(block)


cdef Block *grant_outputs(Channel *channel, const NativeBatch *batch) noexcept nogil:
    cdef uint64_t wanted = <uint64_t>(channel.bytes_per_row * batch.rows)
    return grant(channel, wanted + SPARE) if wanted else NULL


cdef void grants_learn(Channel *channel, const NativeBatch *batch) noexcept nogil:
    cdef const Request *request
    cdef size_t size = 0
    cdef double per_row
    cdef uint32_t i, output
    for i in range(batch.count):
        request = batch.requests[i]
        if request == NULL:
            continue
        for output in range(batch.signature.output_count):
            if request.response.outputs[output].block != NULL and arena_holds(
                    channel.arena, request.response.outputs[output].data):
                size += aligned(request.response.outputs[output].size, 64)
    per_row = <double>size / batch.rows
    if per_row >= channel.bytes_per_row:
        channel.bytes_per_row = per_row
    else:
        channel.bytes_per_row -= (channel.bytes_per_row - per_row) / FORGET


cdef Head allocated(const Channel *channel, uint64_t id, const Block *block) noexcept nogil:
    cdef Head head
    memset(&head, 0, sizeof(Head))
    head.kind = ALLOCATED
    head.id = id
    if block == NULL:
        head.code = 1
    else:
        head.offset = <uint64_t>(block.data - channel.arena.base)
    return head


cdef bint grant_asked(Channel *channel, const Head *asked) noexcept nogil:
    cdef Head head = allocated(channel, asked.id, grant(channel, asked.offset))
    cdef int sent
    sent = packet_send(channel.work, &head, sizeof(Head), NULL, 0, MSG_DONTWAIT)
    if sent > 0:
        channel_break(channel, "asks for memory without reading the answers")
    return sent == 0


cdef Block *record_copy(const uint8_t *record, uint32_t size) noexcept nogil:
    cdef Block *block = block_take(max(<uint32_t>1, size))
    if block != NULL and size:
        memcpy(block.data, record, size)
    return block


cdef Block *granted_record(Channel *channel, const Head *head) noexcept nogil:
    cdef Block *block
    if head.flags & IN_ARENA:
        return lent_record(channel, LOAN_OUTPUT, head)
    block = record_copy(channel.packet + sizeof(Head), head.size)
    if block == NULL:
        channel_exhausted(channel)
    return block
