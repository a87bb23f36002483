"""Delays for test suites of clients, set by environment variables with Triton's names.

They let a suite act on a call at a chosen moment: before its request is queued, or while its response waits. Triton's
handlers are threads that sleep at these points; here a call waits without blocking others. ModelInfer goes through
Python while one of its delays is set, because the native path has no such points.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from inferd.server.errors import ServerError
from inferd.server.rpc.call import Call
from inferd.server.rpc.service import RAW, Method, StreamHandler, UnaryHandler

_BEFORE = ("TRITONSERVER_DELAY_GRPC_PROCESS", "TRITONSERVER_DELAY_GRPC_PROCESS_ENTRY")
_AFTER = (
    "TRITONSERVER_DELAY_GRPC_COMPLETE",
    "TRITONSERVER_DELAY_GRPC_RESPONSE",
    "TRITONSERVER_DELAY_RESPONSE_COMPLETE_EXEC",
    "TRITONSERVER_DELAY_RESPONSE_COMPLETION",
)
_CANCELLED = ("TRITONSERVER_DELAY_GRPC_NOTIFICATION", "TRITONSERVER_DELAY_GRPC_ENQUEUE")
_OTHERS = "TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC"


class DelayError(ValueError):
    """A variable is no number; the text names it."""


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds for which calls wait.

    Attributes:
        before: an inference call, before each request is given to the scheduler.
        after: an inference call, before each response is sent.
        cancelled: a call of ModelInfer, from its cancellation until the server notices it.
        others: every other call, before its response is sent.
    """

    before: float = 0.0
    after: float = 0.0
    cancelled: float = 0.0
    others: float = 0.0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Delays:
        """The delays that the variables set: `others` in seconds, all others in milliseconds. Several variables for one
        moment add up.

        Raises:
            DelayError: a variable is not a whole number from 0 on.
        """
        return cls(
            before=_sum(environment, _BEFORE) / 1000,
            after=_sum(environment, _AFTER) / 1000,
            cancelled=_sum(environment, _CANCELLED) / 1000,
            others=_sum(environment, (_OTHERS,)),
        )

    @property
    def of_inference(self) -> bool:
        """Whether ModelInfer is delayed."""
        return bool(self.before or self.after or self.cancelled)

    def applied(self, table: Sequence[Method]) -> tuple[Method, ...]:
        """The methods of the table, with handlers that wait."""
        return tuple(self._applied(method) for method in table)

    def _applied(self, method: Method) -> Method:
        if method.name not in RAW:
            return replace(method, handler=self._other(cast(UnaryHandler, method.handler))) if self.others else method
        if not self.of_inference:
            return method
        if method.server_streaming:
            return replace(method, handler=self._stream(cast(StreamHandler, method.handler)))
        return replace(method, handler=self._infer(cast(UnaryHandler, method.handler)))

    def _other(self, handler: UnaryHandler) -> UnaryHandler:
        async def handled(request: Any, call: Call) -> Any:
            try:
                response = await handler(request, call)
            except ServerError:
                await asyncio.sleep(self.others)
                raise
            await asyncio.sleep(self.others)
            return response

        return handled

    def _infer(self, handler: UnaryHandler) -> UnaryHandler:
        async def infer(request: Any, call: Call) -> Any:
            await asyncio.sleep(self.before)
            handling = asyncio.ensure_future(handler(request, call))
            try:
                response = await asyncio.shield(handling)
            except asyncio.CancelledError:
                await asyncio.sleep(self.cancelled)
                handling.cancel()
                raise
            await asyncio.sleep(self.after)
            return response

        return infer

    def _stream(self, handler: StreamHandler) -> StreamHandler:
        async def stream(requests: AsyncIterator[Any], call: Call) -> AsyncIterator[Any]:
            async with aclosing(cast(AsyncGenerator[Any, None], handler(self._entering(requests), call))) as responses:
                async for response in responses:
                    await asyncio.sleep(self.after)
                    yield response

        return stream

    async def _entering(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            await asyncio.sleep(self.before)
            yield request


def _sum(environment: Mapping[str, str], names: Sequence[str]) -> float:
    return sum(_number(environment, name) for name in names)


def _number(environment: Mapping[str, str], name: str) -> float:
    text = environment.get(name, "") or "0"
    if not text.isdecimal():
        raise DelayError(f"the environment variable {name} is {text!r}: a whole number from 0 on is expected")
    return float(text)
