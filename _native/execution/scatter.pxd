# Splits the outputs of a batch among its requests.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.memory.resource cimport Block
from inferd._native.request.request cimport Request
from inferd._native.request.signature cimport TensorSignature

# Whether this output is needed: a request of the batch wants it, or it is a state, which the server keeps.
cdef bint batch_wants(const NativeBatch *batch, uint32_t output) noexcept nogil
# Why an output of the whole batch cannot be split among the requests, from malloc; NULL if it can. Then `elements` is
# its number of elements.
cdef char *wrong_output(const NativeBatch *batch, const TensorSignature *tensor, const int64_t *shape, uint32_t rank,
                        size_t size, int64_t *elements) noexcept nogil
# The bytes of the part of request `index`, which begins at `data`. `size` bytes of the output are left there, and the
# whole output has `elements` elements. More than `size`: the output is too short. `data` may be NULL, except for BYTES.
cdef size_t part_of(const NativeBatch *batch, const TensorSignature *tensor, uint32_t index, const uint8_t *data,
                    size_t size, int64_t elements) noexcept nogil
# Set one output for the whole batch: `size` bytes at `data` in `block`, whose reference is taken over (also on
# failure). The rows are split, without a copy, among the requests and the states of their sequences. False:
# the batch has failed.
cdef bint batch_set_output(NativeBatch *batch, uint32_t output, Block *block, const uint8_t *data, size_t size,
                           const int64_t *shape, uint32_t rank) noexcept nogil
# Set the new state of the sequence of one request, for executors that work request by request. `state` is the index of
# the state: the output that updates it has it as TensorSignature.state - 1. Takes over the reference to `block`, also
# on failure. False: the batch has failed.
cdef bint batch_set_state(NativeBatch *batch, uint32_t index, uint32_t state, Block *block, const uint8_t *data,
                          size_t size, const int64_t *shape, uint32_t rank) noexcept nogil
# Set a state of a request that may have left its batch. False: `wrong` is the reason, from malloc; NULL: no memory.
cdef bint request_set_state(Request *request, uint32_t state, Block *block, const uint8_t *data, size_t size,
                            const int64_t *shape, uint32_t rank, char **wrong) noexcept nogil
