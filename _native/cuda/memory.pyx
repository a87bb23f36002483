"""Pools of page-locked host memory and of device memory.

Both are slow to obtain (the driver locks pages, or waits for the whole device), so slabs are obtained ahead and carved
up by `_native.memory.pool`, up to the caps of `--pinned-memory-pool-byte-size` and `--cuda-memory-pool-byte-size`.
"""

cimport cython
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc

from _native.atomic cimport exchange32, fetch_add64, load64, spin_lock, spin_unlock
from _native.cuda.device cimport Device, Stream, context_enter, context_leave, use_context
from _native.cuda.driver cimport (
    CUDA_OK,
    EVENT_DISABLE_TIMING,
    HOST_ALLOC_PORTABLE,
    Context,
    DevicePointer,
    EventHandle,
    StreamHandle,
    cuda,
)
from _native.memory.pool cimport Backing, PooledMemory
from _native.memory.resource cimport (
    Block,
    Lent,
    Resource,
    block_give,
    block_take,
    block_wrap,
    raise_refused,
    resource_refusal,
    resource_take,
)

import logging

logger = logging.getLogger("inferd.cuda")

cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>
    #define INFERD_PREFERRED 1   /* MPOL_PREFERRED */
    /* pages that this thread touches next come from the node if it has any; -1: from where they would anyway */
    static inline void inferd_prefer_node(int node) {
        unsigned long mask[16] = {0};
        if (node >= 0 && node < 1024) mask[node / 64] = 1UL << node % 64;
        syscall(SYS_set_mempolicy, node >= 0 ? INFERD_PREFERRED : 0, node >= 0 ? mask : NULL, node >= 0 ? 1024 : 0);
    }
    """
    void prefer_node "inferd_prefer_node"(int node) noexcept nogil

cdef enum:
    PINNED_SLAB = 32 << 20
    DEVICE_SLAB = 16 << 20


cdef void tell(Resource *resource, size_t size, const char *instead) noexcept nogil:
    cdef char *text = resource_refusal(resource, size)
    with gil:
        logger.warning("%s; %s (this is said once)", (<bytes>text).decode() if text != NULL else "out of memory",
                       instead.decode())
    free(text)


# ---------------------------------------------------------------------------------------------------------------------
# Page-locked memory

cdef void *lock_pages(void *context, size_t size, void **mark) noexcept nogil:
    cdef const Place *place = <const Place *>context
    cdef void *address = NULL
    cdef Context before
    if context_enter(place.context, &before):
        prefer_node(place.node)
        if cuda.host_allocate(&address, size, HOST_ALLOC_PORTABLE) != CUDA_OK:
            address = NULL
        prefer_node(-1)
        context_leave(before)
    return address


cdef void unlock_pages(void *context, void *address, size_t size, void *mark) noexcept nogil:
    cdef Context before
    if context_enter((<const Place *>context).context, &before):
        cuda.host_free(address)
        context_leave(before)


@cython.no_gc
cdef class PageLocked(PooledMemory):
    """Page-locked memory for the copies of a device, from the node of the host that is nearest to it.

    Args:
        device: its context locks the pages; every device may use them.
        limit: the most bytes that it holds.
    """

    def __cinit__(self, Device device not None, limit: int):
        cdef Backing backing
        self.device = device
        self.place.context = device.context
        self.place.node = device.numa_node
        backing.obtain = lock_pages
        backing.release = unlock_pages
        backing.context = &self.place
        self.make("page-locked", limit, PINNED_SLAB, &backing)

    def __dealloc__(self):
        self.end()  # while `device` is there, which slabs are returned to

    @property
    def numa_node(self) -> int:
        """Of the host's memory; -1: any."""
        return self.place.node

    @property
    def fallback_count(self) -> int:
        """Blocks that were taken of ordinary memory, because there was no page-locked."""
        return load64(&self.fallbacks)

    cdef Block *take_or_fall_back(self, size_t size) noexcept nogil:
        cdef Block *block = resource_take(self.resource, size)
        if block == NULL:
            fetch_add64(&self.fallbacks, 1)
            if not exchange32(&self.told, 1):
                tell(self.resource, size, "ordinary memory is taken instead, and copies are slower: raise "
                     "--pinned-memory-pool-byte-size")
            block = block_take(size)
        return block


