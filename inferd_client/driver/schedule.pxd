# The calls of a run, and their times.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd_client.driver.call cimport Call

cdef struct Schedule:
    uint64_t seed
    uint64_t limit           # requests; 0: no limit
    uint64_t end_ns          # no request is started after this; 0: no end
    uint64_t interval_ns     # open loop: between two requests, on average if `scattered`; 0: closed loop
    bint scattered           # requests are independent of each other (a Poisson process)
    const uint64_t *gaps     # open loop: nanoseconds between requests, in turn; NULL: interval_ns decides
    uint64_t gap_count
    uint32_t cancel_share    # of 65536
    uint32_t cancel_span     # calls
    uint32_t deadline_share  # of 65536
    uint32_t deadline_low_us
    uint32_t deadline_high_us

# Whether a further request may start after `issued` requests.
cdef bint schedule_goes_on(const Schedule *schedule, uint64_t issued) noexcept nogil
# Open loop: nanoseconds between the request before this index and the one at it.
cdef uint64_t schedule_gap(const Schedule *schedule, uint64_t index) noexcept nogil
# Set the call's nonce and its deadline from its index. Returns the number of other calls on its connection after whose
# end it is reset, -1 for never.
cdef int64_t schedule_draw(const Schedule *schedule, Call *call) noexcept nogil
