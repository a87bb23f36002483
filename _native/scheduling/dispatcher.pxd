# Who gets which batch: all instances that wait, what they wait for, and the resources that they need. Time is an
# argument, and nothing here locks, waits, notifies or executes.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.request.callback cimport PostedCallback
from _native.request.request cimport Request
from _native.scheduling.policy cimport BatchPlan
from _native.threads cimport Condition, Mutex
from _native.timers cimport Timer

cdef struct ResourcePool:
    # one resource on one device, or everywhere
    int64_t total
    int64_t free

cdef struct Need:
    ResourcePool *pool
    int64_t count

cdef struct Claim:
    # of one instance to all that it needs at once
    Dispatcher *dispatcher
    Need *needs
    uint32_t need_count
    uint64_t priority        # the weight of an execution: 1 is the highest
    uint64_t virtual_time    # of those that wait the smallest goes first
    bint held

cdef enum ConsumerState:
    CONSUMER_AWAY            # its instance executes, or has not come yet
    CONSUMER_IDLE            # its thread waits, and it may be given a batch
    CONSUMER_CALLED          # it has been given something that its thread has not seen yet
    CONSUMER_LENT            # its thread waits while the loop executes a batch with the instance

cdef enum Given:
    GIVEN_BATCH              # execute it
    GIVEN_END                # nothing more will come
    GIVEN_BACK               # the loop cannot go on with the instance: see what it needs, and ask again

cdef struct Consumer:
    # one instance, as its lane sees it
    uint32_t index           # 0, 1, ... among the instances of the version
    Claim *claim             # to resources that it needs to execute; NULL: to none
    const char *why          # the batch that it got last was one, for people
    # Of an instance that the loop can use, too (see `_native.execution.remote`); else all NULL. Whether a batch can
    # begin now; on the loop: begin this one.
    bint (*ready)(Consumer *consumer) noexcept nogil
    void (*begin)(Consumer *consumer, Request *batch) noexcept nogil
    void *instance
    Given given              # what it has been called for
    # the dispatcher's
    ConsumerState state
    Line *line               # that it waits in
    Request *batch           # that it has been given
    int64_t watch_ns         # its thread looks then by itself, as long as it is idle; NEVER: it need not
    bint retired
    Consumer *previous       # among the idle ones of its line
    Consumer *next
    bint told                # it is in what a decision has called
    Consumer *next_called    # there
    Condition called         # by which its thread hears of it

cdef struct Consumers:
    # a list of them; see _native.list
    Consumer *first
    Consumer *last

cdef struct Line:
    # where the batches for some consumers come from: a queue, or the sequences of one instance
    Dispatcher *dispatcher
    void *owner              # Lane that it is of
    uint32_t index           # the scheduler's
    bint timed               # what it does depends on the time
    # The scheduler's: whether there is a batch now for an idle consumer (plan.count), else when to look again
    # (plan.wake_ns). When nothing will ever come any more, it sets `over`.
    void (*plan)(Line *line, int64_t now, BatchPlan *plan) noexcept nogil
    # Right after that: the batch. NULL: there is none after all, and plan.wake_ns says when to look again.
    Request *(*cut)(Line *line, int64_t now, BatchPlan *plan) noexcept nogil
    # An instance only now comes for a batch that it was given a while ago: add to its end what has come since and may
    # go with it. Why that is a batch; NULL: nothing has been added. The function is NULL where nothing may be.
    const char *(*grow)(Line *line, int64_t now, Request *batch) noexcept nogil
    bint over
    uint32_t beside          # idle consumers beside the one for which it is planned
    Consumers idle           # the one that came last in front
    uint32_t idle_count
    Consumer *watcher        # the idle consumer whose thread looks at `watched_ns`; NULL: none, or the loop does
    int64_t watched_ns       # NEVER: nobody looks by himself
    bint touched             # something has changed, and it has to be looked at
    Line *next_touched
    bint lacking             # it has a batch, but no idle consumer the resources for it
    Line *previous           # among such
    Line *next
    # of the loop, where it uses instances (`_native.scheduling.calling`)
    void *bridge             # Bridge of the requests; NULL: none has come yet
    Timer alarm              # at watched_ns
    PostedCallback silence   # ends the alarm when the lane is closed

cdef struct Lines:
    # a list of lines that lack resources; see _native.list
    Line *first
    Line *last

cdef struct Dispatcher:
    Mutex guard              # held by whoever calls a function of these or touches what they are about
    bint limited             # there are resources
    Line *touched            # a chain by Line.next_touched
    Lines lacking            # the one that has lacked them longest in front
    uint64_t virtual_time    # of the claim that was granted last

cdef void dispatcher_init(Dispatcher *self, bint limited) noexcept nogil
cdef void dispatcher_clear(Dispatcher *self) noexcept nogil
cdef void line_init(Line *line, Dispatcher *dispatcher, void *owner) noexcept nogil

# Something has changed in what waits in the line: requests came or left, it was closed, or time has passed.
cdef inline void line_touch(Line *line) noexcept nogil:
    if not line.touched:
        line.touched = True
        line.next_touched = line.dispatcher.touched
        line.dispatcher.touched = line

# The consumer waits in the line from now on; it gives back what it holds.
cdef void consumer_ask(Consumer *consumer, Line *line) noexcept nogil
# Its thread has seen that it was to watch until now.
cdef void consumer_watched(Consumer *consumer) noexcept nogil
# It waits no longer, and is to be called for that.
cdef void consumer_call(Consumer *consumer, Given given) noexcept nogil
# Give back the resources that it holds, if it does.
cdef void claim_give(Claim *claim) noexcept nogil

# Decide anew about all lines that have been touched, and, where resources have been given back, about those that lack
# some. `asking` is the consumer whose thread or loop decides; it goes first and need not be told. The consumers that
# have been called, and idle ones whose `watch_ns` is another one, as a chain by `next_called`. With `by_loop` consumers
# that the loop can use are not watchers: then `watched_ns` of a line without a watcher is the loop's affair.
cdef Consumer *dispatcher_decide(Dispatcher *self, int64_t now, Consumer *asking, bint by_loop) noexcept nogil