# ---------------------------------------------------------------------------------------------------------------------
# Device memory

cdef void *allocate_on_device(void *context, size_t size, void **mark) noexcept nogil:
    cdef DevicePointer address = 0
    cdef Context before
    if context_enter((<const Place *>context).context, &before):
        if cuda.memory_allocate(&address, size) != CUDA_OK:
            address = 0
        context_leave(before)
    return <void *><uintptr_t>address


cdef void free_on_device(void *context, void *address, size_t size, void *mark) noexcept nogil:
    cdef Context before
    if context_enter((<const Place *>context).context, &before):
        cuda.memory_free(<DevicePointer><uintptr_t>address)
        context_leave(before)


cdef struct Alone:
    # memory that is not the pool's
    const Place *place
    DevicePointer address


cdef void free_alone(void *owner) noexcept nogil:
    cdef Alone *alone = <Alone *>owner
    free_on_device(<void *>alone.place, <void *><uintptr_t>alone.address, 0, NULL)
    free(alone)


cdef Block *allocate_alone(const Place *place, size_t size) noexcept nogil:
    cdef Alone *alone = <Alone *>malloc(sizeof(Alone))
    cdef Block *block
    if alone == NULL:
        return NULL
    alone.place = place
    alone.address = <DevicePointer><uintptr_t>allocate_on_device(<void *>place, size, NULL)
    if alone.address == 0:
        free(alone)
        return NULL
    block = block_wrap(<const void *><uintptr_t>alone.address, size, free_alone, alone)
    if block == NULL:
        free_alone(alone)
    return block


