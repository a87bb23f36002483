# The line per batch that can be switched on at run time.

from _native.execution.batch cimport NativeBatch

# Write it, if it is switched on, for a batch that has begun; `why` it was formed, NULL: its scheduler decided.
cdef void batch_log(const NativeBatch *batch, const char *instance, const char *why) noexcept nogil
