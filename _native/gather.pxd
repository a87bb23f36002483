# The inputs of a batch, each made one contiguous tensor.

from libc.stddef cimport size_t

from _native.batch cimport NativeBatch
from _native.memory cimport Block

# Make every present input contiguous, and the supplied ones. No byte is copied when a single request, or requests
# that lie one behind the other, are aligned already. False: the batch has failed.
cdef bint batch_gather(NativeBatch *batch) noexcept nogil
# The same in two steps, for memory of the executor's own. First the shape and size of every input, without its data.
# False: the batch has failed.
cdef bint batch_describe(NativeBatch *batch) noexcept nogil
# Then the data, in `block` at `offsets`: one for each input of the signature, with room for its size.
cdef void batch_gather_to(NativeBatch *batch, Block *block, const size_t *offsets) noexcept nogil
# Give back what either way has taken.
cdef void batch_give_inputs(NativeBatch *batch) noexcept nogil
