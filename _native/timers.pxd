# What is due at a time, on one event loop: a binary heap whose members know their place.

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef struct Timer:
    # lies in what it is about
    int64_t due_ns
    uint64_t order           # among those that are due at the same time: as they were set
    uint32_t slot            # 1-based place in the heap; 0: not in it
    void (*fire)(Timer *timer, int64_t now) noexcept nogil   # out of the heap by then; may set itself again
    void *owner              # what it is about

cdef struct Timers:
    Timer **heap             # the earliest at place 1
    uint32_t count
    uint32_t capacity
    uint64_t order           # of the next one
    int fd                   # readable when the earliest may be due; -1: nobody waits for that
    int64_t armed_ns         # what it is set to; 0: nothing

cdef bint timers_grow(Timers *timers) noexcept nogil
# Whether one more timer can be set, after making room for it; False: no memory.
cdef inline bint timers_have_room(Timers *timers) noexcept nogil:
    return timers.count + 1 < timers.capacity or timers_grow(timers)
# Set, or move when it is set already. False: no memory, which cannot be when it is set already or timers_have_room.
cdef bint timers_set(Timers *timers, Timer *timer, int64_t due_ns) noexcept nogil
# Take it out if it is in.
cdef void timers_clear(Timers *timers, Timer *timer) noexcept nogil
# Take out one that is due by now, the earliest first; NULL when none is.
cdef Timer *timers_due(Timers *timers, int64_t now) noexcept nogil
# Call `fire` of all that are due by now. What they set waits for the next time, also where it is due.
cdef void timers_fire(Timers *timers, int64_t now) noexcept nogil


cdef class TimersHandle:
    # owns Timers for Python
    cdef Timers timers


cdef class Alarm:
    cdef TimersHandle timers
    cdef Timer timer
    cdef object function
    cdef void ring(self) noexcept
