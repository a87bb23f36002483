# One sequence of requests: who it is, what waits in it, the state that the model has brought it to.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from _native.memory.resource cimport Block
from _native.request.request cimport Correlation, InputData, Request, Requests

cdef struct StatePlan:
    # where a state begins, and how it is kept
    InputData initial        # of one row, batch dimension included where the model has one
    bint same_buffer         # one buffer for its whole life, unless it outgrows it
    bint growable            # that buffer grows by doubling

cdef struct Sequence:
    Correlation correlation  # its text is the sequence's own
    uint64_t hash
    Sequence *in_bucket      # the next in its bucket of the table
    bint listed              # in the table: further requests of its id belong to it
    uint64_t stream          # that it ends with; 0: none
    # what waits, in order, and what an instance has
    Requests queue
    Request *running
    uint32_t waiting         # requests that wait
    uint32_t rows            # of its requests, when it has a state
    bint begun               # the model has seen a request of it
    bint over                # nothing more will come
    bint chosen              # while a batch is made: it gets a row
    # where it stands
    uint32_t instance        # of the instance, with a slot
    int32_t slot             # -1: none
    Sequences *list          # at most one; guarded by the lane's lock, as all the rest
    Sequence *previous
    Sequence *next
    int64_t since_ns         # when it came into that list
    uint32_t state_count
    InputData *states        # state_count that it is in, and as many that its running request has brought
    Block **own              # state_count: the memory of a state where it is nobody else's

cdef struct Sequences:
    # a list of them, in the order in which they came; see _native.list
    Sequence *first
    Sequence *last
    uint32_t count

# A sequence with an id of its own; NULL: no memory.
cdef Sequence *sequence_new(const Correlation *correlation, uint32_t state_count) noexcept nogil
# It is in no list and no table, and has no requests.
cdef void sequence_free(Sequence *sequence) noexcept nogil

# Lists. A sequence is in one at most.
cdef void sequences_append(Sequences *list, Sequence *sequence, int64_t now) noexcept nogil
cdef void sequences_remove(Sequence *sequence) noexcept nogil   # from the list that it is in, if it is

# Requests that wait.
cdef void sequence_append(Sequence *sequence, Request *request) noexcept nogil
cdef void sequence_prepend(Sequence *sequence, Request *request) noexcept nogil
cdef Request *sequence_pop(Sequence *sequence) noexcept nogil
# Take a request and all behind it out, as a chain by Request.next.
cdef Request *sequence_cut(Sequence *sequence, Request *request) noexcept nogil

# State. Begin anew, with `rows` rows. False: no memory.
cdef bint states_begin(Sequence *sequence, const StatePlan *plans, uint32_t rows) noexcept nogil
# What the running request has brought is the state now. False: no memory, and the state is what it was.
cdef bint states_commit(Sequence *sequence, const StatePlan *plans, const Request *request) noexcept nogil
# What the running request has brought is dropped.
cdef void states_drop(Sequence *sequence) noexcept nogil
# The state with which the next request of the sequence will run.
cdef const InputData *state_ahead(const Sequence *sequence, const StatePlan *plans, uint32_t state) noexcept nogil

cdef struct SequenceTable:
    # sequences by id
    Sequence **buckets
    uint32_t bucket_count    # a power of two
    uint32_t count

cdef uint64_t correlation_hash(const Correlation *correlation) noexcept nogil
cdef Sequence *table_find_sequence(const SequenceTable *table, const Correlation *correlation) noexcept nogil
# False: no memory.
cdef bint table_add_sequence(SequenceTable *table, Sequence *sequence) noexcept nogil
# Does nothing when it is not in.
cdef void table_remove_sequence(SequenceTable *table, Sequence *sequence) noexcept nogil
cdef void table_free_sequences(SequenceTable *table) noexcept nogil
