"""EXECUTE and DONE: the executor of a Python model's instance, without the GIL.

The record of a batch goes into the packet, tensors included, when all of it fits; else into the arena, where tensors
that are there already stay where they are. The record's layout is in `worker/protocol.py`.
"""

from cpython.pycapsule cimport PyCapsule_New, PyCapsule_SetContext
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from _native.atomic cimport exchange32, load32
from _native.clock cimport now_ns
from _native.cuda.region cimport cuda_region_handle
from _native.execution.batch cimport NativeBatch, await_fn, batch_detach, batch_fail, batch_reschedule, execute_fn
from _native.execution.supply cimport supply_each, supply_free
from _native.inference.request cimport (
    STATUS_INTERNAL,
    STATUS_UNAVAILABLE,
    InputData,
    Request,
    request_fail,
    request_follow,
    request_unfollow,
)
from _native.inference.signature cimport Signature
from _native.memory.arena cimport arena_holds, arena_take
from _native.memory.resource cimport Block, block_give, block_share, block_take
from _native.text cimport format_text, text_or_no_memory
from _native.threads cimport lock, notify_all, unlock, wait
from backends.python._bls cimport bls_leave
from backends.python._channel cimport (
    CHANNEL_DOWN,
    CHANNEL_UP,
    Channel,
    Lease,
    Slot,
    channel_await,
    channel_kill,
    channel_nudge,
    finish_detached,
    packet_receive,
    packet_send,
    slot_cancelled,
    slot_find,
    slot_give,
    slot_take,
)
from backends.python._parameters cimport parameters_size, parameters_write
from backends.python._responses cimport Origin, response_read, status_of_code
from backends.python._wire cimport (
    ALL_OUTPUTS,
    ALLOCATE,
    ALLOCATED,
    DONE,
    EXECUTE,
    FAILED,
    IN_ARENA,
    KEPT,
    PACKET,
    PLACE_ARENA,
    PLACE_CUDA,
    PLACE_INLINE,
    RESPONSE_OPEN,
    RESPONSE_RESCHEDULE,
    WIRE_SEQUENCE_END,
    WIRE_SEQUENCE_START,
    CudaMemory,
    ExecuteHead,
    ExtraRecord,
    Head,
    RequestRecord,
    TensorRecord,
)

cdef enum:
    TENSOR_ALIGNMENT = 16    # of what is copied into a record
    REFER_FROM = 4096        # tensors of the arena from this size on are referred to, not copied
    FORGET = 16              # batches after which a large output is mostly forgotten

cdef inline size_t aligned(size_t size, size_t to) noexcept nogil:
    return (size + to - 1) & ~(to - 1)


# ---------------------------------------------------------------------------------------------------------------------
# Writing

cdef inline bint refers(const Channel *channel, const InputData *input) noexcept nogil:
    return input.size >= REFER_FROM and arena_holds(channel.arena, input.data)


cdef inline bint is_on_device(const InputData *input) noexcept nogil:
    return input.region != NULL and input.size > 0


cdef inline bint is_wanted(const Request *request, uint32_t output) noexcept nogil:
    # asked for, or the state of a sequence
    return request.signature.outputs[output].state > 0 or request.response.outputs[output].wanted


cdef inline const InputData *data_of(const NativeBatch *batch, const InputData *supplied, uint32_t i,
                                     uint32_t input) noexcept nogil:
    # of request i: what it carries, or what it is supplied with
    cdef const Signature *signature = batch.signature
    if input < signature.input_count:
        return &batch.requests[i].inputs[input]
    return &supplied[i * signature.supplied_count + input - signature.input_count]


cdef inline uint32_t wanted_outputs(const Request *request) noexcept nogil:
    # ALL_OUTPUTS, or how many
    cdef uint32_t total = request.signature.output_count + request.signature.kept_count
    cdef uint32_t count = 0
    cdef uint32_t i
    for i in range(total):
        count += is_wanted(request, i)
    return count if count < total else <uint32_t>ALL_OUTPUTS


