# Instances whose executions are brief: the front executes small batches itself while the instance's thread waits.

from inferd._native.execution.batch cimport NativeBatch, execute_fn
from inferd._native.scheduling.dispatcher cimport Consumer

cdef enum:
    BRIEF_BYTES = 65536      # of the inputs of a batch that the front executes

cdef struct BriefInstance:
    Consumer *consumer
    NativeBatch *batch
    execute_fn executor
    void *context
    const char *name

# Let the front use the instance while its thread waits for a batch. To be called before the thread runs.
cdef void brief_connect(BriefInstance *self) noexcept nogil
