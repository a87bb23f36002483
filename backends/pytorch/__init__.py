"""TorchScript models on PyTorch. The framework is imported when the first model is loaded."""

from inferd.backends.pytorch.backend import PyTorchBackend

__all__ = ["PyTorchBackend"]
