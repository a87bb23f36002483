"""Opening a model's file as a session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backends.api import BackendError, ModelSource, ModelSpec
from backends.onnxruntime.providers import CPU, Provider

if TYPE_CHECKING:
    import onnxruntime

MODEL_FILE = "model.onnx"


def open_session(
    source: ModelSource, settings: onnxruntime.SessionOptions, providers: Sequence[Provider] = ((CPU, {}),)
) -> onnxruntime.InferenceSession:
    """Open the model file.

    Raises:
        BackendError: there is none, it is not an ONNX model, or external data lies outside of its folder.
    """
    import onnxruntime

    path = find_model_file(source)
    try:
        # Without the fallback, which would print the error and try the same once more.
        return onnxruntime.InferenceSession(str(path), settings, providers=list(providers), enable_fallback=0)
    except Exception as error:  # the runtime's errors share no base class of their own
        raise BackendError(f"failed to load '{source.spec.name}' from '{path}': {error}") from error


def find_model_file(source: ModelSource) -> Path:
    """The ONNX file; where the model is a folder, the `model.onnx` in it.

    Raises:
        BackendError: it does not exist.
    """
    path = source.model_file(MODEL_FILE)
    if path.is_dir():
        path = path / MODEL_FILE
    if not path.is_file():
        raise BackendError(f"unable to find '{path}' for model '{source.spec.name}'")
    return path


def fixed_outputs(session: onnxruntime.InferenceSession, spec: ModelSpec) -> frozenset[str]:
    """Outputs whose shapes, but for the batch dimension, the model fixes as the configuration says."""
    first = 1 if spec.max_batch_size else 0
    nodes = {node.name: node.shape[first:] for node in session.get_outputs() if node.shape}
    return frozenset(tensor.name for tensor in spec.model_outputs if nodes.get(tensor.name) == list(tensor.dims))
