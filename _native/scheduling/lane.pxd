# Lanes: where requests enter a model version. What happens behind it is the scheduler's affair.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t

from _native.memory.arena cimport Arena
from _native.request.request cimport Correlation, Request
from _native.request.signature cimport Signature
from _native.request.statistics cimport Statistics
from _native.scheduling.dispatcher cimport Consumer, Line
from _native.scheduling.limiter cimport RateLimiter
from _native.scheduling.order cimport ResponseOrder

cdef enum Pushed:
    PUSHED
    LANE_CLOSED
    LANE_FULL
    LANE_REFUSED             # the request carries the reason

cdef struct Scheduler:
    # What a kind of lane does. Each function takes what lies behind the lane: the struct that begins with it.

    # Take a request in, which then belongs to the lane. Never blocks for long; does not wake instances. Anything but
    # PUSHED: the request is still the caller's. On the loop.
    Pushed (*push)(Lane *lane, Request *request) noexcept nogil
    # Requests have been pushed: called once for all that arrived together, for larger batches and fewer wake-ups. On
    # the loop.
    void (*wake)(Lane *lane) noexcept nogil
    # Give a request back to the caller because nobody waits for it any more. False: an instance has it. On the loop.
    bint (*remove)(Lane *lane, Request *request) noexcept nogil
    # A request that waits here has done so until request.expires_ns, which push has set. True: it is the caller's, to
    # be refused. False: it may wait on, or an instance has it. On the loop. NULL: like remove.
    bint (*expire)(Lane *lane, Request *request) noexcept nogil
    # Where the batches of this instance come from. NULL: from nowhere.
    Line *(*line)(Lane *lane, const Consumer *consumer) noexcept nogil
    # Refuse further requests; instances finish what was accepted and then end.
    void (*close)(Lane *lane) noexcept nogil
    # Requests that wait.
    uint32_t (*pending)(Lane *lane) noexcept nogil
    # No request refers to the lane any more and no instance waits in it.
    void (*free)(Lane *lane) noexcept nogil

cdef struct SequenceHooks:
    # what a lane has where requests belong to sequences

    # An instance, on its thread or over the bridge, is done with a request whose `sequence` is set. Called before the
    # request is answered, or before it is freed when it left its batch; clears `sequence`.
    void (*request_done)(Lane *lane, Request *request) noexcept nogil
    # An instance wants to be given the request again, with the state that it has brought. It belongs to the lane then.
    # NULL but for iterative sequences.
    void (*again)(Lane *lane, Request *request) noexcept nogil
    # Whether a sequence of this id takes further requests here. NULL for iterative sequences.
    bint (*has)(Lane *lane, const Correlation *correlation) noexcept nogil
    # A sequence of this id begins on the lane that has taken the place of this one, so the one here takes nothing more.
    # On the loop. NULL like that one.
    void (*end)(Lane *lane, const Correlation *correlation) noexcept nogil

cdef struct Lane:
    # the head of every scheduler's struct
    Signature signature
    Statistics statistics
    int32_t in_flight        # atomic: requests that refer to this lane, queued, running or on their way back
    uint32_t max_queue       # requests that may wait; 0: any number
    bint coalesces           # identical requests in flight are executed once
    bint caches              # answers are kept for identical requests
    bint fetches_late        # inputs that lie on a device stay there until an instance has taken their request
    ResponseOrder *order     # answers leave in the order in which requests came; NULL: as they are ready
    const Scheduler *scheduler
    Arena *arena             # into which large messages for the model are received; NULL: into ordinary memory
    int64_t received         # bytes of the messages of clients' requests; on the loop
    int64_t sent             # and of the answers to them; see add_own
    const SequenceHooks *sequences   # NULL where requests are independent
    # NULL but where batches are made by what they take: an instance, on any thread, has executed one of so many rows
    # within so many nanoseconds.
    void (*learn)(Lane *lane, uint32_t rows, int64_t ns) noexcept nogil

cdef inline uint32_t stricter(uint32_t a, uint32_t b) noexcept nogil:
    # of two limits, where 0 is none
    return min(a, b) if a and b else a + b

# A structure of this size that begins with a Lane: its head is made from a backends.api.ModelSpec (read by attribute),
# the rest is zero. Raises ValueError or MemoryError.
cdef Lane *lane_new(size_t size, const Scheduler *scheduler, object spec, int64_t version) except NULL
# The opposite, at the end of the scheduler's `free`.
cdef void lane_free(Lane *lane) noexcept nogil
# Free a request that was made for the lane, which counts it, and that was never pushed.
cdef void lane_discard(Request *request) noexcept nogil


cdef class LaneHandle:
    # owns a lane for Python; each kind of scheduler has its subclass, which makes it
    cdef Lane *lane
    cdef RateLimiter limiter  # of its instances; None: they need no resources
