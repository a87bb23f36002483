"""What models on GPUs do there, each version in a way of its own: how outputs are made, graphs, warm-up, devices.

All answer what they are asked. A kernel runs when the world comes to it, and looks at what it reads.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inferd._native.cuda.device import device
from inferd.backends.api import (
    GpuInstance,
    GpuSpec,
    GraphSpec,
    InstanceSpec,
    ModelSpec,
    RequestError,
    WarmupInput,
    WarmupSpec,
)
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from random import Random

    from inferd._native.gpu.batch import GpuBatch
    from tests.simulation.gpus import Graphics
    from tests.simulation.kind import Kind

CUDA_DEVICE = 2  # of DLPack
INTEGER = 0  # of its types
IN_FRONT = 256  # bytes of a tensor's memory that are not the tensor's
LATER = 7  # numbers of a tensor are other ones by this factor until the second kernel has run
GRAPHS = ((2, 1, 4), (4, 3, 4), (8, 3, 4), (8, 8, 4), (1, 1, 3), (5, 2, 3))  # rows, those of the smallest batch, width
WAYS = ("copy", "kernel", "shaped later", "own memory", "own input", "in place", "two streams")
UNCAPTURED = ("shaped later",)
FAILS = 0.1  # of batches, of a version whose batches fail


@dataclass(frozen=True)
class Make:
    """How a version works on GPUs.

    Attributes:
        way: how its outputs are made.
        gpu: as the configuration says.
        warmup: the same.
        devices: on which its instances are, in turn.
        fails: how often a batch fails.
    """

    way: str
    gpu: GpuSpec
    warmup: tuple[WarmupSpec, ...]
    devices: tuple[int, ...]
    fails: float

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """A configuration with what it says."""
        devices = itertools.cycle(self.devices)
        instances = tuple(replace(each, device=next(devices)) for each in spec.instances)
        return replace(spec, gpu=self.gpu, warmup=self.warmup, instances=instances)


def draw_make(random: Random, kind: Kind) -> Make:
    """Draw what a version on GPUs is like."""
    way = random.choice(WAYS)
    graphs: tuple[GraphSpec, ...] = ()
    if way not in UNCAPTURED and random.random() < 0.6:
        chosen = random.sample(GRAPHS, random.randint(1, 3))
        graphs = tuple(GraphSpec(rows, least, {"x": (width,)}) for rows, least, width in chosen if rows <= kind.rows)
    warmup = tuple(
        WarmupSpec(
            f"sample {number}",
            random.randint(1, kind.rows),
            {"x": WarmupInput("INT64", (random.choice((3, 4, 5)),), random.choice(("zero", "random")))},
            random.randint(1, 2),
        )
        for number in range(random.choice((0, 0, 1, 2)))
    )
    gpu = GpuSpec(
        graphs,
        busy_wait=random.random() < 0.3,
        priority=random.choice((0, 0, 1, -1)),
        pinned_inputs=random.random() < 0.7,
        pinned_outputs=random.random() < 0.7,
    )
    return Make(way, gpu, warmup, random.choice(((0,), (0,), (0, 1), (1, 0), (1,))), random.choice((0, 0, 0, FAILS)))


class _Layout(ctypes.Structure):
    """A DLTensor, behind which a DLManagedTensor has two more words."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("more", ctypes.c_void_p * 2),
    )


class ForeignTensor:
    """A tensor of a framework, in memory that goes with it.

    Args:
        owner: of the memory.
        address: where the tensor is.
        ordinal: of its device.
        shape: of INT64.
    """

    def __init__(self, owner: object, address: int, ordinal: int, shape: tuple[int, ...]) -> None:
        self._owner = owner
        self._dims = (ctypes.c_int64 * len(shape))(*shape)
        self._layout = _Layout(
            address - IN_FRONT, CUDA_DEVICE, ordinal, len(shape), INTEGER, 64, 1, ctypes.addressof(self._dims), None
        )
        self._layout.offset = IN_FRONT

    def __dlpack__(self, *, stream: int) -> Any:
        if stream != -1:
            raise Violation(f"a tensor is asked to wait for stream {stream}")
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self._layout), b"dltensor", None)


