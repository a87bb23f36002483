"""ModelInfer and ModelStreamInfer over encoded messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from inferd.server.errors import Status
from inferd.server.rpc.call import Call, flag, origin, timeout_ns
from inferd.server.rpc.exchange import EngineError, Exchange

if TYPE_CHECKING:
    from inferd._native.service.infer import InferService
    from inferd.server.engine.engine import Engine

__all__ = ["EngineError", "Inference"]

STREAM_WINDOW = 128
"""The most unanswered requests that are read of one stream: enough to fill a large batch from it."""

CLOSE_ON_ERROR = "triton_grpc_error"
"""Stream metadata: with "true", the first error ends the stream with its own status code."""


class PendingResponse:
    """The sink for the one response to a request.

    Used on the event loop only. `abandon` takes the request out of the engine.
    """

    __slots__ = ("_arrived", "_ticket")

    def __init__(self, service: InferService, message: bytes, call: Call) -> None:
        self._arrived: asyncio.Future[tuple[Status, str, bytes | None]] = asyncio.get_running_loop().create_future()
        self._ticket = service.submit(message, self._deliver, origin(call), timeout_ns=timeout_ns(call))

    def _deliver(self, status: int, details: str, response: bytes | None) -> None:
        if not self._arrived.done():  # the awaiting task may have been cancelled in this turn of the loop
            self._arrived.set_result((Status(status), details, response))

    async def response(self) -> bytes:
        """The encoded response.

        Raises:
            EngineError: the request failed.
        """
        status, details, response = await self._arrived
        if response is None:
            raise EngineError(status, details, self._ticket.refusal)
        return response

    def abandon(self) -> None:
        """Abandon the request; no effect once the response is there."""
        if not self._arrived.done() or self._arrived.cancelled():
            self._ticket.cancel()


class Inference:
    """The two inference RPCs over an engine."""

    def __init__(self, engine: Engine, window: int = STREAM_WINDOW) -> None:
        self._engine = engine
        self._window = window

    async def infer(self, message: bytes, call: Call) -> bytes:
        """Answer one encoded ModelInferRequest with an encoded ModelInferResponse."""
        pending = PendingResponse(self._engine.infer, message, call)
        try:
            return await pending.response()
        finally:
            pending.abandon()

    async def stream(self, messages: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        """Answer encoded ModelInferRequests with encoded ModelStreamInferResponses.

        Errors travel inside the responses and the stream continues, unless the client asked for `triton_grpc_error`.
        The client's half-close ends the stream after the last response. However the stream ends, no request of it
        stays in the engine.
        """
        exchange = Exchange(self._engine.infer, call, self._window, errors_inside=not flag(call, CLOSE_ON_ERROR))
        reader = asyncio.create_task(exchange.read(messages))
        try:
            async for response in exchange.responses():
                yield response
            await reader
        finally:
            reader.cancel()
            exchange.abandon()
            self._engine.stream_ended(exchange.number)
            await asyncio.gather(reader, return_exceptions=True)
