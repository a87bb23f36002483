"""DONE: a worker reports the outcome of the batch that it has executed.

All of it is checked before any of it is used: whether the requests may end that way, which memory the model keeps, and
then each response. A worker that breaks a rule is ended.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.atomic cimport load32
from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, batch_detach, batch_reschedule
from inferd._native.memory.resource cimport block_give, block_share
from inferd._native.request.request cimport InputData, Request, request_fail
from inferd._native.status cimport STATUS_INTERNAL, STATUS_OK
from inferd._native.text cimport format_text
from inferd._native.threads cimport lock, unlock, wait
from inferd.backends.python._channel cimport Channel, channel_break, finish_detached
from inferd.backends.python._grants cimport granted_record, grants_learn
from inferd.backends.python._loans cimport LOAN_OUTPUT, Kept, execution_end, kept_give, kept_new
from inferd.backends.python._record cimport record_refers
from inferd.backends.python._responses cimport ResponseSource, response_peek, response_read, status_of_code
from inferd.backends.python._slots cimport SLOT_ANSWERED, Slot, slot_done, slot_find, slot_open
from inferd.backends.python._wire cimport (
    FAILED,
    KEPT,
    KEPT_GRANTS,
    RESPONSE_ERROR,
    RESPONSE_OPEN,
    RESPONSE_RESCHEDULE,
    Head,
)

cdef const char *UNREADABLE = "sent a response that cannot be read"
cdef const char *NO_MEMORY_TO_KEEP = "keeps views of its inputs, which the server has no memory to track"


cdef Slot *slot_at_rest(Channel *channel, uint64_t number) noexcept nogil:
    cdef Slot *slot = slot_find(&channel.slots, number)
    while slot.busy:
        wait(&channel.changed, &channel.guard)
        slot = slot_find(&channel.slots, number)  # the array may have grown
    return slot


cdef Kept *kept_of(Channel *channel, const NativeBatch *batch, bint grants) noexcept nogil:
    # The blocks that the EXECUTE has referred to, and, if those are kept, too, the grants; NULL: no memory. Only this
    # thread begins and ends grants of this kind.
    cdef uint32_t granted = load32(<const int32_t *>&channel.loans.of_kind[<int>LOAN_OUTPUT]) if grants else 0
    cdef Kept *kept = kept_new(1 + batch.count * batch.signature.input_count + granted)
    cdef const InputData *data
    cdef uint32_t i, input
    if kept == NULL:
        return NULL
    if channel.execute_block != NULL:
        kept.blocks[kept.count] = block_share(channel.execute_block)
        kept.count += 1
    for i in range(batch.count):
        for input in range(batch.signature.input_count):
            data = &batch.requests[i].inputs[input]
            if data.present and record_refers(channel, data):
                kept.blocks[kept.count] = block_share(data.block)
                kept.count += 1
    if granted:
        lock(&channel.guard)
        for i in range(channel.loans.count):
            if channel.loans.by_offset[i].kind == LOAN_OUTPUT:
                kept.blocks[kept.count] = block_share(channel.loans.by_offset[i].block)
                kept.count += 1
        unlock(&channel.guard)
    return kept


cdef const char *check_done(Channel *channel, const NativeBatch *batch, const ResponseSource *source,
                            bint failed) noexcept nogil:
    # Validate each request's outcome, and claim the requests that DONE answers, so that their senders cannot. Returns
    # the rule that DONE breaks; NULL: none. Under the guard.
    cdef const char *rule = NULL
    cdef Slot *slot
    cdef uint8_t status = RESPONSE_ERROR
    cdef size_t at = 0
    cdef size_t size
    cdef uint32_t i
    for i in range(batch.count):
        slot = slot_at_rest(channel, channel.numbers[i])
        if failed:
            status = RESPONSE_OPEN if slot.final_said else RESPONSE_ERROR
        else:
            size = response_peek(source, at, &status)
            if size == 0:
                return UNREADABLE
            at += size
        rule = slot_done(slot, status)
        if rule != NULL:
            return rule
    return NULL


cdef void detach(Channel *channel, NativeBatch *batch, uint32_t index) noexcept nogil:
    # the request's sender answers it, or has done so already
    cdef Slot *slot
    cdef Request *over = NULL
    cdef int64_t taken_ns
    lock(&channel.guard)
    slot = slot_at_rest(channel, channel.numbers[index])
    batch_detach(batch, index)
    taken_ns = slot.taken_ns
    if slot_open(slot):
        over = slot.request
    unlock(&channel.guard)
    if over != NULL:
        finish_detached(channel, over, taken_ns)


cdef bint read_responses(Channel *channel, NativeBatch *batch, const ResponseSource *source) noexcept nogil:
    # False: they cannot be read
    cdef uint8_t status = 0
    cdef size_t at = 0
    cdef size_t used
    cdef uint32_t i
    for i in range(batch.count):
        used = response_read(source, at, &batch.requests[i].response, &status)
        if used == 0:
            return False
        at += used
        if status == RESPONSE_OPEN:
            detach(channel, batch, i)
        elif status == RESPONSE_RESCHEDULE and batch.requests[i].response.status == STATUS_OK and not (
                batch_reschedule(batch, i)):  # a request whose states cannot be kept ends with the error
            request_fail(batch.requests[i], STATUS_INTERNAL, format_text(
                "a request of model '%s' was released to be rescheduled, which needs 'iterative_sequence'",
                channel.name))
    return True


cdef void fail_all(Channel *channel, NativeBatch *batch, const Head *head, const ResponseSource *source) noexcept nogil:
    # except those that their senders have ended already
    cdef bint ended
    cdef uint32_t i
    for i in range(batch.count):
        lock(&channel.guard)
        ended = slot_at_rest(channel, channel.numbers[i]).state != SLOT_ANSWERED
        unlock(&channel.guard)
        if ended:
            detach(channel, batch, i)
        else:
            request_fail(batch.requests[i], status_of_code(head.code), format_text(
                "%.*s", <int>source.size, <const char *>source.record))


cdef bint done_take(Channel *channel, NativeBatch *batch, const Head *head) noexcept nogil:
    cdef const char *rule = NULL
    cdef Kept *kept = NULL
    cdef ResponseSource source
    batch.output_start_ns = now_ns()
    source.record_block = granted_record(channel, head)
    if source.record_block == NULL:
        return False
    source.record = source.record_block.data
    source.size = head.size
    source.arena = channel.arena
    source.guard = &channel.guard
    source.loans = &channel.loans
    source.kind = LOAN_OUTPUT
    if head.flags & KEPT:
        kept = kept_of(channel, batch, head.flags & KEPT_GRANTS)
        if kept == NULL:
            rule = NO_MEMORY_TO_KEEP
    lock(&channel.guard)
    if rule == NULL:
        kept = execution_end(&channel.loans, kept, &rule)
    if rule == NULL:
        rule = check_done(channel, batch, &source, head.flags & FAILED)
    unlock(&channel.guard)
    kept_give(kept)
    if rule == NULL:
        if head.flags & FAILED:
            fail_all(channel, batch, head, &source)
        elif not read_responses(channel, batch, &source):
            rule = UNREADABLE
    block_give(source.record_block)
    if rule != NULL:
        channel_break(channel, rule)
        return False
    grants_learn(channel, batch)
    return True
