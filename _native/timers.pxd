# The timers of one front: a binary heap whose members know their position.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.front cimport PythonEvent, PythonEvents

cdef struct Timer:
    # a member of the structure that it belongs to
    int64_t due_ns
    uint64_t order           # the order of setting decides between timers that are due at the same time
    uint32_t slot            # position in the heap, from 1; 0: not in the heap
    void (*fire)(Timer *timer, int64_t now) noexcept nogil   # the timer has left the heap, and may be set again
    void *owner              # that structure

cdef struct Timers:
    Timer **heap             # the earliest is at position 1
    uint32_t count
    uint32_t capacity
    uint64_t order           # of the next timer that is set
    int fd                   # readable when the earliest timer may be due; -1: no thread waits for it
    int64_t armed_ns         # the time for which `fd` is set; 0: none
    PythonEvents python      # the events that the event loop of this front is to run

cdef bint timers_grow(Timers *timers) noexcept nogil
# Make room for one more timer, if there is none. False: no memory.
cdef inline bint timers_have_room(Timers *timers) noexcept nogil:
    return timers.count + 1 < timers.capacity or timers_grow(timers)
# Set the timer, or move it if it is set. False: no memory; impossible if it was set, or after timers_have_room.
cdef bint timers_set(Timers *timers, Timer *timer, int64_t due_ns) noexcept nogil
# Remove the timer if it is set.
cdef void timers_clear(Timers *timers, Timer *timer) noexcept nogil
# Remove the earliest timer that is due by now and return it; NULL if none is due.
cdef Timer *timers_due(Timers *timers, int64_t now) noexcept nogil
# On the thread that waits for `fd`, which is readable: fire what is due.
cdef void timers_expire(Timers *timers) noexcept nogil
# Call `fire` of all timers that are due by now. Timers that they set are left for the next call, even if due.
cdef void timers_fire(Timers *timers, int64_t now) noexcept nogil


cdef class TimersHandle:
    # a Timers for Python
    cdef Timers timers


cdef struct AlarmState:
    Timer timer              # the first member
    PythonEvent rung         # the deadline has passed
    PythonEvents *python


cdef class Alarm:
    cdef TimersHandle timers
    cdef AlarmState state
    cdef object function
    cdef void call(self) noexcept
    cdef void forget(self) noexcept
