"""Objects of Python that wait until a thread with the GIL lets go of them.

The I/O thread gives back the outputs of a framework when they are written to the socket, and must not wait for the
GIL. So the outputs wait in a stack until a thread that has the GIL anyway comes by: that of an instance, or the event
loop's.
"""

from libc.stdint cimport int32_t

from inferd._native.atomic cimport load32, store32

cdef extern from *:
    """
    #include <stdint.h>
    static void *inferd_owned;  /* the stack: the first of a list whose first members are the links */
    static inline void inferd_owned_push(void *item) {
        void *top = __atomic_load_n(&inferd_owned, __ATOMIC_RELAXED);
        do {
            *(void **)item = top;
        } while (!__atomic_compare_exchange_n(&inferd_owned, &top, item, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
    }
    static inline void *inferd_owned_take(void) { return __atomic_exchange_n(&inferd_owned, NULL, __ATOMIC_ACQUIRE); }
    static inline int inferd_owned_waits(void) { return __atomic_load_n(&inferd_owned, __ATOMIC_RELAXED) != NULL; }
    """
    void push "inferd_owned_push"(void *item) nogil
    void *take "inferd_owned_take"() nogil
    bint waits "inferd_owned_waits"() nogil

cdef extern from "Python.h":
    int PyGILState_Check() nogil

cdef int32_t promised = 0


cdef void owned_promise(bint drained) noexcept nogil:
    store32(&promised, 1 if drained else 0)


cdef void owned_release(void *owner) noexcept nogil:
    cdef Owned *owned = <Owned *>owner
    if load32(&promised) and not PyGILState_Check():
        push(owned)
        return
    with gil:
        owned.let_go(owned)


cdef bint owned_waits() noexcept nogil:
    return waits()


cdef void owned_drain() noexcept:
    cdef Owned *owned
    cdef Owned *following
    if not waits():
        return
    owned = <Owned *>take()
    while owned != NULL:
        following = owned.next
        owned.let_go(owned)
        owned = following
