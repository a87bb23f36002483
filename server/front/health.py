"""grpc.health.v1 for the server, each model and each version.

Names: "" and the service's full name are the readiness of the server; `<model>` is SERVING while any version of the
model is ready, `<model>/<version>` while that version is; both are SERVING while a request would load the model. Check
answers NOT_FOUND for a name that was never known; Watch answers SERVICE_UNKNOWN and continues, as the protocol says.

The messages and the registration are grpcio-health-checking's, but the servicer is not: its Watch holds a lock while it
writes, so one client that does not read stops all updates; and it forgets the other watchers of a name when one of them
leaves.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferd.server.errors import Denied, ServerError
from inferd.server.front.access import Access
from inferd.server.front.door import STOPPING
from inferd.server.front.peer import process_of
from inferd.server.front.refusal import refuse

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine

PREFIX = "/grpc.health.v1.Health/"
LONGEST_NAME = 4096
"""The most bytes of a requested name; every known name is shorter."""

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its base has no types
    """The health servicer. Used on the event loop only."""

    def __init__(self, service: str = "", access: Access | None = None) -> None:
        self._of_server = ("", service)
        self._access = access
        if access is not None:
            access.subscribe(self._wake)
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # set at the next change, and then replaced
        self._draining = False
        self._closed = False

    def set(self, name: str, serving: bool) -> None:
        """Publish the status of `name` to Check and to its watchers; without effect after `drain`."""
        if not self._draining:
            self._publish(name, serving)

    def drain(self) -> None:
        """Publish NOT_SERVING for all names, for good: the server is about to stop."""
        self._draining = True
        for name in self._statuses:
            self._publish(name, False)

    def close(self) -> None:
        """End every Watch, future ones included, after its last update."""
        self._closed = True
        self._changed.set()

    def _wake(self) -> None:
        """Make every Watch check again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _publish(self, name: str, serving: bool) -> None:
        status = _Response.SERVING if serving else _Response.NOT_SERVING
        if self._statuses.get(name) != status:
            self._statuses[name] = status
            self._wake()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        name = await self._name(request, context)
        await self._admit("Check", name, context)
        status = self._statuses.get(name)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service '{name}'")
        return _Response(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802
        name = await self._name(request, context)
        caller = await self._admit("Watch", name, context)
        del request  # the call may last for days: drop the rest of the message
        let_go = getattr(context, "let_go", None)  # grpc.aio's has none
        if let_go is not None:
            let_go()
        sent = None
        while True:
            changed = self._changed
            await self._require(caller, "Watch", name, context)
            status = self._statuses.get(name, _Response.SERVICE_UNKNOWN)
            if status != sent:
                await context.write(_Response(status=status))
                sent = status
            elif self._closed:
                await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
            else:
                await changed.wait()

    async def _name(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """The requested name; refuse the call if it cannot be one."""
        name: str = request.service
        size = len(name.encode())
        if size > LONGEST_NAME:
            text = f"expected the name of a service of at most {LONGEST_NAME} bytes, got {size}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return name

    async def _admit(self, method: str, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> int:
        """The caller; refuse the call unless the caller may ask about this name."""
        if self._access is None:
            return 0
        metadata = tuple(context.invocation_metadata() or ())
        try:
            caller = self._access.caller(PREFIX + method, metadata, getattr(context, "listener_policy", None))
        except Denied as error:
            await refuse(context, error)
            raise
        await self._require(caller, method, name, context)
        return caller

    async def _require(self, caller: int, method: str, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Refuse the call unless its caller may ask about this name, by the present rights."""
        if self._access is None:
            return
        model = "" if name in self._of_server else name.partition("/")[0]
        try:
            self._access.require(caller, PREFIX + method, model)
        except Denied as error:
            self._access.note(context.peer(), PREFIX + method, error, process_of(context))
            await refuse(context, error)


def follow(engine: Engine, service: str, access: Access | None = None) -> Health:
    """A health servicer that publishes the states of `engine`; `service` is the name of the inference service."""
    health = Health(service, access)

    def publish(model: str, version: int | None, ready: bool) -> None:
        if model and version is not None:
            health.set(f"{model}/{version}", ready or engine.is_awaited(model))
        if model:
            health.set(model, _any_ready(engine, model) or engine.is_awaited(model))
        for name in ("", service):
            health.set(name, engine.ready)

    publish("", None, engine.ready)
    for entry in engine.index():
        publish(entry.name, int(entry.version) if entry.version else None, entry.state == "READY")
    for name in engine.on_demand:
        publish(name, None, False)
    engine.subscribe(publish)
    return health


def _any_ready(engine: Engine, model: str) -> bool:
    try:
        return any(version.ready for version in engine.versions(model))
    except ServerError:
        return False
