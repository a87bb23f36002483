# Answers that leave in the order in which their requests came, whatever the order in which instances finish.

from _native.request.callback cimport PostedCallback
from _native.request.request cimport Request, Response

cdef struct OrderEntry:
    # of one request, from when it is queued until its final answer has left
    ResponseOrder *order
    OrderEntry *previous
    OrderEntry *next
    Response *first          # answers that wait for those of earlier requests, in their own order
    Response *last

cdef struct ResponseOrder:
    # All on the loop.
    PostedCallback callback  # the first member; see order_callback in _native.request.bridge
    void *lane               # Lane that the requests are for
    void *bridge             # Bridge that they return through
    bint posted              # the callback is on its way
    OrderEntry *first        # of the request that came first
    OrderEntry *last

cdef ResponseOrder *order_new(void *lane) noexcept nogil
cdef void order_free(ResponseOrder *order) noexcept nogil
# Give the request the last entry. False: no memory.
cdef bint order_enter(ResponseOrder *order, Request *request) noexcept nogil
# Let an answer of the request wait until the answers before it have left.
cdef void order_hold(OrderEntry *entry, Response *response) noexcept nogil
# Take out an answer that may leave now; NULL when there is none.
cdef Response *order_next(ResponseOrder *order) noexcept nogil
# Whether there is one.
cdef inline bint order_is_due(const ResponseOrder *order) noexcept nogil:
    return order.first != NULL and order.first.first != NULL
# The request leaves the order. Its answers that waited, a chain; NULL when there are none.
cdef Response *order_leave(Request *request) noexcept nogil
