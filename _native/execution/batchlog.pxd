# Why batches left their queues: for metrics, and for the line per batch that can be switched on at run time.

from _native.execution.batch cimport NativeBatch

# A batch has begun; `why` it was formed is static text, or NULL: its scheduler decided.
cdef void batch_log(NativeBatch *batch, const char *instance, const char *why) noexcept nogil
