# Response order: responses leave in the order in which their requests came, whichever instance finishes first.

from inferd._native.request.callback cimport PostedCallback
from inferd._native.request.request cimport Request, Response

cdef struct OrderEntry:
    # the place of one request in the order, from when it is queued until its final response has left
    ResponseOrder *order
    OrderEntry *previous
    OrderEntry *next
    Response *first          # responses that wait for those of earlier requests, in their own order
    Response *last

cdef struct ResponseOrder:
    # Used in the front.
    PostedCallback callback  # the first member; see order_callback in inferd._native.request.bridge
    void *lane               # Lane of the requests
    void *bridge             # Bridge through which they return
    bint posted              # the callback is posted and has not run
    OrderEntry *first        # of the oldest request
    OrderEntry *last

cdef ResponseOrder *order_new(void *lane) noexcept nogil
cdef void order_free(ResponseOrder *order) noexcept nogil
# Give the request an entry at the end. False: no memory.
cdef bint order_enter(ResponseOrder *order, Request *request) noexcept nogil
# Keep a response of this request until the responses before it have left.
cdef void order_hold(OrderEntry *entry, Response *response) noexcept nogil
# Remove and return a response that may leave now; NULL: there is none.
cdef Response *order_next(ResponseOrder *order) noexcept nogil
# Whether a response may leave now.
cdef inline bint order_is_due(const ResponseOrder *order) noexcept nogil:
    return order.first != NULL and order.first.first != NULL
# Remove the request from the order. Returns its responses that wait, as a chain; NULL: there are none.
cdef Response *order_leave(Request *request) noexcept nogil
