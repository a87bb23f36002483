# What a running ensemble knows: the tensors that there are, and the steps that run or wait.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t

from _native.ensembles.plan cimport EnsemblePlan
from _native.memory.resource cimport Block
from _native.protobuf.datatype cimport Datatype
from _native.request.request cimport Correlation, Request
from _native.request.signature cimport MAX_RANK, TensorSignature

cdef enum ValueState:
    VALUE_OPEN               # not yet known
    VALUE_PRESENT
    VALUE_MISSING            # left out: an optional input of the ensemble, or an output that a model did not set
    VALUE_SKIPPED            # what would have written it did not run

cdef struct Sequence:
    # what a step is told about the sequence that it belongs to
    Correlation correlation
    bint start
    bint end
    bint changed             # by a step, for those behind it: it is not what the ensemble's request says
    Block *block             # holds the correlation's text, and the id and the parameters of the request

cdef struct Value:
    ValueState state
    uint32_t writers         # steps that may still write it
    uint32_t uses            # until its memory may be given back; EVER: when its frame ends
    const Sequence *sequence
    Datatype datatype
    const uint8_t *data
    size_t size
    Block *block             # holds `data`, one reference, while PRESENT and still used
    int64_t shape[MAX_RANK]
    uint32_t rank

cdef enum:
    EVER = 0x7fffffff

cdef struct Run
cdef struct Frame

cdef enum CallState:
    CALL_OPEN                # waits for its inputs
    CALL_WAITING             # for its turn
    CALL_RUNNING
    CALL_OVER                # ended, skipped, or not needed

cdef struct StepCall:
    # one step, once
    Frame *frame
    uint32_t step
    CallState state
    uint32_t unresolved      # tensors that it reads and that are not yet known
    bint answered            # its model has given a response
    Request *request         # while RUNNING
    StepCall *previous       # among those that wait for their turn
    StepCall *next           # there, or among those that are ready
    Sequence sequence        # of its request, then of its outputs

cdef struct Frame:
    # one occurrence of a scope: the request as a whole, or a response of a decoupled step and what is made of it
    Run *run
    Frame *parent
    Frame *previous          # in the run
    Frame *next
    uint32_t scope
    uint32_t open_calls      # not over
    uint32_t children        # frames inside of it
    uint32_t unresolved      # wanted outputs of the ensemble that live in it and are not yet known
    bint sent                # the response that it stands for
    Sequence sequence        # of the response that began it
    Block *ack               # of that response: given back when the client has done with what was made of it
    Value *values            # by the tensor's place in the scope
    StepCall *calls          # by the step's place in the scope

cdef struct Needs:
    # what of the plan a request needs
    const EnsemblePlan *plan
    const uint8_t *tensors
    const uint8_t *steps
    const uint8_t *sends     # scopes of which each frame stands for a response
    const uint8_t *outputs   # of the ensemble, that are wanted

cdef struct Run:
    # one request of an ensemble
    void *ensemble
    Request *request
    Needs needs
    Frame *first             # its frames, in the order in which they began
    Frame *last
    StepCall *ready          # calls whose inputs are all known
    uint32_t active          # calls that run or wait for their turn
    bint delivering          # this is happening inside of a delivery to one of its calls
    int status               # of its failure
    char *details
    const char *reason

# A frame at the end of the run, with everything open; NULL: no memory. `parent` NULL: the first.
cdef Frame *frame_new(Run *run, uint32_t scope, Frame *parent) noexcept nogil
# Take it out of its run and give back what it holds. Its calls are over.
cdef void frame_free(Frame *frame) noexcept nogil
# The value of a tensor that lives in the frame or around it; NULL when it lives elsewhere.
cdef Value *frame_value(Frame *frame, uint32_t tensor) noexcept nogil
# State that a tensor of the frame is known now; calls that waited for nothing else become ready.
cdef void frame_resolve(Frame *frame, uint32_t tensor, ValueState state) noexcept nogil
# One use less; after the last its memory is given back.
cdef void value_release(Value *value) noexcept nogil
# The shape of a value as a model with or without a batch dimension takes it: a dimension of 1 is put in front or taken
# away where the ranks ask for it.
cdef uint32_t value_shape(const Value *value, const TensorSignature *tensor, bint batches,
                          int64_t *shape) noexcept nogil
# Take over another sequence; `block` may be NULL.
cdef void sequence_copy(Sequence *to, const Sequence *source) noexcept nogil

# Whether all wanted outputs of the frame and of those around it are known.
cdef bint frame_is_complete(const Frame *frame) noexcept nogil
# The first frame from here on that stands for a response and has not left, if it is complete: responses keep their
# order.
cdef Frame *frame_to_send(const Run *run, Frame *frame) noexcept nogil
# Free the frames in which nothing will happen any more, but for the first.
cdef void frames_end(Run *run) noexcept nogil
