"""Registers the services on a front door: the inference service, grpc.health.v1 and server reflection.

The services are gRPC method handlers that take and give bytes, the same for both front doors. Messages are decoded here
and not by the transport, because grpc.aio answers UNKNOWN when a deserializer raises.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from inferd._native.service.forwarding import Forwarder, ReservedError
from inferd._native.transport.call import CallOverError
from inferd.server.errors import Denied, Internal, InvalidArgument, ServerError
from inferd.server.front.access import Access
from inferd.server.front.connection_limits import host_of
from inferd.server.front.door import Door
from inferd.server.front.health import Health, follow
from inferd.server.front.peer import ALTERNATIVE_NAME, COMMON_NAME, AuthContext, identity_of, process_of
from inferd.server.front.refusal import refuse
from inferd.server.observe.load import TRAILER, LoadMeter
from inferd.server.observe.metrics.calls import Calls
from inferd.server.rpc.call import Metadata, PeerCredentials
from inferd.server.rpc.service import KINDS, MODEL_FIELD, RAW, SERVICE, Method
from inferd_client.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

_log = logging.getLogger(__name__)


def _only_service(file: FileDescriptor) -> str:
    (service,) = file.services_by_name.values()
    return str(service.full_name)


_HEALTH = _only_service(health_pb2.DESCRIPTOR)

CALL_KINDS: Mapping[str, str] = MappingProxyType(
    {
        **KINDS,
        f"/{_HEALTH}/Check": "unary",
        f"/{_HEALTH}/Watch": "server_stream",
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": "bidi_stream",
    }
)
"""The type of each method of all these services, as metrics of gRPC name it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The common parts of every call that Python handles.

    Attributes:
        access: the rules of access to models; None: every caller may use every model.
        load: reports the server's load with inference responses, or None.
        calls: counts the calls, or None.
        reflected: whether the server offers reflection.
        forwarder: makes request parameters of headers, or None.
    """

    access: Access | None = None
    load: LoadMeter | None = None
    calls: Calls | None = None
    reflected: bool = True
    forwarder: Forwarder | None = None


def install(door: Door, table: Sequence[Method], engine: Engine, policy: Policy | None = None) -> Health:
    """Register all services on `door`. Returns the health servicer, by which the server announces its end."""
    policy = policy or Policy()
    _register(door, SERVICE, {method.name: _handler(method, policy) for method in table})
    health = follow(engine, SERVICE, policy.access)
    _register(door, _HEALTH, _health_handlers(health, policy.calls))
    if policy.reflected:
        _register(door, reflection.SERVICE_NAME, _reflection_handlers(Reflection(policy.access), policy.calls))
    return health


def _register(door: Door, service: str, handlers: dict[str, Handler]) -> None:
    door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    door.add_registered_method_handlers(service, handlers)


def _health_handlers(health: Health, calls: Calls | None) -> dict[str, Handler]:
    write = health_pb2.HealthCheckResponse.SerializeToString
    check = _counted(_parsing(health.Check, health_pb2.HealthCheckRequest), f"/{_HEALTH}/Check", calls)
    watch = _counted(_parsing(health.Watch, health_pb2.HealthCheckRequest), f"/{_HEALTH}/Watch", calls)
    return {
        "Check": grpc.unary_unary_rpc_method_handler(check, None, write),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, None, write),
    }


def _parsing(behaviour: Callable[[Any, Context], Awaitable[Any]], kind: type[Any]) -> Callable[..., Awaitable[Any]]:
    """Wrap the behaviour in a function that parses the bytes of a request for it."""

    async def parsing(message: bytes, context: Context) -> Any:
        try:
            request = _parsed(message, kind)
        except InvalidArgument as error:
            return await refuse(context, error)
        del message  # a Watch may last for days, and needs only the name in its request
        handled = behaviour(request, context)
        del request
        return await handled

    return parsing


def _parsed(message: bytes, kind: type[Any]) -> Any:
    """Raises `InvalidArgument` unless the message is of this kind."""
    try:
        return kind.FromString(message)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise InvalidArgument(f"cannot parse the request: {len(message)} bytes are not a valid {name}") from None


def _reflection_handlers(servicer: Reflection, calls: Calls | None) -> dict[str, Handler]:
    info = _counted(servicer.ServerReflectionInfo, f"/{reflection.SERVICE_NAME}/ServerReflectionInfo", calls)
    return {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            info,
            None,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
    }


class Reflection(reflection_pb2_grpc.ServerReflectionServicer):  # type: ignore[misc]  # its base has no types
    """The library's servicer, with each request checked against the rights at its arrival."""

    _path = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"

    def __init__(self, access: Access | None) -> None:
        names = (SERVICE, _HEALTH, reflection.SERVICE_NAME)
        self._servicer = cast(Any, reflection).aio.ReflectionServicer(names, pool=_described())
        self._access = access

    async def ServerReflectionInfo(self, request_iterator: Any, context: Context) -> None:  # noqa: N802
        try:
            call = ContextCall(context, self._path, self._access)
            async for response in self._servicer.ServerReflectionInfo(_judged(request_iterator, call), context):
                await context.write(response)
        except (Denied, InvalidArgument) as error:
            _note(self._access, context, self._path, error)
            await refuse(context, error)


