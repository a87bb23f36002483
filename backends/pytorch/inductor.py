"""Models compiled by AOTInductor: `model.pt2`, platform `torch_aoti`, on CPU and GPU.

The library in the package is called through its C ABI (`_aoti`), on the CPU from a thread that never takes the GIL.
PyTorch's own loader holds the GIL for as long as the model computes; it is used for packages that need more than the
ABI.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from inferd.backends.api import (
    BackendError,
    GpuInstance,
    Instance,
    InstanceSpec,
    Model,
    ModelSource,
    NativeInstance,
    TensorSpec,
)
from inferd.backends.opening import import_framework
from inferd.backends.pytorch.call_order import CallOrder
from inferd.backends.pytorch.datatypes import torch_type
from inferd.backends.pytorch.gpu import TorchStream, check_capability, check_cuda, check_no_text
from inferd.backends.pytorch.options import Options
from inferd.backends.pytorch.package import Package, read_package
from inferd.backends.temporary import TemporaryFolder

if TYPE_CHECKING:
    import torch

    from inferd._native.execution.python_batch import Batch
    from inferd._native.gpu.batch import GpuBatch
    from inferd.backends.pytorch._aoti import Library

log = logging.getLogger("inferd.backends")

PLATFORM = "torch_aoti"
MODEL_FILE = "model.pt2"
BATCHES_ON_GPU = 3  # batches submitted and not done at a time, see inferd._native.gpu.instance

Call: TypeAlias = Callable[[list[Any], bool], Sequence[Any]]
"""Runs a model on a GPU. Takes the inputs in the model's order, and whether the work is recorded; returns the outputs.
Inputs and outputs have `__dlpack__`."""


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


class InductorModel(Model):
    """One loaded version.

    Raises:
        BackendError: the configuration does not fit, or an index out of range would end the server.
    """

    def __init__(self, source: ModelSource, options: Options, package: Package) -> None:
        if package.fatal_checks and package.device == "cpu" and not options.fatal_checks:
            raise BackendError(
                f"'{package.path}' checks indices in loops of several threads, where a request with an index out of "
                "range would end the server: compile it with torch._inductor.config.cpp.threads = 1, or set the "
                "parameter ALLOW_FATAL_CHECKS to true if no client can send such an index"
            )
        self.spec = source.spec
        self.options = options
        self.package = package
        self.order = CallOrder(source.spec, package)
        self._folder = TemporaryFolder("aoti")  # outlives the libraries loaded from it
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
        """The library for a device; None if only PyTorch's loader can run it, which is then logged."""
        from inferd.backends.pytorch._shim import AotiError

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
                self._path = self.package.unpack(self._folder.path)
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

    from inferd.backends.pytorch._aoti import Library

    own = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return Library(str(path), str(own), device, str(path.parent), copies)


class InductorInstance(NativeInstance):
    """Calls the library on the CPU, without Python."""

    isolates_failures = True

    def __init__(self, order: CallOrder, library: Library) -> None:
        results = order.output_indexes(library.output_count)
        made = library.executor(order.input_indexes(), results, order.package.inputs)
        self._executor = made  # the capsule points to it
        self.executor = made.capsule


class LoadedInstance(Instance):
    """Calls a package on the CPU through PyTorch's loader."""

    isolates_failures = True

    def __init__(self, model: InductorModel) -> None:
        self.order = model.order
        self.inputs = [model.spec.model_inputs[index] for index in model.order.input_indexes()]
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
        self.inputs = [model.spec.model_inputs[index].name for index in model.order.input_indexes()]
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
                raise BackendError(f"PyTorch execute failure: {first_line(error)}") from error
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
        raise BackendError(f"PyTorch execute failure: {first_line(error)}") from error
    return results


def first_line(error: Exception) -> str:
    """The first line of an error of PyTorch's; C++ frames follow."""
    return str(error).partition("\n")[0]


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
