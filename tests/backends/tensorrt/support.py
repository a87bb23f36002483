"""Plans of the fake TensorRT in a real engine, on the stub driver."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tests.fakes.tensorrt as fake
from inferd.backends.loader import BackendLoader
from inferd.backends.tensorrt import library
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.gpu import GpuPolicy, Gpus
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.loading.control import ModelControl
from tests import gpu_stub


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fake as the only TensorRT that is installed."""
    for name, (first, second) in library.MODULES.items():
        monkeypatch.setitem(sys.modules, first, fake if name == "tensorrt" else None)
        monkeypatch.setitem(sys.modules, second, None)
    monkeypatch.setattr(library, "_imported", {})
    yield


@asynccontextmanager
async def serving(
    root: Path,
    plan: bytes,
    config: str = "",
    problems: int = 0,
    backend: dict[str, str] | None = None,
    control: ModelControl | None = None,
) -> AsyncIterator[Engine]:
    """An engine with the plan as model "m"; what is wrong, as `engine.problems`."""
    (root / "m" / "1").mkdir(parents=True, exist_ok=True)
    (root / "m" / "config.pbtxt").write_text(config)
    if plan:
        (root / "m" / "1" / "model.plan").write_bytes(plan)
    gpus = Gpus(GpuPolicy(library=str(gpu_stub.library())))
    loader = BackendLoader({"tensorrt": backend or {}})
    engine = Engine([root], loader, Options(gpus=gpus.count), hardware=Hardware(gpus=gpus), control=control)
    logging.disable(logging.CRITICAL if problems else logging.NOTSET)  # a record would keep what failed alive
    found = await engine.start()
    logging.disable(logging.NOTSET)
    engine.problems = found  # type: ignore[attr-defined]
    assert len(found) == problems, found
    try:
        yield engine
    finally:
        await engine.close()
