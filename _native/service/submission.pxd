# The one entry for all requests for models.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.caching.coalescer cimport Coalescer
from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.codec cimport Str
from inferd._native.request.bridge cimport Bridge
from inferd._native.request.lane cimport Lane
from inferd._native.request.record cimport Recorder
from inferd._native.request.request cimport Request
from inferd._native.service.access cimport AccessPolicy
from inferd._native.service.model_waits cimport ModelAsk, ModelAsks, ModelWaits, refuse_fn
from inferd._native.service.table cimport Table
from inferd._native.tensors.placement cimport RegionAccess
from inferd._native.traceparent cimport TraceContext

cdef enum:
    TOUCHED = 16             # lanes whose instances are woken together
    AWAITED = 256            # lists of requests that wait for a model to be loaded; by hash of its name
    SEQUENCES = 1024         # lists of those that belong to sequences; by hash of the sequence

# A waiter (a request, or a step) needs this model, which is not loaded. `by_model`: a model has made the request, not a
# client. The load of the model `asked_by` waits for the response (NULL: no load does). Returns the question to Python,
# which has the model loaded or, later, calls `refuse`. NULL: no memory.
ctypedef ModelAsk *(*missed_fn)(void *context, void *waiter, refuse_fn refuse, Str name, bint by_model,
                                const char *asked_by) noexcept nogil

cdef struct Awaiting:
    # requests for models that are not loaded: until submission_resume, their deadline, or the end of their client
    Request *first
    Request *last

cdef struct Submission:
    # used in the front
    Table *table
    Bridge *bridge
    uint32_t max_inflight    # limit of Bridge.admitted_count
    Coalescer coalescer
    RegionAccess regions     # the shared memory of clients
    Recorder *recorder       # records single requests; NULL: off
    AccessPolicy *access     # the rules of access; NULL: every caller may use all models
    # called for a request whose caller may not use its model; the request has its error already
    void (*denied)(AccessPolicy *access, const Request *request) noexcept nogil
    bint sequences_shared    # callers may continue each other's sequences
    bint responses_apart     # no caller gets the response to another caller's request
    # Whether parameters of this name come from headers of the call only; NULL: none does
    bint (*is_header)(void *context, const uint8_t *name, size_t size) noexcept nogil
    void *is_header_context
    missed_fn missed         # loads missing models; NULL: requests for them are refused
    void *missed_context
    const char *asked_by     # while a request is submitted: the model whose load waits for its response; NULL: none
    Awaiting awaiting[AWAITED]
    ModelAsks sequences[SEQUENCES]   # of these requests, those of sequences
    ModelWaits model_waits   # steps of ensembles that wait for models
    Lane *touched[TOUCHED]   # lanes that have got requests since submission_wake
    uint32_t touched_count
    int64_t read_ns          # when the last read began
    int64_t woken_ns         # when the last read began that woke instances

cdef extern from *:
    # In place of a caller's id: the server itself asks, on behalf of an admitted request. The limit max_inflight and
    # the rules of access do not apply.
    """
    #define INFERD_CALLER_SERVER UINT64_MAX
    """
    const uint64_t CALLER_SERVER "INFERD_CALLER_SERVER"

# In the front: decode a message from outside, admit it, find its model, check and queue it. Takes over `block`. The
# request, whose sink is set, always comes back over the bridge. A negative timeout means none; `context` is the
# client's trace context, NULL for none.
cdef void submit_message(Submission *submission, Request *request, Block *block, const uint8_t *data, size_t size,
                         int64_t timeout_ns, uint64_t caller, const TraceContext *context=*) noexcept nogil
# submit_message for a call whose headers become parameters: `forwarded` bytes behind the message are further entries of
# its map `parameters`. They are decoded separately, so the message can neither hide nor change them.
cdef void submit_call(Submission *submission, Request *request, Block *block, const uint8_t *data, size_t size,
                      size_t forwarded, int64_t timeout_ns, uint64_t caller,
                      const TraceContext *context) noexcept nogil
# In the front: queue a request that the server itself has made. Its lane (table_find), its sink and, if it has one, its
# deadline are set, and its tensors are checked (request_check). It comes back over the bridge.
cdef void submit_request(Submission *submission, Request *request) noexcept nogil
# In the front: queue a request that the coalescer has held back; its bridge is set.
cdef void submit_work(Submission *submission, Request *request) noexcept nogil
# In the front: submit again the requests that wait for this model (NULL: for any model), which then do not wait again.
# With a status other than OK they are refused with that status. Steps of ensembles that wait go on or fail likewise.
cdef void submission_resume(Submission *submission, const Str *name, int status, const char *details) noexcept nogil
# Whether a request, or a step of an ensemble, waits for this model.
cdef bint submission_awaits(Submission *submission, Str name) noexcept nogil
# In the front: wake the instances for the requests that were submitted. The bridge calls it after each round;
# `context` is the Submission.
cdef void submission_wake(void *context) noexcept nogil
# Wake the instances after a read from a connection at `at_ns`; `another`: the read before was from another connection.
# True: the instances are woken at the end of the round of reads.
cdef bint submission_after_read(void *context, int64_t at_ns, bint another) noexcept nogil
