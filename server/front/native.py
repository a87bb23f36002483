"""The native front door: `_native.connection`s under uvloop's buffered protocols.

ModelInfer never comes here: it goes from the connection to its lane and back without a Python object. Every other
method is a Python handler, hosted as on a grpc.aio server.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from _native.connection import Call, Connection, Endpoint
from _native.infer import InferService
from server.front.context import BlockingContext, NativeContext

log = logging.getLogger("inferd.front")

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

BACKLOG = 4096
BLOCKING_THREADS = 8  # for servicer methods that are not coroutines
GOAWAY_DELAY = 0.1  # seconds between announcing a shutdown and refusing streams, for those on their way


class _Details:
    """A grpc.HandlerCallDetails."""

    __slots__ = ("invocation_metadata", "method")

    def __init__(self, call: Call) -> None:
        self.method = call.path
        self.invocation_metadata = call.metadata


class NativeDoor:
    """A `server.front.door.Door` on libnghttp2.

    Args:
        infer: serves ModelInfer natively; without it, a handler must be registered for it.
        max_message_bytes: largest request message; negative or 0 for no limit, as in Triton.
    """

    def __init__(self, infer: InferService | None = None, *, max_message_bytes: int = -1) -> None:
        self._endpoint = Endpoint(self._on_call, max_message=max(0, max_message_bytes))
        if infer is not None:
            infer.install(self._endpoint)
        self._registered: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._servers: list[asyncio.Server] = []
        self._protocols: set[NativeProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="servicer")
        self._flush_scheduled = False
        self._stopping = False

    # -- registration --

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler[Any, Any]], /) -> None:
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler], /) -> None:
        for name, handler in method_handlers.items():
            self._registered[f"/{service_name}/{name}"] = handler

    def _find(self, call: Call) -> Handler | None:
        handler = self._registered.get(call.path)
        if handler is not None:
            return handler
        details: Any = _Details(call)
        for generic in self._generic:
            handler = generic.service(details)
            if handler is not None:
                return handler
        return None

    # -- listening --

    async def start(self, address: str) -> int:
        loop = asyncio.get_running_loop()
        self._endpoint.on_dirty = self._schedule_flush
        if address.startswith("unix:"):
            path = address.removeprefix("unix:").removeprefix("//")
            self._servers.append(await loop.create_unix_server(self._protocol, path, backlog=BACKLOG))
            return 0
        host, _, port = address.rpartition(":")
        server = await loop.create_server(self._protocol, host.strip("[]") or None, int(port), backlog=BACKLOG)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def stop(self, grace: float | None) -> None:
        """Close the listeners, let every call that was accepted finish within `grace` seconds, drop the rest."""
        self._stopping = True
        for server in self._servers:
            server.close()
        for protocol in tuple(self._protocols):
            protocol.announce_shutdown()
        if self._protocols:
            await asyncio.sleep(GOAWAY_DELAY)
        for protocol in tuple(self._protocols):
            protocol.go_away()
        closing = [protocol.closed for protocol in self._protocols]
        if closing:
            await asyncio.wait(closing, timeout=grace)
        for protocol in tuple(self._protocols):
            protocol.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        self._threads.shutdown(wait=False)

    def _protocol(self) -> NativeProtocol:
        return NativeProtocol(self._endpoint, self._protocols)

    # -- output that comes from outside a read --

    def flush(self) -> None:
        """Write the answers that have been queued since; to be called after each round of deliveries."""
        self._flush_scheduled = False
        self._endpoint.flush_dirty()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    # -- calls that Python handles --

    def _on_call(self, call: Call) -> None:
        try:
            handler = self._find(call)
        except Exception as error:  # a generic handler is the application's
            log.exception("no handler could be looked up for %s", call.path[:256])
            call.end(grpc.StatusCode.INTERNAL.value[0], f"internal error: {type(error).__name__}")
            return
        if handler is None:
            call.end(grpc.StatusCode.UNIMPLEMENTED.value[0], f"Method not found: {call.path[:256]}")
            return
        context = NativeContext(call, handler)
        task = asyncio.get_running_loop().create_task(self._serve(handler, context))
        context.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, handler: Handler, context: NativeContext) -> None:
        remaining = context.time_remaining()
        timer = None
        if remaining is not None:
            timer = asyncio.get_running_loop().call_later(remaining, context.expire)
        try:
            await self._run(handler, context)
        except grpc.aio.AbortError:
            context.finish(context.code() or grpc.StatusCode.INTERNAL, context.details())
        except asyncio.CancelledError:
            context.finish(grpc.StatusCode.CANCELLED, "the handler was cancelled")
            raise
        except Exception as error:
            log.exception("a handler failed")
            context.finish(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")
        else:
            context.finish(context.code() or grpc.StatusCode.OK, context.details())
        finally:
            if timer is not None:
                timer.cancel()

    async def _run(self, handler: Handler, context: NativeContext) -> None:
        behaviour = _behaviour(handler)
        if inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour):
            await _run_async(handler, behaviour, context)
            return
        loop = asyncio.get_running_loop()
        blocking = BlockingContext(context, loop)
        request = blocking.requests() if handler.request_streaming else await context.read_only()
        await loop.run_in_executor(self._threads, _run_blocking, handler, behaviour, request, blocking)


def _behaviour(handler: Handler) -> Callable[..., Any]:
    if handler.request_streaming:
        found = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        found = handler.unary_stream if handler.response_streaming else handler.unary_unary
    assert found is not None
    return found


async def _run_async(handler: Handler, behaviour: Callable[..., Any], context: NativeContext) -> None:
    request = context.requests() if handler.request_streaming else await context.read_only()
    if inspect.isasyncgenfunction(behaviour):
        async for response in behaviour(request, context):
            await context.write(response)
        return
    response = await behaviour(request, context)
    if not handler.response_streaming and context.code() in (None, grpc.StatusCode.OK):
        await context.write(response)


def _run_blocking(handler: Handler, behaviour: Callable[..., Any], request: Any, context: BlockingContext) -> None:
    result = behaviour(request, context)
    if handler.response_streaming:
        for response in result:
            context.write(response)
    elif context.code() in (None, grpc.StatusCode.OK):
        context.write(result)


class NativeProtocol(asyncio.BufferedProtocol):
    """Moves bytes between a transport and a connection."""

    def __init__(self, endpoint: Endpoint, protocols: set[NativeProtocol]) -> None:
        self._endpoint = endpoint
        self._protocols = protocols
        self._buffer = endpoint.receive_buffer()
        self._paused = False
        self._transport: asyncio.Transport | None = None
        self._connection: Connection | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._connection = Connection(self._endpoint, _peer(transport))
        self._connection.flush = self._flush
        self._protocols.add(self)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._protocols.discard(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if not self.closed.done():
            self.closed.set_result(None)

    def get_buffer(self, sizehint: int) -> Any:  # noqa: ARG002 - the protocol's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        connection = self._connection
        if connection is not None:
            connection.received(nbytes)
            self._flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def _flush(self) -> None:
        connection, transport = self._connection, self._transport
        if connection is None or transport is None or transport.is_closing():
            return
        while not self._paused:
            pieces = connection.take_output()
            if not pieces:
                break
            if len(pieces) == 1:
                transport.write(pieces[0])
            else:
                transport.writelines(pieces)
            if self._connection is None:
                return
        if connection.finished:
            transport.close()

    def announce_shutdown(self) -> None:
        if self._connection is not None:
            self._connection.announce_shutdown()
            self._flush()

    def go_away(self) -> None:
        if self._connection is not None:
            self._connection.go_away()
            self._flush()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _peer(transport: asyncio.Transport) -> str:
    """The address as gRPC writes it."""
    connection = transport.get_extra_info("socket")
    name: Any = transport.get_extra_info("peername")
    if connection is not None and connection.family == socket.AF_UNIX:
        return f"unix:{name}" if isinstance(name, str) and name else "unix:"
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if isinstance(name, Sequence) and len(name) >= 2:
        return f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"
    return "unknown"
