# Decides which instance gets which batch: knows all waiting instances, their lines, and the resources that they need.
# Time is an argument. Nothing here locks, waits, notifies or executes.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from inferd._native.request.callback cimport PostedCallback
from inferd._native.request.request cimport Request
from inferd._native.scheduling.policy cimport BatchPlan
from inferd._native.threads cimport Condition, Mutex
from inferd._native.timers cimport Timer

cdef struct ResourcePool:
    # one resource of one device, or of all
    int64_t total
    int64_t free

cdef struct Need:
    ResourcePool *pool
    int64_t count

cdef struct Claim:
    # the claim of one instance to the resources that it needs at the same time
    Dispatcher *dispatcher
    Need *needs
    uint32_t need_count
    uint64_t priority        # the weight of an execution: 1 is the highest
    uint64_t virtual_time    # of the waiting claims, the one with the smallest value goes first
    bint held

cdef enum ConsumerState:
    CONSUMER_AWAY            # its instance executes, or has not asked yet
    CONSUMER_IDLE            # its thread waits, and may get a batch
    CONSUMER_WOKEN           # it was given a batch, or an end, that its thread has not seen yet
    CONSUMER_LENT            # its thread waits while the front executes a batch with the instance

cdef enum Given:
    GIVEN_BATCH              # execute it
    GIVEN_END                # nothing more will come
    GIVEN_BACK               # the front cannot continue with the instance: get ready, and ask again

cdef struct Bell:
    # A condition that may outlive its consumer. So a thread can ring it when it has released the lock, and the woken
    # thread, which may be gone by then, finds the lock free.
    Condition rung
    int32_t references       # atomic: the consumer's, and one for each thread that is about to ring

cdef struct Consumer:
    # one instance, as its lane sees it
    uint32_t index           # 0, 1, ... among the instances of the version
    Claim *claim             # to the resources that it needs to execute; NULL: none
    const char *why          # the reason for its last batch, as text
    # For an instance that the front can use, too (see `inferd._native.execution.remote`); otherwise NULL. `ready`:
    # whether a batch can begin now; `begin`, in the front: begin this one.
    bint (*ready)(Consumer *consumer) noexcept nogil
    void (*begin)(Consumer *consumer, Request *batch) noexcept nogil
    void *instance
    Given given              # why it was woken
    # for the dispatcher
    ConsumerState state
    Line *line               # the line in which it waits
    Request *batch           # the batch that it was given
    int64_t watch_ns         # its thread looks again at this time, while it is idle; NEVER: it need not
    bint retired
    Consumer *previous       # among the idle ones of its line
    Consumer *next
    bint chained             # it is in the chain of woken consumers
    Consumer *next_woken     # in that chain
    Bell *bell               # rung for its thread

cdef struct Consumers:
    # a list of them; see inferd._native.list
    Consumer *first
    Consumer *last

cdef struct Line:
    # the source of batches for some consumers: a queue, or the sequences of one instance
    Dispatcher *dispatcher
    void *owner              # Lane of the line
    uint32_t index           # for the scheduler
    bint timed               # its batches depend on the time
    # Set by the scheduler. Find out whether there is a batch now for an idle consumer (plan.count), or when to look
    # again (plan.wake_ns). Sets `over` if no batch will ever come again.
    void (*plan)(Line *line, int64_t now, BatchPlan *plan) noexcept nogil
    # Right after `plan`: cut the batch. NULL: there is none after all; look again at plan.wake_ns.
    Request *(*cut)(Line *line, int64_t now, BatchPlan *plan) noexcept nogil
    # When an instance comes late for the batch that it was given: append requests that have come since and may join.
    # Returns the reason for the batch; NULL: none was appended. The pointer is NULL if requests may never join.
    const char *(*grow)(Line *line, int64_t now, Request *batch) noexcept nogil
    # Whether there is a batch that later requests neither join nor overtake. The pointer is NULL if there never is.
    bint (*full)(const Line *line) noexcept nogil
    bint over
    uint32_t beside          # idle consumers beside the one for which a batch is planned
    Consumers idle           # the one that came last is first
    uint32_t idle_count
    Consumer *watcher        # the idle consumer whose thread looks again at `watched_ns`; NULL: none, or the front does
    int64_t watched_ns       # NEVER: at no time
    bint touched             # the line has changed since the last decision
    Line *next_touched
    bint lacking             # the line has a batch, but no idle consumer has the resources for it
    uint64_t passed_since    # virtual time of the dispatcher when that began
    Line *previous           # among lacking lines
    Line *next
    # for the front, which uses instances (`inferd._native.scheduling.waking`)
    void *bridge             # Bridge of the requests; NULL: no request has come yet
    Timer alarm              # set to watched_ns
    PostedCallback silence   # clears the alarm when the lane is closed

cdef struct Lines:
    # a list of lines that lack resources; see inferd._native.list
    Line *first
    Line *last

cdef struct Dispatcher:
    Mutex guard              # the lock: held during calls of these functions, and while their data are accessed
    bint limited             # there are resources
    Line *touched            # chain by Line.next_touched
    Lines lacking            # the one that has lacked them longest is first
    uint64_t virtual_time    # of the last claim that was granted
    const Claim *overdue     # while a decision is made: others leave the resources free that this one needs

cdef void dispatcher_init(Dispatcher *self, bint limited) noexcept nogil
cdef void dispatcher_clear(Dispatcher *self) noexcept nogil
cdef void line_init(Line *line, Dispatcher *dispatcher, void *owner) noexcept nogil

# The line has changed: requests came or left, it was closed, or time has passed.
cdef inline void line_touch(Line *line) noexcept nogil:
    if not line.touched:
        line.touched = True
        line.next_touched = line.dispatcher.touched
        line.dispatcher.touched = line

# The consumer waits in the line from now on, and gives back what it holds.
cdef void consumer_ask(Consumer *consumer, Line *line) noexcept nogil
# The consumer's thread has woken at `watch_ns`, and the line is to be looked at.
cdef void consumer_watched(Consumer *consumer) noexcept nogil
# The consumer stops waiting, and is woken for `given`.
cdef void consumer_wake(Consumer *consumer, Given given) noexcept nogil
# Give back the resources that the claim holds, if any.
cdef void claim_give(Claim *claim) noexcept nogil

# Decide about all lines that have changed, and, if resources were given back, about lines that lack some. `asking` is
# the consumer whose thread calls this, or for which the front does: it goes first and is not woken. Returns woken
# consumers, and idle ones whose `watch_ns` has changed, as a chain by `next_woken`. With `by_front`, consumers that the
# front can use do not look again themselves: the front takes care of `watched_ns` of lines without a watcher.
cdef Consumer *dispatcher_decide(Dispatcher *self, int64_t now, Consumer *asking, bint by_front) noexcept nogil
