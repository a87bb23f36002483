# The fields of the inference messages, from proto/grpc_service.proto.
#
# Tags are field_number << 3 | wire_type.

from libc.stdint cimport uint32_t

from inferd._native.protobuf.wire cimport WIRE_FIXED32, WIRE_FIXED64, WIRE_LEN, WIRE_VARINT

cdef enum:      # ModelInferRequest
    REQUEST_MODEL_NAME = 1 << 3 | 2
    REQUEST_MODEL_VERSION = 2 << 3 | 2
    REQUEST_ID = 3 << 3 | 2
    REQUEST_PARAMETERS = 4 << 3 | 2
    REQUEST_INPUTS = 5 << 3 | 2
    REQUEST_OUTPUTS = 6 << 3 | 2
    REQUEST_RAW = 7 << 3 | 2

cdef enum:      # ModelInferRequest.InferInputTensor and ModelInferResponse.InferOutputTensor
    TENSOR_NAME = 1 << 3 | 2
    TENSOR_DATATYPE = 2 << 3 | 2
    TENSOR_DIM = 3 << 3 | 0
    TENSOR_SHAPE = 3 << 3 | 2
    TENSOR_PARAMETERS = 4 << 3 | 2
    TENSOR_CONTENTS = 5 << 3 | 2

cdef enum:      # ModelInferRequest.InferRequestedOutputTensor
    REQUESTED_NAME = 1 << 3 | 2
    REQUESTED_PARAMETERS = 2 << 3 | 2

cdef enum:      # an entry of map<string, InferParameter>
    ENTRY_KEY = 1 << 3 | 2
    ENTRY_VALUE = 2 << 3 | 2

cdef enum:      # InferParameter
    VALUE_BOOL = 1 << 3 | 0
    VALUE_INT64 = 2 << 3 | 0
    VALUE_STRING = 3 << 3 | 2
    VALUE_DOUBLE = 4 << 3 | 1
    VALUE_UINT64 = 5 << 3 | 0

cdef enum:      # field numbers of InferTensorContents
    CONTENTS_BOOL = 1
    CONTENTS_INT = 2
    CONTENTS_INT64 = 3
    CONTENTS_UINT = 4
    CONTENTS_UINT64 = 5
    CONTENTS_FP32 = 6
    CONTENTS_FP64 = 7
    CONTENTS_BYTES = 8

cdef enum:      # ModelInferResponse
    RESPONSE_MODEL_NAME = 1 << 3 | 2
    RESPONSE_MODEL_VERSION = 2 << 3 | 2
    RESPONSE_ID = 3 << 3 | 2
    RESPONSE_PARAMETERS = 4 << 3 | 2
    RESPONSE_OUTPUTS = 5 << 3 | 2
    RESPONSE_RAW = 6 << 3 | 2


cdef inline uint32_t contents_wire_type(uint32_t field) noexcept nogil:
    """The wire type of one unpacked element of a field of InferTensorContents."""
    if field == CONTENTS_FP32:
        return WIRE_FIXED32
    if field == CONTENTS_FP64:
        return WIRE_FIXED64
    return WIRE_LEN if field == CONTENTS_BYTES else WIRE_VARINT
