"""The parameters of a model of TensorRT, and those of the backend."""

from __future__ import annotations

import re
from dataclasses import dataclass

from backends.parameters import Parameters
from backends.tensorrt.library import AUTO

RUNTIME = "runtime"
STRATEGY = "execution_context_allocation_strategy"
BUDGET = "weight_streaming_budget"
KNOWN = frozenset({RUNTIME, STRATEGY, BUDGET})

PLUGINS = "plugins"
HOST_CODE = "version-compatible"

STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")
AMOUNT = re.compile(r"(\d+)(%?)")


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of the weights that can be streamed may stay on the device."""

    amount: int
    is_share: bool = False  # in percent, else in bytes
    is_automatic: bool = False  # as TensorRT thinks fit for the memory that is free


@dataclass(frozen=True, slots=True)
class Options:
    """What a model's parameters ask for."""

    runtime: str  # of MODULES, or AUTO
    host_code: bool
    plugins: tuple[str, ...]
    strategy: str = STRATEGIES[0]
    budget: Budget | None = None


def read_options(model: Parameters, backend: Parameters) -> Options:
    """Of a model's parameters and those of `--backend-config tensorrt,...`.

    Raises:
        BackendError: a value is not what its key takes.
    """
    model.warn_unknown(KNOWN)
    strategy = model.text(STRATEGY, STRATEGIES[0])
    if strategy not in STRATEGIES:
        raise model.error(STRATEGY, f"expected {' or '.join(STRATEGIES)}")
    return Options(
        runtime=model.text(RUNTIME) or backend.text(RUNTIME) or AUTO,
        host_code=backend.flag(HOST_CODE, False),
        plugins=tuple(file for file in backend.text(PLUGINS).split(";") if file),
        strategy=strategy,
        budget=_budget(model),
    )


def _budget(model: Parameters) -> Budget | None:
    text = model.text(BUDGET)
    if not text or text == AUTO:
        return Budget(0, is_automatic=True) if text else None
    found = AMOUNT.fullmatch(text)
    if found is None or (found[2] and int(found[1]) > 100):
        raise model.error(BUDGET, "expected bytes, a share such as 50%, or auto")
    return Budget(int(found[1]), is_share=bool(found[2]))
