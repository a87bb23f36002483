"""What models on GPUs do there, each version in a way of its own: how outputs are made, graphs, warm-up, devices.

All answer what they are asked. A kernel runs when the world comes to it, and looks at what it reads.
"""

from __future__ import annotations

import ctypes
import itertools
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inferd._native.cuda.device import device
from inferd._native.cuda.driver import CudaError
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
from tests.simulation.kind import RAGGED
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Callable
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
OFTEN = 0.2  # of batches something wrong is done with
DEEDS = 4  # that a model does wrong with such a batch
CLUMSY = 0.1  # of batches, of a model that answers wrongly


@dataclass(frozen=True)
class Make:
    """How a version works on GPUs.

    Attributes:
        way: how its outputs are made.
        gpu: as the configuration says.
        warmup: the same.
        devices: on which its instances are, in turn.
        fails: how often a batch fails.
        kind: whose version it is.
    """

    way: str
    gpu: GpuSpec
    warmup: tuple[WarmupSpec, ...]
    devices: tuple[int, ...]
    fails: float
    kind: Kind

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
        graphs = tuple(_graph(kind, *each) for each in chosen if each[0] <= kind.rows and kind.is_of_one_shape)
    warmup = tuple(
        WarmupSpec(
            f"sample {number}",
            random.randint(1, kind.rows),
            {"x": WarmupInput("INT64", (random.choice((3, 4, 5)),), random.choice(("zero", "random")))},
            random.randint(1, 2),
        )
        for number in range(random.choice((0, 0, 1, 2)))
    )
    if kind.ragged or kind.sequence or kind.flat:
        warmup = ()
    elif kind.beside is not None and not kind.beside.optional:
        beside = WarmupInput(kind.beside.datatype, tuple(abs(dim) for dim in kind.beside.dims))
        warmup = tuple(replace(each, inputs={**each.inputs, "w": beside}) for each in warmup)
    gpu = GpuSpec(
        graphs,
        busy_wait=random.random() < 0.3,
        priority=random.choice((0, 0, 1, -1)),
        pinned_inputs=random.random() < 0.7,
        pinned_outputs=random.random() < 0.7,
    )
    devices = random.choice(((0,), (0,), (0, 1), (1, 0), (1,)))
    return Make(way, gpu, warmup, devices, random.choice((0, 0, 0, FAILS)), kind)


