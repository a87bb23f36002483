"""Instances on GPUs: the loops that are shipped, on threads of the world, with the driver that tests have. Its streams
have no threads; the main thread runs what they were given, one operation at a time, in the order that the seed says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import inferd._native.cuda.closing
import inferd._native.gpu.instance
from inferd.server.engine.instances.gpu import GpuPolicy, Gpus
from tests import gpu_stub
from tests.simulation.wire import Violation
from tests.simulation.world import WorldThread

if TYPE_CHECKING:
    from tests.simulation.world import World


class Graphics:
    """The GPUs of one simulation."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.stub = gpu_stub.load()
        self.stub.set(threads=0)
        self._used = False
        self.gpus = Gpus(GpuPolicy(library=str(gpu_stub.library())))

        def thread(*, target: Any, name: str, daemon: bool) -> WorldThread:
            return WorldThread(world, target, name)

        inferd._native.gpu.instance.threading = SimpleNamespace(Thread=thread)  # type: ignore[attr-defined]

    def use(self) -> None:
        """There are instances on them."""
        self._used = True
        self._world.use_gpus(self.stub.lib.stub_ready)

    @staticmethod
    def closers() -> int:
        """Threads that close what is closed slowly: 1 from when there is something to close."""
        return int(inferd._native.cuda.closing._thread is not None)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Check that nothing was done to the device that may not be done.

        Raises:
            Violation: something was.
        """
        if self._used and (found := self.stub.violations()):
            raise Violation(f"the driver: {found}")
