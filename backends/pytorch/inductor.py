"""Models compiled by AOTInductor: `model.pt2`, platform `torch_aoti`, on CPU and GPU.

The library in the package is called through its C ABI (`_aoti`), on the CPU from a thread that never takes the GIL.
PyTorch's own loader holds the GIL for as long as the model computes; it is used for packages that need more than the
ABI gives.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from backends.api import (
    BackendError,
    GpuInstance,
    Instance,
    InstanceSpec,
    Model,
    ModelSource,
    ModelSpec,
    NativeInstance,
    RequestError,
    Signature,
    TensorSpec,
)
from backends.opening import import_framework
from backends.pytorch.datatypes import torch_type
from backends.pytorch.gpu import TorchStream, check_capability, check_cuda, check_no_text
from backends.pytorch.naming import input_positions, output_positions
from backends.pytorch.options import Options
from backends.pytorch.package import Package, read_package
from backends.pytorch.wrapper import SMALLEST_VARIABLE, Dimension, ExpectedInput, mismatch

if TYPE_CHECKING:
    import torch

    from _native.execution.batch import Batch
    from _native.gpu.batch import GpuBatch
    from backends.pytorch._aoti import Library

log = logging.getLogger("inferd.backends")

PLATFORM = "torch_aoti"
MODEL_FILE = "model.pt2"
BATCHES_ON_GPU = 3  # batches submitted and not done at a time, see _native.gpu.instance

Call: TypeAlias = Callable[[list[Any], bool], Sequence[Any]]
"""Runs a model on a GPU: takes its inputs in order and whether work is recorded, returns its outputs; all with
`__dlpack__`."""


def open_package(source: ModelSource) -> Package:
    """The package of a model.

    Raises:
        BackendError: the file is missing, is no package, or was compiled for another machine.
    """
    path = source.model_file(MODEL_FILE)
    if not path.is_file():
        raise source.not_found(path)
    try:
        return read_package(path)
    except BackendError as error:
        raise BackendError(f"failed to load model '{source.spec.name}': {error}") from error


class CallOrder:
    """Matches configured tensors with the inputs and outputs of a package.

    Args:
        spec: the configuration.
        package: the model.

    Raises:
        BackendError: names, numbers, datatypes or shapes do not fit.
    """

    def __init__(self, spec: ModelSpec, package: Package) -> None:
        self.model = spec.name
        self.package = package
        for kind, tensors in (("input", spec.model_inputs), ("output", spec.model_outputs)):
            if not tensors:
                raise BackendError(f"model '{spec.name}': the configuration must contain at least one {kind}")
            for tensor in tensors:
                _check_served(spec, kind, tensor)
        self.inputs = self._match_inputs(spec)
        self.outputs = self._match_outputs(spec)
        if package.inputs is None:
            log.warning(
                "model '%s': '%s' does not say what its inputs look like: a request of a wrong shape is not noticed",
                spec.name,
                package.path,
            )
        else:
            for tensor, position in zip(spec.model_inputs, self.inputs, strict=True):
                _check_input(spec, tensor, package.inputs[position])

    def _match_inputs(self, spec: ModelSpec) -> list[int]:
        names = [tensor.name for tensor in spec.model_inputs]
        count = len(self.package.inputs or self.package.arguments)
        if count and count != len(names):
            raise BackendError(
                f"unable to load model '{spec.name}', configuration expects {len(names)} inputs, model provides {count}"
                f": {', '.join(self.package.arguments)}"
            )
        arguments = self.package.arguments
        known = len(arguments) == len(names)  # a constant of the call has a name, and is no input
        return input_positions(spec.name, names, arguments if known else [f"ARGS[{i}]" for i in range(len(names))])

    def _match_outputs(self, spec: ModelSpec) -> list[int]:
        names = [tensor.name for tensor in spec.model_outputs]
        results = self.package.results
        if results and len(names) > len(results):
            raise BackendError(
                f"model '{spec.name}' is configured with {len(names)} outputs, but the model returns {len(results)}: "
                f"{', '.join(results)}"
            )
        if all(name in results for name in names):
            return [results.index(name) for name in names]
        return output_positions(spec.name, names)

    def check_counts(self, inputs: int, outputs: int) -> None:
        """Check that a library takes and gives as many tensors as the configuration has.

        Raises:
            BackendError: it takes or gives another number.
        """
        if inputs != len(self.inputs) or outputs <= max(self.outputs):
            raise BackendError(
                f"model '{self.model}' is configured with {len(self.inputs)} inputs and {len(self.outputs)} outputs, "
                f"the compiled model takes {inputs} and returns {outputs}"
            )

    def arguments(self) -> list[int]:
        """For each input of the model, its index in the configuration."""
        return [self.inputs.index(position) for position in range(len(self.inputs))]

    def results(self, count: int) -> list[int]:
        """For each of so many outputs of the model, its index in the configuration; -1 for none."""
        places = {position: index for index, position in enumerate(self.outputs)}
        return [places.get(position, -1) for position in range(count)]

    def check_shapes(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Check that the model takes inputs of these shapes, in its order.

        Raises:
            RequestError: it does not.
        """
        wrong = mismatch(self.package.inputs, shapes) if self.package.inputs is not None else ""
        if wrong:
            inputs = ", ".join(f"{index} is '{name}'" for index, name in enumerate(names))
            raise RequestError(f"unexpected shape for model '{self.model}': {wrong} ({inputs})")


