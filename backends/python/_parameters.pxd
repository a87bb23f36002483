# The parameters of a request as the JSON object that `InferenceRequest.parameters()` gives.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from _native.request.request cimport Request

# Bytes of the object; 0 when the request has no parameters beside those that are the server's own.
cdef size_t parameters_size(const Request *request) noexcept nogil
# Write it; exactly so many bytes.
cdef void parameters_write(const Request *request, uint8_t *out) noexcept nogil
