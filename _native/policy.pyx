"""The batching policy: when an instance may take how many of the requests that wait.

* The candidates are the first request and those behind it in the order of service, up to the first that would exceed
  `max_batch_size` or has other shapes or inputs. A policy never reorders and never splits.
* With no delay, or once the oldest of the candidates has waited for the delay, all of them go.
* Before that, the largest prefix of the candidates whose rows are a preferred size goes. The preferred size is
  `max_batch_size` when the configuration names none.
* Before that, too, the candidates go when they cannot become more: they are full, or the next one does not fit, or the
  first alone exceeds every preferred size.

Without dynamic batching every request is a batch of its own.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.preferred cimport exceeds_preferred, is_preferred, next_preferred, preferred_set
from _native.request cimport Request, request_alike

cdef enum:
    ANY_ROWS = 1

cdef int64_t NEVER = 0x7fffffffffffffff
cdef int64_t LONGEST_DELAY = NEVER // 4    # 73 years; a time plus it does not overflow

cdef const char *ALONE = "no batching"
cdef const char *EVERYTHING = "no delay"
cdef const char *WAITED = "delay over"
cdef const char *PREFERRED = "preferred size"
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
    policy.delay_ns = min(batching.max_queue_delay_us * 1000, LONGEST_DELAY)
    return preferred_set(&policy.preferred, batching.preferred_sizes or (policy.max_rows,))


cdef inline void settle(Plan *plan, uint32_t count, const char *why) noexcept nogil:
    plan.count = count
    plan.why = why


cdef void policy_plan(const Policy *policy, const Request *first, int64_t now, Plan *plan) noexcept nogil:
    cdef const Request *request
    cdef const char *full = NULL
    cdef uint64_t rows
    cdef int64_t oldest_ns
    cdef uint32_t count = 1
    cdef uint32_t preferred = 0
    if first == NULL:
        settle(plan, 0, NULL)
        plan.wake_ns = NEVER
        plan.wake_rows = ANY_ROWS
        return
    if not policy.batching:
        settle(plan, 1, ALONE)
        return
    rows = first.rows
    oldest_ns = first.queued_ns
    if is_preferred(&policy.preferred, rows):
        preferred = 1
    if rows >= policy.max_rows:
        full = FULL
    request = first.next
    while request != NULL and full == NULL:
        if rows + request.rows > policy.max_rows:
            full = FULL
        elif not policy.uniform and not request_alike(first, request):
            full = MISFIT
        else:
            rows += request.rows
            count += 1
            oldest_ns = min(oldest_ns, request.queued_ns)
            if is_preferred(&policy.preferred, rows):
                preferred = count
            if rows >= policy.max_rows:
                full = FULL
            request = request.next
    if now - oldest_ns >= policy.delay_ns:
        settle(plan, count, full if full != NULL else WAITED if policy.delay_ns else EVERYTHING)
    elif preferred:
        settle(plan, preferred, PREFERRED)
    elif full != NULL:
        settle(plan, count, full)
    elif exceeds_preferred(&policy.preferred, first.rows):
        settle(plan, 1, LARGE)
    else:
        settle(plan, 0, NULL)
        plan.wake_ns = oldest_ns + policy.delay_ns
        plan.wake_rows = next_preferred(&policy.preferred, rows, policy.max_rows)
