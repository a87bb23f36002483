# When an instance may take how many of the requests that wait: the batching policy, without clock, lock or thread.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.inference.request cimport Request
from _native.scheduling.adaptive cimport Outlook
from _native.scheduling.preferred cimport Preferred

cdef struct Policy:
    bint batching
    bint uniform             # all requests have the same inputs and shapes: they need not be compared
    uint32_t max_rows
    bint adaptive            # wait only while that pays, and for the delay at most
    int64_t delay_ns
    Preferred preferred

cdef struct Plan:
    uint32_t count           # requests from the first that form a batch; 0: none yet
    const char *why          # it is a batch, for people
    # when there is none:
    int64_t wake_ns          # ask again then at the latest
    uint64_t wake_rows       # and earlier when so many rows wait

cdef int64_t NEVER

# Read a backends.api.ModelSpec; ValueError when it asks for more than is served.
cdef int policy_set(Policy *policy, object spec) except -1
# What to do at the time `now` with the requests that wait, `first` and those behind it in the order of service. With
# what has been learnt, if the policy is adaptive.
cdef void policy_plan(const Policy *policy, const Outlook *outlook, const Request *first, int64_t now,
                      Plan *plan) noexcept nogil
