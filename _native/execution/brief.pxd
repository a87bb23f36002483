# Brief executions: the front does them itself while the instance's thread waits.

from inferd._native.execution.batch cimport execute_fn
from inferd._native.execution.remote cimport Remote

cdef enum:
    BRIEF_BYTES = 65536      # of the inputs of a batch that the front executes

cdef struct Brief:
    Remote remote
    execute_fn executor
    void *context

# Have `remote` execute batches in one step.
cdef void brief_init(Brief *self, execute_fn executor, void *context) noexcept nogil