def _check_served(spec: ModelSpec, kind: str, tensor: TensorSpec) -> None:
    if tensor.datatype == "BYTES":
        raise BackendError(f"model '{spec.name}': {kind} '{tensor.name}' is BYTES, which no compiled model takes")
    if tensor.optional:
        raise BackendError(
            f"model '{spec.name}': {kind} '{tensor.name}' is optional, but a compiled model takes all of its inputs"
        )


def _check_input(spec: ModelSpec, tensor: TensorSpec, expected: ExpectedInput) -> None:
    if tensor.datatype != expected.datatype:
        raise BackendError(
            f"model '{spec.name}': unexpected datatype {tensor.datatype} for input '{tensor.name}', expecting "
            f"{expected.datatype}"
        )
    dims = (-1, *tensor.dims) if spec.max_batch_size else tensor.dims
    where = f"model '{spec.name}', tensor '{tensor.name}'"
    shape = _shape(expected.dims)
    if len(dims) != len(expected.dims):
        raise BackendError(
            f"{where}: the model expects {len(expected.dims)} dimensions (shape {shape}) but the model configuration "
            f"specifies {len(dims)} dimensions (shape [{','.join(map(str, dims))}])"
        )
    if spec.max_batch_size and not expected.dims[0].lowest <= 1 <= spec.max_batch_size <= expected.dims[0].highest:
        raise BackendError(
            f"{where}: max_batch_size is {spec.max_batch_size}, but the model was exported with {shape}: its first "
            f"dimension takes {expected.dims[0].lowest} to {expected.dims[0].highest}, and must take 1 to "
            f"{spec.max_batch_size} (an operator that chooses its algorithm by the size narrows it)"
        )
    for given, dim in zip(dims, expected.dims, strict=True):
        if given >= 0 and not dim.lowest <= given <= dim.highest:
            raise BackendError(
                f"{where}: the model expects shape {shape} but the model configuration specifies shape "
                f"[{','.join(map(str, dims))}]"
            )


def _shape(dims: Sequence[Dimension]) -> str:
    return f"[{','.join('-1' if dim.varies else str(dim.lowest) for dim in dims)}]"