async def _judged(messages: AsyncIterator[bytes], call: ContextCall) -> AsyncIterator[Any]:
    async for message in messages:
        call.require_model("")
        yield _parsed(message, reflection_pb2.ServerReflectionRequest)


def _handler(method: Method, policy: Policy) -> Handler:
    path = f"/{SERVICE}/{method.name}"
    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(_counted(_streaming(method, policy), path, policy.calls))
    return grpc.unary_unary_rpc_method_handler(_counted(_unary(method, policy), path, policy.calls))


def _counted(
    behaviour: Callable[[Any, Context], Awaitable[Any]], path: str, calls: Calls | None
) -> Callable[[Any, Context], Awaitable[Any]]:
    """Wrap the behaviour to count its calls. A call that ends by another exception than an abort was broken off."""
    if calls is None:
        return behaviour

    async def counted(message: Any, context: Context) -> Any:
        calls.began(path)
        status = grpc.StatusCode.CANCELLED
        try:
            handled = behaviour(message, context)
            del message  # only the method holds it
            response = await handled
            status = grpc.StatusCode.OK
        except grpc.aio.AbortError:
            status = cast("grpc.StatusCode | None", context.code()) or grpc.StatusCode.UNKNOWN
            raise
        else:
            return response
        finally:
            calls.ended(path, status.value[0])

    return counted


def _unary(method: Method, policy: Policy) -> Callable[[bytes, Context], Awaitable[bytes]]:
    handler = cast(Callable[[Any, "ContextCall"], Awaitable[Any]], method.handler)

    async def unary(message: bytes, context: Context) -> bytes:
        try:
            call = _begun(context, method, policy)
            request = _decoded(message, method.request)
            if method.name in MODEL_FIELD:
                call.require_model(getattr(request, MODEL_FIELD[method.name]))
            response = await handler(request, call)
            encoded: bytes = response if method.response is None else response.SerializeToString(deterministic=True)
            return encoded
        except Exception as error:
            return cast(bytes, await _abort(context, method, policy, error))

    return unary


def _streaming(method: Method, policy: Policy) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
    handler = cast(Callable[[Any, "ContextCall"], Any], method.handler)

    async def streaming(messages: AsyncIterator[bytes], context: Context) -> None:
        # Writes itself instead of yielding: a cancelled call then closes the handler's generator at once.
        try:
            call = _begun(context, method, policy)
            async with aclosing(handler(messages, call)) as responses:
                async for response in responses:
                    await context.write(response)
        except CallOverError:
            raise
        except Exception as error:
            await _abort(context, method, policy, error)

    return streaming


def _begun(context: Context, method: Method, policy: Policy) -> ContextCall:
    """The call of a method, with the metadata that every response carries."""
    if policy.load is not None and method.name in RAW:
        context.set_trailing_metadata(((TRAILER, policy.load.report),))
    call = ContextCall(context, f"/{SERVICE}/{method.name}", policy.access)
    if policy.forwarder is not None and method.name in RAW:
        try:
            call.forwarded = policy.forwarder.parameters(call.metadata)
        except ReservedError as error:
            raise InvalidArgument(str(error)) from None
    return call


