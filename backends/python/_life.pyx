"""The life of an instance's worker.

    state      meaning                                may become
    NONE       there is none                          STARTING  the attendant has started one
                                                      NONE      it could not be started
                                                      CLOSED    and there will be none
    STARTING   it loads its model                     UP        it says so
                                                      ENDING    its end is requested
                                                      NONE      it has ended
                                                      CLOSED    and there will be none
    UP         it executes                            ENDING, NONE, CLOSED: the same
    ENDING     it is told to end, and nothing is      NONE      it has ended
               sent to it any more                    CLOSED    and there will be none
    CLOSED     the instance is closed                 CLOSED    the attendant itself has failed

The attendant moves the worker, and it alone learns that the worker has ended. Any thread may request the end: the
executor, which finds the socket closed or the time over; a reader of packets that break a rule; the front. Beside the
state, requests *wait* for the next worker, or are refused until one is up, because the last starts failed
(`Channel.patient`).
"""

from libc.stdint cimport uint32_t
from libc.stdio cimport fprintf, stderr
from libc.stdlib cimport abort

cdef uint32_t[<int>WORKER_STATES] may_become     # bits of states
cdef uint32_t OVER = 1 << <int>WORKER_NONE | 1 << <int>WORKER_CLOSED
may_become[<int>WORKER_NONE] = 1 << <int>WORKER_STARTING | OVER
may_become[<int>WORKER_STARTING] = 1 << <int>WORKER_UP | 1 << <int>WORKER_ENDING | OVER
may_become[<int>WORKER_UP] = 1 << <int>WORKER_ENDING | OVER
may_become[<int>WORKER_ENDING] = OVER
may_become[<int>WORKER_CLOSED] = 1 << <int>WORKER_CLOSED


cdef void check_worker_move(WorkerState before, WorkerState after) noexcept nogil:
    if may_become[<int>before] >> <int>after & 1:
        return
    fprintf(stderr, "a worker goes from state %d to %d; see inferd.backends.python._life\n", <int>before, <int>after)
    abort()
