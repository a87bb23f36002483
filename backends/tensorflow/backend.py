"""The TensorFlow backend: SavedModels and GraphDefs, in a session of a worker process for each instance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from inferd.backends.agreement import check_dims, check_names, check_none_missing
from inferd.backends.api import Backend, BackendError, Model, ModelSource, ModelSpec, Signature, TensorSpec
from inferd.backends.parameters import Parameters
from inferd.backends.paths import inside
from inferd.backends.python.options import KEYS
from inferd.backends.python.program import ENVIRONMENT, run_program
from inferd.backends.tensorflow.saved_model import SavedSignature, Tensor, describe, read_signature

SAVED_MODEL, GRAPH_DEF = "model.savedmodel", "model.graphdef"
GRAPH_DEF_PLATFORM = "tensorflow_graphdef"
PROGRAM = "tensorflow_graph.py"

INTRA_THREADS, INTER_THREADS = "TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS"
SESSION_THREADS = "TF_USE_PER_SESSION_THREADS"
TAG, SIGNATURE, INIT_OPS = "TF_GRAPH_TAG", "TF_SIGNATURE_DEF", "TF_INIT_OPS_FILE"
SHARING = "MAX_SESSION_SHARE_COUNT"
KNOWN = frozenset({INTRA_THREADS, INTER_THREADS, SESSION_THREADS, TAG, SIGNATURE, INIT_OPS, SHARING})
OF_WORKERS = frozenset({"EXECUTION_ENV_PATH", "EXECUTION_TIMEOUT_SECONDS"})

SOFT_PLACEMENT, MEMORY_FRACTION, VERSION = "allow-soft-placement", "gpu-memory-fraction", "version"
OF_THE_BACKEND = frozenset({SOFT_PLACEMENT, MEMORY_FRACTION, VERSION, ENVIRONMENT, *KEYS})
GLOBAL = frozenset({"backend-directory", "default-max-batch-size", "min-compute-capability", "auto-complete-config"})

MIXED_PRECISION = "auto_mixed_precision"
TENSORRT = "tensorrt"
LEVELS: Mapping[int, str] = MappingProxyType({-1: "off", 0: "off", 1: "on_1", 2: "on_2"})
"""Whether XLA compiles, by optimization.graph.level."""


class TensorFlowBackend(Backend):
    """Serves `model.savedmodel`, a folder, and `model.graphdef`."""

    name = "tensorflow"
    model_filename = SAVED_MODEL
    gpu_accelerators = frozenset({TENSORRT, MIXED_PRECISION, "gpu_io"})

    def inspect(self, source: ModelSource) -> Signature | None:
        """The signature of a SavedModel; a GraphDef does not describe its inputs and outputs."""
        if source.spec.platform == GRAPH_DEF_PLATFORM:
            return None
        return describe(source.spec.name, _signature(source))

    def load(self, source: ModelSource) -> Model:
        """Check the configuration against the file; the workers read the graph itself."""
        spec = source.spec
        told = self._read_config()
        graph = _read_parameters(source)
        if spec.platform == GRAPH_DEF_PLATFORM:
            for kind, tensors in (("input", spec.model_inputs), ("output", spec.model_outputs)):
                if not tensors:
                    raise BackendError(
                        f"model '{spec.name}': the configuration must contain at least one {kind}; a GraphDef does not "
                        f"describe its {kind}s"
                    )
            graph["file"] = str(_find(source, GRAPH_DEF))
        else:
            signature = _signature(source)
            check(spec, signature)
            graph["file"] = str(_find(source, SAVED_MODEL))
            graph["signature"] = signature.name
        arguments = {"tensorflow": json.dumps({**told, **graph})}
        return run_program(PROGRAM, source, self.config, self.services, arguments, needs="tensorflow")

    def _read_config(self) -> dict[str, object]:
        parameters = Parameters(self.config, "--backend-config of backend 'tensorflow'")
        parameters.warn_unknown(OF_THE_BACKEND | GLOBAL)
        if parameters.text(VERSION, "2") != "2":
            raise parameters.error(VERSION, "expected 2: this server does not run TensorFlow 1")
        try:
            fraction = float(parameters.text(MEMORY_FRACTION, "0"))
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            raise parameters.error(MEMORY_FRACTION, "expected a number from 0 to 1")
        return {"soft_placement": parameters.flag(SOFT_PLACEMENT, True), "memory_fraction": fraction}


def _find(source: ModelSource, usual: str) -> Path:
    path = source.model_file(usual)
    if not path.exists():
        raise source.not_found(path)
    return path


def _signature(source: ModelSource) -> SavedSignature:
    parameters = Parameters(source.spec.parameters, f"model '{source.spec.name}'")
    tag = parameters.text(TAG) or "serve"
    return read_signature(_find(source, SAVED_MODEL), source.spec.name, tag, parameters.text(SIGNATURE))


def _read_parameters(source: ModelSource) -> dict[str, object]:
    spec = source.spec
    parameters = Parameters(spec.parameters, f"model '{spec.name}'")
    parameters.warn_unknown(KNOWN | OF_WORKERS)
    parameters.integer(SHARING, minimum=1)
    level = spec.graph_level or 0
    if level not in LEVELS:
        raise BackendError(f"model '{spec.name}': optimization.graph.level is {level}, expected -1, 0, 1 or 2")
    names = {accelerator.name for accelerator in spec.gpu_accelerators}
    on_gpu = any(instance.kind == "GPU" for instance in spec.instances)
    if TENSORRT in names and on_gpu:
        raise BackendError(
            f"model '{spec.name}': execution accelerator 'tensorrt' is not served: TensorFlow has no TF-TRT since "
            "2.18; convert the model to ONNX, and use the backend tensorrt or onnxruntime with that accelerator"
        )
    return {
        "intra_threads": parameters.integer(INTRA_THREADS, 0),
        "inter_threads": parameters.integer(INTER_THREADS, 0),
        "tag": parameters.text(TAG) or "serve",
        "init_ops": _init_ops(source, parameters),
        "xla": LEVELS[level],
        "mixed_precision": MIXED_PRECISION in names and on_gpu,
    }


def _init_ops(source: ModelSource, parameters: Parameters) -> list[str]:
    """The operators to run once, from a JSON file in the version's folder, or else in the model's.

    Raises:
        BackendError: the file is missing, or has not the form {"init_ops": ["init"]}.
    """
    name = parameters.text(INIT_OPS)
    if not name:
        return []
    path = source.file(name)
    if not path.is_file():
        path = inside(source.path.parent, name, source.path.parent)
    try:
        told = json.loads(path.read_text())["init_ops"]
        if isinstance(told, list) and all(isinstance(each, str) for each in told):
            return told
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise parameters.error(INIT_OPS, f'expected a JSON file like {{"init_ops": ["init"]}}, which \'{path}\' is not')


def check(spec: ModelSpec, signature: SavedSignature) -> None:
    """Compare a configuration with the signature.

    Raises:
        BackendError: they differ; the text names the tensor, what the model has and what the configuration says.
    """
    inputs = {tensor.name: tensor for tensor in signature.inputs}
    outputs = {tensor.name: tensor for tensor in signature.outputs}
    check_names(spec, "input", spec.model_inputs, inputs)
    configured = {tensor.name for tensor in spec.model_inputs}
    check_none_missing(spec, inputs, [name for name in inputs if name not in configured])
    check_names(spec, "output", spec.model_outputs, outputs)
    for tensor in spec.model_inputs:
        if tensor.optional:
            raise BackendError(
                f"model '{spec.name}': input '{tensor.name}' must not be optional: no signature has those"
            )
        _check_tensor(spec, "input", tensor, inputs[tensor.name])
    for tensor in spec.model_outputs:
        _check_tensor(spec, "output", tensor, outputs[tensor.name])


def _check_tensor(spec: ModelSpec, kind: str, tensor: TensorSpec, saved: Tensor) -> None:
    if saved.datatype != tensor.datatype:
        raise BackendError(
            f"unable to load model '{spec.name}', configuration expects datatype {tensor.datatype} for {kind} "
            f"'{tensor.name}', model provides {saved.datatype or f'TensorFlow number {saved.dtype}, not served here'}"
        )
    ragged = not tensor.dims and any(
        tensor.name in (each.name, each.like_input) and (each.ragged or each.like_input)
        for each in (*spec.inputs, *spec.outputs)
    )
    if saved.shape is not None and not ragged:
        check_dims(spec, tensor, saved.shape)