cdef inline bint has_extra(const Request *request, uint32_t wanted) noexcept nogil:
    return (request.id.size > 0 or wanted != <uint32_t>ALL_OUTPUTS or request.correlation.given
            or request.priority != 0 or request.timeout_us != 0 or request.message.parameter_count > 0)


cdef size_t extra_size(const Request *request, uint32_t wanted) noexcept nogil:
    cdef size_t size = sizeof(ExtraRecord) + request.id.size + parameters_size(request)
    if wanted != <uint32_t>ALL_OUTPUTS:
        size += wanted * sizeof(uint16_t)
    if request.correlation.given and request.correlation.text.data != NULL:
        size += request.correlation.text.size
    return aligned(size, 8)


cdef size_t heads_size(const NativeBatch *batch, const InputData *supplied) noexcept nogil:
    # of the record without tensors
    cdef size_t size = sizeof(ExecuteHead) + aligned(batch.count * sizeof(uint32_t), 8)
    cdef const Request *request
    cdef const InputData *data
    cdef uint32_t i, input, wanted
    for i in range(batch.count):
        request = batch.requests[i]
        size += sizeof(RequestRecord)
        for input in range(batch.signature.input_count + batch.signature.supplied_count):
            data = data_of(batch, supplied, i, input)
            if data.present:
                size += sizeof(TensorRecord) + data.rank * sizeof(int64_t)
                size += sizeof(CudaMemory) if is_on_device(data) else 0
        wanted = wanted_outputs(request)
        if has_extra(request, wanted):
            size += extra_size(request, wanted)
    return size


cdef size_t tensors_size(const Channel *channel, const NativeBatch *batch, const InputData *supplied) noexcept nogil:
    # of those that are copied into the record
    cdef size_t size = 0
    cdef const InputData *data
    cdef uint32_t i, input
    for i in range(batch.count):
        for input in range(batch.signature.input_count + batch.signature.supplied_count):
            data = data_of(batch, supplied, i, input)
            if data.present and not is_on_device(data) and not (
                    input < batch.signature.input_count and refers(channel, data)):
                size += aligned(data.size, TENSOR_ALIGNMENT)
    return size


cdef struct Writer:
    Channel *channel
    uint8_t *record
    size_t at                # of the next head
    size_t data_at           # of the next tensor
    uint64_t base            # offset of the record in the arena
    bint in_arena


cdef void write_cuda_memory(Writer *writer, const InputData *data) noexcept nogil:
    cdef CudaMemory *out = <CudaMemory *>(writer.record + writer.at)
    memcpy(out.handle, cuda_region_handle(data.region), sizeof(out.handle))
    out.device = <uint32_t>data.region.device
    out.reserved = 0
    writer.at += sizeof(CudaMemory)


cdef void write_tensor(Writer *writer, const Signature *signature, uint32_t index,
                       const InputData *data) noexcept nogil:
    cdef TensorRecord *out = <TensorRecord *>(writer.record + writer.at)
    out.index = <uint16_t>index
    out.datatype = <uint8_t>signature.inputs[index].datatype
    out.rank = <uint8_t>data.rank
    out.size = data.size
    if is_on_device(data):
        out.place = PLACE_CUDA
        out.offset = data.address - data.region.address
    elif index < signature.input_count and refers(writer.channel, data):
        out.place = PLACE_ARENA
        out.offset = <uint64_t>(data.data - writer.channel.arena.base)
    else:
        out.place = PLACE_ARENA if writer.in_arena else PLACE_INLINE
        out.offset = writer.data_at + (writer.base if writer.in_arena else 0)
        if data.size:
            memcpy(writer.record + writer.data_at, data.data, data.size)
        writer.data_at += aligned(data.size, TENSOR_ALIGNMENT)
    writer.at += sizeof(TensorRecord)
    memcpy(writer.record + writer.at, data.shape, data.rank * sizeof(int64_t))
    writer.at += data.rank * sizeof(int64_t)
    if is_on_device(data):
        write_cuda_memory(writer, data)


