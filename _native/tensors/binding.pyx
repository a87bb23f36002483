"""Binding: decodes a request's message, and checks it against its model.

The rules, and the texts of errors on which Triton's clients and tests depend, are those of Triton's front end and core
(https://github.com/triton-inference-server, "infer_handler.cc", "infer_request.cc"). The texts add what was expected
and what came.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, strlen

from inferd._native.memory.resource cimport Block, block_share, block_take
from inferd._native.protobuf.codec cimport (
    DECODE_LIMIT,
    DECODE_NO_MEMORY,
    DECODE_OK,
    DECODE_TOO_MANY,
    PARAMETER_INT64,
    DecodeResult,
    InputHead,
    OutputHead,
    Parameter,
    Str,
    infer_decode,
    parameter_find,
)
from inferd._native.protobuf.contents cimport contents_copy, contents_field, contents_size
from inferd._native.protobuf.datatype cimport DT_BYTES, datatype_name, datatype_size
from inferd._native.request.request cimport InputData, Request, request_fail, request_reserve
from inferd._native.request.signature cimport MAX_RANK, Signature, TensorSignature, input_find, output_find
from inferd._native.status cimport STATUS_INTERNAL, STATUS_INVALID_ARGUMENT, STATUS_RESOURCE_EXHAUSTED
from inferd._native.tensors.parameters cimport take_correlation, take_parameters, wrong_parameter
from inferd._native.tensors.placement cimport RegionAccess, is_placed, place_input, place_output
from inferd._native.tensors.refusals cimport contents_name, refuse_invalid, refuse_missing, refuse_shape
from inferd._native.text cimport clip, format_text


cdef extern from *:
    bint mul_overflow "__builtin_mul_overflow"(int64_t a, int64_t b, int64_t *out) nogil

cdef enum:
    MAX_ROWS = 1 << 30       # of a request that is split into parts
    MAX_PARTS = 4096


cdef bint request_decode(Request *request, Block *block, const uint8_t *data, size_t size) noexcept nogil:
    cdef DecodeResult result
    request.block = block
    result = infer_decode(data, size, &request.message)
    if result == DECODE_OK:
        request.id = request.message.id
        return True
    if result == DECODE_TOO_MANY:
        request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
            "the request has more than %d inputs, outputs, raw contents, parameters or dimensions", <int>DECODE_LIMIT))
    elif result == DECODE_NO_MEMORY:
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, format_text("no memory to decode the request"))
    else:
        request_fail(request, STATUS_INTERNAL, format_text(
            "the request is not a valid inference.ModelInferRequest message of %zu bytes", size))
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Checking against the model

cdef bint request_bind(Request *request, const Signature *signature, const RegionAccess *regions) noexcept nogil:
    if not request_reserve(request, signature):
        return False
    return take_parameters(request) and bind_inputs(request, regions) and bind_outputs(request, regions)


cdef void request_identify(Request *request) noexcept nogil:
    take_correlation(request)


# --- inputs

cdef inline int input_at(const Signature *signature, uint32_t place, Str name) noexcept nogil:
    # The same as input_find, but faster for clients that send the inputs in the order of the model.
    cdef const Str *expected = &signature.inputs[place].name
    if (place < signature.input_count and expected.size == name.size
            and memcmp(expected.data, name.data, name.size) == 0):
        return <int>place
    return input_find(signature, name)


cdef bint bind_inputs(Request *request, const RegionAccess *regions) noexcept nogil:
    cdef const Signature *signature = request.signature
    cdef const InputHead *head
    cdef uint32_t raw = 0    # inputs in shared memory have no entry in raw_input_contents
    cdef uint32_t i
    cdef int index
    if request.message.raw_count > 0 and request.message.raw_count > request.message.input_count:
        refuse_invalid(request, format_text(
            "unexpected number of raw_input_contents for model '%s', expected %u, one for each input, got %u",
            signature.name.data, request.message.input_count, request.message.raw_count))
        return False
    request.rows = 0
    for i in range(request.message.input_count):
        head = &request.message.inputs[i]
        index = input_at(signature, i, head.name)
        if index < 0 or <uint32_t>index >= signature.input_count:
            request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
                "unexpected inference input '%.*s' for model '%.*s'",
                clip(head.name), head.name.data, signature.name.size, signature.name.data))
            return False
        if request.inputs[index].present:
            refuse_invalid(request, format_text("input '%.*s' already exists in request",
                                                clip(head.name), head.name.data))
            return False
        if not bind_input(request, regions, head, &raw, index):
            request.inputs[index].present = False  # some of its fields are not set
            return False
    return check_presence(request)


cdef inline bint bind_input(Request *request, const RegionAccess *regions, const InputHead *head, uint32_t *raw,
                            int index) noexcept nogil:
    # `raw` counts the inputs with data in the message
    request.inputs[index].present = True
    if head.parameter_count and is_placed(request, head.first_parameter, head.parameter_count):
        if not place_input(request, regions, head, index):
            return False
    else:
        if not find_data(request, head, raw[0], index):
            return False
        raw[0] += 1
    return check_datatype(request, head, index) and take_shape(request, head, index) and check_tensor(request, index)


cdef bint check_presence(Request *request) noexcept nogil:
    # whether every input that is not optional is present
    cdef const Signature *signature = request.signature
    cdef uint32_t i, present = 0, required = 0
    for i in range(signature.input_count):
        if request.inputs[i].present:
            present += 1
            required += not signature.inputs[i].optional
    if required < signature.required_inputs:
        refuse_missing(request, present)
        return False
    if request.rows == 0:
        request.rows = 1
    for i in range(signature.input_count):
        if signature.inputs[i].values and request.inputs[i].present and not drop_batch_value(request, i):
            return False
    return True


cdef bint drop_batch_value(Request *request, uint32_t index) noexcept nogil:
    # A shape tensor may begin with the batch size of the request, or come without it.
    cdef const TensorSignature *tensor = &request.signature.inputs[index]
    cdef InputData *input = &request.inputs[index]
    cdef uint32_t size = datatype_size(tensor.datatype)
    cdef int32_t narrow = 0
    cdef int64_t wide = 0
    if request.signature.max_batch_size == 0 or input.shape[0] == tensor.dims[0]:
        return True
    if size == sizeof(narrow):
        memcpy(&narrow, input.data, sizeof(narrow))
        wide = narrow
    else:
        memcpy(&wide, input.data, sizeof(wide))
    if wide != request.rows:
        refuse_invalid(request, format_text(
            "the first value of shape tensor '%.*s' for model '%.*s' must be the batch size of the request, %u, "
            "got %lld", tensor.name.size, tensor.name.data, request.signature.name.size,
            request.signature.name.data, request.rows, <long long>wide))
        return False
    input.data += size
    input.size -= size
    input.shape[0] -= 1
    return True


cdef bint request_check(Request *request) noexcept nogil:
    cdef uint32_t i
    request.rows = 0
    for i in range(request.signature.input_count):
        if request.inputs[i].present and not check_tensor(request, <int>i):
            return False
    return check_presence(request)


cdef bint find_data(Request *request, const InputHead *head, uint32_t position, int index) noexcept nogil:
    # Set the data of this input: the entry `position` of raw_input_contents, or its typed contents, which are
    # converted.
    cdef const Signature *signature = request.signature
    cdef const TensorSignature *tensor = &signature.inputs[index]
    cdef InputData *input = &request.inputs[index]
    cdef uint32_t field
    if request.message.raw_count > 0:
        if head.contents_mask:
            request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
                "contents field must not be specified when using raw_input_contents for '%.*s' for model '%.*s'",
                tensor.name.size, tensor.name.data, signature.name.size, signature.name.data))
            return False
        if position < request.message.raw_count:
            input.data = <const uint8_t *>request.message.raw[position].data
            input.size = request.message.raw[position].size
            input.block = block_share(request.block)
            input.exclusive = not request.block.sealed
            return True
    elif head.has_contents:
        field = contents_field(tensor.datatype)
        if head.contents_mask & ~(<uint32_t>1 << field if field else 0):
            request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
                "unexpected explicit tensor data for input tensor '%.*s' for model '%.*s', expected %s",
                tensor.name.size, tensor.name.data, signature.name.size, signature.name.data,
                contents_name(field)))
            return False
        input.size = contents_size(head, tensor.datatype)
        input.block = block_take(input.size)
        if input.block == NULL:
            request_fail(request, STATUS_RESOURCE_EXHAUSTED, format_text(
                "no memory for %zu bytes of input '%.*s'", input.size, tensor.name.size, tensor.name.data))
            return False
        contents_copy(head, tensor.datatype, input.block.data)
        input.data = input.block.data
        input.exclusive = True
        return True
    request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
        "unable to find data for input tensor '%.*s' for model '%.*s' in request.",
        tensor.name.size, tensor.name.data, signature.name.size, signature.name.data))
    return False


cdef bint check_datatype(Request *request, const InputHead *head, int index) noexcept nogil:
    cdef const Signature *signature = request.signature
    cdef const TensorSignature *tensor = &signature.inputs[index]
    cdef const char *expected = datatype_name(tensor.datatype)
    if head.datatype.size != strlen(expected) or memcmp(head.datatype.data, expected, head.datatype.size) != 0:
        refuse_invalid(request, format_text(
            "inference input '%.*s' data-type is '%.*s', but model '%.*s' expects '%s'",
            tensor.name.size, tensor.name.data, clip(head.datatype), head.datatype.data,
            signature.name.size, signature.name.data, expected))
        return False
    return True


cdef bint take_shape(Request *request, const InputHead *head, int index) noexcept nogil:
    cdef InputData *input = &request.inputs[index]
    cdef const int64_t *shape = request.message.dims + head.first_dim
    if head.rank > MAX_RANK:
        refuse_shape(request, &request.signature.inputs[index], shape, head.rank)
        return False
    input.rank = head.rank
    memcpy(input.shape, shape, head.rank * sizeof(int64_t))
    return True


cdef bint check_tensor(Request *request, int index) noexcept nogil:
    # check shape, rows and number of bytes of one input that is present
    cdef const Signature *signature = request.signature
    cdef const TensorSignature *tensor = &signature.inputs[index]
    cdef const InputData *input = &request.inputs[index]
    cdef int64_t elements = 1
    cdef uint32_t i
    for i in range(input.rank):
        if input.shape[i] < 0:
            refuse_invalid(request, format_text(
                "All input dimensions should be specified for input '%.*s' for model '%.*s', got %lld in dimension %u",
                tensor.name.size, tensor.name.data, signature.name.size, signature.name.data,
                <long long>input.shape[i], i))
            return False
        if mul_overflow(elements, input.shape[i], &elements):
            refuse_invalid(request, format_text("the shape of input '%.*s' for model '%.*s' has too many elements",
                                                tensor.name.size, tensor.name.data,
                                                signature.name.size, signature.name.data))
            return False
    if signature.max_batch_size > 0 and not tensor.values and not check_rows(request, tensor, input):
        return False
    return check_shape(request, tensor, input) and check_bytes(request, tensor, input, elements)


cdef bint check_rows(Request *request, const TensorSignature *tensor, const InputData *input) noexcept nogil:
    cdef const Signature *signature = request.signature
    cdef int64_t most = signature.max_batch_size
    if signature.splits:
        most = min(most * MAX_PARTS, <int64_t>MAX_ROWS)
    if input.rank == 0:
        refuse_invalid(request, format_text("input '%.*s' has no shape but model requires batch dimension for '%.*s'",
                                            tensor.name.size, tensor.name.data, signature.name.size,
                                            signature.name.data))
        return False
    if input.shape[0] > most:
        refuse_invalid(request, format_text("inference request batch-size must be <= %lld for '%.*s', got %lld",
                                            <long long>most, signature.name.size, signature.name.data,
                                            <long long>input.shape[0]))
        return False
    if input.shape[0] == 0:
        refuse_invalid(request, format_text("inference request batch-size must be >= 1 for '%.*s', got 0",
                                            signature.name.size, signature.name.data))
        return False
    if request.rows == 0:
        request.rows = <uint32_t>input.shape[0]
    elif request.rows != input.shape[0]:
        refuse_invalid(request, format_text(
            "input '%.*s' batch size does not match other inputs for '%.*s', expected %u, got %lld",
            tensor.name.size, tensor.name.data, signature.name.size, signature.name.data, request.rows,
            <long long>input.shape[0]))
        return False
    return True


cdef bint check_shape(Request *request, const TensorSignature *tensor, const InputData *input) noexcept nogil:
    cdef bint batches = request.signature.max_batch_size > 0 and not tensor.values
    cdef bint good = input.rank == tensor.rank + batches
    cdef uint32_t i
    if tensor.values and request.signature.max_batch_size > 0 and good and input.shape[0] == tensor.dims[0] + 1:
        return True  # with the batch size first: see drop_batch_value
    if good:
        for i in range(tensor.rank):
            if tensor.dims[i] != -1 and tensor.dims[i] != input.shape[i + batches]:
                good = False
    if not good:
        refuse_shape(request, tensor, input.shape, input.rank)
    return good


cdef bint check_bytes(Request *request, const TensorSignature *tensor, const InputData *input,
                      int64_t elements) noexcept nogil:
    cdef const Signature *signature = request.signature
    cdef int64_t expected
    if tensor.datatype == DT_BYTES:
        return check_strings(request, tensor, input, elements)
    if mul_overflow(elements, datatype_size(tensor.datatype), &expected) or <uint64_t>expected != input.size:
        refuse_invalid(request, format_text(
            "input byte size mismatch for input '%.*s' for model '%.*s'. Expected %lld, got %zu",
            tensor.name.size, tensor.name.data, signature.name.size, signature.name.data,
            <long long>expected, input.size))
        return False
    return True


cdef bint check_strings(Request *request, const TensorSignature *tensor, const InputData *input,
                        int64_t elements) noexcept nogil:
    # each element of a BYTES tensor is a 4-byte little-endian length and that many bytes
    cdef const Signature *signature = request.signature
    cdef const uint8_t *at = input.data
    cdef size_t left = input.size
    cdef int64_t found = 0
    cdef uint32_t size
    while left:
        if found == elements:
            refuse_invalid(request, format_text(
                "unexpected number of string elements %lld for inference input '%.*s' for model '%.*s', expecting %lld",
                <long long>(found + 1), tensor.name.size, tensor.name.data, signature.name.size, signature.name.data,
                <long long>elements))
            return False
        if left < 4:
            refuse_invalid(request, format_text(
                "incomplete string length indicator for inference input '%.*s' for model '%.*s', expecting 4 bytes "
                "but only %zu bytes available", tensor.name.size, tensor.name.data,
                signature.name.size, signature.name.data, left))
            return False
        memcpy(&size, at, 4)
        at += 4
        left -= 4
        if size > left:
            refuse_invalid(request, format_text(
                "incomplete string data for inference input '%.*s' for model '%.*s', expecting string of length %u "
                "but only %zu bytes available", tensor.name.size, tensor.name.data,
                signature.name.size, signature.name.data, size, left))
            return False
        at += size
        left -= size
        found += 1
    if found != elements:
        refuse_invalid(request, format_text(
            "expected %lld string elements for inference input '%.*s' for model '%.*s', got %lld",
            <long long>elements, tensor.name.size, tensor.name.data, signature.name.size, signature.name.data,
            <long long>found))
        return False
    return True


# --- outputs

cdef bint bind_outputs(Request *request, const RegionAccess *regions) noexcept nogil:
    cdef const Signature *signature = request.signature
    cdef const OutputHead *head
    cdef uint32_t i
    cdef int index
    if request.message.output_count == 0:
        for i in range(signature.output_count):
            request.response.outputs[i].wanted = True
        return True
    for i in range(request.message.output_count):
        head = &request.message.outputs[i]
        index = output_find(signature, head.name)
        if index < 0 or <uint32_t>index >= signature.output_count:
            request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
                "unexpected inference output '%.*s' for model '%.*s'",
                clip(head.name), head.name.data, signature.name.size, signature.name.data))
            return False
        if request.response.outputs[index].wanted:
            refuse_invalid(request, format_text("output '%.*s' already exists in request",
                                                clip(head.name), head.name.data))
            return False
        request.response.outputs[index].wanted = True
        if head.parameter_count and is_placed(request, head.first_parameter, head.parameter_count):
            if not place_output(request, regions, head, index):
                return False
        elif not check_classification(request, head, index):
            return False
    return True


cdef bint check_classification(Request *request, const OutputHead *head, int index) noexcept nogil:
    cdef const Parameter *p = parameter_find(
        request.message.tensor_parameters + head.first_parameter, head.parameter_count, "classification", 14)
    if p == NULL:
        return True
    if p.kind != PARAMETER_INT64:
        return wrong_parameter(request, p.key, "int64_param")
    if p.integer <= 0:
        request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
            "invalid value for 'classification' parameter, expected value >= 1, got %lld", <long long>p.integer))
        return False
    request.response.outputs[index].classes = <uint32_t>min(p.integer, <int64_t>0x7fffffff)
    return True
