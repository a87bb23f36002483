"""The second front door: grpc.aio, which is gRPC's C core. Same handlers and same bytes as the native door."""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from inferd.server.addresses import Address, Bind, TcpAddress, UnixAddress, parse_bind
from inferd.server.errors import Denied
from inferd.server.front.access import Access
from inferd.server.front.keepalive import DEFAULT_POLICY, ConnectionPolicy
from inferd.server.front.listeners import ListenError, ListenPolicy, UnixFile, claimed, set_access, why_not
from inferd.server.front.refusal import refuse
from inferd.server.front.tls import Credentials
from inferd.server.settings import DEFAULTS

UNLIMITED = -1

MOST_STREAMS = 256
"""The most streams of one connection: with more, C core answers some valid calls of a burst with CANCELLED."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    # Streams of one connection (see `policy_options`) and calls waiting for this process: both are needed, else C core
    # answers valid calls of a burst with CANCELLED. Beyond these limits it refuses the stream, and clients retry.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # With this protection and a limit of streams, C core refuses valid calls of a burst: it still counts calls that
    # have ended, although their clients know that.
    ("grpc.http.overload_protection", 0),
    # Both limits are the same, as on the native door: C core refuses calls between them at random.
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
)

_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}
"""C core's own levels, from which it chooses an algorithm that the client takes. They are for all responses of the
server, because grpc.aio cannot set a level for one method."""


def policy_options(policy: ConnectionPolicy) -> tuple[tuple[str, int], ...]:
    """A connection policy as C core's options, which have no limit of connections."""

    def milliseconds(seconds: float) -> int:
        return min(2**31 - 1, round(seconds * 1000)) if math.isfinite(seconds) else 2**31 - 1

    return (
        ("grpc.keepalive_time_ms", milliseconds(policy.keepalive_time)),
        ("grpc.keepalive_timeout_ms", milliseconds(policy.keepalive_timeout)),
        # C core has a timeout of its own for a ping's answer, by default a minute
        ("grpc.http2.ping_timeout_ms", milliseconds(policy.keepalive_timeout)),
        ("grpc.keepalive_permit_without_calls", int(policy.permit_without_calls)),
        ("grpc.http2.max_pings_without_data", policy.max_pings_without_data or 0),
        ("grpc.http2.min_ping_interval_without_data_ms", milliseconds(policy.min_ping_interval)),
        ("grpc.http2.max_ping_strikes", policy.max_ping_strikes or 0),
        ("grpc.max_connection_age_ms", milliseconds(policy.max_age)),
        ("grpc.max_connection_age_grace_ms", milliseconds(policy.age_grace)),
        ("grpc.server_handshake_timeout_ms", milliseconds(policy.handshake_timeout)),
        ("grpc.max_concurrent_streams", min(policy.max_streams, MOST_STREAMS)),
    )


def channel_options(
    *,
    max_message_bytes: int | None = None,
    reuse_port: bool = False,
    policy: ConnectionPolicy = DEFAULT_POLICY,
    compression_level: str = DEFAULTS.grpc_infer_response_compression_level,
) -> tuple[tuple[str, int], ...]:
    """The options of the C core server; `max_message_bytes` limits requests and responses, None: nothing does."""
    limit = UNLIMITED if max_message_bytes is None else max_message_bytes
    return (
        *_OPTIONS,
        *policy_options(policy),
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.default_compression_level", COMPRESSION_LEVELS[compression_level]),
    )


class GrpcioDoor:
    """An `inferd.server.front.door.Door` on grpc.aio. One event loop of a process may use grpc.aio, and only one."""

    def __init__(
        self,
        *,
        max_message_bytes: int | None = None,
        access: Access | None = None,
        compression_level: str = DEFAULTS.grpc_infer_response_compression_level,
        policy: ListenPolicy | None = None,
        connections: ConnectionPolicy = DEFAULT_POLICY,
    ) -> None:
        self._policy = policy or ListenPolicy()
        self._options = channel_options(
            max_message_bytes=max_message_bytes,
            reuse_port=self._policy.reuse_port,
            policy=connections,
            compression_level=compression_level,
        )
        self._interceptors = [AccessInterceptor(access)] if access is not None and access.guards else []
        self._files: list[UnixFile] = []
        self.addresses: tuple[str, ...] = ()
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._server: grpc.aio.Server | None = None

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler[Any, Any]], /) -> None:
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]], /
    ) -> None:
        # grpc.aio accepts this call and then ignores it; a method that is registered only here must be found too.
        self._generic.append(grpc.method_handlers_generic_handler(service_name, dict(method_handlers)))

    async def start(self, *addresses: str) -> int:
        # Made here, not in the constructor: grpc.aio binds a server to the loop that runs when it is made.
        server = grpc.aio.server(handlers=self._generic, interceptors=self._interceptors, options=self._options)
        try:
            bound = [self._bind(server, parse_bind(text, 0)) for text in addresses]
            await server.start()
        except BaseException:
            self.remove_files()
            raise
        self._server = server
        self.addresses = tuple(map(str, bound))
        return bound[0].port if isinstance(bound[0], TcpAddress) else 0

    def _bind(self, server: grpc.aio.Server, bind: Bind) -> Address:
        address, policy = bind.address, self._policy.at(bind)
        if isinstance(address, UnixAddress):
            self._bind_unix(server, address, policy)
            return address
        try:
            return TcpAddress(address.host, _add_tcp(server, address, policy.credentials))
        except RuntimeError as error:
            raise why_not(address, reuse_port=self._policy.reuse_port) from error

    def _bind_unix(self, server: grpc.aio.Server, address: UnixAddress, policy: ListenPolicy) -> None:
        with claimed(address):
            # C core binds and listens in one step: until the mode is set no other user may connect
            mask = os.umask(0o177)
            try:
                server.add_insecure_port(str(address))
            except RuntimeError as error:
                raise ListenError(f"cannot listen on {address}") from error
            finally:
                os.umask(mask)
            self._files.append(UnixFile(address.path))
            set_access(address, policy)

    async def stop(self, grace: float | None) -> None:
        if self._server is not None:
            await self._server.stop(grace)
        self.remove_files()

    def remove_files(self) -> None:
        for file in self._files:
            file.remove()


def _add_tcp(server: grpc.aio.Server, address: TcpAddress, credentials: Credentials | None) -> int:
    if credentials is None:
        return server.add_insecure_port(str(address))
    return server.add_secure_port(str(address), _server_credentials(credentials))


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """C core's form of `credentials`; it asks for changed certificates at each handshake.

    A session can be resumed only under the material with which it began. C core does not check clients' certificates in
    resumed sessions, so with mutual TLS each handshake gets material of its own.
    """

    def configuration() -> grpc.ServerCertificateConfiguration:
        found = credentials.material
        return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], found.root)

    def fetch() -> Any:
        return configuration() if credentials.refresh() or credentials.mutual else None  # None: as before

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=credentials.mutual)


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
