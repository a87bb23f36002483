"""What every peer has: a name, a version, start, stop and the measures of its processes."""

from __future__ import annotations

import abc
import contextlib
import os
import time
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from bench.messages import Exchange
from bench.processes import ServerProcess
from inferd_client.driver import Driver, Fixed

# Where downloaded peers are kept, outside the source tree.
CACHE = Path(os.environ.get("INFERD_PEERS") or Path.home() / ".cache" / "inferd-peers")


class AbsentError(Exception):
    """The peer or driver is not on this machine; the text says how to get it."""


class Peer(abc.ABC):
    """One server, running inside a `with` block.

    Args:
        exchange: the request it will be sent, and the answer for those that only echo.
        folder: an empty folder for its files and its log.
    """

    name: ClassVar[str]
    speaks_grpc: ClassVar[bool] = True
    rests: ClassVar[bool] = True  # it takes nothing of the processors while nobody asks it

    def __init__(self, exchange: Exchange, folder: Path) -> None:
        self.exchange = exchange
        self.folder = folder
        self._server: ServerProcess | None = None

    @abc.abstractmethod
    def version(self) -> str:
        """What is measured, with its version."""

    @abc.abstractmethod
    def launch(self) -> ServerProcess:
        """Start it and return when it answers.

        Raises:
            AbsentError: it is not on this machine.
        """

    def probe(self) -> bytes:
        """A request that is answered OK when the server is ready."""
        return self.exchange.request

    def wait_ready(self, server: ServerProcess, seconds: float) -> None:
        """Ask until an answer is OK: some servers listen before they have their model.

        Raises:
            RuntimeError: none is within this time; with the end of the log.
        """
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError), Driver(server.address) as driver:
                if driver.run(Fixed([self.probe()]), requests=1).statuses.get(0):
                    return
            time.sleep(0.2)
        raise RuntimeError(f"{self.name} does not answer:\n{server.log_end()}")

    @property
    def server(self) -> ServerProcess:
        if self._server is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._server

    @property
    def address(self) -> str:
        return self.server.address

    def cpu_seconds(self) -> float:
        return self.server.cpu_seconds()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._server = self.launch()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
