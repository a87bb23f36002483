"""Requests that the response cache keeps with their responses, made as small as possible.

A cached request keeps the parts of its cache key, and its outputs. Tensors often are small parts of large blocks: of a
message, or of a batch. So parts that need much less than their block are copied.
"""

from libc.stdint cimport uint32_t
from libc.string cimport memcpy

from _native.caching.cache_key cimport KEY_SMALL
from _native.memory.resource cimport Block, block_give, block_take
from _native.protobuf.codec cimport Parameter, Str
from _native.request.request cimport InputData, OutputData, Request

cdef enum:
    SMALL = 4096             # blocks up to this size are kept as they are


cdef bint compact(Block **block, const unsigned char **data, size_t size) noexcept nogil:
    # Replace a block by a smaller one if the tensor needs only a part of it. False: no memory.
    cdef Block *copy
    if block[0] == NULL or block[0].size <= max(<size_t>SMALL, 2 * size):
        return True
    copy = block_take(size)
    if copy == NULL:
        return False
    if size:
        memcpy(copy.data, data[0], size)
    block_give(block[0])
    block[0] = copy
    data[0] = copy.data
    return True


cdef size_t work_held(const Request *work) noexcept nogil:
    # Counts a block once if the tensors that share it follow each other.
    cdef size_t size = sizeof(Request)
    cdef const Block *last = work.block
    cdef uint32_t i
    size += work.signature.input_count * sizeof(InputData) + work.signature.output_count * sizeof(OutputData)
    if work.block != NULL:
        size += work.block.size
    for i in range(work.signature.input_count):
        if work.inputs[i].block != NULL and work.inputs[i].block != last:
            last = work.inputs[i].block
            size += last.size
    for i in range(work.signature.output_count):
        if work.response.outputs[i].block != NULL and work.response.outputs[i].block != last:
            last = work.response.outputs[i].block
            size += last.size
    return size


cdef bint work_compact(Request *work, bint compares) noexcept nogil:
    cdef uint32_t i
    for i in range(work.signature.input_count):
        if work.inputs[i].size > KEY_SMALL and not compares:
            block_give(work.inputs[i].block)  # its digest is compared instead
            work.inputs[i].block = NULL
            work.inputs[i].data = NULL
            continue
        if not compact(&work.inputs[i].block, &work.inputs[i].data, work.inputs[i].size):
            return False
    for i in range(work.signature.output_count):
        if not compact(&work.response.outputs[i].block, &work.response.outputs[i].data,
                       work.response.outputs[i].size):
            return False
    return keep_parameters(work)


cdef bint keep_parameters(Request *work) noexcept nogil:
    # copy the parameters out of the message into a block of their own, and give the message back
    cdef Parameter *p
    cdef Block *own = NULL
    cdef size_t size = 0
    cdef size_t at = 0
    cdef uint32_t i
    for i in range(work.message.parameter_count):
        size += work.message.parameters[i].key.size + work.message.parameters[i].text.size
    if size:
        own = block_take(size)
        if own == NULL:
            return False
    for i in range(work.message.parameter_count):
        p = &work.message.parameters[i]
        move_text(&p.key, own, &at)
        move_text(&p.text, own, &at)
    block_give(work.block)
    work.block = own
    work.id.size = 0
    return True


cdef inline void move_text(Str *text, Block *to, size_t *at) noexcept nogil:
    if text.size:
        memcpy(to.data + at[0], text.data, text.size)
        text.data = <const char *>(to.data + at[0])
        at[0] += text.size
