"""The native front door: `_native.connection`s under uvloop's buffered protocols.

ModelInfer never comes here: it goes from the connection to its lane and back without a Python object. Every other
method is a Python handler, hosted as on a grpc.aio server.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from _native.connection import Call, Endpoint
from _native.infer import InferService
from _native.workers import Workers
from server.front.context import NativeContext
from server.front.protocol import NativeProtocol
from server.front.serving import serve
from server.rpc.service import RAW, SERVICE

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

BACKLOG = 4096
BLOCKING_THREADS = 8  # for servicer methods that are not coroutines
COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}  # zlib's
INFERENCE = frozenset(f"/{SERVICE}/{name}" for name in RAW)  # the methods whose responses are compressed
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
        max_decompressed_bytes: largest request message after decompression; 0 for no other limit than that.
        compression_level: of inference responses, a key of COMPRESSION_LEVELS.
    """

    def __init__(
        self,
        infer: InferService | None = None,
        *,
        max_message_bytes: int = -1,
        max_decompressed_bytes: int = 0,
        compression_level: str = "none",
    ) -> None:
        self._level = COMPRESSION_LEVELS[compression_level]
        self._workers = Workers(max(1, (os.cpu_count() or 1) // 2))
        self._endpoint = Endpoint(
            self._on_call,
            max_message=max(0, max_message_bytes),
            max_inflated=max_decompressed_bytes,
            native_level=self._level,
            workers=self._workers,
        )
        if infer is not None:
            infer.install(self._endpoint)
        self._registered: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._servers: list[asyncio.Server] = []
        self._protocols: set[NativeProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="servicer")
        self._flush_scheduled = False

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
        loop.add_reader(self._workers.event_fd, self._endpoint.collect_jobs)
        self._workers.start()
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
        asyncio.get_running_loop().remove_reader(self._workers.event_fd)
        self._workers.close()

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
        handler = self._find(call)
        if handler is None:
            call.end(grpc.StatusCode.UNIMPLEMENTED.value[0], f"Method not found: {call.path[:256]}")
            return
        if self._level and call.path in INFERENCE:
            call.set_compression("", self._level)
        context = NativeContext(call, handler)
        task = asyncio.get_running_loop().create_task(serve(handler, context, self._threads))
        context.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
