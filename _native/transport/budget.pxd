# Limits the frames of a peer that advance no call: a token bucket for each connection.

from libc.stdint cimport int64_t

cdef struct Budget:
    int64_t left             # frames
    int64_t filled_ns        # when it was last filled

cdef enum:
    # the costs of frames: the server answers or looks up each of them, and some cause more work
    COST_FRAME = 1           # PING, PRIORITY, WINDOW_UPDATE, empty DATA, the end of a call that is served natively
    COST_SETTINGS = 10       # may touch every open stream
    COST_PYTHON_RESET = 10   # the end of a call that had become a Python task
    # What each frame of a response adds to the bucket, so that a client that reads much may acknowledge each frame:
    # WINDOW_UPDATE for the stream and for the connection, and a PING to measure the bandwidth.
    EARNED_BY_RESPONSE = 3


cdef inline bint budget_spend(Budget *budget, int64_t cost, int64_t per_second, int64_t now_ns) noexcept nogil:
    # False: the peer has no budget left. The bucket holds at most what one second adds.
    cdef int64_t earned
    budget.left -= cost
    if budget.left >= 0:
        return True
    earned = <int64_t>(<double>(now_ns - budget.filled_ns) * 1e-9 * <double>per_second)
    if earned > 0:
        budget.left = min(budget.left + earned, per_second)
        budget.filled_ns = now_ns
    return budget.left >= 0


cdef inline void budget_earn(Budget *budget, int64_t count, int64_t per_second) noexcept nogil:
    if budget.left < per_second:
        budget.left += count
