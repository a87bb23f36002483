"""Reads and checks the responses of a worker.

The record is a private copy, so that it cannot change after the check. The tensors stay where the worker has put them,
in a grant or among the inputs, and the response refers to them there. Only BYTES tensors, which have a structure of
their own, are copied before they are checked, because the worker can still write to the arena. A worker runs the
operator's code, not an attacker's, but it may be broken: nothing from it is used before it is checked.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from inferd._native.execution.scatter cimport request_set_state
from inferd._native.memory.resource cimport Block, block_give, block_share, block_take
from inferd._native.protobuf.codec cimport (
    PARAMETER_BOOL,
    PARAMETER_DOUBLE,
    PARAMETER_STRING,
    PARAMETER_UINT64,
    Parameter,
    ParameterKind,
)
from inferd._native.protobuf.datatype cimport (
    DT_BF16,
    DT_BYTES,
    DT_UINT16,
    Datatype,
    bytes_of_elements,
    datatype_name,
    datatype_size,
)
from inferd._native.request.request cimport InputData, OutputData, Request, Response, response_fail
from inferd._native.request.signature cimport MAX_RANK, Signature, TensorSignature
from inferd._native.shape cimport reshape, shape_fits
from inferd._native.status cimport (
    STATUS_CANCELLED,
    STATUS_INTERNAL,
    STATUS_INVALID_ARGUMENT,
    STATUS_NOT_FOUND,
    STATUS_UNAVAILABLE,
    STATUS_UNIMPLEMENTED,
)
from inferd._native.text cimport format_text
from inferd._native.threads cimport lock, unlock
from inferd.backends.python._loans cimport Loan, loan_find
from inferd.backends.python._wire cimport (
    CODE_ALREADY_EXISTS,
    CODE_CANCELLED,
    CODE_INVALID_ARG,
    CODE_NOT_FOUND,
    CODE_UNAVAILABLE,
    CODE_UNSUPPORTED,
    PLACE_ARENA,
    PLACE_INLINE,
    PLACE_INPUT,
    RESPONSE_ERROR,
    RESPONSE_OK,
    RESPONSE_RESCHEDULE,
    ParameterRecord,
    ResponseRecord,
    TensorRecord,
)

cdef extern from *:
    bint mul_overflow "__builtin_mul_overflow"(int64_t a, int64_t b, int64_t *out) nogil

cdef enum:
    STATUS_ALREADY_EXISTS = 6
    DATATYPES = 14


cdef int status_of_code(uint32_t code) noexcept nogil:
    if code == CODE_NOT_FOUND:
        return STATUS_NOT_FOUND
    if code == CODE_INVALID_ARG:
        return STATUS_INVALID_ARGUMENT
    if code == CODE_UNAVAILABLE:
        return STATUS_UNAVAILABLE
    if code == CODE_UNSUPPORTED:
        return STATUS_UNIMPLEMENTED
    if code == CODE_ALREADY_EXISTS:
        return STATUS_ALREADY_EXISTS
    if code == CODE_CANCELLED:
        return STATUS_CANCELLED
    return STATUS_INTERNAL


cdef inline bint within(const Block *block, const uint8_t *data, size_t size) noexcept nogil:
    return (block != NULL and block.data <= data <= block.data + block.size
            and size <= <size_t>(block.data + block.size - data))


cdef Block *holder_of(const ResponseSource *source, const Request *request, uint64_t offset,
                      uint64_t size) noexcept nogil:
    # the block that holds this part of the arena, if the worker may respond with it, with one more reference
    cdef const uint8_t *data = source.arena.base + offset
    cdef const Loan *loan
    cdef Block *block = NULL
    cdef uint32_t i
    lock(source.guard)
    loan = loan_find(source.loans, source.kind, offset, size)
    if loan != NULL:
        block = block_share(loan.block)
    unlock(source.guard)
    if block != NULL:
        return block
    for i in range(request.signature.input_count):
        if request.inputs[i].present and within(request.inputs[i].block, data, size):
            return block_share(request.inputs[i].block)
    return NULL


cdef Block *part_of_input(const Request *request, const TensorRecord *record, const uint8_t **data) noexcept nogil:
    # a part of an input where the request has it, with one more reference to its block; NULL: there is none
    cdef uint32_t index = record.place - <uint32_t>PLACE_INPUT
    cdef const InputData *input
    if index >= request.signature.input_count:
        return NULL
    input = &request.inputs[index]
    if (not input.present or input.block == NULL or input.region != NULL or record.offset > input.size
            or record.size > input.size - record.offset):
        return NULL
    data[0] = input.data + record.offset
    return block_share(input.block)


cdef Block *content_of(const ResponseSource *source, const Request *request, const TensorRecord *record,
                       const uint8_t **data) noexcept nogil:
    # The block that contains the tensor, with one more reference; NULL: the worker may not put it there. BYTES tensors
    # contain lengths, which must not change after the check, so the worker must not reach them any more.
    cdef Block *block
    cdef Block *copy
    if record.place == PLACE_INLINE and record.offset <= source.size and record.size <= source.size - record.offset:
        data[0] = source.record + record.offset
        return block_share(source.record_block)
    if record.place >= PLACE_INPUT:
        block = part_of_input(request, record, data)
    elif record.place == PLACE_ARENA and record.offset <= source.arena.size:
        data[0] = source.arena.base + record.offset
        block = holder_of(source, request, record.offset, record.size)
    else:
        return NULL
    if block == NULL or record.datatype != DT_BYTES:
        return block
    copy = block_take(max(<size_t>1, record.size))
    if copy != NULL:
        memcpy(copy.data, data[0], record.size)
        data[0] = copy.data
    block_give(block)
    return copy


# ---------------------------------------------------------------------------------------------------------------------
# Tensors

cdef char *wrong_tensor(const Request *request, const TensorSignature *tensor, const TensorRecord *record,
                        const int64_t *shape, const uint8_t *data, bint classified) noexcept nogil:
    cdef bint batches = request.signature.max_batch_size > 0
    cdef int64_t elements = 1
    cdef int64_t expected
    cdef uint32_t i
    # Triton returns the datatype that the model gives, so some models give another than the configured one.
    if record.datatype != <int>tensor.datatype and (not 1 <= record.datatype <= DATATYPES or classified
                                                    or tensor.state):
        return format_text(
            "unexpected datatype %s for output tensor '%s' of model '%s', the configuration says %s",
            datatype_name(record.datatype if record.datatype <= DATATYPES else 0),
            tensor.name.data, request.signature.name.data, datatype_name(tensor.datatype))
    for i in range(record.rank):
        if shape[i] < 0 or mul_overflow(elements, shape[i], &elements):
            return format_text("output '%s' has an impossible shape", tensor.name.data)
    if classified and (record.rank < <int>batches or (batches and shape[0] != request.rows)):
        return format_text("output '%s' must have the batch dimension %u first to be classified", tensor.name.data,
                           request.rows)
    if record.datatype == DT_BYTES:
        if bytes_of_elements(data, record.size, elements) == record.size:
            return NULL
        return format_text("output '%s' does not hold %lld elements", tensor.name.data, <long long>elements)
    if mul_overflow(elements, datatype_size(record.datatype), &expected) or <uint64_t>expected != record.size:
        return format_text("output '%s' must have %lld bytes of %s for its shape, got %llu", tensor.name.data,
                           <long long>expected, datatype_name(record.datatype), <unsigned long long>record.size)
    return NULL


cdef inline bint is_classified(const Response *response, uint32_t output) noexcept nogil:
    return output < response.request.signature.output_count and response.outputs[output].classes > 0


cdef void take_tensor(const ResponseSource *source, Response *response, TensorRecord *record,
                      const int64_t *shape) noexcept nogil:
    cdef const Request *request = response.request
    cdef const TensorSignature *tensor
    cdef OutputData *out
    cdef const uint8_t *data = NULL
    cdef Block *block
    cdef char *wrong
    if record.index >= request.signature.output_count + request.signature.kept_count:
        return
    tensor = &request.signature.outputs[record.index]
    if tensor.datatype == DT_BF16 and record.datatype == DT_UINT16:
        record.datatype = DT_BF16  # its bits, from a model without ml_dtypes
    if not tensor.state and not response.outputs[record.index].wanted:
        return
    block = content_of(source, request, record, &data)
    if block == NULL:
        wrong = format_text("output '%s' lies where the worker may not put it", tensor.name.data)
    else:
        wrong = wrong_tensor(request, tensor, record, shape, data, is_classified(response, record.index))
    if wrong == NULL and tensor.state and not request_set_state(
            response.request, tensor.state - 1, block_share(block), data, record.size, shape, record.rank, &wrong):
        response_fail(response, STATUS_INTERNAL, wrong)
        block_give(block)
        return
    if wrong != NULL:
        response_fail(response, STATUS_INTERNAL, wrong)
        block_give(block)
        return
    if record.index >= request.signature.output_count or not response.outputs[record.index].wanted:
        block_give(block)
        return
    out = &response.outputs[record.index]
    block_give(out.block)  # a model may set an output twice
    out.block = block
    out.data = data
    out.size = record.size
    out.datatype = <Datatype>record.datatype
    out.rank = record.rank
    memcpy(out.shape, shape, record.rank * sizeof(int64_t))
    if tensor.reshaped:
        show_as_configured(tensor, request.signature.max_batch_size > 0, out)


cdef inline void show_as_configured(const TensorSignature *tensor, bint batches, OutputData *out) noexcept nogil:
    # A shape that fits `reshape` becomes one that fits `dims`. A model may also respond with `dims` itself.
    if out.rank < <uint32_t>batches or not shape_fits(
            tensor.model_dims, tensor.model_rank, out.shape + batches, out.rank - batches):
        return
    reshape(tensor.model_dims, tensor.model_rank, tensor.dims, tensor.rank, out.shape + batches)
    out.rank = tensor.rank + batches


# ---------------------------------------------------------------------------------------------------------------------
# Parameters

cdef uint32_t count_parameters(const uint8_t *data, size_t size) noexcept nogil:
    # 0 when they are not well-formed
    cdef ParameterRecord record
    cdef size_t at = 0
    cdef uint32_t count = 0
    while at < size:
        if size - at < sizeof(ParameterRecord):
            return 0
        memcpy(&record, data + at, sizeof(ParameterRecord))
        at += sizeof(ParameterRecord)
        if (size - at < <size_t>record.name_size + record.text_size
                or not PARAMETER_BOOL <= record.kind <= PARAMETER_UINT64):
            return 0
        at += <size_t>record.name_size + record.text_size
        count += 1
    return count


cdef bint take_parameters(Response *response, const uint8_t *data, size_t size) noexcept nogil:
    cdef uint32_t count = count_parameters(data, size)
    cdef ParameterRecord record
    cdef Parameter *out
    cdef uint8_t *copy
    cdef size_t at = 0
    cdef uint32_t i
    if count == 0:
        return False
    block_give(response.parameter_block)  # of a round before this one: the request was rescheduled
    response.parameter_block = block_take(count * sizeof(Parameter) + size)
    if response.parameter_block == NULL:
        return False
    response.parameters = <Parameter *>response.parameter_block.data
    response.parameter_count = count
    memset(response.parameters, 0, count * sizeof(Parameter))
    copy = response.parameter_block.data + count * sizeof(Parameter)
    memcpy(copy, data, size)
    for i in range(count):
        memcpy(&record, copy + at, sizeof(ParameterRecord))
        at += sizeof(ParameterRecord)
        out = &response.parameters[i]
        out.kind = <ParameterKind>record.kind
        out.key.data = <const char *>copy + at
        out.key.size = record.name_size
        at += record.name_size
        out.text.data = <const char *>copy + at
        out.text.size = record.text_size if record.kind == PARAMETER_STRING else 0
        at += record.text_size
        if record.kind == PARAMETER_DOUBLE:
            memcpy(&out.real, &record.value, 8)
        else:
            out.integer = <int64_t>record.value
    return True


# ---------------------------------------------------------------------------------------------------------------------

cdef size_t take_tensors(const ResponseSource *source, size_t at, size_t end, uint32_t count,
                         Response *response) noexcept nogil:
    # the place behind them; 0 when they are not well-formed
    cdef TensorRecord tensor
    cdef int64_t shape[MAX_RANK]
    cdef uint32_t _
    for _ in range(count):
        if end - at < sizeof(TensorRecord):
            return 0
        memcpy(&tensor, source.record + at, sizeof(TensorRecord))
        at += sizeof(TensorRecord)
        if tensor.rank > MAX_RANK or end - at < tensor.rank * sizeof(int64_t):
            return 0
        memcpy(shape, source.record + at, tensor.rank * sizeof(int64_t))
        at += tensor.rank * sizeof(int64_t)
        take_tensor(source, response, &tensor, shape)
    return at


cdef size_t read_head(const ResponseSource *source, size_t at, ResponseRecord *head) noexcept nogil:
    if source.size - at < sizeof(ResponseRecord):
        return 0
    memcpy(head, source.record + at, sizeof(ResponseRecord))
    if head.size < sizeof(ResponseRecord) or head.size > source.size - at or head.status > RESPONSE_RESCHEDULE:
        return 0
    return head.size


cdef size_t response_peek(const ResponseSource *source, size_t at, uint8_t *status) noexcept nogil:
    cdef ResponseRecord head
    cdef size_t size = read_head(source, at, &head)
    if size:
        status[0] = head.status
    return size


cdef size_t response_read(const ResponseSource *source, size_t at, Response *response, uint8_t *status) noexcept nogil:
    cdef const Signature *signature = response.request.signature
    cdef ResponseRecord head
    cdef size_t end
    cdef uint32_t i
    if read_head(source, at, &head) == 0 or head.tensors > signature.output_count + signature.kept_count:
        return 0
    status[0] = head.status
    end = at + head.size
    at = take_tensors(source, at + sizeof(ResponseRecord), end, head.tensors, response)
    if at == 0 or end - at < <size_t>head.text_size + head.parameters_size:
        return 0
    if head.status == RESPONSE_ERROR:
        response_fail(response, status_of_code(head.code), format_text(
            "%.*s", <int>head.text_size, <const char *>source.record + at))
    if head.parameters_size and not take_parameters(response, source.record + at + head.text_size,
                                                    head.parameters_size):
        return 0
    if head.status == RESPONSE_OK:
        for i in range(signature.output_count):
            if response.outputs[i].block == NULL:
                response.outputs[i].wanted = False
    return head.size
