# The front: connections, calls, timers, sequences of responses, and all requests that no instance has. One thread at a
# time may touch it. While I/O threads run (`inferd._native.transport.io_thread`), that is the one that holds the
# front's lock; without them it is the event loop's.

from libc.stdint cimport int32_t

# One more I/O thread runs, or one has ended. While none runs, the lock is not taken: the event loop is alone.
cdef void front_begin() noexcept nogil
cdef void front_end() noexcept nogil

# Take the lock; the caller has the GIL. If the lock is not free, the function releases the GIL while it waits. A thread
# that holds the lock may take it again, and leaves as often as it has entered.
cdef void front_enter() noexcept
# Take the lock without the GIL.
cdef void front_enter_nogil() noexcept nogil
cdef void front_leave() noexcept nogil
# An I/O thread gives the lock back during a system call, or similar work on what only this thread uses. A single I/O
# thread keeps it. Pass the result of front_pause to front_resume, which takes the lock again.
cdef bint front_pause() noexcept nogil
cdef void front_resume(bint paused) noexcept nogil
# The calling thread is one that others wait for: it gets a core before others, as far as the system allows.
cdef void front_hurry() noexcept nogil
# Let others have the lock, if any waits for it.
cdef void front_yield() noexcept nogil


cdef struct PythonEvent:
    # A notice for the event loop, and a member of the structure that it is about.
    # Called with the GIL and within the front, so that nothing can have freed the event. Leaves the front. The event
    # may be posted again.
    int (*run)(PythonEvent *event) except -1
    void *owner              # that structure, if it does not begin with the event
    PythonEvent *previous
    PythonEvent *next
    bint posted

cdef struct PythonEvents:
    # the events that one event loop has not heard of yet
    PythonEvent *first
    PythonEvent *last
    int32_t waiting          # atomic: how many there are
    int fd                   # readable when events wait; -1: no event loop watches it

# Within the front: have the event loop run the event soon. Posting an event that waits has no effect.
cdef void python_post(PythonEvents *events, PythonEvent *event) noexcept nogil
# Within the front: the event loop will not run the event.
cdef void python_withdraw(PythonEvents *events, PythonEvent *event) noexcept nogil
# On the event loop, because the descriptor is readable: read it, and run the events that wait.
cdef int python_hear(PythonEvents *events) except -1
# On the event loop, with the GIL and without the lock: run the events that wait. If one raises, the others stay.
cdef int python_run(PythonEvents *events) except -1
