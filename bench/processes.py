"""Server processes: starting, waiting for their port, counting their CPU time and memory, stopping."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

HOST = "127.0.0.1"


def free_port() -> int:
    """A free TCP port below the kernel's ephemeral range.

    The kernel could give an ephemeral port to another connection before the server binds it.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind((HOST, port))
            return port


class ServerProcess:
    """A server and its children, measured together.

    Args:
        command: the command line; its output goes to `log`.
        port: where it will listen.

    Raises:
        RuntimeError: it ends, or does not listen within `patience` seconds; with the end of its log.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        port: int,
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        patience: float = 60.0,
    ) -> None:
        self.port = port
        self.address = f"{HOST}:{port}"
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={"INFERD_METRICS_PORT": "0", **os.environ, **(env or {})},  # several may run beside each other
            )
        try:
            self._wait_listening(patience)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_listening(self, patience: float) -> None:
        give_up = time.monotonic() + patience
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}:\n{self.log_end()}")
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server does not listen on {self.address}:\n{self.log_end()}")

    def log_end(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """The server and all its descendants that live."""
        try:
            server = psutil.Process(self._process.pid)
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> float:
        """User and system time of the processes that live now; its resolution is the kernel's tick (10 ms)."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def rss(self) -> int:
        """Resident bytes, summed."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def workers_memory(self) -> list[int]:
        """Each child's private bytes."""
        return [process.memory_full_info().uss for process in self.processes()[1:]]

    def stop(self, patience: float = 20.0) -> int:
        """Send SIGTERM, then SIGKILL to the processes that remain; return the server's exit status."""
        children = self.processes()[1:]
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return status
