"""Reads plans: their tensors, and the shapes that each of their optimisation profiles serves."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from inferd._native.cuda import driver
from inferd._native.cuda.device import Device, device
from inferd.backends.api import BackendError, Signature, TensorSpec
from inferd.backends.tensorrt.library import Library, reason

DATATYPES: Mapping[str, str] = MappingProxyType(
    {
        "FLOAT": "FP32",
        "HALF": "FP16",
        "BF16": "BF16",
        "INT8": "INT8",
        "UINT8": "UINT8",
        "INT32": "INT32",
        "INT64": "INT64",
        "BOOL": "BOOL",
        "FP8": "UINT8",  # the protocol has no name for it: its bits, one byte an element
    }
)
"""v2 datatypes of TensorRT's; those of less than a byte (INT4, FP4) cannot be served."""

Dims = tuple[int, ...]
Range = tuple[Dims, Dims, Dims]
"""Least, best and greatest."""


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """An input or output of a plan."""

    name: str
    is_input: bool
    datatype: str
    dims: Dims  # all of them, -1 where they vary
    is_shape: bool  # its values are shapes, and it lies in the host's memory


@dataclass(frozen=True, slots=True)
class Profile:
    """The shapes, and the values of shape tensors, that the kernels were chosen for, by name of the input."""

    index: int
    shapes: Mapping[str, Range]
    values: Mapping[str, Range]

    def distance(self, shapes: Mapping[str, Dims], values: Mapping[str, Dims]) -> int | None:
        """The distance of shapes and values from the profile's best ones; None if the profile does not serve them."""
        total = 0
        for given, ranges in ((shapes, self.shapes), (values, self.values)):
            for name, numbers in given.items():
                least, best, greatest = ranges[name]
                if len(numbers) != len(best) or not all(
                    low <= number <= high for low, number, high in zip(least, numbers, greatest, strict=True)
                ):
                    return None
                total += sum(abs(number - optimum) for number, optimum in zip(numbers, best, strict=True))
        return total

    @property
    def rows(self) -> int:
        """The largest batch that every input allows."""
        firsts = [greatest[0] for _, _, greatest in (*self.shapes.values(), *self.values.values()) if greatest]
        return min(firsts, default=0)

    def __str__(self) -> str:
        ranges = [f"{name} {list(low)} to {list(high)}" for name, (low, _, high) in self.shapes.items()]
        ranges += [f"the values of {name} {list(low)} to {list(high)}" for name, (low, _, high) in self.values.items()]
        return f"profile {self.index}: {', '.join(ranges)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that was read."""

    engine: Any  # ICudaEngine
    runtime: Any  # the IRuntime that read it, which must outlive it
    tensors: tuple[PlanTensor, ...]
    profiles: tuple[Profile, ...]

    @property
    def inputs(self) -> Iterator[PlanTensor]:
        return (tensor for tensor in self.tensors if tensor.is_input)

    @property
    def outputs(self) -> Iterator[PlanTensor]:
        return (tensor for tensor in self.tensors if not tensor.is_input)

    def signature(self, profiles: Iterable[int]) -> Signature:
        """The signature that completes a configuration, with the largest batch of these profiles.

        A plan batches if the first dimensions of all its tensors vary, or are 1. As in Triton, it serves batches as
        large as one of the profiles allows.
        """
        firsts = {tensor.dims[:1] for tensor in self.tensors if not tensor.is_shape}
        batches = firsts in ({(-1,)}, {(1,)})
        rows = max((self.profiles[index].rows for index in profiles), default=0)
        return Signature(
            inputs=tuple(_spec(tensor, batches) for tensor in self.inputs),
            outputs=tuple(_spec(tensor, batches) for tensor in self.outputs),
            batches=batches,
            max_batch_size=rows if batches else 0,
        )


def _spec(tensor: PlanTensor, batches: bool) -> TensorSpec:
    dims = tensor.dims
    if batches:
        dims = (dims[0] - 1,) if tensor.is_shape and dims else dims[1:]
    return TensorSpec(tensor.name, tensor.datatype, dims or (() if batches else (1,)), shape_tensor=tensor.is_shape)


def gpu_for_plans(ordinal: int, what: str) -> Device:
    """Make a device current on this thread. TensorRT crashes if it is called before that.

    Raises:
        BackendError: there is no such device.
    """
    if not driver.is_loaded() or ordinal >= driver.device_count():
        raise BackendError(
            f"{what}: a plan of TensorRT needs a GPU, also to be looked into, and there is no GPU {ordinal}; without "
            'one, serve what the plan was built from: platform: "onnxruntime_onnx" and the file model.onnx'
        )
    gpu = device(ordinal)
    gpu.use()
    return gpu


