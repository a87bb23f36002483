# The policy of sequence batching: which sequence has which slot of which instance, and which requests form a batch.
# Time is an argument, and nothing here locks, waits or answers.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from _native.execution.supply cimport EndReason
from _native.request.request cimport Correlation, Request
from _native.scheduling.lane cimport Lane
from _native.scheduling.policy cimport Policy
from _native.sequences.sequence cimport Sequence, Sequences, SequenceTable, StatePlan

cdef enum:
    EVICTIONS = 1024         # ids whose end is remembered

cdef struct InstanceSlots:
    # the slots of one instance
    Sequence **slots         # NULL: free
    Sequences ready          # oldest: those whose next request may run, in the order in which they came to that
    uint64_t ready_rows      # of those requests
    uint64_t wake_rows       # wake the instance when so many are ready
    int64_t wake_ns          # or at this time; sooner if one comes that has not so much
    bint stirred             # something has changed that may give a batch
    Sequence *like           # direct: whose request decides what the batch that was planned last looks like
    uint32_t waiting         # requests of its sequences that wait
    uint32_t running         # requests that the instance has
    bint released            # TRITONSERVER_DELAY_SCHEDULER holds it no longer

cdef struct Vacancy:
    uint32_t slot
    uint32_t instance

cdef struct Eviction:
    uint64_t hash            # of the id of a sequence that did not end by itself
    int32_t reason           # EndReason; END_NONE: nothing is remembered here

cdef struct Slots:
    Lane *lane
    void *bridge             # for requests that the policy makes; NULL: there is none yet

    # the policy
    bint direct              # a sequence keeps its row of the batch; else: oldest
    bint iterative           # each request is a sequence, which runs until it is not rescheduled
    bint notice              # a model hears of an end that no request brings
    bint tied                # a sequence that starts on a stream ends with it
    Policy policy            # of oldest; direct has its delay
    uint32_t per_instance    # slots of each instance
    int64_t idle_ns
    double min_utilization
    uint32_t max_backlog     # sequences that may wait for a slot; 0: any number
    int64_t timeout_ns       # how long they may; 0: as long as it takes, if their requests do not say
    StatePlan *plans         # signature.state_count of them
    bint steady              # all of one shape
    uint32_t hold            # TRITONSERVER_DELAY_SCHEDULER: no batch before so many requests wait
    uint32_t hold_backlog    # TRITONSERVER_BACKLOG_DELAY_SCHEDULER: and so many wait in the backlog

    # what there is
    SequenceTable table      # sequences that take further requests
    InstanceSlots **slot_sets
    uint32_t slot_set_count
    Vacancy *vacant          # binary heap from place 1; the lowest slot first, then the lowest instance
    uint32_t vacant_count
    Sequences backlog        # have no slot, in order of their start
    uint32_t backlog_waiting     # requests in it
    Sequences idle           # have a slot and no request, in the order in which they came to that
    uint32_t live            # sequences that have not ended
    uint32_t waiting         # requests
    uint64_t last_id         # given to a request without one
    bint draining            # no sequence begins any more
    bint closed              # and no request comes
    Eviction *evictions      # EVICTIONS of them, by hash
    Request *fallen          # a chain of requests that have failed meanwhile, for the caller to answer

cdef inline InstanceSlots *slots_set_of(const Slots *slots, const Sequence *sequence) noexcept nogil:
    # of a sequence that has a slot
    return slots.slot_sets[sequence.instance]

cdef inline Eviction *slots_eviction(const Slots *slots, uint64_t hash) noexcept nogil:
    # of the sequence whose id has this hash, or of another one
    return &slots.evictions[hash % EVICTIONS]

# One more instance. False: no memory.
cdef bint slots_add_set(Slots *slots) noexcept nogil
cdef void slots_clear(Slots *slots) noexcept nogil

# For requests that come (_native.sequences.entry) and go (_native.sequences.batch). A new sequence gets the lowest free
# slot; there is one.
cdef void slots_place(Slots *slots, Sequence *sequence) noexcept nogil
# Its slot goes to the next of the backlog.
cdef void slots_release(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil
# Its next request may run.
cdef void slots_ready(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil
# It is neither idle nor ready.
cdef void slots_unlist(Slots *slots, Sequence *sequence) noexcept nogil
# So many requests of it more, or fewer, wait.
cdef void slots_count(Slots *slots, Sequence *sequence, int32_t count) noexcept nogil
# Have every instance look.
cdef void slots_stir(Slots *slots) noexcept nogil
# A request that waits and all behind it fail; `text` NULL: no memory.
cdef void slots_let_fall(Slots *slots, Sequence *sequence, Request *first, int status, const char *text,
                         const char *reason) noexcept nogil
# The model is to hear of its end behind what waits in it, if it wants to and no request says so.
cdef void slots_notify(Slots *slots, Sequence *sequence, EndReason reason, int64_t now) noexcept nogil
# It ends; it has no requests.
cdef void slots_end(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil

# The instance is done with a request, whose state is kept or dropped: its sequence goes on.
cdef void slots_request_done(Slots *slots, Request *request, int64_t now) noexcept nogil
# The instance gives a request back to be run again, first in its sequence; its state is kept or dropped.
cdef void slots_again(Slots *slots, Request *request, int64_t now) noexcept nogil
# Nobody waits for the request any more: those behind it fall, and the sequence ends. False: it does not wait here.
cdef bint slots_remove(Slots *slots, Request *request, int64_t now) noexcept nogil
# The request has waited for as long as it may: its whole sequence falls, if it has no slot.
cdef void slots_expire(Slots *slots, Request *request, int64_t now) noexcept nogil
# End what has been idle for too long. When to ask again; NEVER when no sequence lives.
cdef int64_t slots_evict(Slots *slots, int64_t now) noexcept nogil
# End what is tied to this stream.
cdef void slots_leave(Slots *slots, uint64_t stream, int64_t now) noexcept nogil
# A sequence of this id begins elsewhere: end the one here, behind what waits in it.
cdef void slots_supersede(Slots *slots, const Correlation *correlation, int64_t now) noexcept nogil
# What is open on another lane ends there, and is not known here: have it said why when a request of it comes.
cdef void slots_remember(Slots *slots, const Slots *other) noexcept nogil
# No further requests; what waits is still taken.
cdef void slots_close(Slots *slots, int64_t now) noexcept nogil
# Nothing will come for this instance any more.
cdef bint slots_done(const Slots *slots, uint32_t instance) noexcept nogil
