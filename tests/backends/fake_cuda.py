"""PyTorch's CUDA side for tests without a GPU: tensors stay on the CPU, and what is asked of it is written down."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch


class FakeCuda:
    """Replaces `torch.cuda` where backends use it.

    Attributes:
        log: what happened, in order: "stream 7", "pool", "empty_cache".
        current: the stream that work goes to, 0 for PyTorch's own.
        pooled: whether memory comes from a pool of graphs.
        recording: whether work is recorded.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.log: list[str] = []
        self.current = 0
        self.pooled = False
        self.recording = False
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr("inferd.backends.pytorch.gpu.device", self.device)
        for name, fake in {
            "is_available": lambda: True,
            "ExternalStream": lambda handle, device: SimpleNamespace(handle=handle, device=device),
            "stream": self.stream,
            "MemPool": object,
            "use_mem_pool": self.use_mem_pool,
            "is_current_stream_capturing": lambda: self.recording,
            "empty_cache": lambda: self.log.append("empty_cache"),
            "synchronize": self.forbidden,
            "current_stream": self.forbidden,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def device(self, ordinal: int) -> Any:
        """The device as the native side has it; each of its streams has a number of its own."""
        made: list[Any] = []

        def stream(priority: int) -> Any:
            made.append(SimpleNamespace(handle=100 * (ordinal + 1) + len(made), priority=priority))
            return made[-1]

        return SimpleNamespace(priority=lambda wish: -wish, stream=stream, compute_capability=(9, 0))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        self.log.append(f"stream {stream.handle}")
        self.current, before = stream.handle, self.current
        yield
        self.current = before

    @contextlib.contextmanager
    def use_mem_pool(self, pool: object, device: int) -> Any:
        self.log.append("pool")
        self.pooled = True
        yield
        self.pooled = False

    def forbidden(self, *_: Any) -> None:
        raise AssertionError("the thread that submits must not wait for the device")


class FakeGpuBatch:
    """Stands in for inferd._native.gpu.batch.GpuBatch, over tensors of the CPU."""

    def __init__(self, inputs: dict[str, torch.Tensor], outputs: set[str], capturing: bool = False) -> None:
        self.inputs = inputs
        self.wanted = outputs
        self.capturing = capturing
        self.outputs: dict[str, torch.Tensor] = {}

    def input(self, name: str) -> torch.Tensor:
        return self.inputs[name]

    def wants(self, name: str) -> bool:
        return name in self.wanted

    def set_output(self, name: str, tensor: torch.Tensor) -> None:
        self.outputs[name] = tensor
