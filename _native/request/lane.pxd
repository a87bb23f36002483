# Lanes: the entry of requests into a model version. Behind it, a scheduler decides how they are executed.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from inferd._native.memory.arena cimport Arena
from inferd._native.request.order cimport ResponseOrder
from inferd._native.request.request cimport Correlation, Request, Terms
from inferd._native.request.signature cimport Signature
from inferd._native.request.statistics cimport Statistics

cdef enum Pushed:
    PUSHED
    LANE_CLOSED
    LANE_FULL
    LANE_REFUSED             # the request carries the reason

cdef struct Scheduler:
    # The functions of a kind of lane, as requests need them; instances use BatchScheduler of
    # `inferd._native.scheduling.waking`. `lane` is the beginning of the scheduler's own struct.

    # In the front: take a request, which then belongs to the lane. Does not block for long, and wakes no instance.
    # Anything but PUSHED: the request still belongs to the caller.
    Pushed (*push)(Lane *lane, Request *request) noexcept nogil
    # In the front, after requests were pushed: called once for all that arrived together, for larger batches and fewer
    # wake-ups.
    void (*wake)(Lane *lane) noexcept nogil
    # In the front: return a request to the caller because nobody waits for it any more. False: an instance has it.
    bint (*remove)(Lane *lane, Request *request) noexcept nogil
    # In the front: a request has waited until request.expires_ns, which `push` has set. True: it belongs to the caller,
    # which refuses it. False: it continues to wait, or an instance has it. NULL: as `remove`.
    bint (*expire)(Lane *lane, Request *request) noexcept nogil
    # In the front: set expires_ns and yields of a request that waits for the response to a shared one in this lane. The
    # terms of the former choose the queue policy.
    void (*limit)(Lane *lane, Request *request) noexcept nogil
    # In the front: a request that was pushed has these terms from now on. False: they no longer matter, because an
    # instance has the request.
    bint (*reconsider)(Lane *lane, Request *request, const Terms *terms) noexcept nogil
    # Refuse further requests; instances finish accepted requests and then end.
    void (*close)(Lane *lane) noexcept nogil
    # The number of waiting requests.
    uint32_t (*pending)(Lane *lane) noexcept nogil
    # Called when no request refers to the lane any more and no instance waits in it.
    void (*free)(Lane *lane) noexcept nogil

cdef struct SequenceHooks:
    # the functions of a lane whose requests belong to sequences

    # On the instance's thread, or in the front: the instance has finished a request whose `sequence` is set. Called
    # before the request is answered, or, if it left its batch, before it is freed; clears `sequence`.
    void (*request_done)(Lane *lane, Request *request) noexcept nogil
    # An instance reschedules the request, with its new state. It then belongs to the lane. False: the request has
    # failed, by its model or because there is no memory for its state; it ends as others do. NULL except for iterative
    # sequences.
    bint (*again)(Lane *lane, Request *request) noexcept nogil
    # Whether a sequence with this id takes further requests here. NULL for iterative sequences.
    bint (*has)(Lane *lane, const Correlation *correlation) noexcept nogil
    # In the front: a sequence with this id begins on the lane that replaces this one, so the sequence here ends. NULL
    # for iterative sequences.
    void (*end)(Lane *lane, const Correlation *correlation) noexcept nogil

cdef struct Lane:
    # the first member of every scheduler's struct
    Signature signature
    Statistics statistics
    int32_t in_flight        # atomic: requests that refer to this lane: queued, executed or on their way back
    uint32_t max_queue       # requests that may wait; 0: any number
    uint32_t level_count     # number of priorities, of which 1 is the highest; 0: the lane has none
    uint32_t default_level   # of requests with another priority
    bint coalesces           # execute identical requests in flight once
    bint caches              # keep responses for identical requests
    void *kept               # Memo of a response that the cache keeps, the first of a list; NULL: none
    uint64_t kept_since      # the cache's era from which on its responses count: older ones are forgotten
    bint fetches_late        # inputs that lie on a device stay there until an instance has taken their request
    bint may_lack            # it is an ensemble's: responses may lack outputs that were asked for
    ResponseOrder *order     # responses leave in the order of requests; NULL: when they are ready
    const Scheduler *scheduler
    Arena *arena             # large messages for the model are received there; NULL: in ordinary memory
    int64_t received         # bytes of clients' request messages; in the front
    int64_t sent             # bytes of the responses to them; see add_own
    const SequenceHooks *sequences   # NULL if requests are independent
    # Called by an instance, on any thread, with the rows and the time of a batch that it has executed. NULL if the
    # scheduler does not need it.
    void (*learn)(Lane *lane, uint32_t rows, int64_t ns) noexcept nogil

cdef inline uint32_t stricter(uint32_t a, uint32_t b) noexcept nogil:
    # the smaller of two limits, where 0 is none
    return min(a, b) if a and b else a + b

# A new structure of this size that begins with a Lane. The Lane is made from an inferd.backends.api.ModelSpec (read by
# attribute, not imported); the rest is zero. Raises ValueError or MemoryError.
cdef Lane *lane_new(size_t size, const Scheduler *scheduler, object spec, int64_t version) except NULL
# Free a lane, at the end of the scheduler's `free`.
cdef void lane_free(Lane *lane) noexcept nogil
# Free a request that counts as in flight in its lane, but was never pushed.
cdef void lane_discard(Request *request) noexcept nogil


cdef class LaneHandle:
    # a lane for Python; each kind of scheduler has a subclass, which makes it
    cdef Lane *lane
    cdef object limiter      # RateLimiter of its instances; None: they need no resources