cdef void write_extra(Writer *writer, const Request *request, uint32_t wanted) noexcept nogil:
    cdef ExtraRecord *out = <ExtraRecord *>(writer.record + writer.at)
    cdef uint8_t *at = <uint8_t *>(out + 1)
    cdef uint16_t index
    memset(out, 0, sizeof(ExtraRecord))
    out.timeout_us = <uint64_t>request.timeout_us
    out.priority = request.priority
    out.outputs = wanted
    if wanted != <uint32_t>ALL_OUTPUTS:
        for index in range(request.signature.output_count + request.signature.kept_count):
            if is_wanted(request, index):
                memcpy(at, &index, sizeof(uint16_t))
                at += sizeof(uint16_t)
    out.id_size = request.id.size
    if request.id.size:
        memcpy(at, request.id.data, request.id.size)
        at += request.id.size
    if request.correlation.given and request.correlation.text.data != NULL:
        out.correlation_size = request.correlation.text.size
        memcpy(at, request.correlation.text.data, out.correlation_size)
        at += out.correlation_size
    elif request.correlation.given:
        out.correlation = request.correlation.number
    out.parameters_size = <uint32_t>parameters_size(request)
    parameters_write(request, at)
    writer.at += extra_size(request, wanted)


cdef void write_request(Writer *writer, const NativeBatch *batch, const InputData *supplied, uint32_t index,
                        uint64_t number) noexcept nogil:
    cdef const Request *request = batch.requests[index]
    cdef const InputData *data
    cdef RequestRecord *out = <RequestRecord *>(writer.record + writer.at)
    cdef uint32_t wanted = wanted_outputs(request)
    cdef uint32_t i
    memset(out, 0, sizeof(RequestRecord))
    out.number = number
    out.flags = ((<uint32_t>WIRE_SEQUENCE_START if request.sequence_start else 0)
                 | (<uint32_t>WIRE_SEQUENCE_END if request.sequence_end else 0))
    writer.at += sizeof(RequestRecord)
    for i in range(request.signature.input_count + request.signature.supplied_count):
        data = data_of(batch, supplied, index, i)
        if data.present:
            out.inputs += 1
            write_tensor(writer, request.signature, i, data)
    if has_extra(request, wanted):
        out.extra = <uint32_t>writer.at
        write_extra(writer, request, wanted)


cdef void write_record(Writer *writer, const NativeBatch *batch, const InputData *supplied, const uint64_t *numbers,
                       Block *grant) noexcept nogil:
    cdef ExecuteHead *head = <ExecuteHead *>writer.record
    cdef uint32_t *offsets = <uint32_t *>(head + 1)
    cdef uint32_t i
    head.count = batch.count
    head.rows = batch.rows
    head.grant_offset = <uint64_t>(grant.data - writer.channel.arena.base) if grant != NULL else 0
    head.grant_size = grant.size if grant != NULL else 0
    writer.at = sizeof(ExecuteHead) + aligned(batch.count * sizeof(uint32_t), 8)
    for i in range(batch.count):
        offsets[i] = <uint32_t>writer.at
        write_request(writer, batch, supplied, i, numbers[i])


# ---------------------------------------------------------------------------------------------------------------------
# Memory for outputs

cdef Block *grant(Channel *channel, uint64_t size) noexcept nogil:
    # what the worker may use until DONE: for outputs, or with inputs that were copied
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


cdef void end_grants(Channel *channel) noexcept nogil:
    while channel.grant_count:
        channel.grant_count -= 1
        block_give(channel.grants[channel.grant_count])
    channel.execute_block = NULL


cdef void learn(Channel *channel, const NativeBatch *batch) noexcept nogil:
    # how much memory outputs need, for the grant of the next EXECUTE
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


# ---------------------------------------------------------------------------------------------------------------------
# Slots

cdef void told(Request *request, void *owner) noexcept nogil:
    # the request is abandoned: the worker can see it, and what it has asked of others for it is not needed
    slot_cancelled(request, owner)
    bls_leave(<Channel *>owner, request.number)


