# The monotonic clock, in nanoseconds; the same clock as time.monotonic().

from libc.stdint cimport int64_t

cdef extern from *:
    """
    #include <time.h>
    static inline int64_t inferd_client_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    """
    int64_t now_ns "inferd_client_now"() noexcept nogil
