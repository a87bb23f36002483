"""Backends in C for Triton's API, compiled from the sources beside this file, and models of theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

ROOT = Path(__file__).resolve().parents[2]
CC = os.environ.get("CC", "cc").split()


def compile_backend(folder: Path, name: str) -> Path:
    """Write `<folder>/<name>/libtriton_<name>.so`; skips the test where there is no C compiler."""
    if shutil.which(CC[-1]) is None:
        pytest.skip("there is no C compiler")
    library = folder / name / f"libtriton_{name}.so"
    library.parent.mkdir(parents=True)
    build(library, "-I", str(ROOT), str(Path(__file__).parent / f"triton_{name}.c"))
    return library


def build(library: Path, *arguments: str) -> None:
    """Compile a library."""
    flags = ["-std=gnu11", "-shared", "-fPIC", "-O1", "-g", "-Wall", "-Werror", "-fvisibility=default", "-pthread"]
    subprocess.run([*CC, *flags, "-o", str(library), *arguments], check=True)


def add_model(root: Path, name: str, config: str, backend: str = "probe", count: int = 1) -> Path:
    """A model of so many instances; returns the folder of its version."""
    version = root / name / "1"
    version.mkdir(parents=True)
    group = f"instance_group {{ count: {count} kind: KIND_CPU }}"
    (root / name / "config.pbtxt").write_text(f'backend: "{backend}"\n{group}\n{config}')
    return version


def ask(client, *numbers, model="batched", **more):
    """The answer to INT32 [1, numbers] as input "x"."""
    return client.infer(model, [tensor(np.array([numbers], np.int32))], **more)


def tensor(array):
    """An array as input "x"."""
    return triton.InferInput("x", list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


def said(answer):
    """The response's parameters."""
    return {
        key: getattr(each, each.WhichOneof("parameter_choice"))
        for key, each in answer.get_response().parameters.items()
    }