cdef bint begin(Channel *channel, NativeBatch *batch, uint64_t *numbers) noexcept nogil:
    # Take the work socket and a slot for each request. False: no worker is there, or too many requests are open.
    cdef uint32_t i
    lock(&channel.guard)
    while channel.state == CHANNEL_DOWN and not channel.leaving:
        wait(&channel.changed, &channel.guard)  # for the next worker, which is being started
    if channel.state != CHANNEL_UP:
        refuse(channel, batch)
        unlock(&channel.guard)
        return False
    for i in range(batch.count):
        numbers[i] = slot_take(channel, batch.requests[i])
        if numbers[i] == 0:
            batch_fail(batch, format_text("the worker of '%s' holds too many open requests", channel.name))
            give_slots(channel, batch, numbers, i)
            unlock(&channel.guard)
            return False
        slot_find(channel, numbers[i]).taken_ns = batch.taken_ns
    channel.executing = True
    unlock(&channel.guard)
    for i in range(batch.count):
        request_follow(batch.requests[i], told, channel)
    return True


cdef void give_slots(Channel *channel, NativeBatch *batch, const uint64_t *numbers, uint32_t count) noexcept nogil:
    # of requests that are still the batch's; under the guard
    cdef uint32_t i
    cdef Slot *slot
    for i in range(count):
        if batch.requests[i] != NULL:
            slot = slot_find(channel, numbers[i])
            while slot.busy:
                wait(&channel.changed, &channel.guard)
                slot = slot_find(channel, numbers[i])
            slot_give(channel, slot)


cdef void end(Channel *channel, NativeBatch *batch, const uint64_t *numbers) noexcept nogil:
    cdef uint32_t i
    for i in range(batch.count):
        if batch.requests[i] != NULL:
            request_unfollow(batch.requests[i])
    lock(&channel.guard)
    give_slots(channel, batch, numbers, batch.count)
    channel.executing = False
    unlock(&channel.guard)
    notify_all(&channel.changed)


cdef void refuse(Channel *channel, NativeBatch *batch) noexcept nogil:
    # there is no worker; under the guard
    cdef uint32_t i
    for i in range(batch.count):
        if batch.requests[i] != NULL:
            request_fail(batch.requests[i], STATUS_UNAVAILABLE, format_text(
                "Failed to process the request(s) for model '%s', message: %s", channel.name,
                text_or_no_memory(channel.why)))
            batch.requests[i].response.reason = "WORKER_DIED"


cdef void lost(Channel *channel, NativeBatch *batch) noexcept nogil:
    # the worker is gone: wait until the attendant says why
    channel_kill(channel)  # it may have closed its socket and live on
    lock(&channel.guard)
    while channel.state == CHANNEL_UP:
        wait(&channel.changed, &channel.guard)
    refuse(channel, batch)
    unlock(&channel.guard)


# ---------------------------------------------------------------------------------------------------------------------
# Sending and receiving

cdef bint send_execute(Channel *channel, NativeBatch *batch, const uint64_t *numbers) noexcept nogil:
    # False: the batch has failed, or the worker is gone
    cdef InputData *supplied = supply_each(batch.signature, batch.requests, batch.count)
    cdef bint sent
    if supplied == NULL and batch.signature.supplied_count:
        batch_fail(batch, NULL)
        return False
    sent = send_inputs(channel, batch, supplied, numbers)
    supply_free(batch.signature, supplied, batch.count)
    return sent


