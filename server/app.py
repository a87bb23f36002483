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
from _native.service.forwarding import Forwarder
from backends.api import BackendError
from backends.loader import BUILTIN, BackendLoader
from server.addresses import Bind
from server.engine.config import Options
from server.engine.engine import Engine
from server.engine.housekeeping.collecting import set_aside
from server.engine.housekeeping.idle import look_after_memory
from server.engine.instances.gpu import GpuPolicy, Gpus
from server.engine.instances.hosts import HostPolicyError, parse_host_policies
from server.engine.instances.instances import Hardware
from server.engine.instances.resources import ResourceError, Resources, parse_limits
from server.engine.loading.control import ControlMode, ModelControl
from server.engine.pbtxt.variables import Variables
from server.engine.repository.sources import open_sources
from server.engine.shared_memory import SharedMemoryPolicy
from server.errors import ConfigError, ServerError
from server.front.access import Access
from server.front.connection_limits import ClientLimits
from server.front.door import Door
from server.front.grpcio import GrpcioDoor
from server.front.keepalive import ConnectionPolicy
from server.front.listeners import ListenPolicy, try_to_listen
from server.front.native import NativeDoor
from server.front.scrape import ScrapeListener, try_to_serve
from server.front.services import CALL_KINDS, Policy, install
from server.front.tls import Credentials, CredentialsError
from server.front.tokens import TokenFileError
from server.memory import usable_memory
from server.observe.load import LoadMeter
from server.observe.logs import Logs, configure
from server.observe.metrics.catalogue import chosen
from server.observe.metrics.exemplars import Exemplars
from server.observe.metrics.gpu import GpuMetrics
from server.observe.metrics.page import Page
from server.observe.metrics.process import Machine
from server.observe.metrics.service import Service, Traffic
from server.observe.recording import Recording, RecordingError
from server.rpc.delays import DelayError, Delays
from server.rpc.metadata import EXTENSIONS, Identity
from server.rpc.service import table
from server.settings import Settings
from server.settings.shown import tell_options

log = logging.getLogger("inferd")

SWITCH_INTERVAL = 50e-6
"""Seconds after which a waiting thread gets the GIL: the loop must not wait Python's default of 5 ms."""

HELD_SHARE = 4
"""The part of the memory that requests and answers of clients may take by default; --max-held-bytes sets another."""

SEQUENCES_SHARE = 0.75
"""The part of the exit timeout in which sequences go on when the server stops; the rest is for running requests."""

TELL_PROGRESS = 10.0
"""Seconds between lines about models that are being loaded."""

LAST_SECOND = 1.0
"""Seconds for unloading when running requests have used up the exit timeout."""

COUNTERS = "INFERD_DEBUG_COUNTERS"
"""Environment variable: print the native objects that are still alive when the server ends."""


class StartError(Exception):
    """The server cannot start; the text says why."""


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; the exit status of the process."""
    try:
        logs = configure(settings)
    except OSError as error:
        print(f"inferd: log-file: {error}", file=sys.stderr)
        return 1
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        uvloop.run(_serve(settings, logs))
    except StartError as error:
        log.error("%s", error)
        return 1
    finally:
        if COUNTERS in os.environ:
            gc.collect()
            # one write: threads that end may log to the same stream
            print(f"live: {json.dumps(live_counters())}\n", end="", flush=True)
    return 0


class StopSignal:
    """SIGINT and SIGTERM: the first asks for an orderly stop, the second ends the process at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._cleaning: list[Callable[[], None]] = []
        self.number = 0  # of the first
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Return when the first has come."""
        await self._asked.wait()

    def at_once(self, callback: Callable[[], None]) -> None:
        """Have `callback` called before the second signal ends the process."""
        self._cleaning.append(callback)

    def _on_signal(self, number: int) -> None:
        if not self._asked.is_set():
            self.number = number
            self._asked.set()
            return
        log.error("a second signal: exiting immediately")
        for callback in self._cleaning:
            callback()
        _exit(128 + number)

    def out_of_time(self) -> None:
        """End the process with unfinished work; the status is that of a process that the signal has ended."""
        log.error("Exit timeout expired. Exiting immediately.")
        for callback in self._cleaning:
            callback()
        _exit(128 + self.number)


def _exit(status: int) -> None:
    """End the process now: threads that load or execute models cannot be stopped."""
    logging.shutdown()
    os._exit(status)


async def _serve(settings: Settings, logs: Logs) -> None:
    stop = StopSignal()
    if settings.log_verbose:
        tell_options(settings)
    # errors of addresses, certificates and tokens come before models are loaded
    policy = _policy(settings)
    _try_addresses(settings, policy)
    engine = make_engine(settings)
    access = _access(settings, engine)
    problems = await _load(settings, engine, stop)
    deadline = math.inf
    recording = None
    try:
        if problems and settings.exit_on_error:
            raise StartError(
                f"{len(problems)} of the models could not be loaded: {', '.join(engine.problems)}; "
                "--exit-on-error=false serves the others"
            )
        if problems is not None:
            recording = _recording(settings, engine)
            deadline = await _serve_door(settings, engine, access, policy, stop, logs, recording)
    finally:
        await _close(engine, deadline, stop, recording)


def _try_addresses(settings: Settings, policy: ListenPolicy) -> None:
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


async def _load(settings: Settings, engine: Engine, stop: StopSignal) -> list[str] | None:
    """Load the models; the errors, or None if a signal stopped the server meanwhile."""
    loop = asyncio.get_running_loop()
    loading, stopped = loop.create_task(engine.start(set_aside)), loop.create_task(stop.wait())
    began = loop.time()
    while not (await asyncio.wait({loading, stopped}, timeout=TELL_PROGRESS, return_when=asyncio.FIRST_COMPLETED))[0]:
        log.info("after %.0f s: %s", loop.time() - began, engine.progress())
    if not stopped.done():
        stopped.cancel()
        problems = await loading
        for line in engine.table() if engine.index() else ():
            log.info("%s", line)
        return problems
    log.info(
        "stopping: loading has %d s to finish; a second signal ends the process at once", settings.exit_timeout_secs
    )
    await asyncio.wait({loading}, timeout=settings.exit_timeout_secs)
    if not loading.done():
        stop.out_of_time()
    return None


async def _close(engine: Engine, deadline: float, stop: StopSignal, recording: Recording | None) -> None:
    """Unload everything; at `deadline`, on the loop's clock, the process ends although models still run."""
    remaining = deadline - asyncio.get_running_loop().time()
    late = False
    try:
        await asyncio.wait_for(engine.close(), None if math.isinf(remaining) else max(remaining, LAST_SECOND))
    except TimeoutError:
        late = True
    if recording is not None:  # after the last request, which may outlast its call
        await asyncio.to_thread(recording.close)
    if late:
        stop.out_of_time()


