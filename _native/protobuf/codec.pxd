# Decoding of inference.ModelInferRequest.
#
# A decoded message has borrowed pointers into the bytes from which it was decoded. The caller keeps these bytes alive
# and unchanged for as long as the InferMessage is in use. No function takes the GIL.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef struct Str:
    # a borrowed run of bytes; not terminated
    const char *data
    uint32_t size

cdef enum ParameterKind:
    # the oneof of inference.InferParameter; the values are its field numbers
    PARAMETER_NONE = 0
    PARAMETER_BOOL = 1
    PARAMETER_INT64 = 2
    PARAMETER_STRING = 3
    PARAMETER_DOUBLE = 4
    PARAMETER_UINT64 = 5

cdef struct Parameter:
    Str key
    ParameterKind kind
    int64_t integer     # bool, int64 and (same bits) uint64
    double real
    Str text

cdef struct InputHead:
    # one ModelInferRequest.InferInputTensor
    Str name
    Str datatype
    uint32_t first_dim            # its shape is dims[first_dim : first_dim + rank]
    uint32_t rank
    uint32_t first_parameter      # in tensor_parameters
    uint32_t parameter_count
    # the encoded InferInputTensor, re-read by contents_copy of inferd._native.protobuf.contents
    Str body
    bint has_contents             # the `contents` submessage is present, possibly empty
    uint32_t contents_mask        # bit n set: field n of InferTensorContents holds at least one element
    uint64_t contents_count       # elements over all those fields
    uint64_t contents_bytes       # bytes of all elements of bytes_contents, without length prefixes

cdef struct OutputHead:
    # one ModelInferRequest.InferRequestedOutputTensor
    Str name
    uint32_t first_parameter      # in tensor_parameters
    uint32_t parameter_count

cdef struct InferMessage:
    # One ModelInferRequest. Each array grows as needed; infer_message_clear keeps it for the next message. If several
    # parameters have the same key, the last one counts, as in any protobuf map; all are kept, in order.
    Str model_name
    Str model_version
    Str id
    InputHead *inputs
    uint32_t input_count
    uint32_t input_capacity
    OutputHead *outputs
    uint32_t output_count
    uint32_t output_capacity
    Str *raw
    uint32_t raw_count
    uint32_t raw_capacity
    Parameter *parameters
    uint32_t parameter_count
    uint32_t parameter_capacity
    Parameter *tensor_parameters
    uint32_t tensor_parameter_count
    uint32_t tensor_parameter_capacity
    int64_t *dims
    uint32_t dim_count
    uint32_t dim_capacity

cdef enum DecodeResult:
    DECODE_OK = 0
    DECODE_MALFORMED = -1    # not a ModelInferRequest: official protobuf rejects it too
    DECODE_TOO_MANY = -2     # more than DECODE_LIMIT inputs, outputs, raw contents, parameters or dimensions
    DECODE_NO_MEMORY = -3

# Any one array of an InferMessage may hold at most so many elements. This bounds the memory for messages that consist
# of very many tiny elements.
cdef enum:
    DECODE_LIMIT = 65536

cdef void infer_message_init(InferMessage *message) noexcept nogil
# Remove the content; keep small arrays for reuse, free large ones.
cdef void infer_message_clear(InferMessage *message) noexcept nogil
cdef void infer_message_free(InferMessage *message) noexcept nogil

# Decode `size` bytes in one pass. After a failure the message is as after infer_message_clear.
cdef DecodeResult infer_decode(const uint8_t *data, size_t size, InferMessage *message) noexcept nogil

# Replace the parameters by those of another message; they continue to point into its bytes. False: no memory.
cdef bint infer_message_copy_parameters(InferMessage *message, const InferMessage *other) noexcept nogil

# Add the parameters of another message behind those of this one.
cdef bint infer_message_add_parameters(InferMessage *message, const InferMessage *other) noexcept nogil

# The last parameter with this key among `count` from `first` on; NULL if there is none.
cdef const Parameter *parameter_find(const Parameter *first, uint32_t count, const char *key,
                                     size_t key_size) noexcept nogil