cdef bint send_inputs(Channel *channel, NativeBatch *batch, const InputData *supplied,
                      const uint64_t *numbers) noexcept nogil:
    cdef Writer writer
    cdef Head head
    cdef Block *outputs = NULL
    cdef size_t heads = aligned(heads_size(batch, supplied), TENSOR_ALIGNMENT)
    cdef size_t size = heads + tensors_size(channel, batch, supplied)
    cdef uint64_t wanted = <uint64_t>(channel.bytes_per_row * batch.rows)
    if wanted:
        outputs = grant(channel, wanted + 4096)
    memset(&head, 0, sizeof(Head))
    memset(&writer, 0, sizeof(Writer))
    writer.channel = channel
    writer.data_at = heads
    writer.in_arena = size + sizeof(Head) > PACKET
    if writer.in_arena:
        channel.execute_block = grant(channel, size)
        if channel.execute_block == NULL:
            batch_fail(batch, format_text("no shared memory for %zu bytes of inputs", size))
            return False
        writer.record = channel.execute_block.data
        writer.base = <uint64_t>(writer.record - channel.arena.base)
        head.flags = IN_ARENA
        head.offset = writer.base
    else:
        writer.record = channel.packet + sizeof(Head)
    write_record(&writer, batch, supplied, numbers, outputs)
    channel.batches += 1
    head.kind = EXECUTE
    head.id = channel.batches
    head.size = <uint32_t>size
    batch.input_end_ns = now_ns()
    return packet_send(channel.work, &head, sizeof(Head), writer.record, 0 if writer.in_arena else size, 0) == 0


cdef void answer_allocate(Channel *channel, const Head *asked) noexcept nogil:
    cdef Head head
    cdef Block *block = grant(channel, asked.offset)
    memset(&head, 0, sizeof(Head))
    head.kind = ALLOCATED
    head.id = asked.id
    if block == NULL:
        head.code = 1
    else:
        head.offset = <uint64_t>(block.data - channel.arena.base)
    packet_send(channel.work, &head, sizeof(Head), NULL, 0, 0)


cdef bint await_done(Channel *channel, Head *head) noexcept nogil:
    # False: the worker is gone
    cdef ssize_t size
    cdef int64_t begun = now_ns()
    cdef int64_t left = 0
    while True:
        if channel.timeout_ns:
            left = max(<int64_t>1, begun + channel.timeout_ns - now_ns())
        size = packet_receive(channel.work, channel.packet, PACKET, left)
        if size < 0:
            lock(&channel.guard)
            channel.overdue = True
            unlock(&channel.guard)
            return False
        if size < <ssize_t>sizeof(Head):
            return False
        memcpy(head, channel.packet, sizeof(Head))
        if head.kind == ALLOCATE:
            answer_allocate(channel, head)
        elif head.kind == DONE and head.id == channel.batches and (
                head.flags & IN_ARENA or head.size == <size_t>size - sizeof(Head)):
            return True
        else:
            return False


# ---------------------------------------------------------------------------------------------------------------------
# DONE

cdef Block *record_of(Channel *channel, const Head *head) noexcept nogil:
    cdef const uint8_t *record = channel.packet + sizeof(Head)
    cdef Block *block
    cdef uint32_t i
    if head.flags & IN_ARENA:
        record = NULL
        for i in range(channel.grant_count):
            block = channel.grants[i]
            if (<uint64_t>(block.data - channel.arena.base) <= head.offset
                    and head.offset - <uint64_t>(block.data - channel.arena.base) + head.size <= block.size):
                record = channel.arena.base + head.offset
        if record == NULL:
            return NULL
    block = block_take(max(<uint32_t>1, head.size))
    if block != NULL and head.size:
        memcpy(block.data, record, head.size)
    return block


cdef void detach(Channel *channel, NativeBatch *batch, uint32_t index, uint64_t number) noexcept nogil:
    # its sender answers it, or has already done so
    cdef Slot *slot
    cdef Request *over = NULL
    cdef int64_t taken_ns = 0
    lock(&channel.guard)
    slot = slot_find(channel, number)
    while slot.busy:
        wait(&channel.changed, &channel.guard)
        slot = slot_find(channel, number)  # the array may have grown
    slot.detached = True
    if slot.finished:
        over = slot.request
        taken_ns = slot.taken_ns
    unlock(&channel.guard)
    batch_detach(batch, index)
    if over != NULL:
        finish_detached(channel, over, taken_ns)


