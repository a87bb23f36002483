# The sets of buffers of an instance on a GPU, and their way from the thread that submits batches to the one that
# answers them.

from libc.stdint cimport int64_t, uint32_t

from _native.cuda.driver cimport DevicePointer, EventHandle
from _native.cuda.memory cimport DevicePool
from _native.execution.batch cimport NativeBatch
from _native.memory.resource cimport Block
from _native.request.signature cimport MAX_RANK
from _native.scheduling.lane cimport Lane
from _native.threads cimport Condition, Mutex

cdef enum:
    SETS = 3                 # one batch uploaded, one computed, one downloaded
    ALIGNMENT = 256          # of a tensor on the device, as TensorRT wants it

cdef struct Output:
    # what the backend gave for one output of the whole batch
    bint given
    DevicePointer address
    size_t size
    int64_t shape[MAX_RANK]
    uint32_t rank
    Block *block             # of the device, when the set owns it
    bint to_host             # somebody gets it from there
    size_t offset            # then: in the block of the host that all outputs are copied to
    Block *region            # of a client, that some request's part goes to directly; the request holds it

cdef struct BufferSet:
    # one batch on its way
    NativeBatch batch
    int index
    uint32_t input_count     # of the model, with those that the batch provides
    uint32_t output_count    # with those that only states come from
    uint32_t rows            # the backend sees: those of the batch, or padded to the size of a captured graph
    DevicePointer *direct    # of each input: where it lies in a client's region and stays; 0: it is copied
    DevicePointer base       # where the inputs that are copied lie: in `device_in`, or in the memory of a graph
    size_t *offsets          # of each input that is copied, from there
    size_t uploaded_size     # bytes of all these
    size_t staged_size       # bytes that are in the host's memory before
    Block *staging
    Block *device_in         # stays with the set, and grows; no graph knows it
    Output *outputs
    Block *dropped           # memory of outputs that the backend wants no more: work of this batch may still use it
    bint holding             # the set holds objects of Python for the batch
    Block *staging_out
    EventHandle uploaded
    EventHandle computed
    EventHandle finished
    bint submitted           # work of this batch is on the streams
    int graph                # that is launched for it, by number; -1: none
    BufferSet *previous      # among the free sets, or those that are submitted
    BufferSet *next

cdef struct BufferSets:
    # a list of them; see _native.list
    BufferSet *first
    BufferSet *last

cdef inline size_t aligned(size_t size) noexcept nogil:
    return (size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)

# The bytes of an input as the backend sees it: of as many rows as the set has.
cdef inline size_t padded_size(const BufferSet *set, uint32_t input) noexcept nogil:
    cdef size_t size = set.batch.inputs[input].size
    return size if set.rows == set.batch.rows else size // set.batch.rows * set.rows

# Where the backend finds an input.
cdef inline DevicePointer input_address(const BufferSet *set, uint32_t input) noexcept nogil:
    return set.direct[input] or set.base + set.offsets[input]

# The memory of an output goes back with the batch, when the device is done with it.
cdef inline void drop_output(BufferSet *set, Output *output) noexcept nogil:
    if output.block != NULL:
        output.block.next = set.dropped
        set.dropped = output.block
    output.block = NULL
    output.given = False

# Give back the memory of all outputs: the device is done with them.
cdef void clear_outputs(BufferSet *set) noexcept nogil


cdef class Pipeline:
    cdef DevicePool pool             # what the sets hold is given back to
    cdef readonly list holds         # of each set: objects that own memory which the device uses for its batch
    cdef BufferSet sets[SETS]
    cdef bint alone                  # one batch at a time
    cdef Mutex guard
    cdef Condition changed
    cdef BufferSets free             # the last used first
    cdef BufferSets submitted        # the oldest first
    cdef int ahead                   # batches that are taken and not computed yet
    cdef int in_flight               # sets that are not free
    cdef bint closing

    cdef int make(self, BufferSet *set, Lane *lane, unsigned int event_flags) except -1
    # A free set, when another batch may be taken; waits for it.
    cdef BufferSet *acquire(self) noexcept nogil
    # Hand a set over to the thread that completes.
    cdef void submit(self, BufferSet *set) noexcept nogil
    # The next set handed over, oldest first; waits for it. NULL: there will be none.
    cdef BufferSet *next_submitted(self) noexcept nogil
    # The batch of a set is computed: another may be taken.
    cdef void computed(self) noexcept nogil
    # Its batch is answered.
    cdef void release(self, BufferSet *set) noexcept nogil
    # There will be no further batch.
    cdef void close(self) noexcept nogil
