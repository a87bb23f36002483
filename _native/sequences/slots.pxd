# The policy of sequence batching: which sequence has which slot of which instance, and which requests form a batch.
# Time is an argument. Nothing here locks, waits or answers.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from inferd._native.execution.supply cimport EndReason
from inferd._native.refusal cimport Refusal
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Correlation, Request, Terms
from inferd._native.scheduling.policy cimport Policy
from inferd._native.sequences.sequence cimport Sequence, Sequences, SequenceTable, StatePlan

cdef enum:
    EVICTIONS = 1024         # ids for which the reason of the end is remembered
    STREAMS = 256            # lists of sequences that are tied to streams

cdef struct InstanceSlots:
    # the slots of one instance
    Sequence **slots         # NULL: free
    Sequences ready          # oldest: sequences whose next request may run, in the order in which they became ready
    uint64_t ready_rows      # of those requests
    uint64_t wake_rows       # wake the instance when so many rows are ready
    int64_t wake_ns          # or at this time; sooner if a request with less time comes
    bint stirred             # something has changed, so there may be a batch
    Sequence *like           # direct: the sequence whose request determines the shapes of the last planned batch
    uint32_t waiting         # waiting requests of its sequences
    uint32_t running         # requests that the instance executes
    bint released            # TRITONSERVER_DELAY_SCHEDULER does not hold it any more

cdef struct Vacancy:
    uint32_t slot
    uint32_t instance

cdef struct Eviction:
    uint64_t hash            # of the id of a sequence that the server ended
    int32_t reason           # EndReason; END_NONE: the entry is empty

cdef struct Slots:
    Lane *lane
    void *bridge             # for requests that the policy makes; NULL: not set yet

    # the configuration
    bint direct              # a sequence keeps its row of the batch; otherwise: oldest
    bint iterative           # each request is a sequence, which runs until it is not rescheduled
    bint notice              # if a sequence ends without a request marked END, the sequencer tells the model
    bint tied                # a sequence that starts on a stream ends with it
    Policy policy            # "oldest" uses all of it, "direct" only its delay
    uint32_t per_instance    # slots of each instance
    int64_t idle_ns
    double min_utilization
    uint32_t max_backlog     # sequences that may wait for a slot; 0: any number
    int64_t timeout_ns       # how long they may wait; 0: no limit unless their requests set one
    StatePlan *plans         # signature.state_count plans
    bint steady              # all states have fixed shapes
    uint32_t hold            # TRITONSERVER_DELAY_SCHEDULER: no batch before so many requests wait
    uint32_t hold_backlog    # TRITONSERVER_BACKLOG_DELAY_SCHEDULER: and so many wait in the backlog

    # the current state
    SequenceTable table      # sequences that take further requests
    Sequence *tied_to[STREAMS]   # sequences that end with a stream, in lists by the number of the stream
    InstanceSlots **slot_sets
    uint32_t slot_set_count
    Vacancy *vacant          # binary heap from index 1: the lowest slot first, then the lowest instance
    uint32_t vacant_count
    Sequences backlog        # sequences without a slot, in the order of their start
    uint32_t backlog_waiting     # requests in the backlog
    Sequences idle           # sequences with a slot and without requests, in the order in which they became idle
    uint32_t live            # sequences that have not ended
    uint32_t waiting         # waiting requests
    uint64_t last_id         # for requests without an id
    bint draining            # no sequence that is not iterative may begin
    bint closed              # and no request may come
    Eviction *evictions      # EVICTIONS of them, by hash
    Request *fallen          # a chain of requests that have failed, for the caller to answer

cdef inline InstanceSlots *slots_set_of(const Slots *slots, const Sequence *sequence) noexcept nogil:
    # the set with the slot of a sequence, which has one
    return slots.slot_sets[sequence.instance]

cdef inline Eviction *slots_eviction(const Slots *slots, uint64_t hash) noexcept nogil:
    # the entry for ids with this hash; other ids may share it
    return &slots.evictions[hash % EVICTIONS]

# Add the slots of an instance. False: no memory.
cdef bint slots_add_set(Slots *slots) noexcept nogil
cdef void slots_clear(Slots *slots) noexcept nogil

# `entry` and `batch` call the following functions.

# Give a new sequence the lowest free slot; there must be one.
cdef void slots_place(Slots *slots, Sequence *sequence) noexcept nogil
# Tie the sequence to this stream, and no longer to another; 0: to none.
cdef void slots_tie(Slots *slots, Sequence *sequence, uint64_t stream) noexcept nogil
# Give the sequence's slot to the next of the backlog.
cdef void slots_release(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil
# The sequence's next request may run.
cdef void slots_ready(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil
# Remove the sequence from the idle and ready lists.
cdef void slots_unlist(Slots *slots, Sequence *sequence) noexcept nogil
# Add `count` to the number of the sequence's waiting requests.
cdef void slots_count(Slots *slots, Sequence *sequence, int32_t count) noexcept nogil
# Make every instance look for a batch.
cdef void slots_stir(Slots *slots) noexcept nogil
# Fail a waiting request and all requests behind it; `text` NULL: no memory.
cdef void slots_let_fall(Slots *slots, Sequence *sequence, Request *first, int status, const char *text,
                         Refusal refusal) noexcept nogil
# Tell the model of the sequence's end, behind its waiting requests, if the model wants it and no request has END.
cdef void slots_notify(Slots *slots, Sequence *sequence, EndReason reason, int64_t now) noexcept nogil
# End the sequence, which has no requests.
cdef void slots_end(Slots *slots, Sequence *sequence, int64_t now) noexcept nogil

# The instance has finished a request, whose new state the caller has committed or dropped: its sequence continues.
cdef void slots_request_done(Slots *slots, Request *request, int64_t now) noexcept nogil
# The instance reschedules a request, whose new state the caller has committed or dropped: it is the first of its
# sequence again.
cdef void slots_again(Slots *slots, Request *request, int64_t now) noexcept nogil
# No client waits for the request any more: fail those behind it, and end the sequence. False: it does not wait here.
cdef bint slots_remove(Slots *slots, Request *request, int64_t now) noexcept nogil
# A request has other terms. False: it does not wait for a slot.
cdef bint slots_reconsider(Slots *slots, Request *request, const Terms *terms) noexcept nogil
# The request's time to wait is over: fail its whole sequence, if that has no slot.
cdef void slots_expire(Slots *slots, Request *request, int64_t now) noexcept nogil
# End sequences that have been idle too long. Returns when to call again; NEVER if no sequence is live.
cdef int64_t slots_evict(Slots *slots, int64_t now) noexcept nogil
# End sequences that are tied to this stream.
cdef void slots_leave(Slots *slots, uint64_t stream, int64_t now) noexcept nogil
# A sequence with this id begins on another lane: end the one here, behind its waiting requests.
cdef void slots_supersede(Slots *slots, const Correlation *correlation, int64_t now) noexcept nogil
# The sequences on `other` end there. Remember the reason here, for requests of them that come to this lane.
cdef void slots_remember(Slots *slots, const Slots *other) noexcept nogil
# Take no further requests; those that wait are still executed.
cdef void slots_close(Slots *slots, int64_t now) noexcept nogil
# Whether nothing will come for this instance any more.
cdef bint slots_done(const Slots *slots, uint32_t instance) noexcept nogil
