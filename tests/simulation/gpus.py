"""Instances on GPUs: the loops that are shipped, on threads of the world, with the driver that tests have. Its streams
have no threads; the main thread runs what they were given, one operation at a time, in the order that the seed says.
"""

from __future__ import annotations

import os
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import inferd._native.cuda.closing
import inferd._native.gpu.instance
from inferd._native.cuda.driver import CudaError
from inferd._native.cuda.region import add_cuda
from inferd._native.memory.shm import SHARED
from inferd.server.engine.instances.gpu import GpuPolicy, Gpus
from tests import gpu_stub
from tests.simulation.wire import Violation
from tests.simulation.world import WorldThread

if TYPE_CHECKING:
    from random import Random

    from inferd._native.memory.shm import Regions
    from tests.simulation.world import World


DEVICES = 2  # models compute on the first
MOST_OPENED = 16  # of the streams that the driver has
EXPORTED = struct.Struct("<IiiiQQ32x")  # a handle of the driver: see gpu_stub/ipc.c; and which one it is
MAGIC = 0x43554442
OUT_OF_MEMORY = 2
OPENING = ("cuDevicePrimaryCtxRetain", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2", "cuStreamCreateWithPriority")


class Graphics:
    """The GPUs of one simulation."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.stub = gpu_stub.load()
        self.stub.set(threads=0, devices=DEVICES, reopens=1)
        self._used = False
        self.opened = 0  # memory of clients
        self._handles = 0
        self.gpus = Gpus(GpuPolicy(library=str(gpu_stub.library())))

        def thread(*, target: Any, name: str, daemon: bool) -> WorldThread:
            return WorldThread(world, target, name)

        inferd._native.gpu.instance.threading = SimpleNamespace(Thread=thread)  # type: ignore[attr-defined]

    def use(self) -> None:
        """There are instances on them."""
        self._used = True
        self._world.use_gpus(self.stub.lib.stub_ready)

    def open(self, regions: Regions, name: str, fd: int, size: int, device: int, *, trusted: bool) -> None:
        """Register memory of a client, which is this file, on a device."""
        self.use()
        handle = self._handle(fd, size, device)
        closers = self.closers()
        add_cuda(regions, SHARED, name, handle, device, size, trusted=trusted)
        self.opened += 1
        self._world.admit(self.closers() - closers)

    def _handle(self, fd: int, size: int, device: int) -> bytes:
        """A new handle of a file that stands for memory of a device."""
        self._handles += 1
        return EXPORTED.pack(MAGIC, os.getpid(), fd, device, size, self._handles)

    def fail_to_open(self, regions: Regions, fd: int, size: int, device: int, random: Random) -> None:
        """The driver refuses one of the calls by which memory of a client is opened.

        Raises:
            Violation: the region is registered nevertheless.
        """
        self.use()
        handle = self._handle(fd, size, device)
        function, closers = random.choice(OPENING), self.closers()
        self.stub.fail(function, OUT_OF_MEMORY)
        try:
            add_cuda(regions, SHARED, "refused", handle, device, size, trusted=True)
        except CudaError as error:
            if function not in str(error):
                raise Violation(f"the driver refuses {function}, and its user hears: {error}") from error
        else:
            raise Violation(f"the driver refuses {function}, and memory is registered")
        self._world.admit(self.closers() - closers)

    @staticmethod
    def closers() -> int:
        """Threads that close what is closed slowly: 1 from when there is something to close."""
        return int(inferd._native.cuda.closing._thread is not None)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Check that nothing was done to devices that may not be done, and that nothing of them is left.

        Raises:
            Violation: something was.
        """
        if not self._used:
            return
        if found := self.stub.leftovers():
            raise Violation(f"the driver: {found}")
        if self.stub.current_context() is not None:
            raise Violation("the context of a device is current on the thread of the event loop")
