# Pools of page-locked and of device memory.

from libc.stdint cimport int32_t, int64_t

from _native.cuda.closing cimport Closing
from _native.cuda.device cimport Device
from _native.cuda.driver cimport Context, CudaDevice
from _native.memory.pool cimport Backing, Pool, PooledMemory
from _native.memory.resource cimport Block, Lent

cdef struct SlabSource:
    # where slabs come from: with its own reference to the context, as blocks may outlive the pool's object and the
    # device's
    CudaDevice device
    Context context
    int node                 # of the host's memory; -1: any
    Closing closing


cdef class DriverMemory(PooledMemory):
    cdef Device device
    cdef SlabSource *source  # the pool's
    cdef int64_t fallbacks   # atomic
    cdef int32_t told
    cdef int begin(self, const char *name, Device device, int node, object limit, size_t slab,
                   Backing *backing) except -1


cdef class PageLocked(DriverMemory):
    # Host memory that the devices copy from and to by themselves.
    # A block of page-locked memory or, when there is none, of ordinary host memory, which is counted; NULL: neither.
    cdef Block *take_or_fall_back(self, size_t size) noexcept nogil


cdef class DevicePool(DriverMemory):
    # Memory of one device. A block goes back when the device is done with it, and not before.
    # A block of the pool or, when there is none, memory of its own from the driver, which waits for the whole device
    # and is counted; NULL: neither.
    cdef Block *take_or_allocate(self, size_t size) noexcept nogil
    # The same for as long as an object lives.
    cdef Lent keep(self, size_t size)