def _recording(settings: Settings, engine: Engine) -> Recording:
    try:
        return Recording(settings, engine)
    except RecordingError as error:
        raise StartError(str(error)) from error


def make_loader(settings: Settings) -> BackendLoader:
    """The loader that finds backends."""
    loader = BackendLoader(settings.backend_settings, settings.backend_directory)
    for name in loader.unknown():
        log.warning("--backend-config=%s,...: there is no backend of this name, there are %s", name, ", ".join(BUILTIN))
    return loader


def model_options(settings: Settings, gpus: Gpus) -> Options:
    """The options by which the engine reads configurations."""
    return Options(
        auto_complete=not settings.disable_auto_complete_config,
        config_name=settings.model_config_name,
        default_max_batch_size=settings.default_max_batch_size,
        gpus=gpus.count,
        variables=Variables(settings.config_variable),
    )


def make_engine(settings: Settings) -> Engine:
    """The engine, in which nothing is loaded yet.

    Raises:
        StartError: the settings do not fit this machine.
    """
    gpus = Gpus(
        GpuPolicy(
            settings.cuda_driver,
            settings.pinned_memory_pool_byte_size,
            settings.cuda_pools,
            settings.gpu_load_limits,
        )
    )
    try:
        sources = open_sources(settings.model_repository, settings.model_name)
    except ServerError as error:
        raise StartError(str(error)) from error
    loader = make_loader(settings)
    try:
        loader.preload()
    except BackendError as error:
        raise StartError(str(error)) from error
    try:
        return Engine(
            sources,
            loader,
            model_options(settings, gpus),
            load_threads=settings.model_load_thread_count,
            load_retries=settings.model_load_retry_count,
            strict_readiness=settings.strict_readiness,
            max_inflight=settings.max_inflight_requests,
            max_queued=settings.max_queued_requests_per_model,
            shared_memory=SharedMemoryPolicy(
                shared=settings.allow_client_shm,
                access=settings.client_shm_access,
                prefixes=settings.client_shm_prefix,
                max_regions=settings.client_shm_max_regions,
                max_byte_size=settings.client_shm_max_byte_size,
                user_regions=settings.client_shm_max_regions_per_user,
                user_byte_size=settings.client_shm_max_byte_size_per_user,
                max_copied=settings.grpc_max_message_size or 2**31 - 1,
            ),
            cache=settings.cache,
            hardware=_hardware(settings, gpus),
            control=ModelControl(
                ControlMode(settings.model_control_mode),
                settings.load_model,
                settings.repository_poll_secs,
                settings.model_memory_budget,
            ),
        )
    except ConfigError as error:
        raise StartError(f"cache-config: {error}") from error


def _hardware(settings: Settings, gpus: Gpus) -> Hardware:
    try:
        limits = parse_limits(settings.rate_limit_resource)
        hosts = parse_host_policies(settings.host_policy)
    except ResourceError as error:
        raise StartError(f"rate-limit-resource: {error}") from error
    except HostPolicyError as error:
        raise StartError(f"host-policy: {error}") from error
    return Hardware(hosts, Resources(limits) if settings.rate_limit == "execution_count" else None, gpus)


