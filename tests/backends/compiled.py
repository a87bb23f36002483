"""A model that AOTInductor compiles once for all tests of a session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MAX_BATCH, MAX_WIDTH = 16, 8


class Sample(torch.nn.Module):
    """Scores, its first input with two axes exchanged, and that input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, image: torch.Tensor, *, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = self.linear(image).sum(1) + ids.sum(1, keepdim=True)
        return scores, image.transpose(1, 2), image


class Scaled(torch.nn.Module):
    """Has a number among its arguments, which is a constant in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, factor: int, y: torch.Tensor) -> torch.Tensor:
        return x * factor - y + self.offset


def compile_module(folder: Path, name: str) -> Path:
    """Write sample.pt2 there, where image is FP32 [batch, width, 4] and ids INT64 [batch, width]; or scaled.pt2, for
    FP32 [2, 3].

    In a process of its own: the compiler leaves much behind. Skips the test where there is no C++ compiler.
    """
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    environment["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else it compiles a program for each set of vector instructions
    environment["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"  # to compile takes longer than to run
    package = folder / f"{name}.pt2"
    done = subprocess.run([sys.executable, __file__, str(package)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return package


def make_sample() -> Sample:
    """The module, with the same weights each time."""
    torch.manual_seed(1)
    return Sample().eval()


def main(package: str) -> None:
    program = {"sample": _exported_sample, "scaled": _exported_scaled}[Path(package).stem]()
    torch._inductor.aoti_compile_and_package(program, package_path=package)


def _exported_scaled() -> torch.export.ExportedProgram:
    return torch.export.export(Scaled(), (torch.ones(2, 3), 4, torch.ones(2, 3)))


def _exported_sample() -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", max=MAX_BATCH)
    width = torch.export.Dim("width", min=2, max=MAX_WIDTH)
    return torch.export.export(
        make_sample(),
        (torch.zeros(3, 5, 4),),
        {"ids": torch.zeros(3, 5, dtype=torch.int64)},
        dynamic_shapes={"image": {0: batch, 1: width}, "ids": {0: batch, 1: width}},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
