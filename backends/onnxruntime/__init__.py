"""ONNX models on ONNX Runtime. The runtime is imported when the first model is inspected or loaded."""

from backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
