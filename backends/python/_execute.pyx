"""How a batch gets to the worker of a Python model's instance, EXECUTE, and back, DONE, without the GIL.

Two threads take the same steps: the instance's thread, which waits between them (`execute`), and the front, which does
not (`begin_here` and `advance`). The front leaves everything that takes longer than a step should to the thread.
"""

from cpython.pycapsule cimport PyCapsule_New, PyCapsule_SetContext
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memset

from inferd._native.atomic cimport exchange32, load32
from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, await_fn, batch_fail, execute_fn
from inferd._native.execution.remote cimport BLOCKED, ENDED, UNDER_WAY, Progress, Remote
from inferd._native.execution.supply cimport supply_each, supply_free
from inferd._native.memory.resource cimport Block
from inferd._native.request.bridge cimport (
    WatchedDescriptor,
    bridge_attach,
    bridge_detach,
    bridge_look_again,
)
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport InputData, Request, request_follow, request_unfollow
from inferd._native.service.submission cimport Submission
from inferd._native.text cimport format_text
from inferd._native.threads cimport lock, notify_all, unlock, wait
from inferd._native.timers cimport Timer, timers_clear, timers_set
from inferd.backends.python._bls cimport bls_leave
from inferd.backends.python._channel cimport (
    MSG_DONTWAIT,
    Channel,
    channel_await,
    channel_break,
    channel_end,
    channel_exhausted,
    channel_nudge,
    channel_refuse,
    packet_poll,
    packet_receive,
    packet_send,
    slot_cancelled,
)
from inferd.backends.python._done cimport done_take, slot_at_rest
from inferd.backends.python._grants cimport grant, grant_asked, grant_outputs, grants_end
from inferd.backends.python._life cimport WORKER_ENDING, WORKER_UP
from inferd.backends.python._loans cimport execution_begin
from inferd.backends.python._record cimport RecordSize, record_copies, record_size, record_write
from inferd.backends.python._slots cimport slot_give, slot_take
from inferd.backends.python._wire cimport ALLOCATE, DONE, EXECUTE, IN_ARENA, PACKET, SLOT_MASK, SLOTS, Head

cdef enum:
    MOST_COPIED = 256 << 10  # bytes of inputs that the front copies for a batch
    MOST_GRANTS = 32         # requests for memory that it grants a worker at a time

cdef enum Reply:
    REPLY_DONE
    REPLY_ALLOCATE           # a request for memory, which was granted
    REPLY_INVALID            # another packet, or none: the worker has ended, or is ended now


# ---------------------------------------------------------------------------------------------------------------------
# Slots

cdef void request_abandoned(Request *request, void *owner) noexcept nogil:
    # the request is abandoned: flag it for the worker, and cancel the calls on its behalf
    slot_cancelled(request, owner)
    bls_leave(<Channel *>owner, request.number)


cdef bint has_numbers(Channel *channel, uint32_t count) noexcept nogil:
    # make room for the numbers of so many requests
    cdef uint64_t *grown
    if count <= channel.number_capacity:
        return True
    grown = <uint64_t *>realloc(channel.numbers, (count + 16) * sizeof(uint64_t))
    if grown == NULL:
        return False
    channel.numbers = grown
    channel.number_capacity = count + 16
    return True


cdef char *no_slot(const Channel *channel) noexcept nogil:
    # why there is no slot; NULL: no memory for another one
    if channel.slots.count < <uint32_t>SLOTS:
        return NULL
    return format_text(
        "the worker of '%s' holds %u open requests, which is its limit: its model has to end their responses",
        channel.name, channel.slots.open)


cdef bint take_slots(Channel *channel, NativeBatch *batch) noexcept nogil:
    # Take a slot for each request. False: the batch has failed. Under the guard.
    cdef uint32_t i
    channel.lane = <Lane *>batch.requests[0].lane
    if not has_numbers(channel, batch.count):
        batch_fail(batch, NULL)
        return False
    for i in range(batch.count):
        channel.numbers[i] = slot_take(&channel.slots, batch.requests[i], batch.taken_ns)
        if channel.numbers[i] == 0:
            batch_fail(batch, no_slot(channel))
            give_slots(channel, batch, i)
            return False
        batch.requests[i].number = channel.numbers[i]
        channel.flags.data[channel.numbers[i] & SLOT_MASK] = 0
    return True


cdef bint begin_batch(Channel *channel, NativeBatch *batch, bint may_wait, bint *up) noexcept nogil:
    # Take the work socket and the slots. False: the batch has failed, or there is no worker.
    cdef bint begun
    cdef uint32_t i
    lock(&channel.guard)
    while may_wait and channel.state != WORKER_UP and channel.patient and not channel.leaving:
        wait(&channel.changed, &channel.guard)  # for the next worker, which is being started
    up[0] = channel.state == WORKER_UP
    begun = up[0] and take_slots(channel, batch)
    channel.executing = begun
    if begun:
        channel.execution = execution_begin(&channel.loans)
    unlock(&channel.guard)
    if begun:
        for i in range(batch.count):
            request_follow(batch.requests[i], request_abandoned, channel)
    return begun


