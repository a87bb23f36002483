"""Scattering: the outputs of a batch are split among its requests, without a copy where possible."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from inferd._native.assertion cimport assert_that
from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, batch_fail
from inferd._native.memory.resource cimport Block, block_give, block_own, block_replace, block_share, block_take
from inferd._native.protobuf.datatype cimport DT_BYTES, bytes_of_elements, datatype_name, datatype_size
from inferd._native.request.request cimport InputData, OutputData, Request
from inferd._native.request.signature cimport MAX_RANK, SUPPLY_STATE, Signature, TensorSignature
from inferd._native.shape cimport elements_of, reshape
from inferd._native.tensors.placement cimport is_in_region
from inferd._native.text cimport format_text, shape_text

cdef extern from *:
    bint mul_overflow "__builtin_mul_overflow"(int64_t a, int64_t b, int64_t *out) nogil


cdef bint batch_wants(const NativeBatch *batch, uint32_t output) noexcept nogil:
    cdef uint32_t i
    if batch.signature.outputs[output].state:
        return True
    for i in range(batch.count):
        if batch.requests[i].response.outputs[output].wanted:
            return True
    return False


cdef char *wrong_output(const NativeBatch *batch, const TensorSignature *tensor, const int64_t *shape, uint32_t rank,
                        size_t size, int64_t *elements) noexcept nogil:
    cdef bint batches = batch.signature.max_batch_size > 0
    cdef int64_t expected
    cdef uint32_t i
    if rank > MAX_RANK:
        return format_text("output '%s' has %u dimensions, at most %d are served", tensor.name.data, rank,
                           <int>MAX_RANK)
    if tensor.reshaped and rank != tensor.model_rank + batches:
        return format_text("output '%s' must have %u dimensions, got %u", tensor.name.data,
                           tensor.model_rank + batches, rank)
    if batches and not tensor.like_input and (rank == 0 or shape[0] != batch.rows):
        return format_text("output '%s' must have the batch dimension %u first, got %lld", tensor.name.data,
                           batch.rows, <long long>(shape[0] if rank else -1))
    elements[0] = 1
    for i in range(rank):
        if shape[i] < 0 or mul_overflow(elements[0], shape[i], elements):
            return format_text("output '%s' has an impossible shape", tensor.name.data)
    if tensor.datatype != DT_BYTES and (
            mul_overflow(elements[0], datatype_size(tensor.datatype), &expected) or <uint64_t>expected != size):
        return format_text("output '%s' must have %lld bytes of %s for its shape, got %zu", tensor.name.data,
                           <long long>expected, datatype_name(tensor.datatype), size)
    return NULL


cdef inline void share_output(Request *request, uint32_t output, Block *block, const uint8_t *data, size_t size,
                              const int64_t *shape, uint32_t rank) noexcept nogil:
    # set the request's part, if the request wants the output
    cdef OutputData *out = &request.response.outputs[output]
    if not out.wanted:
        return
    block_give(out.block)  # a backend may set an output twice
    out.block = block_share(block)
    out.data = data
    out.size = size
    out.datatype = request.signature.outputs[output].datatype
    out.rank = rank
    memcpy(out.shape, shape, rank * sizeof(int64_t))


cdef size_t part_of(const NativeBatch *batch, const TensorSignature *tensor, uint32_t index, const uint8_t *data,
                    size_t size, int64_t elements) noexcept nogil:
    cdef const Request *request = batch.requests[index]
    cdef const InputData *model
    cdef int64_t own = elements
    if tensor.like_input:
        model = &request.inputs[tensor.like_input - 1]
        own = elements_of(model.shape, model.rank) if model.present else 0
    elif batch.signature.max_batch_size > 0:
        own = elements // batch.rows * request.rows
    if tensor.datatype == DT_BYTES:
        return bytes_of_elements(data, size, own)
    return <size_t>own * datatype_size(tensor.datatype)


cdef void set_part(NativeBatch *batch, uint32_t output, uint32_t index, Block *block, const uint8_t *data, size_t size,
                   const int64_t *shape, uint32_t rank) noexcept nogil:
    # give request `index` its part of the output
    cdef const TensorSignature *tensor = &batch.signature.outputs[output]
    cdef Request *request = batch.requests[index]
    cdef const InputData *model
    cdef int64_t own[MAX_RANK]
    cdef bint batches = batch.signature.max_batch_size > 0
    if tensor.like_input:
        model = &request.inputs[tensor.like_input - 1]
        share_output(request, output, block, data, size, model.shape, model.rank)
        return
    memcpy(own, shape, rank * sizeof(int64_t))
    if batches:
        own[0] = request.rows
    if tensor.reshaped:
        reshape(tensor.model_dims, tensor.model_rank, tensor.dims, tensor.rank, own + batches)
        rank = tensor.rank + batches
    if tensor.cut_like:
        cut_padding(batch, output, request, block, data, size, own, rank)
    else:
        share_output(request, output, block, data, size, own, rank)


cdef void cut_padding(NativeBatch *batch, uint32_t output, Request *request, Block *block, const uint8_t *data,
                      size_t size, int64_t *shape, uint32_t rank) noexcept nogil:
    # the dimension that has the length of a padded input gets the length of this request's input
    cdef const TensorSignature *tensor = &batch.signature.outputs[output]
    cdef const TensorSignature *source = &batch.signature.inputs[tensor.cut_like - 1]
    cdef bint batches = batch.signature.max_batch_size > 0
    cdef uint32_t axis = tensor.pad_axis + batches
    cdef const InputData *given = &request.inputs[tensor.cut_like - 1]
    cdef int64_t length, padded, _
    cdef size_t inner
    cdef Block *copy
    cdef uint8_t *at
    if not given.present or axis >= rank or shape[axis] <= given.shape[source.pad_axis + batches]:
        share_output(request, output, block, data, size, shape, rank)
        return
    padded = shape[axis]
    length = given.shape[source.pad_axis + batches]
    inner = <size_t>elements_of(shape + axis + 1, rank - axis - 1) * datatype_size(tensor.datatype)
    shape[axis] = length
    size = <size_t>elements_of(shape, rank) * datatype_size(tensor.datatype)
    if elements_of(shape, axis) == 1:
        share_output(request, output, block, data, size, shape, rank)
        return
    copy = block_take(size)
    if copy == NULL:
        batch_fail(batch, format_text("no memory for %zu bytes of output '%s'", size, tensor.name.data))
        return
    at = copy.data
    for _ in range(elements_of(shape, axis)):
        memcpy(at, data, <size_t>length * inner)
        at += <size_t>length * inner
        data += <size_t>padded * inner
    assert_that(at == copy.data + size)
    share_output(request, output, copy, copy.data, size, shape, rank)
    block_give(copy)


cdef bint batch_set_output(NativeBatch *batch, uint32_t output, Block *block, const uint8_t *data, size_t size,
                           const int64_t *shape, uint32_t rank) noexcept nogil:
    cdef const TensorSignature *tensor = &batch.signature.outputs[output]
    cdef int64_t elements = 0
    cdef bint fits = True
    cdef size_t part
    cdef uint32_t i
    cdef char *wrong
    if batch.output_start_ns == 0:
        batch.output_start_ns = now_ns()
    wrong = wrong_output(batch, tensor, shape, rank, size, &elements)
    if wrong == NULL and tensor.datatype == DT_BYTES and bytes_of_elements(data, size, elements) != size:
        wrong = format_text("output '%s' does not hold %lld elements", tensor.name.data, <long long>elements)
    if wrong != NULL:
        block_give(block)
        batch_fail(batch, wrong)
        return False
    for i in range(batch.count):
        part = part_of(batch, tensor, i, data, size, elements)
        fits = part <= size
        if not fits:
            break
        if output < batch.signature.output_count:
            set_part(batch, output, i, block, data, part, shape, rank)
        if tensor.state:
            batch_set_state(batch, i, tensor.state - 1, block_share(block), data, part, shape, rank)
        data += part
        size -= part
        if batch.signature.max_batch_size == 0:
            break
    if size or not fits:  # the output is too long, or too short
        batch_fail(batch, format_text("output '%s' must have as many elements as input '%s'", tensor.name.data,
                                      batch.signature.inputs[tensor.like_input - 1].name.data))
    block_give(block)
    return not batch.failed


cdef bint batch_set_state(NativeBatch *batch, uint32_t index, uint32_t state, Block *block, const uint8_t *data,
                          size_t size, const int64_t *shape, uint32_t rank) noexcept nogil:
    cdef char *wrong = NULL
    if request_set_state(batch.requests[index], state, block, data, size, shape, rank, &wrong):
        return True
    batch_fail(batch, wrong)
    return False


cdef bint request_set_state(Request *request, uint32_t state, Block *block, const uint8_t *data, size_t size,
                            const int64_t *shape, uint32_t rank, char **wrong) noexcept nogil:
    cdef InputData *goes_to
    wrong[0] = NULL
    if request.sequenced.unasked or request.sequenced.states == NULL:
        block_give(block)
        return True
    goes_to = &request.sequenced.states[request.signature.state_count + state]
    if not (block_own(&block, &data, size)
            and (not is_in_region(request, data) or block_replace(&block, &data, size))):
        block_give(block)
        return False
    block_give(goes_to.block)
    goes_to.present = True
    goes_to.block = block
    goes_to.data = data
    goes_to.size = size
    goes_to.rank = rank
    memcpy(goes_to.shape, shape, rank * sizeof(int64_t))
    if request.signature.max_batch_size > 0:
        goes_to.shape[0] = request.rows
    wrong[0] = wrong_state(request.signature, state, goes_to)
    return wrong[0] == NULL


cdef char *wrong_state(const Signature *signature, uint32_t state, const InputData *goes_to) noexcept nogil:
    # why the state does not fit the input as which it returns; NULL if it fits
    cdef const TensorSignature *tensor
    cdef bint batches = signature.max_batch_size > 0
    cdef bint good
    cdef uint32_t i, k
    cdef char want[512]
    cdef char got[512]
    for i in range(signature.supplied_count):
        if signature.supplied[i].kind != SUPPLY_STATE or signature.supplied[i].source != state:
            continue
        tensor = &signature.inputs[signature.input_count + i]
        good = goes_to.rank == tensor.rank + batches
        for k in range(tensor.rank if good else 0):
            if tensor.dims[k] != -1 and tensor.dims[k] != goes_to.shape[k + batches]:
                good = False
        if not good:
            return format_text(
                "the output for state '%s' must have shape %s, got %s", tensor.name.data,
                shape_text(want, sizeof(want), batches, <const long *>tensor.dims, tensor.rank),
                shape_text(got, sizeof(got), False, <const long *>goes_to.shape, goes_to.rank))
    return NULL
