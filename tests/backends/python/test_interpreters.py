"""Workers run in interpreters of Python 3.9 to 3.14 that have neither inferd nor numpy."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from inferd.backends.python.worker import protocol as p
from tests.backends.python.peer import Sent, worker

MODULES = sorted(
    path.stem
    for path in (Path(__file__).parents[3] / "backends" / "python" / "worker").glob("*.py")
    if not path.stem.startswith("__")
)
# The model imports every module of the worker's side, uses no arrays, and terminates a process that it has forked. Exit
# code -15 shows that SIGTERM, which a worker ignores, ends a process that the worker has forked.
MODEL = f"""
    import importlib, multiprocessing, sys, time
    import triton_python_backend_utils as pb_utils
    for name in {MODULES}:
        importlib.import_module("inferd_worker." + name)
    class TritonPythonModel:
        async def execute(self, requests):
            forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
            forked.start()
            forked.terminate()
            forked.join()
            text = "%d.%d %d" % (*sys.version_info[:2], forked.exitcode)
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(text)) for _ in requests]
"""


def managed_folders() -> list[str]:
    """The folders in which uv and pyenv install interpreters.

    Their programs on PATH are shims: they run only the versions that are selected for the current folder.
    """
    roots = [Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")) / "uv" / "python"]
    if pyenv := shutil.which("pyenv"):
        roots.append(Path(subprocess.check_output([pyenv, "root"], text=True).strip()) / "versions")
    return [str(folder) for root in roots for folder in sorted(root.glob("*/bin"))]


def interpreter(version: str) -> str | None:
    """An interpreter of this version that runs; None: there is none.

    It is looked for on PATH, in INFERD_PYTHONS (which has the form of PATH), and in folders of version managers.
    """
    folders = ":".join(filter(None, (os.environ.get("PATH"), os.environ.get("INFERD_PYTHONS")))).split(":")
    folders += managed_folders()
    for python in filter(None, (shutil.which(f"python{version}", path=folder) for folder in folders)):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
def test_a_worker_runs(tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    with worker(tmp_path, MODEL, python=python) as peer:
        (answer,) = peer.execute(Sent({"IN": np.ones((1, 1), np.float32)}))
        assert (answer.status, answer.error) == (p.STATUS_ERROR, f"{version} -15")
        peer.finalize()
