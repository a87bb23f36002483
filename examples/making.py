"""The common code of the scripts that make the example repositories."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import onnx
import torch
from onnx import helper
from torch import nn


def is_current(files: Iterable[Path], sources: Iterable[Path]) -> bool:
    """Whether all files exist and are newer than their sources and this script."""
    newest = max(source.stat().st_mtime for source in (Path(__file__), *sources))
    return all(file.exists() and file.stat().st_mtime >= newest for file in files)


def write(file: Path, content: bytes | str) -> None:
    """Write a file so that a server always sees either the old one or the new one, whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(content if isinstance(content, bytes) else content.encode())
    partial.replace(file)


def train(net: nn.Module, inputs: torch.Tensor, classes: torch.Tensor, *, epochs: int, batch: int, rate: float) -> None:
    """Train a classifier by its `scores`; to the same weights each time on the same machine, from the same ones."""
    torch.set_num_threads(1)  # the network is small: more threads wait for each other, for minutes on a busy machine
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(classes)).split(batch):
            loss = nn.functional.cross_entropy(net.scores(inputs[chosen]), classes[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()


def accuracy(net: nn.Module, inputs: torch.Tensor, classes: torch.Tensor) -> float:
    """The share of correctly classified inputs."""
    with torch.no_grad():
        return float((net(inputs).argmax(1) == classes).float().mean())


def torchscript(net: nn.Module) -> bytes:
    """The network as a TorchScript archive."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated upstream, and what is served all over the world
        return torch.jit.script(net).save_to_buffer()


def onnx_model(graph: onnx.GraphProto) -> bytes:
    """The graph as an ONNX model that old runtimes read, too."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()
