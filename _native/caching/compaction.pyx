"""Requests that the response cache keeps with their responses, made as small as possible.

A cached request keeps the parts of its cache key, and its outputs, all in one block. The tensors are copied into it:
otherwise a small one would keep the whole message or batch alive of which it is a part. The block does not come from
the pools of free blocks, so an evicted entry leaves nothing behind: the cache uses the memory of its present entries
only, whatever sizes it had before.
"""

from libc.stdint cimport uint32_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy

from inferd._native.caching.cache_key cimport KEY_SMALL
from inferd._native.memory.host cimport host_take_apart
from inferd._native.memory.resource cimport Block, block_give, block_share
from inferd._native.protobuf.codec cimport (
    InferMessage,
    Parameter,
    Str,
    infer_message_copy_parameters,
    infer_message_free,
    infer_message_init,
)
from inferd._native.request.request cimport InputData, OutputData, Request, Response

cdef enum:
    ALIGNMENT = 64           # of tensors within the block
    OVERHEAD = 512           # of the block: its head, its alignment, the allocator's own


cdef inline size_t padded(size_t size) noexcept nogil:
    return (size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)


cdef inline bint is_kept(const InputData *input, bint compares) noexcept nogil:
    # for comparison; of a larger one the digest is compared instead
    return input.present and (compares or input.size <= KEY_SMALL)


cdef size_t texts_size(const Parameter *parameters, uint32_t count) noexcept nogil:
    cdef size_t size = 0
    cdef uint32_t i
    for i in range(count):
        size += parameters[i].key.size + parameters[i].text.size
    return size


cdef size_t needed(const Request *work, bint compares) noexcept nogil:
    # bytes of the block
    cdef size_t size = padded(texts_size(work.message.parameters, work.message.parameter_count))
    cdef uint32_t i
    for i in range(work.signature.input_count):
        if is_kept(&work.inputs[i], compares):
            size += padded(work.inputs[i].size)
    for i in range(work.signature.output_count):
        size += padded(work.response.outputs[i].size if work.response.outputs[i].block != NULL else 0)
    size += padded(work.response.parameter_count * sizeof(Parameter))
    return size + padded(texts_size(work.response.parameters, work.response.parameter_count))


cdef size_t work_held(const Request *work, bint compares) noexcept nogil:
    cdef uint32_t tensors = max(work.signature.input_count, work.signature.output_count)
    return (sizeof(Request) + tensors * (sizeof(InputData) + sizeof(OutputData))
            + work.message.parameter_count * sizeof(Parameter)
            + needed(work, compares) + OVERHEAD)


cdef void move(Block *own, size_t *at, Block **block, const unsigned char **data, size_t size) noexcept nogil:
    # copy a tensor into the block
    if size:
        memcpy(own.data + at[0], data[0], size)
    data[0] = own.data + at[0]
    at[0] += padded(size)
    block_give(block[0])
    block[0] = block_share(own)


cdef void move_texts(Block *own, size_t *at, Parameter *parameters, uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        move_text(&parameters[i].key, own, at)
        move_text(&parameters[i].text, own, at)
    at[0] = padded(at[0])


cdef inline void move_text(Str *text, Block *to, size_t *at) noexcept nogil:
    if text.size:
        memcpy(to.data + at[0], text.data, text.size)
        text.data = <const char *>(to.data + at[0])
        at[0] += text.size


cdef void move_response_parameters(Response *response, Block *own, size_t *at) noexcept nogil:
    cdef Parameter *moved = <Parameter *>(own.data + at[0])
    if response.parameter_count == 0:
        return
    memcpy(moved, response.parameters, response.parameter_count * sizeof(Parameter))
    at[0] += padded(response.parameter_count * sizeof(Parameter))
    move_texts(own, at, moved, response.parameter_count)
    response.parameters = moved
    block_give(response.parameter_block)
    response.parameter_block = block_share(own)


cdef bint shrink_arrays(Request *work) noexcept nogil:
    # Make the arrays of `work` as small as its signature needs: earlier requests in this memory have made them grow.
    # False: no memory; the arrays are still good.
    cdef uint32_t wanted = max(work.signature.input_count, work.signature.output_count)
    cdef InferMessage message
    cdef void *smaller
    infer_message_init(&message)
    if not infer_message_copy_parameters(&message, &work.message):
        infer_message_free(&message)
        return False
    infer_message_free(&work.message)
    work.message = message
    if wanted < work.tensor_capacity:
        work.tensor_capacity = wanted
        smaller = realloc(work.inputs, max(wanted, <uint32_t>1) * sizeof(InputData))
        if smaller != NULL:
            work.inputs = <InputData *>smaller
        smaller = realloc(work.response.outputs, max(wanted, <uint32_t>1) * sizeof(OutputData))
        if smaller != NULL:
            work.response.outputs = <OutputData *>smaller
    return True


cdef bint work_compact(Request *work, bint compares) noexcept nogil:
    cdef Block *own = host_take_apart(needed(work, compares))
    cdef InputData *input
    cdef OutputData *output
    cdef size_t at = 0
    cdef uint32_t i
    if own == NULL or not shrink_arrays(work):
        block_give(own)
        return False
    move_texts(own, &at, work.message.parameters, work.message.parameter_count)
    for i in range(work.signature.input_count):
        input = &work.inputs[i]
        if is_kept(input, compares):
            move(own, &at, &input.block, &input.data, input.size)
        else:
            block_give(input.block)
            input.block = NULL
            input.data = NULL
    for i in range(work.signature.output_count):
        output = &work.response.outputs[i]
        if output.block != NULL:
            move(own, &at, &output.block, &output.data, output.size)
    move_response_parameters(&work.response, own, &at)
    block_give(work.block)
    work.block = own
    work.id.size = 0
    return True
