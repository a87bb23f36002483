# The life of an instance's worker: the only place that changes its state.

cdef enum WorkerState:
    WORKER_NONE              # there is none, or the next one is not started yet
    WORKER_STARTING          # it loads its model
    WORKER_UP
    WORKER_ENDING            # it is being ended
    WORKER_CLOSED            # there will be none
    WORKER_STATES            # how many there are

# May the worker go from one state to the other? For debug and sanitizer builds, which check each move.
cdef void check_worker_move(WorkerState before, WorkerState after) noexcept nogil
