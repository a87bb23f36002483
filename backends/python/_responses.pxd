# What a worker answers, read and checked.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t

from _native.inference.request cimport Request, Response
from _native.memory.arena cimport Arena
from _native.memory.resource cimport Block

cdef struct Origin:
    # where the responses of one packet are, and where their tensors may be
    const uint8_t *record
    size_t size
    Block *record_block      # holds the record; nobody else writes to it
    const Arena *arena
    Block **blocks           # of the arena: grants, and what else the worker may refer to
    uint32_t count

# Read the response at `at` of the record; 0 when that is not one, else the bytes that it takes. `status` is RESPONSE_*.
# A tensor that is not what it should be makes it an error of this response alone. Outputs that the model did not
# give are not wanted any more.
cdef size_t response_read(const Origin *origin, size_t at, Response *response, uint8_t *status) noexcept nogil
# The gRPC status of a code of TritonError.
cdef int status_of_code(uint32_t code) noexcept nogil
# The block among those of `origin`, or of the request's inputs, that holds this part of the arena; NULL: none.
cdef Block *holder_of(const Origin *origin, const Request *request, const uint8_t *data, size_t size) noexcept nogil
