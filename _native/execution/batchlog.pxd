# The reasons for which batches left their queues: for metrics, and for the optional log line of each batch.

from inferd._native.execution.batch cimport NativeBatch

# A batch has begun. `why` it was formed is static text; NULL: the scheduler decided.
cdef void batch_log(NativeBatch *batch, const char *instance, const char *why) noexcept nogil
