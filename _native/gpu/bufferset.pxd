# The buffer sets of an instance on a GPU, and how they pass from the thread that submits batches to the thread that
# answers them.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.cuda.driver cimport DevicePointer, EventHandle
from inferd._native.cuda.memory cimport DevicePool
from inferd._native.execution.batch cimport NativeBatch
from inferd._native.memory.resource cimport Block
from inferd._native.request.lane cimport Lane
from inferd._native.request.signature cimport MAX_RANK
from inferd._native.threads cimport Condition, Mutex

cdef enum:
    SETS = 3                 # one batch is uploaded, one computed, one downloaded
    ALIGNMENT = 256          # of a tensor on the device, as TensorRT requires

cdef struct Output:
    # one output of the whole batch, set by the backend
    bint given
    DevicePointer address
    size_t size
    int64_t shape[MAX_RANK]
    uint32_t rank
    Block *block             # of the device, if the set owns it
    bint to_host             # it is needed in host memory
    size_t offset            # if to_host: in the host block to which all outputs are copied
    Block *region            # of a client, to which a request's part is copied directly; the request holds it

cdef struct BufferSet:
    # one batch on the device
    NativeBatch batch
    int index
    uint32_t input_count     # of the model, with supplied inputs
    uint32_t output_count    # with outputs only for states
    uint32_t rows            # for the backend: those of the batch, or padded to the size of a captured graph
    DevicePointer *direct    # of each input: its address if it is used in a client's region; 0: it is copied
    DevicePointer base       # of the inputs that are copied: in `device_in`, or in the memory of a graph
    size_t *offsets          # of each input that is copied, from `base` on
    size_t uploaded_size     # bytes of all copied inputs
    size_t staged_size       # bytes of these that are staged in host memory
    Block *staging
    Block *device_in         # stays with the set, and grows; not used by graphs
    Output *outputs
    Block *dropped           # memory of outputs that the backend has replaced; work of this batch may still use it
    bint holding             # the set holds Python objects for the batch
    Block *staging_out
    EventHandle uploaded
    EventHandle computed
    EventHandle finished
    bint submitted           # work of this batch is on the streams
    int graph                # number of the graph that is launched for it; -1: none
    BufferSet *previous      # among the free or the submitted sets
    BufferSet *next

cdef struct BufferSets:
    # a list of them; see inferd._native.list
    BufferSet *first
    BufferSet *last

cdef inline size_t aligned(size_t size) noexcept nogil:
    return (size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)

# The bytes of an input for the backend: of as many rows as the set has.
cdef inline size_t padded_size(const BufferSet *set, uint32_t input) noexcept nogil:
    cdef size_t size = set.batch.inputs[input].size
    return size if set.rows == set.batch.rows else size // set.batch.rows * set.rows

# The address of an input for the backend.
cdef inline DevicePointer input_address(const BufferSet *set, uint32_t input) noexcept nogil:
    return set.direct[input] or set.base + set.offsets[input]

# Let the memory of an output go back with the batch, when the device has finished with it.
cdef inline void drop_output(BufferSet *set, Output *output) noexcept nogil:
    if output.block != NULL:
        output.block.next = set.dropped
        set.dropped = output.block
    output.block = NULL
    output.given = False

# Give back the memory of all outputs, with which the device has finished.
cdef void clear_outputs(BufferSet *set) noexcept nogil


cdef class Pipeline:
    cdef DevicePool pool             # to which the sets give memory back
    cdef readonly list holds         # of each set: objects that own memory which the device uses for its batch
    cdef BufferSet sets[SETS]
    cdef bint alone                  # one batch at a time
    cdef Mutex guard
    cdef Condition changed
    cdef BufferSets free             # the last used one is first
    cdef BufferSets submitted        # the oldest is first
    cdef int ahead                   # batches that are taken and not computed
    cdef int in_flight               # sets that are not free
    cdef bint closing

    cdef int make(self, BufferSet *set, Lane *lane, unsigned int event_flags) except -1
    # Wait until another batch may be taken; returns a free set.
    cdef BufferSet *acquire(self) noexcept nogil
    # Pass a set to the thread that completes batches.
    cdef void submit(self, BufferSet *set) noexcept nogil
    # Wait for the next submitted set, oldest first. NULL: there will be none.
    cdef BufferSet *next_submitted(self) noexcept nogil
    # The batch of a set is computed: another one may be taken.
    cdef void computed(self) noexcept nogil
    # The batch of a set is answered.
    cdef void release(self, BufferSet *set) noexcept nogil
    # There will be no further batch.
    cdef void close(self) noexcept nogil