cdef void keep(Channel *channel, const NativeBatch *batch, uint64_t id) noexcept nogil:
    # the worker still looks at what the EXECUTE has referred to
    cdef uint32_t count = 0
    cdef uint32_t most = 1 + batch.count * batch.signature.input_count
    cdef Lease *lease = <Lease *>malloc(sizeof(Lease) + most * sizeof(Block *))
    cdef const InputData *data
    cdef uint32_t i, input
    if lease == NULL:
        channel_kill(channel)  # rather than let it read what belongs to others
        return
    if channel.execute_block != NULL:
        lease.blocks[count] = block_share(channel.execute_block)
        count += 1
    for i in range(batch.count):
        for input in range(batch.signature.input_count):
            data = &batch.requests[i].inputs[input]
            if data.present and refers(channel, data):
                lease.blocks[count] = block_share(data.block)
                count += 1
    lease.id = id
    lease.count = count
    lock(&channel.guard)
    lease.next = channel.leases
    channel.leases = lease
    unlock(&channel.guard)


cdef bint take_responses(Channel *channel, NativeBatch *batch, const uint64_t *numbers, Head *head) noexcept nogil:
    # False: the worker does not speak as it should
    cdef Origin origin
    cdef uint8_t status = 0
    cdef size_t at = 0
    cdef size_t used = 1
    cdef uint32_t i
    origin.record_block = record_of(channel, head)
    if origin.record_block == NULL:
        return False
    origin.record = origin.record_block.data
    origin.size = head.size
    origin.arena = channel.arena
    origin.blocks = channel.grants
    origin.count = channel.grant_count
    if head.flags & FAILED:
        for i in range(batch.count):
            request_fail(batch.requests[i], status_of_code(head.code), format_text(
                "%.*s", <int>origin.size, <const char *>origin.record))
    else:
        for i in range(batch.count):
            used = response_read(&origin, at, &batch.requests[i].response, &status)
            if used == 0:
                break
            at += used
            if status == RESPONSE_OPEN:
                detach(channel, batch, i, numbers[i])
            elif status == RESPONSE_RESCHEDULE and not batch_reschedule(batch, i):
                request_fail(batch.requests[i], STATUS_INTERNAL, format_text(
                    "a request of model '%s' was released to be rescheduled, which needs 'iterative_sequence'",
                    channel.name))
    block_give(origin.record_block)
    return used != 0


# ---------------------------------------------------------------------------------------------------------------------

cdef void converse(Channel *channel, NativeBatch *batch, const uint64_t *numbers) noexcept nogil:
    cdef Head head
    if not send_execute(channel, batch, numbers):
        if not batch.failed:
            lost(channel, batch)
        return
    if not await_done(channel, &head):
        lost(channel, batch)
        return
    batch.output_start_ns = now_ns()
    if head.flags & KEPT:
        keep(channel, batch, head.id)
    if not take_responses(channel, batch, numbers, &head):
        lost(channel, batch)
        return
    learn(channel, batch)


cdef void execute(NativeBatch *batch, void *context) noexcept nogil:
    cdef Channel *channel = <Channel *>context
    cdef uint64_t few[64]
    cdef uint64_t *numbers = few
    if batch.count > 64:
        numbers = <uint64_t *>malloc(batch.count * sizeof(uint64_t))
        if numbers == NULL:
            batch_fail(batch, NULL)
            return
    if begin(channel, batch, numbers):
        converse(channel, batch, numbers)
        end(channel, batch, numbers)
        end_grants(channel)
        if load32(&channel.watching) == 0 and exchange32(&channel.watching, 1) == 0:
            channel_nudge(channel)  # the memory that was used may become idle
    if numbers != few:
        free(numbers)


cdef bint may_take(void *context) noexcept nogil:
    return channel_await(<Channel *>context)


cdef object make_executor(Channel *channel):
    cdef execute_fn function = execute
    return capsule_of(<void *>function, "inferd.execute_fn", channel)


cdef object make_gate(Channel *channel):
    cdef await_fn function = may_take
    return capsule_of(<void *>function, "inferd.await_fn", channel)


cdef object capsule_of(void *function, const char *name, Channel *channel):
    capsule = PyCapsule_New(function, name, NULL)
    PyCapsule_SetContext(capsule, <void *>channel)
    return capsule
