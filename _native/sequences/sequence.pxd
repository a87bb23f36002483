# One sequence: its id, its waiting requests, and the state that the model has given it.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from inferd._native.memory.resource cimport Block
from inferd._native.request.request cimport Correlation, InputData, Request, Requests

cdef struct StatePlan:
    # the initial value of a state, and how it is kept
    InputData initial        # of one row, with the batch dimension if the model has one
    bint same_buffer         # one buffer for the life of the sequence, unless the state outgrows it
    bint growable            # that buffer grows by doubling

cdef struct Sequence:
    Correlation correlation  # the sequence owns its text
    uint64_t hash
    Sequence *in_bucket      # the next in its bucket of the table
    bint listed              # in the table: further requests with its id belong to it
    uint64_t stream          # with which the sequence ends; 0: none
    Sequence *before         # in the list of its stream: see Slots.tied_to
    Sequence *behind
    # the requests that wait, in order, and the one that an instance has
    Requests queue
    Request *running
    uint32_t waiting         # number of waiting requests
    uint32_t rows            # of its requests, if it has a state
    bint begun               # the model has executed a request of it
    bint over                # no further request will come
    bint chosen              # while a batch is formed: it gets a row
    # its place
    uint32_t instance        # index of the instance, if it has a slot
    int32_t slot             # -1: none
    Sequences *list          # one at most; the lane's lock protects it, and all other fields
    Sequence *previous
    Sequence *next
    int64_t since_ns         # when it was added to that list
    uint32_t state_count
    InputData *states        # state_count current ones, and as many new ones from the running request
    Block **own              # state_count: the own memory of each state; NULL: none

cdef struct Sequences:
    # a list of sequences in the order in which they were added; see inferd._native.list
    Sequence *first
    Sequence *last
    uint32_t count

# A sequence with a copy of the id; NULL: no memory.
cdef Sequence *sequence_new(const Correlation *correlation, uint32_t state_count) noexcept nogil
# The sequence must be in no list and no table, and have no requests.
cdef void sequence_free(Sequence *sequence) noexcept nogil

# Lists. A sequence is in one at most.
cdef void sequences_append(Sequences *list, Sequence *sequence, int64_t now) noexcept nogil
cdef void sequences_remove(Sequence *sequence) noexcept nogil   # from its list, if it is in one

# Waiting requests.
cdef void sequence_append(Sequence *sequence, Request *request) noexcept nogil
cdef void sequence_prepend(Sequence *sequence, Request *request) noexcept nogil
cdef Request *sequence_pop(Sequence *sequence) noexcept nogil
# Remove a request and all behind it, as a chain by Request.next.
cdef Request *sequence_cut(Sequence *sequence, Request *request) noexcept nogil

# State. Set the initial state, for `rows` rows. False: no memory.
cdef bint states_begin(Sequence *sequence, const StatePlan *plans, uint32_t rows) noexcept nogil
# Make the new states of the running request the current ones. False: no memory; the state is unchanged.
cdef bint states_commit(Sequence *sequence, const StatePlan *plans, const Request *request) noexcept nogil
# Drop the new states of the running request.
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
# Does nothing if the sequence is not in the table.
cdef void table_remove_sequence(SequenceTable *table, Sequence *sequence) noexcept nogil
cdef void table_free_sequences(SequenceTable *table) noexcept nogil
