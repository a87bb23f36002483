# The outputs of a batch, split among its requests.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t

from _native.execution.batch cimport NativeBatch
from _native.memory.resource cimport Block
from _native.request.request cimport Request
from _native.request.signature cimport TensorSignature

# The length of the first `elements` elements of a BYTES tensor; SIZE_MAX when it ends before.
cdef size_t bytes_of_elements(const uint8_t *data, size_t size, int64_t elements) noexcept nogil
# Whether some request of the batch asked for this output, or the server keeps it.
cdef bint batch_wants(const NativeBatch *batch, uint32_t output) noexcept nogil
# Why an output of the whole batch cannot be split among the requests, from malloc; NULL when it can, then with its
# number of elements.
cdef char *wrong_output(const NativeBatch *batch, const TensorSignature *tensor, const int64_t *shape, uint32_t rank,
                        size_t size, int64_t *elements) noexcept nogil
# The bytes of request `index` at `data`, where `size` bytes are left of an output with so many elements in all;
# SIZE_MAX when the output ends before. `data` may be NULL, but for BYTES.
cdef size_t part_of(const NativeBatch *batch, const TensorSignature *tensor, uint32_t index, const uint8_t *data,
                    size_t size, int64_t elements) noexcept nogil
# Hand over one output for the whole batch: `size` bytes at `data` in `block`, whose one reference is taken (also on
# failure). The rows are split among the requests without a copy, and among the states of their sequences. False:
# the batch has failed.
cdef bint batch_set_output(NativeBatch *batch, uint32_t output, Block *block, const uint8_t *data, size_t size,
                           const int64_t *shape, uint32_t rank) noexcept nogil
# Hand over the state that the sequence of one request goes to, for an executor that works request by request; `state`
# is TensorSignature.state - 1 of the output that updates it. Takes the one reference to `block`, also on failure.
# False: the batch has failed.
cdef bint batch_set_state(NativeBatch *batch, uint32_t index, uint32_t state, Block *block, const uint8_t *data,
                          size_t size, const int64_t *shape, uint32_t rank) noexcept nogil
# The same for a request that may have left its batch. False: `wrong` says why, from malloc; NULL: no memory.
cdef bint request_set_state(Request *request, uint32_t state, Block *block, const uint8_t *data, size_t size,
                            const int64_t *shape, uint32_t rank, char **wrong) noexcept nogil
