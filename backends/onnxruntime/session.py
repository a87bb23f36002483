"""Opening a model's file as a session."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inferd.backends.api import BackendError, ModelSource, ModelSpec
from inferd.backends.onnx_files import named_files
from inferd.backends.onnxruntime.providers import CPU, Provider

if TYPE_CHECKING:
    import onnxruntime

MODEL_FILE = "model.onnx"


def open_session(
    source: ModelSource, settings: onnxruntime.SessionOptions, providers: Sequence[Provider] = ((CPU, {}),)
) -> onnxruntime.InferenceSession:
    """Open the model file.

    Raises:
        BackendError: the file is missing or no ONNX model, or its external data lies outside of its folder.
    """
    import onnxruntime

    path = find_model_file(source)
    try:
        external = read_external_data(path)
        if external:
            settings.add_external_initializers_from_files_in_memory(
                list(external), list(external.values()), [len(data) for data in external.values()]
            )
        # enable_fallback=0: the fallback would print the error and try again with other providers.
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
        raise source.not_found(path)
    return path


def read_external_data(path: Path) -> dict[str, bytes]:
    """The content of the files in which a model's weights lie, by the names that the model gives them.

    ONNX Runtime would map them, and a mapped file that is shortened or overwritten ends the process (SIGBUS). Missing
    files, and files outside the model's folder, are left out: ONNX Runtime refuses them.

    Raises:
        OSError: a file cannot be read.
    """
    folder = path.parent.resolve()
    files = {name: folder / name for name in sorted(named_files(path)) if "\0" not in name}
    return {
        name: file.read_bytes()
        for name, file in files.items()
        if file.is_file() and file.resolve().is_relative_to(folder)
    }


def engine_cache(source: ModelSource) -> Path:
    """The folder for TensorRT's engines of this model and this ONNX Runtime.

    The provider's own names for its files tell GPUs and versions of TensorRT apart, but not always models.

    Raises:
        BackendError: the model's file cannot be read.
    """
    import onnxruntime

    path = find_model_file(source)
    try:
        with path.open("rb") as file:
            key = hashlib.file_digest(file, "sha256")
        for name, data in read_external_data(path).items():
            key.update(name.encode(errors="surrogateescape") + hashlib.sha256(data).digest())
        key.update(onnxruntime.__version__.encode())
        home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
        folder = Path(home) / "inferd" / "onnxruntime" / key.hexdigest()[:20]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BackendError(f"model '{source.spec.name}': no place for the engines of TensorRT: {error}") from error
    return folder


Shape = tuple[int | tuple[str, int], ...]
"""Dimensions without the batch dimension; a pair names the input, and its dimension, that has the same length."""


def known_shapes(session: onnxruntime.InferenceSession, spec: ModelSpec) -> dict[str, Shape]:
    """The outputs whose shapes are known before a run: each dimension is fixed, or named as an input's dimension.

    Such a name may be wrong: exporters do not check it.
    """
    first = 1 if spec.max_batch_size else 0
    named = {
        dim: (node.name, axis)
        for node in session.get_inputs()
        for axis, dim in enumerate(node.shape)
        if isinstance(dim, str)
    }
    shapes = {}
    for node in session.get_outputs():
        shape = tuple(named.get(dim, dim) for dim in node.shape[first:])
        if node.shape and all(isinstance(dim, (int, tuple)) for dim in shape):
            shapes[node.name] = shape
    return shapes


def fixed_outputs(session: onnxruntime.InferenceSession, spec: ModelSpec) -> frozenset[str]:
    """Outputs whose shapes, but for the batch dimension, the model fixes and the configuration confirms."""
    first = 1 if spec.max_batch_size else 0
    nodes = {node.name: node.shape[first:] for node in session.get_outputs() if node.shape}
    return frozenset(tensor.name for tensor in spec.model_outputs if nodes.get(tensor.name) == list(tensor.dims))
