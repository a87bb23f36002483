"""Instances on GPUs: the loops that are shipped, on threads of the world, with the driver that tests have. Its streams
have no threads; the main thread runs what they were given, one operation at a time, in the order that the seed says.
"""

from __future__ import annotations

import gc
import os
import re
import struct
from random import Random
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
from tests.simulation.world import NEVER, WorldThread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferd._native.memory.shm import Regions
    from tests.simulation.world import World


DEVICES = 2  # of models
LOST = (214, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721)  # errors after which a device has to go
LOST_TEXT = re.compile(r"CUDA device (\d+) is lost and the server has to be restarted: ")
MOST_OPENED = 16  # of the streams that the driver has
EXPORTED = struct.Struct("<IiiiQQ32x")  # a handle of the driver: see gpu_stub/ipc.c; and which one it is
MAGIC = 0x43554442
OUT_OF_MEMORY = 2
INVALID_VALUE = 1
NAMES = {INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY"}
PINNED = (0, 1 << 16, 1 << 21, 1 << 22, 256 << 20)  # bytes of pools, at most; they grow by 2 MiB
POOLS = (0, 1 << 14, 1 << 21, 1 << 22, 64 << 20)
SERVING = (  # calls that may fail while models serve and are loaded
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventSynchronize",
    "cuGraphLaunch",
    "cuMemAlloc_v2",
    "cuMemHostAlloc",
    "cuEventQuery",
    "cuStreamCreateWithPriority",
    "cuEventCreate",
    "cuStreamBeginCapture_v2",
    "cuGraphInstantiateWithFlags",
)
CALL_FAILED = re.compile(r"(cu\w+): ([\w ]+) \((\d+)\): ")
NO_MEMORY = re.compile(
    r"no device memory: asked for |no memory on device \d+ for the \d+ bytes of output|memory limit set for GPU"
)
NOT_COPIED = re.compile(r"CUDA shared memory region '.*': device \d+ does not copy it")
COPYING = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2")
MARK = re.compile(r"a batch of \d+ requests failed; the server's log says why, as error ([0-9a-f]{8})$")
BROKEN_KERNEL = re.compile(r"kernel \d+ is broken")
OPENING = ("cuDevicePrimaryCtxRetain", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2", "cuStreamCreateWithPriority")


class Graphics:
    """The GPUs of one simulation.

    Args:
        world: of their threads.
        random: says what they are like, and what fails.
        losing: says when they fail for good; None: never.
        told: see `Unforeseen`.
    """

    def __init__(self, world: World, random: Random, losing: Random | None, told: Mapping[str, str]) -> None:
        self._world = world
        self._losing = losing
        self._told = told  # what the server's log says, by the marks that clients hear
        self._random = random
        self.stub = gpu_stub.load()
        self.stub.forgive()
        self.nodes = random.choice((0, 1, 2))
        self.spare = DEVICES  # the number of one more device
        self.stub.set(threads=0, devices=DEVICES + 1, nodes=self.nodes, full=0, reopens=1)
        self._used = False
        self.opened = 0  # memory of clients
        self._handles = 0
        self._planted: set[tuple[str, str, str]] = set()  # calls that were to fail, with their errors
        self._broken: set[str] = set()  # kernels
        self._expected: set[str] = set()  # texts of errors that models make
        self._lost: dict[int, int] = {}  # devices that have failed for good, and their errors
        self._full_ns = -1  # when the devices had no memory left last
        sizes = {number: random.choice(POOLS) for number in range(DEVICES)}
        limits = random.choice(({}, {0: 1.0}, {0: 0.99, 1: 0.99}))
        self.gpus = Gpus(GpuPolicy(str(gpu_stub.library()), random.choice(PINNED), sizes, limits))

        def thread(*, target: Any, name: str, daemon: bool) -> WorldThread:
            self.stub.run_all(runs=False)  # the instance serves
            return WorldThread(world, target, name)

        inferd._native.gpu.instance.threading = SimpleNamespace(Thread=thread)  # type: ignore[attr-defined]

    def use(self) -> None:
        """There are instances on them."""
        self._used = True
        self._world.use_gpus(self.stub.lib.stub_ready)

    def complain(self, text: str) -> None:
        """A rule is broken."""
        self._world.complain(text)

    # -- what fails --

    def fail_batch(self, kind: type[Exception]) -> None:
        """Have the batch fail that an instance submits.

        Raises:
            Exception: always.
        """
        text = f"kernel {len(self._broken)} is broken"
        self._broken.add(text)
        raise kind(text)

    def expect(self, text: str) -> None:
        """A model errs, so that requests fail with this text."""
        self._expected.add(text)

    def has_lost(self, ordinal: int) -> bool:
        """Whether this device has failed for good."""
        return ordinal in self._lost

    @property
    def lost(self) -> bool:
        """Whether any device has."""
        return bool(self._lost)

    def _lose(self, ordinal: int, code: int) -> str:
        """A device fails for good."""
        self._lost[ordinal] = code
        self.stub.lib.stub_break(ordinal, code)
        return f"device {ordinal} fails for good, with error {code}"

    def disturb(self) -> str:
        """Have a call of the driver fail, one of the next, or devices have no memory for a while; in words."""
        self.note_memory()
        if self._losing is not None and self._losing.random() < 0.2:
            ordinal = self._losing.randrange(DEVICES)
            if ordinal not in self._lost:
                return self._lose(ordinal, self._losing.choice(LOST))
        deed = self._random.random()
        if deed < 0.2:
            is_full = self._full_ns < NEVER
            self._full_ns = NEVER if is_full else self._world.now()
            self.stub.set(full=int(is_full))
            return f"devices have {'no' if is_full else ''} memory"
        if deed < 0.4:
            return f"{self.gpus.trim()} bytes are given back to the driver"
        function, code = self._random.choice(SERVING), self._random.choice(tuple(NAMES))
        self._planted.add((function, NAMES[code], str(code)))
        self.stub.fail(function, code, after=self._random.choice((0, 1, 5, 20)))
        return f"{function} is to fail with {NAMES[code]}"

    def explains(self, text: str, since_ns: int) -> bool:
        """Whether what fails on a device explains this error of something that began then."""
        if found := MARK.search(text):
            text = self._told.get(found[1], "")
        if self._is_of_lost(text) or text in self._expected:
            return True
        if found := CALL_FAILED.search(text):
            no_memory = found[1] == "cuMemAlloc_v2" and found[2] == NAMES[OUT_OF_MEMORY]
            return found.groups() in self._planted or (no_memory and self._full_ns >= since_ns)
        if NOT_COPIED.search(text):
            return any(function in COPYING for function, *_ in self._planted)
        if NO_MEMORY.search(text):
            return self._full_ns >= since_ns or any(function == "cuMemAlloc_v2" for function, *_ in self._planted)
        if found := BROKEN_KERNEL.search(text):
            return found[0] in self._broken
        return False

    def _is_of_lost(self, text: str) -> bool:
        """Whether it is an error of a device that has failed for good."""
        if found := LOST_TEXT.search(text):
            return f" ({self._lost.get(int(found[1]))}): " in text
        found = CALL_FAILED.search(text)
        if found is not None and int(found[3]) in self._lost.values():
            return True
        return self.lost and bool(NOT_COPIED.search(text) or NO_MEMORY.search(text))

    @property
    def is_moody(self) -> bool:
        """Whether anything has been made to fail."""
        return bool(self._planted) or self._full_ns >= 0 or self.lost

    def note_memory(self) -> None:
        """Check the figures of the pools.

        Raises:
            Violation: they do not agree.
        """
        for name, usage in self.gpus.usage().items():
            used, held, limit, peak = (usage[key] for key in ("used", "held", "limit", "peak"))
            if not (0 <= used <= held <= limit and used <= peak <= limit):
                raise Violation(f"memory '{name}': {usage}")

    def open(self, regions: Regions, name: str, fd: int, size: int, device: int, *, trusted: bool) -> bool:
        """Register memory of a client, which is this file, on a device; false: a call of the driver was to fail."""
        self.use()
        handle = self.handle(fd, size, device)
        closers = self.closers()
        try:
            add_cuda(regions, SHARED, name, handle, device, size, trusted=trusted)
            self.opened += 1
        except CudaError as error:
            if not self.explains(str(error), self._world.now()):
                raise Violation(f"{error}; the driver: {self.stub.violations()}") from error
            return False
        finally:
            self._world.admit(self.closers() - closers)
        return True

    def handle(self, fd: int, size: int, device: int) -> bytes:
        """A new handle of a file that stands for memory of a device."""
        self._handles += 1
        return EXPORTED.pack(MAGIC, os.getpid(), fd, device, size, self._handles)

    def fail_to_open(self, regions: Regions, fd: int, size: int, device: int, random: Random) -> None:
        """The driver refuses one of the calls by which memory of a client is opened.

        Raises:
            Violation: the region is registered nevertheless.
        """
        self.use()
        handle = self.handle(fd, size, device)
        function, closers = random.choice(OPENING), self.closers()
        self.stub.fail(function, OUT_OF_MEMORY)
        try:
            add_cuda(regions, SHARED, "refused", handle, device, size, trusted=True)
        except CudaError as error:
            if function not in str(error) and not self._is_of_lost(str(error)):
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
        self.stub.forgive()
        self.stub.set(full=0)
        if not self._used:
            return
        self.stub.forget_kernels()
        gc.collect()  # the error of a load that has failed keeps what was made, in a cycle
        self.gpus.trim()
        if kept := {name: usage for name, usage in self.gpus.usage().items() if usage["used"] or usage["held"]}:
            raise Violation(f"memory is left in use: {kept}")
        found = self.stub.violations() if self.lost else self.stub.leftovers()
        if found:
            raise Violation(f"the driver: {found}")
        if self.stub.current_context() is not None:
            raise Violation("the context of a device is current on the thread of the event loop")
