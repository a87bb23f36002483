"""Requests that come through Python: of the grpcio front door, of streams and of tests.

A `CallOrigin` says which call they serve. A `Ticket` is the sink of such a request. It keeps itself alive until the
final response, or until it is cancelled.
"""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from inferd._native.atomic cimport add_own
from inferd._native.front cimport front_enter, front_leave
from inferd._native.memory.resource cimport block_give, block_view, text_block
from inferd._native.refusal cimport REFUSAL_LIMIT_EXCEEDED, refusal_count
from inferd._native.request.bridge cimport bridge_abandon
from inferd._native.request.lane cimport Lane
from inferd._native.request.life cimport request_is_queued
from inferd._native.request.request cimport Request, Response
from inferd._native.service.encoding cimport error_streamed, response_bytes, response_streamed
from inferd._native.status cimport STATUS_OK, STATUS_RESOURCE_EXHAUSTED
from inferd._native.traceparent cimport traceparent_read

from collections import deque


cdef void deliver_python(void *sink, Response *response, int status, const char *details) noexcept nogil:
    with gil:
        (<Ticket>sink).answer(response, status, details)


cdef Ticket ticket_new(Request *request, object deliver, CallOrigin call):
    cdef Ticket ticket = Ticket.__new__(Ticket)
    ticket.acks = deque()
    ticket.request = request
    ticket.deliver = deliver
    ticket.call = call
    Py_INCREF(ticket)
    request.origin = call.origin
    request.single = not call.stream
    request.deliver = deliver_python
    request.sink = <void *>ticket
    return ticket


cdef class CallOrigin:
    """The call that requests serve, made once for each call.

    Args:
        caller: the caller's id, from `Authorizer.authorize`.
        user: the user of the client's process, if the kernel knows it; -1 otherwise.
        identity: a number for the client's certificate or user, from `inferd.server.front.peer`; 0 if neither is known.
        client: a number for the client with all its connections, such as `ClientUse.number`; 0 if unknown.
        trace: the client's `traceparent` and `baggage`, as W3C writes them.
        peer: the client's address, for logs and traces.
        forwarded: headers of the call, as a Forwarder has encoded them.
        stream: the call is a stream: responses are ModelStreamInferResponses, also for errors.
        stream_number: of the stream, for sequences that end with it; 0 for none.
    """

    def __init__(self, *, uint64_t caller=0, int64_t user=-1, uint64_t identity=0, uint64_t client=0,
                 tuple trace=("", ""), str peer="", bytes forwarded=b"", bint stream=False, uint64_t stream_number=0):
        cdef bytes said = trace[0].encode("ascii", "replace")
        self.caller = caller
        self.origin.user = user
        self.origin.identity = identity
        self.origin.client = client
        self.origin.stream = stream_number
        self.stream = stream
        self.baggage = trace[1].encode("ascii", "replace")
        traceparent_read(&self.context, said, len(said))
        self.context.baggage = self.baggage
        self.context.baggage_size = len(self.baggage)
        self.peer = peer
        self.forwarded = forwarded
        block_give(self.address)  # of an earlier call of this method
        self.address = text_block(peer) if peer else NULL

    def __dealloc__(self):
        block_give(self.address)


cdef class Ticket:
    """A request that was submitted from Python: delivers its responses, and can cancel it."""

    def __init__(self):
        raise TypeError("Ticket cannot be created from Python")

    cdef void answer(self, Response *response, int status, const char *details) noexcept:
        cdef object deliver = self.deliver
        cdef object message = None
        cdef bint final = response == NULL or response.final
        cdef bint stream = self.call.stream
        cdef str text = details.decode("utf-8", "replace") if details != NULL and status != STATUS_OK else ""
        try:
            if status == STATUS_OK and response.empty and not (stream and response.request.empty_final):
                pass  # the response only ends the request
            elif status == STATUS_OK:
                message = response_streamed(response) if stream else response_bytes(response)
            elif stream:
                message = error_streamed(self.request, final, details)
        except MemoryError:
            status = STATUS_RESOURCE_EXHAUSTED
            text = "no memory for the response"
            refusal_count(REFUSAL_LIMIT_EXCEEDED)
        if message is not None and status == STATUS_OK:
            add_own(&(<Lane *>response.request.lane).sent, len(<bytes>message))
        if response != NULL and response.refusal:
            self.refusal = <int>response.refusal
        if message is not None and stream:
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
