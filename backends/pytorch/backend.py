"""The PyTorch backend: TorchScript modules on CPU and GPU, one copy for each instance unless weights are shared.

Tensors go in and out without a copy through DLPack, and a module runs without the GIL. Models that were compiled ahead
of time are served by `inferd.backends.pytorch.inductor`.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inferd.backends.api import (
    Backend,
    BackendError,
    GpuInstance,
    Instance,
    InstanceSpec,
    Model,
    ModelSource,
    ModelSpec,
    RequestError,
    Signature,
    TensorSpec,
)
from inferd.backends.opening import import_framework
from inferd.backends.parameters import Parameters
from inferd.backends.pytorch import inductor, package_signature, runtime
from inferd.backends.pytorch.datatypes import torch_type
from inferd.backends.pytorch.forward import Forward
from inferd.backends.pytorch.gpu import TorchStream, check_cuda, check_no_text
from inferd.backends.pytorch.options import Options, read_options

if TYPE_CHECKING:
    import torch

    from inferd._native.execution.python_batch import Batch
    from inferd._native.execution.view import View
    from inferd._native.gpu.batch import GpuBatch

WARMUP_RUNS = 3
"""Calls before the server records a graph: TorchScript profiles the first ones, and then recompiles the module."""


class PyTorchBackend(Backend):
    """Serves `model.pt`, a TorchScript archive, and `model.pt2`, a package of AOTInductor's."""

    name = "pytorch"
    model_filename = "model.pt"
    runtimes = frozenset({runtime.RUNTIME})

    def inspect(self, source: ModelSource) -> Signature | None:
        """The signature of a compiled model for the CPU; a TorchScript archive records no datatypes or shapes."""
        if source.spec.platform != inductor.PLATFORM or source.spec.runtime == runtime.RUNTIME:
            return None
        return package_signature.inspect_package(inductor.open_package(source))

    def guess(self, source: ModelSource, known: Sequence[TensorSpec], *, whole: bool) -> Signature:
        """Find the inputs and outputs of a TorchScript archive by its operators, and by running it."""
        from inferd.backends.pytorch.guessing import guess

        return guess(source.spec.name, load_module(source), known, whole=whole)

    def load(self, source: ModelSource) -> Model:
        """Load the module once and check the configuration against it."""
        spec = source.spec
        if spec.runtime == runtime.RUNTIME:
            return runtime.load_module(source, self.config, self.services)
        if spec.platform == inductor.PLATFORM:
            options = read_options(Parameters(spec.parameters, f"model '{spec.name}'"))
            return inductor.InductorModel(source, options, inductor.open_package(source))
        for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
            if not tensors:
                raise BackendError(
                    f"model '{spec.name}': the configuration must contain at least one {kind}; "
                    f"a TorchScript file does not describe its {kind}s"
                )
        options = read_options(Parameters(spec.parameters, f"model '{spec.name}'"))
        module = load_module(source)
        return TorchModel(source, options, module, Forward(spec, module))


def load_module(source: ModelSource, device: str = "cpu") -> torch.jit.ScriptModule:
    """Read the model file; `device` is PyTorch's name of the module's device.

    Raises:
        BackendError: the file is missing, or is no TorchScript archive.
    """
    import_framework("torch")
    import torch

    path = source.model_file(PyTorchBackend.model_filename)
    if not path.is_file():
        raise source.not_found(path)
    try:
        # Deprecated upstream, still the format of the repositories that are served. The archive's reader is written
        # in C++ and makes no Python objects other than tensors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = torch.jit.load(str(path), map_location=device)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if "constants.pkl" in reason:
            reason = "it is what torch.save makes, such as a state_dict, which holds no program"
        raise BackendError(
            f"failed to load model '{source.spec.name}' from '{path}': {reason} (a TorchScript file is expected: save "
            "the result of torch.jit.script or torch.jit.trace with its save method)"
        ) from error
    return module.eval()


