"""The models that are compared: the same files for every server that reads Triton's repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench import python_models
from bench.peers.base import CACHE
from bench.repository import Identity, write

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("echo.c")
STEPS = 2_000_000
"""Multiplications of an execution of `busy`, each of which waits for the last: 2 to 3 ms of one core."""
RESPONSES = 1000
ROWS = 8
WAIT_MS = 5

WAITING = python_models.IDENTITY.replace(
    "import triton_python_backend_utils", "import time\n\nimport triton_python_backend_utils"
).replace("        return [self", f"        time.sleep({WAIT_MS / 1000})\n        return [self", 1)
"""Waits for a whole batch, as a model.py does whose tensors are on a GPU."""

BATCHING = "dynamic_batching { }\n"


def _parameter(key: str, value: int) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


CONFIG = python_models.CONFIG.replace('"python"', '"echo"')
COMPILED = {
    "echo": CONFIG,
    "busy": CONFIG.replace("max_batch_size: 64", f"max_batch_size: {ROWS}").replace(
        BATCHING, f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {8 * ROWS} }} }}\n"
    )
    + _parameter("steps", STEPS),
    "stream": CONFIG.replace("max_batch_size: 64", "max_batch_size: 0")
    .replace("[ -1 ]", "[ -1, -1 ]")
    .replace(BATCHING, "model_transaction_policy { decoupled: true }\n")
    + _parameter("responses", RESPONSES),
}
PYTHON = {"python": python_models.IDENTITY, "waiting": WAITING}


def backends(among: Path | None = None) -> Path:
    """A folder for --backend-directory with the backend in C, compiled; with `among`, the backends of that folder, too.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
    """
    folder = CACHE / ("backends-triton" if among else "backends")
    library = folder / "echo" / "libtriton_echo.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CC", "cc").split()
        flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-Wall", "-I", str(ROOT)]
        subprocess.run([*compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    for backend in among.iterdir() if among else ():
        if not (folder / backend.name).exists():
            (folder / backend.name).symlink_to(backend)
    return folder


def write_shared(folder: Path) -> Path:
    """The models in C and in Python; returns the repository."""
    for name, config in COMPILED.items():
        (folder / name / "1").mkdir(parents=True, exist_ok=True)
        (folder / name / "config.pbtxt").write_text(config.replace("NAME", name))
    return python_models.write(folder, PYTHON)


def write_own(folder: Path) -> Path:
    """Besides, an identity of the backend that comes with inferd; returns the repository."""
    return write(write_shared(folder), [Identity("identity", (("FP32", 1),))])
