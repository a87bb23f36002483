# POSIX mutexes and condition variables. Timed waits use the monotonic clock.

from libc.stdint cimport int64_t, uint64_t

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/prctl.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>
    typedef pthread_mutex_t inferd_mutex;
    typedef pthread_cond_t inferd_condition;
    static inline void inferd_condition_init(inferd_condition *c) {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(c, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    static inline void inferd_condition_wait_until(inferd_condition *c, inferd_mutex *m, int64_t ns) {
        struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
        pthread_cond_timedwait(c, m, &t);
    }
    /* without this the kernel may add 50 us to every timed wait of this thread */
    static inline void inferd_exact_timers(void) { prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); }
    /* struct sched_attr of Linux, which <linux/sched/types.h> and newer C libraries both define */
    struct inferd_sched_attr {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    };
    /* A thread that wakes often and works shortly asks for slices of `ns`. Linux since 6.12 lets it interrupt threads
       with longer ones. Returns the slices that it had, which may be the operator's; 0: nothing has changed. Older
       kernels have no slices. Policies of real time have none either: for SCHED_DEADLINE the same field holds the time
       that the operator lets the thread use in a period, so it must not change. */
    static inline uint64_t inferd_slices(uint64_t ns) {
        struct inferd_sched_attr attr;
        uint64_t before;
        memset(&attr, 0, sizeof(attr));
        if (syscall(SYS_sched_getattr, 0, &attr, sizeof(attr), 0) != 0
            || (attr.policy != SCHED_OTHER && attr.policy != SCHED_BATCH)) return 0;
        before = attr.runtime;
        if (before == 0 || before == ns) return 0;
        attr.size = sizeof(attr);
        attr.runtime = ns;
        return syscall(SYS_sched_setattr, 0, &attr, 0) == 0 ? before : 0;
    }
    static inline void inferd_thread_name(const char *name) { prctl(PR_SET_NAME, name, 0UL, 0UL, 0UL); }
    """
    ctypedef struct Mutex "inferd_mutex":
        pass
    ctypedef struct Condition "inferd_condition":
        pass
    int mutex_init "pthread_mutex_init"(Mutex *mutex, void *attributes) noexcept nogil
    int mutex_destroy "pthread_mutex_destroy"(Mutex *mutex) noexcept nogil
    int lock "pthread_mutex_lock"(Mutex *mutex) noexcept nogil
    int unlock "pthread_mutex_unlock"(Mutex *mutex) noexcept nogil
    void condition_init "inferd_condition_init"(Condition *condition) noexcept nogil
    int condition_destroy "pthread_cond_destroy"(Condition *condition) noexcept nogil
    int wait "pthread_cond_wait"(Condition *condition, Mutex *mutex) noexcept nogil
    # waits until notified, but not beyond the monotonic time `ns`
    void wait_until "inferd_condition_wait_until"(Condition *condition, Mutex *mutex, int64_t ns) noexcept nogil
    int notify_one "pthread_cond_signal"(Condition *condition) noexcept nogil
    int notify_all "pthread_cond_broadcast"(Condition *condition) noexcept nogil
    void exact_timers "inferd_exact_timers"() noexcept nogil
    uint64_t slices "inferd_slices"(uint64_t ns) noexcept nogil
    void thread_name "inferd_thread_name"(const char *name) noexcept nogil


cdef enum:
    SHORT_SLICE_NS = 100000  # the shortest that Linux grants


# Set up the calling thread as that of an instance: its name, and timed waits with microsecond accuracy.
cdef inline void prepare_thread(str name):
    cdef bytes encoded = name.encode()
    thread_name(encoded[max(0, len(encoded) - 15):])  # the kernel keeps 15 bytes; the end tells instances apart
    exact_timers()
