# When an instance may take how many of the requests that wait: the batching policy, without clock, lock or thread.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.request.request cimport Request
from _native.scheduling.adaptive cimport ArrivalPredictor
from _native.scheduling.preferred cimport Preferred, preferred_from

cdef struct Policy:
    bint batching
    bint uniform             # all requests have the same inputs and shapes: they need not be compared
    uint32_t max_rows
    bint adaptive            # wait only while that pays, and for the delay at most
    int64_t delay_ns         # less for requests that have not so much time
    Preferred preferred

cdef struct BatchPlan:
    uint32_t count           # requests from the first that form a batch; 0: none yet
    const char *why          # it is a batch, for people
    # when there is none:
    int64_t wake_ns          # ask again then at the latest
    uint64_t wake_rows       # and earlier when so many rows wait
    int64_t end_ns           # when one of those that wait must have been executed; NEVER: none need be

cdef struct Candidates:
    # the first requests that wait and that may share a batch, as whoever walks over them has told them
    uint32_t count
    uint64_t rows
    uint32_t size            # the first of the preferred sizes that these rows do not exceed
    uint32_t best            # so many of them go at once while the delay is not over; 0: none do
    const char *why          # those do
    const char *full         # why they cannot become more; NULL: they can
    int64_t oldest_ns        # when the oldest of them came
    int64_t end_ns           # when the first of them must have been executed

cdef const char *FULL
cdef const char *MISFIT
cdef const char *EXCEEDS
cdef const char *PREFERRED
cdef const char *LARGE

cdef int64_t NEVER
cdef int64_t LONGEST_DELAY   # a time plus it does not overflow

# Read a backends.api.ModelSpec; ValueError when it asks for more than is served.
cdef int policy_set(Policy *policy, object spec) except -1
# The same of its sequences with strategy "oldest".
cdef int policy_set_oldest(Policy *policy, object spec) except -1
# What to do at the time `now` with the requests that wait, `first` and those behind it in the order of service. With
# what has been learnt, if the policy is adaptive.
cdef void policy_plan(const Policy *policy, const ArrivalPredictor *predictor, const Request *first, int64_t now,
                      BatchPlan *plan) noexcept nogil
# When this request must have been executed; NEVER: whenever.
cdef int64_t policy_end(const Policy *policy, const Request *request) noexcept nogil
# Nobody waits.
cdef void plan_nothing(BatchPlan *plan) noexcept nogil


# ---- for whoever walks over what waits: as long as the next one fits, add it; then ask ----

cdef inline void candidates_begin(Candidates *self) noexcept nogil:
    self.count = 0
    self.rows = 0
    self.size = 0
    self.best = 0
    self.full = NULL
    self.oldest_ns = NEVER
    self.end_ns = NEVER


cdef inline bint candidates_fit(Candidates *self, const Policy *policy, uint64_t rows) noexcept nogil:
    # whether one of so many rows can be the next; False: no more of them
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
        self.full = LARGE  # nothing that follows changes what goes
    self.oldest_ns = min(self.oldest_ns, since_ns)


# What to do with them, at least one.
cdef void candidates_plan(const Candidates *self, const Policy *policy, const ArrivalPredictor *predictor, int64_t now,
                          BatchPlan *plan) noexcept nogil
