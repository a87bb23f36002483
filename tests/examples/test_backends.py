"""The example of a backend in Cython is built as its page says and served."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inferd.backends.loader import BackendLoader
from tests.engine.serving import infer, request, serving_folder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "backends"
CONFIG = """
backend: "scale"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 2 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the built backend and a repository with a model of it."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("example")
    unwanted = shutil.ignore_patterns("*.so", "*.c", "build", "__pycache__")
    shutil.copytree(EXAMPLES, folder / "backends", ignore=unwanted)
    (command,) = re.findall(r"^    cythonize (.*)$", (ROOT / "docs" / "backends.md").read_text(), re.MULTILINE)
    run(folder, "Cython.Build.Cythonize", *command.split())
    version = folder / "models" / "halved" / "1"
    version.mkdir(parents=True)
    (version / "factor").write_text("0.5")
    (version.parent / "config.pbtxt").write_text(CONFIG)
    return folder


def run(folder, module, *arguments):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_it_is_served(folder):
    async with serving_folder(folder / "models", BackendLoader(directory=folder / "backends")) as engine:
        for array in (np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((1, 0), np.float32)):
            assert np.array_equal((await infer(engine, request("halved", x=array))).array("y"), array / 2)


async def test_what_it_cannot_load_is_told(folder, tmp_path):
    shutil.copytree(folder / "models", tmp_path, dirs_exist_ok=True)
    (tmp_path / "halved" / "1" / "factor").write_text("a half")
    async with serving_folder(tmp_path, BackendLoader(directory=folder / "backends"), problems=1) as engine:
        assert "model 'halved': could not convert string to float: 'a half'" in str(engine.problems)
