# How many frames a peer may send that bring no call forward: a token bucket for each connection.

from libc.stdint cimport int64_t

cdef struct Budget:
    int64_t left             # frames
    int64_t filled_ns        # when it was last filled

cdef enum:
    # what frames cost; every one of them is answered or looked up, some do more
    COST_FRAME = 1           # PING, PRIORITY, WINDOW_UPDATE, empty DATA, the end of a call that is served natively
    COST_SETTINGS = 10       # may go through every open stream
    COST_PYTHON_RESET = 10   # the end of a call that had become a task
    # What answers earn back, so that a client that reads much is free to acknowledge each frame of it: WINDOW_UPDATE
    # for the stream and for the connection, and a PING to measure the bandwidth.
    EARNED_BY_ANSWER = 3


cdef inline bint budget_spend(Budget *budget, int64_t cost, int64_t per_second, int64_t now_ns) noexcept nogil:
    # False when the peer has none left; a second's worth is also the most that can be saved up
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
