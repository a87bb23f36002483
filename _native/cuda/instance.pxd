# Instances on a GPU: batches that are uploaded, computed and downloaded one behind the other, in buffers of their own.

from libc.stdint cimport int64_t, uint32_t

from _native.batch cimport NativeBatch
from _native.cuda.device cimport Device, Stream
from _native.cuda.driver cimport DevicePointer, EventHandle, Result
from _native.cuda.memory cimport DevicePool, PageLocked
from _native.lane cimport LaneHandle, Seat
from _native.limiter cimport ClaimHandle
from _native.memory cimport Block
from _native.request cimport Request
from _native.signature cimport MAX_RANK
from _native.threads cimport Condition, Mutex

cdef enum:
    SETS = 3                 # one batch uploaded, one computed, one downloaded
    BUCKETS = 64             # sizes of batches at most for which graphs are captured

cdef struct Bucket:
    uint32_t rows            # that the graph computes
    uint32_t lowest          # rows of a batch that is padded for it

cdef struct Output:
    # what the backend gave for one output of the whole batch
    bint given
    DevicePointer address
    size_t size
    int64_t shape[MAX_RANK]
    uint32_t rank
    Block *block             # of the device, when the set owns it
    size_t offset            # in the block of the host that all outputs are copied to

cdef struct BufferSet:
    # one batch on its way
    NativeBatch batch
    int index
    uint32_t rows            # the backend sees: those of the batch, or padded to the size of a captured graph
    size_t *offsets          # of each input, in the staging block and on the device alike
    size_t staged            # bytes of all inputs
    Block *staging
    Block *device_in         # stays with the set, and grows
    Output *outputs
    Block *staging_out
    EventHandle uploaded
    EventHandle computed
    EventHandle finished
    bint submitted           # work of this batch is on the streams
    BufferSet *next


cdef class GpuLoop:
    cdef LaneHandle lane
    cdef Seat seat
    cdef ClaimHandle claim
    cdef object instance
    cdef readonly str name
    cdef Device device
    cdef PageLocked pinned
    cdef DevicePool pool
    cdef Stream copy_in
    cdef Stream compute
    cdef Stream copy_out
    cdef bint pinned_in
    cdef bint pinned_out
    cdef bint busy_wait
    cdef BufferSet sets[SETS]
    cdef list holds          # of each set: objects that own memory which the device still reads
    cdef dict graphs         # (set, rows) -> Captured
    cdef Bucket buckets[BUCKETS]     # of captured graphs, by rows
    cdef int bucket_count
    cdef uint32_t input_count
    cdef uint32_t output_count
    # between the thread that submits and the one that completes
    cdef Mutex guard
    cdef Condition changed
    cdef BufferSet *free
    cdef BufferSet *first
    cdef BufferSet *last
    cdef int ahead           # batches that are taken and not computed yet
    cdef int in_flight       # sets that are not free
    cdef bint closing
    cdef bint lost           # the device failed for good: every further batch does
    cdef char *lost_details
    cdef bint lost_told

    cdef int make(self, BufferSet *set) except -1
    cdef BufferSet *acquire(self) noexcept nogil
    cdef void release(self, BufferSet *set) noexcept nogil
    cdef bint failed(self, BufferSet *set, Result result, const char *call) noexcept nogil
    cdef void lay_out(self, BufferSet *set, uint32_t rows) noexcept nogil
    cdef bint reserve(self, BufferSet *set, size_t size) noexcept nogil
    cdef bint upload(self, BufferSet *set) noexcept nogil
    cdef void execute(self, BufferSet *set)
    cdef void download(self, BufferSet *set) noexcept nogil
    cdef void submit(self, BufferSet *set) noexcept nogil
    cdef void complete(self) noexcept nogil
    cdef void conclude(self, BufferSet *set) noexcept nogil
    cdef void start(self, BufferSet *set, Request *chain)
    cdef void settle(self) noexcept nogil
    cdef void tell_lost(self) noexcept
    cdef void finish(self, BufferSet *set) noexcept nogil
    cdef bint run_once(self)
    cdef int capture_one(self, BufferSet *set, uint32_t rows) except -1


cdef class GpuBatch:
    # what a backend sees of a batch
    cdef GpuLoop loop
    cdef BufferSet *set      # NULL once submitted
    cdef bint recorded       # there are no requests: the work becomes a graph
    cdef int check(self) except -1
    cdef uint32_t output_index(self, str name) except? 0xffffffff
