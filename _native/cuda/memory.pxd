# Pools of page-locked and of device memory.

from libc.stdint cimport int32_t, int64_t

from _native.cuda.device cimport Device
from _native.cuda.driver cimport Context, EventHandle, StreamHandle
from _native.memory.pool cimport PooledMemory
from _native.memory.resource cimport Block

cdef enum:
    LATE = 256               # blocks at most that wait for their streams, of one pool

cdef struct LateBlock:
    Block *block             # the last reference
    StreamHandle stream      # that may use it again at once
    EventHandle event        # others: after this

cdef struct Place:
    # where slabs come from
    Context context
    int node                 # of the host's memory; -1: any

cdef class PageLocked(PooledMemory):
    # Host memory that the devices copy from and to by themselves.
    cdef Device device
    cdef Place place
    cdef int64_t fallbacks   # atomic
    cdef int32_t told
    # A block of page-locked memory or, when there is none, of ordinary host memory, which is counted; NULL: neither.
    cdef Block *take_or_fall_back(self, size_t size) noexcept nogil


cdef class DevicePool(PooledMemory):
    # Memory of one device whose blocks may be given back before the device is done with them.
    cdef Device device
    cdef Place place
    cdef int32_t guard
    cdef int late_count
    cdef LateBlock late[LATE]         # oldest first
    cdef int event_count
    cdef EventHandle events[LATE]     # free ones
    cdef int64_t fallbacks            # atomic
    cdef int32_t told
    # A block of the pool or, when there is none, memory of its own from the driver, which waits for the whole device
    # and is counted; NULL: neither.
    cdef Block *take_or_allocate(self, size_t size, StreamHandle stream) noexcept nogil
    # A block that work submitted to `stream` from now on may use; NULL: there is none. Never waits for the device.
    cdef Block *take_on(self, size_t size, StreamHandle stream) noexcept nogil
    # Give back a block (one reference, the last) that work submitted to `stream` so far still uses.
    cdef void give_on(self, Block *block, StreamHandle stream) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef Block *reuse(self, size_t size, StreamHandle stream) noexcept nogil
    cdef Block *drop(self, int i) noexcept nogil
