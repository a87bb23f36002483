# A batch as Python backends see it.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.memory.resource cimport Block


cdef class Batch:
    # a batch, for Python backends
    cdef NativeBatch *batch  # NULL once the requests are answered
    cdef readonly str instance_name
    cdef int check(self) except -1
    cdef uint32_t output_index(self, str name) except? 0xffffffff
    cdef int hand_over(self, uint32_t index, Block *block, const uint8_t *data, size_t size, const int64_t *shape,
                       uint32_t rank) except -1

cdef Batch batch_for_python(NativeBatch *batch, str instance_name)
