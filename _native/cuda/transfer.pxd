# The way of a batch's tensors to the device and back.

from libc.stdint cimport int32_t, int64_t, uint32_t

from _native.cuda.bufferset cimport BufferSet, Output
from _native.cuda.device cimport Device, Stream
from _native.cuda.driver cimport DevicePointer, Result
from _native.cuda.memory cimport DevicePool, PageLocked
from _native.memory.resource cimport Lent
from _native.memory.shm cimport Placement
from _native.threads cimport Mutex

cdef struct Piece:
    # bytes that go up at once
    size_t at                # in the staging block
    size_t to                # in the set's memory on the device
    size_t size


cdef class Transfer:
    cdef Device device
    cdef PageLocked pinned
    cdef DevicePool pool
    cdef Stream copy_in
    cdef Stream compute
    cdef Stream copy_out
    cdef bint pinned_in
    cdef bint pinned_out
    cdef int64_t held        # atomic: bytes of the device that the sets keep for inputs, and graphs for outputs
    cdef Mutex guard
    cdef int32_t lost        # atomic: the device failed for good, and every further batch does
    cdef char *lost_details

    # Whether a call of the driver has failed; the batch then has, and with a sticky error all that follow.
    cdef bint failed(self, BufferSet *set, Result result, const char *call) noexcept nogil
    # Where each input lies from the set's base, when the batch has `rows` rows as the backend sees it.
    cdef void lay_out(self, BufferSet *set, uint32_t rows) noexcept nogil
    # Memory of the device for the inputs, unless a graph has theirs. False: there is none, and the batch has failed.
    cdef bint reserve(self, BufferSet *set) noexcept nogil
    # Memory of the device for as long as a graph has it: full of zeros for what is submitted to the compute stream from
    # now on, so that no model ever computes with what nobody has written.
    cdef Lent keep(self, size_t size)
    # Gather the inputs and have them copied, to where `Graphs.choose` has decided; the compute stream waits for that.
    # False: the batch has failed.
    cdef bint upload(self, BufferSet *set, uint32_t rows) noexcept nogil
    # Have the outputs copied back when they are computed.
    cdef void download(self, BufferSet *set) noexcept nogil
    cdef bint copy_inputs(self, BufferSet *set) noexcept nogil
    cdef bint copy_parts(self, BufferSet *set, uint32_t input, Piece *piece) noexcept nogil
    cdef bint send(self, BufferSet *set, Piece *piece) noexcept nogil
    cdef bint pad(self, BufferSet *set, uint32_t input, size_t at) noexcept nogil
    cdef void prepare_output(self, BufferSet *set, uint32_t index, size_t *total) noexcept nogil
    cdef bint place_parts(self, BufferSet *set, uint32_t index) noexcept nogil
    cdef bint place_part(self, BufferSet *set, const Output *output, const Placement *placement, size_t at,
                         size_t size) noexcept nogil
    cdef void copy_output(self, BufferSet *set, const Output *output) noexcept nogil
    # Wait until nothing of what was submitted runs any more; the device's context is current.
    cdef void synchronize(self) noexcept nogil
    # Hand what was copied back to the requests, and give back what the set holds for the batch.
    cdef void conclude(self, BufferSet *set) noexcept nogil

# Where the model can write an output of the size in `set.outputs` directly: in the region of its one request. 0:
# nowhere.
cdef DevicePointer place_in_region(Transfer transfer, const BufferSet *set, uint32_t output) noexcept nogil