class InductorModel(Model):
    """One loaded version."""

    def __init__(self, source: ModelSource, options: Options, package: Package) -> None:
        self.spec = source.spec
        self.options = options
        self.package = package
        self.order = CallOrder(source.spec, package)
        self._folder = tempfile.TemporaryDirectory(prefix="inferd-aoti-")  # outlives what was loaded from it
        self._path: Path | None = None
        self._shared: dict[str, Library] = {}  # by device
        self._lock = threading.Lock()  # instances are made on threads of their own, at the same time

    def create_instance(self, spec: InstanceSpec) -> Instance:
        """An instance with weights of its own, or with those that are shared on its device."""
        on_gpu = spec.kind == "GPU"
        if on_gpu != (self.package.device == "cuda") or spec.kind not in ("CPU", "GPU"):
            raise BackendError(
                f"instance '{spec.name}' is of KIND_{spec.kind}, but '{self.package.path}' was compiled for "
                f"{self.package.device}: write kind: KIND_{'GPU' if self.package.device == 'cuda' else 'CPU'}"
            )
        if on_gpu:
            check_cuda(spec)
            check_no_text(self.spec, spec)
            check_capability(spec, self.package.capability, self.package.path)
        library = self._library(f"cuda:{spec.device}" if on_gpu else "cpu")
        if on_gpu:
            return InductorGpuInstance(self, library, spec)
        return LoadedInstance(self) if library is None else InductorInstance(self.order, library)

    def _library(self, device: str) -> Library | None:
        """The library for a device; None, with a log line for each instance, if only PyTorch's loader can run it."""
        from backends.pytorch._shim import AotiError

        obstacle = self.package.obstacle
        if not obstacle:
            try:
                return self._load(device)
            except AotiError as error:
                obstacle = str(error)
        log.warning(
            "model '%s' goes through PyTorch's loader, which holds Python's lock while it computes, because %s",
            self.spec.name,
            obstacle,
        )
        return None

    def _load(self, device: str) -> Library:
        shared = self.options.share_weights and not self.spec.gpu.graphs  # recording needs a library to itself
        ahead = BATCHES_ON_GPU if device != "cpu" else 1
        with self._lock:
            if self._path is None:
                self._path = self.package.unpack(Path(self._folder.name))
            if shared and device in self._shared:
                return self._shared[device]
            copies = ahead * (max(1, len(self.spec.instances)) if shared else 1)
            library = load_library(self._path, device, copies)
            self.order.check_counts(library.input_count, library.output_count)
            if shared:
                self._shared[device] = library
            return library

    def close(self) -> None:
        """Drop the shared libraries and the unpacked files."""
        self._shared.clear()
        self._folder.cleanup()


def load_library(path: Path, device: str, copies: int) -> Library:
    """Load an unpacked library; see `_aoti.Library`."""
    import_framework("torch")
    import torch

    from backends.pytorch._aoti import Library

    own = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return Library(str(path), str(own), device, str(path.parent), copies)


class InductorInstance(NativeInstance):
    """Calls the library on the CPU, without Python."""

    def __init__(self, order: CallOrder, library: Library) -> None:
        results = order.results(library.output_count)
        made = library.executor(order.arguments(), results, order.package.inputs)
        self._executor = made  # what the capsule points to
        self.executor = made.capsule


class LoadedInstance(Instance):
    """Calls a package on the CPU through PyTorch's loader."""

    def __init__(self, model: InductorModel) -> None:
        self.order = model.order
        self.inputs = [model.spec.model_inputs[index] for index in model.order.arguments()]
        self.outputs = tuple(zip(model.spec.model_outputs, model.order.outputs, strict=True))
        self._loader = open_loader(model.package, -1)

    def execute(self, batch: Batch) -> None:
        """Call the package once for the whole batch."""
        import torch

        values = [torch.from_dlpack(batch.input(tensor.name)) for tensor in self.inputs]
        self.order.check_shapes([tensor.name for tensor in self.inputs], [value.shape for value in values])
        given = {value.untyped_storage().data_ptr() for value in values}
        results = run_loader(self._loader, values)
        for tensor, position in self.outputs:
            if batch.wants(tensor.name):
                result = checked(tensor, results[position])
                echoed = result.untyped_storage().data_ptr() in given
                batch.set_output(tensor.name, result.clone() if echoed else result)


class InductorGpuInstance(GpuInstance):
    """Calls a package on a GPU, on the stream of the instance. Nothing here waits for it."""

    def __init__(self, model: InductorModel, library: Library | None, spec: InstanceSpec) -> None:
        self.order = model.order
        self.inputs = [model.spec.model_inputs[index].name for index in model.order.arguments()]
        self.outputs = tuple(zip(model.spec.model_outputs, model.order.outputs, strict=True))
        self._torch = TorchStream(model.spec, spec)
        self.stream = self._torch.stream
        self._call = self._through_loader(model, spec) if library is None else self._through(library)
        self._cleans = model.options.clean_cache

    def _through(self, library: Library) -> Call:
        return lambda values, capturing: library.run(values, self.stream.handle, capturing)

    def _through_loader(self, model: InductorModel, spec: InstanceSpec) -> Call:
        import torch

        loader = open_loader(model.package, spec.device)
        return lambda values, _: run_loader(loader, [torch.from_dlpack(value) for value in values])

    def submit(self, batch: GpuBatch) -> None:
        """Call the package once for the whole batch."""
        import torch

        with self._torch.current(batch.capturing):
            values = [batch.input(name) for name in self.inputs]
            self.order.check_shapes(self.inputs, [value.shape for value in values if value is not None])
            try:
                results = self._call(values, batch.capturing)
            except RuntimeError as error:
                raise BackendError(f"PyTorch execute failure: {error}") from error
            for tensor, position in self.outputs:
                if batch.wants(tensor.name):
                    batch.set_output(tensor.name, checked(tensor, torch.from_dlpack(results[position])))
        if self._cleans and not batch.capturing:
            torch.cuda.empty_cache()


