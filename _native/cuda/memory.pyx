"""Pools of page-locked host memory and of device memory.

Both are slow to allocate (the driver locks pages, or waits for the whole device). So slabs are allocated in advance,
and `inferd._native.memory.pool` divides them into blocks, up to the limits of `--pinned-memory-pool-byte-size` and
`--cuda-memory-pool-byte-size`.
"""

cimport cython
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from inferd._native.atomic cimport exchange32
from inferd._native.cuda.closing cimport close_later, closing_start
from inferd._native.cuda.device cimport Device, context_enter, context_leave
from inferd._native.cuda.driver cimport CUDA_OK, HOST_ALLOC_PORTABLE, Context, DevicePointer, check, cuda
from inferd._native.memory.pool cimport Backing, Pool, pool_free, pool_unuse, pool_use
from inferd._native.memory.resource cimport (
    Block,
    Lent,
    Resource,
    block_take,
    block_wrap,
    raise_refused,
    resource_refusal,
    resource_take,
)
from inferd._native.numa cimport MemoryPolicy, prefer_node, restore_policy

import logging

logger = logging.getLogger("inferd.cuda")

cdef enum:
    PINNED_SLAB = 32 << 20
    DEVICE_SLAB = 16 << 20


cdef void tell(Resource *resource, size_t size, const char *instead) noexcept nogil:
    cdef char *text = resource_refusal(resource, size)
    with gil:
        logger.warning("%s; %s (logged once)", (<bytes>text).decode() if text != NULL else "out of memory",
                       instead.decode())
    free(text)


# ---------------------------------------------------------------------------------------------------------------------
# Both pools: a reference of their own to the primary context, and an end on the closing thread

cdef void end_place(void *context) noexcept nogil:
    cdef SlabSource *source = <SlabSource *>context
    cuda.primary_context_release(source.device)
    free(source)


cdef void close_pool(void *pool) noexcept nogil:
    pool_free(<Pool *>pool)


cdef void finish_later(void *context, Pool *pool) noexcept nogil:
    # On the closing thread: an I/O thread may give back the last block, and must not wait for the driver.
    cdef SlabSource *source = <SlabSource *>context
    source.closing.close = close_pool
    source.closing.argument = pool
    close_later(&source.closing)


@cython.no_gc
cdef class DriverMemory(PooledMemory):
    """Memory from the driver. It stays until the last block is given back, even if this object is gone."""

    cdef int begin(self, const char *name, Device device, int node, object limit, size_t slab,
                   Backing *backing) except -1:
        closing_start()
        self.device = device
        self.source = <SlabSource *>calloc(1, sizeof(SlabSource))
        if self.source == NULL:
            raise MemoryError
        self.source.device = device.device
        self.source.node = node
        backing.context = self.source
        backing.end = end_place
        backing.finish = finish_later
        try:
            check(cuda.primary_context_retain(&self.source.context, device.device), "cuDevicePrimaryCtxRetain")
            self.make(name, limit, slab, backing)
        except BaseException:
            if self.source.context != NULL:
                cuda.primary_context_release(device.device)
            free(self.source)
            raise
        return 0

    cdef Block *take_or_tell(self, size_t size, const char *instead) noexcept nogil:
        cdef Block *block = resource_take(self.resource, size)
        if block == NULL and not exchange32(&self.told, 1):
            tell(self.resource, size, instead)
        return block


# ---------------------------------------------------------------------------------------------------------------------
# Page-locked memory

cdef void *lock_pages(void *context, size_t size, void **mark) noexcept nogil:
    cdef const SlabSource *source = <const SlabSource *>context
    cdef void *address = NULL
    cdef Context before
    cdef MemoryPolicy policy
    if context_enter(source.context, &before) == CUDA_OK:
        policy = prefer_node(source.node)
        if cuda.host_allocate(&address, size, HOST_ALLOC_PORTABLE) != CUDA_OK:
            address = NULL
        restore_policy(&policy)
        context_leave(before)
    return address


