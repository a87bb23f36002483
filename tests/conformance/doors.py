"""The front doors under test, and processes that serve them: over the fake engine, or as the real server.

`python -m tests.conformance.doors DOOR` hosts everything of the conformance suite on one door: the inference service
over the fake engine, health, reflection and the generic servicer. It prints the port when it listens and stops on
SIGTERM. A process of its own, because grpc.aio must be used by one event loop only, and the tests use it as a client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests import forkserver

ROOT = Path(__file__).parents[2]
NAMES = ("native", "grpcio")

_LISTENS = re.compile(r"^port (\d+)$|Started GRPCInferenceService at \S+:(\d+)")


def exists(name: str) -> bool:
    """Whether the door is in the tree."""
    return importlib.util.find_spec(f"inferd.server.front.{name}") is not None


def make(name: str, **arguments):
    """A door that is not started yet."""
    if name == "native":
        from inferd.server.front.native import NativeDoor

        return NativeDoor(**arguments)
    from inferd.server.front.grpcio import GrpcioDoor

    return GrpcioDoor(**arguments)


class Process:
    """A server in a process of its own; everything that it prints is collected in `lines`."""

    def __init__(self, *command: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE", "INFERD_DEBUG_COUNTERS": "1"}
        self.lines: list[str] = []
        self._listening = threading.Event()
        self._written = threading.Condition()
        reading, writing = os.pipe()
        try:
            if forkserver.can_start(command):
                self._process = forkserver.start(command, environment, writing, writing)
            else:
                self._process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.STDOUT
                )
        finally:
            os.close(writing)
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def _read(self, descriptor):
        with open(descriptor, encoding="utf-8") as output:  # noqa: PTH123 - there is no path
            self._note(output)

    def _note(self, output):
        for line in output:
            with self._written:
                self.lines.append(line.rstrip("\n"))
                self._written.notify_all()
            if found := _LISTENS.search(line):
                self.address = f"127.0.0.1:{found[1] or found[2]}"
                self._listening.set()
        self._listening.set()

    def wait_until_it_listens(self) -> str:
        """Wait until the server listens; return its `host:port`."""
        self._listening.wait(120)
        if not hasattr(self, "address"):
            self._process.kill()
            raise RuntimeError("the server does not listen:\n" + "\n".join(self.lines))
        return self.address

    def says(self, text: str, seconds: float = 60, *, count: int = 1) -> str:
        """The first line with this text, when so many have come; the server may take so long."""
        found: list[str] = []

        def has_come() -> bool:
            found[:] = [line for line in self.lines if text in line]
            return len(found) >= count

        with self._written:
            assert self._written.wait_for(has_come, seconds), f"no line with {text!r}:\n" + "\n".join(self.lines)
        return found[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Ask it to stop."""
        self._process.terminate()

    def interrupt(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def interrupt_until_it_ends(self, number: int) -> None:
        """Send it the signal again and again: it takes several within a second for one."""
        for _ in range(600):
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
                return

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Wait for the server's end; return its exit status. If that takes too long, fail with its threads' stacks."""
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self.kill()
            self._reader.join(10)
            raise AssertionError("the server does not end:\n" + "\n".join(self.lines)) from None
        finally:
            self._reader.join(60)


@contextlib.contextmanager
def running(*command: str, ends_with: int = 0):
    """Run a server process; it must end with this status when it is asked to end."""
    process = Process(*command)
    try:
        process.wait_until_it_listens()
        yield process
    finally:
        process.terminate()
        status = process.wait()
    assert status == ends_with, "\n".join(process.lines)
    for line in process.lines:
        if line.startswith("live: "):
            assert not any(json.loads(line.removeprefix("live: ")).values()), f"native objects are left: {line}"


def running_door(name: str, *arguments: str):
    """Run the process of this module: the door `name` over the fake engine."""
    return running(sys.executable, "-m", "tests.conformance.doors", name, *arguments)


def running_server(name: str, repository: Path, *arguments: str, ends_with: int = 0):
    """Run the real server with the door `name`."""
    command = (sys.executable, "-m", "inferd", "serve", "--model-repository", str(repository), "--id", "triton")
    return running(
        *command, "--grpc-port", "0", "--transport", name, "--exit-on-error=false", *arguments, ends_with=ends_with
    )


@contextlib.contextmanager
def connected(process: Process):
    """A tritonclient whose connection is there: calls made before may overtake each other."""
    import tritonclient.grpc as triton  # not for the process of a door

    with triton.InferenceServerClient(process.address) as client:
        assert client.is_server_live()
        yield client


def _arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("door", choices=NAMES)
    parser.add_argument("--max-message-bytes", type=int)
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
    from inferd.server.front import services
    from inferd.server.observe.logs import Logs
    from inferd.server.rpc.metadata import Identity
    from inferd.server.rpc.service import table
    from inferd.server.settings import Settings
    from tests.conformance import generic, interop
    from tests.conformance.fake_engine import FakeEngine

    engine = FakeEngine()
    logs = Logs(Settings(model_repository=(str(ROOT),), log_info=False))
    identity = Identity(version="0.1.0")
    health = services.install(door, table(engine, identity, logs=logs, stream_window=stream_window), engine)
    generic.install(door)
    interop.install(door)
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