cdef void give_slots(Channel *channel, NativeBatch *batch, uint32_t count) noexcept nogil:
    # free the slots of requests that still belong to the batch; under the guard
    cdef uint32_t i
    for i in range(count):
        if batch.requests[i] != NULL:
            slot_give(&channel.slots, slot_at_rest(channel, channel.numbers[i]))


cdef void end_batch(Channel *channel, NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    for i in range(batch.count):
        if batch.requests[i] != NULL:
            request_unfollow(batch.requests[i])
    grants_end(channel)  # while `executing` is set, so that no other thread uses them
    lock(&channel.guard)
    give_slots(channel, batch, batch.count)
    channel.executing = False
    channel.loans.executing = False  # also if no EXECUTE was sent, or no DONE came
    unlock(&channel.guard)
    notify_all(&channel.changed)
    if load32(&channel.watching) == 0 and exchange32(&channel.watching, 1) == 0:
        channel_nudge(channel)  # the memory that was used may become idle


cdef void fail_without_worker(Channel *channel, NativeBatch *batch, bint was_sent) noexcept nogil:
    # was_sent: the batch may have reached the worker that has ended
    cdef uint32_t i
    lock(&channel.guard)
    for i in range(batch.count):
        if batch.requests[i] != NULL:
            channel_refuse(channel, batch.requests[i], was_sent)
    unlock(&channel.guard)


cdef void fail_with_worker(Channel *channel, NativeBatch *batch) noexcept nogil:
    # the worker that has the batch ends: wait until the attendant says why (Attendant._live, then channel_ended)
    channel_end(channel)  # the worker may have closed its socket and live on
    lock(&channel.guard)
    while channel.state == WORKER_ENDING:
        wait(&channel.changed, &channel.guard)
    unlock(&channel.guard)
    fail_without_worker(channel, batch, True)


# ---------------------------------------------------------------------------------------------------------------------
# Sending and receiving

cdef bint send_execute(Channel *channel, NativeBatch *batch) noexcept nogil:
    # False: the batch has failed, or the worker has ended
    cdef InputData *supplied = supply_each(batch.signature, batch.requests, batch.count)
    cdef bint sent
    if supplied == NULL and batch.signature.supplied_count:
        batch_fail(batch, NULL)
        return False
    sent = send_inputs(channel, batch, supplied)
    supply_free(batch.signature, supplied, batch.count)
    return sent


cdef bint send_inputs(Channel *channel, NativeBatch *batch, const InputData *supplied) noexcept nogil:
    cdef Head head
    cdef RecordSize size = record_size(channel, batch, supplied)
    cdef Block *outputs = grant_outputs(channel, batch)
    cdef bint in_arena = size.all + sizeof(Head) > PACKET
    cdef uint8_t *record = channel.packet + sizeof(Head)
    memset(&head, 0, sizeof(Head))
    if in_arena:
        channel.execute_block = grant(channel, size.all)
        if channel.execute_block == NULL:
            batch_fail(batch, format_text("no shared memory for %zu bytes of inputs", size.all))
            return False
        record = channel.execute_block.data
        head.flags = IN_ARENA
        head.offset = <uint64_t>(record - channel.arena.base)
    record_write(channel, batch, supplied, channel.numbers, outputs, size, record, in_arena)
    head.kind = EXECUTE
    head.id = channel.execution
    head.size = <uint32_t>size.all
    batch.input_end_ns = now_ns()
    return packet_send(channel.work, &head, sizeof(Head), record, 0 if in_arena else size.all, MSG_DONTWAIT) == 0


cdef Reply interpret(Channel *channel, ssize_t size, Head *head) noexcept nogil:
    # the packet of this size in channel.packet; 0 or less: there is none, and none will come
    if size >= <ssize_t>sizeof(Head):
        memcpy(head, channel.packet, sizeof(Head))
        if head.kind == ALLOCATE:
            return REPLY_ALLOCATE if grant_asked(channel, head) else REPLY_INVALID
        if head.kind == DONE and head.id == channel.execution and (
                head.flags & IN_ARENA or head.size == <size_t>size - sizeof(Head)):
            return REPLY_DONE
    if size > 0:
        channel_break(channel, "sent neither DONE of its batch nor ALLOCATE")
    return REPLY_INVALID


cdef bint await_done(Channel *channel, Head *head) noexcept nogil:
    # False: the worker has ended, or its time is over
    cdef Reply reply = REPLY_ALLOCATE
    cdef ssize_t size
    cdef int64_t begun = now_ns()
    cdef int64_t left = 0
    while reply == REPLY_ALLOCATE:
        if channel.timeout_ns:
            left = max(<int64_t>1, begun + channel.timeout_ns - now_ns())
        size = packet_receive(channel.work, channel.packet, PACKET, left)
        if size < 0:
            lock(&channel.guard)
            channel.overdue = True
            unlock(&channel.guard)
        reply = interpret(channel, size, head)
    return reply == REPLY_DONE


# ---------------------------------------------------------------------------------------------------------------------
# On the instance's thread

cdef void execute(NativeBatch *batch, void *context) noexcept nogil:
    cdef Channel *channel = <Channel *>context
    cdef Head head
    cdef bint up
    if channel.executing:
        fail_with_worker(channel, batch)  # the front has begun this batch, and found that the worker ends
    elif not begin_batch(channel, batch, True, &up):
        if not up:
            fail_without_worker(channel, batch, False)
        return
    elif not (send_execute(channel, batch) and await_done(channel, &head) and done_take(channel, batch, &head)):
        if not batch.failed:
            fail_with_worker(channel, batch)
    end_batch(channel, batch)


cdef bint may_take(void *context) noexcept nogil:
    return channel_await(<Channel *>context)


# ---------------------------------------------------------------------------------------------------------------------
# In the front

cdef bint may_begin(void *context) noexcept nogil:
    cdef Channel *channel = <Channel *>context
    cdef bint up
    lock(&channel.guard)
    up = channel.state == WORKER_UP
    unlock(&channel.guard)
    return up


cdef Progress begin_here(NativeBatch *batch, void *context) noexcept nogil:
    cdef Channel *channel = <Channel *>context
    cdef bint up
    if record_copies(channel, batch) > MOST_COPIED:
        return BLOCKED
    if not begin_batch(channel, batch, False, &up):
        return ENDED if up else BLOCKED
    if send_execute(channel, batch):
        limit_time(channel)
        return UNDER_WAY
    if not batch.failed:
        return BLOCKED
    end_batch(channel, batch)
    return ENDED


cdef Progress advance(NativeBatch *batch, void *context) noexcept nogil:
    cdef Channel *channel = <Channel *>context
    cdef Reply reply = REPLY_ALLOCATE
    cdef ssize_t size
    cdef Head head
    cdef int _
    for _ in range(MOST_GRANTS):
        size = packet_poll(channel.work, channel.packet, PACKET)
        if size < 0:
            return UNDER_WAY
        reply = interpret(channel, size, &head)
        if reply != REPLY_ALLOCATE:
            break
    if reply == REPLY_ALLOCATE:
        bridge_look_again((<Submission *>channel.submission).bridge, &channel.results)  # other descriptors first
        return UNDER_WAY
    timers_clear((<Submission *>channel.submission).bridge.timers, &channel.limit)
    if reply != REPLY_DONE or not done_take(channel, batch, &head):
        return BLOCKED
    end_batch(channel, batch)
    return ENDED


cdef void limit_time(Channel *channel) noexcept nogil:
    # limit the time of the execution
    if channel.timeout_ns == 0:
        return
    channel.limit.fire = time_is_over
    channel.limit.owner = channel
    if not timers_set((<Submission *>channel.submission).bridge.timers, &channel.limit, now_ns() + channel.timeout_ns):
        channel_exhausted(channel)


cdef void time_is_over(Timer *timer, int64_t now) noexcept nogil:
    cdef Channel *channel = <Channel *>timer.owner
    lock(&channel.guard)
    channel.overdue = True
    unlock(&channel.guard)
    channel_end(channel)


cdef bint read_results(WatchedDescriptor *descriptor) noexcept nogil:
    cdef Remote *remote = &(<Channel *>descriptor.owner).remote
    if remote.readable != NULL:
        remote.readable(remote.owner)
    return True


cdef void results_open(Channel *channel) noexcept nogil:
    if channel.submission == NULL:
        return
    channel.results.fd = channel.work
    channel.results.once = True  # outside of an execution the front does not read the packets
    channel.results.owner = channel
    channel.results.read = read_results
    if not bridge_attach((<Submission *>channel.submission).bridge, &channel.results):
        channel_exhausted(channel)


cdef void results_close(Channel *channel) noexcept nogil:
    if channel.results.fd >= 0:
        bridge_detach((<Submission *>channel.submission).bridge, &channel.results)
        channel.results.fd = -1


# ---------------------------------------------------------------------------------------------------------------------

cdef object make_executor(Channel *channel):
    cdef execute_fn function = execute
    return capsule_of(<void *>function, "inferd.execute_fn", channel)


cdef object make_gate(Channel *channel):
    cdef await_fn function = may_take
    return capsule_of(<void *>function, "inferd.await_fn", channel)


cdef object make_remote(Channel *channel):
    if channel.submission == NULL:
        return None
    channel.remote.context = channel
    channel.remote.ready = may_begin
    channel.remote.begin = begin_here
    channel.remote.advance = advance
    return PyCapsule_New(&channel.remote, "inferd.remote", NULL)


cdef object capsule_of(void *function, const char *name, Channel *channel):
    capsule = PyCapsule_New(function, name, NULL)
    PyCapsule_SetContext(capsule, <void *>channel)
    return capsule
