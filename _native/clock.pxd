# The monotonic clock, in nanoseconds; the same clock as time.monotonic() and as the waits of `threads.pxd`.

from libc.stdint cimport int64_t

cdef extern from *:
    """
    #include <time.h>
    static inline int64_t inferd_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    static inline int64_t inferd_wall_ms(void) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
    }
    """
    int64_t now_ns "inferd_now"() noexcept nogil
    # milliseconds since 1970, for times that people read
    int64_t wall_ms "inferd_wall_ms"() noexcept nogil
