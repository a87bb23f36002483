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
from collections.abc import Coroutine, Iterator
from importlib import metadata
from typing import Any

import uvloop

from inferd._native.memory.resource import live_counters
from inferd.server.composition.door import (
    binds_of,
    is_reflected,
    listen_policy,
    make_access,
    make_door,
    make_forwarder,
    read_delays,
    try_addresses,
)
from inferd.server.composition.engine import make_engine
from inferd.server.composition.observing import make_recording, make_service, serve_metrics
from inferd.server.engine.engine import Engine
from inferd.server.engine.housekeeping.collecting import set_aside
from inferd.server.engine.housekeeping.idle import look_after_memory
from inferd.server.errors import StartError
from inferd.server.front.access import Access
from inferd.server.front.listeners import ListenPolicy
from inferd.server.front.native import NativeDoor
from inferd.server.front.notifying import ServiceManager
from inferd.server.front.services import Policy, install
from inferd.server.machine import usable_memory
from inferd.server.observe.load import LoadMeter
from inferd.server.observe.logs import Logs, configure
from inferd.server.observe.recording import Recording
from inferd.server.rpc.metadata import EXTENSIONS, Identity
from inferd.server.rpc.service import table
from inferd.server.settings import Settings
from inferd.server.settings.shown import tell_options
from inferd.server.stopping import StopSignal

log = logging.getLogger("inferd")

SWITCH_INTERVAL = 50e-6
"""Seconds after which a waiting thread gets the GIL: Python's default of 5 ms is too long for the loop."""

SEQUENCES_SHARE = 0.75
"""The part of the exit timeout in which sequences go on when the server stops; the rest is for running requests."""

TELL_PROGRESS = 10.0
"""Seconds between log lines about the progress of loading at the start."""

MORE_TIME = f"EXTEND_TIMEOUT_USEC={int(6 * TELL_PROGRESS * 1e6)}"
"""Sent with each of these lines, so that the service manager goes on waiting for the start."""

LAST_SECOND = 1.0
"""Seconds for unloading when running requests have used up the exit timeout."""

LAST_WORK = 2.0
"""Seconds after unloading, to write the last records and end the interpreter."""

COUNTERS = "INFERD_DEBUG_COUNTERS"
"""Environment variable: print the native objects that are still alive when the server ends."""


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status of the process."""
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
            # in one write, because threads that end may log to the same stream
            print(f"live: {json.dumps(live_counters())}\n", end="", flush=True)
    return 0


async def _serve(settings: Settings, logs: Logs) -> None:
    stop = StopSignal()
    manager = ServiceManager()
    if settings.log_file:  # otherwise cli.py ignores SIGHUP
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, logs.reopen)
    if settings.log_verbose:
        tell_options(settings)
    # errors of addresses, certificates and tokens come before models are loaded
    policy = listen_policy(settings)
    try_addresses(settings, policy)
    engine = make_engine(settings)
    access = make_access(settings, engine)
    problems = await _load(settings, engine, stop, manager)
    deadline = math.inf
    recording = None
    try:
        if problems and settings.exit_on_error:
            raise StartError(
                f"{len(problems)} of the models could not be loaded: {', '.join(engine.problems)}; "
                "--exit-on-error=false serves the others"
            )
        if problems is not None:
            recording = make_recording(settings, engine)
            deadline = await _serve_door(settings, engine, access, policy, stop, logs, recording, manager)
    finally:
        await _close(engine, deadline, stop, recording)


async def _load(settings: Settings, engine: Engine, stop: StopSignal, manager: ServiceManager) -> list[str] | None:
    """Load the models; return the errors, or None if a signal stopped the server meanwhile."""
    loop = asyncio.get_running_loop()
    loading, stopped = loop.create_task(engine.start(set_aside)), loop.create_task(stop.wait())
    began = loop.time()
    while not (await asyncio.wait({loading, stopped}, timeout=TELL_PROGRESS, return_when=asyncio.FIRST_COMPLETED))[0]:
        progress = f"after {loop.time() - began:.0f} s: {engine.progress()}; the server listens when all are loaded"
        log.info("%s", progress)
        manager.tell(f"STATUS={progress}", MORE_TIME)
    if not stopped.done():
        stopped.cancel()
        problems = await loading
        for line in engine.table() if engine.index() else ():
            log.info("%s", line)
        return problems
    log.info(
        "stopping: loading has %d s to finish; a second signal ends the process at once", settings.exit_timeout_secs
    )
    stop.end_within(settings.exit_timeout_secs + LAST_SECOND + LAST_WORK)
    await asyncio.wait({loading}, timeout=settings.exit_timeout_secs)
    if not loading.done():
        stop.out_of_time()
    return None


async def _close(engine: Engine, deadline: float, stop: StopSignal, recording: Recording | None) -> None:
    """Unload everything. At `deadline`, on the loop's clock, the process ends even if models still run."""
    remaining = deadline - asyncio.get_running_loop().time()
    late = False
    try:
        await asyncio.wait_for(engine.close(), None if math.isinf(remaining) else max(remaining, LAST_SECOND))
    except TimeoutError:
        late = True
    if recording is not None:  # after the last request, which may end after its call
        await asyncio.to_thread(recording.close)
    if late:
        stop.out_of_time()


async def _serve_door(
    settings: Settings,
    engine: Engine,
    access: Access,
    policy: ListenPolicy,
    stop: StopSignal,
    logs: Logs,
    recording: Recording,
    manager: ServiceManager,
) -> float:
    """Serve until a signal, then let running calls finish; return the deadline of the stop, on the loop's clock."""
    load = LoadMeter(engine) if settings.orca_load_metrics else None
    delays = read_delays()
    door = make_door(settings, engine, policy, access, native_infer=not delays.of_inference)
    identity = Identity(settings.id, metadata.version("inferd"), _extensions(settings))
    forwarder = make_forwarder(settings, engine)
    if isinstance(door, NativeDoor) and forwarder is not None:
        door.forward(forwarder)
    service = make_service(settings, engine, door, logs)
    rules = Policy(access, load, service.counted, reflected=is_reflected(settings), forwarder=forwarder)
    methods = delays.applied(table(engine, identity, logs=logs, traces=recording.control))
    health = install(door, methods, engine, rules)
    scrapers = await serve_metrics(settings, service, recording.exemplars)
    if scrapers is not None:
        stop.at_once(scrapers.remove_file)
    try:
        await door.start(*map(str, binds_of(settings)))
    except OSError as error:
        if scrapers is not None:
            scrapers.remove_file()
        raise StartError(str(error)) from error
    for address in door.addresses:
        log.info("Started GRPCInferenceService at %s (%s)", address, settings.transport)
    stop.at_once(door.remove_files)
    background = [asyncio.create_task(each) for each in (*_background_tasks(access, load), manager.keep_telling())]
    manager.tell("READY=1", "STATUS=serving")
    await stop.wait()
    manager.tell("STOPPING=1", "STATUS=stopping")
    stop.end_within(settings.drain_delay + settings.exit_timeout_secs + LAST_SECOND + LAST_WORK)
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
    for task in background:
        task.cancel()
    return deadline


def _background_tasks(access: Access, load: LoadMeter | None) -> Iterator[Coroutine[Any, Any, None]]:
    """The tasks that run while the door serves."""
    yield access.watch()
    yield look_after_memory(usable_memory())
    if load is not None:
        yield load.run()


def _extensions(settings: Settings) -> tuple[str, ...]:
    off = {"system_shared_memory"} if settings.client_shm_access == "none" else set()
    return tuple(name for name in EXTENSIONS if name not in off)
