"""Sequences: the id, the waiting requests, and the state that the model has given a sequence.

The state of a sequence is in memory of its own. The model's output is copied there, unless the model has written it
there; if the block of the output contains little else, the block becomes the memory of the state. So a sequence that
pauses keeps no batch alive, and a model that writes to its inputs affects no other request.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memmove

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport load32
from inferd._native.list cimport list_append, list_prepend, list_remove
from inferd._native.memory.resource cimport Block, block_give, block_take
from inferd._native.request.request cimport Correlation, InputData, Request
from inferd._native.siphash cimport siphash

import os

cdef enum:
    FIRST_BUCKETS = 64
    FOREIGN = -2             # the size class of memory that another owner has lent


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef Sequence *sequence_new(const Correlation *correlation, uint32_t state_count) noexcept nogil:
    cdef Sequence *sequence = <Sequence *>calloc(1, sizeof(Sequence))
    cdef char *text
    if sequence == NULL:
        return NULL
    sequence.correlation = correlation[0]
    sequence.hash = correlation_hash(correlation)
    sequence.slot = -1
    sequence.state_count = state_count
    if correlation.text.data != NULL:
        text = <char *>malloc(correlation.text.size + 1)
        sequence.correlation.text.data = text
        if text == NULL:
            sequence_free(sequence)
            return NULL
        memcpy(text, correlation.text.data, correlation.text.size)
    if state_count:
        sequence.states = <InputData *>calloc(2 * state_count, sizeof(InputData))
        sequence.own = <Block **>calloc(state_count, sizeof(Block *))
        if sequence.states == NULL or sequence.own == NULL:
            sequence_free(sequence)
            return NULL
    return sequence


cdef void sequence_free(Sequence *sequence) noexcept nogil:
    cdef uint32_t i
    if sequence.states != NULL:
        for i in range(2 * sequence.state_count):
            block_give(sequence.states[i].block)
    free(sequence.states)
    free(sequence.own)
    free(<void *>sequence.correlation.text.data)
    free(sequence)


# ---------------------------------------------------------------------------------------------------------------------
# Lists of sequences

cdef void sequences_append(Sequences *list, Sequence *sequence, int64_t now) noexcept nogil:
    sequence.list = list
    sequence.since_ns = now
    list_append(list, sequence)
    list.count += 1


cdef void sequences_remove(Sequence *sequence) noexcept nogil:
    cdef Sequences *list = sequence.list
    if list == NULL:
        return
    assert_that(list.count > 0)
    list_remove(list, sequence)
    list.count -= 1
    sequence.list = NULL


# ---------------------------------------------------------------------------------------------------------------------
# Requests

cdef void sequence_append(Sequence *sequence, Request *request) noexcept nogil:
    request.sequenced.sequence = sequence
    list_append(&sequence.queue, request)
    sequence.waiting += 1


cdef void sequence_prepend(Sequence *sequence, Request *request) noexcept nogil:
    request.sequenced.sequence = sequence
    list_prepend(&sequence.queue, request)
    sequence.waiting += 1


cdef Request *sequence_pop(Sequence *sequence) noexcept nogil:
    cdef Request *request = sequence.queue.first
    assert_that(request != NULL and sequence.waiting > 0)
    list_remove(&sequence.queue, request)
    sequence.waiting -= 1
    return request


cdef Request *sequence_cut(Sequence *sequence, Request *request) noexcept nogil:
    cdef Requests *queue = &sequence.queue
    cdef Request *each = request
    while each != NULL:
        sequence.waiting -= 1
        each = each.next
    queue.last = request.previous
    if queue.last == NULL:
        queue.first = NULL
    else:
        queue.last.next = NULL
    request.previous = NULL
    return request


# ---------------------------------------------------------------------------------------------------------------------
# State

cdef uint8_t *room_for(Sequence *sequence, uint32_t i, const StatePlan *plan, size_t size) noexcept nogil:
    # memory of the state's own for `size` bytes: what it has, or a new block that replaces it
    cdef InputData *state = &sequence.states[i]
    cdef Block *own = sequence.own[i]
    if own == NULL or own.size < size or load32(&own.references) != 1:  # more than one: there is another reader
        own = block_take(max(size, 2 * state.size) if plan.growable else size)
        if own == NULL:
            return NULL
        sequence.own[i] = own
    assert_that(own.size >= size)
    return own.data


cdef void keep_own(Sequence *sequence, uint32_t i) noexcept nogil:
    # the state lies in its own memory now: give back the memory where it was before
    cdef InputData *state = &sequence.states[i]
    if state.block != sequence.own[i]:
        block_give(state.block)
        state.block = sequence.own[i]
    state.data = state.block.data


cdef bint begin_one(Sequence *sequence, uint32_t i, const StatePlan *plan, uint32_t rows) noexcept nogil:
    cdef InputData *state = &sequence.states[i]
    cdef const InputData *initial = &plan.initial
    cdef uint8_t *at = room_for(sequence, i, plan, initial.size * rows)
    cdef uint32_t _
    if at == NULL:
        return False
    keep_own(sequence, i)
    state.present = True
    state.size = initial.size * rows
    state.rank = initial.rank
    memcpy(state.shape, initial.shape, initial.rank * sizeof(int64_t))
    if rows > 1:
        state.shape[0] = rows
    for _ in range(rows):
        memcpy(at, initial.data, initial.size)
        at += initial.size
    return True


cdef bint states_begin(Sequence *sequence, const StatePlan *plans, uint32_t rows) noexcept nogil:
    cdef uint32_t i
    states_drop(sequence)
    for i in range(sequence.state_count):
        if not begin_one(sequence, i, &plans[i], rows):
            return False
    return True


cdef void states_drop(Sequence *sequence) noexcept nogil:
    cdef uint32_t i
    for i in range(sequence.state_count, 2 * sequence.state_count):
        block_give(sequence.states[i].block)
        sequence.states[i].block = NULL
        sequence.states[i].present = False


cdef inline bint is_worth_keeping(const InputData *brought) noexcept nogil:
    # Whether the state can take over the block: the block holds little else, and is not Python's. To give back a block
    # of Python's needs the GIL, and no thread may wait for the GIL under a lane's lock.
    return brought.block.size_class > FOREIGN and brought.size * 2 >= brought.block.size


cdef bint is_shared(const Request *request, const Block *block) noexcept nogil:
    # whether the response refers to it, too
    cdef uint32_t i
    for i in range(request.signature.output_count):
        if request.response.outputs[i].block == block:
            return True
    return False


cdef bint commit_one(Sequence *sequence, uint32_t i, const StatePlan *plan,
                     const Request *request) noexcept nogil:
    cdef InputData *state = &sequence.states[i]
    cdef InputData *brought = &sequence.states[sequence.state_count + i]
    cdef uint8_t *at
    if brought.data == state.data:
        pass  # written in place
    elif not plan.same_buffer and is_worth_keeping(brought) and not is_shared(request, brought.block):
        block_give(state.block)
        sequence.own[i] = NULL
        state.block = brought.block
        state.data = brought.data
        brought.block = NULL
    else:
        at = room_for(sequence, i, plan, brought.size)
        if at == NULL:
            return False
        memmove(at, brought.data, brought.size)
        keep_own(sequence, i)
    state.size = brought.size
    state.rank = brought.rank
    memcpy(state.shape, brought.shape, brought.rank * sizeof(int64_t))
    return True


cdef bint states_commit(Sequence *sequence, const StatePlan *plans, const Request *request) noexcept nogil:
    cdef uint32_t i
    cdef bint good = True
    for i in range(sequence.state_count):
        if sequence.states[sequence.state_count + i].present:
            good = commit_one(sequence, i, &plans[i], request) and good
    states_drop(sequence)
    return good


cdef const InputData *state_ahead(const Sequence *sequence, const StatePlan *plans, uint32_t state) noexcept nogil:
    if sequence.queue.first != NULL and sequence.queue.first.sequence_start:
        return &plans[state].initial
    return &sequence.states[state]


# ---------------------------------------------------------------------------------------------------------------------
# Sequences by id

cdef uint64_t[2] secret      # so that a client cannot choose ids that collide
secret[0] = int.from_bytes(os.urandom(8), "little")
secret[1] = int.from_bytes(os.urandom(8), "little")


cdef uint64_t correlation_hash(const Correlation *correlation) noexcept nogil:
    cdef uint64_t id[2]
    id[0] = correlation.owner
    id[1] = correlation.number
    if correlation.text.data != NULL:
        id[1] = siphash(secret, <const uint8_t *>correlation.text.data, correlation.text.size)
    return siphash(secret, <const uint8_t *>id, sizeof(id))


cdef inline bint is_same(const Correlation *a, const Correlation *b) noexcept nogil:
    if a.owner != b.owner or (a.text.data == NULL) != (b.text.data == NULL):
        return False
    if a.text.data == NULL:
        return a.number == b.number
    return a.text.size == b.text.size and memcmp(a.text.data, b.text.data, a.text.size) == 0


cdef Sequence *table_find_sequence(const SequenceTable *table, const Correlation *correlation) noexcept nogil:
    cdef uint64_t hash = correlation_hash(correlation)
    cdef Sequence *sequence
    if table.bucket_count == 0:
        return NULL
    sequence = table.buckets[hash & (table.bucket_count - 1)]
    while sequence != NULL and not (sequence.hash == hash and is_same(&sequence.correlation, correlation)):
        sequence = sequence.in_bucket
    return sequence


cdef inline void put(SequenceTable *table, Sequence *sequence) noexcept nogil:
    cdef Sequence **bucket = &table.buckets[sequence.hash & (table.bucket_count - 1)]
    sequence.in_bucket = bucket[0]
    bucket[0] = sequence


cdef bint grow(SequenceTable *table) noexcept nogil:
    cdef SequenceTable larger
    cdef Sequence *sequence
    cdef Sequence *following
    cdef uint32_t i
    larger.bucket_count = max(<uint32_t>FIRST_BUCKETS, table.bucket_count * 2)
    larger.count = table.count
    larger.buckets = <Sequence **>calloc(larger.bucket_count, sizeof(Sequence *))
    if larger.buckets == NULL:
        return False
    for i in range(table.bucket_count):
        sequence = table.buckets[i]
        while sequence != NULL:
            following = sequence.in_bucket
            put(&larger, sequence)
            sequence = following
    free(table.buckets)
    table[0] = larger
    return True


cdef bint table_add_sequence(SequenceTable *table, Sequence *sequence) noexcept nogil:
    if table.count >= table.bucket_count and not grow(table) and table.bucket_count == 0:
        return False
    put(table, sequence)
    table.count += 1
    sequence.listed = True
    return True


cdef void table_remove_sequence(SequenceTable *table, Sequence *sequence) noexcept nogil:
    cdef Sequence **link
    if not sequence.listed:
        return
    link = &table.buckets[sequence.hash & (table.bucket_count - 1)]
    while link[0] != sequence:
        link = &link[0].in_bucket
    link[0] = sequence.in_bucket
    sequence.listed = False
    table.count -= 1


cdef void table_free_sequences(SequenceTable *table) noexcept nogil:
    free(table.buckets)
    table.buckets = NULL
    table.bucket_count = 0
