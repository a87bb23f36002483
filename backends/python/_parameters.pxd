# The parameters of a request as the JSON object for `InferenceRequest.parameters()`.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from inferd._native.request.request cimport Request

# Size of the object in bytes; 0 if the request has no parameters except those for the server.
cdef size_t parameters_size(const Request *request) noexcept nogil
# Write the object; exactly so many bytes.
cdef void parameters_write(const Request *request, uint8_t *out) noexcept nogil
