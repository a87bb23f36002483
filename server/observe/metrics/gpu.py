"""The metrics of GPUs, from NVML through cuda-python (extra `gpu`): Triton's names, without DCGM."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

from inferd.server.observe.metrics.text import Family, Sample, written

log = logging.getLogger("inferd.metrics")

UTILIZATION = Family("nv_gpu_utilization", "Part of the time in which the GPU computed, 0 to 1")
TOTAL = Family("nv_gpu_memory_total_bytes", "Memory of the GPU")
USED = Family("nv_gpu_memory_used_bytes", "Memory of the GPU that is in use")
POWER = Family("nv_gpu_power_usage", "Power that the GPU draws, in watts")
LIMIT = Family("nv_gpu_power_limit", "Power that the GPU may draw, in watts")
ENERGY = Family(
    "nv_energy_consumption", "Energy that the GPU has used since the driver was loaded, in joules", "counter"
)

LIBRARY = "cuda.bindings.nvml"


class GpuMetrics:
    """Samples the GPUs at most every `interval` seconds, on the thread that renders metrics.

    Args:
        interval: seconds.
        load: imports the module of NVML; raises ImportError if it is not installed.
    """

    def __init__(self, interval: float, load: Callable[[], Any] = lambda: importlib.import_module(LIBRARY)) -> None:
        self._interval = interval
        self._then = -interval
        self._load = load
        self._nvml: Any = None
        self._devices: list[tuple[str, Any]] | None = None
        self._samples: list[tuple[Family, list[Sample]]] = []

    def samples(self) -> list[tuple[Family, list[Sample]]]:
        now = time.monotonic()
        if now - self._then >= self._interval:
            self._then = now
            if self._devices is None:
                self._devices = self._find()
            self._samples = self._look(self._devices)
        return self._samples

    def _find(self) -> list[tuple[str, Any]]:
        try:
            self._nvml = self._load()
            self._nvml.init_v2()
            handles = [self._nvml.device_get_handle_by_index_v2(i) for i in range(self._nvml.device_get_count_v2())]
            return [(written({"gpu_uuid": _text(self._nvml.device_get_uuid(each))}), each) for each in handles]
        except Exception as error:  # some versions of the library have no common base class of exceptions
            log.debug("no metrics of GPUs: %s: %s", type(error).__name__, error)
            return []

    def _look(self, devices: list[tuple[str, Any]]) -> list[tuple[Family, list[Sample]]]:
        nvml = self._nvml
        asked: tuple[tuple[Family, Callable[[Any], float]], ...] = (
            (UTILIZATION, lambda gpu: nvml.device_get_utilization_rates(gpu).gpu / 100),
            (TOTAL, lambda gpu: int(nvml.device_get_memory_info_v2(gpu).total)),
            (USED, lambda gpu: int(nvml.device_get_memory_info_v2(gpu).used)),
            (POWER, lambda gpu: nvml.device_get_power_usage(gpu) / 1000),
            (LIMIT, lambda gpu: nvml.device_get_enforced_power_limit(gpu) / 1000),
            (ENERGY, lambda gpu: nvml.device_get_total_energy_consumption(gpu) / 1000),
        )
        found = []
        for family, ask in asked:
            samples = []
            for labels, handle in devices:
                try:
                    samples.append((labels, ask(handle)))
                except Exception as error:  # this GPU does not have the value
                    log.debug("%s of %s: %s", family.name, labels, error)
            if samples:
                found.append((family, samples))
        return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
