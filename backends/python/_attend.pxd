# The attendant's loop: what it waits for.

from libc.stdint cimport int64_t

from backends.python._channel cimport Channel
from backends.python._wire cimport Head

cdef enum:
    # places in the list of what is waited for
    AT_WAKE = 0
    AT_END = 1
    AT_SIDE = 2
    AT_OUTPUT = 3
    AT_ERRORS = 4
    AT_CALLS = 5
    AT_WORK = 6
    PLACES = 7

cdef struct Watch:
    Channel *channel
    void *listener           # the attendant, while a worker is there; see Link.connect
    int output               # the pipes of what it prints; -1: closed
    int errors
    int64_t taken            # of the arena, when it was last looked at
    int64_t second_ns        # when the second began of which `printed` tells
    int64_t printed          # bytes of the worker's output that were read in it
    bint told_killed         # watch_loop has returned because the worker is being ended

# Keep the worker until something happens: what, as a place in the list; PLACES: the time is over. `with_work`: packets
# of the work socket are wanted, too; one of them has this head, and is in channel.packet.
cdef int watch_loop(Watch *watch, int64_t until, bint with_work, Head *head) noexcept nogil
# The worker is being ended: whoever executes says so, or the event loop.
cdef bint watch_is_ending(Watch *watch) noexcept nogil
