"""A model that AOTInductor compiles once for all tests of a session."""

from __future__ import annotations

import warnings
from pathlib import Path

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


def compile_sample(folder: Path) -> tuple[Path, Sample]:
    """Write model.pt2 there; image is FP32 [batch, width, 4], ids INT64 [batch, width]."""
    torch.manual_seed(1)
    module = Sample().eval()
    batch = torch.export.Dim("batch", max=MAX_BATCH)
    width = torch.export.Dim("width", min=2, max=MAX_WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            module,
            (torch.zeros(3, 5, 4),),
            {"ids": torch.zeros(3, 5, dtype=torch.int64)},
            dynamic_shapes={"image": {0: batch, 1: width}, "ids": {0: batch, 1: width}},
        )
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return Path(path), module
