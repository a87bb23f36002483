"""The state of one ModelStreamInfer call on the grpcio front door: requests in, responses out.

Responses of models that give one for each request leave in the order of their requests. A decoupled model gives any
number; they leave at once, and a parameter marks the last one.

At most a window of requests is read ahead. A request leaves the window when its last response was passed to the
transport, which accepts it only as fast as the client reads. So the server stops reading from a client that sends
without reading. A decoupled model may have a limited number of undelivered responses for one request: each is
acknowledged when the transport has accepted it, so a client that does not read stops the model, too. The client may let
responses wait, within its limits, but it may not keep the instance from others: if other requests wait for the instance
and the client does not read for some seconds, its stream ends, and its requests are cancelled.
`inferd._native.service.exchange` does the same for the native door.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from itertools import count
from typing import TYPE_CHECKING

from inferd.server.errors import Exhausted, ServerError, Status
from inferd.server.rpc.call import Call, origin, timeout_ns

if TYPE_CHECKING:
    from inferd._native.service.infer import InferService

REQUEST_MEMORY, RESPONSE_MEMORY = 4096, 256
"""Bytes of memory of a request of a stream, without its message, and of a response."""

_numbers = count(1)

LOOK_SECONDS = 1.0
PATIENCE = 3.0
"""Seconds for which a client may keep an instance from others by not reading."""
RATE = 64 << 10
"""Bytes read that earn one more second."""


class EngineError(ServerError):
    """An error that the engine delivered as a status and a text."""

    status: Status  # type: ignore[misc]  # of the instance here, of the class in the other families
    counted = True

    def __init__(self, status: Status, details: str, refusal: int = 0) -> None:
        super().__init__(details)
        self.status = status
        self.refusal = refusal


class OpenRequest:
    """One request of a stream, from its submission to its last response."""

    __slots__ = ("_call", "_exchange", "_size", "_ticket", "decoupled", "done", "responses")

    def __init__(self, exchange: Exchange, service: InferService, message: bytes, call: Call) -> None:
        self._exchange = exchange
        self._call = call
        self._size = len(message) + REQUEST_MEMORY
        call.hold(self._size)
        self.responses: deque[tuple[Status, str, bytes | None]] = deque()  # arrived, not taken yet
        self.done = False  # the last of them has come
        self._ticket = service.submit(message, self._deliver, exchange.origin, timeout_ns=timeout_ns(call))
        self.decoupled = self._ticket.decoupled

    def leaves_order(self) -> bool:
        """Whether the model has turned out to be decoupled since the last call: it was loaded for this request."""
        was, self.decoupled = self.decoupled, self.decoupled or self._ticket.decoupled
        return self.decoupled and not was

    def _deliver(self, status: int, details: str, response: bytes | None) -> None:
        self.done = self._ticket.done
        if response is not None:
            self._call.hold(len(response) + RESPONSE_MEMORY)
            self.responses.append((Status(status), details, response))
        elif status:
            self.responses.append((Status(status), details, None))
        self._exchange.arrived(self)

    @property
    def refusal(self) -> int:
        """Of an error, its number in the table of refusals."""
        return self._ticket.refusal

    def take(self) -> tuple[Status, str, bytes | None]:
        """The oldest response, for the transport."""
        taken = self.responses.popleft()
        if taken[2] is not None:
            self._call.hold(-len(taken[2]) - RESPONSE_MEMORY)
        return taken

    def taken(self) -> None:
        """The transport has accepted the response from `take`."""
        self._ticket.taken()

    def close(self) -> None:
        """The last response has been taken."""
        self._call.hold(-self._size)

    def abandon(self) -> None:
        """The response is no longer wanted."""
        if not self.done:
            self._ticket.cancel()

    @property
    def queued(self) -> bool:
        """Whether it waits for an instance."""
        return self._ticket.queued

    @property
    def lane(self) -> int:
        """A number that all requests for the same instances share."""
        return self._ticket.lane

    @property
    def waiting(self) -> int:
        """Requests that wait for these instances."""
        return self._ticket.waiting


class Exchange:
    """The open requests of one stream.

    Args:
        service: answers the requests.
        call: the stream.
        window: how many requests may be open.
        errors_inside: whether an error is a response like others; otherwise it ends the stream.
    """

    def __init__(self, service: InferService, call: Call, window: int, *, errors_inside: bool) -> None:
        self.number = next(_numbers)  # of the stream, for sequences that end with it
        self.origin = origin(call, self.number)
        self._service = service
        self._call = call
        self._errors_inside = errors_inside
        self._free = asyncio.Semaphore(window)
        self._in_order: deque[OpenRequest] = deque()  # of models with one response for each request, oldest first
        self._ready: deque[OpenRequest] = deque()  # of other models: one entry for each response or end without one
        self._decoupled: dict[OpenRequest, None] = {}
        self._more = asyncio.Event()
        self._reading = True
        self._writing = False  # the transport has not finished with a response
        self._written = 0  # bytes since the last look
        self._debt = 0.0  # seconds for which others have waited because the client does not read
        self._next_look: asyncio.TimerHandle | None = None
        self._stalled = ""  # why the stream ends

    async def read(self, messages: AsyncIterator[bytes]) -> None:
        """Submit the requests on arrival, until the client ends them."""
        try:
            await self._free.acquire()
            async for message in messages:
                request = OpenRequest(self, self._service, message, self._call)
                if request.decoupled:
                    self._decoupled[request] = None
                    if self._next_look is None:
                        self._look_later()
                else:
                    self._in_order.append(request)
                await self._free.acquire()
        finally:
            self._reading = False
            self._more.set()

    def _leave_order(self, request: OpenRequest) -> None:
        self._in_order.remove(request)
        self._decoupled[request] = None
        if self._next_look is None:
            self._look_later()

    def arrived(self, request: OpenRequest) -> None:
        """A response has come, or the request has ended."""
        if request.leaves_order():
            self._leave_order(request)
        if request.decoupled:
            self._ready.append(request)
        self._more.set()

    async def responses(self) -> AsyncIterator[bytes]:
        """The encoded responses, until the client has ended the requests and all are answered.

        Raises:
            EngineError: a request failed, and errors end the stream.
        """
        while True:
            request = await self._next()
            if request is None:
                return
            if request.responses:
                message = self._message(request, *request.take())
                self._writing = True
                yield message
                self._writing = False
                self._written += len(message)
                request.taken()
            if request.done and not request.responses:
                self._close(request)

    async def _next(self) -> OpenRequest | None:
        """The request whose response is next; None after the last one."""
        while True:
            if self._stalled:
                raise Exhausted(self._stalled)
            if self._ready:
                return self._ready.popleft()
            if self._in_order and (self._in_order[0].responses or self._in_order[0].done):
                return self._in_order[0]
            if self._in_order and self._in_order[0].leaves_order():
                self._leave_order(self._in_order[0])
                continue
            if not self._reading and not self._in_order and not self._decoupled:
                return None
            self._more.clear()
            await self._more.wait()

    def _close(self, request: OpenRequest) -> None:
        if not request.decoupled:
            self._in_order.popleft()
        elif request in self._decoupled:
            self._decoupled.pop(request, None)
        else:
            return  # closed before: its last response and its end were taken together
        request.close()
        self._free.release()

    def _message(self, request: OpenRequest, status: Status, details: str, response: bytes | None) -> bytes:
        if response is None or (status is not Status.OK and not self._errors_inside):
            raise EngineError(status, details, request.refusal)
        return response

    def abandon(self) -> None:
        """Abandon the open requests."""
        if self._next_look is not None:
            self._next_look.cancel()
        for request in (*self._in_order, *self._decoupled):
            request.abandon()

    # -- a client that keeps instances by not reading --

    def _look_later(self) -> None:
        self._next_look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._next_look = None
        unfinished = [request for request in self._decoupled if not request.done]
        self._debt = max(0.0, self._debt - self._written / RATE)
        self._written = 0
        if not unfinished:
            self._debt = 0.0
            return
        if self._writing and self._keeps_others_waiting(unfinished):
            self._debt += LOOK_SECONDS
        if self._debt < PATIENCE:
            self._look_later()
            return
        self._stalled = (
            f"the client has not read its responses for {self._debt:.0f} s while other requests wait for the instance "
            "that makes them; read faster, or ask for less at a time"
        )
        for request in unfinished:
            request.abandon()
            while request.responses:
                request.take()
        self._more.set()

    def _keeps_others_waiting(self, unfinished: list[OpenRequest]) -> bool:
        own = Counter(request.lane for request in unfinished if request.queued)
        return any(request.waiting > own[request.lane] for request in unfinished if not request.queued)
