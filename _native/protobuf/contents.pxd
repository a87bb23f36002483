# Typed contents of the inputs of a decoded message, as the bytes that raw contents have.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from inferd._native.protobuf.codec cimport InputHead
from inferd._native.protobuf.datatype cimport Datatype

# The one field of InferTensorContents for elements of this datatype (FP32 -> 6, INT8 -> 2, ...); 0 for FP16 and BF16,
# which have none.
cdef uint32_t contents_field(Datatype datatype) noexcept nogil
# The number of bytes that contents_copy writes for this input with this datatype.
cdef uint64_t contents_size(const InputHead *head, Datatype datatype) noexcept nogil
# Write the typed contents as raw little-endian elements (BYTES: each with a 4-byte length). Integers are narrowed to
# their low bytes, as in Triton. Only for an input whose contents_mask has no other bit than this datatype's.
cdef void contents_copy(const InputHead *head, Datatype datatype, uint8_t *out) noexcept nogil
