# Gathers the inputs of a batch: each becomes one contiguous tensor.

from libc.stdint cimport uint8_t, uint32_t

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.request.request cimport InputData
from inferd._native.request.signature cimport SUPPLY_STATE, Signature

# Make every present input contiguous, and the supplied ones. Nothing is copied if the data of a single request, or
# of requests whose data are adjacent, are aligned, unless the executor may write to data that others can see. False:
# the batch has failed.
cdef bint batch_gather(NativeBatch *batch) noexcept nogil
# The same in two steps, for the executor's own memory. First the shape and size of every input, without its data.
# False: the batch has failed.
cdef bint batch_describe(NativeBatch *batch) noexcept nogil
# Then the data of each present input, to memory of its size. Not for inputs with data on a device.
cdef void batch_gather_input(const NativeBatch *batch, uint32_t input, uint8_t *at) noexcept nogil
# Whether every gathered input is a copy, so that an executor which writes to inputs leaves those of the requests.
cdef bint batch_is_copied(const NativeBatch *batch) noexcept nogil
# Release the inputs of either way.
cdef void batch_give_inputs(NativeBatch *batch) noexcept nogil

# Whether the batch makes an input, and not its requests or their sequences.
cdef inline bint is_made(const Signature *signature, uint32_t input) noexcept nogil:
    return input >= signature.input_count and signature.supplied[input - signature.input_count].kind != SUPPLY_STATE


# The data of an input that the batch does not make, in request i.
cdef inline const InputData *data_of(const NativeBatch *batch, uint32_t i, uint32_t input) noexcept nogil:
    cdef const Signature *signature = batch.signature
    if input < signature.input_count:
        return &batch.requests[i].inputs[input]
    return &batch.requests[i].sequenced.states[signature.supplied[input - signature.input_count].source]
