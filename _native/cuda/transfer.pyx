"""Copies of a batch: all inputs are gathered in one page-locked block and go up at once, outputs come down to another.

Nothing here waits for the device but `settle`.
"""

cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport free

from _native.atomic cimport load32, store32
from _native.batch cimport batch_fail
from _native.cuda.bufferset cimport ALIGNMENT, BufferSet, Output, aligned, padded_size
from _native.cuda.device cimport Stream
from _native.cuda.driver cimport CUDA_NOT_READY, CUDA_OK, DevicePointer, Result, cuda, describe, is_sticky
from _native.cuda.memory cimport DevicePool, PageLocked
from _native.gather cimport batch_gather_to
from _native.memory cimport Block, block_give, block_share, block_take, resource_refusal
from _native.scatter cimport batch_set_output, batch_wants
from _native.text cimport format_text, text_or_no_memory
from _native.threads cimport lock, mutex_destroy, mutex_init, unlock


@cython.no_gc
cdef class Transfer:
    """The copies of one instance.

    Args:
        pinned: page-locked memory; what it lacks is taken of ordinary memory.
        pool: memory of the instance's device.
        compute: the stream of the model's work.
        pinned_in, pinned_out: whether inputs and outputs are staged in page-locked memory.
    """

    def __cinit__(self, PageLocked pinned not None, DevicePool pool not None, Stream compute not None, bint pinned_in,
                  bint pinned_out):
        self.pinned = pinned
        self.pool = pool
        self.device = pool.device
        self.compute = compute
        self.copy_in = self.device.stream()  # priorities have no effect on copies
        self.copy_out = self.device.stream()
        self.pinned_in = pinned_in
        self.pinned_out = pinned_out
        mutex_init(&self.guard, NULL)

    def __dealloc__(self):
        free(self.lost_details)
        mutex_destroy(&self.guard)

    cdef bint failed(self, BufferSet *set, Result result, const char *call) noexcept nogil:
        cdef char *details
        if result == CUDA_OK:
            return False
        details = describe(result, call)
        if is_sticky(result):
            lock(&self.guard)
            if not self.lost:
                self.lost_details = format_text("CUDA device %d is lost and the server has to be restarted: %s",
                                                self.device.ordinal, text_or_no_memory(details))
                store32(&self.lost, 1)
            unlock(&self.guard)
        batch_fail(&set.batch, details)
        return True

    # -- to the device ------------------------------------------------------------------------------------------------

    cdef void lay_out(self, BufferSet *set, uint32_t rows) noexcept nogil:
        cdef uint32_t i
        set.rows = rows
        set.staged = 0
        for i in range(set.input_count):
            if set.batch.inputs[i].present:
                set.offsets[i] = set.staged
                set.staged += aligned(padded_size(set, i))

    cdef bint reserve(self, BufferSet *set) noexcept nogil:
        # the set is idle, so what it has can go back
        cdef size_t wanted = ALIGNMENT
        cdef Result state
        if set.device_in != NULL and set.device_in.size >= set.staged:
            return True
        while wanted < set.staged:
            wanted *= 2
        block_give(set.device_in)
        set.device_in = self.pool.take_or_allocate(wanted, self.copy_in.stream)
        if set.device_in != NULL:
            return True
        # no memory, or a device that gives nothing any more
        state = cuda.event_query(set.uploaded)
        if state == CUDA_NOT_READY or not self.failed(set, state, "cuEventQuery"):
            batch_fail(&set.batch, resource_refusal(self.pool.resource, set.staged))
        return False

    cdef bint upload(self, BufferSet *set, uint32_t rows) noexcept nogil:
        if load32(&self.lost):
            batch_fail(&set.batch, format_text("%s", text_or_no_memory(self.lost_details)))
            return False
        self.lay_out(set, rows)
        if not self.reserve(set):
            return False
        set.staging = stage(self.pinned, self.pinned_in, set.staged)
        if set.staging == NULL:
            batch_fail(&set.batch, format_text("no memory for %zu bytes of inputs", set.staged))
            return False
        batch_gather_to(&set.batch, set.staging, set.offsets)
        set.submitted = True
        if set.staged and self.failed(set, cuda.copy_to_device(
                <DevicePointer>set.device_in.data, set.staging.data, set.staged, self.copy_in.stream),
                "cuMemcpyHtoDAsync_v2"):
            return False
        return not (
            self.failed(set, cuda.event_record(set.uploaded, self.copy_in.stream), "cuEventRecord")
            or self.failed(set, cuda.stream_wait_event(self.compute.stream, set.uploaded, 0), "cuStreamWaitEvent"))

    # -- and back -----------------------------------------------------------------------------------------------------

    cdef void download(self, BufferSet *set) noexcept nogil:
        cdef Output *output
        cdef size_t total = 0
        cdef bint any = False
        cdef uint32_t i
        if self.failed(set, cuda.event_record(set.computed, self.compute.stream), "cuEventRecord") or self.failed(
                set, cuda.stream_wait_event(self.copy_out.stream, set.computed, 0), "cuStreamWaitEvent"):
            return
        for i in range(set.output_count):
            output = &set.outputs[i]
            output.given = output.given and not set.batch.failed and batch_wants(&set.batch, i)
            if output.given:
                any = True
                if set.rows != set.batch.rows:
                    output.size = output.size // set.rows * set.batch.rows
                    output.shape[0] = set.batch.rows
                output.offset = total
                total += aligned(output.size)
        if any:
            set.staging_out = stage(self.pinned, self.pinned_out, total)
            if set.staging_out == NULL:
                batch_fail(&set.batch, format_text("no memory for %zu bytes of outputs", total))
        for i in range(set.output_count):
            output = &set.outputs[i]
            if output.given and output.size and set.staging_out != NULL and self.failed(
                    set, cuda.copy_to_host(set.staging_out.data + output.offset, output.address, output.size,
                                           self.copy_out.stream), "cuMemcpyDtoHAsync_v2"):
                break
        self.failed(set, cuda.event_record(set.finished, self.copy_out.stream), "cuEventRecord")

    cdef void settle(self) noexcept nogil:
        # a failed batch may lack the events that order its work
        cuda.stream_synchronize(self.copy_in.stream)
        cuda.stream_synchronize(self.compute.stream)
        cuda.stream_synchronize(self.copy_out.stream)

    cdef void conclude(self, BufferSet *set) noexcept nogil:
        cdef Output *output
        cdef uint32_t i
        for i in range(set.output_count):
            output = &set.outputs[i]
            if output.given and not set.batch.failed and set.staging_out != NULL:
                batch_set_output(&set.batch, i, block_share(set.staging_out), set.staging_out.data + output.offset,
                                 output.size, output.shape, output.rank)
            block_give(output.block)
            output.block = NULL
            output.given = False
        block_give(set.staging)
        block_give(set.staging_out)
        set.staging = set.staging_out = NULL


cdef inline Block *stage(PageLocked pinned, bint use, size_t size) noexcept nogil:
    return pinned.take_or_fall_back(size) if use else block_take(size)
