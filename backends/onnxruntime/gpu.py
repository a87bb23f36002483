"""Sessions on a GPU: inputs and outputs bound where they lie on the device, and all work on the instance's stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from inferd._native.cuda.device import device
from inferd.backends.api import BackendError, GpuInstance, InstanceSpec, ModelSource, TensorSpec
from inferd.backends.onnxruntime import options
from inferd.backends.onnxruntime.providers import TENSORRT, Provider, check_active, gpu_providers
from inferd.backends.onnxruntime.session import engine_cache, fixed_outputs, open_session
from inferd.backends.parameters import Parameters

if TYPE_CHECKING:
    import onnxruntime

    from inferd._native.gpu.batch import GpuBatch

log = logging.getLogger("inferd.onnxruntime")

ELEMENTS: Mapping[str, int] = MappingProxyType(
    {
        "FP32": 1,
        "UINT8": 2,
        "INT8": 3,
        "UINT16": 4,
        "INT16": 5,
        "INT32": 6,
        "INT64": 7,
        "BOOL": 9,
        "FP16": 10,
        "FP64": 11,
        "UINT32": 12,
        "UINT64": 13,
        "BF16": 16,
    }
)
"""onnx.TensorProto.DataType of v2 datatypes."""

NO_WAITING = "disable_synchronize_execution_providers"
"""Entry of a run's configuration: the run returns when its work is submitted, not when it is done."""


class OnnxGpuInstance(GpuInstance):
    """Runs a session of its own, because a session works on one stream. It never waits for the device.

    Operators that CUDA's provider does not have run on the CPU, and ONNX Runtime waits for their inputs.

    Args:
        source: the model.
        scalars: names of tensors that have no dimensions in the model and one in the configuration.
        parameters: of the model.
        config: of the backend.
        instance: where it is.
    """

    writes_inputs = False

    def __init__(
        self,
        source: ModelSource,
        scalars: frozenset[str],
        parameters: Parameters,
        config: Parameters,
        instance: InstanceSpec,
    ) -> None:
        spec = source.spec
        for tensor in (*spec.model_inputs, *spec.model_outputs):
            if tensor.datatype == "BYTES":
                raise BackendError(f"instance '{instance.name}': '{tensor.name}' is BYTES, which no GPU takes")
        if spec.gpu.graphs:
            raise BackendError(
                f"instance '{instance.name}': ONNX Runtime's work is not captured in CUDA graphs: remove "
                "optimization.cuda.graphs"
            )
        gpu = device(instance.device)
        self.stream = gpu.stream(gpu.priority(spec.gpu.priority))
        providers = gpu_providers(
            spec,
            parameters,
            instance,
            self.stream.handle,
            from_client=source.from_client,
            cache=lambda: engine_cache(source),
        )
        settings = options.for_model(spec, parameters, config, from_client=source.from_client)
        self.session = self._open(source, settings, providers, instance)
        self.device = instance.device
        self.inputs = tuple((tensor.name, ELEMENTS[tensor.datatype]) for tensor in spec.model_inputs)
        self.outputs = spec.model_outputs
        self.batches = spec.max_batch_size > 0
        self.scalars = scalars
        self.fixed = fixed_outputs(self.session, spec)
        self.run_options = options.run_options({**options.run_config(parameters), NO_WAITING: "1"})

    @staticmethod
    def _open(
        source: ModelSource, settings: onnxruntime.SessionOptions, providers: list[Provider], instance: InstanceSpec
    ) -> onnxruntime.InferenceSession:
        builds = any(name == TENSORRT for name, _ in providers)
        begun = time.monotonic()
        if builds:
            log.info(
                "instance '%s': TensorRT builds the engines of fixed shapes, which may take minutes", instance.name
            )
        session = open_session(source, settings, providers)
        check_active(session, providers, f"instance '{instance.name}'")
        if builds:
            log.info("instance '%s': its session is open after %.1f s", instance.name, time.monotonic() - begun)
            if not source.spec.warmup and _varies(session):
                log.warning(
                    "model '%s' has no model_warmup: its first requests wait while TensorRT builds engines for their "
                    "shapes; with model_warmup the model is not ready before that is done",
                    source.spec.name,
                )
        return session

    def submit(self, batch: GpuBatch) -> None:
        """Run the session once for the whole batch."""
        binding = self.session.io_binding()
        for name, element in self.inputs:
            given = batch.input(name)
            if given is not None:  # an absent optional input takes the value that the model has for it
                shape = [] if name in self.scalars else list(given.shape)
                binding.bind_input(name, "cuda", self.device, element, shape, given.pointer)
        wanted = [tensor for tensor in self.outputs if batch.wants(tensor.name)]
        for tensor in wanted:
            self._bind(batch, binding, tensor)
        try:
            self.session.run_with_iobinding(binding, self.run_options)
        except Exception as error:  # the runtime's errors share no base class of their own
            raise BackendError(f"onnx runtime error: {error}") from error
        values = dict(zip((tensor.name for tensor in wanted), binding.get_outputs(), strict=True))
        for tensor in wanted:
            if tensor.name not in self.fixed:
                self._take(batch, tensor.name, values[tensor.name])
        batch.hold(binding)  # it owns the memory that the work reads and writes

    def _bind(self, batch: GpuBatch, binding: onnxruntime.IOBinding, tensor: TensorSpec) -> None:
        """Bind an output to the batch's memory if its shape is known, else to memory that the runtime allocates."""
        if tensor.name not in self.fixed:
            binding.bind_output(tensor.name, "cuda", self.device)
            return
        shape = [batch.rows, *tensor.dims] if self.batches else list(tensor.dims)
        target = batch.output(tensor.name, shape)
        binding.bind_output(tensor.name, "cuda", self.device, ELEMENTS[tensor.datatype], shape, target.pointer)

    def _take(self, batch: GpuBatch, name: str, value: onnxruntime.OrtValue) -> None:
        shape = [1] if name in self.scalars else value.shape()
        target = batch.output(name, shape)
        if prod(shape):
            self.stream.copy_on_device(target.pointer, value.data_ptr(), target.size)
        batch.hold(value)


def _varies(session: onnxruntime.InferenceSession) -> bool:
    """Whether an input has a shape that each request determines."""
    return any(not isinstance(size, int) or size < 0 for node in session.get_inputs() for size in node.shape)
