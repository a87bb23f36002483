"""Instances on GPUs: the loops that are shipped, on threads of the world, with the driver that tests have. Its streams
have no threads; the main thread runs what they were given, one operation at a time, in the order that the seed says.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import _native.cuda.closing
import _native.gpu.instance
from server.engine.instances.gpu import GpuPolicy, Gpus
from tests import gpu_stub
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import World

MS = 1_000_000


class WorldThread:
    """A thread of the world, which another one waits for within it.

    Args:
        world: where.
        target, name: as for `threading.Thread`.
    """

    def __init__(self, world: World, target: Callable[[], None], name: str) -> None:
        self._world = world
        self._target: Callable[[], None] | None = target
        self._name = name
        self._gone = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self._world.join(self._name)
        try:
            assert self._target is not None
            self._target()
        finally:
            self._target = None  # what goes with it goes within the world
            self._gone = True
            self._world.leave()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        while not self._gone:
            self._world.sleep(MS)


class Graphics:
    """The GPUs of one simulation."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.stub = gpu_stub.load()
        self.stub.set(threads=0)
        self.used = False
        self.gpus = Gpus(GpuPolicy(library=str(gpu_stub.library())))

        def thread(*, target: Any, name: str, daemon: bool) -> WorldThread:
            return WorldThread(world, target, name)

        _native.gpu.instance.threading = SimpleNamespace(Thread=thread)  # type: ignore[attr-defined]

    @staticmethod
    def closers() -> int:
        """Threads that close what is closed slowly: 1 from when there is something to close."""
        return int(_native.cuda.closing._thread is not None)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Nothing was done to the device that may not be done.

        Raises:
            Violation: something was.
        """
        if self.used and (found := self.stub.violations()):
            raise Violation(f"the driver: {found}")