class TorchModel(Model):
    """One loaded version."""

    def __init__(self, source: ModelSource, options: Options, module: torch.jit.ScriptModule, forward: Forward) -> None:
        self.source = source
        self.options = options
        self.forward = forward
        # The first instance takes the module; the others load copies, unless weights are shared.
        self._module: torch.jit.ScriptModule | None = module
        self._lock = threading.Lock()  # instances are made on threads of their own, at the same time

        self._on_gpu: dict[int, torch.jit.ScriptModule] = {}  # shared weights, by device

    def create_instance(self, spec: InstanceSpec) -> Instance:
        """An instance with a module of its own, or with the one that is shared on its device."""
        if spec.kind == "GPU":
            check_cuda(spec)
            module = self._module_on_gpu(spec.device)
            return TorchGpuInstance(self.source.spec, self.options, module, self.forward, spec)
        if spec.kind not in ("CPU", "AUTO", "MODEL"):
            raise BackendError(
                f"instance '{spec.name}' is of KIND_{spec.kind}; this backend serves KIND_CPU and KIND_GPU"
            )
        return TorchInstance(self.source.spec, self.options, self._take_module(), self.forward)

    def _take_module(self) -> torch.jit.ScriptModule:
        with self._lock:
            module = self._module
            if not self.options.share_weights:
                self._module = None
        return load_module(self.source) if module is None else module

    def _module_on_gpu(self, device: int) -> torch.jit.ScriptModule:
        name = f"cuda:{device}"
        if not self.options.share_weights:
            return load_module(self.source, name)
        with self._lock:
            if device not in self._on_gpu:
                self._on_gpu[device] = load_module(self.source, name)
            return self._on_gpu[device]

    def close(self) -> None:
        """Drop the module."""
        self._module = None
        self._on_gpu.clear()


class Caller:
    """Calls a module with tensors, and checks what it returns."""

    def __init__(self, spec: ModelSpec, options: Options, module: torch.jit.ScriptModule, forward: Forward) -> None:
        import torch

        self.module = module
        self.forward = forward
        self.inputs = tuple((tensor.name, tensor.datatype == "BYTES") for tensor in spec.model_inputs)
        self.outputs = tuple(zip(spec.model_outputs, forward.output_positions, strict=True))
        self.batches = spec.max_batch_size > 0
        self.types = {
            tensor.datatype: torch_type(tensor.datatype) for tensor in spec.model_outputs if tensor.datatype != "BYTES"
        }
        self.no_gradients = torch.inference_mode if options.inference_mode else torch.no_grad
        self.optimized: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext if options.optimized_execution else lambda: torch.jit.optimized_execution(False)
        )
        self.kept = KeptTensors(module)

    def call(self, values: list[Any]) -> Sequence[Any]:
        """forward()'s result for the inputs, which are in configured order, as a sequence."""
        arguments, keywords = self.forward.bind([self.kept.apart_from(value) for value in values])
        with self.no_gradients(), self.optimized():
            try:
                result = self.module.forward(*arguments, **keywords)
            except Exception as error:  # torch raises RuntimeError, and the script any exception
                raise BackendError(f"PyTorch execute failure: {summary(error)}") from error
        return self.forward.elements(result)

    def checked(self, tensor: TensorSpec, value: Any) -> torch.Tensor:
        """An output that is not BYTES: contiguous, and without other owners.

        Raises:
            BackendError: its type or datatype is not the configured one.
        """
        import torch

        if not isinstance(value, torch.Tensor):
            raise BackendError(
                f"output '{tensor.name}' must be of type Tensor or List[str], forward() returned {type(value).__name__}"
            )
        if value.dtype != self.types[tensor.datatype]:
            raise BackendError(
                f"output '{tensor.name}' is configured as {tensor.datatype}, forward() returned {value.dtype}"
            )
        return self.kept.apart(value.detach().contiguous())


