# Texts of errors in requests.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.request.request cimport Request
from inferd._native.request.signature cimport TensorSignature

# Fail a request with INVALID_ARGUMENT and the text, with the request's id in front, as Triton's core writes it. Frees
# `text`, which is from malloc (NULL: no memory).
cdef void refuse_invalid(Request *request, char *text) noexcept nogil
# Refuse a request in which inputs are missing: only `present` of them came.
cdef void refuse_missing(Request *request, uint32_t present) noexcept nogil
# Refuse a request because an input has this shape.
cdef void refuse_shape(Request *request, const TensorSignature *tensor, const int64_t *shape,
                       uint32_t rank) noexcept nogil
# For a text about the contents of an input: the name of the field of InferTensorContents with this number. 0 stands for
# datatypes without a field.
cdef const char *contents_name(uint32_t field) noexcept nogil
