# Encodes ModelInferResponse and ModelStreamInferResponse messages.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from inferd._native.request.request cimport Request, Response
from inferd._native.transport.outgoing cimport Outgoing

# The framed gRPC message of a successful response; NULL if there is no memory, or if it exceeds 4 GiB.
# `streamed`: as a ModelStreamInferResponse, with a parameter that says whether the response is the final one.
cdef Outgoing *response_outgoing(const Response *response, bint streamed) noexcept nogil
# The framed ModelStreamInferResponse with error_message; infer_response names the request, its model, and whether no
# response follows. NULL: no memory.
cdef Outgoing *error_outgoing(const Request *request, bint final, const char *details) noexcept nogil
# An unframed ModelInferResponse in two steps: its size (0: no memory), and writing it.
cdef size_t encoded_size(const Response *response) noexcept nogil
cdef void encoded_write(const Response *response, uint8_t *out) noexcept nogil
# An unframed ModelInferResponse; raises MemoryError.
cdef bytes response_bytes(const Response *response)
# The message of response_outgoing with `streamed`, unframed; raises MemoryError.
cdef bytes response_streamed(const Response *response)
# The message of error_outgoing, unframed; raises MemoryError.
cdef bytes error_streamed(const Request *request, bint final, const char *details)
