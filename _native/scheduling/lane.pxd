# Lanes: the entrance of a model version. What happens behind it is the scheduler's affair.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t

from _native.inference.request cimport Correlation, Request
from _native.inference.signature cimport Signature
from _native.inference.statistics cimport Statistics
from _native.memory.arena cimport Arena
from _native.scheduling.limiter cimport Claim
from _native.scheduling.order cimport Order
from _native.threads cimport Condition

cdef enum Pushed:
    PUSHED
    LANE_CLOSED
    LANE_FULL
    LANE_REFUSED             # the request carries the reason

cdef enum Keeper:
    KEPT_BY_THREAD           # its thread takes batches and executes them
    KEPT_BY_NOBODY           # its thread waits in `take`, and the loop may begin a batch
    KEPT_BY_LOOP             # the loop has begun one

cdef struct Seat:
    # one instance, as its lane sees it
    uint32_t index           # 0, 1, ... among the instances of the version
    void *own                # of the scheduler
    const char *why          # the batch that was taken last was one, for people
    int32_t retired          # atomic: the instance is to end; take returns NULL
    Claim *claim             # to resources that it needs to execute; NULL: to none
    # Of an instance that the loop can use, too (see `_native.execution.remote`); else all NULL. On the loop: whether a
    # batch can begin now, and begin this one, which then belongs to the instance.
    bint (*ready)(Seat *seat) noexcept nogil
    void (*begin)(Seat *seat, Request *batch) noexcept nogil
    void *instance
    # The scheduler's, which guards them:
    Keeper keeper
    Condition called         # by which its thread hears that it is KEPT_BY_THREAD
    Seat *next_free
    Request *handed          # what the loop has taken, to be executed by the thread
    bint recalled            # take has returned NULL because the instance itself needs its thread

cdef struct Scheduler:
    # What a kind of lane does. Each function takes what lies behind the lane: the struct that begins with it.

    # Take a request in, which then belongs to the lane. Never blocks for long; does not wake instances. Anything but
    # PUSHED: the request is still the caller's. On the loop.
    Pushed (*push)(Lane *lane, Request *request) noexcept nogil
    # Requests have been pushed: called once for all that arrived together, for larger batches and fewer wake-ups.
    void (*wake)(Lane *lane) noexcept nogil
    # Give a request back to the caller because nobody waits for it any more. False: an instance has it. On the loop.
    bint (*remove)(Lane *lane, Request *request) noexcept nogil
    # On an instance's thread: wait for its next batch, a chain by Request.next, oldest first, now the caller's. NULL:
    # the lane is closed and empty, or the seat is retired, or seat.recalled. NULL for a lane without instances. A
    # scheduler that waits for seat.claim itself, while its requests can still be removed, sets it held
    # (`_native.scheduling.limiter`).
    Request *(*take)(Lane *lane, Seat *seat) noexcept nogil
    # Refuse further requests; instances finish what was accepted and then get NULL.
    void (*close)(Lane *lane) noexcept nogil
    # Requests that wait.
    uint32_t (*pending)(Lane *lane) noexcept nogil
    # No request refers to the lane any more and no instance waits in it.
    void (*free)(Lane *lane) noexcept nogil
    # A request that waits here has done so until request.expires_ns, which push has set. True: it is the caller's, to
    # be refused. False: it may wait on, or an instance has it. On the loop. NULL: like remove.
    bint (*expire)(Lane *lane, Request *request) noexcept nogil
    # On the loop, with a seat whose batch it has ended: the seat's next batch. NULL: the loop has it no more. Both are
    # NULL where only threads take.
    Request *(*next)(Lane *lane, Seat *seat) noexcept nogil
    # On the loop: the seat's thread is to go on, with this batch, which nobody has begun, or recalled (NULL).
    void (*recall)(Lane *lane, Seat *seat, Request *batch) noexcept nogil

cdef struct Lane:
    # the head of every scheduler's struct
    Signature signature
    Statistics statistics
    int32_t in_flight        # atomic: requests that refer to this lane, queued, running or on their way back
    uint32_t max_queue       # requests that may wait; 0: any number
    bint coalesces           # identical requests in flight are executed once
    bint caches              # answers are kept for identical requests
    bint fetches_late        # inputs that lie on a device stay there until an instance has taken their request
    Order *order             # answers leave in the order in which requests came; NULL: as they are ready
    const Scheduler *scheduler
    Arena *arena             # into which large messages for the model are received; NULL: into ordinary memory
    # NULL but for sequences: an instance, on its thread or over the bridge, is done with a request whose `sequence` is
    # set. Called before the request is answered, or before it is freed when it left its batch; clears `sequence`.
    void (*settle)(Lane *lane, Request *request) noexcept nogil
    # NULL but for iterative sequences: an instance wants to be given the request again, with the state that it has
    # brought. It belongs to the lane then.
    void (*again)(Lane *lane, Request *request) noexcept nogil
    # NULL but where batches are made by what they take: an instance, on any thread, has executed one of so many rows
    # within so many nanoseconds.
    void (*learn)(Lane *lane, uint32_t rows, int64_t ns) noexcept nogil
    # NULL but for sequences of several requests: whether one of this id takes further requests here.
    bint (*has_sequence)(Lane *lane, const Correlation *correlation) noexcept nogil
    # NULL like that one: a sequence of this id begins on the lane that has taken the place of this one, so the one here
    # takes nothing more. On the loop.
    void (*end_sequence)(Lane *lane, const Correlation *correlation) noexcept nogil

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
