"""Makes the front door from the settings: its addresses, limits, credentials and access rules."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace

from inferd._native.service.forwarding import Forwarder
from inferd.server.addresses import Bind
from inferd.server.engine.engine import Engine
from inferd.server.errors import StartError
from inferd.server.front.access import Access
from inferd.server.front.connection_limits import ClientLimits
from inferd.server.front.door import Door
from inferd.server.front.grpcio import GrpcioDoor
from inferd.server.front.keepalive import ConnectionPolicy
from inferd.server.front.listeners import ListenPolicy, try_to_listen
from inferd.server.front.native import NativeDoor
from inferd.server.front.scrape import try_to_serve
from inferd.server.front.tls import Credentials, CredentialsError
from inferd.server.front.tokens import TokenFileError
from inferd.server.machine import cores, usable_memory
from inferd.server.rpc.delays import DelayError, Delays
from inferd.server.settings import CORES_PER_IO_THREAD, HELD_DIVISOR, Settings

log = logging.getLogger("inferd")


def listen_policy(settings: Settings) -> ListenPolicy:
    """How the server listens.

    Raises:
        StartError: a certificate or key cannot be used.
    """
    return ListenPolicy(
        reuse_port=settings.reuse_grpc_port,
        unix_mode=settings.unix_mode,
        unix_owner=settings.grpc_unix_owner,
        credentials=_credentials(settings),
        encrypted=settings.grpc_use_ssl or settings.grpc_use_ssl_mutual,
    )


def _credentials(settings: Settings) -> Credentials | None:
    if settings.grpc_server_cert is None or settings.grpc_server_key is None:
        return None
    try:
        return Credentials(settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert)
    except CredentialsError as error:
        raise StartError(str(error)) from error


def try_addresses(settings: Settings, policy: ListenPolicy) -> None:
    """Open the sockets and close them again.

    Raises:
        StartError: the server cannot listen on an address.
    """
    try:
        for bind in settings.binds:
            try_to_listen(bind.address, policy.at(bind))
        if settings.allow_metrics:
            try_to_serve(settings.metrics_bind)
    except OSError as error:
        raise StartError(str(error)) from error


def binds_of(settings: Settings) -> list[Bind]:
    """The addresses to listen on; on the native door each says whether it serves reflection."""
    binds = settings.binds
    if settings.transport == "grpcio":
        return list(binds)
    return [Bind(bind.address, replace(bind.rules, reflection=_is_reflected_at(settings, bind))) for bind in binds]


def _is_reflected_at(settings: Settings, bind: Bind) -> bool:
    if bind.rules.reflection is not None:
        return bind.rules.reflection
    return settings.grpc_reflection == "on" or (settings.grpc_reflection == "auto" and bind.address.is_local)


def is_reflected(settings: Settings) -> bool:
    """Whether the server offers reflection. With grpcio all addresses offer it, or none."""
    every = all if settings.transport == "grpcio" else any
    return every(_is_reflected_at(settings, bind) for bind in settings.binds)


def make_access(settings: Settings, engine: Engine) -> Access:
    """The access rules of the settings, which the engine obeys from now on.

    Raises:
        StartError: the file of tokens cannot be used.
    """
    try:
        access = Access(
            settings.restricted_protocols,
            settings.grpc_token_file,
            overrides=settings.model_load_overrides,
        )
    except TokenFileError as error:
        raise StartError(f"grpc-token-file: {error}") from error
    engine.infer.set_callers_apart(sequences=not settings.sequence_sharing, responses=settings.cache_per_caller)
    if access.guards:
        engine.infer.guard(access.authorizer)
    return access


def make_forwarder(settings: Settings, engine: Engine) -> Forwarder | None:
    """Makes headers request parameters; the keys of restricted protocols are secrets and stay headers."""
    if not settings.grpc_header_forward_pattern:
        return None
    keys = [header for _, header, _ in settings.restricted_protocols]
    forwarder = Forwarder(settings.grpc_header_forward_pattern, keys)
    engine.infer.forward(forwarder)
    return forwarder


def read_delays() -> Delays:
    """The delays of calls that environment variables set, as in some tests.

    Raises:
        StartError: a variable has another form.
    """
    try:
        delays = Delays.of(os.environ)
    except DelayError as error:
        raise StartError(str(error)) from error
    if delays != Delays():
        log.warning("environment variables for tests delay calls: %s", delays)
    return delays


def make_door(settings: Settings, engine: Engine, policy: ListenPolicy, access: Access, *, native_infer: bool) -> Door:
    """The front door of --transport; with `native_infer` the native door answers inference without Python."""
    if settings.transport == "grpcio":
        return GrpcioDoor(
            access=access,
            max_message_bytes=settings.grpc_max_message_size or None,
            compression_level=settings.grpc_infer_response_compression_level,
            policy=policy,
            connections=_connections(settings),
        )
    return NativeDoor(
        engine.infer if native_infer else None,
        access=access,
        max_message_bytes=settings.grpc_max_message_size or None,
        max_decompressed_bytes=settings.grpc_max_decompressed_size or None,
        compression_level=settings.grpc_infer_response_compression_level,
        policy=policy,
        max_held_bytes=settings.max_held_bytes or usable_memory() // HELD_DIVISOR,
        receive_timeout=settings.grpc_receive_timeout / 1000 or math.inf,
        send_timeout=settings.grpc_send_timeout / 1000 or math.inf,
        connections=_connections(settings),
        max_connections=settings.grpc_max_connections or None,
        io_threads=settings.io_threads or max(1, cores() // CORES_PER_IO_THREAD),
        io_busy_poll=settings.io_busy_poll_us / 1e6,
        clients=ClientLimits(
            connections=settings.grpc_max_connections_per_client or None,
            calls=settings.grpc_max_calls_per_client or None,
            streams=settings.grpc_max_streams_per_client or None,
            bytes_in_flight=settings.grpc_max_bytes_per_client or None,
        ),
    )


def _connections(settings: Settings) -> ConnectionPolicy:
    return ConnectionPolicy(
        keepalive_time=settings.grpc_keepalive_time / 1000,
        keepalive_timeout=settings.grpc_keepalive_timeout / 1000,
        permit_without_calls=settings.grpc_keepalive_permit_without_calls,
        max_pings_without_data=settings.grpc_http2_max_pings_without_data or None,
        min_ping_interval=settings.grpc_http2_min_recv_ping_interval_without_data / 1000,
        max_ping_strikes=settings.grpc_http2_max_ping_strikes or None,
        max_age=settings.grpc_max_connection_age / 1000 or math.inf,
        age_grace=settings.grpc_max_connection_age_grace / 1000 or math.inf,
        handshake_timeout=settings.grpc_handshake_timeout / 1000,
        max_streams=settings.grpc_max_concurrent_streams,
    )
