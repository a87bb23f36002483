# A batch on a device, for backends.

from libc.stdint cimport uint32_t

from inferd._native.cuda.driver cimport DevicePointer
from inferd._native.gpu.bufferset cimport BufferSet, Pipeline
from inferd._native.gpu.transfer cimport Transfer


cdef class GpuBatch:
    cdef Transfer transfer
    cdef Pipeline pipeline
    cdef BufferSet *set      # of the pipeline; NULL once submitted
    cdef list kept           # the graph's outputs by index, while the work is captured without requests
    cdef int check(self) except -1
    cdef uint32_t input_index(self, str name) except? 0xffffffff
    cdef uint32_t output_index(self, str name) except? 0xffffffff
    cdef int shape_output(self, uint32_t index, str name, object shape) except -1
    cdef int place_output(self, uint32_t index, str name, size_t size) except -1
    cdef DevicePointer kept_output(self, uint32_t index, size_t size) except? 0

# The caller sets `set` to NULL when the backend has finished with the batch.
cdef GpuBatch batch_on_device(Transfer transfer, Pipeline pipeline, BufferSet *set, list kept)
