# The one way in, for everything that asks a model.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from _native.caching.coalescer cimport Coalescer
from _native.memory.resource cimport Block
from _native.protobuf.codec cimport Str
from _native.request.bridge cimport Bridge
from _native.request.record cimport Recorder
from _native.request.request cimport Request
from _native.scheduling.lane cimport Lane
from _native.service.access cimport AccessPolicy
from _native.service.placement cimport RegionAccess
from _native.service.table cimport Table
from _native.traceparent cimport TraceContext

cdef enum:
    TOUCHED = 16             # lanes whose instances are woken together

    AWAITED = 256            # lists of requests for models that are not there; by name, so that few look at each

# Called on the loop: a request waits for this model, which is not there; of another model's, or of a client's.
ctypedef void (*missed_fn)(void *context, Str name, bint by_model) noexcept nogil

cdef struct Awaiting:
    # requests for models that are not there, each until submission_resume, its deadline or its client's end
    Request *first
    Request *last

cdef struct Submission:
    # all on the loop
    Table *table
    Bridge *bridge
    uint32_t max_inflight    # requests in the house; 0: any number
    Coalescer coalescer
    RegionAccess regions     # shared memory of clients
    Recorder *recorder       # notes what happens to single requests; NULL: nobody does
    AccessPolicy *access     # who may use which model; NULL: everybody every
    # told of a request whose caller may not use its model; it has its error
    void (*denied)(AccessPolicy *access, const Request *request) noexcept nogil
    bint sequences_shared    # callers go on with each other's sequences
    bint answers_apart       # no caller gets an answer that another's request has brought
    # Whether a parameter with this name stands for a header of the call, and comes from nowhere else; NULL: none does
    bint (*is_header)(void *context, const uint8_t *name, size_t size) noexcept nogil
    void *is_header_context
    missed_fn missed         # loads models that are not there; NULL: requests for them are refused
    void *missed_context
    Awaiting awaiting[AWAITED]
    Lane *touched[TOUCHED]   # have got requests since submission_wake
    uint32_t touched_count

cdef extern from *:
    # as a caller: the server itself, on behalf of a request that it has admitted, and that must not wait for room
    """
    #define INFERD_CALLER_SERVER UINT64_MAX
    """
    const uint64_t CALLER_SERVER "INFERD_CALLER_SERVER"

# On the loop: decode, admit, find the model, check and queue a message from outside. Takes `block`. The request, whose
# sink is set, comes back over the bridge, whatever happens. A negative timeout stands for none; `context` is what its
# client has said of a trace, NULL for nothing.
cdef void submit_message(Submission *submission, Request *request, Block *block, const uint8_t *data, size_t size,
                         int64_t timeout_ns, uint64_t caller, const TraceContext *context=*) noexcept nogil
# The same for a call whose headers become parameters: `forwarded` bytes behind the message are further entries of its
# map `parameters`. They are decoded apart, so nothing in the message can hide or change them.
cdef void submit_call(Submission *submission, Request *request, Block *block, const uint8_t *data, size_t size,
                      size_t forwarded, int64_t timeout_ns, uint64_t caller,
                      const TraceContext *context) noexcept nogil
# On the loop: queue a request that the server itself has made: its lane is set (table_find), its tensors have been
# checked (request_check), its sink and, if it has one, its deadline are set. It comes back over the bridge.
cdef void submit_request(Submission *submission, Request *request) noexcept nogil
# On the loop: queue what a coalescer has held back; its bridge and its queued_ns are set.
cdef void submit_work(Submission *submission, Request *request) noexcept nogil
# On the loop: what waits for this model, or for any where the name is NULL, is submitted anew and does not wait again;
# with a status other than OK it is refused with it.
cdef void submission_resume(Submission *submission, const Str *name, int status, const char *details) noexcept nogil
# On the loop: wake the instances for what was submitted. The bridge calls it after each round; `context` is the
# Submission.
cdef void submission_wake(void *context) noexcept nogil
