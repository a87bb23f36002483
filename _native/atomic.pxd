# Atomic operations of the compiler (GCC and Clang builtins), typed for Cython.

from libc.stdint cimport int32_t, int64_t

cdef extern from *:
    """
    #include <sched.h>
    #include <stdint.h>
    static inline int32_t inferd_fetch_add32(int32_t *p, int32_t n) {
        return __atomic_fetch_add(p, n, __ATOMIC_ACQ_REL);
    }
    static inline int64_t inferd_fetch_add64(int64_t *p, int64_t n) {
        return __atomic_fetch_add(p, n, __ATOMIC_ACQ_REL);
    }
    static inline int32_t inferd_load32(const int32_t *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline int64_t inferd_load64(const int64_t *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline void inferd_store32(int32_t *p, int32_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
    }
    static inline void inferd_store64(int64_t *p, int64_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
    }
    /* an integer that one thread writes and others may read at any time: without barrier and locked instruction */
    static inline void inferd_add_own(int64_t *p, int64_t n) {
        __atomic_store_n(p, __atomic_load_n(p, __ATOMIC_RELAXED) + n, __ATOMIC_RELAXED);
    }
    /* A lock that is held for a few instructions. A waiter spins and looks less and less often, so that the memory that
       the lock protects stays in the cache of one core for a while; if it waits long, it yields the processor. */
    static inline void inferd_spin_lock(int32_t *p) {
        int wait = 1, spins = 0;
        while (__atomic_exchange_n(p, 1, __ATOMIC_ACQUIRE)) {
            do {
                for (int i = 0; i < wait; i++) {
    #if defined(__x86_64__)
                    __builtin_ia32_pause();
    #endif
                    if (++spins % 256 == 0) sched_yield();
                }
                if (wait < 16) wait *= 2;
            } while (__atomic_load_n(p, __ATOMIC_RELAXED));
        }
    }
    static inline void inferd_spin_unlock(int32_t *p) { __atomic_store_n(p, 0, __ATOMIC_RELEASE); }
    static inline int32_t inferd_exchange32(int32_t *p, int32_t v) {
        return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL);
    }
    """
    int32_t fetch_add32 "inferd_fetch_add32"(int32_t *p, int32_t n) noexcept nogil
    int64_t fetch_add64 "inferd_fetch_add64"(int64_t *p, int64_t n) noexcept nogil
    int32_t load32 "inferd_load32"(const int32_t *p) noexcept nogil
    int64_t load64 "inferd_load64"(const int64_t *p) noexcept nogil
    void store32 "inferd_store32"(int32_t *p, int32_t v) noexcept nogil
    void store64 "inferd_store64"(int64_t *p, int64_t v) noexcept nogil
    int32_t exchange32 "inferd_exchange32"(int32_t *p, int32_t v) noexcept nogil
    void add_own "inferd_add_own"(int64_t *p, int64_t n) noexcept nogil
    void spin_lock "inferd_spin_lock"(int32_t *p) noexcept nogil
    void spin_unlock "inferd_spin_unlock"(int32_t *p) noexcept nogil
