"""The front's lock, and the events by which the front tells Python.

An I/O thread holds the lock while it works. It gives the lock back between two connections if another thread waits for
it, and, if there are several I/O threads, during each system call. Other threads hold the lock for single operations.

The lock is fair: a thread that waits gets it before the present holder gets it again. The holder may then wait for a
thread that has no core yet. Therefore a thread that waits asks for short slices, with which it gets a core at once; it
has them until it leaves the front.
"""

from libc.stdint cimport uint64_t
from posix.unistd cimport read, write

from inferd._native.atomic cimport fetch_add32, load32
from inferd._native.list cimport list_append, list_remove
from inferd._native.threads cimport SHORT_SLICE_NS, slices

cdef extern from *:
    """
    #include <pthread.h>
    #include <stdint.h>
    static pthread_mutex_t inferd_front = PTHREAD_MUTEX_INITIALIZER;
    /* A thread holds this one while it waits for the lock: so no other overtakes it. */
    static pthread_mutex_t inferd_front_turn = PTHREAD_MUTEX_INITIALIZER;
    enum { INFERD_FRONT_SPINS = 100 };
    static inline void inferd_front_relax(void) {
    #if defined(__x86_64__)
        __builtin_ia32_pause();
    #elif defined(__aarch64__)
        __asm__ volatile("yield");
    #endif
    }
    static int32_t inferd_front_waiting;
    static __thread int inferd_front_depth;
    /* whether this thread always has short slices */
    static __thread int inferd_front_hurries;
    /* the slices that this thread gets back when it leaves the front; 0: it has not changed them */
    static __thread uint64_t inferd_front_slices;
    static inline int inferd_front_try(void) {
        int got;
        if (pthread_mutex_trylock(&inferd_front_turn) != 0) return 0;
        got = pthread_mutex_trylock(&inferd_front) == 0;
        pthread_mutex_unlock(&inferd_front_turn);
        return got;
    }
    static inline int inferd_front_spin(void) {
        for (int i = 0; i < INFERD_FRONT_SPINS; i++) {  /* it is held for about a microsecond */
            if (!__atomic_load_n(&inferd_front_waiting, __ATOMIC_RELAXED) && inferd_front_try()) return 1;
            inferd_front_relax();
        }
        return 0;
    }
    static inline void inferd_front_wait(void) {
        __atomic_fetch_add(&inferd_front_waiting, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&inferd_front_turn);
        pthread_mutex_lock(&inferd_front);
        pthread_mutex_unlock(&inferd_front_turn);
        __atomic_fetch_sub(&inferd_front_waiting, 1, __ATOMIC_RELAXED);
    }
    static inline void inferd_front_release(void) { pthread_mutex_unlock(&inferd_front); }
    static inline int inferd_front_is_wanted(void) {
        return __atomic_load_n(&inferd_front_waiting, __ATOMIC_RELAXED) != 0;
    }
    """
    int depth "inferd_front_depth"
    bint try_lock "inferd_front_try"() nogil
    bint spin "inferd_front_spin"() nogil
    void wait "inferd_front_wait"() nogil
    bint hurries "inferd_front_hurries"
    uint64_t usual "inferd_front_slices"
    void release "inferd_front_release"() nogil
    bint is_wanted "inferd_front_is_wanted"() nogil

cdef int32_t threads = 0     # I/O threads that run


cdef void front_hurry() noexcept nogil:
    global hurries
    slices(SHORT_SLICE_NS)
    hurries = True


cdef void wait_for_lock() noexcept nogil:
    global usual
    if spin():
        return
    if not hurries and usual == 0:
        usual = slices(SHORT_SLICE_NS)
    wait()


cdef inline void leave() noexcept nogil:
    global usual
    release()
    if usual:
        slices(usual)
        usual = 0


cdef void front_begin() noexcept nogil:
    fetch_add32(&threads, 1)


cdef void front_end() noexcept nogil:
    fetch_add32(&threads, -1)


cdef void front_enter() noexcept:
    global depth
    if load32(&threads) == 0 and depth == 0:
        return
    if depth == 0 and not try_lock():
        with nogil:
            wait_for_lock()
    depth += 1


cdef void front_enter_nogil() noexcept nogil:
    global depth
    if load32(&threads) == 0 and depth == 0:
        return
    if depth == 0 and not try_lock():
        wait_for_lock()
    depth += 1


cdef void front_leave() noexcept nogil:
    global depth
    if depth == 0:
        return
    depth -= 1
    if depth == 0:
        leave()


cdef bint front_pause() noexcept nogil:
    global depth
    if depth != 1 or load32(&threads) < 2:
        return False
    depth = 0
    release()
    return True


cdef void front_resume(bint paused) noexcept nogil:
    if paused:
        front_enter_nogil()


cdef void front_yield() noexcept nogil:
    if depth == 1 and is_wanted():
        release()
        wait_for_lock()


# ---------------------------------------------------------------------------------------------------------------------
# Events for Python

cdef void python_post(PythonEvents *events, PythonEvent *event) noexcept nogil:
    cdef uint64_t one = 1
    if event.posted:
        return
    event.posted = True
    if fetch_add32(&events.waiting, 1) == 0 and events.fd >= 0:
        write(events.fd, &one, sizeof(one))
    list_append(events, event)


cdef void python_withdraw(PythonEvents *events, PythonEvent *event) noexcept nogil:
    if event.posted:
        event.posted = False
        list_remove(events, event)
        fetch_add32(&events.waiting, -1)


cdef int python_hear(PythonEvents *events) except -1:
    # First the descriptor: an event that is posted from now on writes it again. It may be readable without an event,
    # because events are withdrawn.
    cdef uint64_t count
    read(events.fd, &count, sizeof(count))
    return python_run(events)


cdef int python_run(PythonEvents *events) except -1:
    # An event that is posted meanwhile is run the next time, so the event loop comes to its other work.
    cdef PythonEvent *event
    cdef int32_t left
    cdef uint64_t one = 1
    if load32(&events.waiting) == 0:
        return 0
    front_enter()
    left = events.waiting
    try:
        while events.first != NULL and left:
            left -= 1
            event = events.first
            python_withdraw(events, event)
            event.run(event)
            front_enter()
        front_leave()
    finally:
        if load32(&events.waiting) and events.fd >= 0:
            write(events.fd, &one, sizeof(one))
    return 0
