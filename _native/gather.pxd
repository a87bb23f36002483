# The inputs of a batch, each made one contiguous tensor.

from _native.batch cimport NativeBatch

# Make every present input contiguous, and the supplied ones. No byte is copied when a single request, or requests
# that lie one behind the other, are aligned already. False: the batch has failed.
cdef bint batch_gather(NativeBatch *batch) noexcept nogil
# Give back what batch_gather has taken.
cdef void batch_give_inputs(NativeBatch *batch) noexcept nogil
