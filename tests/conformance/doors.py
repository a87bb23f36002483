"""The front doors under test, and a process that serves one of them.

`python -m tests.conformance.doors DOOR` hosts everything of the conformance suite on one door: the inference service
over the fake engine, health, reflection and the generic servicer. It prints the port when it listens and stops on
SIGTERM. A process of its own, because grpc.aio must be used by one event loop only, and the tests use it as a client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("native", "grpcio")


def exists(name: str) -> bool:
    """Whether the door is in the tree."""
    return importlib.util.find_spec(f"server.front.{name}") is not None


def make(name: str, **arguments):
    """A door that is not started yet."""
    if name == "native":
        from server.front.native import NativeDoor

        return NativeDoor(**arguments)
    from server.front.grpcio import GrpcioDoor

    return GrpcioDoor(**arguments)


@contextlib.contextmanager
def serving(*command: str, prefix: str = "port "):
    """Run a server process; yields its `host:port` once it has printed `prefix` and the port."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"127.0.0.1:{_port(process, prefix)}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert process.returncode == 0, f"the server ended with {process.returncode}"


def _port(process, prefix):
    for line in process.stdout:
        if line.startswith(prefix):
            return int(line.removeprefix(prefix))
    raise RuntimeError(f"{process.args} ended with {process.wait()} before it listened")


def serving_door(name: str, *arguments: str):
    """Run the process of this module for the door `name`."""
    return serving(sys.executable, "-m", "tests.conformance.doors", name, *arguments)


def _arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("door", choices=NAMES)
    parser.add_argument("--max-message-bytes", type=int, default=-1)
    parser.add_argument("--stream-window", type=int, default=128)
    parser.add_argument("--library-health", action="store_true", help="only the library's health servicer")
    return parser.parse_args()


async def _serve(arguments):
    door = make(arguments.door, max_message_bytes=arguments.max_message_bytes)
    if arguments.library_health:
        await _install_library_health(door)
    else:
        _install_all(door, arguments.stream_window)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print(f"port {await door.start('127.0.0.1:0')}", flush=True)
    await stopping.wait()
    await door.stop(grace=1.0)


def _install_all(door, stream_window):
    from server.front import services
    from server.rpc.metadata import Identity
    from server.rpc.service import table
    from tests.conformance import generic
    from tests.conformance.fake_engine import FakeEngine

    engine = FakeEngine()
    health = services.install(door, table(engine, Identity(version="0.1.0"), stream_window=stream_window), engine)
    generic.install(door)
    door.add_generic_rpc_handlers((engine.control_handler(health),))


async def _install_library_health(door):
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    servicer = health.aio.HealthServicer()
    await servicer.set("on", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, door)


def main():
    import uvloop

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    uvloop.run(_serve(_arguments()))


if __name__ == "__main__":
    main()
