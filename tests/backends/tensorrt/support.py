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
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ModelControl
from tests.engine.serving import gpus_of_stub, serving_folder


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
    logging.disable(logging.CRITICAL if problems else logging.NOTSET)  # a record would keep what failed alive
    loader = BackendLoader({"tensorrt": backend or {}})
    async with serving_folder(root, loader, problems, gpus_of_stub(), control=control) as engine:
        logging.disable(logging.NOTSET)
        yield engine
