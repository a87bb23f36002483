"""The TensorRT backend: reads a plan once for each GPU; each instance executes it in contexts of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from inferd._native.cuda.device import Device, device
from inferd.backends.api import (
    Backend,
    BackendError,
    EngineSpec,
    GpuInstance,
    InstanceSpec,
    Model,
    ModelSource,
    Signature,
)
from inferd.backends.tensorrt.build import build_plan
from inferd.backends.tensorrt.check import check, check_instance
from inferd.backends.tensorrt.instance import TensorRTInstance
from inferd.backends.tensorrt.library import AUTO, Library, open_library
from inferd.backends.tensorrt.options import RUNTIME, Budget, Options, plugins_of, read_options
from inferd.backends.tensorrt.plan import Plan, gpu_for_plans, read_plan
from inferd.backends.tensorrt.progress import Tell

log = logging.getLogger("inferd.tensorrt")

ONNX = ".onnx"
"""The suffix of a model file that the backend builds a plan from."""
TOLD_PERCENT = 10
"""How much further a build comes from one log line to the next, in percent."""


class TensorRTBackend(Backend):
    """Serves `model.plan`, built by TensorRT or `inferd build-engine`, or an ONNX model for which it builds one."""

    name = "tensorrt"
    model_filename = "model.plan"

    def __init__(self, config: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(config)
        self._plugins: set[str] = set()
        self._lock = threading.Lock()

    def inspect(self, source: ModelSource) -> Signature:
        """Names, datatypes, shapes and the largest batch, from the plan read on the model's first GPU."""
        options = read_options(source.spec, self.config)
        gpus = [instance.device for instance in source.spec.instances if instance.kind == "GPU"]
        profiles = {index for instance in source.spec.instances for index in instance.profiles}
        plan = PlanReader(source, options, self._library(options.runtime)).read(gpus[0] if gpus else 0)
        wrong = sorted(index for index in profiles if index >= len(plan.profiles))
        if wrong:
            raise BackendError(
                f"unable to autofill for '{source.spec.name}', configuration specified invalid profile {wrong[0]}. "
                f"Number of profiles supported by TensorRT engine: {len(plan.profiles)}"
            )
        return plan.signature(profiles or {0})

    def load(self, source: ModelSource) -> TensorRTModel:
        """Read the plan for the GPU of the first instance; instances on other GPUs read it for these."""
        spec = source.spec
        file = source.model_file(self.model_filename)
        if not spec.model_filenames and not file.is_file():
            raise source.not_found(file)  # this check needs no GPU
        for instance in spec.instances:
            if instance.kind != "GPU":
                gpu_for_plans(0, f"model '{spec.name}'")  # reports a missing GPU first
                raise BackendError(
                    f"instance '{instance.name}' of model '{spec.name}' is of KIND_{instance.kind}; plans of TensorRT "
                    "run on GPUs"
                )
        options = read_options(spec, self.config)
        model = TensorRTModel(source, options, self._library(options.runtime))
        model.plan(spec.instances[0].device)
        return model

    def build(self, spec: EngineSpec, tell: Tell) -> Path:
        """A plan for an ONNX model; see `inferd.backends.tensorrt.build`."""
        runtime = spec.runtime or self.config.get(RUNTIME, AUTO)
        return build_plan(self._library(runtime, builds=True), spec, tell)

    def _library(self, runtime: str, *, builds: bool = False) -> Library:
        library = open_library(runtime, builds=builds)
        with self._lock:
            if library.name not in self._plugins:
                library.load_plugins(plugins_of(self.config))
                self._plugins.add(library.name)
        return library


class PlanReader:
    """Reads the plan of a version for a GPU; for an ONNX model, it builds the plan first."""

    def __init__(self, source: ModelSource, options: Options, library: Library) -> None:
        self.source = source
        self.options = options
        self.library = library

    def read(self, ordinal: int) -> Plan:
        """The plan on this GPU.

        Raises:
            BackendError: there is no such GPU or file, or TensorRT does not read it there.
        """
        what = f"model '{self.source.spec.name}'"
        gpu = gpu_for_plans(ordinal, what)
        return read_plan(self.library, self._file(gpu), gpu, what, host_code=self.options.host_code)

    def _file(self, gpu: Device) -> Path:
        spec = self.source.spec
        capability = ".".join(map(str, gpu.compute_capability))
        path = self.source.model_file(TensorRTBackend.model_filename)
        if capability in spec.model_filenames:
            path = self.source.file(spec.model_filenames[capability])
        if not path.is_file():
            raise self.source.not_found(path)
        if path.suffix == ONNX:
            asked = replace(self.options.build, model=path, device=gpu.ordinal)
            return build_plan(self.library, asked, tell_log(spec.name))
        return path


class TensorRTModel(Model):
    """One loaded version: its plan on each GPU that an instance is on."""

    def __init__(self, source: ModelSource, options: Options, library: Library) -> None:
        self.spec = source.spec
        self.options = options
        self.library = library
        self._reader = PlanReader(source, options, library)
        self._plans: dict[int, Plan] = {}
        self._lock = threading.Lock()  # instances are made on threads of their own, at the same time

    def plan(self, ordinal: int) -> Plan:
        """The plan on this GPU, which its instances share, checked against the configuration."""
        with self._lock:
            if ordinal not in self._plans:
                plan = self._reader.read(ordinal)
                check(self.spec, plan)
                self._keep_weights(plan)
                self._plans[ordinal] = plan
            return self._plans[ordinal]

    def _keep_weights(self, plan: Plan) -> None:
        """Set how many bytes of weights stay on the device, which TensorRT allows only before the first context."""
        budget, size = self.options.budget, plan.engine.streamable_weights_size
        if budget is None:
            return
        if not size:
            raise BackendError(
                f"model '{self.spec.name}': parameter 'weight_streaming_budget' needs a plan that was built for weight "
                "streaming"
            )
        if self.spec.gpu.graphs:
            raise BackendError(
                f"model '{self.spec.name}': CUDA graphs cannot hold streamed weights: turn one of them off"
            )
        plan.engine.weight_streaming_budget_v2 = _bytes_of(budget, plan, size)
        log.info(
            "model %s: %d of %d bytes of weights stay on the device",
            self.spec.name,
            plan.engine.weight_streaming_budget_v2,
            size,
        )

    def create_instance(self, spec: InstanceSpec) -> GpuInstance:
        """An instance with contexts of its own."""
        if spec.kind != "GPU":
            raise BackendError(f"instance '{spec.name}' is of KIND_{spec.kind}; plans of TensorRT run on GPUs")
        gpu = gpu_for_plans(spec.device, f"instance '{spec.name}'")
        plan = self.plan(spec.device)
        check_instance(self.spec, plan, spec)
        return TensorRTInstance(self.spec, self.library, plan, spec, gpu, self.options.strategy)

    def close(self) -> None:
        """Drop the plans, each with its GPU current: that frees the memory of the weights."""
        for ordinal in list(self._plans):
            device(ordinal).use()
            del self._plans[ordinal]


def _bytes_of(budget: Budget, plan: Plan, size: int) -> int:
    if budget.is_automatic:
        return int(plan.engine.get_weight_streaming_automatic_budget())
    return size * budget.amount // 100 if budget.is_share else min(budget.amount, size)


def tell_log(model: str) -> Tell:
    """A function that logs the progress of building a model's plan."""
    last = -TOLD_PERCENT

    def tell(what: str, percent: int) -> None:
        nonlocal last
        if percent >= last + TOLD_PERCENT:
            last = percent
            log.info("model %s: its plan is built, %d %%: %s", model, percent, what)

    return tell