def read_plan(library: Library, path: Path, gpu: Device, what: str, *, host_code: bool) -> Plan:
    """Read a plan for a device, which is current.

    Args:
        what: the model, for messages.
        host_code: whether a plan may bring code for the host, as version-compatible ones do.

    Raises:
        BackendError: the file is no plan, or is for another GPU or version, or has tensors that are not served.
    """
    with library.loading, library.complaints() as complaints:
        runtime = library.module.Runtime(library.logger)
        runtime.engine_host_code_allowed = host_code
        with path.open("rb") as file:
            try:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise BackendError(f"{what}: '{path}' is empty") from None
            with data:
                engine = runtime.deserialize_cuda_engine(data)
                if engine is None:
                    complaints[:0] = _invalidity(library.module, runtime, data)
                    raise BackendError(_unreadable(library, path, gpu, what, reason(complaints, "it gives no reason")))
    tensors = tuple(_tensors(library, engine, what))
    count = engine.num_optimization_profiles
    profiles = tuple(_profile(engine, tensors, index) for index in range(count))
    return Plan(engine, runtime, tensors, profiles)


def _invalidity(module: Any, runtime: Any, data: mmap.mmap) -> Iterator[str]:
    """TensorRT-RTX's reason for not reading a plan; the others log theirs."""
    if hasattr(runtime, "get_engine_validity"):
        _, diagnostics = runtime.get_engine_validity(data)
        members = module.EngineInvalidityDiagnostics.__members__.items()
        yield ", ".join(name for name, flag in members if diagnostics & int(flag)) or "the engine is not valid"


def _unreadable(library: Library, path: Path, gpu: Device, what: str, why: str) -> str:
    capability = ".".join(map(str, gpu.compute_capability))
    hint = (
        "a plan is for one kind of GPU and one version of TensorRT, unless it was built to be compatible with others: "
        "build it anew with this TensorRT on such a GPU, by inferd build-engine"
    )
    if "host code" in why.lower() or "hostcode" in why.lower():
        hint = "allow it by --backend-config tensorrt,version-compatible=true if you trust the plan"
    return (
        f"{what}: {library} cannot read the plan '{path}' on GPU {gpu.ordinal} ({gpu.name}, compute capability "
        f"{capability}): {why}. {hint[0].upper()}{hint[1:]}"
    )


def _tensors(library: Library, engine: Any, what: str) -> Iterator[PlanTensor]:
    module = library.module
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        datatype = DATATYPES.get(engine.get_tensor_dtype(name).name)
        if datatype is None:
            raise BackendError(f"{what}: tensor '{name}' is {engine.get_tensor_dtype(name).name}, which is not served")
        is_input = engine.get_tensor_mode(name) == module.TensorIOMode.INPUT
        on_host = engine.get_tensor_location(name) == module.TensorLocation.HOST
        if not _is_linear(module, engine, name):
            raise BackendError(
                f"{what}: tensor '{name}' has the format {engine.get_tensor_format_desc(name)}: tensors are row-major "
                "here, build the plan with linear formats of its inputs and outputs"
            )
        if hasattr(engine, "get_aliased_input_tensor") and not is_input and engine.get_aliased_input_tensor(name):
            raise BackendError(f"{what}: output '{name}' is the memory of an input, which is not served")
        dims = tuple(engine.get_tensor_shape(name))
        yield PlanTensor(name, is_input, datatype, dims, on_host or engine.is_shape_inference_io(name))


def _is_linear(module: Any, engine: Any, name: str) -> bool:
    if hasattr(module, "TensorFormat"):  # the lean runtime has no name for it
        return bool(engine.get_tensor_format(name) == module.TensorFormat.LINEAR)
    return engine.get_tensor_vectorized_dim(name) == -1 and "linear" in engine.get_tensor_format_desc(name).lower()


def _profile(engine: Any, tensors: Iterable[PlanTensor], index: int) -> Profile:
    shapes, values = {}, {}
    for tensor in tensors:
        if tensor.is_input and tensor.is_shape:
            values[tensor.name] = _range(engine.get_tensor_profile_values(index, tensor.name))
        elif tensor.is_input:
            shapes[tensor.name] = _range(engine.get_tensor_profile_shape(tensor.name, index))
    return Profile(index, MappingProxyType(shapes), MappingProxyType(values))


def _range(given: Iterable[Iterable[int]]) -> Range:
    least, best, greatest = (tuple(each) for each in given)
    return least, best, greatest
