"""Copies of a batch: inputs are gathered in a page-locked block and uploaded at once; outputs come back to another.

Tensors in regions of clients on the same device never leave it: the device copies inputs, and parts of outputs. If one
request is the whole batch, the model reads and writes the region itself, unless a graph is bound to other
addresses. The request keeps the region until all of that is done. Only `synchronize` waits for the device.
"""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from inferd._native.atomic cimport fetch_add64, load32, store32
from inferd._native.clock cimport now_ns
from inferd._native.cuda.device cimport Stream
from inferd._native.cuda.driver cimport CUDA_NOT_READY, CUDA_OK, DevicePointer, Result, check, cuda, describe, is_sticky
from inferd._native.cuda.memory cimport DevicePool, PageLocked
from inferd._native.execution.batch cimport batch_fail
from inferd._native.execution.gather cimport batch_gather_input, data_of, is_made
from inferd._native.execution.scatter cimport batch_set_output, batch_wants, part_of, wrong_output
from inferd._native.gpu.bufferset cimport ALIGNMENT, BufferSet, Output, aligned, clear_outputs, padded_size
from inferd._native.memory.resource cimport (
    SHARED_WITH_STRANGER,
    Block,
    Lent,
    block_give,
    block_share,
    block_take,
    resource_refusal,
)
from inferd._native.memory.shm cimport Placement
from inferd._native.request.request cimport InputData, Request
from inferd._native.request.signature cimport TensorSignature
from inferd._native.tensors.placement cimport is_input_on_device, placement_of_output
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.threads cimport lock, mutex_destroy, mutex_init, unlock


