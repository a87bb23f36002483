"""The proxies, with the configurations of deploy/ on ports of the test, and the two servers behind them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.processes import free_port
from tests.clients.toolchains import Missing, envoy, run
from tests.conformance import doors

DEPLOY = doors.ROOT / "deploy"

_DRAIN_SECONDS = 2  # two intervals of the health checks


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy program and its configuration in deploy/."""

    name: str
    configuration: Path
    program: Callable[[], Path]
    check: Sequence[str]  # arguments before the path of a configuration: is it valid?
    serve: Sequence[str]  # the same: run in the foreground
    asks_health: bool  # whether it leaves a server alone that says NOT_SERVING


def _installed(name: str) -> Path:
    # Debian keeps both in sbin, which is not on everybody's path
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
    if found := shutil.which(name, path=path):
        return Path(found)
    raise Missing(f"not installed: {name}")


PROXIES = {
    proxy.name: proxy
    for proxy in (
        Proxy(
            "envoy",
            DEPLOY / "envoy" / "envoy.yaml",
            envoy,
            ("--mode", "validate", "-l", "error", "-c"),
            ("--use-dynamic-base-id", "--concurrency", "1", "-l", "error", "-c"),
            asks_health=True,
        ),
        Proxy(
            "nginx",
            DEPLOY / "nginx" / "nginx.conf",
            functools.partial(_installed, "nginx"),
            ("-q", "-t", "-c"),
            ("-g", "daemon off;", "-c"),
            asks_health=False,
        ),
        Proxy(
            "haproxy",
            DEPLOY / "haproxy" / "haproxy.cfg",
            functools.partial(_installed, "haproxy"),
            ("-q", "-c", "-f"),
            ("-q", "-db", "-f"),
            asks_health=True,
        ),
    )
}


@contextlib.contextmanager
def running(proxy: Proxy, program: Path, folder: Path, servers: Sequence[int]) -> Iterator[str]:
    """Run `proxy` before the servers at the ports `servers`; its `host:port`."""
    port = free_port()
    configuration = folder / proxy.configuration.name
    configuration.write_text(_on_ports(proxy, folder, (port, *servers)))
    process = subprocess.Popen(
        [program, *proxy.serve, configuration], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        _wait_until_open(port, process)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _on_ports(proxy: Proxy, folder: Path, ports: Sequence[int]) -> str:
    text = proxy.configuration.read_text()
    for shipped, port in zip((8000, 8001, 8002), ports, strict=True):
        known = f"port_value: {shipped} " if proxy.name == "envoy" else f"127.0.0.1:{shipped}"
        assert text.count(known) == 1, f"{proxy.configuration}: {known} is not there once"
        text = text.replace(known, known.replace(str(shipped), str(port)))
    return text.replace("/run/nginx.pid", str(folder / "nginx.pid"))


def _wait_until_open(port: int, process: subprocess.Popen) -> None:
    for _ in range(100):
        assert process.poll() is None, process.stdout.read()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on {port}")


class Server:
    """An inferd process on a port of its own that can be restarted."""

    def __init__(self, repository: Path, *arguments: str, drain: bool = True) -> None:
        self.port = free_port()
        self._command = (
            sys.executable, "-m", "inferd", "serve", "--model-repository", str(repository),
            "--grpc-port", str(self.port), "--exit-on-error=false", *(_drain_delay() if drain else ()), *arguments,
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        self._process = doors.Process(*self._command)
        self._process.wait_until_it_listens()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        """Until it has ended, which must be without complaint."""
        status = self._process.wait()
        assert status == 0, "\n".join(self._process.lines)

    def stop(self) -> None:
        self.terminate()
        self.wait()


@functools.cache
def _drain_delay() -> tuple[str, ...]:
    """The option that keeps a stopping server in service until proxies have noticed, where the server has it."""
    text = run(sys.executable, "-m", "inferd", "serve", "--help", cwd=doors.ROOT)
    return ("--drain-delay", str(_DRAIN_SECONDS)) if "--drain-delay" in text else ()
