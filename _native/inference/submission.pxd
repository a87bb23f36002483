# The one way in, for everything that asks a model.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from _native.caching.coalescer cimport Coalescer
from _native.inference.bridge cimport Bridge
from _native.inference.placement cimport RegionAccess
from _native.inference.request cimport Request
from _native.inference.table cimport Table
from _native.memory.resource cimport Block
from _native.scheduling.lane cimport Lane
from _native.transport.access cimport Gate

cdef enum:
    TOUCHED = 16             # lanes whose instances are woken together

cdef struct Submission:
    # all on the loop
    Table *table
    Bridge *bridge
    uint32_t max_inflight    # requests in the house; 0: any number
    Coalescer coalescer
    RegionAccess regions     # shared memory of clients
    Gate *gate               # who may use which model; NULL: everybody every
    Lane *touched[TOUCHED]   # have got requests since submission_wake
    uint32_t touched_count

cdef extern from *:
    # as a caller: the server itself, on behalf of a request that it has admitted, and that must not wait for room
    """
    #define INFERD_CALLER_SERVER UINT64_MAX
    """
    const uint64_t CALLER_SERVER "INFERD_CALLER_SERVER"

# On the loop: decode, admit, find the model, check and queue a message from outside. Takes `block`. The request, whose
# sink is set, comes back over the bridge, whatever happens. A negative timeout stands for none.
cdef void submit_message(Submission *submission, Request *request, Block *block, const uint8_t *data, size_t size,
                         int64_t timeout_ns, uint64_t caller) noexcept nogil
# On the loop: queue a request that the server itself has made: its lane is set (table_find), its tensors have been
# checked (request_check), its sink and, if it has one, its deadline are set. It comes back over the bridge.
cdef void submit_request(Submission *submission, Request *request) noexcept nogil
# On the loop: queue what a coalescer has held back; its bridge and its queued_ns are set.
cdef void submit_work(Submission *submission, Request *request) noexcept nogil
# On the loop: wake the instances for what was submitted. The bridge calls it after each round; `context` is the
# Submission.
cdef void submission_wake(void *context) noexcept nogil
