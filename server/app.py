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
from importlib import metadata

import uvloop

from _native.memory import live_counters
from backends.loader import BackendLoader
from server.engine.config import Options
from server.engine.engine import Engine
from server.front.door import Door
from server.front.grpcio import GrpcioDoor
from server.front.native import NativeDoor
from server.front.services import install
from server.observe.logs import configure
from server.rpc.metadata import Identity
from server.rpc.service import table
from server.settings import Settings

log = logging.getLogger("inferd")

SWITCH_INTERVAL = 50e-6
"""Seconds after which a thread that waits for the GIL may have it: the loop must not wait Python's default of 5 ms."""

LAST_SECOND = 1.0
"""Seconds for unloading when running requests have used up the exit timeout."""

COUNTERS = "INFERD_DEBUG_COUNTERS"
"""Environment variable: print the native objects that are still alive when the server ends."""


class StartError(Exception):
    """The server cannot start; the text says why."""


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; the exit status of the process."""
    configure(settings)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        uvloop.run(_serve(settings))
    except StartError as error:
        log.error("%s", error)
        return 1
    finally:
        if COUNTERS in os.environ:
            gc.collect()
            print(f"live: {json.dumps(live_counters())}", flush=True)
    return 0


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    engine = _engine(settings)
    problems = await engine.start()
    deadline = math.inf
    try:
        if problems and settings.exit_on_error:
            raise StartError(
                f"{len(problems)} of the models could not be loaded, see above; --exit-on-error=false serves the others"
            )
        deadline = await _serve_door(settings, engine, stop)
    finally:
        await _close(engine, deadline)


async def _close(engine: Engine, deadline: float) -> None:
    """Unload everything; a model that still runs at `deadline`, on the loop's clock, does not keep the process."""
    remaining = deadline - asyncio.get_running_loop().time()
    try:
        await asyncio.wait_for(engine.close(), None if math.isinf(remaining) else max(remaining, LAST_SECOND))
    except TimeoutError:
        log.error("Exit timeout expired. Exiting immediately.")
        logging.shutdown()
        os._exit(0)  # threads that execute models cannot be stopped


def _engine(settings: Settings) -> Engine:
    loader = BackendLoader(settings.backend_settings, settings.backend_directory)
    options = Options(
        auto_complete=not settings.disable_auto_complete_config,
        config_name=settings.model_config_name,
        default_max_batch_size=settings.default_max_batch_size,
    )
    return Engine(
        settings.model_repository,
        loader,
        options,
        load_threads=settings.model_load_thread_count,
        strict_readiness=settings.strict_readiness,
    )


async def _serve_door(settings: Settings, engine: Engine, stop: asyncio.Event) -> float:
    """Serve until told to stop, then let running calls finish; returns when, on the loop's clock, all must be over."""
    door = _door(settings, engine)
    identity = Identity(name=settings.id, version=metadata.version("inferd"))
    health = install(door, table(engine, identity), engine)
    address = f"{settings.grpc_address}:{settings.grpc_port}"
    try:
        port = await door.start(address)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error}") from error
    log.info("Started GRPCInferenceService at %s:%d (%s)", settings.grpc_address, port, settings.transport)
    await stop.wait()
    log.info("stopping: running requests have %d s to finish", settings.exit_timeout_secs)
    health.drain()
    engine.drain()
    deadline = asyncio.get_running_loop().time() + settings.exit_timeout_secs
    await door.stop(settings.exit_timeout_secs)
    return deadline


def _door(settings: Settings, engine: Engine) -> Door:
    limit = settings.grpc_max_message_size or -1
    if settings.transport == "grpcio":
        return GrpcioDoor(max_message_bytes=limit, compression_level=settings.grpc_infer_response_compression_level)
    door = NativeDoor(
        engine.infer,
        max_message_bytes=limit,
        max_decompressed_bytes=settings.grpc_max_decompressed_size,
        compression_level=settings.grpc_infer_response_compression_level,
    )
    engine.after_delivery(door.flush)
    return door
