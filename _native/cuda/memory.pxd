# Pools of page-locked and of device memory.

from libc.stdint cimport int32_t

from inferd._native.cuda.closing cimport Closing
from inferd._native.cuda.device cimport Device
from inferd._native.cuda.driver cimport Context, CudaDevice
from inferd._native.memory.pool cimport Backing, Pool, PooledMemory
from inferd._native.memory.resource cimport Block, Lent

cdef struct SlabSource:
    # the source of slabs, with a reference of its own to the context, because blocks may outlive the objects of pool
    # and device
    CudaDevice device
    Context context
    int node                 # NUMA node of the host; -1: any
    Closing closing


cdef class DriverMemory(PooledMemory):
    cdef Device device
    cdef SlabSource *source  # the pool's
    cdef int32_t told
    cdef int begin(self, const char *name, Device device, int node, object limit, size_t slab,
                   Backing *backing) except -1
    # A block of the pool; NULL: the pool has none. The first such case is logged with `instead`, the text that says
    # what the server does instead.
    cdef Block *take_or_tell(self, size_t size, const char *instead) noexcept nogil


cdef class PageLocked(DriverMemory):
    # Host memory that devices access directly.
    # A block of page-locked memory; if there is none, of ordinary host memory; NULL: no memory.
    cdef Block *take_or_fall_back(self, size_t size) noexcept nogil


cdef class DevicePool(DriverMemory):
    # Memory of one device. A block is given back only after the device has finished with it.
    # A block of the pool; if it has none, separate memory from the driver, which waits for the whole device;
    # NULL: no memory.
    cdef Block *take_or_allocate(self, size_t size) noexcept nogil
    # A block from take_or_allocate that lives as long as the object that is returned.
    cdef Lent keep(self, size_t size)
