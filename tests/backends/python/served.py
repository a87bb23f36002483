"""A real engine with models whose `model.py` is in the test."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from inferd.backends.loader import BackendLoader
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ModelControl
from tests.engine.serving import Answer, infer, request, row, serving_folder
from tests.waiting import wait_until

CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""

WAITING = """
import pathlib, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])
    def execute(self, requests):
        (self.folder / "executing").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
"""Says with a file that it executes, and answers with its input as soon as there is another one."""

# Answers with its input; a first element below 0 stands for something that goes wrong.
MISCHIEF = """
import os, signal, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        first = int(x.flat[0])
        if first == -1:
            os.kill(os.getpid(), signal.SIGKILL)
        if first == -2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if first == -3:
            os._exit(3)
        if first == -4:
            time.sleep(3600)
        if first == -5:
            raise ValueError("a mistake of the model")
        if first == -6:
            os.kill(os.getpid(), signal.SIGSTOP)
        if first == -7:
            os.close(3)  # the socket to the server
        if first == -8:
            sys.stdout.buffer.write(bytes(range(256)) * 1000)
        if first == -9:
            bytearray(1 << 60)
        if first == -10:
            x = np.zeros(40_000_000, np.int64)
        if first == -11:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("not this", pb_utils.TritonError.NOT_FOUND))
        if first == -12:
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", os.getpid() + np.zeros((1, 1), np.int64))])
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""


def add_model(root: Path, name: str, code: str, config: str = CONFIG) -> Path:
    """Write a model; its version folder."""
    version = root / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(config)
    (version / "model.py").write_text(textwrap.dedent(code))
    return version


def wait_for(path: Path) -> None:
    """Wait until it exists, as a model says that it has got so far."""
    wait_until(path.exists, f"{path} is not there")


class Readiness:
    """Waits for what the engine tells about its models."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = asyncio.Event()
        self.history: list[tuple[str, bool]] = []
        engine.subscribe(self._on_change)

    def _on_change(self, name: str, version: int | None, ready: bool) -> None:
        if version is not None:
            self.history.append((name, ready))
            self._changed.set()

    async def until(self, *expected: tuple[str, bool]) -> None:
        """Wait until these were told, in this order."""
        while self.history != list(expected):
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 60)


@asynccontextmanager
async def serving(
    root: Path,
    options: Mapping[str, str] | None = None,
    problems: int = 0,
    control: ModelControl | None = None,
    **models: str,
) -> AsyncIterator[Engine]:
    """An engine with these models: name=code of model.py, with `CONFIG`. Models that are in `root` are served, too.

    Args:
        options: of the backend.
        problems: models that do not load.
        control: when models are loaded.
    """
    for name, code in models.items():
        add_model(root, name, code)
    loader = BackendLoader({"python": dict(options or {})})
    async with serving_folder(root, loader, problems, control=control) as engine:
        yield engine


async def ask(engine: Engine, *values: int, model: str = "m", timeout_ns: int = -1) -> Answer:
    """Send one row of numbers."""
    return await infer(engine, request(model, x=row(*values)), timeout_ns)
