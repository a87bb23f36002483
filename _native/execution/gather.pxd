# Gathers the inputs of a batch: each becomes one contiguous tensor.

from libc.stdint cimport uint8_t, uint32_t

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.request.request cimport InputData
from inferd._native.request.signature cimport SUPPLY_STATE, Signature

# Make each input contiguous: those that are present in the requests, and those that the server supplies. Aligned data
# of one request, or of requests with adjacent data, are used in place, unless the executor may write to data that
# others see. False: the batch has failed.
cdef bint batch_gather(NativeBatch *batch) noexcept nogil
# Gather in two steps, into the executor's own memory. Step 1: the shape and size of every input, without its data.
# False: the batch has failed.
cdef bint batch_describe(NativeBatch *batch) noexcept nogil
# Step 2: copy the data of one present input to `at`, which has its size. Not for inputs with data on a device.
cdef void batch_gather_input(const NativeBatch *batch, uint32_t input, uint8_t *at) noexcept nogil
# Whether every gathered input is a copy, so that an executor which writes to its inputs does not change the requests.
cdef bint batch_is_copied(const NativeBatch *batch) noexcept nogil

# Whether the server makes this input for the whole batch; else it comes from the requests or the states of their
# sequences.
cdef inline bint is_made(const Signature *signature, uint32_t input) noexcept nogil:
    return input >= signature.input_count and signature.supplied[input - signature.input_count].kind != SUPPLY_STATE


# The data of an input that the batch does not make, in request i.
cdef inline const InputData *data_of(const NativeBatch *batch, uint32_t i, uint32_t input) noexcept nogil:
    cdef const Signature *signature = batch.signature
    if input < signature.input_count:
        return &batch.requests[i].inputs[input]
    return &batch.requests[i].sequenced.states[signature.supplied[input - signature.input_count].source]
