"""Building a plan from an ONNX model, for the GPU of this machine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inferd._native.cuda.device import Device
from inferd.backends.api import BackendError, EngineSpec
from inferd.backends.tensorrt.cache import PlanCache, gpu_of, key_of, usual_folder, write_whole
from inferd.backends.tensorrt.library import Library, reason
from inferd.backends.tensorrt.plan import gpu_for_plans
from inferd.backends.tensorrt.profiles import add_profiles
from inferd.backends.tensorrt.progress import Progress, Tell, make_monitor

log = logging.getLogger("inferd.tensorrt")

PRECISIONS = ("fp16", "bf16", "fp8", "int8")
LEVELS = range(6)
RTX = "tensorrt_rtx"


def build_plan(library: Library, spec: EngineSpec, tell: Tell) -> Path:
    """The plan of a model: from the cache, or built and put there. A build may take minutes.

    Raises:
        BackendError: the plan cannot be built or kept; the text names the fault of the model, an option or the cache.
    """
    if not hasattr(library.module, "Builder"):
        raise BackendError(f"{library} runs plans and builds none: install tensorrt or tensorrt_rtx")
    if not spec.model.is_file():
        raise BackendError(f"there is no file '{spec.model}'")
    check(library, spec)
    gpu = _gpu(library, spec)
    try:
        return _cached(library, spec, gpu, tell)
    except OSError as error:
        raise BackendError(
            f"the plan of '{spec.model}' cannot be read from the cache of plans or kept there: {error}"
        ) from error


def _cached(library: Library, spec: EngineSpec, gpu: Device | None, tell: Tell) -> Path:
    described = gpu_of(spec, gpu)
    cache = PlanCache(spec.cache or usual_folder())
    with cache.locked(key_of(spec, library, described)) as path:
        if path.is_file():
            log.info("the plan of %s is in the cache: %s", spec.model, path)
            return path
        begin = time.monotonic()
        log.info("building a plan of %s for %s with %s", spec.model, described, library)
        plan = _Build(library, spec, cache.timings(library, described), gpu).run(tell)
        write_whole(path, plan)
        log.info("built %s, %d bytes, in %.1f s", path, plan.nbytes, time.monotonic() - begin)
        return path


def check(library: Library, spec: EngineSpec) -> None:
    """Check that this TensorRT supports the options.

    Raises:
        BackendError: it does not support one.
    """
    flags = library.module.BuilderFlag
    for precision in spec.precisions:
        if precision not in PRECISIONS:
            raise BackendError(f"precision '{precision}' is unknown: expected {', '.join(PRECISIONS)}")
        if not hasattr(flags, precision.upper()):
            raise BackendError(f"{library} takes precisions from the model: convert it to {precision} before")
    if spec.precisions and spec.strongly_typed:
        raise BackendError("a strongly typed plan takes its precisions from the model: name none")
    if spec.optimization_level is not None and spec.optimization_level not in LEVELS:
        raise BackendError(f"the optimisation level is {spec.optimization_level}, expected 0 to {LEVELS[-1]}")
    if spec.compute_capability and not hasattr(library.module, "ComputeCapability"):
        raise BackendError(f"{library} builds plans for the GPU that it runs on, not for a compute capability")


def _gpu(library: Library, spec: EngineSpec) -> Device | None:
    # Only TensorRT-RTX can build without a GPU, for a named one; the other frameworks would crash.
    if library.name == RTX and spec.compute_capability:
        return None
    return gpu_for_plans(spec.device, f"model '{spec.model}'")


class _Build:
    """One build. TensorRT's objects live as long as it runs."""

    def __init__(self, library: Library, spec: EngineSpec, timings: Path, gpu: Device | None) -> None:
        self.library = library
        self.module = library.module
        self.spec = spec
        self.timings = timings
        self.gpu = gpu

    def run(self, tell: Tell) -> memoryview:
        """Build, on another thread: so an interrupt (^C) ends the build at its next step, not the process within it."""
        monitor = make_monitor(self.module, Progress(tell))
        found: list[memoryview | BaseException] = []
        thread = threading.Thread(target=self._run, args=(monitor, found.append), name="TensorRT build")
        thread.start()
        try:
            thread.join()
        except BaseException:
            monitor.cancel()
            thread.join()
            raise
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def _run(self, monitor: Any, give: Callable[[memoryview | BaseException], object]) -> None:
        try:
            if self.gpu is not None:
                self.gpu.use()
            with self.library.complaints() as complaints:
                give(self._build(monitor, complaints))
        except BaseException as error:
            give(error)

    def _build(self, monitor: Any, complaints: Sequence[str]) -> memoryview:
        builder = self.module.Builder(self.library.logger)
        network = builder.create_network(self._network_flags())
        self._parse(network)
        config = builder.create_builder_config()
        config.progress_monitor = monitor
        self._configure(config)
        add_profiles(builder, config, network, self.spec.profiles, self.spec.max_batch_size)
        if self.library.name != RTX:  # RTX uses no timings
            self._take_timings(config)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BackendError(f"TensorRT did not build '{self.spec.model}': {reason(complaints, 'cancelled')}")
        if self.library.name != RTX:
            self._give_timings(config)
        return memoryview(plan)

    def _network_flags(self) -> int:
        flags = self.module.NetworkDefinitionCreationFlag
        return 1 << int(flags.STRONGLY_TYPED) if self.spec.strongly_typed or self.spec.weight_streaming else 0

    def _parse(self, network: Any) -> None:
        parser = self.module.OnnxParser(network, self.library.logger)
        if parser.parse_from_file(str(self.spec.model)):
            return
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        texts = [f"{error.desc()}{f' (node {error.node_name()})' if error.node_name() else ''}" for error in errors]
        raise BackendError(f"TensorRT does not read '{self.spec.model}': {'; '.join(texts) or 'it gives no reason'}")

    def _configure(self, config: Any) -> None:
        spec, module = self.spec, self.module
        asked = [precision.upper() for precision in spec.precisions]
        for wanted, name in (
            (spec.version_compatible, "VERSION_COMPATIBLE"),
            (spec.version_compatible and not spec.lean_runtime, "EXCLUDE_LEAN_RUNTIME"),
            (spec.weight_streaming, "WEIGHT_STREAMING"),
        ):
            asked += [name] * wanted
        for name in asked:
            config.set_flag(getattr(module.BuilderFlag, name))
        if spec.hardware_compatible:
            config.hardware_compatibility_level = module.HardwareCompatibilityLevel.AMPERE_PLUS
        if spec.optimization_level is not None:
            config.builder_optimization_level = spec.optimization_level
        if spec.workspace:
            config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, spec.workspace)
        if spec.compute_capability:
            self._aim(config)

    def _aim(self, config: Any) -> None:
        name = f"SM{self.spec.compute_capability.replace('.', '')}"
        known = self.module.ComputeCapability.__members__
        if name not in known:
            choice = ", ".join(f"{each[2:-1]}.{each[-1]}" for each in known if each.startswith("SM"))
            raise BackendError(f"{self.library} builds no plan for {self.spec.compute_capability}: expected {choice}")
        config.num_compute_capabilities = 1
        config.set_compute_capability(known[name], 0)

    def _take_timings(self, config: Any) -> None:
        kept = self.timings.read_bytes() if self.timings.is_file() else b""
        cache = config.create_timing_cache(kept)
        if not config.set_timing_cache(cache, False):
            log.warning("the timings in %s are not for this GPU: they are measured anew", self.timings)
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def _give_timings(self, config: Any) -> None:
        cache = config.get_timing_cache()
        if cache is not None:
            write_whole(self.timings, bytes(cache.serialize()))
