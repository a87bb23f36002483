"""Execution of a plan by one instance: a context for each optimisation profile, on the stream of the instance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from inferd._native.cuda.device import Device, DeviceMemory
from inferd.backends.api import BackendError, GpuInstance, InstanceSpec, ModelSpec, RequestError
from inferd.backends.tensorrt.allocation import ALIGNMENT, OutputAllocator, make_allocator
from inferd.backends.tensorrt.library import Library, reason
from inferd.backends.tensorrt.plan import Dims, Plan, PlanTensor, Profile

if TYPE_CHECKING:
    from inferd._native.gpu.batch import GpuBatch

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

TYPES = {
    "FP32": "f4",
    "FP16": "f2",
    "BF16": "u2",
    "INT8": "i1",
    "UINT8": "u1",
    "INT32": "i4",
    "INT64": "i8",
    "BOOL": "?",
}
KEPT_SHAPES = 256
"""Combinations of shapes whose profile and outputs an instance remembers."""


@dataclass(slots=True)
class Context:
    """An execution context with its profile."""

    context: Any  # IExecutionContext
    profile: Profile
    allocator: OutputAllocator  # of outputs whose shape depends on data
    key: Key | None = None  # the shapes set last
    allocated: set[str] = field(default_factory=set)  # the outputs that the allocator has been set for


@dataclass(frozen=True, slots=True)
class Key:
    """The values that decide the shapes of outputs: the shapes of inputs, and the contents of shape tensors."""

    shapes: tuple[Dims, ...]
    values: tuple[Dims, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """The profile and outputs of one combination of shapes."""

    context: Context
    outputs: tuple[Dims, ...]  # -1 for a dimension that depends on data


class TensorRTInstance(GpuInstance):
    """Executes a plan. It waits for the device only if a shape depends on computed data."""

    writes_inputs = False

    def __init__(
        self, model: ModelSpec, library: Library, plan: Plan, spec: InstanceSpec, gpu: Device, strategy: str
    ) -> None:
        self.name = spec.name
        self.library = library
        self.gpu = gpu
        self.stream = gpu.stream(gpu.priority(model.gpu.priority))
        self.batches = model.max_batch_size > 0
        self.inputs = [tensor for tensor in plan.inputs if not tensor.is_shape]
        self.shape_inputs = [tensor for tensor in plan.inputs if tensor.is_shape]
        self.outputs = list(plan.outputs)
        self.configured = {tensor.name for tensor in model.model_outputs}
        self.shapes_out = any(tensor.is_shape for tensor in self.outputs)
        if self.shapes_out and model.gpu.graphs:
            raise BackendError(f"instance '{self.name}': CUDA graphs cannot answer with shape tensors")
        with library.loading:
            self.contexts = [self._make_context(plan, index, strategy) for index in spec.profiles or (0,)]
        self._known: dict[Key, Known] = {}
        self._scraps: dict[str, list[DeviceMemory]] = {}

    def _make_context(self, plan: Plan, index: int, strategy: str) -> Context:
        module = self.library.module
        with self.library.complaints() as complaints:
            made = plan.engine.create_execution_context(getattr(module.ExecutionContextAllocationStrategy, strategy))
            if made is None or not made.set_optimization_profile_async(index, self.stream.handle):
                why = reason(complaints, "it gives no reason")
                raise BackendError(f"instance '{self.name}': TensorRT makes no context for profile {index}: {why}")
        self.stream.synchronize()  # the profile's copies to the device have ended
        return Context(made, plan.profiles[index], make_allocator(module))

    def submit(self, batch: GpuBatch) -> None:
        """Execute the plan once for the whole batch."""
        given = [batch.input(tensor.name) for tensor in self.inputs]
        values = [_values(batch, tensor) for tensor in self.shape_inputs]
        key = Key(
            tuple(
                memory.shape if tensor.dims else ()  # a scalar is configured as [1]
                for tensor, memory in zip(self.inputs, given, strict=True)
                if memory is not None
            ),
            tuple(tuple(each.reshape(-1).tolist()) for each in values),
        )
        with self.library.complaints() as complaints:
            known = self._prepare(key, values, complaints)
            for tensor, memory in zip(self.inputs, given, strict=True):
                assert memory is not None  # none is optional
                known.context.context.set_tensor_address(tensor.name, memory.pointer)
            on_host = self._place_outputs(batch, known)
            for array in (*values, *on_host.values()):
                batch.hold(array)
            self._enqueue(known.context, complaints)
        if on_host or any(-1 in dims for dims in known.outputs):
            self.stream.synchronize()
            self._tell_shapes(batch, known)
            self._send(batch, on_host)

    def _enqueue(self, used: Context, complaints: list[str]) -> None:
        try:
            if not used.context.execute_async_v3(self.stream.handle):
                why = reason(complaints, "it gives no reason")
                raise used.allocator.problem or BackendError(f"TensorRT execution failed: {why}")
        finally:
            used.allocator.end()

    # -- shapes -------------------------------------------------------------------------------------------------------

    def _prepare(self, key: Key, values: Sequence[Array], complaints: list[str]) -> Known:
        """Choose a context, and set the shapes of the inputs on it. Returns the context and the shapes of outputs."""
        known = self._known.get(key)
        used = known.context if known else self._choose(key)
        for tensor, numbers in zip(self.shape_inputs, values, strict=True):
            used.context.set_tensor_address(tensor.name, numbers.ctypes.data)
        if known is not None and used.key == key:
            return known
        used.key = None
        for tensor, dims in zip(self.inputs, key.shapes, strict=True):
            if not used.context.set_input_shape(tensor.name, dims):
                why = reason(complaints, "it gives no reason")
                raise RequestError(f"input '{tensor.name}' cannot have the shape {list(dims)}: {why}")
        try:
            missing = used.context.infer_shapes()
        except RuntimeError as error:
            why = reason(complaints, str(error))
            raise RequestError(f"the shapes of the inputs do not go together: {why}") from None
        if missing:
            raise BackendError(f"TensorRT does not know the shapes of {', '.join(missing)}")
        used.key = key
        if known is None:
            known = Known(used, tuple(tuple(used.context.get_tensor_shape(tensor.name)) for tensor in self.outputs))
            if len(self._known) == KEPT_SHAPES:
                self._known.clear()
            self._known[key] = known
        return known

    def _choose(self, key: Key) -> Context:
        """The context whose profile serves these shapes and is the closest to them."""
        shapes = dict(zip((tensor.name for tensor in self.inputs), key.shapes, strict=True))
        values = dict(zip((tensor.name for tensor in self.shape_inputs), key.values, strict=True))
        best, least = None, math.inf
        for context in self.contexts:
            distance = context.profile.distance(shapes, values)
            if distance is not None and distance < least:
                best, least = context, distance
        if best is None:
            asked = ", ".join(f"{name} {list(numbers)}" for name, numbers in (*shapes.items(), *values.items()))
            served = "; ".join(str(context.profile) for context in self.contexts)
            raise RequestError(
                "failed to find any Optimization Profile to support the requested dimensions (or shape values), with "
                f"the whole batch {asked}: expected {served}"
            )
        return best

    # -- outputs ------------------------------------------------------------------------------------------------------

    def _place_outputs(self, batch: GpuBatch, known: Known) -> dict[str, Array]:
        """Set the address of each output. Returns the memory of the outputs that TensorRT leaves on the host."""
        context, allocator = known.context.context, known.context.allocator
        allocator.begin(batch, self._scrap, self.configured)
        on_host = {}
        for tensor, dims in zip(self.outputs, known.outputs, strict=True):
            if tensor.is_shape:
                on_host[tensor.name] = _host_array(dims, tensor)
                context.set_tensor_address(tensor.name, on_host[tensor.name].ctypes.data)
            elif -1 in dims:
                if tensor.name not in known.context.allocated:  # the bindings remember every call
                    known.context.allocated.add(tensor.name)
                    context.set_output_allocator(tensor.name, allocator)
            elif tensor.name in self.configured:
                context.set_tensor_address(tensor.name, batch.output(tensor.name, dims or (1,)).pointer)
            else:
                size = math.prod(dims) * np.dtype(TYPES[tensor.datatype]).itemsize
                context.set_tensor_address(tensor.name, self._scrap(tensor.name, size))
        return on_host

    def _scrap(self, name: str, size: int) -> int:
        """Memory for an output that is not configured. It grows by doubling; work may still write to older memory."""
        known = self._scraps.setdefault(name, [])
        if not known or known[-1].size < size:
            known.append(self.gpu.allocate(max(ALIGNMENT, 1 << (size - 1).bit_length())))
        return known[-1].pointer

    def _tell_shapes(self, batch: GpuBatch, known: Known) -> None:
        """Set the shapes of outputs that depend on data; they are known once the stream's work is done."""
        for tensor, dims in zip(self.outputs, known.outputs, strict=True):
            if -1 in dims and tensor.name in self.configured:
                found = known.context.allocator.shapes.get(tensor.name)
                if found is None:
                    raise BackendError(f"TensorRT did not tell the shape of output '{tensor.name}'")
                batch.set_output_shape(tensor.name, found)

    def _send(self, batch: GpuBatch, on_host: dict[str, Array]) -> None:
        """Make outputs of the shape tensors on the host. Each row of a batch gets the values behind the batch size."""
        for name, values in on_host.items():
            if name not in self.configured:
                continue
            rows = values.reshape(-1)
            if self.batches:
                if rows[0] != batch.rows:
                    raise BackendError(
                        f"failed to retrieve the output shape values of '{name}': the first must be the batch size "
                        f"{batch.rows}, got {rows[0]}"
                    )
                rows = np.ascontiguousarray(np.broadcast_to(rows[1:], (batch.rows, len(rows) - 1)))
            target = batch.output(name, rows.shape)
            self.stream.copy_to_device(target.pointer, rows.ctypes.data, rows.nbytes)
            batch.hold(rows)

    def close(self) -> None:
        """Drop the contexts; the device has done their work."""
        self._known.clear()
        self.contexts.clear()
        self._scraps.clear()


def _host_array(dims: Dims, tensor: PlanTensor) -> Array:
    """Memory of the host, aligned as TensorRT wants it."""
    dtype = np.dtype(TYPES[tensor.datatype])
    size = math.prod(dims) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(dims)


def _values(batch: GpuBatch, tensor: PlanTensor) -> Array:
    """The content of a shape tensor."""
    given = np.frombuffer(batch.host_input(tensor.name), TYPES[tensor.datatype])
    values = _host_array(given.shape, tensor)
    values[:] = given
    return values
