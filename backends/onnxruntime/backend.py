"""The ONNX Runtime backend: on the CPU one session a model version, shared by its instances; on a GPU one each.

A session may run in several threads at once, so instances of a version share its weights, its arena and its threads:
four instances need no more memory than one, and their operators do not fight over the CPUs.

Tensors go in and out without a copy: numpy arrays over the batch's memory are fed as they are, and outputs, which ONNX
Runtime allocates from its arena, are handed over as arrays that return the memory when they are dropped. A plain run
costs less than IO binding (measured with one FP32 tensor in and out: 4.4 µs a run; 7.7 µs with a new binding; 5.0 µs
with the binding of the last run, which would overwrite the outputs handed over). So the backend binds only BF16
tensors, for which numpy has no type, and outputs that the session can write where the client wants them, in its shared
memory.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inferd.backends.api import (
    Backend,
    BackendError,
    Instance,
    InstanceSpec,
    Model,
    ModelSource,
    RequestError,
    Signature,
    TensorSpec,
)
from inferd.backends.onnxruntime import accelerated, options
from inferd.backends.onnxruntime.gpu import OnnxGpuInstance
from inferd.backends.onnxruntime.providers import CPU_ACCELERATORS, GPU_ACCELERATORS, check_active, cpu_providers
from inferd.backends.onnxruntime.session import MODEL_FILE, Shape, known_shapes, open_session
from inferd.backends.onnxruntime.signature import DATATYPES, ELEMENT_BF16, check, dims_of, is_batching
from inferd.backends.opening import import_framework
from inferd.backends.openvino.reading import make_core
from inferd.backends.parameters import Parameters

if TYPE_CHECKING:
    import onnxruntime
    import openvino

    from inferd._native.execution.python_batch import Batch
    from inferd._native.execution.view import View
    from inferd.backends.openvino.backend import OpenVinoModel


class OnnxRuntimeBackend(Backend):
    """Serves `model.onnx`, a file or a folder that holds a file of that name and its external data."""

    name = "onnxruntime"
    model_filename = MODEL_FILE
    gpu_accelerators = GPU_ACCELERATORS
    cpu_accelerators = CPU_ACCELERATORS
    _openvino: openvino.Core | None = None
    _lock = threading.Lock()

    def inspect(self, source: ModelSource) -> Signature:
        """Names, datatypes and shapes, as far as the model file fixes them.

        A scalar is described as dims [1]. Inputs that have a value in the model (overridable initialisers) are left
        out: older exporters list every weight there. A configuration may name them, as optional inputs.
        """
        import_framework("onnxruntime")
        # Without optimisation: the signature is the same, and `load` opens the model again.
        session = open_session(source, options.for_inspection(self._config_parameters()))
        batches = is_batching([*session.get_inputs(), *session.get_outputs()])
        return Signature(
            inputs=tuple(_spec(node, batches, source) for node in session.get_inputs()),
            outputs=tuple(_spec(node, batches, source) for node in session.get_outputs()),
            batches=batches,
        )

    def load(self, source: ModelSource) -> OnnxModel:
        """Open the session and check the configuration against it."""
        import_framework("onnxruntime")
        spec = source.spec
        parameters = Parameters(spec.parameters, f"model '{spec.name}'")
        parameters.warn_unknown(options.KNOWN | {key for key in spec.parameters if key.startswith("session.")})
        config = self._config_parameters()
        session = open_session(source, options.for_inspection(config))
        check(spec, session)
        on_cpu = any(instance.kind != "GPU" for instance in spec.instances)
        model = OnnxModel(source, session, config)
        del session
        if on_cpu and spec.cpu_accelerators and accelerated.is_needed():
            model.accelerated = accelerated.accelerate(source, self._openvino_runtime(), MODEL_FILE)
        elif on_cpu:
            _ = model.session  # opened now, so that an error fails the load
        return model

    def _openvino_runtime(self) -> openvino.Core:
        with self._lock:
            if self._openvino is None:
                self._openvino = make_core()
            return self._openvino

    def _config_parameters(self) -> Parameters:
        return Parameters(self.config, f"backend '{self.name}'")


def _spec(node: onnxruntime.NodeArg, batches: bool, source: ModelSource) -> TensorSpec:
    try:
        datatype = DATATYPES[node.type]
    except KeyError:
        raise BackendError(f"model '{source.spec.name}': unsupported datatype {node.type} of '{node.name}'") from None
    dims = dims_of(node)
    return TensorSpec(node.name, datatype, dims[1:] if batches else dims or (1,))


class OnnxModel(Model):
    """One loaded version: the session of its instances on the CPU, and how to run it.

    Args:
        source: the model.
        session: any session of the model, to read its signature.
        config: of the backend.
    """

    any_thread = True

    def __init__(self, source: ModelSource, session: onnxruntime.InferenceSession, config: Parameters) -> None:
        self.source = source
        self.spec = source.spec
        self.config = config
        self.parameters = Parameters(self.spec.parameters, f"model '{self.spec.name}'")
        self.run_config = options.run_config(self.parameters)
        nodes = [*session.get_inputs(), *session.get_outputs()]
        scalar = {node.name for node in nodes if not node.shape}
        # Configured as [1] because a configuration cannot say "no dimensions".
        self.scalars = frozenset(
            tensor.name
            for tensor in (*self.spec.model_inputs, *self.spec.model_outputs)
            if tensor.name in scalar and tensor.dims == (1,) and not self.spec.max_batch_size
        )
        self.placeable = self._placeable(session)
        self.accelerated: OpenVinoModel | None = None  # OpenVINO's model, if that executes it on the CPU instead
        self._session: onnxruntime.InferenceSession | None = None
        self._lock = threading.Lock()  # instances are made on threads of their own, at the same time

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The session that all instances on the CPU run; opened at the first access.

        Raises:
            BackendError: the session cannot be opened, or not with the configured accelerators.
        """
        with self._lock:
            if self._session is None:
                providers = cpu_providers(self.spec, from_client=self.source.from_client)
                settings = options.for_model(
                    self.spec, self.parameters, self.config, from_client=self.source.from_client
                )
                self._session = open_session(self.source, settings, providers)
                check_active(self._session, providers, f"model '{self.spec.name}'")
            return self._session

    def _placeable(self, session: onnxruntime.InferenceSession) -> dict[str, Shape]:
        """Outputs that the session can write to memory that the server chooses, and their shapes."""
        tensors = (*self.spec.model_inputs, *self.spec.model_outputs)
        if any(tensor.datatype in ("BYTES", "BF16") for tensor in tensors):
            return {}
        shapes = known_shapes(session, self.spec)
        return {tensor.name: shapes[tensor.name] for tensor in self.spec.model_outputs if tensor.name in shapes}

    def place_fixed(self) -> None:
        """From now on place only outputs of fixed shapes, because names of dimensions were wrong."""
        self.placeable = {
            name: shape for name, shape in self.placeable.items() if all(isinstance(dim, int) for dim in shape)
        }

    def close(self) -> None:
        """See Model."""
        if self.accelerated is not None:
            self.accelerated.close()

    def create_instance(self, spec: InstanceSpec) -> Instance:
        """An instance that runs the shared session; on a GPU, one with a session of its own."""
        if spec.kind == "GPU":
            return OnnxGpuInstance(self.source, self.scalars, self.parameters, self.config, spec)
        if spec.kind not in ("CPU", "AUTO"):
            raise BackendError(
                f"instance '{spec.name}' is of KIND_{spec.kind}; this backend serves KIND_CPU and KIND_GPU"
            )
        if self.accelerated is not None:
            return self.accelerated.create_instance(spec)
        tensors = (*self.spec.model_inputs, *self.spec.model_outputs)
        if any(tensor.datatype == "BF16" for tensor in tensors):
            return BoundInstance(self)
        return PlainInstance(self)


