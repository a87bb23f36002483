"""The parameters of a model of TensorRT, and those of the backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inferd.backends.api import EngineSpec, ModelSpec
from inferd.backends.parameters import Parameters
from inferd.backends.tensorrt.library import AUTO

RUNTIME = "runtime"
STRATEGY = "execution_context_allocation_strategy"
BUDGET = "weight_streaming_budget"
PROFILES = "build.profiles"
PRECISIONS = "build.precisions"
STRONGLY_TYPED = "build.strongly_typed"
LEVEL = "build.optimization_level"
WORKSPACE = "build.workspace_bytes"
KNOWN = frozenset({RUNTIME, STRATEGY, BUDGET, PROFILES, PRECISIONS, STRONGLY_TYPED, LEVEL, WORKSPACE})

PLUGINS = "plugins"
HOST_CODE = "version-compatible"
CACHE = "engine-cache"

STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")
AMOUNT = re.compile(r"(\d+)(%?)")


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of the streamable weights may stay on the device."""

    amount: int
    is_share: bool = False  # in percent, else in bytes
    is_automatic: bool = False  # TensorRT decides, by the free memory


@dataclass(frozen=True, slots=True)
class Options:
    """What a model's parameters ask for."""

    runtime: str  # of library.MODULES, or AUTO
    host_code: bool
    build: EngineSpec  # of an ONNX model without a plan; without file and device
    strategy: str = STRATEGIES[0]
    budget: Budget | None = None


def read_options(spec: ModelSpec, config: Mapping[str, str]) -> Options:
    """Read a model's parameters and those of `--backend-config tensorrt,...`.

    Raises:
        BackendError: a value is not what its key takes.
    """
    model = Parameters(spec.parameters, f"model '{spec.name}'")
    backend = Parameters(config, "backend 'tensorrt'")
    model.warn_unknown(KNOWN)
    strategy = model.text(STRATEGY, STRATEGIES[0])
    if strategy not in STRATEGIES:
        raise model.error(STRATEGY, f"expected {' or '.join(STRATEGIES)}")
    budget = _budget(model)
    return Options(
        runtime=model.text(RUNTIME) or backend.text(RUNTIME) or AUTO,
        host_code=backend.flag(HOST_CODE, False),
        build=_build(spec, model, backend, weight_streaming=budget is not None),
        strategy=strategy,
        budget=budget,
    )


def _build(spec: ModelSpec, model: Parameters, backend: Parameters, *, weight_streaming: bool) -> EngineSpec:
    cache = backend.text(CACHE)
    return EngineSpec(
        model=Path(),
        profiles=tuple(text.strip() for text in model.text(PROFILES).split(";") if text.strip()),
        max_batch_size=spec.max_batch_size,
        precisions=tuple(text.strip() for text in model.text(PRECISIONS).split(",") if text.strip()),
        strongly_typed=model.flag(STRONGLY_TYPED, False),
        weight_streaming=weight_streaming,
        optimization_level=model.integer(LEVEL),
        workspace=model.integer(WORKSPACE, 0) or 0,
        cache=Path(cache) if cache else None,
    )


def _budget(model: Parameters) -> Budget | None:
    text = model.text(BUDGET)
    if not text or text == AUTO:
        return Budget(0, is_automatic=True) if text else None
    found = AMOUNT.fullmatch(text)
    if found is None or (found[2] and int(found[1]) > 100):
        raise model.error(BUDGET, "expected bytes, a share such as 50%, or auto")
    return Budget(int(found[1]), is_share=bool(found[2]))


def plugins_of(config: Mapping[str, str]) -> tuple[str, ...]:
    """The libraries of plugins that `--backend-config tensorrt,plugins=` names."""
    return tuple(file for file in config.get(PLUGINS, "").split(";") if file)
