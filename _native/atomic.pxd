# Atomic operations of the compiler (GCC and Clang builtins), typed for Cython.

from libc.stdint cimport int32_t, int64_t

cdef extern from *:
    """
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
    static inline int32_t inferd_exchange32(int32_t *p, int32_t v) {
        return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL);
    }
    """
    int32_t fetch_add32 "inferd_fetch_add32"(int32_t *p, int32_t n) noexcept nogil
    int64_t fetch_add64 "inferd_fetch_add64"(int64_t *p, int64_t n) noexcept nogil
    int32_t load32 "inferd_load32"(const int32_t *p) noexcept nogil
    int64_t load64 "inferd_load64"(const int64_t *p) noexcept nogil
    void store32 "inferd_store32"(int32_t *p, int32_t v) noexcept nogil
    int32_t exchange32 "inferd_exchange32"(int32_t *p, int32_t v) noexcept nogil