class TorchInstance(Caller, Instance):
    """Calls a module with the tensors of a batch, in the host's memory."""

    isolates_failures = True

    def execute(self, batch: Batch) -> None:
        """Call forward() once for the whole batch."""
        elements = self.call([self._input(batch.input(name), name, text) for name, text in self.inputs])
        for tensor, position in self.outputs:
            if batch.wants(tensor.name):
                self._set_output(batch, tensor, elements[position])

    def _input(self, view: View | None, name: str, text: bool) -> Any:
        import torch

        if view is None:
            return None
        if text:
            return decode_strings(name, view)
        return torch.from_dlpack(view)

    def _set_output(self, batch: Batch, tensor: TensorSpec, value: Any) -> None:
        if tensor.datatype == "BYTES":
            self._set_strings(batch, tensor, value)
        else:
            batch.set_output(tensor.name, self.checked(tensor, value))

    def _set_strings(self, batch: Batch, tensor: TensorSpec, value: Any) -> None:
        if not is_strings(value):
            raise BackendError(
                f"output '{tensor.name}' must be of type Tensor or List[str], and is configured as BYTES, "
                f"so List[str] is expected; forward() returned {type(value).__name__}"
            )
        rank = len(tensor.dims) + self.batches
        batch.set_bytes_output(tensor.name, value, (len(value),) + (1,) * (rank - 1))


class TorchGpuInstance(Caller, GpuInstance):
    """Calls a module with the tensors of a batch on a GPU, on the stream of the instance. Nothing here waits for it."""

    def __init__(
        self,
        spec: ModelSpec,
        options: Options,
        module: torch.jit.ScriptModule,
        forward: Forward,
        instance: InstanceSpec,
    ) -> None:
        check_no_text(spec, instance)
        super().__init__(spec, options, module, forward)
        self._torch = TorchStream(spec, instance)
        self.stream = self._torch.stream
        self._cleans = options.clean_cache

    def submit(self, batch: GpuBatch) -> None:
        """Call forward() once for the whole batch."""
        import torch

        if batch.capturing and self.kept.anything:
            raise BackendError("forward() keeps tensors in attributes, which no CUDA graph can follow")
        with self._torch.current(batch.capturing):
            given = [batch.input(name) for name, _ in self.inputs]
            values = [None if value is None else torch.from_dlpack(value) for value in given]
            if batch.capturing and not self._torch.is_recording():
                for _ in range(WARMUP_RUNS):
                    self.call(values)
            elements = self.call(values)
            for tensor, position in self.outputs:
                if batch.wants(tensor.name):
                    batch.set_output(tensor.name, self.checked(tensor, elements[position]))
        if self._cleans and not batch.capturing:
            torch.cuda.empty_cache()


CONTAINER = re.compile(r"^ *%\S+ : (?!Tensor = )[^=\n]*\bTensor\b[^=\n]*= prim::GetAttr", re.MULTILINE)
"""Matches, in the text of a graph, the reading of an attribute that holds tensors in a container."""


class KeptTensors:
    """The tensors that a module keeps from one call to the next.

    The instance copies an output that the module keeps, since the next call may change it while the response is sent.
    It also copies an input that the module may keep, since the next batch uses the memory of inputs.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        self._storages = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())
        graph = str(module.inlined_graph)
        # A method that assigns attributes, or reads a container of tensors, may keep any tensor.
        self.anything = "prim::SetAttr" in graph or CONTAINER.search(graph) is not None

    def apart_from(self, value: Any) -> Any:
        """The value of an input itself, or a copy if the module may keep it."""
        import torch

        return value.clone() if self.anything and isinstance(value, torch.Tensor) else value

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or a copy if the module keeps its memory."""
        if self.anything or tensor.untyped_storage().data_ptr() in self._storages:
            return tensor.clone()
        return tensor


def decode_strings(name: str, view: View) -> list[str]:
    """The elements of a BYTES tensor as TorchScript's List[str], which is UTF-8.

    Raises:
        RequestError: an element is not UTF-8.
    """
    try:
        return [element.decode() for element in view.strings()]
    except UnicodeDecodeError as error:
        raise RequestError(f"input '{name}' has an element that is not UTF-8 text: {error}") from None


def is_strings(value: Any) -> bool:
    """Whether this is a List[str]; an empty list of anything counts."""
    return isinstance(value, list) and all(isinstance(element, str) for element in value)


def summary(error: Exception) -> str:
    """The last line of a TorchScript error; the lines before quote the model's source and its place."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
