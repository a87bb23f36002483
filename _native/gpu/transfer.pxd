# Transfers of a batch's tensors to the device and back.

from libc.stdint cimport int32_t, int64_t, uint32_t

from inferd._native.cuda.device cimport Device, Stream
from inferd._native.cuda.driver cimport DevicePointer, Result
from inferd._native.cuda.memory cimport DevicePool, PageLocked
from inferd._native.gpu.bufferset cimport BufferSet, Output
from inferd._native.memory.resource cimport Lent
from inferd._native.memory.shm cimport Placement
from inferd._native.threads cimport Mutex

cdef struct Piece:
    # bytes that are copied together
    size_t at                # in the staging block
    size_t to                # in the set's device memory
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
    cdef int64_t held        # atomic: device bytes that the sets keep for inputs, and graphs for outputs
    cdef Mutex guard
    cdef int32_t lost        # atomic: the device has failed for good, and so will every later batch
    cdef char *lost_details

    # Whether a call of the driver has failed. The batch has then failed; after a sticky error so do all later ones.
    cdef bint failed(self, BufferSet *set, Result result, const char *call) noexcept nogil
    # Compute the offset of each input from the set's base, for `rows` rows in the model.
    cdef void lay_out(self, BufferSet *set, uint32_t rows) noexcept nogil
    # Allocate device memory for the inputs, unless a graph has it. False: there is none, and the batch has failed.
    cdef bint reserve(self, BufferSet *set) noexcept nogil
    # Device memory for a graph. Work that is submitted to the compute stream from now on finds zeros in it, so that no
    # model computes with uninitialised memory.
    cdef Lent keep(self, size_t size)
    # Gather the inputs, and copy them to where `Graphs.choose` has decided; the compute stream waits for the copy.
    # False: the batch has failed.
    cdef bint upload(self, BufferSet *set, uint32_t rows) noexcept nogil
    # Copy the outputs back when they are computed.
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
    # Wait until all submitted work has ended; the device's context must be current.
    cdef void synchronize(self) noexcept nogil
    # Pass the outputs to the requests, and give back what the set holds for the batch.
    cdef void conclude(self, BufferSet *set) noexcept nogil

# The address in the region of the batch's only request at which the model can write this output directly, with its
# size in `set.outputs`; 0: none.
cdef DevicePointer place_in_region(Transfer transfer, const BufferSet *set, uint32_t output) noexcept nogil
