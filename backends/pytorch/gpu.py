"""PyTorch on the streams and in the graphs of an instance on a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from inferd._native.cuda.device import device
from inferd.backends.api import BackendError, InstanceSpec, ModelSpec
from inferd.backends.installing import pip_install

if TYPE_CHECKING:
    import torch


def check_cuda(spec: InstanceSpec) -> None:
    """Check that PyTorch can use the device.

    Raises:
        BackendError: it cannot; the text says why.
    """
    import torch

    if torch.version.cuda is None:
        raise BackendError(
            f"instance '{spec.name}' is of KIND_GPU, but the installed PyTorch {torch.__version__} is built for the "
            f"CPU: install a build for CUDA, as PyPI has it ({pip_install('torch', '--force-reinstall')}), "
            "or write kind: KIND_CPU"
        )
    if not torch.cuda.is_available():
        raise BackendError(
            f"instance '{spec.name}' is of KIND_GPU, but PyTorch {torch.__version__}, which is built for CUDA "
            f"{torch.version.cuda}, finds no device"
        )


def check_capability(spec: InstanceSpec, wanted: str, path: Path) -> None:
    """Check that the device has the compute capability that a model was compiled for, such as "90"; empty for any.

    Raises:
        BackendError: the device has another one.
    """
    found = "{}{}".format(*device(spec.device).compute_capability)
    if wanted not in ("", found):
        raise BackendError(
            f"instance '{spec.name}': '{path}' was compiled for compute capability {wanted}, device {spec.device} has "
            f"{found}: compile it on such a device"
        )


def check_no_text(model: ModelSpec, instance: InstanceSpec) -> None:
    """Check that every tensor can be on a GPU.

    Raises:
        BackendError: one is BYTES.
    """
    for tensor in (*model.model_inputs, *model.model_outputs):
        if tensor.datatype == "BYTES":
            raise BackendError(f"instance '{instance.name}': '{tensor.name}' is BYTES, which no GPU takes")


class TorchStream:
    """The compute stream of an instance, as PyTorch's current stream. Nothing here waits for the device.

    Args:
        model: the model, which has a priority.
        instance: the instance, which has a device.
    """

    def __init__(self, model: ModelSpec, instance: InstanceSpec) -> None:
        import torch

        gpu = device(instance.device)
        self.stream = gpu.stream(gpu.priority(model.gpu.priority))
        self._device = instance.device
        self._external = torch.cuda.ExternalStream(self.stream.handle, device=f"cuda:{instance.device}")
        self._pool: torch.cuda.MemPool | None = None

    def current(self, capturing: bool) -> contextlib.AbstractContextManager[object]:
        """Direct PyTorch's work of this thread to the stream.

        Args:
            capturing: the work becomes a graph, or is a warm-up run before that. Each launch of a graph writes to the
                graph's memory, which therefore must never have another user: it comes from a pool that only graphs use,
                one after the other on this stream.
        """
        import torch

        stream: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._external)
        if not capturing:
            return stream
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        both = contextlib.ExitStack()
        both.enter_context(stream)
        both.enter_context(torch.cuda.use_mem_pool(self._pool, self._device))
        return both

    @staticmethod
    def is_recording() -> bool:
        """Whether work is being recorded, instead of executed."""
        import torch

        recording: bool = torch.cuda.is_current_stream_capturing()
        return recording
