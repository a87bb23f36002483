# The load driver's view of one call, shared with the modules that make requests and judge answers.

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

cdef enum:
    MESSAGE_LIMIT = 160      # bytes of grpc-message kept for the report

cdef enum Verdict:
    # what `judge` says about an answer; the names shown in reports are in VERDICTS of driver.pyx
    CORRECT = 0
    WRONG_STATUS = 1
    EARLY_DEADLINE = 2       # DEADLINE_EXCEEDED before the deadline
    MALFORMED = 3            # not one whole gRPC message, or not a ModelInferResponse
    WRONG_MODEL = 4
    WRONG_ID = 5
    WRONG_OUTPUTS = 6        # an output is missing, repeated, not asked for, or of another datatype
    WRONG_SHAPE = 7
    WRONG_BYTES = 8
    VERDICT_COUNT = 9

cdef struct Call:
    uint64_t index           # number of this request within its run, from 0
    uint64_t nonce           # pseudo-random, a function of the run's seed and the index only
    uint64_t due_ns          # when it was (or, in an open loop, should have been) sent
    uint64_t elapsed_ns      # from then to its end
    void *connection
    Call *next_free
    int32_t stream           # -1: the slot is free
    int32_t doom             # place in the connection's list of calls to reset; -1: not there
    uint64_t cancel_at       # reset once the connection has seen this many calls end
    bint cancelled
    uint32_t timeout_us      # grpc-timeout; 0: none
    char timeout_text[16]
    # written by `prepare`
    const uint8_t *body      # framed gRPC message
    size_t body_size
    bint body_stays          # unchanged until the end of the run: sent by reference
    size_t sent
    # memory for the workload, kept from call to call
    uint8_t *scratch
    size_t scratch_capacity
    # the answer; its bytes are kept only when the workload judges
    uint8_t *answer
    size_t answer_size
    size_t answer_capacity
    int32_t http_status      # 0: none seen
    int32_t grpc_status      # -1: none seen
    char message[MESSAGE_LIMIT]

# Set body, body_size and body_stays; False when there is no memory.
ctypedef bint (*prepare_fn)(void *context, Call *call) noexcept nogil
# Compare the answer with what the request asked for.
ctypedef Verdict (*judge_fn)(void *context, Call *call) noexcept nogil

cdef class Workload:
    """Makes requests and judges answers; called without the GIL."""
    cdef prepare_fn prepare
    cdef judge_fn judge      # NULL: answers are counted, their bytes dropped
    cdef void *context

# Make call.scratch at least `size` bytes; its content is lost. False when there is no memory.
cdef inline bint call_reserve(Call *call, size_t size) noexcept nogil:
    if size > call.scratch_capacity:
        free(call.scratch)
        call.scratch = <uint8_t *> malloc(size)
        call.scratch_capacity = size if call.scratch != NULL else 0
    return call.scratch != NULL

# splitmix64's finaliser: a bijection that spreads every input bit over the output.
cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    x = (x ^ (x >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t> 0x94D049BB133111EB
    return x ^ (x >> 31)
