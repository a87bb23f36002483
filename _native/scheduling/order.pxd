# Answers that leave in the order in which their requests came, whatever the order in which instances finish.

from _native.request.errand cimport Errand
from _native.request.request cimport Request, Response

cdef struct Turn:
    # of one request, from when it is queued until its final answer has left
    Order *order
    Turn *previous
    Turn *next
    Response *first          # answers that wait for their turn, in their own order
    Response *last

cdef struct Order:
    # All on the loop.
    Errand errand            # the first member; see order_errand in _native.request.bridge
    void *lane               # Lane that the requests are for
    void *bridge             # Bridge that they return through
    bint posted              # the errand is on its way
    Turn *first              # of the request that came first
    Turn *last

cdef Order *order_new(void *lane) noexcept nogil
cdef void order_free(Order *order) noexcept nogil
# Give the request the last turn. False: no memory.
cdef bint order_enter(Order *order, Request *request) noexcept nogil
# Let an answer of the request wait for its turn.
cdef void order_hold(Turn *turn, Response *response) noexcept nogil
# Take out an answer whose turn has come; NULL when there is none.
cdef Response *order_next(Order *order) noexcept nogil
# Whether there is one.
cdef inline bint order_is_due(const Order *order) noexcept nogil:
    return order.first != NULL and order.first.first != NULL
# The request waits for no turn any more. Its answers that waited, a chain; NULL when there are none.
cdef Response *order_leave(Request *request) noexcept nogil
