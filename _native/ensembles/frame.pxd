# The state of a running ensemble: the tensors that are known, and the steps that run or wait.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t

from inferd._native.ensembles.plan cimport EnsemblePlan
from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.datatype cimport Datatype
from inferd._native.refusal cimport Refusal
from inferd._native.request.request cimport Correlation, Request
from inferd._native.request.signature cimport MAX_RANK, TensorSignature
from inferd._native.service.model_waits cimport ModelWait

cdef enum ValueState:
    VALUE_OPEN               # not known yet
    VALUE_PRESENT
    VALUE_MISSING            # omitted: an optional input of the ensemble, or an output that a model did not set
    VALUE_SKIPPED            # the step that writes it did not run

cdef struct Sequence:
    # the sequence that a step's request belongs to
    Correlation correlation
    bint start
    bint end
    bint changed             # a step has changed it for the steps behind: it differs from the ensemble's request
    Block *block             # contains the correlation's text, and the id and the parameters of the request

cdef struct Value:
    ValueState state
    uint32_t writers         # steps that may still write it
    uint32_t uses            # remaining uses, after which its memory is given back; EVER: when its frame ends
    const Sequence *sequence
    Datatype datatype
    const uint8_t *data
    size_t size
    Block *block             # contains `data`, one reference, while PRESENT and in use
    int64_t shape[MAX_RANK]
    uint32_t rank

cdef enum:
    EVER = 0x7fffffff

cdef struct Run
cdef struct Frame

cdef enum CallState:
    CALL_OPEN                # waits for its inputs
    CALL_WAITING             # waits for the step limit
    CALL_AWAITING            # its model is being loaded; counts against the step limit
    CALL_RUNNING
    CALL_OVER                # ended, skipped, or not needed

cdef struct StepCall:
    # one call of a step
    Frame *frame
    uint32_t step
    CallState state
    uint32_t unresolved      # inputs that are not known yet
    bint answered            # its model has sent a response
    Request *request         # while RUNNING
    StepCall *previous       # among those that wait for the step limit
    StepCall *next           # in that list, or among those that are ready
    ModelWait wait           # while AWAITING
    Sequence sequence        # of its request, later of its outputs

cdef struct Frame:
    # one occurrence of a scope: the whole request, or one response of a decoupled step with the steps behind it
    Run *run
    Frame *parent
    Frame *previous          # in the run
    Frame *next
    uint32_t scope
    uint32_t open_calls      # calls that are not over
    uint32_t children        # inner frames
    uint32_t unresolved      # wanted outputs of the ensemble that belong to the frame and are not known yet
    bint sent                # its response was sent
    Sequence sequence        # from the response that began the frame
    Block *ack               # of that response: given back when the client has finished with everything made from it
    Value *values            # by index of the tensor in the scope
    StepCall *calls          # by index of the step in the scope

cdef struct Needs:
    # the part of the plan that a request needs
    const EnsemblePlan *plan
    const uint8_t *tensors
    const uint8_t *steps
    const uint8_t *sends     # scopes whose frames each stand for a response
    const uint8_t *outputs   # the wanted outputs of the ensemble

cdef struct Run:
    # one request of an ensemble
    void *ensemble
    Request *request
    Needs needs
    Frame *first             # its frames, in the order of their begin
    Frame *last
    StepCall *ready          # calls whose inputs are all known
    uint32_t active          # calls that run, or wait for the step limit or for a model
    bint delivering          # a response to one of its calls is being delivered now
    int status               # of its error
    char *details
    Refusal refusal

# Add a frame at the end of the run, with everything open; NULL: no memory. `parent` NULL: the first frame.
cdef Frame *frame_new(Run *run, uint32_t scope, Frame *parent) noexcept nogil
# Remove the frame from its run and free it. Its calls must be over.
cdef void frame_free(Frame *frame) noexcept nogil
# The value of a tensor of the frame or of a frame around it; NULL: it belongs to another frame.
cdef Value *frame_value(Frame *frame, uint32_t tensor) noexcept nogil
# Set the state of a tensor of the frame; calls that waited only for it become ready.
cdef void frame_resolve(Frame *frame, uint32_t tensor, ValueState state) noexcept nogil
# Remove one use; after the last one the memory is given back.
cdef void value_release(Value *value) noexcept nogil
# The shape of a value for a model with or without a batch dimension: a dimension of 1 is added or removed in front if
# the ranks require it.
cdef uint32_t value_shape(const Value *value, const TensorSignature *tensor, bint batches,
                          int64_t *shape) noexcept nogil
# Copy another sequence; `block` may be NULL.
cdef void sequence_copy(Sequence *to, const Sequence *source) noexcept nogil

# Whether all wanted outputs of the frame and of those around it are known.
cdef bint frame_is_complete(const Frame *frame) noexcept nogil
# The first frame, from this one on, that stands for a response and was not sent, if it is complete: responses keep
# their order.
cdef Frame *frame_to_send(const Run *run, Frame *frame) noexcept nogil
# Free the frames in which nothing can happen any more, except the first.
cdef void frames_end(Run *run) noexcept nogil
