"""Requests that come through Python: of the grpcio front door, of streams and of tests.

A `Ticket` is the sink of such a request. It keeps itself alive until the final response, or until it is cancelled.
"""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uintptr_t

from inferd._native.atomic cimport add_own
from inferd._native.front cimport front_enter, front_leave
from inferd._native.memory.resource cimport block_view
from inferd._native.refusal cimport refusal_name
from inferd._native.request.bridge cimport bridge_abandon
from inferd._native.request.lane cimport Lane
from inferd._native.request.life cimport request_is_queued
from inferd._native.request.request cimport Request, Response
from inferd._native.service.encoding cimport error_streamed, response_bytes, response_streamed
from inferd._native.status cimport STATUS_OK, STATUS_RESOURCE_EXHAUSTED

from collections import deque


cdef void deliver_python(void *sink, Response *response, int status, const char *details) noexcept nogil:
    with gil:
        (<Ticket>sink).answer(response, status, details)


cdef Ticket ticket_new(Request *request, object deliver, bint stream, str peer):
    cdef Ticket ticket = Ticket.__new__(Ticket)
    ticket.request = request
    ticket.deliver = deliver
    ticket.stream = stream
    ticket.peer = peer
    ticket.acks = deque()
    ticket.reason = ""
    Py_INCREF(ticket)
    request.single = not stream
    request.deliver = deliver_python
    request.sink = <void *>ticket
    return ticket


cdef class Ticket:
    """A request that was submitted from Python: delivers its responses, and can cancel it."""

    def __init__(self):
        raise TypeError("Ticket cannot be created from Python")

    cdef void answer(self, Response *response, int status, const char *details) noexcept:
        cdef object deliver = self.deliver
        cdef object message = None
        cdef bint final = response == NULL or response.final
        cdef str text = details.decode("utf-8", "replace") if details != NULL and status != STATUS_OK else ""
        try:
            if status == STATUS_OK and response.empty and not (self.stream and response.request.empty_final):
                pass  # the response only ends the request
            elif status == STATUS_OK:
                message = response_streamed(response) if self.stream else response_bytes(response)
            elif self.stream:
                message = error_streamed(self.request, final, details)
        except MemoryError:
            status = STATUS_RESOURCE_EXHAUSTED
            text = "no memory for the response"
        if message is not None and status == STATUS_OK:
            add_own(&(<Lane *>response.request.lane).sent, len(<bytes>message))
        if response != NULL and response.refusal:
            self.reason = refusal_name(response.refusal).decode()
        if message is not None and self.stream:
            self.acks.append(None if response == NULL or response.ack == NULL
                             else block_view(response.ack, response.ack.data, 0))
        if final:
            self.done = True
            self.request = NULL
            self.deliver = None
            Py_DECREF(self)
        deliver(status, text, message)

    @property
    def decoupled(self) -> bool:
        """Whether the model may send any number of responses, not in order with those to other requests."""
        cdef Request *request = self.request
        return request != NULL and request.signature != NULL and request.signature.decoupled

    @property
    def queued(self) -> bool:
        """Whether it waits for an instance."""
        cdef Request *request = self.request
        return request != NULL and request_is_queued(request)

    @property
    def lane(self) -> int:
        """A number for the lane of the request; 0: it has none, or is over."""
        cdef Request *request = self.request
        return <uintptr_t>request.lane if request != NULL else 0

    @property
    def waiting(self) -> int:
        """How many requests wait in the lane of this one."""
        cdef Request *request = self.request
        cdef Lane *lane = <Lane *>request.lane if request != NULL else NULL
        return lane.scheduler.pending(lane) if lane != NULL and lane.scheduler != NULL else 0

    def taken(self) -> None:
        """Acknowledge the oldest delivered response of a stream, which was sent: the model may send more."""
        self.acks.popleft()

    def cancel(self) -> None:
        """Cancel the request: no response is delivered any more, and it is not executed if it still waits."""
        cdef Request *request
        front_enter()  # first: while this thread waits for the front, the final response may be delivered
        request = self.request
        if request != NULL:
            self.request = NULL
            bridge_abandon(request)
        front_leave()
        if request != NULL:
            self.deliver = None
            Py_DECREF(self)
