"""Access control on a grpc.aio server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from inferd.server.errors import Denied
from inferd.server.front.access import Access
from inferd.server.front.refusal import refuse

_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it has none at run time
    """Replaces the handler of a call that the caller may not make by one that refuses."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            self._access.caller(handler_call_details.method, handler_call_details.invocation_metadata)
        except Denied as error:
            return self._refusing(handler, handler_call_details.method, error)
        return handler

    def _refusing(self, handler: Any, path: str, error: Denied) -> Any:
        """A handler of the same kind that only refuses."""

        async def behaviour(_: Any, context: Any) -> None:
            self._access.note(context.peer(), path, error)
            await refuse(context, error)

        return _MAKERS[handler.request_streaming, handler.response_streaming](behaviour)
