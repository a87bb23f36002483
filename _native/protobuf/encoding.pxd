# Encoding of inference.ModelInferResponse without the bytes of its tensors, which are sent from their own memory.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.protobuf.codec cimport Parameter, Str
from inferd._native.protobuf.datatype cimport Datatype


cdef struct ResponseOutput:
    # one ModelInferResponse.InferOutputTensor
    Str name
    Datatype datatype
    const int64_t *shape
    uint32_t rank

cdef struct ResponseHead:
    # ModelInferResponse without its raw_output_contents
    Str model_name
    Str model_version
    Str id
    const ResponseOutput *outputs
    uint32_t output_count
    const Parameter *parameters
    uint32_t parameter_count

# Encoding takes two calls: size, then write into at least that many bytes. Write returns the end of what it wrote.
cdef size_t response_head_size(const ResponseHead *head) noexcept nogil
cdef uint8_t *response_head_write(const ResponseHead *head, uint8_t *out) noexcept nogil
# The tag and length in front of one raw_output_contents entry of `size` bytes.
cdef size_t raw_prefix_size(uint64_t size) noexcept nogil
cdef uint8_t *raw_prefix_write(uint64_t size, uint8_t *out) noexcept nogil