class KernelInstance(GpuInstance):
    """Answers with what it is asked, in the way of its version."""

    def __init__(self, graphics: Graphics, make: Make, spec: InstanceSpec, random: Random) -> None:
        self._graphics = graphics
        self._make = make
        self._name = spec.name
        self._random = random
        self._serves = False
        self._gpu = gpu = device(spec.device)
        self.stream = gpu.stream(gpu.priority(make.gpu.priority))
        self._side = gpu.stream() if make.way == "two streams" else None
        self._events = (gpu.event(), gpu.event())
        self._weights = gpu.allocate(8)
        try:
            self._load()
        finally:
            self.stream.synchronize()  # what was submitted uses the weights

    @property
    def writes_inputs(self) -> bool:  # type: ignore[override]
        return self._make.way == "in place"

    def _load(self) -> None:
        """Have the one weight on the device, and look whether it is there."""
        weight, back = (ctypes.c_int64 * 1)(1), (ctypes.c_int64 * 1)()
        reached = self._events[0]
        self.stream.fill(self._weights.pointer, 0, 8)
        self.stream.copy_to_device(self._weights.pointer, ctypes.addressof(weight), 8)
        self.stream.record(reached)
        reached.synchronize()
        self.stream.copy_to_host(ctypes.addressof(back), self._weights.pointer, 8)
        self.stream.synchronize()
        if back[0] != 1 or not (self.stream.is_done() and reached.is_done()) or self._weights.size != 8:
            self._complain(f"weights of {self._weights.size} bytes are {back[0]} when all is done")

    def serves(self) -> None:
        """From now on it may fail."""
        self._serves = True

    def close(self) -> None:
        del self._graphics, self._weights

    def _complain(self, text: str) -> None:
        self._graphics.complain(f"instance {self._name}: {text}")

    def submit(self, batch: GpuBatch) -> None:
        """Submit the work of the way that its version has."""
        if self._serves and not batch.capturing and self._random.random() < self._make.fails:
            self._graphics.fail_batch(self._random.choice((ValueError, RequestError)))
        x = batch.input("x")
        if x.__dlpack_device__() != (CUDA_DEVICE, self._gpu.ordinal) or x.datatype != "INT64":
            self._complain(f"its input is {x.datatype} on {x.__dlpack_device__()}")
        rows, size = x.shape[0], 8 * int(np.prod(x.shape))
        if (rows, x.size) != (batch.rows, size) or x.pointer % 256:
            self._complain(f"an input of shape {x.shape} has {x.size} bytes at {x.pointer:#x} in {batch.rows} rows")
        batch.hold(self._weights)
        if batch.wants("y"):
            self._answer(batch, x)

    def _answer(self, batch: GpuBatch, x: Any) -> None:
        way, stream = self._make.way, batch.stream
        if way == "own input":
            batch.set_output("y", x)
        elif way == "own memory":
            owner, address = self._take(IN_FRONT + x.size)
            y = ForeignTensor(owner, address + IN_FRONT, self._gpu.ordinal, x.shape)
            self._run(stream, x, address + IN_FRONT)
            batch.set_output("y", y)
        elif way == "shaped later":
            first = batch.output_memory("y", x.size // 2)
            place = batch.output_memory("y", x.size + self._random.randrange(300)) if x.size else first
            self._run(stream, x, place)
            batch.set_output_shape("y", x.shape)
        elif way == "in place":
            self._run(stream, x, x.pointer, by=LATER)
            self._run(stream, x, batch.output("y", x.shape).pointer, of=LATER)
        elif way == "two streams":
            y = batch.output("y", x.shape)
            assert self._side is not None
            begun, done = self._events
            stream.record(begun)
            self._side.wait(begun)
            self._run(self._side, x, y.pointer)
            self._side.record(done)
            stream.wait(done)
        elif way == "kernel":
            self._run(stream, x, batch.output("y", x.shape).pointer)
        else:
            stream.copy_on_device(batch.output("y", x.shape).pointer, x.pointer, x.size)

    def _take(self, size: int) -> tuple[object, int]:
        """Memory of the instance's own, and its address: of the pool, if that has some."""
        try:
            lent = self._graphics.gpus.pool(self._gpu.ordinal).take(size)
        except MemoryError:
            memory = self._gpu.allocate(size)
            return memory, memory.pointer
        if not size <= lent.size < size + 2 * IN_FRONT and self._make.gpu.graphs == ():
            self._complain(f"it asked for {size} bytes, and has {lent.size}")
        return lent, lent.address

    def _run(self, stream: Any, x: Any, y: int, *, by: int = 1, of: int = 1) -> None:
        """Submit a kernel that writes the numbers of x there, made `by` times as large, where they are `of` times."""
        weights = self._weights.pointer
        touched = [(x.pointer, x.size, x.pointer == y), (weights, 8, False)]
        touched += [(y, x.size, True)] if x.pointer != y else []
        work = partial(_multiply, self._graphics.stub, x.pointer, y, x.shape, weights, (by, of))
        if error := self._graphics.stub.launch(stream.handle, work, touched):
            raise RuntimeError(f"stub_kernel: error {error}")


def _multiply(stub: Any, x: int, y: int, shape: tuple[int, ...], weights: int, factors: tuple[int, int]) -> None:
    """Multiply the numbers of x; where a row is filled up, all of it is 0."""
    size, (by, of) = 8 * int(np.prod(shape)), factors
    if not size:
        return
    numbers = np.frombuffer(stub.array(x, size), np.int64).reshape(shape)
    [weight] = np.frombuffer(stub.array(weights, 8), np.int64)
    given = numbers * weight * by // of
    np.frombuffer(stub.array(y, size), np.int64).reshape(shape)[:] = given
