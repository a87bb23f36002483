"""Timers: what is due at a time, in a binary heap whose members know their place, so that each can be taken out."""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, realloc

cdef enum:
    FIRST_CAPACITY = 64


cdef bint timers_grow(Timers *timers) noexcept nogil:
    cdef uint32_t capacity = max(<uint32_t>FIRST_CAPACITY, timers.capacity * 2)
    cdef Timer **grown = <Timer **>realloc(timers.heap, capacity * sizeof(Timer *))
    if grown == NULL:
        return False
    timers.heap = grown
    timers.capacity = capacity
    return True


cdef void timers_free(Timers *timers) noexcept nogil:
    free(timers.heap)
    timers.heap = NULL
    timers.count = timers.capacity = 0


cdef inline bint is_before(const Timer *a, const Timer *b) noexcept nogil:
    return a.due_ns < b.due_ns or (a.due_ns == b.due_ns and a.order < b.order)


cdef inline void place(Timers *timers, Timer *timer, uint32_t slot) noexcept nogil:
    timers.heap[slot] = timer
    timer.slot = slot


cdef void sift_up(Timers *timers, Timer *timer, uint32_t slot) noexcept nogil:
    while slot > 1 and is_before(timer, timers.heap[slot // 2]):
        place(timers, timers.heap[slot // 2], slot)
        slot //= 2
    place(timers, timer, slot)


cdef void sift_down(Timers *timers, Timer *timer, uint32_t slot) noexcept nogil:
    cdef uint32_t child = slot * 2
    while child <= timers.count:
        if child < timers.count and is_before(timers.heap[child + 1], timers.heap[child]):
            child += 1
        if is_before(timer, timers.heap[child]):
            break
        place(timers, timers.heap[child], slot)
        slot = child
        child = slot * 2
    place(timers, timer, slot)


cdef void sift(Timers *timers, Timer *timer, uint32_t slot) noexcept nogil:
    # to its place, above here or below
    if slot > 1 and is_before(timer, timers.heap[slot // 2]):
        sift_up(timers, timer, slot)
    else:
        sift_down(timers, timer, slot)


cdef void timers_set(Timers *timers, Timer *timer, int64_t due_ns) noexcept nogil:
    timer.due_ns = due_ns
    timer.order = timers.order
    timers.order += 1
    if timer.slot:
        sift(timers, timer, timer.slot)
        return
    timers.count += 1
    sift_up(timers, timer, timers.count)


cdef void timers_clear(Timers *timers, Timer *timer) noexcept nogil:
    cdef uint32_t slot = timer.slot
    cdef Timer *last
    if slot == 0:
        return
    timer.slot = 0
    last = timers.heap[timers.count]
    timers.count -= 1
    if last != timer:
        sift(timers, last, slot)


cdef Timer *timers_due(Timers *timers, int64_t now) noexcept nogil:
    cdef Timer *timer
    if timers.count == 0 or timers.heap[1].due_ns > now:
        return NULL
    timer = timers.heap[1]
    timers_clear(timers, timer)
    return timer
