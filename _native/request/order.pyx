"""Response order: responses leave in the order in which requests came (`preserve_ordering`).

Every request gets an entry when it is queued. An early response waits until the responses before it have left. A
request that will get no response from an instance (its client cancelled, its deadline or queue time passed) leaves the
order at once, so nothing waits for it.
"""

from libc.stdlib cimport calloc, free

from inferd._native.list cimport list_append, list_remove
from inferd._native.request.request cimport Request, Response


cdef ResponseOrder *order_new(void *lane) noexcept nogil:
    cdef ResponseOrder *order = <ResponseOrder *>calloc(1, sizeof(ResponseOrder))
    if order != NULL:
        order.lane = lane
    return order


cdef void order_free(ResponseOrder *order) noexcept nogil:
    free(order)


cdef bint order_enter(ResponseOrder *order, Request *request) noexcept nogil:
    cdef OrderEntry *entry = <OrderEntry *>calloc(1, sizeof(OrderEntry))
    if entry == NULL:
        return False
    entry.order = order
    list_append(order, entry)
    order.bridge = request.bridge
    request.order_entry = entry
    return True


cdef void order_hold(OrderEntry *entry, Response *response) noexcept nogil:
    response.next = NULL
    if entry.first == NULL:
        entry.first = response
    else:
        entry.last.next = response
    entry.last = response


cdef Response *order_next(ResponseOrder *order) noexcept nogil:
    cdef OrderEntry *entry = order.first
    cdef Response *response
    if entry == NULL or entry.first == NULL:
        return NULL
    response = entry.first
    entry.first = response.next
    return response


cdef Response *order_leave(Request *request) noexcept nogil:
    cdef OrderEntry *entry = <OrderEntry *>request.order_entry
    cdef Response *held = entry.first
    list_remove(entry.order, entry)
    request.order_entry = NULL
    free(entry)
    return held
