# Numbers that threads share without a lock, and waiting for one to change.

from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from *:
    """
    #include <linux/futex.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>
    static inline int32_t inferd_client_add(int32_t *p, int32_t n) {
        return __atomic_add_fetch(p, n, __ATOMIC_ACQ_REL);
    }
    static inline uint32_t inferd_client_load(uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void inferd_client_store(uint32_t *p, uint32_t n) { __atomic_store_n(p, n, __ATOMIC_RELEASE); }
    static inline void inferd_client_wait(uint32_t *p, uint32_t n, uint64_t until_ns) {
        struct timespec until = {(time_t)(until_ns / 1000000000), (long)(until_ns % 1000000000)};
        syscall(SYS_futex, p, FUTEX_WAIT_BITSET_PRIVATE, n, &until, NULL, FUTEX_BITSET_MATCH_ANY);
    }
    static inline void inferd_client_wake(uint32_t *p) { syscall(SYS_futex, p, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }
    """
    # returns the new value
    int32_t atomic_add "inferd_client_add"(int32_t *, int32_t) noexcept nogil
    uint32_t atomic_load "inferd_client_load"(uint32_t *) noexcept nogil
    void atomic_store "inferd_client_store"(uint32_t *, uint32_t) noexcept nogil
    # Wait while it is `n`, at most until this time of the monotonic clock; it may return earlier.
    void futex_wait "inferd_client_wait"(uint32_t *, uint32_t n, uint64_t until_ns) noexcept nogil
    # Wake the thread that waits; the memory may be gone already.
    void futex_wake "inferd_client_wake"(uint32_t *) noexcept nogil