@cython.no_gc
cdef class Transfer:
    """The copies of one instance.

    Args:
        pinned: page-locked memory; ordinary memory is used where it has none left.
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
        set.uploaded_size = set.staged_size = 0
        for i in range(set.input_count):
            if not set.batch.inputs[i].present:
                continue
            set.direct[i] = bound_address(set, i)
            if not set.direct[i]:
                set.offsets[i] = set.uploaded_size
                set.uploaded_size += aligned(padded_size(set, i))
                set.staged_size += staged_size(set, i)

    cdef bint reserve(self, BufferSet *set) noexcept nogil:
        # the set is idle, so its memory can be given back
        cdef size_t wanted = ALIGNMENT
        cdef Result state
        if set.graph >= 0:
            return True
        if set.device_in != NULL and set.device_in.size >= set.uploaded_size:
            set.base = <DevicePointer>set.device_in.data
            return True
        while wanted < set.uploaded_size:
            wanted *= 2
        if set.device_in != NULL:
            fetch_add64(&self.held, -<int64_t>set.device_in.size)
        block_give(set.device_in)
        set.device_in = self.pool.take_or_allocate(wanted)
        if set.device_in != NULL:
            set.base = <DevicePointer>set.device_in.data
            fetch_add64(&self.held, <int64_t>set.device_in.size)
            return True
        # no memory, or the device has failed
        state = cuda.event_query(set.uploaded)
        if state == CUDA_NOT_READY or not self.failed(set, state, "cuEventQuery"):
            batch_fail(&set.batch, resource_refusal(self.pool.resource, set.uploaded_size))
        return False

    cdef Lent keep(self, size_t size):
        cdef Lent lent = self.pool.keep(size)
        check(cuda.fill(<DevicePointer>lent.block.data, 0, lent.block.size, self.compute.stream), "cuMemsetD8Async")
        return lent

    cdef bint upload(self, BufferSet *set, uint32_t rows) noexcept nogil:
        if load32(&self.lost):
            batch_fail(&set.batch, format_text("%s", text_or_no_memory(self.lost_details)))
            return False
        self.lay_out(set, rows)
        if not self.reserve(set):
            return False
        if set.staged_size:
            set.staging = stage(self.pinned, self.pinned_in, set.staged_size)
            if set.staging == NULL:
                batch_fail(&set.batch, format_text("no memory for %zu bytes of inputs", set.staged_size))
                return False
        set.submitted = True
        return not (
            not self.copy_inputs(set)
            or self.failed(set, cuda.event_record(set.uploaded, self.copy_in.stream), "cuEventRecord")
            or self.failed(set, cuda.stream_wait_event(self.compute.stream, set.uploaded, 0), "cuStreamWaitEvent"))

    cdef bint copy_inputs(self, BufferSet *set) noexcept nogil:
        # One copy for adjacent inputs in host memory, which are usually all. Inputs with a part on the device are
        # copied part by part.
        cdef Piece piece
        cdef uint8_t *at
        cdef size_t size
        cdef uint32_t i
        cdef bint good = True
        memset(&piece, 0, sizeof(Piece))
        for i in range(set.input_count):
            if not good or not set.batch.inputs[i].present or set.direct[i] or set.batch.inputs[i].size == 0:
                continue
            if is_on_device(set, i):
                good = self.send(set, &piece) and self.copy_parts(set, i, &piece)
                continue
            if piece.size == 0:
                piece.to = set.offsets[i]
            at = set.staging.data + piece.at + piece.size
            size = aligned(padded_size(set, i))
            batch_gather_input(&set.batch, i, at)
            # rows of a graph without a request are zeros: the block has held values of other requests
            memset(at + set.batch.inputs[i].size, 0, size - set.batch.inputs[i].size)
            set.batch.inputs[i].data = at
            piece.size += size
        set.batch.input_end_ns = now_ns()
        return good and self.send(set, &piece)

    cdef bint copy_parts(self, BufferSet *set, uint32_t input, Piece *piece) noexcept nogil:
        cdef size_t to = set.offsets[input]
        cdef const InputData *data
        cdef uint32_t i
        for i in range(set.batch.count):
            data = data_of(&set.batch, i, input)
            if data.size == 0:
                continue
            if data.region != NULL:
                if self.failed(set, cuda.copy_on_device(set.base + to, data.address, data.size, self.copy_in.stream),
                               "cuMemcpyDtoDAsync_v2"):
                    return False
            else:
                memcpy(set.staging.data + piece.at, data.data, data.size)
                piece.to = to
                piece.size = data.size
                if not self.send(set, piece):
                    return False
            to += data.size
        return self.pad(set, input, to)

    cdef bint pad(self, BufferSet *set, uint32_t input, size_t at) noexcept nogil:
        # zeros from there to the end of what the model sees
        cdef size_t end = set.offsets[input] + padded_size(set, input)
        return at >= end or not self.failed(
            set, cuda.fill(set.base + at, 0, end - at, self.copy_in.stream), "cuMemsetD8Async")

    cdef bint send(self, BufferSet *set, Piece *piece) noexcept nogil:
        # copy the staged piece; the next one begins behind it
        if piece.size and self.failed(set, cuda.copy_to_device(
                set.base + piece.to, set.staging.data + piece.at, piece.size, self.copy_in.stream),
                "cuMemcpyHtoDAsync_v2"):
            return False
        piece.at += aligned(piece.size)
        piece.size = 0
        return True

    # -- and back -----------------------------------------------------------------------------------------------------

    cdef void download(self, BufferSet *set) noexcept nogil:
        cdef size_t total = 0
        cdef uint32_t i
        if self.failed(set, cuda.event_record(set.computed, self.compute.stream), "cuEventRecord") or self.failed(
                set, cuda.stream_wait_event(self.copy_out.stream, set.computed, 0), "cuStreamWaitEvent"):
            return
        for i in range(set.output_count):
            self.prepare_output(set, i, &total)
        if total:
            set.staging_out = stage(self.pinned, self.pinned_out, total)
            if set.staging_out == NULL:
                batch_fail(&set.batch, format_text("no memory for %zu bytes of outputs", total))
        for i in range(set.output_count):
            self.copy_output(set, &set.outputs[i])
        self.failed(set, cuda.event_record(set.finished, self.copy_out.stream), "cuEventRecord")

    cdef void prepare_output(self, BufferSet *set, uint32_t index, size_t *total) noexcept nogil:
        cdef Output *output = &set.outputs[index]
        output.region = NULL
        output.given = output.given and not set.batch.failed and batch_wants(&set.batch, index)
        if not output.given:
            return
        if set.rows != set.batch.rows:
            output.size = output.size // set.rows * set.batch.rows
            output.shape[0] = set.batch.rows
        output.to_host = not self.place_parts(set, index)
        if output.to_host:
            output.offset = total[0]
            total[0] += max(aligned(output.size), <size_t>ALIGNMENT)

    cdef bint place_parts(self, BufferSet *set, uint32_t index) noexcept nogil:
        # copy the requests' parts to their regions on the device; returns whether host memory needs no copy of the
        # output
        cdef Output *output = &set.outputs[index]
        cdef const TensorSignature *tensor = &set.batch.signature.outputs[index]
        cdef const Placement *placement
        cdef Request *request
        cdef bint all_placed = not tensor.state
        cdef int64_t elements = 0
        cdef size_t part, at = 0
        cdef uint32_t i
        cdef char *wrong
        if not goes_to_region(set, index, self.device.ordinal):
            return False
        wrong = wrong_output(&set.batch, tensor, output.shape, output.rank, output.size, &elements)
        if wrong != NULL:
            batch_fail(&set.batch, wrong)
            return False
        for i in range(set.batch.count):
            request = set.batch.requests[i]
            part = part_of(&set.batch, tensor, i, NULL, output.size - at, elements)
            if part > output.size - at:
                return False  # the batch fails when the output is handed over
            placement = placement_of_output(request, index, self.device.ordinal)
            if placement != NULL and part <= placement.size and not load32(&request.abandonment.happened):
                if not self.place_part(set, output, placement, at, part):
                    return False
                request.response.outputs[index].placed = True
                output.region = placement.region.block
            elif request.response.outputs[index].wanted:
                all_placed = False
            at += part
            if set.batch.signature.max_batch_size == 0:
                break
        return all_placed and output.region != NULL

    cdef bint place_part(self, BufferSet *set, const Output *output, const Placement *placement, size_t at,
                         size_t size) noexcept nogil:
        cdef DevicePointer to = placement.region.address + placement.offset
        if size == 0 or to == output.address + at:
            return True  # the model wrote it there
        return not self.failed(set, cuda.copy_on_device(to, output.address + at, size, self.copy_out.stream),
                               "cuMemcpyDtoDAsync_v2")

    cdef void copy_output(self, BufferSet *set, const Output *output) noexcept nogil:
        if output.given and output.to_host and output.size and not set.batch.failed:
            self.failed(set, cuda.copy_to_host(set.staging_out.data + output.offset, output.address, output.size,
                                               self.copy_out.stream), "cuMemcpyDtoHAsync_v2")

    cdef void synchronize(self) noexcept nogil:
        cuda.stream_synchronize(self.copy_in.stream)
        cuda.stream_synchronize(self.compute.stream)
        cuda.stream_synchronize(self.copy_out.stream)

    cdef void conclude(self, BufferSet *set) noexcept nogil:
        cdef Output *output
        cdef uint32_t i
        for i in range(set.output_count):
            output = &set.outputs[i]
            if output.given and not set.batch.failed:
                hand_over(set, i)
        clear_outputs(set)
        block_give(set.staging)
        block_give(set.staging_out)
        set.staging = set.staging_out = NULL


cdef void hand_over(BufferSet *set, uint32_t index) noexcept nogil:
    # an output that is only in regions is never read, so its address on the device is enough
    cdef Output *output = &set.outputs[index]
    if output.to_host:
        batch_set_output(&set.batch, index, block_share(set.staging_out), set.staging_out.data + output.offset,
                         output.size, output.shape, output.rank)
    else:
        batch_set_output(&set.batch, index, block_share(output.region), <const uint8_t *><uintptr_t>output.address,
                         output.size, output.shape, output.rank)


cdef inline Block *stage(PageLocked pinned, bint use, size_t size) noexcept nogil:
    return pinned.take_or_fall_back(size) if use else block_take(size)


# ---------------------------------------------------------------------------------------------------------------------
# Regions of clients on the device

cdef bint is_on_device(const BufferSet *set, uint32_t input) noexcept nogil:
    # whether a request's part is on the device; the others are in host memory
    cdef uint32_t i
    if is_made(set.batch.signature, input):
        return False
    for i in range(set.batch.count):
        if data_of(&set.batch, i, input).region != NULL:
            return True
    return False


cdef size_t staged_size(const BufferSet *set, uint32_t input) noexcept nogil:
    cdef size_t size = 0
    cdef uint32_t i
    if not is_on_device(set, input):
        return aligned(padded_size(set, input))
    for i in range(set.batch.count):
        if data_of(&set.batch, i, input).region == NULL:
            size += aligned(data_of(&set.batch, i, input).size)
    return size


cdef DevicePointer bound_address(const BufferSet *set, uint32_t input) noexcept nogil:
    # the address of an input that the model can read in the client's region; 0: the input must be copied
    cdef const InputData *data
    if set.batch.count != 1 or set.batch.writes_inputs or set.graph >= 0 or is_made(set.batch.signature, input):
        return 0
    data = data_of(&set.batch, 0, input)
    if data.region == NULL or data.block.sharing == SHARED_WITH_STRANGER or data.address % ALIGNMENT:
        return 0
    return data.address


cdef bint goes_to_region(const BufferSet *set, uint32_t output, int device) noexcept nogil:
    cdef uint32_t i
    if output >= set.batch.signature.output_count or set.batch.signature.outputs[output].cut_like:
        return False  # the host cuts such an output, row by row
    for i in range(set.batch.count):
        if placement_of_output(set.batch.requests[i], output, device) != NULL:
            return True
    return False


cdef DevicePointer place_in_region(Transfer transfer, const BufferSet *set, uint32_t output) noexcept nogil:
    cdef const Placement *placement
    cdef DevicePointer address
    cdef size_t size = set.outputs[output].size
    if set.batch.count != 1 or not goes_to_region(set, output, transfer.device.ordinal):
        return 0
    placement = placement_of_output(set.batch.requests[0], output, transfer.device.ordinal)
    address = placement.region.address + placement.offset
    if (size > placement.size or address % ALIGNMENT or placement.region.block.sharing == SHARED_WITH_STRANGER
            or load32(&set.batch.requests[0].abandonment.happened)
            or is_input_on_device(set.batch.requests[0], address, size)):
        return 0
    return address
