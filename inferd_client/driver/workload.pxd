# Makes requests and verifies responses.

from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc

from inferd_client.driver.call cimport Call

cdef enum Verdict:
    # the result of `verify`; `tally.VERDICTS` has the names for reports
    CORRECT = 0
    WRONG_STATUS = 1
    EARLY_DEADLINE = 2       # DEADLINE_EXCEEDED before the deadline
    MALFORMED = 3            # not one whole gRPC message, or not a ModelInferResponse
    WRONG_MODEL = 4
    WRONG_ID = 5
    WRONG_OUTPUTS = 6        # an output is missing, repeated, not requested, or of another datatype
    WRONG_SHAPE = 7
    WRONG_BYTES = 8
    VERDICT_COUNT = 9

# Set body, body_size and body_stays; False if there is no memory.
ctypedef bint (*prepare_fn)(void *context, Call *call) noexcept nogil
# Compare the response with the request.
ctypedef Verdict (*verify_fn)(void *context, Call *call) noexcept nogil
# Whether further calls must follow on the slot of a call that has ended, although the run is at its end.
ctypedef bint (*unfinished_fn)(void *context, const Call *call) noexcept nogil

cdef class Workload:
    # called without the GIL
    cdef prepare_fn prepare
    cdef verify_fn verify    # NULL: responses are counted, and their bytes dropped
    cdef unfinished_fn unfinished  # NULL: none must
    cdef void *context

# Make call.scratch at least `size` bytes; its content is lost. False if there is no memory.
cdef inline bint call_reserve(Call *call, size_t size) noexcept nogil:
    if size > call.scratch_capacity:
        free(call.scratch)
        call.scratch = <uint8_t *> malloc(size)
        call.scratch_capacity = size if call.scratch != NULL else 0
    return call.scratch != NULL
