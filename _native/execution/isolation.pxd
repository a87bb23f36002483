# Requests of a failed batch, each executed once more alone: the content of one fails no other.

from inferd._native.execution.batch cimport NativeBatch, execute_fn

# Whether the requests of the batch, whose execution has failed, can be executed again: there are several, and their
# inputs are what they were.
cdef bint may_execute_each(const NativeBatch *batch) noexcept nogil
# Execute each request of the failed batch alone by `one`, which gathers its inputs. Requests that fail again get their
# own error, the others their response. The batch itself then has not failed.
cdef void execute_each(NativeBatch *batch, execute_fn one, void *context) noexcept nogil
