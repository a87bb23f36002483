"""The batching policy: when an instance may take how many of the requests that wait.

It is Triton's (`GetDynamicBatch` in "dynamic_batch_scheduler.cc"):

* The candidates are the first request and those behind it in the order of service, up to the first that would exceed
  `max_batch_size` or has other shapes or inputs. A policy never reorders and never splits (a queue may, behind it).
* Before the delay is over, and always if there is no delay, the longest prefix of the candidates whose rows are a
  preferred size goes. If there is no such prefix, but one of the candidates would exceed the largest preferred size,
  those before it go. The preferred size is `max_batch_size` when the configuration names none (preferred.pxd).
* A request with a deadline does not wait for others until its time is over: all candidates go so early that such a
  batch ends an eighth of the request's time before the deadline. The time that a request may wait in the queue shortens
  an adaptive delay in the same way, but not a fixed one: the operator has configured both.
* Once the oldest of the candidates has waited for the delay, all of them go. They go earlier when no further request
  can join: they are full, the next one does not fit, or the first alone exceeds every preferred size. If the delay is
  adaptive, they also go once waiting no longer pays (`inferd._native.scheduling.adaptive`).

Without dynamic batching every request is a batch of its own.

The callers walk over the waiting requests: `policy_plan` over those of a queue, `inferd._native.sequences.batch` over
the sequences of an instance. On the walk `candidates_fit` and `candidates_add` (policy.pxd) find the longest prefix of
a preferred size; `candidates_plan` then decides: a batch, or until when and until how many rows the requests wait. No
plan is kept: after an arrival or a departure the next one begins with the requests that wait then.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.request.request cimport Request, request_alike
from inferd._native.scheduling.adaptive cimport ArrivalPredictor, predictor_due, predictor_enough, predictor_latest
from inferd._native.scheduling.preferred cimport preferred_set

cdef enum:
    ANY_ROWS = 1

cdef int64_t NEVER = 0x7fffffffffffffff
cdef int64_t LONGEST_DELAY = NEVER // 4    # 73 years

cdef const char *ALONE = "no batching"
cdef const char *EVERYTHING = "no delay"
cdef const char *WAITED = "delay over"
cdef const char *PREFERRED = "preferred size"
cdef const char *EXCEEDS = "next exceeds every preferred size"
cdef const char *ENDING = "deadline near"
cdef const char *UNPAID = "waiting does not pay"
cdef const char *FULL = "full"
cdef const char *MISFIT = "next has other shapes"
cdef const char *LARGE = "larger than every preferred size"


cdef int policy_set(Policy *policy, object spec) except -1:
    cdef object batching = spec.batching
    policy.batching = batching is not None
    policy.max_rows = max(1, spec.max_batch_size)
    if batching is None:
        return 0
    policy.adaptive = batching.adaptive
    policy.delay_ns = min(batching.max_queue_delay_us * 1000, LONGEST_DELAY)
    if policy.adaptive and policy.delay_ns == 0:
        policy.delay_ns = LONGEST_DELAY
    return preferred_set(&policy.preferred, batching.preferred_sizes, policy.max_rows)


cdef int policy_set_oldest(Policy *policy, object spec) except -1:
    policy.batching = True
    policy.max_rows = max(1, spec.max_batch_size)
    policy.delay_ns = min(spec.sequence.max_queue_delay_us * 1000, LONGEST_DELAY)
    return preferred_set(&policy.preferred, spec.sequence.preferred_sizes, policy.max_rows)


cdef inline void set_plan(BatchPlan *plan, uint32_t count, const char *why) noexcept nogil:
    plan.count = count
    plan.why = why


cdef void plan_nothing(BatchPlan *plan) noexcept nogil:
    set_plan(plan, 0, NULL)
    plan.wake_ns = NEVER
    plan.wake_rows = ANY_ROWS
    plan.end_ns = NEVER


cdef inline void collect(Candidates *candidates, const Policy *policy, const Request *first) noexcept nogil:
    cdef const Request *request = first
    candidates_begin(candidates)
    while request != NULL and candidates_fit(candidates, policy, request.rows):
        if not policy.uniform and request != first and not request_alike(first, request):
            candidates.full = MISFIT
            return
        candidates_add(candidates, policy, request.rows, request.queued_ns)
        candidates.end_ns = min(candidates.end_ns, policy_end(policy, request))
        request = request.next


cdef int64_t policy_end(const Policy *policy, const Request *request) noexcept nogil:
    cdef int64_t end = request.terms.due_ns if request.terms.due_ns else NEVER
    if policy.adaptive and request.expires_ns and not request.yields:
        end = min(end, request.expires_ns)
    return end


cdef bint policy_full(const Policy *policy, const Request *first) noexcept nogil:
    cdef const Request *request = first
    cdef uint64_t rows = 0
    while request != NULL and request.expires_ns == 0 and (policy.uniform or request_alike(first, request)):
        rows += request.rows
        if rows >= policy.max_rows or not policy.batching:
            return True
        request = request.next
    return False


cdef inline void plan_all(const Policy *policy, const Request *first, BatchPlan *plan) noexcept nogil:
    # plan a batch that only the largest batch size limits
    cdef const Request *request = first.next
    cdef uint64_t rows = first.rows
    set_plan(plan, 1, EVERYTHING)
    while request != NULL and plan.why == EVERYTHING:
        if rows + request.rows > policy.max_rows:
            plan.why = FULL
        elif not policy.uniform and not request_alike(first, request):
            plan.why = MISFIT
        else:
            plan.count += 1
            rows += request.rows
            if rows >= policy.max_rows:
                plan.why = FULL
            request = request.next


cdef void policy_plan(const Policy *policy, const ArrivalPredictor *predictor, const Request *first, int64_t now,
                      BatchPlan *plan) noexcept nogil:
    cdef Candidates found
    if first == NULL:
        plan_nothing(plan)
    elif not policy.batching:
        set_plan(plan, 1, ALONE)
    elif policy.delay_ns == 0 and first.next == NULL:
        set_plan(plan, 1, EVERYTHING)
    elif policy.delay_ns == 0 and not policy.preferred.named:
        plan_all(policy, first, plan)
    else:
        collect(&found, policy, first)
        candidates_plan(&found, policy, predictor, now, plan)


cdef void candidates_plan(const Candidates *self, const Policy *policy, const ArrivalPredictor *predictor, int64_t now,
                          BatchPlan *plan) noexcept nogil:
    if policy.delay_ns and now - self.oldest_ns >= policy.delay_ns:
        set_plan(plan, self.count, self.full if self.full != NULL else WAITED)
    elif self.best:
        set_plan(plan, self.best, self.why)
    elif self.full != NULL:
        set_plan(plan, self.count, self.full)
    elif self.rows > policy.preferred.largest:
        set_plan(plan, self.count, LARGE)
    elif policy.delay_ns == 0:
        set_plan(plan, self.count, EVERYTHING)
    else:
        set_plan(plan, 0, NULL)
        plan.wake_ns = self.oldest_ns + policy.delay_ns
        # no prefix has a preferred size now
        plan.wake_rows = policy.max_rows
        if self.size < policy.preferred.count:
            plan.wake_rows = min(plan.wake_rows, <uint64_t>policy.preferred.sizes[self.size])
        plan.end_ns = self.end_ns
        if policy.adaptive:
            adapt(self, predictor, now, plan)
        if self.end_ns != NEVER and plan.count == 0:
            hurry(self, predictor, now, plan)


cdef inline void adapt(const Candidates *found, const ArrivalPredictor *predictor, int64_t now,
                       BatchPlan *plan) noexcept nogil:
    # shorten the wait, or end it
    plan.wake_ns = min(plan.wake_ns, predictor_due(predictor, found.count, found.rows))
    plan.wake_rows = predictor_enough(predictor, found.count, found.rows, plan.wake_rows)
    if now >= plan.wake_ns:
        set_plan(plan, found.count, UNPAID)


cdef inline void hurry(const Candidates *found, const ArrivalPredictor *predictor, int64_t now,
                       BatchPlan *plan) noexcept nogil:
    # shorten the wait, or end it, because one of the requests has less time
    cdef int64_t latest = found.end_ns if predictor == NULL else predictor_latest(predictor, found.rows, found.end_ns)
    plan.wake_ns = min(plan.wake_ns, latest)
    if now >= plan.wake_ns:
        set_plan(plan, found.count, ENDING)
