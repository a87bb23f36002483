"""Composes the server from settings, starts it, and stops it in order."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import uvloop

from _native.memory.resource import live_counters
from _native.transport.forwarding import Forwarder
from backends.loader import BackendLoader
from server.addresses import Bind
from server.engine.config import Options
from server.engine.control import ControlMode, ModelControl
from server.engine.engine import Engine
from server.engine.gpu import GpuPolicy, Gpus
from server.engine.hosts import HostPolicyError, parse_host_policies
from server.engine.instances import Placement
from server.engine.resources import ResourceError, Resources, parse_limits
from server.engine.shared_memory import SharedMemoryPolicy
from server.errors import ConfigError
from server.front.access import Access
from server.front.door import Door
from server.front.grpcio import GrpcioDoor
from server.front.keepalive import ConnectionPolicy
from server.front.listeners import ListenPolicy
from server.front.lobby import ClientLimits
from server.front.native import NativeDoor
from server.front.services import Policy, install
from server.front.tls import Credentials, CredentialsError
from server.front.tokens import TokenFileError
from server.observe.load import LoadMeter
from server.observe.logs import Logs, configure
from server.rpc.metadata import EXTENSIONS, Identity
from server.rpc.service import table
from server.settings import Settings

log = logging.getLogger("inferd")

SWITCH_INTERVAL = 50e-6
"""Seconds after which a thread that waits for the GIL may have it: the loop must not wait Python's default of 5 ms."""

SEQUENCES_SHARE = 0.75
"""Of the exit timeout, for which sequences go on when the server stops; the rest is for the requests that run then."""

LAST_SECOND = 1.0
"""Seconds for unloading when running requests have used up the exit timeout."""

COUNTERS = "INFERD_DEBUG_COUNTERS"
"""Environment variable: print the native objects that are still alive when the server ends."""


class StartError(Exception):
    """The server cannot start; the text says why."""


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; the exit status of the process."""
    logs = configure(settings)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        uvloop.run(_serve(settings, logs))
    except StartError as error:
        log.error("%s", error)
        return 1
    finally:
        if COUNTERS in os.environ:
            gc.collect()
            print(f"live: {json.dumps(live_counters())}", flush=True)
    return 0


class StopSignal:
    """SIGINT and SIGTERM: the first asks for an orderly stop, the second ends the process at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._cleaning: list[Callable[[], None]] = []
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Return when the first has come."""
        await self._asked.wait()

    def at_once(self, callback: Callable[[], None]) -> None:
        """Have `callback` called before the process ends at once."""
        self._cleaning.append(callback)

    def _on_signal(self, number: int) -> None:
        if not self._asked.is_set():
            self._asked.set()
            return
        log.error("a second signal: exiting immediately")
        for callback in self._cleaning:
            callback()
        _exit(128 + number)


def _exit(status: int) -> None:
    """End the process now: threads that load or execute models cannot be stopped."""
    logging.shutdown()
    os._exit(status)


async def _serve(settings: Settings, logs: Logs) -> None:
    stop = StopSignal()
    policy = _policy(settings)  # wrong certificates are told before models are loaded
    engine = _engine(settings)
    problems = await _load(settings, engine, stop)
    deadline = math.inf
    try:
        if problems and settings.exit_on_error:
            raise StartError(
                f"{len(problems)} of the models could not be loaded, see above; --exit-on-error=false serves the others"
            )
        if problems is not None:
            deadline = await _serve_door(settings, engine, policy, stop, logs)
    finally:
        await _close(engine, deadline)


async def _load(settings: Settings, engine: Engine, stop: StopSignal) -> list[str] | None:
    """Load the models; what went wrong, None when the server was told to stop meanwhile."""
    loop = asyncio.get_running_loop()
    loading, stopped = loop.create_task(engine.start()), loop.create_task(stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        stopped.cancel()
        return await loading
    log.info("stopping: loading has %d s to finish", settings.exit_timeout_secs)
    await asyncio.wait({loading}, timeout=settings.exit_timeout_secs)
    if not loading.done():
        log.error("Exit timeout expired. Exiting immediately.")
        _exit(0)
    return None


async def _close(engine: Engine, deadline: float) -> None:
    """Unload everything; a model that still runs at `deadline`, on the loop's clock, does not keep the process."""
    remaining = deadline - asyncio.get_running_loop().time()
    try:
        await asyncio.wait_for(engine.close(), None if math.isinf(remaining) else max(remaining, LAST_SECOND))
    except TimeoutError:
        log.error("Exit timeout expired. Exiting immediately.")
        _exit(0)