class OnnxInstance(Instance):
    """The common part of PlainInstance and BoundInstance: chooses inputs and outputs, and reports errors."""

    stoppable = True
    writes_inputs = False
    isolates_failures = True

    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.session = model.session
        self.inputs = tuple(
            (tensor.name, tensor.datatype, tensor.name in model.scalars) for tensor in model.spec.model_inputs
        )
        self.outputs = {tensor.name: tensor for tensor in model.spec.model_outputs}
        self.scalars = model.scalars
        self.run_options = options.run_options(model.run_config)

    def execute(self, batch: Batch) -> None:
        """Run the session once for the whole batch."""
        feed = {}
        for name, datatype, scalar in self.inputs:
            view = batch.input(name)
            if view is not None:  # an absent optional input takes the value that the model has for it
                array = text_array(name, view) if datatype == "BYTES" else view.numpy()
                feed[name] = array.reshape(()) if scalar else array
        wanted = [name for name in self.outputs if batch.wants(name)]
        places = self._places(batch, feed) if batch.placed else {}
        try:
            results = self.run_into(places, wanted, feed) if places else self.run(wanted, feed)
        except Exception as error:  # the runtime's errors share no base class of their own
            raise BackendError(f"onnx runtime error: {error}") from error
        for name, array in zip(wanted, results, strict=True):
            if name in self.scalars:
                array = array.reshape(1)
            if self.outputs[name].datatype == "BYTES":
                batch.set_bytes_output(name, array.reshape(-1), array.shape)
            else:
                batch.set_output(name, array)

    def _places(self, batch: Batch, feed: Mapping[str, Any]) -> dict[str, Any]:
        places = {}
        rows = [batch.rows] if self.model.spec.max_batch_size else []
        for name, dims in self.model.placeable.items():
            try:
                shape = [dim if isinstance(dim, int) else feed[dim[0]].shape[dim[1]] for dim in dims]
            except KeyError:  # of an optional input that is absent
                continue
            place = batch.place(name, rows + shape)
            if place is not None:
                places[name] = place.numpy()
        return places

    def stop(self) -> None:
        """End the run before its next operator, even inside a Loop, Scan or If."""
        self.run_options.terminate = True

    def resume(self) -> None:
        """See Instance."""
        self.run_options.terminate = False

    def run_into(self, places: Mapping[str, Any], wanted: list[str], feed: dict[str, Any]) -> list[Any]:
        """As `run`, but write outputs to their places.

        ONNX Runtime refuses a place whose shape is not that of the output. So a failed run is repeated without places.
        """
        try:
            return self._run_bound(places, wanted, feed)
        except Exception:
            results = self.run(wanted, feed)
            self.model.place_fixed()
            return results

    def _run_bound(self, places: Mapping[str, Any], wanted: list[str], feed: dict[str, Any]) -> list[Any]:
        binding = self.session.io_binding()
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        for name in wanted:
            place = places.get(name)
            if place is None:
                binding.bind_output(name)
            else:
                binding.bind_output(name, "cpu", 0, place.dtype, place.shape, place.ctypes.data)
        self.session.run_with_iobinding(binding, self.run_options)
        values = zip(wanted, binding.get_outputs(), strict=True)
        return [places[name] if name in places else value.numpy() for name, value in values]

    @abc.abstractmethod
    def run(self, wanted: list[str], feed: dict[str, Any]) -> list[Any]:
        """Arrays of the wanted outputs, in that order."""


