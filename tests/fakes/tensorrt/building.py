"""The half of TensorRT that builds. A model is a plan without profiles, as `tests.fakes.tensorrt.plan` makes it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from inferd._native.cuda import driver

PHASES = (("Building engine", None, 2), ("Timing graph nodes", "Building engine", 8))


class BuilderFlag(Enum):
    FP16 = 0
    BF16 = 1
    INT8 = 2
    FP8 = 3
    VERSION_COMPATIBLE = 4
    EXCLUDE_LEAN_RUNTIME = 5
    WEIGHT_STREAMING = 6


class NetworkDefinitionCreationFlag(IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class MemoryPoolType(Enum):
    WORKSPACE = 0


class HardwareCompatibilityLevel(Enum):
    NONE = 0
    AMPERE_PLUS = 1


class IProgressMonitor:
    pass


class Tensor:
    def __init__(self, content: dict[str, Any]) -> None:
        self.name = content["name"]
        self.shape = tuple(content["dims"])
        self.is_shape_tensor = bool(content.get("is_shape"))


class Network:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.content: dict[str, Any] = {}

    @property
    def num_inputs(self) -> int:
        return len(self.content["inputs"])

    def get_input(self, index: int) -> Tensor:
        return Tensor(self.content["inputs"][index])


class ParserError:
    def desc(self) -> str:
        return "Assertion failed: Failed to parse the ONNX model."

    def node_name(self) -> str:
        return "conv1"


class OnnxParser:
    def __init__(self, network: Network, logger: object) -> None:
        self.network = network
        self.num_errors = 0

    def parse_from_file(self, model: str) -> bool:
        try:
            self.network.content = json.loads(Path(model).read_bytes())
        except ValueError:
            self.num_errors = 1
        return not self.num_errors

    def get_error(self, index: int) -> ParserError:
        return ParserError()


class OptimizationProfile:
    def __init__(self) -> None:
        self.ranges: dict[str, list[Sequence[int]]] = {}

    def set_shape(self, name: str, *ranges: Sequence[int]) -> None:
        self.ranges[name] = list(ranges)

    set_shape_input = set_shape


class TimingCache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content


class BuilderConfig:
    def __init__(self) -> None:
        self.flags: list[str] = []
        self.profiles: list[OptimizationProfile] = []
        self.progress_monitor: Any = None
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self.builder_optimization_level = 3
        self.workspace = 0
        self.timings: TimingCache | None = None

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.append(flag.name)

    def set_memory_pool_limit(self, pool: MemoryPoolType, size: int) -> None:
        self.workspace = size

    def add_optimization_profile(self, profile: OptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized: bytes) -> TimingCache:
        return TimingCache(serialized)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        self.timings = cache
        return not cache.content.startswith(b"of another GPU")

    def get_timing_cache(self) -> TimingCache | None:
        return self.timings


class Builder:
    def __init__(self, logger: object) -> None:
        if not driver.is_loaded():
            os.kill(os.getpid(), signal.SIGSEGV)

    def create_network(self, flags: int) -> Network:
        return Network(flags)

    def create_builder_config(self) -> BuilderConfig:
        return BuilderConfig()

    def create_optimization_profile(self) -> OptimizationProfile:
        return OptimizationProfile()

    def build_serialized_network(self, network: Network, config: BuilderConfig) -> bytes | None:
        monitor = config.progress_monitor
        for name, parent, steps in PHASES:
            monitor.phase_start(name, parent, steps)
        for name, _, steps in reversed(PHASES):
            for step in range(steps):
                if not monitor.step_complete(name, step):
                    return None
            monitor.phase_finish(name)
        assert config.timings is not None
        config.timings.content += b"a timing\n"
        asked = {
            "flags": config.flags,
            "strongly_typed": bool(network.flags & 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED),
            "hardware": config.hardware_compatibility_level.name,
            "level": config.builder_optimization_level,
            "workspace": config.workspace,
        }
        profiles = [profile.ranges for profile in config.profiles] or [{}]
        weights = 1000 if "WEIGHT_STREAMING" in config.flags else 0
        return json.dumps({**network.content, "profiles": profiles, "asked": asked, "weights": weights}).encode()
