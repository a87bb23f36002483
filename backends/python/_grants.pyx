"""Memory that a worker may use while it executes: granted with the EXECUTE as experience says, or when it asks."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memset

from _native.execution.batch cimport NativeBatch
from _native.inference.request cimport Request
from _native.memory.arena cimport arena_holds, arena_take
from _native.memory.resource cimport Block, block_give, block_take
from backends.python._channel cimport MSG_DONTWAIT, Channel, channel_disown, packet_send
from backends.python._wire cimport ALLOCATED, IN_ARENA, Head, aligned

cdef enum:
    SPARE = 4096             # bytes of a grant beyond what is expected
    FORGET = 16              # batches after which a large output is mostly forgotten


cdef Block *grant(Channel *channel, uint64_t size) noexcept nogil:
    cdef Block **grown
    cdef Block *block
    if channel.grant_count == channel.grant_capacity:
        grown = <Block **>realloc(channel.grants, (channel.grant_capacity * 2 + 4) * sizeof(Block *))
        if grown == NULL:
            return NULL
        channel.grants = grown
        channel.grant_capacity = channel.grant_capacity * 2 + 4
    block = arena_take(channel.arena, size)
    if block != NULL:
        channel.grants[channel.grant_count] = block
        channel.grant_count += 1
    return block


cdef void grants_end(Channel *channel) noexcept nogil:
    while channel.grant_count:
        channel.grant_count -= 1
        block_give(channel.grants[channel.grant_count])
    channel.execute_block = NULL


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


cdef bint grant_asked(Channel *channel, const Head *asked) noexcept nogil:
    cdef Head head
    cdef Block *block = grant(channel, asked.offset)
    cdef int sent
    memset(&head, 0, sizeof(Head))
    head.kind = ALLOCATED
    head.id = asked.id
    if block == NULL:
        head.code = 1
    else:
        head.offset = <uint64_t>(block.data - channel.arena.base)
    sent = packet_send(channel.work, &head, sizeof(Head), NULL, 0, MSG_DONTWAIT)
    if sent > 0:
        channel_disown(channel)  # it asks without reading the answers
    return sent == 0


cdef Block *record_copy(const uint8_t *record, uint32_t size) noexcept nogil:
    cdef Block *block = block_take(max(<uint32_t>1, size))
    if block != NULL and size:
        memcpy(block.data, record, size)
    return block


cdef const uint8_t *place_in_grants(const Channel *channel, uint64_t offset, uint32_t size) noexcept nogil:
    # NULL: it is not the worker's
    cdef uint32_t i
    for i in range(channel.grant_count):
        if grant_holds(channel, channel.grants[i], offset, size):
            return channel.arena.base + offset
    return NULL


cdef Block *granted_record(Channel *channel, const Head *head) noexcept nogil:
    cdef const uint8_t *record = channel.packet + sizeof(Head)
    if head.flags & IN_ARENA:
        record = place_in_grants(channel, head.offset, head.size)
        if record == NULL:
            return NULL
    return record_copy(record, head.size)
