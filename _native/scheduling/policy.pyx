"""The batching policy: when an instance may take how many of the requests that wait.

* The candidates are the first request and those behind it in the order of service, up to the first that would exceed
  `max_batch_size` or has other shapes or inputs. A policy never reorders and never splits.
* With no delay, or once the oldest of the candidates has waited for the delay, all of them go. If the delay is
  adaptive, also once waiting does not pay any more (`_native.scheduling.adaptive`).
* Before that, the largest prefix of the candidates whose rows are a preferred size goes. The preferred size is
  `max_batch_size` when the configuration names none.
* Before that, too, the candidates go when they cannot become more: they are full, or the next one does not fit, or the
  first alone exceeds every preferred size.

Without dynamic batching every request is a batch of its own.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.inference.request cimport Request, request_alike
from _native.scheduling.adaptive cimport Outlook, outlook_due, outlook_enough
from _native.scheduling.preferred cimport exceeds_preferred, is_preferred, next_preferred, preferred_set

cdef enum:
    ANY_ROWS = 1

cdef int64_t NEVER = 0x7fffffffffffffff
cdef int64_t LONGEST_DELAY = NEVER // 4    # 73 years; a time plus it does not overflow

cdef const char *ALONE = "no batching"
cdef const char *EVERYTHING = "no delay"
cdef const char *WAITED = "delay over"
cdef const char *PREFERRED = "preferred size"
cdef const char *UNPAID = "waiting does not pay"
cdef const char *FULL = "full"
cdef const char *MISFIT = "next has other shapes"
cdef const char *LARGE = "larger than every preferred size"


cdef int policy_set(Policy *policy, object spec) except -1:
    cdef object batching = spec.batching
    policy.max_rows = max(1, spec.max_batch_size)
    policy.preferred.count = 0
    policy.batching = batching is not None
    if batching is None:
        return 0
    policy.adaptive = batching.adaptive
    policy.delay_ns = min(batching.max_queue_delay_us * 1000, LONGEST_DELAY)
    if policy.adaptive and policy.delay_ns == 0:
        policy.delay_ns = LONGEST_DELAY
    return preferred_set(&policy.preferred, batching.preferred_sizes or (policy.max_rows,))


cdef inline void settle(Plan *plan, uint32_t count, const char *why) noexcept nogil:
    plan.count = count
    plan.why = why


cdef struct Candidates:
    # the longest prefix of the requests that wait that may share a batch
    uint32_t count
    uint64_t rows
    uint32_t preferred       # requests of the longest prefix of a preferred size; 0: there is none
    const char *full         # why they cannot become more; NULL: they can
    int64_t oldest_ns        # when the oldest of them came
    int64_t end_ns           # when the first of them ends its wait itself


cdef inline void add(Candidates *candidates, const Policy *policy, const Request *request) noexcept nogil:
    candidates.count += 1
    candidates.rows += request.rows
    if candidates.rows >= policy.max_rows:
        candidates.full = FULL
    if policy.delay_ns == 0:
        return  # all of them go, whatever they are
    candidates.oldest_ns = min(candidates.oldest_ns, request.queued_ns)
    if is_preferred(&policy.preferred, candidates.rows):
        candidates.preferred = candidates.count
    if request.deadline_ns:
        candidates.end_ns = min(candidates.end_ns, request.deadline_ns)
    if request.expires_ns and not request.yields:
        candidates.end_ns = min(candidates.end_ns, request.expires_ns)


cdef inline void collect(Candidates *candidates, const Policy *policy, const Request *first) noexcept nogil:
    cdef const Request *request = first.next
    candidates.count = 0
    candidates.rows = 0
    candidates.preferred = 0
    candidates.full = NULL
    candidates.oldest_ns = NEVER
    candidates.end_ns = NEVER
    add(candidates, policy, first)
    while request != NULL and candidates.full == NULL:
        if candidates.rows + request.rows > policy.max_rows:
            candidates.full = FULL
        elif not policy.uniform and not request_alike(first, request):
            candidates.full = MISFIT
        else:
            add(candidates, policy, request)
            request = request.next


cdef void policy_plan(const Policy *policy, const Outlook *outlook, const Request *first, int64_t now,
                      Plan *plan) noexcept nogil:
    cdef Candidates found
    if first == NULL:
        settle(plan, 0, NULL)
        plan.wake_ns = NEVER
        plan.wake_rows = ANY_ROWS
        return
    if not policy.batching:
        settle(plan, 1, ALONE)
        return
    if policy.delay_ns == 0 and first.next == NULL:
        settle(plan, 1, EVERYTHING)
        return
    collect(&found, policy, first)
    if policy.delay_ns == 0:
        settle(plan, found.count, found.full if found.full != NULL else EVERYTHING)
    elif now - found.oldest_ns >= policy.delay_ns:
        settle(plan, found.count, found.full if found.full != NULL else WAITED)
    elif found.preferred:
        settle(plan, found.preferred, PREFERRED)
    elif found.full != NULL:
        settle(plan, found.count, found.full)
    elif exceeds_preferred(&policy.preferred, first.rows):
        settle(plan, 1, LARGE)
    else:
        settle(plan, 0, NULL)
        plan.wake_ns = found.oldest_ns + policy.delay_ns
        plan.wake_rows = next_preferred(&policy.preferred, found.rows, policy.max_rows)
        if policy.adaptive:
            adapt(&found, outlook, now, plan)


cdef inline void adapt(const Candidates *found, const Outlook *outlook, int64_t now, Plan *plan) noexcept nogil:
    # wait for less, or not at all
    plan.wake_ns = min(plan.wake_ns, outlook_due(outlook, found.count, found.rows, found.end_ns))
    plan.wake_rows = outlook_enough(outlook, found.count, found.rows, plan.wake_rows)
    if now >= plan.wake_ns:
        settle(plan, found.count, UNPAID)
