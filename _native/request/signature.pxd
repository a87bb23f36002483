# The inputs and outputs of a model version, compiled for checking requests without the GIL.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from inferd._native.protobuf.codec cimport Str
from inferd._native.protobuf.datatype cimport Datatype

cdef enum:
    MAX_RANK = 16        # dimensions of a tensor, batch dimension included

cdef enum SupplyKind:
    # the content of an input that the batch provides; see inferd._native.execution.supply
    SUPPLY_START
    SUPPLY_END
    SUPPLY_READY
    SUPPLY_CORRELATION
    SUPPLY_END_REASON
    SUPPLY_STATE
    # inputs that say something about a ragged input (BatchInput.Kind of Triton's model configuration)
    SUPPLY_ELEMENT_COUNT
    SUPPLY_ACCUMULATED_ELEMENT_COUNT
    SUPPLY_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO
    SUPPLY_MAX_ELEMENT_COUNT_AS_SHAPE
    SUPPLY_ITEM_SHAPE
    SUPPLY_ITEM_SHAPE_FLATTEN

cdef struct Supplied:
    SupplyKind kind
    uint8_t values[2][8]     # of START, END and READY: the encoded elements for false and for true
    uint32_t source          # of STATE: index of the state; of the kinds about ragged inputs: index of the input

cdef struct TensorSignature:
    Str name
    Datatype datatype
    uint32_t rank        # without the batch dimension
    int64_t dims[MAX_RANK]
    bint optional
    bint variable        # some dimension is -1
    Str *labels
    uint32_t label_count
    uint32_t state       # of an output: 1 + index of the state that it updates; 0: none
    bint ragged          # of an input: requests of any shape share a batch; their elements form one dimension
    # A shape tensor: requests with the same values share a batch. If the model batches, `dims` leaves out the first
    # value, the batch size, and there is no batch dimension.
    bint values
    bint reshaped        # the model sees the same elements in another shape:
    uint32_t model_rank
    int64_t model_dims[MAX_RANK]
    bint padded          # of an input: its only variable dimension is padded, so that requests share a batch
    uint32_t pad_axis    # that dimension, without the batch dimension; of an output with cut_like: its position there
    uint8_t pad_value[8]
    uint32_t cut_like    # of an output: 1 + the padded input to whose length it is cut; 0: none
    uint32_t like_input  # of an output: 1 + the ragged input by whose shapes it is split; 0: none

cdef struct Names:
    # A hash table of tensors by name. It is built when the model is loaded, and is at most half full.
    uint32_t *slots          # 1 + index of the tensor; 0: free
    uint32_t mask

cdef struct Signature:
    Str name
    int64_t version
    Str version_text
    int64_t max_batch_size       # 0: no batch dimension
    TensorSignature *inputs      # inputs of requests, then inputs that the batch provides
    uint32_t input_count         # of requests
    Names input_names            # of all inputs
    Supplied *supplied           # what the batch provides
    uint32_t supplied_count
    uint32_t required_inputs     # number of inputs that are not optional
    TensorSignature *outputs     # outputs for requests, then outputs that only the server keeps
    uint32_t output_count        # for requests
    Names output_names           # of all outputs
    uint32_t kept_count          # that only the server keeps
    uint32_t state_count
    int64_t *buckets             # lengths to which padded inputs are padded, ascending
    uint32_t bucket_count
    bint decoupled               # a request may have any number of responses
    bint single_responses        # of a decoupled model: ModelInfer may ask for its only response
    bint splits                  # a request may have more rows than max_batch_size
    bint uniform                 # all requests have the same inputs, shapes (except for the batch dimension) and values

# Set `out` to a copy of the text as UTF-8, from malloc and with a null byte behind it.
cdef int str_copy(Str *out, str text) except -1

# The index of the input or output with this name, also of one that requests do not have; -1: none. The time does not
# depend on the number of tensors.
cdef int input_find(const Signature *signature, Str name) noexcept nogil
cdef int output_find(const Signature *signature, Str name) noexcept nogil

# Build from an inferd.backends.api.ModelSpec (read by attribute, not imported); raises ValueError or MemoryError.
cdef int signature_build(Signature *signature, object spec, int64_t version) except -1
cdef void signature_clear(Signature *signature) noexcept nogil