def _decoded(message: bytes, kind: type[Any] | None) -> Any:
    if kind is None:
        return message
    try:
        return kind.FromString(message)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise Internal(f"cannot parse the request: {len(message)} bytes are not a valid {name}") from error


async def _abort(context: Context, method: Method, policy: Policy, error: Exception) -> Any:
    """End the call with the status of `error`. Raises the exception by which the transport ends handlers."""
    _note(policy.access, context, f"/{SERVICE}/{method.name}", error)
    if not isinstance(error, ServerError):
        _log.exception("%s failed", method.name, exc_info=error)
    return await refuse(context, error)


def _note(access: Access | None, context: Context, path: str, error: Exception) -> None:
    """Record the refused caller for the log."""
    if access is not None:
        access.note(context.peer(), path, error, process_of(context))


class ContextCall:
    """An `inferd.server.rpc.call.Call` on gRPC's context for servicers."""

    __slots__ = ("_access", "_context", "_hold", "_identity", "_path", "caller", "forwarded", "user")

    def __init__(self, context: Context, path: str = "", access: Access | None = None) -> None:
        self._context = context
        self._access = access
        self._path = path
        self.forwarded = b""
        self._identity: int | None = None
        self._hold: Callable[[int], None] | None = getattr(context, "hold", None)  # grpc.aio's context has no charges
        # grpc.aio's context lacks the listener
        listener_policy = getattr(context, "listener_policy", None)
        self.caller = access.caller(path, self.metadata, listener_policy) if access is not None else 0
        credentials = self.peer_credentials
        self.user = -1 if credentials is None else credentials.uid

    def may_use(self, model: str) -> bool:
        try:
            self.require_model(model)
        except Denied:
            return False
        return True

    def require_model(self, model: str) -> None:
        """Raises `Denied` unless the caller now may make this call about the model; "" is no model."""
        if self._access is not None:
            self._access.require(self.caller, self._path, model)

    def require_every_model(self) -> None:
        if self._access is not None:
            self._access.require_every_model(self.caller)

    def require_overrides(self) -> None:
        if self._access is not None:
            self._access.require_overrides(self.caller)

    @property
    def metadata(self) -> Metadata:
        return tuple((key, value) for key, value in self._context.invocation_metadata() or ())

    @property
    def peer(self) -> str:
        return self._context.peer()

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        return process_of(self._context)

    @property
    def identity(self) -> int:
        if self._identity is None:
            known: int | None = getattr(self._context, "identity", None)  # grpc.aio's context has the certificate
            self._identity = identity_of(cast(AuthContext, self._context.auth_context())) if known is None else known
        return self._identity

    @property
    def client(self) -> int:
        number: int | None = getattr(self._context, "client", None)
        if number is not None:
            return number
        names = self._context.peer_identities()  # grpc.aio's context has no number
        return hash(tuple(names) if names else host_of(self.peer)) & sys.maxsize

    @property
    def connection(self) -> int:
        return getattr(self._context, "connection", 0)  # grpc.aio's context does not tell connections apart

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        cast(Any, self._context).on_disconnect(callback)

    @property
    def peer_names(self) -> tuple[str, ...]:
        auth = self._context.auth_context()
        names = (name for key in (COMMON_NAME, ALTERNATIVE_NAME) for name in auth.get(key, ()))
        return tuple(dict.fromkeys(name.decode("utf-8", "replace") for name in names))

    def hold(self, size: int) -> None:
        if self._hold is not None:
            self._hold(size)

    def time_remaining(self) -> float | None:
        return self._context.time_remaining()


def _described() -> DescriptorPool:
    """A pool with every hosted service: ours are in a private pool, those of the libraries in the default one."""
    pool = DescriptorPool()
    added: set[str] = set()
    for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        _add(pool, file, added)
    return pool


def _add(pool: DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    pool.Add(proto)