def _engine(settings: Settings) -> Engine:
    loader = BackendLoader(settings.backend_settings, settings.backend_directory)
    gpus = Gpus(GpuPolicy(settings.cuda_driver, settings.pinned_memory_pool_byte_size, settings.cuda_pools))
    options = Options(
        auto_complete=not settings.disable_auto_complete_config,
        config_name=settings.model_config_name,
        default_max_batch_size=settings.default_max_batch_size,
        gpus=gpus.count,
    )
    try:
        return Engine(
            settings.model_repository,
            loader,
            options,
            load_threads=settings.model_load_thread_count,
            strict_readiness=settings.strict_readiness,
            max_inflight=settings.max_inflight_requests,
            max_queued=settings.max_queued_requests_per_model,
            shared_memory=SharedMemoryPolicy(
                shared=settings.allow_client_shm,
                access=settings.client_shm_access,
                prefixes=settings.client_shm_prefix,
                max_regions=settings.client_shm_max_regions,
                max_byte_size=settings.client_shm_max_byte_size,
                max_copied=settings.grpc_max_message_size or 2**31 - 1,
            ),
            cache=settings.cache,
            placement=_placement(settings, gpus),
            control=ModelControl(
                ControlMode(settings.model_control_mode), settings.load_model, settings.repository_poll_secs
            ),
        )
    except ConfigError as error:
        raise StartError(f"cache-config: {error}") from error


def _placement(settings: Settings, gpus: Gpus) -> Placement:
    try:
        limits = parse_limits(settings.rate_limit_resource)
        hosts = parse_host_policies(settings.host_policy)
    except ResourceError as error:
        raise StartError(f"rate-limit-resource: {error}") from error
    except HostPolicyError as error:
        raise StartError(f"host-policy: {error}") from error
    return Placement(hosts, Resources(limits) if settings.rate_limit == "execution_count" else None, gpus)


async def _serve_door(settings: Settings, engine: Engine, policy: ListenPolicy, stop: StopSignal, logs: Logs) -> float:
    """Serve until told to stop, then let running calls finish; returns when, on the loop's clock, all must be over."""
    access = _access(settings, engine)
    load = LoadMeter(engine) if settings.orca_load_metrics else None
    door = _door(settings, engine, policy, access)
    identity = Identity(settings.id, metadata.version("inferd"), _extensions(settings))
    forwarder = Forwarder(settings.grpc_header_forward_pattern) if settings.grpc_header_forward_pattern else None
    if isinstance(door, NativeDoor) and forwarder is not None:
        door.forward(forwarder)
    rules = Policy(access, load, reflected=_is_reflected(settings), forwarder=forwarder)
    health = install(door, table(engine, identity, logs=logs), engine, rules)
    try:
        await door.start(*map(str, _binds(settings)))
    except OSError as error:
        raise StartError(str(error)) from error
    for address in door.addresses:
        log.info("Started GRPCInferenceService at %s (%s)", address, settings.transport)
    stop.at_once(door.remove_files)
    beside = [asyncio.create_task(each) for each in _beside(access, load)]
    await stop.wait()
    health.drain()
    engine.drain()
    if settings.drain_delay:
        log.info("stopping: not ready any more, served for %g s", settings.drain_delay)
        await asyncio.sleep(settings.drain_delay)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.exit_timeout_secs
    await engine.finish_sequences(settings.exit_timeout_secs * SEQUENCES_SHARE)
    remaining = max(0.0, deadline - loop.time())
    log.info("stopping: running requests have %d s to finish", math.ceil(remaining))
    health.close()
    await door.stop(remaining)
    for task in beside:
        task.cancel()
    return deadline


