"""The record of an EXECUTE: a batch, as a worker reads it.

Heads of a fixed size in front, the tensors behind them. Tensors that lie in the arena stay where they are.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from inferd._native.cuda.region cimport cuda_region_handle
from inferd._native.execution.batch cimport NativeBatch
from inferd._native.memory.arena cimport arena_holds
from inferd._native.memory.resource cimport SHARED_WITH_FRIEND, Block
from inferd._native.memory.registry cimport REGION_SYSTEM, Region
from inferd._native.memory.shm cimport MAPPED_FROM, Placement, region_watch
from inferd._native.request.record cimport Record
from inferd._native.request.request cimport InputData, Request
from inferd._native.request.signature cimport MAX_RANK, Signature, TensorSignature
from inferd._native.shape cimport reshape
from inferd._native.traceparent cimport TRACEPARENT, traceparent_write
from inferd.backends.python._channel cimport KEPT_REGIONS, Channel
from inferd.backends.python._parameters cimport parameters_size, parameters_write
from inferd.backends.python._wire cimport (
    ALL_OUTPUTS,
    PLACE_ARENA,
    PLACE_CUDA,
    PLACE_INLINE,
    PLACE_REGION,
    WIRE_SEQUENCE_END,
    WIRE_SEQUENCE_START,
    CudaMemory,
    ExecuteHead,
    ExtraRecord,
    RegionMemory,
    RequestRecord,
    TensorRecord,
    aligned,
)

cdef enum:
    TENSOR_ALIGNMENT = 16    # of tensors that are copied into a record
    TRACE_TEXT = 16 + TRACEPARENT + 2    # bytes of the trace context without baggage
    BAGGAGE_TEXT = 13                    # and of the text around the baggage
    REFER_FROM = 4096        # tensors of the arena from this size on are referred to, not copied, if they are exclusive
    ELEMENT = 8              # the largest element; a tensor whose place is no multiple of it is copied to one that is


# ---------------------------------------------------------------------------------------------------------------------
# Sizes

cdef bint record_refers(const Channel *channel, const InputData *input) noexcept nogil:
    # a model may write to its inputs
    return input.size >= REFER_FROM and input.exclusive and arena_holds(channel.arena, input.data)


cdef inline bint is_mapped(const Channel *channel, const InputData *input) noexcept nogil:
    # Whether the worker maps the client's region to read this input; the region is the owner of the input's block.
    cdef const Region *region
    if input.size < MAPPED_FROM or input.block == NULL or input.block.sharing != SHARED_WITH_FRIEND:
        return False
    region = <const Region *>input.block.owner
    return is_reached(channel, region) and offset_in_object(region, input) % ELEMENT == 0


cdef inline uint64_t offset_in_object(const Region *region, const InputData *input) noexcept nogil:
    return region.offset + <uint64_t>(input.data - region.block.data)


cdef inline bint is_reached(const Channel *channel, const Region *region) noexcept nogil:
    return channel.maps_regions and region.kind == REGION_SYSTEM and region.fd >= 0


# How a worker gets an input: sizes and records have to agree on it, so it is decided in one place.
cdef enum Way:
    ON_DEVICE
    MAPPED
    REFERRED
    COPIED


cdef inline Way way_of(const Channel *channel, const InputData *input, bint carried) noexcept nogil:
    # `carried`: by the request, not supplied
    if input.region != NULL and input.size > 0:
        return ON_DEVICE
    if is_mapped(channel, input):
        return MAPPED
    return REFERRED if carried and record_refers(channel, input) else COPIED


cdef inline bint is_wanted(const Request *request, uint32_t output) noexcept nogil:
    # asked for, or the state of a sequence
    return request.signature.outputs[output].state > 0 or request.response.outputs[output].wanted


cdef inline const InputData *data_of(const NativeBatch *batch, const InputData *supplied, uint32_t i,
                                     uint32_t input) noexcept nogil:
    # the data of an input that request i carries, or that it is supplied with
    cdef const Signature *signature = batch.signature
    if input < signature.input_count:
        return &batch.requests[i].inputs[input]
    return &supplied[i * signature.supplied_count + input - signature.input_count]


cdef inline uint32_t wanted_outputs(const Request *request) noexcept nogil:
    # ALL_OUTPUTS, or their number
    cdef uint32_t total = request.signature.output_count + request.signature.kept_count
    cdef uint32_t count = 0
    cdef uint32_t i
    for i in range(total):
        count += is_wanted(request, i)
    return count if count < total else <uint32_t>ALL_OUTPUTS


cdef inline bint is_traced(const Request *request) noexcept nogil:
    return request.record != NULL and (<const Record *>request.record).traced


cdef inline bint has_extra(const Request *request, uint32_t wanted) noexcept nogil:
    return (request.id.size > 0 or wanted != <uint32_t>ALL_OUTPUTS or request.correlation.given
            or is_traced(request) or request.terms.priority != 0 or request.terms.timeout_us != 0
            or request.message.parameter_count > 0)


cdef inline size_t trace_size(const Request *request) noexcept nogil:
    # the size of the trace in the record of a traced request
    cdef const Record *record = <const Record *>request.record
    return TRACE_TEXT if record.baggage == NULL else TRACE_TEXT + BAGGAGE_TEXT + record.baggage_size


cdef size_t extra_size(const Request *request, uint32_t wanted) noexcept nogil:
    cdef size_t size = sizeof(ExtraRecord) + request.id.size + parameters_size(request)
    if is_traced(request):
        size += trace_size(request)
    if wanted != <uint32_t>ALL_OUTPUTS:
        size += wanted * sizeof(uint16_t)
    if request.correlation.given and request.correlation.text.data != NULL:
        size += request.correlation.text.size
    return aligned(size, 8)


cdef inline uint32_t seen_rank(const TensorSignature *tensor, const InputData *data) noexcept nogil:
    # the rank that the model sees
    return data.rank - tensor.rank + tensor.model_rank if tensor.reshaped else data.rank


cdef RecordSize record_size(const Channel *channel, const NativeBatch *batch, const InputData *supplied) noexcept nogil:
    cdef size_t heads = sizeof(ExecuteHead) + aligned(batch.count * sizeof(uint32_t), 8), tensors = 0
    cdef RecordSize size
    cdef Way way
    cdef const Request *request
    cdef const InputData *data
    cdef uint32_t i, input, wanted
    for i in range(batch.count):
        request = batch.requests[i]
        heads += sizeof(RequestRecord)
        for input in range(batch.signature.input_count + batch.signature.supplied_count):
            data = data_of(batch, supplied, i, input)
            if not data.present:
                continue
            heads += sizeof(TensorRecord) + seen_rank(&batch.signature.inputs[input], data) * sizeof(int64_t)
            way = way_of(channel, data, input < batch.signature.input_count)
            if way == ON_DEVICE:
                heads += sizeof(CudaMemory)
            elif way == MAPPED:
                heads += sizeof(RegionMemory)
            elif way == COPIED:
                tensors += aligned(data.size, TENSOR_ALIGNMENT)
        wanted = wanted_outputs(request)
        if has_extra(request, wanted):
            heads += extra_size(request, wanted)
    size.heads = aligned(heads, TENSOR_ALIGNMENT)
    size.all = size.heads + tensors
    return size


cdef size_t record_copies(const Channel *channel, const NativeBatch *batch) noexcept nogil:
    cdef size_t size = 0
    cdef const InputData *data
    cdef const Placement *placement
    cdef uint32_t i, input
    for i in range(batch.count):
        placement = batch.requests[i].placements
        while placement != NULL:  # the reader of DONE copies outputs there
            size += placement.size if placement.output else 0
            placement = placement.next
        for input in range(batch.signature.input_count):
            data = &batch.requests[i].inputs[input]
            if data.present and way_of(channel, data, True) in (COPIED, MAPPED):
                size += data.size  # an output may be a part of it, which the server copies
    return size


# ---------------------------------------------------------------------------------------------------------------------
# Writing

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


cdef void write_region_memory(Writer *writer, const InputData *data) noexcept nogil:
    cdef RegionMemory *out = <RegionMemory *>(writer.record + writer.at)
    cdef Region *region = <Region *>data.block.owner
    out.number = region.number
    out.start = region.offset
    out.size = region.size
    out.descriptor = <uint32_t>region.fd
    out.keep = region_watch(region, writer.channel.regions, KEPT_REGIONS)
    writer.at += sizeof(RegionMemory)


cdef void write_tensor(Writer *writer, const Signature *signature, uint32_t index,
                       const InputData *data) noexcept nogil:
    cdef const TensorSignature *tensor = &signature.inputs[index]
    cdef TensorRecord *out = <TensorRecord *>(writer.record + writer.at)
    cdef int64_t seen[MAX_RANK]
    cdef const int64_t *shape = &data.shape[0]
    cdef Way way = way_of(writer.channel, data, index < signature.input_count)
    cdef bint batches = signature.max_batch_size > 0
    out.index = <uint16_t>index
    out.datatype = <uint8_t>tensor.datatype
    out.rank = <uint8_t>seen_rank(tensor, data)
    out.size = data.size
    if way == ON_DEVICE:
        out.place = PLACE_CUDA
        out.offset = data.address - data.region.address
    elif way == MAPPED:
        out.place = PLACE_REGION
        out.offset = offset_in_object(<const Region *>data.block.owner, data)
    elif way == REFERRED:
        out.place = PLACE_ARENA
        out.offset = <uint64_t>(data.data - writer.channel.arena.base)
    else:
        out.place = PLACE_ARENA if writer.in_arena else PLACE_INLINE
        out.offset = writer.data_at + (writer.base if writer.in_arena else 0)
        if data.size:
            memcpy(writer.record + writer.data_at, data.data, data.size)
        writer.data_at += aligned(data.size, TENSOR_ALIGNMENT)
    if tensor.reshaped:
        memcpy(seen, data.shape, data.rank * sizeof(int64_t))
        reshape(tensor.dims, tensor.rank, tensor.model_dims, tensor.model_rank, seen + batches)
        shape = seen
    writer.at += sizeof(TensorRecord)
    memcpy(writer.record + writer.at, shape, out.rank * sizeof(int64_t))
    writer.at += out.rank * sizeof(int64_t)
    if way == ON_DEVICE:
        write_cuda_memory(writer, data)
    elif way == MAPPED:
        write_region_memory(writer, data)


cdef void trace_write(const Request *request, uint8_t *at) noexcept nogil:
    # {"traceparent":"...","baggage":"..."}
    cdef const Record *record = <const Record *>request.record
    memcpy(at, <const char *>b'{"traceparent":"', 16)
    traceparent_write(&record.context, <char *>at + 16)
    at += 16 + TRACEPARENT
    if record.baggage != NULL:
        memcpy(at, <const char *>b'","baggage":"', BAGGAGE_TEXT)
        memcpy(at + BAGGAGE_TEXT, record.baggage, record.baggage_size)
        at += BAGGAGE_TEXT + record.baggage_size
    memcpy(at, <const char *>b'"}', 2)


cdef void write_extra(Writer *writer, const Request *request, uint32_t wanted) noexcept nogil:
    cdef ExtraRecord *out = <ExtraRecord *>(writer.record + writer.at)
    cdef uint8_t *at = <uint8_t *>(out + 1)
    cdef uint16_t index
    memset(out, 0, sizeof(ExtraRecord))
    out.timeout_us = <uint64_t>request.terms.timeout_us
    out.priority = request.terms.priority
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
    if is_traced(request):
        out.trace_size = <uint32_t>trace_size(request)
        trace_write(request, at + out.parameters_size)
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


cdef void record_write(Channel *channel, const NativeBatch *batch, const InputData *supplied, const uint64_t *numbers,
                       const Block *outputs, RecordSize size, uint8_t *out, bint in_arena) noexcept nogil:
    cdef ExecuteHead *head = <ExecuteHead *>out
    cdef uint32_t *offsets = <uint32_t *>(head + 1)
    cdef Writer writer
    cdef uint32_t i
    head.count = batch.count
    head.rows = batch.rows
    head.grant_offset = <uint64_t>(outputs.data - channel.arena.base) if outputs != NULL else 0
    head.grant_size = outputs.size if outputs != NULL else 0
    writer.channel = channel
    writer.record = out
    writer.at = sizeof(ExecuteHead) + aligned(batch.count * sizeof(uint32_t), 8)
    writer.data_at = size.heads
    writer.base = <uint64_t>(out - channel.arena.base) if in_arena else 0
    writer.in_arena = in_arena
    for i in range(batch.count):
        offsets[i] = <uint32_t>writer.at
        write_request(&writer, batch, supplied, i, numbers[i])