async def _serve_door(
    settings: Settings,
    engine: Engine,
    access: Access,
    policy: ListenPolicy,
    stop: StopSignal,
    logs: Logs,
    recording: Recording,
) -> float:
    """Serve until a signal, then let running calls finish; returns the time on the loop's clock when all must be
    over."""
    if settings.log_file:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, logs.reopen)
    load = LoadMeter(engine) if settings.orca_load_metrics else None
    delays = _delays()
    door = _door(settings, engine, policy, access, native_infer=not delays.of_inference)
    identity = Identity(settings.id, metadata.version("inferd"), _extensions(settings))
    forwarder = _forwarder(settings, engine)
    if isinstance(door, NativeDoor) and forwarder is not None:
        door.forward(forwarder)
    service = _service(settings, engine, door, logs)
    rules = Policy(access, load, service.counted, reflected=_is_reflected(settings), forwarder=forwarder)
    methods = delays.applied(table(engine, identity, logs=logs, traces=recording.control))
    health = install(door, methods, engine, rules)
    scrapers = await _serve_metrics(settings, service, recording.exemplars)
    if scrapers is not None:
        stop.at_once(scrapers.remove_file)
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
    log.info("stopping: running requests have %.1f s to finish", remaining)
    health.close()
    await door.stop(remaining)
    if scrapers is not None:
        await scrapers.close()
    for task in beside:
        task.cancel()
    return deadline


def _service(settings: Settings, engine: Engine, door: Door, logs: Logs) -> Service:
    """The sources of the server's metrics."""
    build = {"version": metadata.version("inferd"), "transport": settings.transport}
    traffic = door.traffic if isinstance(door, NativeDoor) else Traffic
    return Service(engine, build, kinds=CALL_KINDS, traffic=traffic, lines_lost=lambda: logs.lost)


async def _serve_metrics(settings: Settings, service: Service, exemplars: Exemplars | None) -> ScrapeListener | None:
    """The listener for scrapers; None without metrics."""
    if not settings.allow_metrics:
        return None
    interval = settings.metrics_interval_ms / 1000
    page = Page(
        service,
        chosen(settings.metrics_switches),
        machine=Machine(interval) if settings.allow_cpu_metrics else None,
        gpus=GpuMetrics(interval) if settings.allow_gpu_metrics else None,
        exemplars=exemplars,
    )
    listener = ScrapeListener(lambda openmetrics, packed: page.render(openmetrics=openmetrics, packed=packed))
    try:
        log.info("Started Metrics Service at %s", await listener.start(settings.metrics_bind))
    except OSError as error:
        raise StartError(str(error)) from error
    return listener


def _forwarder(settings: Settings, engine: Engine) -> Forwarder | None:
    """Makes headers request parameters; the keys of restricted protocols are secrets and stay headers."""
    if not settings.grpc_header_forward_pattern:
        return None
    keys = [header for _, header, _ in settings.restricted_protocols]
    forwarder = Forwarder(settings.grpc_header_forward_pattern, keys)
    engine.infer.forward(forwarder)
    return forwarder


def _beside(access: Access, load: LoadMeter | None) -> Iterator[Coroutine[Any, Any, None]]:
    """Tasks that run for as long as the door serves."""
    yield access.watch()
    yield look_after_memory(usable_memory())
    if load is not None:
        yield load.run()


def _access(settings: Settings, engine: Engine) -> Access:
    """The rules that the settings name, in force for the engine."""
    try:
        access = Access(
            settings.restricted_protocols,
            settings.grpc_token_file,
            triton_codes=settings.triton_auth_codes,
            overrides=settings.model_load_overrides,
        )
    except TokenFileError as error:
        raise StartError(f"grpc-token-file: {error}") from error
    engine.infer.set_callers_apart(sequences=not settings.sequence_sharing, answers=settings.cache_per_caller)
    if access.guards:
        engine.infer.guard(access.authorizer)
    return access


def _binds(settings: Settings) -> list[Bind]:
    """The addresses to listen on; on the native door each says whether it serves reflection."""
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
    """Whether the server offers reflection; with grpcio no single address can refuse it."""
    every = all if settings.transport == "grpcio" else any
    return every(_is_reflected_at(settings, bind) for bind in settings.binds)


def _delays() -> Delays:
    try:
        delays = Delays.of(os.environ)
    except DelayError as error:
        raise StartError(str(error)) from error
    if delays != Delays():
        log.warning("environment variables for tests delay calls: %s", delays)
    return delays


def _door(settings: Settings, engine: Engine, policy: ListenPolicy, access: Access, *, native_infer: bool) -> Door:
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
        engine.infer if native_infer else None,
        access=access,
        max_message_bytes=limit,
        max_decompressed_bytes=settings.grpc_max_decompressed_size,
        compression_level=settings.grpc_infer_response_compression_level,
        policy=policy,
        max_held_bytes=settings.max_held_bytes or usable_memory() // HELD_SHARE,
        receive_timeout=settings.grpc_receive_timeout / 1000,
        send_timeout=settings.grpc_send_timeout / 1000,
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
        max_streams=settings.grpc_max_concurrent_streams,
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
