# What a worker answers, read and checked.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t

from _native.memory.arena cimport Arena
from _native.memory.resource cimport Block
from _native.request.request cimport Response
from _native.threads cimport Mutex
from backends.python._loans cimport Ledger, LoanKind

cdef struct Origin:
    # where the responses of one packet are, and where their tensors may be
    const uint8_t *record
    size_t size
    Block *record_block      # holds the record; nobody else writes to it
    const Arena *arena
    Mutex *guard             # of the ledger
    const Ledger *ledger
    LoanKind kind            # tensors may lie in loans of this kind, and among the inputs of the request

# Read the response at `at` of the record; 0 when that is not one, else the bytes that it takes. `status` is RESPONSE_*.
# A tensor that is not what it should be makes it an error of this response alone. Outputs that the model did not
# give are not wanted any more.
cdef size_t response_read(const Origin *origin, size_t at, Response *response, uint8_t *status) noexcept nogil
# The gRPC status of a code of TritonError.
cdef int status_of_code(uint32_t code) noexcept nogil
# What the head of the response at `at` says: its size, 0 when it is none, and its RESPONSE_*.
cdef size_t response_peek(const Origin *origin, size_t at, uint8_t *status) noexcept nogil
