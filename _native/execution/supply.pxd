# Inputs that the batch provides and no request carries: what a model is told about sequences and ragged inputs.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t

from _native.memory.resource cimport Block
from _native.request.request cimport InputData, Request
from _native.request.signature cimport MAX_RANK, Signature

cdef struct GatheredInput:
    # one input over all requests of a batch, contiguous
    bint present
    const uint8_t *data
    size_t size
    Block *block             # holds `data`, one reference
    int64_t shape[MAX_RANK]  # batch dimension included
    uint32_t rank

# Why a sequence ends, as an END_REASON input tells it.
cdef enum EndReason:
    END_NONE = 0             # it goes on
    END_CLIENT = 1           # the client said so
    END_IDLE = 2             # nothing came for max_sequence_idle_microseconds
    END_CANCELLED = 3        # a request of it was cancelled, or its deadline passed
    END_STREAM = 4           # the stream that it is tied to has ended
    END_REPLACED = 5         # a new sequence starts under its id
    END_TIMEOUT = 6          # it has waited for a slot as long as it may; no model sees this
    END_UNLOADED = 7         # its version was replaced, and the time is over for which it went on; no model sees this

# Make the supplied input `index`, counted from 0 among the supplied, for these requests, which have `rows` rows
# together: for a whole batch, or for one request of it. Not for STATE, whose data lie with the requests. False: no
# memory; `out` then holds nothing.
cdef bint supply(const Signature *signature, uint32_t index, Request *const *requests, uint32_t count, uint32_t rows,
                 GatheredInput *out) noexcept nogil
# Every supplied input of each request on its own, for executors that work request by request: `count` times
# supplied_count of them, STATE included. NULL: no memory, or nothing is supplied.
cdef InputData *supply_each(const Signature *signature, Request *const *requests, uint32_t count) noexcept nogil
cdef void supply_free(const Signature *signature, InputData *supplied, uint32_t count) noexcept nogil
