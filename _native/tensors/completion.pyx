"""Completes responses: brings the outputs that a model has set into the form in which they are sent."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t

from inferd._native.memory.resource cimport SHARED_WITH_NOBODY, Block, block_give
from inferd._native.protobuf.datatype cimport DT_BYTES, datatype_name
from inferd._native.request.request cimport OutputData, Request, Response, response_fail
from inferd._native.request.signature cimport Signature, TensorSignature
from inferd._native.status cimport STATUS_INTERNAL, STATUS_INVALID_ARGUMENT, STATUS_RESOURCE_EXHAUSTED
from inferd._native.tensors.classify cimport (
    CLASSIFY_LIMIT,
    CLASSIFY_OK,
    CLASSIFY_TOO_LARGE,
    CLASSIFY_UNSUPPORTED,
    ClassifyResult,
    classify,
)
from inferd._native.tensors.placement cimport response_place
from inferd._native.text cimport format_text


cdef void refuse_classes(Response *response, const TensorSignature *tensor, size_t elements,
                         ClassifyResult result) noexcept nogil:
    if result == CLASSIFY_UNSUPPORTED:
        response_fail(response, STATUS_INVALID_ARGUMENT, format_text(
            "class result not available for output due to unsupported type '%s' of output '%s'",
            datatype_name(tensor.datatype), tensor.name.data))
    elif result == CLASSIFY_TOO_LARGE:
        response_fail(response, STATUS_INVALID_ARGUMENT, format_text(
            "classification output tensor too large: output '%s' has %zu elements in a row, at most %d are served",
            tensor.name.data, elements, <int>CLASSIFY_LIMIT))
    else:
        response_fail(response, STATUS_RESOURCE_EXHAUSTED, NULL)


cdef bint classify_output(Response *response, uint32_t output) noexcept nogil:
    # replace an output by its best classes, as the client asked; False: the response has failed
    cdef const Request *request = response.request
    cdef const TensorSignature *tensor = &request.signature.outputs[output]
    cdef OutputData *out = &response.outputs[output]
    cdef uint32_t first = 1 if request.signature.max_batch_size > 0 else 0
    cdef size_t elements = 1
    cdef uint32_t i
    cdef ClassifyResult result
    cdef Block *block = NULL
    cdef size_t size = 0
    for i in range(first, out.rank):
        elements *= <size_t>out.shape[i]
    result = classify(out.data, out.datatype, request.rows, elements, out.classes, tensor.labels, tensor.label_count,
                      &block, &size)
    if result != CLASSIFY_OK:
        refuse_classes(response, tensor, elements, result)
        return False
    block_give(out.block)
    out.block = block
    out.data = block.data
    out.size = size
    out.datatype = DT_BYTES
    out.rank = first + 1
    out.shape[first] = min(<int64_t>out.classes, <int64_t>elements)
    return True


cdef void response_lacks(Response *response, uint32_t output) noexcept nogil:
    cdef const Signature *signature = response.request.signature
    response_fail(response, STATUS_INTERNAL, format_text(
        "model '%s' did not produce output '%s'", signature.name.data, signature.outputs[output].name.data))


cdef bint response_complete(Response *response) noexcept nogil:
    cdef const Request *request = response.request
    cdef bint shared = request.placements != NULL
    cdef uint32_t i
    for i in range(request.signature.output_count):
        if not response.outputs[i].wanted:
            continue
        if response.outputs[i].block == NULL:
            if request.is_step:
                response.outputs[i].wanted = False
                continue
            response_lacks(response, i)
            return False
        if response.outputs[i].classes and not classify_output(response, i):
            return False
        if response.outputs[i].block.sharing != SHARED_WITH_NOBODY:
            shared = True
    return not shared or response_place(response)
