# Supplied inputs: the batch provides them and no request contains them. They tell a model about sequences and ragged
# inputs.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t

from inferd._native.memory.resource cimport Block
from inferd._native.request.request cimport InputData, Request
from inferd._native.request.signature cimport MAX_RANK, Signature

cdef struct GatheredInput:
    # one contiguous input over all requests of a batch
    bint present
    const uint8_t *data
    size_t size
    Block *block             # contains `data`, one reference
    int64_t shape[MAX_RANK]  # batch dimension included
    uint32_t rank

# Why a sequence ends, as the value of an END_REASON input.
cdef enum EndReason:
    END_NONE = 0             # it does not end
    END_CLIENT = 1           # the client sent END
    END_IDLE = 2             # no request came for max_sequence_idle_microseconds
    END_CANCELLED = 3        # a request of it was cancelled, or its deadline passed
    END_STREAM = 4           # the stream on which it started has ended
    END_REPLACED = 5         # a new sequence starts under its id
    END_TIMEOUT = 6          # its time to wait for a slot is over; no model sees this
    END_UNLOADED = 7         # its version was replaced, and its time to drain is over; no model sees this

# Make the supplied input `index`, counted from 0 among the supplied ones, for these requests with `rows` rows
# together: a whole batch, or one request of it. Not for STATE, whose data are with the requests. False: no
# memory; `out` is then empty.
cdef bint supply(const Signature *signature, uint32_t index, Request *const *requests, uint32_t count, uint32_t rows,
                 GatheredInput *out) noexcept nogil
# Make every supplied input for each request separately, for executors that work request by request: `count` times
# supplied_count of them, with STATE. NULL: no memory, or nothing is supplied.
cdef InputData *supply_each(const Signature *signature, Request *const *requests, uint32_t count) noexcept nogil
cdef void supply_free(const Signature *signature, InputData *supplied, uint32_t count) noexcept nogil
