# What the attendant's loop waits for.

from libc.stdint cimport int64_t

from inferd.backends.python._channel cimport Channel
from inferd.backends.python._wire cimport Head

cdef enum:
    # indexes in the list of descriptors
    AT_WAKE = 0
    AT_END = 1
    AT_SIDE = 2
    AT_OUTPUT = 3
    AT_ERRORS = 4
    AT_CALLS = 5
    AT_WORK = 6
    PLACES = 7

cdef struct WorkerWatch:
    Channel *channel
    void *listener           # the attendant, while there is a worker; see Link.connect
    int output               # the pipes of the worker's output; -1: closed
    int errors
    int64_t taken            # of the arena, at the last look
    int64_t second_ns        # begin of the second in which `printed` is counted
    int64_t printed          # bytes of the worker's output that were read in that second
    int64_t side_ns          # the last look at the side socket
    int steady               # small responses in a row that came quickly, up to now
    bint gathered            # the next look has been put off once
    bint told_ending         # watch_loop has returned because the worker is being ended

# Serve the worker until something happens. Returns its index in the list; PLACES: the time is over. `with_work`: also
# wait for packets of the work socket; one of them, with this head, is then in channel.packet.
cdef int watch_loop(WorkerWatch *watch, int64_t until, bint with_work, Head *head) noexcept nogil
# Whether the worker is being ended: the executor of its batch, or the front, has decided that.
cdef bint watch_is_ending(WorkerWatch *watch) noexcept nogil
