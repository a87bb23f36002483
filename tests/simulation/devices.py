"""Users of a device that no model has: they ask what it is, have streams work, and take memory, in pools or alone.

A model says what that gives. Each call of the driver may fail: the error names it, and nothing is left of what was to
be made. A call leaves the thread the device that it had.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from inferd._native.cuda import driver
from inferd._native.cuda.device import Device, device
from inferd._native.cuda.driver import CudaError, CudaUnavailable
from inferd._native.cuda.memory import DevicePool, PageLocked
from inferd._native.cuda.region import add_cuda
from inferd._native.memory.shm import CUDA, SYSTEM, RegionError, Regions
from tests import gpu_stub
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferd._native.cuda.device import Graph, Stream
    from tests.simulation.simulation import Simulation

SHARE = 0.3  # of simulations that have some
DEEDS = 2  # at a time
GRAIN, SLAB = 256, 1 << 21
MEMORY = 1 << 30  # of a device
LEAST, GREATEST = 0, -5  # priorities of streams
NAMES = {1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 700: "CUDA_ERROR_ILLEGAL_ADDRESS"}
TEXTS = {2: "out of memory", 700: "an illegal memory access was encountered"}
CODES = (1, 2, 700, 12345)  # the driver has no name for the last one
INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE = 1, 2, 101
ENTERING = ("cuCtxGetCurrent", "cuCtxSetCurrent")
SIZE = 4096  # bytes that streams work on
STEPS = 12
HANDLE = 64  # bytes
EXISTS = 6  # a status


class Devices:
    """Those of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._graphics = simulation.graphics
        self._stub = simulation.graphics.stub
        self._ordinal = simulation.graphics.spare
        self._random = Random(f"{simulation.outcome.seed} users of a device")
        self._on = simulation.has("device users", SHARE, when=not simulation.disturbs)
        self._exact = not simulation.preempts  # no other thread runs meanwhile
        self.was_refusing = False  # native memory, when it was asked for last
        self._deeds: tuple[Callable[[], None], ...] = (
            self._look,
            self._make,
            self._work,
            self._work,
            self._pool,
            self._pool,
            self._open,
        )

    def act(self) -> None:
        """What some of them do.

        Raises:
            Violation: something else comes of it.
        """
        if not self._on:
            return
        for _ in range(DEEDS):
            with self._apart():
                self._random.choice(self._deeds)()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """This thread runs what it waits for; afterwards it has no device, as before."""
        closers = self._graphics.closers()
        self._graphics.use()
        self._alive()
        self._stub.run_all(runs=True)
        try:
            yield
        finally:
            self._stub.run_all(runs=False)
            self._simulation.world.admit(self._graphics.closers() - closers)
        self._stub.lib.cuCtxSetCurrent(None)
        self._alive()

    def _alive(self) -> Counter[str]:
        """The number of objects of each sort that the driver has."""
        report = self._stub.report()
        if wrong := [line for line in report if line.startswith("violation")]:
            raise Violation(f"the driver: {wrong}")
        return Counter(report)

    @contextmanager
    def _nothing_left(self) -> Iterator[None]:
        """The driver has the same objects after the block as before."""
        before = self._alive()
        yield
        if (after := self._alive()) != before and self._exact:
            raise Violation(f"of the driver is left: {after - before}; and has gone: {before - after}")

    # -- calls that fail --

    def _stand(self) -> int | None:
        """Have no device, this one, or another one; the context that is current then."""
        self._stub.lib.cuCtxSetCurrent(None)
        if self._random.random() < 0.6:
            device(self._random.choice((0, self._ordinal, self._ordinal))).use()
        return self._stub.current_context()

    def _ask(self, act: Callable[[], Any], expected: Any, named: str, calls: tuple[str, ...]) -> None:
        """Have something done that may fail, and leaves the thread its device.

        Args:
            act: what is done.
            expected: what comes of it; None: anything.
            named: the call that its error names.
            calls: those that it makes, of which one is to fail.
        """
        stood = self._stand()
        with self._nothing_left():
            function = self._random.choice(calls)
            if self._random.random() < 0.5:
                self._fail(function, named, act)
            elif expected is not None and (got := act()) != expected:
                raise Violation(f"{named} says {got}, and not {expected}")
            else:
                act()
        if self._stub.current_context() != stood:
            raise Violation(f"{named} leaves another device current")

    def _fail(self, function: str, named: str, act: Callable[[], Any]) -> None:
        """Have it fail by this call of the driver."""
        code = self._random.choice(CODES)
        self._stub.fail(function, code, here=True)
        try:
            act()
        except CudaError as error:
            said, name = str(error), NAMES.get(code, "unknown error")
            expected = f"{named}: {name} ({code}): {TEXTS.get(code, 'said by the stub driver')}"
            if said != expected or (error.call, error.code, error.name) != (named, code, name):
                raise Violation(f"{function} fails, and its user hears '{said}', not '{expected}'") from None
        else:
            if self._stub.forgive_one(function):
                return  # the call was not needed
            raise Violation(f"{function} fails, and nobody hears of it")

    def _refuse(self, act: Callable[[], Any], kind: type[Exception], text: str) -> None:
        """Have something done that is wrong."""
        try:
            act()
        except kind as error:
            if text not in str(error):
                raise Violation(f"'{text}' was to be said, and not '{error}'") from error
        else:
            raise Violation(f"'{text}' is not said")

    def _refuse_each(self, act: Callable[[], Any]) -> None:
        """Do something in which each take of native memory is refused, one after the other, until none is."""
        world = self._simulation.world
        if self._simulation.is_faulty or not self._exact:
            return
        for take in range(1, 100):
            refused = world.failed_takes
            may_fail = world.may_fail(1)
            world.fail_at(take, 1)
            try:
                act()
            except MemoryError:
                continue
            finally:
                world.fail_at(0, 0)
                world.may_fail(may_fail)
            if world.failed_takes == refused:
                return
        raise Violation("memory is refused a hundred times")

    # -- what a device is --

    def _look(self) -> None:
        number, nodes = self._ordinal, self._graphics.nodes
        gpu = device(number)
        tail = f"{number:02x}"
        pci = f"0000:{number + 1:02x}:00.0"
        near = number % nodes if nodes else _node_of(pci)
        enters = (*ENTERING, "cuMemGetInfo_v2")
        self._ask(lambda: gpu.name, f"stub device {number}", "cuDeviceGetName", ("cuDeviceGetName",))
        uuid = f"GPU-00010203-0405-0607-0809-0a0b0c0d0e{tail}"
        self._ask(lambda: gpu.uuid, uuid, "cuDeviceGetUuid_v2", ("cuDeviceGetUuid_v2",))
        asks = ("cuDeviceGetAttribute",)
        self._ask(lambda: gpu.compute_capability, (9, 0), *asks, asks)
        self._ask(lambda: gpu.pci_bus_id, pci, "cuDeviceGetPCIBusId", ("cuDeviceGetPCIBusId",))
        self._ask(lambda: gpu.total_memory, MEMORY, "cuDeviceTotalMem_v2", ("cuDeviceTotalMem_v2",))
        self._ask(gpu.memory_info, (MEMORY, MEMORY), "cuMemGetInfo_v2", enters)
        priorities = "cuCtxGetStreamPriorityRange"
        self._ask(lambda: gpu.stream_priorities, (LEAST, GREATEST), priorities, (*ENTERING, priorities))
        self._ask(driver.version, (13, 0), "cuDriverGetVersion", ("cuDriverGetVersion",))
        self._ask(driver.device_count, number + 1, "cuDeviceGetCount", ("cuDeviceGetCount",))
        wish = self._random.choice((-1, 0, 1))
        expected = {-1: LEAST, 0: 0, 1: GREATEST}[wish]
        if gpu.priority(wish) != expected or gpu.numa_node != near or gpu.ordinal != number:
            raise Violation(f"{gpu!r} near node {gpu.numa_node}, of priority {gpu.priority(wish)} for {wish}")
        self._stub.fail("cuDeviceGetAttribute", INVALID_VALUE, here=True)
        if gpu.numa_node != _node_of(pci):
            raise Violation(f"{gpu!r} is near node {gpu.numa_node}, where the driver does not say")
        if str(gpu) != f"Device({number})" or device(number) is not gpu:
            raise Violation(f"{gpu} is not {device(number)}")
        if not driver.is_loaded() or driver.library_name() != str(gpu_stub.library()):
            raise Violation(f"the driver is said to be {driver.library_name()}, loaded: {driver.is_loaded()}")
        loaded = f"was loaded from '{gpu_stub.library()}' already, not from '/nowhere'"
        self._refuse(lambda: driver.load("/nowhere"), CudaUnavailable, loaded)
        driver.load(str(gpu_stub.library()))

    def _make(self) -> None:
        """Make things, of which nothing is left."""
        random = self._random
        with self._nothing_left():
            self._refuse(lambda: Device(0), TypeError, "a Device is made by inferd._native.cuda.device.device(ordinal)")
            self._refuse(lambda: device(self._ordinal + 1), CudaError, "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101): ")
            for call in ("cuDeviceGet", "cuDevicePrimaryCtxRetain"):
                self._fail(call, call, lambda: device(self._ordinal))
        gpu = device(self._ordinal)
        priority = random.choice((LEAST, -1, GREATEST))
        there = self._stub.streams(priority)
        streams = "cuStreamCreateWithPriority"
        self._ask(lambda: gpu.stream(priority) and None, None, streams, (*ENTERING, streams))
        self._ask(lambda: gpu.event() and None, None, "cuEventCreate", (*ENTERING, "cuEventCreate"))
        self._ask(lambda: gpu.allocate(8) and None, None, "cuMemAlloc_v2", (*ENTERING, "cuMemAlloc_v2"))
        self._take(gpu)
        made = gpu.stream(priority)
        if (self._exact and self._stub.streams(priority) != there + 1) or made.device is not gpu or not made.handle:
            raise Violation(f"a stream of priority {priority} is not there")
        kind = random.choice((PageLocked, DevicePool))
        retain = "cuDevicePrimaryCtxRetain"
        self._ask(lambda: kind(gpu, SLAB) and None, None, retain, (retain,))
        with self._nothing_left():
            self._refuse_each(lambda: kind(gpu, SLAB) and None)

    def _take(self, gpu: Device) -> None:
        size = self._random.choice((1, 100, SLAB))
        before, _ = gpu.memory_info()
        memory = gpu.allocate(size)
        if gpu.memory_info() != (before - size, MEMORY) or memory.size != size or memory.device is not gpu:
            raise Violation(f"{gpu.memory_info()} are free with {size} bytes more, and {before} were")
        if not memory.pointer:
            raise Violation(f"{size} bytes are at address 0")

    # -- streams --

    def _work(self) -> None:
        gpu = device(self._ordinal)
        gpu.use()
        with self._nothing_left():
            work = Work(gpu, self._stub, self._random)
            try:
                for _ in range(STEPS):
                    work.go_on(self._fail)
                work.end()
            finally:
                work.close()
                del work

    # -- pools --

    def _pool(self) -> None:
        gpu, random = device(self._ordinal), self._random
        kind = random.choice((PageLocked, DevicePool))
        stood = self._stand()
        with self._nothing_left():
            users = PoolUsers(self, kind, gpu)
            for _ in range(STEPS):
                users.act()
            users.end(outlive=False)
            del users
        if random.random() < 0.3:
            PoolUsers(self, kind, gpu).end(outlive=True)
        if self._stub.current_context() != stood:
            raise Violation("a pool leaves another device current")

    # -- regions of clients --

    def _open(self) -> None:
        """Register memory of a client. A thread closes what this opens. At the end the driver may have none open."""
        random, size = self._random, self._random.choice((1, SIZE, SIZE + 1))
        regions = Regions(max_count=2, max_byte_size=2 * SIZE)
        fd = os.memfd_create("memory of a device")
        os.ftruncate(fd, size)
        handle = self._graphics.handle(fd, size, self._ordinal)
        stood = self._stand()

        def add(name: str = "a", handle: bytes = handle, size: int = size, trusted: bool = False) -> None:
            add_cuda(regions, 3, name, handle, self._ordinal, size, trusted=trusted, owner=4)

        wrong = random.choice((HANDLE - 1, HANDLE + 1, 0))
        self._refuse(lambda: add(handle=bytes(wrong)), ValueError, f"expected a handle of {HANDLE} bytes, got {wrong}")
        beyond = random.choice((0, -1, size + 1))
        told = f"expected 1 to {size} bytes, which is the size of the memory, got {beyond}"
        self._refuse(lambda: add(size=beyond), ValueError, told)
        self._refuse(lambda: add(handle=bytes(HANDLE)), CudaError, "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE")
        for function in ("cuDevicePrimaryCtxRetain", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2", *ENTERING):
            if random.random() < 0.5:
                self._fail(function, "cuCtxSetCurrent" if function in ENTERING else function, add)
                if regions.count and not regions.remove(3, CUDA, "a"):
                    raise Violation("a region is not removed")
        self._fail("cuStreamCreateWithPriority", "cuStreamCreateWithPriority", add)
        self._refuse_each(add)
        if regions.count and not regions.remove(3, CUDA, "a"):
            raise Violation("a region is not removed")
        if regions.count or regions.byte_size:
            raise Violation(f"{regions.count} regions of {regions.byte_size} bytes, and all were refused")
        add(size=max(1, size - 1))
        self._refuse(add, RegionError, "shared memory region 'a' already in manager")
        found = [(each.name, each.byte_size, each.device) for each in regions.entries(3, CUDA)]
        if found != [("a", max(1, size - 1), self._ordinal)] or regions.entries(3, SYSTEM):
            raise Violation(f"regions {found} where one was registered")
        if self._stub.current_context() != stood:
            raise Violation("a region leaves another device current")
        if random.random() < 0.5 and not regions.remove(3, CUDA, "a"):
            raise Violation("a region is not removed")
        regions.close()
        os.close(fd)

    # -- for those who take memory --

    @property
    def random(self) -> Random:
        return self._random

    @property
    def stub(self) -> gpu_stub.Stub:
        return self._stub

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """One of the next takes of native memory is refused, unless the simulation refuses some itself."""
        world = self._simulation.world
        self.was_refusing = self._exact and not self._simulation.is_faulty and self._random.random() < 0.3
        if not self.was_refusing:
            yield
            return
        may_fail = world.may_fail(1)
        world.fail_at(self._random.choice((1, 2, 3)), 1)
        try:
            yield
        finally:
            world.fail_at(0, 0)
            world.may_fail(may_fail)


def _node_of(pci: str) -> int:
    """The node of the host that is near to a device at this place, as the system says."""
    try:
        return int(Path(f"/sys/bus/pci/devices/{pci}/numa_node").read_text())
    except (OSError, ValueError):
        return -1


class Work:
    """Two streams that work on the same bytes of a device, one after the other, and the bytes that are expected.

    Args:
        gpu: the device, which is current.
        stub: its driver.
        random: says what they do.
    """

    def __init__(self, gpu: Device, stub: gpu_stub.Stub, random: Random) -> None:
        self._gpu = gpu
        self._stub = stub
        self._random = random
        self.streams = [gpu.stream(), gpu.stream(GREATEST)]
        self._now = self.streams[0]
        self._memory = gpu.allocate(SIZE)
        self._pool = PageLocked(gpu, SLAB)
        self._staging = self._pool.take(SLAB // 2)
        self._staged = 0
        self._bytes = bytearray(SIZE)
        self._graph: Graph | None = None
        self._repeats: list[Callable[[], None]] = []  # what the graph does to the bytes
        self._now.fill(self._memory.pointer, 0, SIZE)

    def close(self) -> None:
        """Give all back when it is done; the graph goes before the memory that it uses."""
        for each in self.streams:
            each.synchronize()
        del each
        del self._graph, self._now, self.streams, self._memory, self._staging, self._pool

    def go_on(self, fail: Callable[[str, str, Callable[[], Any]], None]) -> None:
        """The next step; a call of it may fail first."""
        random = self._random
        deed = random.random()
        if deed < 0.2:
            self._pass_on(fail)
        elif deed < 0.35:
            self._capture(fail)
        elif deed < 0.45 and self._graph is not None:
            graph = self._graph
            if random.random() < 0.3:
                fail("cuGraphLaunch", "cuGraphLaunch", lambda: self._now.launch(graph))
            self._now.launch(graph)
            for repeat in self._repeats:
                repeat()
        elif deed < 0.55:
            self._wait(fail)
        else:
            function, do, model = self._deed()
            if random.random() < 0.2:
                fail(function, function, do)
            do()
            model()

    def _part(self) -> tuple[int, int]:
        at = self._random.randrange(SIZE)
        return at, self._random.randint(1, SIZE - at)

    def _deed(self, *, captured: bool = False) -> tuple[str, Callable[[], None], Callable[[], None]]:
        """A call of the driver, what makes it, and what it does to the bytes."""
        random, here, now = self._random, self._memory.pointer, self._now
        at, size = self._part()
        kind = random.choice(("fill", "in", "in", "on") if captured else ("fill", "in", "pageable", "on", "out"))
        if kind == "fill":
            value = random.randrange(256)
            return "cuMemsetD8Async", lambda: now.fill(here + at, value, size), self._put(at, bytes([value]) * size)
        if kind == "in":
            data = random.randbytes(size)
            place = self._stage(data)
            return "cuMemcpyHtoDAsync_v2", lambda: now.copy_to_device(here + at, place, size), self._put(at, data)
        if kind == "pageable":
            data = random.randbytes(size)
            buffer = (ctypes.c_uint8 * size).from_buffer_copy(data)
            place = ctypes.addressof(buffer)

            def copy(buffer: Any = buffer) -> None:
                now.copy_to_device(here + at, place, size)

            return "cuMemcpyHtoDAsync_v2", copy, self._put(at, data)
        if kind == "on":
            size = min(size, SIZE // 2)
            source = random.randrange(SIZE // 2 - size + 1)
            to = SIZE // 2 + random.randrange(SIZE // 2 - size + 1)
            if random.random() < 0.5:
                source, to = to, source
            return (
                "cuMemcpyDtoDAsync_v2",
                lambda: now.copy_on_device(here + to, here + source, size),
                lambda: self._put(to, bytes(self._bytes[source : source + size]))(),
            )
        buffer = (ctypes.c_uint8 * size)()
        place = ctypes.addressof(buffer)

        def check(buffer: Any = buffer) -> None:
            if bytes(buffer) != self._bytes[at : at + size]:
                raise Violation(f"{size} bytes at {at} of a device are other ones than were written")

        return "cuMemcpyDtoHAsync_v2", lambda: now.copy_to_host(place, here + at, size), check

    def _put(self, at: int, data: bytes) -> Callable[[], None]:
        def put() -> None:
            self._bytes[at : at + len(data)] = data

        return put

    def _stage(self, data: bytes) -> int:
        """Page-locked memory with these bytes, which nobody writes to again."""
        place = self._staging.address + self._staged
        self._staged += len(data)
        ctypes.memmove(place, data, len(data))
        return place

    def _pass_on(self, fail: Callable[[str, str, Callable[[], Any]], None]) -> None:
        """The other stream goes on behind this one."""
        event = self._gpu.event()
        other = self.streams[self._now is self.streams[0]]
        if not event.is_done() or event.device is not self._gpu:
            raise Violation("an event that nobody has recorded is not done")
        if self._random.random() < 0.2:
            fail("cuEventRecord", "cuEventRecord", lambda: self._now.record(event))
            fail("cuStreamWaitEvent", "cuStreamWaitEvent", lambda: other.wait(event))
        value = self._random.randrange(256)
        self._now.fill(self._memory.pointer, value, 1)
        self._bytes[0] = value
        self._now.record(event)
        if event.is_done() or self._now.is_done():
            raise Violation("an event is done before what was recorded")
        other.wait(event)
        self._now = other
        if self._random.random() < 0.3:
            fail("cuEventQuery", "cuEventQuery", event.is_done)
            fail("cuEventSynchronize", "cuEventSynchronize", event.synchronize)
            event.synchronize()
            if not event.is_done():
                raise Violation("an event is not done, and was waited for")

    def _wait(self, fail: Callable[[str, str, Callable[[], Any]], None]) -> None:
        if self._random.random() < 0.3:
            fail("cuStreamQuery", "cuStreamQuery", self._now.is_done)
            fail("cuStreamSynchronize", "cuStreamSynchronize", self._now.synchronize)
            fail("cuCtxGetCurrent", "cuStreamSynchronize", self._now.synchronize)
        self._now.synchronize()
        if not self._now.is_done():
            raise Violation("a stream is not done, and was waited for")
        if self._stub.read(self._memory.pointer, SIZE) != self._bytes:
            raise Violation("a stream is done, and its bytes are other ones")

    def _capture(self, fail: Callable[[str, str, Callable[[], Any]], None]) -> None:
        """Record some work as a graph, in the place of the one before."""
        random, now = self._random, self._now
        if random.random() < 0.3:
            fail("cuStreamBeginCapture_v2", "cuStreamBeginCapture_v2", now.begin_capture)
        now.synchronize()  # nothing is under way that uses the graph
        for each in self.streams:
            each.synchronize()
        self._graph = None
        now.begin_capture()
        if random.random() < 0.1:
            _end_in_vain(now)
            return
        deeds = [self._deed(captured=True) for _ in range(random.randint(1, 3))]
        for _, do, _ in deeds:
            do()
        if random.random() < 0.2:
            fail("cuStreamEndCapture", "cuStreamEndCapture", now.end_capture)
        if random.random() < 0.2:
            fail("cuGraphInstantiateWithFlags", "cuGraphInstantiateWithFlags", now.end_capture)
            return
        self._graph = now.end_capture()
        if self._graph.device is not self._gpu:
            raise Violation("a graph is another device's")
        self._repeats = [model for _, _, model in deeds]

    def end(self) -> None:
        """All is done, and the bytes are as they have to be."""
        for each in self.streams:
            each.synchronize()
        if self._stub.read(self._memory.pointer, SIZE) != self._bytes:
            raise Violation("streams are done, and their bytes are other ones")


def _end_in_vain(stream: Stream) -> None:
    """A stream that records cannot be waited for. Afterwards it works as before."""
    for act, text in ((stream.synchronize, "CAPTURE_UNSUPPORTED"), (stream.end_capture, "CAPTURE_INVALIDATED")):
        try:
            act()
        except CudaError as error:
            if text not in str(error):
                raise Violation(f"recording is refused by '{error}', not by {text}") from None
        else:
            raise Violation(f"{text} is not said")


class PoolUsers:
    """Those of one pool, of which all is known.

    Args:
        devices: whose they are.
        kind: of the pool.
        gpu: its device.
    """

    def __init__(self, devices: Devices, kind: type[PageLocked | DevicePool], gpu: Device) -> None:
        self._devices, self._random = devices, devices.random
        self._limit = self._random.choice((0, 1 << 16, SLAB, SLAB + 5, 3 * SLAB, 40 * SLAB))
        self._name, self._call = (
            ("page-locked", "cuMemHostAlloc") if kind is PageLocked else ("device", "cuMemAlloc_v2")
        )
        self._pool = kind(gpu, self._limit)
        self._blocks: list[tuple[Any, int]] = []  # with a mark that its ends have
        self._peak = self._refused = self._marks = 0
        if self._pool.name != self._name or self._pool.usage()["limit"] != self._limit:
            raise Violation(f"a pool is '{self._pool.name}', of {self._pool.usage()}")
        if isinstance(self._pool, PageLocked) and self._pool.numa_node != gpu.numa_node:
            raise Violation(f"page-locked memory of node {self._pool.numa_node} for one near {gpu.numa_node}")

    def act(self) -> None:
        """Take a block, give one back, or have the pool look after its memory."""
        random, deed = self._random, self._random.random()
        if deed < 0.55:
            self._take()
        elif deed < 0.8 and self._blocks:
            self._give(random.randrange(len(self._blocks)))
        elif deed < 0.9:
            self._reserve()
        else:
            held = self._usage()["held"]
            freed = self._pool.trim()
            left = held - self._usage()["held"]
            if freed != left or (not self._blocks and self._usage()["held"]):
                raise Violation(f"pool '{self._name}' gives {freed} bytes back, of {held} held")

    def end(self, *, outlive: bool) -> None:
        """All leave; with `outlive` the owner of the pool goes before."""
        if outlive:
            self._take()
            self._take()
            del self._pool
        while self._blocks:
            self._give(0)

    def _usage(self) -> dict[str, int]:
        """What the pool says, which has to be so."""
        usage = self._pool.usage()
        used = sum(block.size for block, _ in self._blocks)
        self._peak = max(self._peak, used)
        expected = {"used": used, "peak": self._peak, "limit": self._limit, "refused": self._refused}
        if {key: usage[key] for key in expected} != expected or not used <= usage["held"] <= self._limit:
            raise Violation(f"pool '{self._name}': {usage}, where {expected} is so")
        if usage["held"] % SLAB:
            raise Violation(f"pool '{self._name}' has {usage['held']} bytes")
        return usage

    def _take(self) -> None:
        random = self._random
        some = random.randrange(1 << random.randint(0, 21))
        size = random.choice((0, 1, GRAIN, GRAIN + 1, some, some, SLAB, 5 * SLAB))
        if random.random() < 0.05:
            size = random.choice((1 << 47, (1 << 47) + 1, (1 << 64) - 1, self._limit, self._limit + 1))
        before = self._usage()
        fails = random.random() < 0.2
        for _ in range(2 if fails else 0):
            self._devices.stub.fail(self._call, random.choice((INVALID_VALUE, OUT_OF_MEMORY)), here=True)
        wanted = -(-max(size, 1) // GRAIN) * GRAIN
        try:
            with self._devices.refusing():
                block = self._pool.take(size)
        except MemoryError as error:
            self._refused += 1
            self._check_refusal(size, before, str(error), fails)
            return
        finally:
            self._devices.stub.forgive()
        exact = wanted if wanted < GRAIN * 8 else 0  # small ones are cut to size
        if block.address % GRAIN or block.size < wanted or (exact and block.size != exact) or block.size > wanted + 256:
            raise Violation(f"pool '{self._name}': {size} bytes asked for, {block.size} at {block.address:#x}")
        self._marks = self._marks % 251 + 1
        self._write(block, self._marks)
        self._blocks.append((block, self._marks))
        self._usage()

    def _check_refusal(self, size: int, before: dict[str, int], text: str, fails: bool) -> None:
        usage = self._usage()
        told = (
            f"no {self._name} memory: asked for {size} bytes; {usage['used']} are in use, {usage['held']} held of at "
            f"most {self._limit}"
        )
        if text not in (told, "out of memory") or usage["used"] != before["used"]:
            raise Violation(f"pool '{self._name}' refuses {size} bytes with '{text}', not '{told}'")
        fits = -(-max(size, 1) // SLAB) * SLAB <= self._limit and not self._blocks
        if fits and not fails and not self._devices.was_refusing:
            raise Violation(f"pool '{self._name}' refuses {size} bytes with {usage}")

    def _reserve(self) -> None:
        size = self._random.choice((0, 1, SLAB, SLAB + 1, self._limit, self._limit + 1))
        held = self._usage()["held"]
        with self._devices.refusing():
            good = self._pool.reserve(size)
        now = self._usage()["held"]
        fits = size <= self._limit // SLAB * SLAB
        if now < held or (good and now < size) or good > fits or (fits and not good and not self._devices.was_refusing):
            raise Violation(f"pool '{self._name}' of {self._limit} has {held}, and {now} with {size} reserved: {good}")

    def _give(self, index: int) -> None:
        block, mark = self._blocks.pop(index)
        for at in (0, block.size - 1):
            if self._read(block.address + at) != mark:
                raise Violation(f"a block of {block.size} bytes of pool '{self._name}' has changed at {at}")
        del block

    def _write(self, block: Any, mark: int) -> None:
        for at in (0, block.size - 1):
            if self._name == "device":
                self._devices.stub.write(block.address + at, bytes([mark]))
            else:
                ctypes.memset(block.address + at, mark, 1)

    def _read(self, address: int) -> int:
        return (self._devices.stub.read(address, 1) if self._name == "device" else ctypes.string_at(address, 1))[0]
