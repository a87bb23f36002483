"""The PyTorch backend: TorchScript modules on CPU and GPU, one copy an instance unless weights are shared.

Tensors go in and out without a copy through DLPack, and a module runs without the GIL.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from _native.cuda.device import device
from backends.api import (
    Backend,
    BackendError,
    GpuInstance,
    Instance,
    InstanceSpec,
    Model,
    ModelSource,
    ModelSpec,
    TensorSpec,
)
from backends.parameters import Parameters
from backends.pytorch.forward import Forward
from backends.pytorch.options import Options, read_options

if TYPE_CHECKING:
    import torch

    from _native.batch import Batch
    from _native.cuda.batch import GpuBatch
    from _native.view import View

TORCH_TYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
}


class PyTorchBackend(Backend):
    """Serves `model.pt`, a TorchScript archive. It records no datatypes or shapes, so nothing can be inspected."""

    name = "pytorch"
    model_filename = "model.pt"

    def load(self, source: ModelSource) -> TorchModel:
        """Load the module once and check the configuration against forward()."""
        spec = source.spec
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
    """Read the model file; `device` is PyTorch's name of where the module shall be.

    Raises:
        BackendError: there is none, or it is not a TorchScript archive.
    """
    import torch

    path = source.model_file(PyTorchBackend.model_filename)
    if not path.is_file():
        raise BackendError(f"unable to find '{path}' for model '{source.spec.name}'")
    try:
        # Deprecated upstream, still the format of the repositories that are served. The archive's reader is written
        # in C++ and makes no Python objects other than tensors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = torch.jit.load(str(path), map_location=device)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
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
        # The first instance takes it; the others load copies of their own, unless weights are shared.
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
        self.types = {name: getattr(torch, attribute) for name, attribute in TORCH_TYPES.items()}
        self.no_gradients = torch.inference_mode if options.inference_mode else torch.no_grad
        self.optimized: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext if options.optimized_execution else lambda: torch.jit.optimized_execution(False)
        )
        self.kept = KeptTensors(module)

    def call(self, values: list[Any]) -> Sequence[Any]:
        """What forward() returns for the inputs, in configured order, as a sequence."""
        arguments, keywords = self.forward.bind(values)
        with self.no_gradients(), self.optimized():
            try:
                result = self.module.forward(*arguments, **keywords)
            except Exception as error:  # torch raises RuntimeError, and whatever the script itself raises
                raise BackendError(f"PyTorch execute failure: {summary(error)}") from error
        return self.forward.elements(result)

    def checked(self, tensor: TensorSpec, value: Any) -> torch.Tensor:
        """An output that is not BYTES, contiguous and nobody else's.

        Raises:
            BackendError: it is something else than the configuration says.
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
        import torch

        for tensor in (*spec.model_inputs, *spec.model_outputs):
            if tensor.datatype == "BYTES":
                raise BackendError(f"instance '{instance.name}': '{tensor.name}' is BYTES, which no GPU takes")
        super().__init__(spec, options, module, forward)
        gpu = device(instance.device)
        self.stream = gpu.stream(gpu.priority(spec.gpu.priority))
        self._stream = torch.cuda.ExternalStream(self.stream.handle, device=f"cuda:{instance.device}")
        self._cleans = options.clean_cache

    def submit(self, batch: GpuBatch) -> None:
        """Call forward() once for the whole batch."""
        import torch

        with torch.cuda.stream(self._stream):
            values = [batch.input(name) for name, _ in self.inputs]
            elements = self.call([None if value is None else torch.from_dlpack(value) for value in values])
            for tensor, position in self.outputs:
                if batch.wants(tensor.name):
                    batch.set_output(tensor.name, self.checked(tensor, elements[position]))
        if self._cleans and not batch.capturing:
            torch.cuda.empty_cache()


def check_cuda(spec: InstanceSpec) -> None:
    """Whether PyTorch can use the device.

    Raises:
        BackendError: it cannot; the text says why.
    """
    import torch

    if torch.version.cuda is None:
        raise BackendError(
            f"instance '{spec.name}' is of KIND_GPU, but the installed PyTorch {torch.__version__} is built for the "
            "CPU: install a build for CUDA, or write kind: KIND_CPU"
        )
    if not torch.cuda.is_available():
        raise BackendError(
            f"instance '{spec.name}' is of KIND_GPU, but PyTorch {torch.__version__}, which is built for CUDA "
            f"{torch.version.cuda}, finds no device"
        )


class KeptTensors:
    """The tensors that a module keeps from one call to the next.

    One that is returned must be copied: it is read while the answer is sent, when the next call may change it.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        self._storages = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())
        # A method that assigns attributes may keep any tensor.
        self._assigns = "prim::SetAttr" in str(module.inlined_graph)

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or a copy if the module keeps its memory."""
        if self._assigns or tensor.untyped_storage().data_ptr() in self._storages:
            return tensor.clone()
        return tensor


def decode_strings(name: str, view: View) -> list[str]:
    """The elements of a BYTES tensor as TorchScript's List[str], which is UTF-8.

    Raises:
        BackendError: an element is not UTF-8.
    """
    try:
        return [element.decode() for element in view.strings()]
    except UnicodeDecodeError as error:
        raise BackendError(f"input '{name}' has an element that is not UTF-8 text: {error}") from None


def is_strings(value: Any) -> bool:
    """Whether this is a List[str]; an empty list of anything counts."""
    return isinstance(value, list) and all(isinstance(element, str) for element in value)


def summary(error: Exception) -> str:
    """The last line of a TorchScript error; the lines before quote the model's source and where it was written."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
