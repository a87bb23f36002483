"""The life of a request.

    state      belongs to                             may become
    NEW        its maker                              QUEUED    its lane has taken it in
                                                      WAITING   for a model to be loaded, for parts, or for a response
                                                      TAKEN     answered at once, or by the steps of an ensemble
                                                      ENDED     refused
    WAITING    the awaited object (Request.wait)      NEW       the model is there
                                                      TAKEN     the response is there, or it has left
    QUEUED     its lane                               TAKEN     in a batch, or removed from the queue
    TAKEN      its executor, then the bridge          QUEUED    to be executed again (iterative sequences)
                                                      KEPT      the cache keeps it, with its response
                                                      ENDED     its final response has passed the bridge
    KEPT       the cache, which frees it
    ENDED      nobody: it is freed

The lane's lock protects the state of a queued request. So only the lane knows whether a request is still queued, and
code that wants the request back asks the lane. In any state a request may be *admitted* (it counts against the limit of
the server until it ends) and *abandoned* (nobody waits for its response any more; `Abandonment`).
Debug and sanitizer builds check each move.
"""

from libc.stdint cimport uint32_t
from libc.stdio cimport fprintf, stderr
from libc.stdlib cimport abort

from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport REQUEST_QUEUED, REQUEST_STATES

cdef uint32_t[<int>REQUEST_STATES] may_become     # bits of states
may_become[<int>REQUEST_NEW] = (
    1 << <int>REQUEST_QUEUED | 1 << <int>REQUEST_WAITING | 1 << <int>REQUEST_TAKEN | 1 << <int>REQUEST_ENDED)
may_become[<int>REQUEST_WAITING] = 1 << <int>REQUEST_NEW | 1 << <int>REQUEST_TAKEN
may_become[<int>REQUEST_QUEUED] = 1 << <int>REQUEST_TAKEN
may_become[<int>REQUEST_TAKEN] = 1 << <int>REQUEST_QUEUED | 1 << <int>REQUEST_KEPT | 1 << <int>REQUEST_ENDED


cdef void check_move(const Request *request, RequestState before, RequestState after) noexcept nogil:
    if request.state == before and may_become[<int>before] >> <int>after & 1:
        return
    fprintf(stderr, "a request in state %d is moved from state %d to %d; see inferd._native.request.life\n",
            <int>request.state, <int>before, <int>after)
    abort()


cdef bint request_reconsider(Request *request, const Terms *terms) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    if request.wait != NULL:
        return request.wait.reconsider != NULL and request.wait.reconsider(request, terms)
    return lane.scheduler.reconsider(lane, request, terms)
