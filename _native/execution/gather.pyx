"""Gathering: each input of the requests of a batch becomes one contiguous tensor for the model.

Rows are in the order of the requests. A ragged input loses its shape: the model gets all elements in one dimension. The
variable dimension of a padded input is padded to the bucket of its length or, without buckets, to the longest of the
batch.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uintptr_t
from libc.string cimport memcpy

from inferd._native.assertion cimport assert_that
from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, batch_fail
from inferd._native.execution.supply cimport GatheredInput, supply
from inferd._native.memory.resource cimport SHARED_WITH_STRANGER, block_share, block_take
from inferd._native.protobuf.datatype cimport datatype_size
from inferd._native.request.request cimport InputData
from inferd._native.request.signature cimport SUPPLY_STATE, Signature, TensorSignature
from inferd._native.shape cimport bucket_of, elements_of, reshape
from inferd._native.text cimport format_text

cdef enum:
    ALIGNMENT = 64           # of a gathered input, as vector code and frameworks prefer it


cdef inline bint counts_rows(const NativeBatch *batch, uint32_t input) noexcept nogil:
    # a shape tensor whose first value is the size of the batch, followed by the values that all requests have in common
    return batch.signature.inputs[input].values and batch.signature.max_batch_size > 0


cdef inline bint may_stay(const NativeBatch *batch, const InputData *data) noexcept nogil:
    # whether no one else can write to the data during the execution, or see what the model writes
    return data.exclusive or not (batch.writes_inputs or data.block.sharing == SHARED_WITH_STRANGER)


cdef bint lies_right(const NativeBatch *batch, uint32_t input) noexcept nogil:
    # whether the data of all requests is one aligned run already, which stays as it is
    cdef const InputData *data = data_of(batch, 0, input)
    cdef const InputData *following
    cdef uint32_t i
    if <uintptr_t>data.data % ALIGNMENT or not may_stay(batch, data):
        return False
    if counts_rows(batch, input):
        return False
    for i in range(1, batch.count):
        following = data_of(batch, i, input)
        if (following.block != data.block or following.data != data.data + data.size
                or not may_stay(batch, following)):
            return False
        data = following
    return True


cdef void set_shape(const NativeBatch *batch, uint32_t input, GatheredInput *out) noexcept nogil:
    # the shape that the model sees
    cdef const TensorSignature *tensor = &batch.signature.inputs[input]
    cdef const InputData *first = data_of(batch, 0, input)
    cdef const InputData *data
    cdef bint batches = batch.signature.max_batch_size > 0
    cdef uint32_t i
    if tensor.ragged:
        out.rank = 1
        out.shape[0] = 0
        for i in range(batch.count):
            data = data_of(batch, i, input)
            out.shape[0] += elements_of(data.shape, data.rank)
        return
    out.rank = first.rank
    memcpy(out.shape, first.shape, first.rank * sizeof(int64_t))
    if counts_rows(batch, input):
        out.shape[0] += 1
    elif batches:
        out.shape[0] = batch.rows
    if tensor.reshaped:
        reshape(tensor.dims, tensor.rank, tensor.model_dims, tensor.model_rank, out.shape + batches)
        out.rank = tensor.model_rank + batches


cdef bint take_block(NativeBatch *batch, uint32_t input) noexcept nogil:
    # for `size` bytes of the gathered input
    cdef GatheredInput *out = &batch.inputs[input]
    out.block = block_take(out.size)
    if out.block == NULL:
        batch_fail(batch, format_text("no memory for %zu bytes of input '%s'", out.size,
                                      batch.signature.inputs[input].name.data))
        return False
    out.data = out.block.data
    return True


cdef void describe_one(NativeBatch *batch, uint32_t input) noexcept nogil:
    # whether it is there, its shape and size; not its data
    cdef const TensorSignature *tensor = &batch.signature.inputs[input]
    cdef GatheredInput *out = &batch.inputs[input]
    cdef uint32_t i
    out.present = data_of(batch, 0, input).present
    out.block = NULL
    out.size = 0
    if not out.present:
        return
    set_shape(batch, input, out)
    if tensor.padded and needs_padding(batch, input):
        out.shape[tensor.pad_axis + (batch.signature.max_batch_size > 0)] = padded_length(batch, input)
        out.size = <size_t>elements_of(out.shape, out.rank) * datatype_size(tensor.datatype)
        return
    if counts_rows(batch, input):
        out.size = <size_t>out.shape[0] * datatype_size(tensor.datatype)
        return
    for i in range(batch.count):
        out.size += data_of(batch, i, input).size


cdef void write_one(const NativeBatch *batch, uint32_t input, uint8_t *at) noexcept nogil:
    # the data of all requests, as described, to memory of that size
    cdef const uint8_t *end = at + batch.inputs[input].size
    cdef const InputData *data
    cdef uint32_t i
    if batch.signature.inputs[input].padded and needs_padding(batch, input):
        write_padded(batch, input, at)
        return
    if counts_rows(batch, input):
        write_values(batch, input, at)
        return
    for i in range(batch.count):
        data = data_of(batch, i, input)
        if data.size:
            memcpy(at, data.data, data.size)
        at += data.size
    assert_that(at == end)


cdef void write_values(const NativeBatch *batch, uint32_t input, uint8_t *at) noexcept nogil:
    # a shape tensor of the whole batch: how many rows it has, then the values
    cdef const InputData *first = data_of(batch, 0, input)
    cdef uint32_t size = datatype_size(batch.signature.inputs[input].datatype)
    cdef int64_t rows = batch.rows
    assert_that(size + first.size == batch.inputs[input].size)
    memcpy(at, &rows, size)  # little-endian: the lower half is the number, too
    memcpy(at + size, first.data, first.size)


cdef bint gather_one(NativeBatch *batch, uint32_t input) noexcept nogil:
    cdef const TensorSignature *tensor = &batch.signature.inputs[input]
    cdef GatheredInput *out = &batch.inputs[input]
    cdef const InputData *first = data_of(batch, 0, input)
    describe_one(batch, input)
    if not out.present:
        return True
    if not (tensor.padded and needs_padding(batch, input)) and lies_right(batch, input):
        out.block = block_share(first.block)
        out.data = first.data
        return True
    if not take_block(batch, input):
        return False
    write_one(batch, input, out.block.data)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Padding

cdef int64_t padded_length(const NativeBatch *batch, uint32_t input) noexcept nogil:
    # requests of one batch have lengths of one bucket: see request_alike
    cdef const Signature *signature = batch.signature
    cdef uint32_t axis = signature.inputs[input].pad_axis + (signature.max_batch_size > 0)
    cdef int64_t longest = 0
    cdef uint32_t i
    for i in range(batch.count):
        longest = max(longest, data_of(batch, i, input).shape[axis])
    if signature.bucket_count and longest <= signature.buckets[signature.bucket_count - 1]:
        return bucket_of(signature.buckets, signature.bucket_count, longest)
    return longest


cdef bint needs_padding(const NativeBatch *batch, uint32_t input) noexcept nogil:
    cdef const Signature *signature = batch.signature
    cdef uint32_t axis = signature.inputs[input].pad_axis + (signature.max_batch_size > 0)
    cdef int64_t length = padded_length(batch, input)
    cdef uint32_t i
    for i in range(batch.count):
        if data_of(batch, i, input).shape[axis] != length:
            return True
    return False


cdef void fill(uint8_t *at, size_t size, const uint8_t *value, size_t value_size) noexcept nogil:
    # `size` bytes of copies of the value; doubles what is there
    cdef size_t done = min(size, value_size)
    if size == 0:
        return
    memcpy(at, value, done)
    while done < size:
        memcpy(at + done, at, min(done, size - done))
        done += min(done, size - done)


cdef void write_padded(const NativeBatch *batch, uint32_t input, uint8_t *at) noexcept nogil:
    cdef const TensorSignature *tensor = &batch.signature.inputs[input]
    cdef const GatheredInput *out = &batch.inputs[input]
    cdef const InputData *data
    cdef uint32_t axis = tensor.pad_axis + (batch.signature.max_batch_size > 0)
    cdef uint32_t element = datatype_size(tensor.datatype)
    cdef int64_t length = padded_length(batch, input)
    cdef size_t inner, given
    cdef const uint8_t *end = at + out.size
    cdef const uint8_t *source
    cdef uint32_t i
    cdef int64_t _
    inner = <size_t>elements_of(out.shape + axis + 1, out.rank - axis - 1) * element
    for i in range(batch.count):
        data = data_of(batch, i, input)
        source = data.data
        given = <size_t>data.shape[axis] * inner
        for _ in range(elements_of(data.shape, axis)):
            if given:
                memcpy(at, source, given)
            fill(at + given, <size_t>length * inner - given, tensor.pad_value, element)
            source += given
            at += <size_t>length * inner
    assert_that(at == end)


# ---------------------------------------------------------------------------------------------------------------------

cdef bint supply_one(NativeBatch *batch, uint32_t index) noexcept nogil:
    cdef uint32_t input = batch.signature.input_count + index
    if batch.signature.supplied[index].kind == SUPPLY_STATE:
        return gather_one(batch, input)
    if not supply(batch.signature, index, batch.requests, batch.count, batch.rows, &batch.inputs[input]):
        batch_fail(batch, format_text("no memory for input '%s'", batch.signature.inputs[input].name.data))
        return False
    return True


cdef bint batch_gather(NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    for i in range(batch.signature.input_count + batch.signature.supplied_count):
        batch.inputs[i].block = NULL
    for i in range(batch.signature.input_count):
        if not gather_one(batch, i):
            return False
    for i in range(batch.signature.supplied_count):
        if not supply_one(batch, i):
            return False
    batch.input_end_ns = now_ns()
    return True


cdef bint batch_describe(NativeBatch *batch) noexcept nogil:
    cdef const Signature *signature = batch.signature
    cdef uint32_t i
    for i in range(signature.input_count + signature.supplied_count):
        batch.inputs[i].block = NULL
    for i in range(signature.input_count + signature.supplied_count):
        if not is_made(signature, i):
            describe_one(batch, i)
        elif not supply_one(batch, i - signature.input_count):
            return False
    return True


cdef void batch_gather_input(const NativeBatch *batch, uint32_t input, uint8_t *at) noexcept nogil:
    if is_made(batch.signature, input):
        memcpy(at, batch.inputs[input].data, batch.inputs[input].size)
    else:
        write_one(batch, input, at)


cdef bint batch_is_copied(const NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    for i in range(batch.signature.input_count):
        if batch.inputs[i].block != NULL and batch.inputs[i].block == data_of(batch, 0, i).block:
            return False
    return True