def _graph(kind: Kind, rows: int, least: int, width: int) -> GraphSpec:
    shapes: dict[str, tuple[int, ...]] = {"x": (rows, width) if kind.flat else (width,)}
    if kind.beside is not None and min(kind.beside.dims) < 0:
        shapes["w"] = tuple(dim if dim > 0 else width // 2 for dim in kind.beside.dims)
    return GraphSpec(1, 1, shapes) if kind.flat else GraphSpec(rows, least, shapes)


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
        shape: of INT64, unless it has other bits.
        kind: of device.
        bits: of an element.
        lanes: numbers in it.
    """

    def __init__(
        self,
        owner: object,
        address: int,
        ordinal: int,
        shape: tuple[int, ...],
        kind: int = CUDA_DEVICE,
        bits: int = 64,
        lanes: int = 1,
    ) -> None:
        self._owner = owner
        self._dims = (ctypes.c_int64 * len(shape))(*shape)
        self._layout = _Layout(
            address - IN_FRONT, kind, ordinal, len(shape), INTEGER, bits, lanes, ctypes.addressof(self._dims), None
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
        self._old: GpuBatch | None = None  # the batch before
        self._submitted_lost = 0  # batches since it was told that its device is lost
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
        del self._graphics, self._weights, self._old

    def lost(self) -> None:
        """Its device has failed for good."""
        if not self.ready or not self._graphics.has_lost(self._gpu.ordinal):
            self._complain("is told that its device is lost")
        super().lost()

    def _complain(self, text: str) -> None:
        self._graphics.complain(f"instance {self._name}: {text}")

    def submit(self, batch: GpuBatch) -> None:
        """Submit the work of the way that its version has."""
        kind = self._make.kind
        if self._serves and not batch.capturing and self._random.random() < self._make.fails:
            self._graphics.fail_batch(self._random.choice((ValueError, RequestError)))
        if not self.ready:
            self._submitted_lost += 1
            if self._submitted_lost > 1:
                self._complain("is asked to work on a device that is lost")
        x = batch.input("x")
        if x.__dlpack_device__() != (CUDA_DEVICE, self._gpu.ordinal) or x.datatype != "INT64":
            self._complain(f"its input is {x.datatype} on {x.__dlpack_device__()}")
        size = 8 * int(np.prod(x.shape))
        is_shaped = x.shape[0] == batch.rows or kind.flat or kind.ragged
        if not is_shaped or x.size != size or x.pointer % 256 or (kind.flat and batch.rows != 1):
            self._complain(f"an input of shape {x.shape} has {x.size} bytes at {x.pointer:#x} in {batch.rows} rows")
        if batch.stream is not self.stream:
            self._complain("its batch has another stream")
        batch.hold(self._weights)
        if self._serves or batch.capturing:
            self._misuse(batch, x)
        if kind.ragged:
            self._check_counts(batch, x)
        if kind.sequence is not None:
            self._add_up(batch, x)
            return
        for name, factor in kind.more:
            if batch.wants(name):
                self._run(self.stream, x, batch.output(name, x.shape).pointer, by=factor, spares_first=True)
        if kind.beside is not None and (batch.wants("v") or self._random.random() < 0.5):
            self._pass_on(batch)
        if kind.clumsy and self._serves and not batch.capturing and self._random.random() < CLUMSY:
            self._err(batch, x)
        elif batch.wants("y"):
            self._answer(batch, x)

    # -- what it may not do --

    def _misuse(self, batch: GpuBatch, x: Any) -> None:
        """Do something wrong now and then: that is said, and the batch goes on."""
        old, self._old = self._old, batch
        if self._random.random() > OFTEN:
            return
        if old is not None and old is not batch:
            self._refuse(lambda: old.rows, "this batch has been submitted")
        ordinal = self._gpu.ordinal

        def foreign(kind: int = CUDA_DEVICE, device: int = ordinal, bits: int = 64, lanes: int = 1) -> ForeignTensor:
            return ForeignTensor(x, x.pointer, device, x.shape, kind, bits, lanes)

        elsewhere = f"output 'y' must be on CUDA device {ordinal}"
        deeds: list[tuple[Callable[[], object], str]] = [
            (lambda: batch.input("nothing"), "the model has no input 'nothing'"),
            (lambda: batch.host_input("y"), "the model has no input 'y'"),
            (lambda: batch.wants("x"), "the model has no output 'x'"),
            (lambda: batch.output("nothing", (1,)), "the model has no output 'nothing'"),
            (lambda: batch.output("y", (1,) * 17), "output 'y' has 17 dimensions, at most 16 are served"),
            (lambda: batch.output("y", (2, -1)), "output 'y' has the impossible shape [2, -1]"),
            (lambda: batch.output("y", (1 << 23, (1 << 23) + 1)), "output 'y' has the impossible shape"),
            (lambda: batch.set_output("y", object()), "output 'y' must be a tensor with __dlpack__, got object"),
            (lambda: batch.set_output("y", foreign(kind=1)), elsewhere),
            (lambda: batch.set_output("y", foreign(device=ordinal + 1)), elsewhere),
            (lambda: batch.set_output("y", foreign(bits=32)), "output 'y' must be INT64, got a tensor of another type"),
            (lambda: batch.set_output("y", foreign(lanes=2)), "output 'y' must be INT64, got a tensor of another type"),
            (type(batch), "GpuBatch cannot be created from Python"),
        ]
        if batch.capturing:
            deeds = [
                (lambda: batch.host_input("x"), "the values of input 'x' are not known"),
                (
                    lambda: batch.output_memory("y", 8),
                    "the shape of output 'y' depends on data, which no CUDA graph can follow",
                ),
            ]
        else:
            wide = "output 'y' of shape [100] has no memory for its 800 bytes"
            deeds.append((lambda: batch.set_output_shape("y", (100,)), wide))
            deeds.append((lambda: batch.output_memory("y", 8) and batch.set_output_shape("y", (100,)), wide))
        for deed, text in self._random.sample(deeds, min(DEEDS, len(deeds))):
            self._refuse(deed, text)

    def _refuse(self, deed: Callable[[], object], text: str) -> None:
        try:
            deed()
        except (ValueError, TypeError) as error:
            if text not in str(error):
                self._complain(f"is told '{error}', and not '{text}'")
        except MemoryError:
            if "impossible" in text:  # which is seen before any memory is taken
                self._complain(f"is told that there is no memory, and not '{text}'")
        else:
            self._complain(f"is not told that {text}")

    def _err(self, batch: GpuBatch, x: Any) -> None:
        """Answer what cannot be the answer of a batch."""
        what, shape = self._random.choice(("fewer", "more", "nothing")), x.shape
        if what == "nothing":
            self._graphics.expect(f"model '{self._make.kind.name}' did not produce output 'y'")
            return
        rows = shape[0] + (1 if what == "more" else -1)
        self._graphics.expect(f"output 'y' must have the batch dimension {shape[0]} first, got {rows}")
        y = batch.output("y", (rows, *shape[1:]))
        self.stream.fill(y.pointer, 0, y.size)

    # -- what it answers --

    def _pass_on(self, batch: GpuBatch) -> None:
        """The other input comes back as it is; zeros where it was not given."""
        kind = self._make.kind
        assert kind.beside is not None
        w, way = batch.input("w"), self._random.random()
        if w is None:
            shape, _ = kind.beside.lacking(batch.rows, not kind.flat, of_model=True)
            v = batch.output("v", shape)
            self.stream.fill(v.pointer, 0, v.size)
            if not batch.capturing:
                self._refuse(lambda: batch.host_input("w"), "the values of input 'w' are not known")
            return
        shape = kind.beside.model_shape if kind.beside.model_shape is not None else kind.beside.dims
        if w.datatype != kind.beside.datatype or len(w.shape) != len(shape) + (not kind.flat):
            self._complain(f"w is {w.datatype} {w.shape}, where {kind.beside} was expected")
        if not batch.capturing and self._random.random() < 0.3:
            self._compare(w, batch.host_input("w"))
        if way < 0.3:
            batch.set_output("v", w)
        else:
            self.stream.copy_on_device(batch.output("v", w.shape).pointer, w.pointer, w.size)

    def _compare(self, w: Any, values: bytes) -> None:
        """What the host knows of an input is there on the device, before zeros of rows that nobody has asked."""
        stub, address = self._graphics.stub, w.pointer

        def compare() -> None:
            if values != stub.read(address, len(values)):
                raise Violation("the host has other values of an input")

        if values:
            stub.launch(self.stream.handle, compare, [(address, len(values), False)])

    def _check_counts(self, batch: GpuBatch, x: Any) -> None:
        """Check what the batch says of its requests, when it is on the device."""
        tensors = {name: batch.input(name) for name in RAGGED}
        stub, size = self._graphics.stub, int(np.prod(x.shape))

        def check() -> None:
            told = {
                name: np.frombuffer(stub.read(each.pointer, each.size), np.int32).tolist()
                for name, each in tensors.items()
                if each.size and name != "MAX_ELEMENT_COUNT_AS_SHAPE"
            }
            counts, widths = told.get("ELEMENT_COUNT", []), told.get("ITEM_SHAPE", [])
            ends = np.cumsum(counts).tolist()
            expected = {
                "ELEMENT_COUNT": counts,
                "ACCUMULATED_ELEMENT_COUNT": ends,
                "ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, *ends],
                "ITEM_SHAPE": widths,
                "ITEM_SHAPE_FLATTEN": widths,
            }
            if told != expected or sum(counts) != size or sum(widths) != size:
                raise Violation(f"{size} elements, of which the batch says {told}")

        if tensors["MAX_ELEMENT_COUNT_AS_SHAPE"].shape[0] > size:
            self._complain(f"the largest request of {size} elements has {tensors['MAX_ELEMENT_COUNT_AS_SHAPE'].shape}")
        touched = [(each.pointer, each.size, False) for each in tensors.values() if each.size]
        stub.launch(self.stream.handle, check, touched)

    def _add_up(self, batch: GpuBatch, x: Any) -> None:
        """Add the second column to the state of each sequence, which the server keeps."""
        ready, start, state = (batch.input(name) for name in ("ready", "start", "state"))
        y, after = batch.output("y", x.shape), batch.output("state out", state.shape)
        stub, initial = self._graphics.stub, self._make.kind.initial

        def read(tensor: Any, kind: Any) -> np.ndarray:
            return np.frombuffer(stub.read(tensor.pointer, tensor.size), kind).reshape(tensor.shape)

        def add() -> None:
            given, known = read(x, np.int64).copy(), read(state, np.int64)
            is_there, begins = (read(each, np.int32).reshape(-1) != 0 for each in (ready, start))
            if (known[is_there & begins] != initial).any():
                raise Violation(f"states that begin are {known[is_there & begins].tolist()}")
            sums = known + given[:, 1:2]
            given[is_there, 1] = sums[is_there, 0]
            stub.write(y.pointer, given.tobytes())
            stub.write(after.pointer, sums.tobytes())

        touched = [(each.pointer, each.size, False) for each in (x, ready, start, state)]
        touched += [(each.pointer, each.size, True) for each in (y, after)]
        if error := stub.launch(self.stream.handle, add, touched):
            raise RuntimeError(f"stub_kernel: error {error}")

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
            try:
                self._run(self._side, x, y.pointer)
                self._side.record(done)
                stream.wait(done)
            except RuntimeError:
                if not batch.capturing:
                    self._wait_aside()
                raise
        elif way == "kernel":
            self._run(stream, x, batch.output("y", x.shape).pointer)
        else:
            stream.copy_on_device(batch.output("y", x.shape).pointer, x.pointer, x.size)

    def _wait_aside(self) -> None:
        """Wait for the model's own stream: when a batch fails, the server waits for its own streams alone."""
        assert self._side is not None
        for _ in range(2):  # a planted fault refuses one call
            with suppress(CudaError):
                self._side.synchronize()

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

    def _run(self, stream: Any, x: Any, y: int, *, by: int = 1, of: int = 1, spares_first: bool = False) -> None:
        """Submit a kernel that writes the numbers of x there, made `by` times as large, where they are `of` times.

        With `spares_first` the first of each row stays.
        """
        weights = self._weights.pointer
        touched = [(x.pointer, x.size, x.pointer == y), (weights, 8, False)]
        touched += [(y, x.size, True)] if x.pointer != y else []
        work = partial(_multiply, self._graphics.stub, x.pointer, y, x.shape, weights, (by, of), int(spares_first))
        if error := self._graphics.stub.launch(stream.handle, work, touched):
            raise RuntimeError(f"stub_kernel: error {error}")


def _multiply(
    stub: Any, x: int, y: int, shape: tuple[int, ...], weights: int, factors: tuple[int, int], first: int
) -> None:
    """Multiply the numbers of x, from this place of each row on; where a row is filled up, all of it is 0."""
    size, (by, of) = 8 * int(np.prod(shape)), factors
    if not size:
        return
    given = np.frombuffer(stub.array(x, size), np.int64).reshape(shape).copy()
    [weight] = np.frombuffer(stub.array(weights, 8), np.int64)
    given[..., first:] = given[..., first:] * weight * by // of
    np.frombuffer(stub.array(y, size), np.int64).reshape(shape)[:] = given
