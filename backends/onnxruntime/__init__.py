"""ONNX models on ONNX Runtime. The runtime is imported when the first model is inspected or loaded.

When it is imported it would open a store of telemetry in the user's home folder and note events there. Its variable
that keeps it from that is set here, before anything of it can be imported, unless the operator has set it.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