class PlainInstance(OnnxInstance):
    """Runs with numpy arrays in and out."""

    def run(self, wanted: list[str], feed: dict[str, Any]) -> list[Any]:
        """See OnnxInstance."""
        results: list[Any] = self.session.run(wanted, feed, self.run_options)
        return results


class BoundInstance(OnnxInstance):
    """Runs through IO binding, which takes any element type."""

    def run(self, wanted: list[str], feed: dict[str, Any]) -> list[Any]:
        """See OnnxInstance."""
        binding = self.session.io_binding()
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, wrap_array(array))
        for name in wanted:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding, self.run_options)
        return [unwrap_value(value) for value in binding.get_outputs()]


def text_array(name: str, view: View) -> Any:
    """An object array of str from a BYTES tensor; ONNX strings are UTF-8.

    Raises:
        RequestError: an element is not UTF-8.
    """
    import numpy as np

    try:
        texts = [element.decode() for element in view.strings()]
    except UnicodeDecodeError as error:
        raise RequestError(f"input '{name}' has an element that is not UTF-8 text: {error}") from None
    return np.array(texts, dtype=object).reshape(view.shape)


def wrap_array(array: Any) -> onnxruntime.OrtValue:
    """A value over the array's memory."""
    import onnxruntime

    if array.dtype.name == "bfloat16":
        import numpy as np

        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ELEMENT_BF16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def unwrap_value(value: onnxruntime.OrtValue) -> Any:
    """An array over the value's memory, which it keeps alive."""
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    import ml_dtypes
    import numpy as np

    return np.asarray(_Bf16Memory(value)).view(ml_dtypes.bfloat16)


class _Bf16Memory:
    """Lends numpy the memory of a BF16 value as UINT16, since numpy has no type for BF16."""

    def __init__(self, value: onnxruntime.OrtValue) -> None:
        self.value = value
        self.__array_interface__ = {
            "data": (value.data_ptr(), False),
            "shape": tuple(value.shape()),
            "typestr": "<u2",
            "version": 3,
        }
