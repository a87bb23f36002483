# The batching policy: how many of the waiting requests form a batch, and when. Without clock, lock or thread.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.request.request cimport Request
from inferd._native.scheduling.adaptive cimport ArrivalPredictor
from inferd._native.scheduling.preferred cimport Preferred, preferred_from

cdef struct Policy:
    bint batching
    bint uniform             # all requests have the same inputs and shapes, and need not be compared
    uint32_t max_rows
    bint adaptive            # wait only while waiting pays, and at most for the delay
    int64_t delay_ns         # longest wait; requests with little time left wait less
    Preferred preferred

cdef struct BatchPlan:
    uint32_t count           # number of requests, from the first, that form a batch; 0: none yet
    const char *why          # the reason for the batch, as text
    # if there is none:
    int64_t wake_ns          # decide again at this time at the latest
    uint64_t wake_rows       # and earlier when so many rows wait
    int64_t end_ns           # when one of the waiting requests must have been executed; NEVER: no limit

cdef struct Candidates:
    # the first waiting requests that may share a batch, as counted by the caller
    uint32_t count
    uint64_t rows
    uint32_t size            # index of the first preferred size that these rows do not exceed
    uint32_t best            # the first so many form a batch before the delay is over; 0: no batch
    const char *why          # the reason for that batch
    const char *full         # the reason why no more can join; NULL: more can
    int64_t oldest_ns        # arrival of the oldest
    int64_t end_ns           # when the first of them must have been executed

cdef const char *FULL
cdef const char *MISFIT
cdef const char *EXCEEDS
cdef const char *PREFERRED
cdef const char *LARGE

cdef int64_t NEVER
cdef int64_t LONGEST_DELAY   # adding it to a time does not overflow

# Fill the policy from an inferd.backends.api.ModelSpec. Raises ValueError if the spec asks for more than the server can
# do.
cdef int policy_set(Policy *policy, object spec) except -1
# Fill the policy of sequences with the strategy "oldest"; errors as above.
cdef int policy_set_oldest(Policy *policy, object spec) except -1
# Decide at the time `now` about the waiting requests, `first` and those behind it in the order of service. Uses the
# predictor if the policy is adaptive.
cdef void policy_plan(const Policy *policy, const ArrivalPredictor *predictor, const Request *first, int64_t now,
                      BatchPlan *plan) noexcept nogil
# Whether the first of the waiting requests are as large a batch as there can be, and none of them has a limit to its
# time in the queue.
cdef bint policy_full(const Policy *policy, const Request *first) noexcept nogil
# When this request must have been executed; NEVER: no limit.
cdef int64_t policy_end(const Policy *policy, const Request *request) noexcept nogil
# No request waits.
cdef void plan_nothing(BatchPlan *plan) noexcept nogil


# ---- for callers that walk over waiting requests: add requests as long as the next one fits, then plan ----

cdef inline void candidates_begin(Candidates *self) noexcept nogil:
    self.count = 0
    self.rows = 0
    self.size = 0
    self.best = 0
    self.full = NULL
    self.oldest_ns = NEVER
    self.end_ns = NEVER


cdef inline bint candidates_fit(Candidates *self, const Policy *policy, uint64_t rows) noexcept nogil:
    # whether a request of so many rows can be the next; False: the walk ends
    if self.count == 0:
        return True
    if self.full != NULL:
        return False
    if self.best == 0 and self.rows + rows > policy.preferred.largest:
        self.best = self.count
        self.why = EXCEEDS if policy.preferred.named else FULL
    if self.rows + rows > policy.max_rows:
        self.full = FULL
        return False
    return True


cdef inline void candidates_add(Candidates *self, const Policy *policy, uint64_t rows, int64_t since_ns) noexcept nogil:
    self.count += 1
    self.rows += rows
    self.size = preferred_from(&policy.preferred, self.size, self.rows)
    if self.size < policy.preferred.count and policy.preferred.sizes[self.size] == self.rows:
        self.best = self.count
        self.why = PREFERRED if policy.preferred.named else FULL
    if self.rows >= policy.max_rows:
        self.full = FULL
    elif policy.delay_ns == 0 and self.rows >= policy.preferred.largest:
        self.full = LARGE  # further requests do not change the plan
    self.oldest_ns = min(self.oldest_ns, since_ns)


# Decide about the candidates, at least one.
cdef void candidates_plan(const Candidates *self, const Policy *policy, const ArrivalPredictor *predictor, int64_t now,
                          BatchPlan *plan) noexcept nogil