def open_loader(package: Package, device: int) -> Any:
    """PyTorch's own loader of a package.

    Raises:
        BackendError: it refuses the package, too.
    """
    import torch._inductor

    try:
        return torch._inductor.aoti_load_package(str(package.path), device_index=device).loader
    except Exception as error:  # whatever PyTorch raises
        raise BackendError(f"'{package.path}' cannot be loaded: {error}") from error


def run_loader(loader: Any, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The outputs of a package opened by `open_loader` for these inputs."""
    try:
        results: Sequence[torch.Tensor] = loader.run(values)
    except RuntimeError as error:
        raise BackendError(f"PyTorch execute failure: {error}") from error
    return results


def checked(tensor: TensorSpec, value: torch.Tensor) -> torch.Tensor:
    """An output, made contiguous.

    Raises:
        BackendError: its datatype is not the configured one.
    """
    if value.dtype != torch_type(tensor.datatype):
        raise BackendError(
            f"output '{tensor.name}' is configured as {tensor.datatype}, the model returned {value.dtype}"
        )
    return value.contiguous()


# -- auto-complete


class _Zeros(NamedTuple):
    """An input for a trial."""

    datatype: str
    shape: tuple[int, ...]
    memory: bytes

    @property
    def pointer(self) -> int:
        import numpy as np

        return int(np.frombuffer(self.memory, np.uint8).ctypes.data)


def inspect_package(package: Package) -> Signature | None:
    """The signature of a package for the CPU: its own description of inputs, and outputs as two runs on zeros show
    them.

    None for a package that does not describe its inputs, or that only PyTorch's loader can run.
    """
    from backends.pytorch._shim import AotiError

    if package.inputs is None or package.obstacle or package.device != "cpu":
        return None
    with tempfile.TemporaryDirectory(prefix="inferd-aoti-") as folder:
        try:
            library = load_library(package.unpack(Path(folder)), "cpu", 1)
            small, large = (_trial(library, package.inputs, step) for step in (0, 1))
        except AotiError:
            return None
        del library
    outputs = [
        (datatype, tuple(a if a == b else -1 for a, b in zip(first, second, strict=True)))
        for (datatype, first), (_, second) in zip(small, large, strict=True)
    ]
    inputs = [(each.datatype, tuple(-1 if d.varies else d.lowest for d in each.dims)) for each in package.inputs]
    batches = all(dims[:1] == (-1,) for _, dims in (*inputs, *outputs))
    return Signature(_named("INPUT", inputs, batches), _named("OUTPUT", outputs, batches), batches)


def _named(prefix: str, tensors: Sequence[tuple[str, tuple[int, ...]]], batches: bool) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{prefix}__{index}", datatype, dims[1:] if batches else dims or (1,))
        for index, (datatype, dims) in enumerate(tensors)
    )


def _trial(library: Library, expected: Sequence[ExpectedInput], step: int) -> list[tuple[str, tuple[int, ...]]]:
    """Datatypes and shapes of the outputs where every variable dimension is `step` above its smallest good size."""
    smallest: dict[str, int] = {}
    for dim in (dim for each in expected for dim in each.dims if dim.symbol):
        least = -(-(dim.lowest - dim.offset) // dim.factor)
        smallest[dim.symbol] = max(smallest.get(dim.symbol, SMALLEST_VARIABLE), least)

    def size(dim: Dimension) -> int:
        if not dim.varies:
            return dim.lowest
        if not dim.symbol:
            return min(max(dim.lowest, SMALLEST_VARIABLE) + step, dim.highest)
        return dim.factor * (smallest[dim.symbol] + step) + dim.offset

    inputs = []
    for each in expected:
        shape = tuple(size(dim) for dim in each.dims)
        count = 8
        for length in shape:
            count *= length
        inputs.append(_Zeros(each.datatype, shape, bytes(count)))
    return [(result.datatype, result.shape) for result in library.run(inputs)]
