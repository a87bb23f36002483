"""The timers of a front, in one binary heap.

Each timer knows its place, so that it can be removed. One descriptor of the system is readable when the earliest timer
is due, as exactly as the system measures time: nothing polls.

Code that would move its timer often, and seldom needs it, sets the timer to a time before which nothing can be due. It
checks when the timer fires, instead of moving the timer at each event.
"""

cimport cython
from libc.errno cimport errno
from libc.math cimport ceil, isinf
from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from posix.unistd cimport close, read

from inferd._native.assertion cimport assert_that
from inferd._native.clock cimport now_ns
from inferd._native.front cimport (
    PythonEvent,
    front_enter,
    front_leave,
    python_hear,
    python_post,
    python_run,
    python_withdraw,
)

import os

cdef extern from *:
    """
    #include <sys/timerfd.h>
    static inline int inferd_timerfd(void) { return timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC); }
    static inline void inferd_timer_set(int fd, int64_t ns) {
        struct itimerspec t = {{0, 0}, {(time_t)(ns / 1000000000), (long)(ns % 1000000000)}};
        timerfd_settime(fd, TFD_TIMER_ABSTIME, &t, NULL);
    }
    """
    int make_timerfd "inferd_timerfd"() nogil
    void timer_set "inferd_timer_set"(int fd, int64_t ns) nogil

cdef enum:
    FIRST_CAPACITY = 64

cdef int64_t FIRING = 1      # Timers.armed_ns while timers fire: earlier than any time that could be set


# ---------------------------------------------------------------------------------------------------------------------
# The heap


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
    # move the timer to its place, above `slot` or below
    if slot > 1 and is_before(timer, timers.heap[slot // 2]):
        sift_up(timers, timer, slot)
    else:
        sift_down(timers, timer, slot)


cdef void arm(Timers *timers) noexcept nogil:
    # Set the descriptor if the earliest timer is due before the time for which it is set. It may be readable too early.
    cdef int64_t earliest
    if timers.count == 0 or timers.fd < 0:
        return
    earliest = timers.heap[1].due_ns
    if timers.armed_ns == 0 or earliest < timers.armed_ns:
        timers.armed_ns = earliest
        timer_set(timers.fd, max(earliest, <int64_t>1))  # 0 would be never


cdef bint timers_set(Timers *timers, Timer *timer, int64_t due_ns) noexcept nogil:
    if timer.slot == 0 and not timers_have_room(timers):
        return False
    assert_that(timer.slot == 0 or timers.heap[timer.slot] == timer)
    timer.due_ns = due_ns
    timer.order = timers.order
    timers.order += 1
    if timer.slot:
        sift(timers, timer, timer.slot)
    else:
        timers.count += 1
        sift_up(timers, timer, timers.count)
    arm(timers)
    return True


cdef void timers_clear(Timers *timers, Timer *timer) noexcept nogil:
    cdef uint32_t slot = timer.slot
    cdef Timer *last
    if slot == 0:
        return
    assert_that(slot <= timers.count and timers.heap[slot] == timer)
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


cdef void timers_fire(Timers *timers, int64_t now) noexcept nogil:
    cdef uint64_t end = timers.order
    cdef Timer *timer
    timers.armed_ns = FIRING
    while timers.count and timers.heap[1].order < end:
        timer = timers_due(timers, now)
        if timer == NULL:
            break
        timer.fire(timer, now)
    timers.armed_ns = 0
    arm(timers)


cdef void timers_expire(Timers *timers) noexcept nogil:
    cdef uint64_t count
    read(timers.fd, &count, sizeof(count))
    timers_fire(timers, now_ns())


# ---------------------------------------------------------------------------------------------------------------------
# For Python

cdef class TimersHandle:
    """The timers of one event loop, and the events that it is to run. Register `fd` as a reader that calls `fire`."""

    def __cinit__(self):
        self.timers.python.fd = -1
        self.timers.fd = make_timerfd()
        if self.timers.fd < 0:
            raise OSError(errno, "cannot make the descriptor of the timers")

    def __dealloc__(self):
        if self.timers.fd >= 0:
            close(self.timers.fd)
        if self.timers.python.fd >= 0:
            close(self.timers.python.fd)
        timers_free(&self.timers)

    @property
    def fd(self) -> int:
        """Readable when a timer may be due."""
        return self.timers.fd

    @property
    def count(self) -> int:
        """The number of timers that are set."""
        return self.timers.count

    def time(self) -> float:
        """The time in seconds by which deadlines are given: that of time.monotonic()."""
        return now_ns() * 1e-9

    def fire(self) -> None:
        """Fire the timers that are due."""
        timers_expire(&self.timers)
        python_run(&self.timers.python)

    def hear(self) -> int:
        """A descriptor that is readable when `run_events` must be called, from now on."""
        if self.timers.python.fd < 0:
            self.timers.python.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self.timers.python.fd

    def run_events(self) -> None:
        """Run what connections, calls and timers have for Python."""
        if self.timers.python.fd >= 0:
            python_hear(&self.timers.python)
        else:
            python_run(&self.timers.python)


cdef void ring(Timer *timer, int64_t now) noexcept nogil:
    cdef AlarmState *alarm = <AlarmState *>timer
    python_post(alarm.python, &alarm.rung)


cdef int call_alarm(PythonEvent *event) except -1:
    cdef Alarm alarm = <Alarm>event.owner
    front_leave()
    alarm.call()
    return 0


@cython.no_gc_clear  # __dealloc__ needs the timers; cycles go through the function's owner and can be cleared there
cdef class Alarm:
    """Calls a function at a deadline. There is none at first; when this object is gone, the function is not called.

    Args:
        timers: those of the event loop that calls the function.
        function: called without arguments, never before the deadline.
    """

    def __init__(self, TimersHandle timers not None, function):
        self.timers = timers
        self.function = function
        self.state.python = &timers.timers.python
        self.state.timer.fire = ring
        self.state.rung.run = call_alarm
        self.state.rung.owner = <void *>self

    def __dealloc__(self):
        if self.timers is not None:
            self.forget()

    cdef void call(self) noexcept:
        self.function()

    cdef void forget(self) noexcept:
        front_enter()
        timers_clear(&self.timers.timers, &self.state.timer)
        python_withdraw(self.state.python, &self.state.rung)
        front_leave()

    def set(self, deadline: float) -> None:
        """Call the function at `deadline` by the clock of `TimersHandle.time`, instead of at the deadline that was set
        before; infinity: never.

        Raises:
            MemoryError: there is no memory for it.
        """
        cdef double due = deadline * 1e9
        cdef bint done
        self.forget()
        if isinf(due) and due > 0:
            return
        front_enter()
        done = timers_set(&self.timers.timers, &self.state.timer,
                          INT64_MAX if due > 9e18 else max(<int64_t>0, <int64_t>ceil(due)))
        front_leave()
        if not done:
            raise MemoryError("no memory for a timer")

    def cancel(self) -> None:
        """Cancel the call."""
        self.forget()
