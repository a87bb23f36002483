"""Order: answers leave in the order in which requests came (`preserve_ordering`).

Every request gets a turn when it is queued. An answer that is ready before its turn waits; it goes when the answers
before it have gone. Who will get no answer from an instance (its client left, its deadline passed, it waited too long)
gives its turn up at once, so nobody waits for it.
"""

from libc.stdlib cimport calloc, free

from _native.list cimport list_append, list_remove
from _native.request.request cimport Request, Response


cdef Order *order_new(void *lane) noexcept nogil:
    cdef Order *order = <Order *>calloc(1, sizeof(Order))
    if order != NULL:
        order.lane = lane
    return order


cdef void order_free(Order *order) noexcept nogil:
    free(order)


cdef bint order_enter(Order *order, Request *request) noexcept nogil:
    cdef Turn *turn = <Turn *>calloc(1, sizeof(Turn))
    if turn == NULL:
        return False
    turn.order = order
    list_append(order, turn)
    order.bridge = request.bridge
    request.turn = turn
    return True


cdef void order_hold(Turn *turn, Response *response) noexcept nogil:
    response.next = NULL
    if turn.first == NULL:
        turn.first = response
    else:
        turn.last.next = response
    turn.last = response


cdef Response *order_next(Order *order) noexcept nogil:
    cdef Turn *turn = order.first
    cdef Response *response
    if turn == NULL or turn.first == NULL:
        return NULL
    response = turn.first
    turn.first = response.next
    return response


cdef Response *order_leave(Request *request) noexcept nogil:
    cdef Turn *turn = <Turn *>request.turn
    cdef Response *held = turn.first
    list_remove(turn.order, turn)
    request.turn = NULL
    free(turn)
    return held
