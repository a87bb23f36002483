# Executes the requests of a failed batch again, one at a time, so that one bad request does not fail the others.

from inferd._native.execution.batch cimport NativeBatch, execute_fn

# Whether the requests of the batch, whose execution has failed, can be executed again: there are several, and the
# failed execution cannot have changed their inputs.
cdef bint may_execute_each(const NativeBatch *batch) noexcept nogil
# Execute each request of the failed batch alone by calling `execute`, which also gathers the inputs. Requests that fail
# again get their own error, the others their response. Afterwards batch.failed is False.
cdef void execute_each(NativeBatch *batch, execute_fn execute, void *context) noexcept nogil
