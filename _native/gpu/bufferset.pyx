"""Buffer sets: each holds one batch from its upload to its responses, and passes between two threads."""

cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free

from inferd._native.cuda.device cimport context_enter, context_leave
from inferd._native.cuda.driver cimport (
    CUDA_OK,
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    Context,
    DevicePointer,
    EventHandle,
    Result,
    check,
    cuda,
)
from inferd._native.cuda.memory cimport DevicePool
from inferd._native.execution.batch cimport batch_free, batch_init
from inferd._native.list cimport list_append, list_prepend, list_remove
from inferd._native.memory.resource cimport Block, block_give
from inferd._native.request.lane cimport Lane, LaneHandle
from inferd._native.threads cimport (
    condition_destroy,
    condition_init,
    lock,
    mutex_destroy,
    mutex_init,
    notify_all,
    unlock,
    wait,
)

cdef enum:
    AHEAD = 2                # batches taken and not computed: one on the device, one being gathered and uploaded


cdef void clear_outputs(BufferSet *set) noexcept nogil:
    cdef Block *block
    cdef uint32_t i
    for i in range(set.output_count):
        drop_output(set, &set.outputs[i])
    while set.dropped != NULL:
        block = set.dropped
        set.dropped = block.next
        block_give(block)


cdef void destroy(EventHandle event) noexcept nogil:
    if event != NULL:
        cuda.event_destroy(event)


@cython.no_gc
cdef class Pipeline:
    """The sets of one instance. At most two of its batches wait to be computed, so that further requests stay in the
    lane, where they can form larger batches, instead of lining up on the device.

    Args:
        lane: where the batches come from.
        pool: memory of the instance's device.
        busy_wait: whether threads that wait for the device spin instead of sleeping.
        alone: whether only one batch is in work at a time, from its upload to its response.
    """

    def __cinit__(self, LaneHandle lane not None, DevicePool pool not None, bint busy_wait, bint alone):
        cdef int i
        self.pool = pool
        self.alone = alone
        self.holds = [[] for _ in range(SETS)]
        mutex_init(&self.guard, NULL)
        condition_init(&self.changed)
        for i in range(SETS):
            self.sets[i].index = i
            self.make(&self.sets[i], lane.lane, EVENT_DISABLE_TIMING | (0 if busy_wait else EVENT_BLOCKING_SYNC))
            list_prepend(&self.free, &self.sets[i])

    cdef int make(self, BufferSet *set, Lane *lane, unsigned int event_flags) except -1:
        cdef Context before
        cdef Result result
        batch_init(&set.batch, lane)
        set.input_count = lane.signature.input_count + lane.signature.supplied_count
        set.output_count = lane.signature.output_count + lane.signature.kept_count
        set.offsets = <size_t *>calloc(set.input_count + 1, sizeof(size_t))
        set.outputs = <Output *>calloc(set.output_count + 1, sizeof(Output))
        set.direct = <DevicePointer *>calloc(set.input_count + 1, sizeof(DevicePointer))
        if set.offsets == NULL or set.outputs == NULL or set.direct == NULL:
            raise MemoryError
        result = context_enter(self.pool.device.context, &before)
        if result == CUDA_OK:
            result = cuda.event_create(&set.uploaded, EVENT_DISABLE_TIMING)
            if result == CUDA_OK:
                result = cuda.event_create(&set.computed, event_flags)
            if result == CUDA_OK:
                result = cuda.event_create(&set.finished, event_flags)
            context_leave(before)
        check(result, "cuEventCreate")
        return 0

    def __dealloc__(self):
        cdef BufferSet *set
        cdef Context before
        cdef bint entered = context_enter(self.pool.device.context, &before) == CUDA_OK
        cdef int i
        for i in range(SETS):
            set = &self.sets[i]
            batch_free(&set.batch)
            free(set.offsets)
            free(set.direct)
            if set.outputs != NULL:
                clear_outputs(set)
            free(set.outputs)
            block_give(set.device_in)
            if entered:
                destroy(set.uploaded)
                destroy(set.computed)
                destroy(set.finished)
        if entered:
            context_leave(before)
        condition_destroy(&self.changed)
        mutex_destroy(&self.guard)

    cdef BufferSet *acquire(self) noexcept nogil:
        cdef BufferSet *set
        lock(&self.guard)
        while self.free.first == NULL or self.ahead >= AHEAD or (self.alone and self.in_flight):
            wait(&self.changed, &self.guard)
        set = self.free.first
        list_remove(&self.free, set)
        self.ahead += 1
        self.in_flight += 1
        unlock(&self.guard)
        set.submitted = False
        return set

    cdef void submit(self, BufferSet *set) noexcept nogil:
        lock(&self.guard)
        list_append(&self.submitted, set)
        notify_all(&self.changed)
        unlock(&self.guard)

    cdef BufferSet *next_submitted(self) noexcept nogil:
        cdef BufferSet *set
        lock(&self.guard)
        while self.submitted.first == NULL and not self.closing:
            wait(&self.changed, &self.guard)
        set = self.submitted.first
        if set != NULL:
            list_remove(&self.submitted, set)
        unlock(&self.guard)
        return set

    cdef void computed(self) noexcept nogil:
        lock(&self.guard)
        self.ahead -= 1
        notify_all(&self.changed)
        unlock(&self.guard)

    cdef void release(self, BufferSet *set) noexcept nogil:
        lock(&self.guard)
        list_prepend(&self.free, set)
        self.in_flight -= 1
        notify_all(&self.changed)
        unlock(&self.guard)

    cdef void close(self) noexcept nogil:
        lock(&self.guard)
        self.closing = True
        notify_all(&self.changed)
        unlock(&self.guard)
