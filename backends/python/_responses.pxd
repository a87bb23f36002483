# Reads and checks the responses of a worker.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t

from inferd._native.memory.arena cimport Arena
from inferd._native.memory.resource cimport Block
from inferd._native.request.request cimport Response
from inferd._native.threads cimport Mutex
from inferd.backends.python._loans cimport Loans, LoanKind

cdef struct ResponseSource:
    # the packet that has the responses, and the memory in which their tensors may be
    const uint8_t *record
    size_t size
    Block *record_block      # contains the record, to which no one else writes
    const Arena *arena
    Mutex *guard             # of the loans
    const Loans *loans
    LoanKind kind            # tensors may be in loans of this kind, and in the inputs of the request

# Read the response at `at` of the record; returns its size in bytes, 0 if it is malformed. `status` is RESPONSE_*. An
# invalid tensor makes this response alone an error. Outputs that the model did not set are not wanted any more.
cdef size_t response_read(const ResponseSource *source, size_t at, Response *response, uint8_t *status) noexcept nogil
# The gRPC status of a code of TritonError.
cdef int status_of_code(uint32_t code) noexcept nogil
# Read the head of the response at `at`: returns its size, 0 if it is malformed, and sets its RESPONSE_*.
cdef size_t response_peek(const ResponseSource *source, size_t at, uint8_t *status) noexcept nogil
