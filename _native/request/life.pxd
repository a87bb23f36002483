# The life of a request: the only place that changes its state and the fields that belong to the state.

from libc.stdint cimport int32_t, uint32_t

from inferd._native.assertion cimport CHECKED, assert_that
from inferd._native.atomic cimport load32, store32
from inferd._native.request.request cimport (
    REQUEST_ENDED,
    REQUEST_KEPT,
    REQUEST_NEW,
    REQUEST_QUEUED,
    REQUEST_TAKEN,
    REQUEST_WAITING,
    Request,
    RequestState,
    Terms,
    Wait,
)

# End the process unless the request is in the state `before`, and may go to `after`.
cdef void check_move(const Request *request, RequestState before, RequestState after) noexcept nogil


# Called by the owner in the state `before`: from now on the request belongs to the owner in the state `after`.
cdef inline void request_move(Request *request, RequestState before, RequestState after) noexcept nogil:
    if CHECKED:
        check_move(request, before, after)
    store32(<int32_t *>&request.state, <int32_t>after)


# In the front: whether the request waits in its lane, from which an instance may take it at any time.
cdef inline bint request_is_queued(const Request *request) noexcept nogil:
    return load32(<const int32_t *>&request.state) == <int32_t>REQUEST_QUEUED


# In the front: a new request waits for an object of this kind.
cdef inline void request_wait(Request *request, const Wait *wait, void *awaited) noexcept nogil:
    request_move(request, REQUEST_NEW, REQUEST_WAITING)
    request.wait = wait
    request.awaited = awaited


# In the front: the request waits no longer.
cdef inline void request_stop_waiting(Request *request, RequestState after) noexcept nogil:
    request_move(request, REQUEST_WAITING, after)
    request.wait = NULL
    request.awaited = NULL


# In the front: admit a new request, which counts against the server's limit.
cdef inline void request_admit(Request *request, uint32_t *admitted_count) noexcept nogil:
    assert_that(not request.admitted)
    request.admitted = True
    admitted_count[0] += 1


# In the front: the maker of a request keeps the request with its response after its end. The maker then frees it.
cdef inline void request_keep(Request *request) noexcept nogil:
    request_move(request, REQUEST_TAKEN, REQUEST_KEPT)


# In the front: the request ends: its final response has passed the bridge, or nobody wants one. True: the caller frees
# it. False: its maker keeps it.
cdef inline bint request_end(Request *request, uint32_t *admitted_count) noexcept nogil:
    if request.admitted:
        assert_that(admitted_count[0] > 0)
        request.admitted = False
        admitted_count[0] -= 1
    if request.state == REQUEST_KEPT:
        return False
    request_move(request, request.state, REQUEST_ENDED)
    return True


# In the front: a request that was submitted, and whose final response has not come, has these terms from now on. False:
# they no longer matter, because an instance has the request.
cdef bint request_reconsider(Request *request, const Terms *terms) noexcept nogil
