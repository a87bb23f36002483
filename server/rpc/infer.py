"""ModelInfer and ModelStreamInfer over encoded messages.

A stream answers in the order of its requests. It reads at most a window of requests ahead: one leaves the window when
its answer was handed to the transport, which takes it only as fast as the client reads. So a client that sends
without reading stops the server from reading, and can hold no more than one window of requests and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from server.errors import ServerError, Status
from server.rpc.call import Call, flag, timeout_ns

if TYPE_CHECKING:
    from server.engine.engine import Engine

STREAM_WINDOW = 128
"""Requests of one stream that may be read and not yet answered: enough to fill a large batch from a single stream."""

CLOSE_ON_ERROR = "triton_grpc_error"
"""Stream metadata: with "true", the first error ends the stream with its own status code."""


class EngineError(ServerError):
    """An error that the engine delivered as a status and a text."""

    status: Status  # type: ignore[misc]  # of the instance here, of the class in the other families

    def __init__(self, status: Status, details: str, reason: str = "") -> None:
        super().__init__(details)
        self.status = status
        self.reason = reason


class Answer:
    """Where the engine delivers the one answer to a request.

    Used on the event loop only. An abandoned answer takes its request out of the engine.
    """

    __slots__ = ("_arrived", "_ticket")

    def __init__(self, engine: Engine, message: bytes, call: Call, *, stream: bool) -> None:
        self._arrived: asyncio.Future[tuple[Status, str, bytes | None]] = asyncio.get_running_loop().create_future()
        self._ticket = engine.submit(
            message,
            self._deliver,
            timeout_ns=timeout_ns(call),
            stream=stream,
            caller=call.caller,
            user=call.user,
        )

    def _deliver(self, status: int, details: str, response: bytes | None) -> None:
        if not self._arrived.done():  # the awaiting task may have been cancelled in this very turn of the loop
            self._arrived.set_result((Status(status), details, response))

    async def response(self, *, errors_inside: bool = False) -> bytes:
        """The encoded response; with `errors_inside`, also when it tells of an error.

        Raises:
            EngineError: the request failed.
        """
        status, details, response = await self._arrived
        if response is None or (status is not Status.OK and not errors_inside):
            raise EngineError(status, details, self._ticket.reason)
        return response

    def abandon(self) -> None:
        """Nobody waits any more; does nothing when the answer is there."""
        if not self._arrived.done() or self._arrived.cancelled():
            self._ticket.cancel()


class Inference:
    """The two inference RPCs over an engine."""

    def __init__(self, engine: Engine, window: int = STREAM_WINDOW) -> None:
        self._engine = engine
        self._window = window

    async def infer(self, message: bytes, call: Call) -> bytes:
        """Answer one encoded ModelInferRequest with an encoded ModelInferResponse."""
        answer = Answer(self._engine, message, call, stream=False)
        try:
            return await answer.response()
        finally:
            answer.abandon()

    async def stream(self, messages: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        """Answer encoded ModelInferRequests with encoded ModelStreamInferResponses, in order.

        Errors travel inside the responses and the stream goes on, unless the client asked for `triton_grpc_error`.
        The client's half-close ends the stream after the last answer. However the stream ends, no request of it
        stays in the engine.
        """
        errors_inside = not flag(call, CLOSE_ON_ERROR)
        ahead = _ReadAhead(self._engine, messages, call, self._window)
        try:
            while (answer := await ahead.next()) is not None:
                yield await answer.response(errors_inside=errors_inside)
                ahead.answered(answer)
        finally:
            await ahead.close()


class _ReadAhead:
    """Submits the requests of a stream as they arrive, at most `window` ahead of their answers."""

    def __init__(self, engine: Engine, messages: AsyncIterator[bytes], call: Call, window: int) -> None:
        self._engine = engine
        self._call = call
        self._free = asyncio.Semaphore(window)
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()  # bounded by _free
        self._open: set[Answer] = set()
        self._reader = asyncio.create_task(self._read(messages))

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        try:
            await self._free.acquire()
            async for message in messages:
                answer = Answer(self._engine, message, self._call, stream=True)
                self._open.add(answer)
                self._answers.put_nowait(answer)
                await self._free.acquire()
        finally:
            self._answers.put_nowait(None)

    async def next(self) -> Answer | None:
        """The answer to the next request in order; None after the last one. Raises what reading raised."""
        answer = await self._answers.get()
        if answer is None:
            await self._reader
        return answer

    def answered(self, answer: Answer) -> None:
        """The answer has gone out: there is room for another request."""
        self._open.discard(answer)
        self._free.release()

    async def close(self) -> None:
        """Stop reading and abandon what is still open."""
        self._reader.cancel()
        for answer in self._open:
            answer.abandon()
        self._open.clear()
        await asyncio.gather(self._reader, return_exceptions=True)
