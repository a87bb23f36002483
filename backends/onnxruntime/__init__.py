"""ONNX models on ONNX Runtime. The runtime is imported when the first model is inspected or loaded.

On import, ONNX Runtime opens a store of telemetry in the user's home folder and notes events there. This package turns
that off by a variable of the environment, before anything can import the runtime, unless the operator has set it.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from inferd.backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