cdef void unlock_pages(void *context, void *address, size_t size, void *mark) noexcept nogil:
    cdef Context before
    if context_enter((<const SlabSource *>context).context, &before) == CUDA_OK:
        cuda.host_free(address)
        context_leave(before)


@cython.no_gc
cdef class PageLocked(DriverMemory):
    """Page-locked memory for the copies of a device, from the node of the host that is nearest to it.

    Args:
        device: its context locks the pages; every device may use them.
        limit: the most bytes that it holds.
    """

    def __cinit__(self, Device device not None, limit: int):
        cdef Backing backing
        memset(&backing, 0, sizeof(Backing))
        backing.obtain = lock_pages
        backing.release = unlock_pages
        self.begin("page-locked", device, device.numa_node, limit, PINNED_SLAB, &backing)

    @property
    def numa_node(self) -> int:
        """The NUMA node of the memory; -1: any."""
        return self.source.node

    cdef Block *take_or_fall_back(self, size_t size) noexcept nogil:
        cdef Block *block = self.take_or_tell(
            size, "ordinary memory is taken instead, and copies are slower: raise --pinned-memory-pool-byte-size")
        return block if block != NULL else block_take(size)


# ---------------------------------------------------------------------------------------------------------------------
# Device memory

cdef void *allocate_on_device(void *context, size_t size, void **mark) noexcept nogil:
    cdef DevicePointer address = 0
    cdef Context before
    if context_enter((<const SlabSource *>context).context, &before) == CUDA_OK:
        if cuda.memory_allocate(&address, size) != CUDA_OK:
            address = 0
        context_leave(before)
    return <void *><uintptr_t>address


cdef void free_on_device(void *context, void *address, size_t size, void *mark) noexcept nogil:
    cdef Context before
    if context_enter((<const SlabSource *>context).context, &before) == CUDA_OK:
        cuda.memory_free(<DevicePointer><uintptr_t>address)
        context_leave(before)


cdef struct Alone:
    # memory that is not the pool's, but of the same source
    Pool *pool
    DevicePointer address


cdef void free_alone(void *owner) noexcept nogil:
    cdef Alone *alone = <Alone *>owner
    free_on_device(alone.pool.backing.context, <void *><uintptr_t>alone.address, 0, NULL)
    pool_unuse(alone.pool)
    free(alone)


cdef Block *allocate_alone(Pool *pool, size_t size) noexcept nogil:
    cdef Alone *alone = <Alone *>malloc(sizeof(Alone))
    cdef Block *block
    if alone == NULL:
        return NULL
    alone.pool = pool
    alone.address = <DevicePointer><uintptr_t>allocate_on_device(pool.backing.context, size, NULL)
    if alone.address == 0:
        free(alone)
        return NULL
    pool_use(pool)
    block = block_wrap(<const void *><uintptr_t>alone.address, size, free_alone, alone)
    if block == NULL:
        free_alone(alone)
    return block


@cython.no_gc
cdef class DevicePool(DriverMemory):
    """Memory of a device. Holders give a block back only when the device has finished with it, so the pool reuses it at
    once.

    Args:
        device: the device.
        limit: the most bytes that it holds.
    """

    def __cinit__(self, Device device not None, limit: int):
        cdef Backing backing
        memset(&backing, 0, sizeof(Backing))
        backing.obtain = allocate_on_device
        backing.release = free_on_device
        self.begin("device", device, -1, limit, DEVICE_SLAB, &backing)

    cdef Block *take_or_allocate(self, size_t size) noexcept nogil:
        cdef Block *block = self.take_or_tell(
            size, "it is allocated outside of the pool, which synchronizes the device: raise "
            "--cuda-memory-pool-byte-size")
        return block if block != NULL else allocate_alone(self.pool, size)

    cdef Lent keep(self, size_t size):
        cdef Lent lent = Lent.__new__(Lent)
        with nogil:
            lent.block = self.take_or_allocate(size)
        lent.memory = self
        if lent.block == NULL:
            raise_refused(self.resource, size)
        return lent