@cython.no_gc
cdef class DevicePool(PooledMemory):
    """Memory of a device.

    A block can be given back while the device still works on it: the stream that did may have it again at once, because
    what is submitted there runs later anyway; another stream gets it when an event says that the first is done, or,
    when nothing else is left, waits for that event on the device.

    Args:
        device: whose memory.
        limit: the most bytes that it holds.
    """

    def __cinit__(self, Device device not None, limit: int):
        cdef Backing backing
        self.device = device
        self.place.context = device.context
        backing.obtain = allocate_on_device
        backing.release = free_on_device
        backing.context = &self.place
        self.make("device", limit, DEVICE_SLAB, &backing)

    def __dealloc__(self):
        cdef int i
        use_context(self.device.context)
        for i in range(self.late_count):
            cuda.event_synchronize(self.late[i].event)
            cuda.event_destroy(self.late[i].event)
            block_give(self.late[i].block)
        for i in range(self.event_count):
            cuda.event_destroy(self.events[i])
        self.end()  # while `device` is there, which slabs are returned to

    @property
    def fallback_count(self) -> int:
        """Blocks that the driver allocated by themselves, because the pool had none."""
        return load64(&self.fallbacks)

    cdef Block *take_or_allocate(self, size_t size, StreamHandle stream) noexcept nogil:
        cdef Block *block = self.take_on(size, stream)
        if block == NULL:
            fetch_add64(&self.fallbacks, 1)
            if not exchange32(&self.told, 1):
                tell(self.resource, size, "it is allocated by itself instead, which makes the whole device wait: raise "
                     "--cuda-memory-pool-byte-size")
            block = allocate_alone(&self.place, size)
        return block

    @property
    def waiting(self) -> int:
        """Blocks that were given back and still wait for their streams."""
        return self.late_count

    cdef Block *take_on(self, size_t size, StreamHandle stream) noexcept nogil:
        cdef Block *block
        spin_lock(&self.guard)
        self.settle()
        block = self.reuse(size, stream)
        spin_unlock(&self.guard)
        if block == NULL:
            block = resource_take(self.resource, size)
        if block == NULL:
            spin_lock(&self.guard)
            block = self.reuse(size, NULL)
            if block != NULL:
                # the event goes back to the free ones only now: it is waited for as it is recorded
                if cuda.stream_wait_event(stream, self.events[self.event_count - 1], 0) != CUDA_OK:
                    block_give(block)
                    block = NULL
            spin_unlock(&self.guard)
        return block

    cdef void give_on(self, Block *block, StreamHandle stream) noexcept nogil:
        cdef EventHandle event = NULL
        spin_lock(&self.guard)
        if self.late_count < LATE:
            if self.event_count:
                self.event_count -= 1
                event = self.events[self.event_count]
            elif cuda.event_create(&event, EVENT_DISABLE_TIMING) != CUDA_OK:
                event = NULL
        if event != NULL and cuda.event_record(event, stream) == CUDA_OK:
            self.late[self.late_count].block = block
            self.late[self.late_count].stream = stream
            self.late[self.late_count].event = event
            self.late_count += 1
            block = NULL
        elif event != NULL:
            self.events[self.event_count] = event
            self.event_count += 1
        spin_unlock(&self.guard)
        if block != NULL:
            # No room or no event: wait, so that nobody gets memory that is in use. A device in error never comes here
            # with work that still runs.
            cuda.stream_synchronize(stream)
            block_give(block)

    cdef void settle(self) noexcept nogil:
        # give back what its stream is done with
        while self.late_count:
            if cuda.event_query(self.late[0].event) == CUDA_OK:
                block_give(self.drop(0))
            else:
                break  # the oldest first; the others have hardly come further

    cdef Block *reuse(self, size_t size, StreamHandle stream) noexcept nogil:
        # a late block of this stream (NULL: of any) that fits; its event is then the last of the free ones
        cdef int i
        for i in range(self.late_count):
            if (stream == NULL or self.late[i].stream == stream) and size <= self.late[i].block.size and (
                    stream == NULL or self.late[i].block.size <= 2 * size + 4096):
                return self.drop(i)
        return NULL

    cdef Block *drop(self, int i) noexcept nogil:
        cdef Block *block = self.late[i].block
        self.events[self.event_count] = self.late[i].event
        self.event_count += 1
        self.late_count -= 1
        for i in range(i, self.late_count):
            self.late[i] = self.late[i + 1]
        return block

    def trim(self) -> int:
        """Return slabs that hold no block, those whose streams are done with them included; how many bytes."""
        self.device.use()
        with nogil:
            spin_lock(&self.guard)
            self.settle()
            while self.event_count:
                self.event_count -= 1
                cuda.event_destroy(self.events[self.event_count])
            spin_unlock(&self.guard)
        return PooledMemory.trim(self)

    def take_for(self, size: int, stream: Stream) -> Lent:
        """A block for work that is submitted to `stream` from now on.

        Raises:
            MemoryError: there is none; the text says what was asked for, what is held, and the limit.
        """
        cdef Lent lent = Lent.__new__(Lent)
        cdef size_t wanted = size
        cdef StreamHandle handle = (<Stream?>stream).stream
        self.device.use()
        with nogil:
            lent.block = self.take_on(wanted, handle)
        lent.memory = self
        if lent.block == NULL:
            raise_refused(self.resource, wanted)
        return lent

    def give_after(self, lent: Lent, stream: Stream) -> None:
        """Take a block back that work submitted to `stream` so far still uses; the object is empty then."""
        cdef Lent block = lent
        cdef Block *given = block.block
        cdef StreamHandle handle = (<Stream?>stream).stream
        if given == NULL or block.memory is not self:
            raise ValueError("this block is not one of this pool")
        block.block = NULL
        self.device.use()
        with nogil:
            self.give_on(given, handle)