def _beside(access: Access | None, load: LoadMeter | None) -> Iterator[Coroutine[Any, Any, None]]:
    """What runs beside the door for as long as it does."""
    if access is not None:
        yield access.watch()
    if load is not None:
        yield load.run()


def _access(settings: Settings, engine: Engine) -> Access | None:
    """The rules that the settings name, in force for the engine; None without any."""
    if not settings.grpc_restricted_protocol and settings.grpc_token_file is None:
        return None
    try:
        access = Access(
            settings.restricted_protocols, settings.grpc_token_file, triton_codes=settings.triton_auth_codes
        )
    except TokenFileError as error:
        raise StartError(f"grpc-token-file: {error}") from error
    engine.infer.guard(access.judge)
    return access


def _binds(settings: Settings) -> list[Bind]:
    """Where to listen; on the native door each says whether server reflection is served there."""
    binds = settings.binds
    if settings.transport == "grpcio":
        return list(binds)
    return [Bind(bind.address, replace(bind.rules, reflection=_is_reflected_at(settings, bind))) for bind in binds]


def _is_reflected_at(settings: Settings, bind: Bind) -> bool:
    if bind.rules.reflection is not None:
        return bind.rules.reflection
    return settings.grpc_reflection == "on" or (settings.grpc_reflection == "auto" and bind.address.is_local)


def _extensions(settings: Settings) -> tuple[str, ...]:
    off = {"system_shared_memory"} if settings.client_shm_access == "none" else set()
    return tuple(name for name in EXTENSIONS if name not in off)


def _is_reflected(settings: Settings) -> bool:
    """The service is there; with grpcio it cannot be kept from a single address."""
    every = all if settings.transport == "grpcio" else any
    return every(_is_reflected_at(settings, bind) for bind in settings.binds)


def _door(settings: Settings, engine: Engine, policy: ListenPolicy, access: Access | None) -> Door:
    limit = settings.grpc_max_message_size or -1
    if settings.transport == "grpcio":
        return GrpcioDoor(
            access=access,
            max_message_bytes=limit,
            compression_level=settings.grpc_infer_response_compression_level,
            policy=policy,
            connections=_connections(settings),
        )
    door = NativeDoor(
        engine.infer,
        access=access,
        max_message_bytes=limit,
        max_decompressed_bytes=settings.grpc_max_decompressed_size,
        max_unsent_bytes=settings.grpc_max_unsent_size,
        compression_level=settings.grpc_infer_response_compression_level,
        policy=policy,
        max_incoming_bytes=settings.grpc_max_incoming_size,
        receive_timeout=settings.grpc_receive_timeout / 1000,
        connections=_connections(settings),
        max_connections=settings.grpc_max_connections,
        clients=ClientLimits(
            connections=settings.grpc_max_connections_per_client,
            calls=settings.grpc_max_calls_per_client,
            streams=settings.grpc_max_streams_per_client,
            bytes_in_flight=settings.grpc_max_bytes_per_client,
        ),
    )
    engine.after_delivery(door.flush)
    return door


def _connections(settings: Settings) -> ConnectionPolicy:
    return ConnectionPolicy(
        keepalive_time=settings.grpc_keepalive_time / 1000,
        keepalive_timeout=settings.grpc_keepalive_timeout / 1000,
        permit_without_calls=settings.grpc_keepalive_permit_without_calls,
        max_pings_without_data=settings.grpc_http2_max_pings_without_data,
        min_ping_interval=settings.grpc_http2_min_recv_ping_interval_without_data / 1000,
        max_ping_strikes=settings.grpc_http2_max_ping_strikes,
        max_age=settings.grpc_max_connection_age / 1000 or math.inf,
        age_grace=settings.grpc_max_connection_age_grace / 1000 or math.inf,
        handshake_timeout=settings.grpc_handshake_timeout / 1000,
    )


def _policy(settings: Settings) -> ListenPolicy:
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
