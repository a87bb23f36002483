"""`runtime: "model.py"`: an `nn.Module` in Python, executed in worker processes."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path

from inferd.backends.api import BackendError, Model, ModelSource, Services
from inferd.backends.parameters import Parameters
from inferd.backends.python.environment import SERVERS_OWN
from inferd.backends.python.program import run_program

RUNTIME = "model.py"
PROGRAM = "pytorch_module.py"
MODULE, SCRIPT = "model.py", "model.pt"

THREADS = "NUM_THREADS"
INTEROP_THREADS = "NUM_INTEROP_THREADS"
COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
WEIGHTS_ONLY = "WEIGHTS_ONLY"
KNOWN = frozenset({THREADS, INTEROP_THREADS, COMPILE, WEIGHTS_ONLY})
OF_WORKERS = frozenset({"EXECUTION_ENV_PATH", "EXECUTION_TIMEOUT_SECONDS", "FORCE_CPU_ONLY_INPUT_TENSORS"})


def load_module(source: ModelSource, config: Mapping[str, str], services: Services | None) -> Model:
    """Check what can be checked without running the module; its workers load it.

    Raises:
        BackendError: there is no module, or a parameter is wrong.
    """
    spec = source.spec
    parameters = Parameters(spec.parameters, f"model '{spec.name}'")
    parameters.warn_unknown(KNOWN | OF_WORKERS)
    for key in (THREADS, INTEROP_THREADS):
        parameters.integer(key, minimum=1)
    parameters.flag(WEIGHTS_ONLY, True)
    _check_compile(parameters)
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        if not tensors:
            raise BackendError(
                f"model '{spec.name}': the configuration must contain at least one {kind}, which a module does not "
                "describe"
            )
        for tensor in tensors:
            if tensor.datatype == "BYTES":
                raise BackendError(
                    f"model '{spec.name}': {kind} '{tensor.name}' is TYPE_STRING, which no torch.Tensor can be"
                )
    file = find_module(source)
    model = run_program(PROGRAM, source, config, services, {"model_file": str(file)}, needs="torch")
    if file.suffix == ".py" and model.python == SERVERS_OWN:  # another Python may have another syntax
        _check_syntax(file)
    return model


def find_module(source: ModelSource) -> Path:
    """The file of the module, or the TorchScript archive in its place.

    Raises:
        BackendError: neither is there.
    """
    name = source.spec.default_model_filename
    candidates = [source.file(name)] if name not in ("", SCRIPT) else [source.path / MODULE, source.path / SCRIPT]
    for file in candidates:
        if file.is_file():
            return file
    raise source.not_found(candidates[0])


def _check_compile(parameters: Parameters) -> None:
    text = parameters.text(COMPILE)
    if not text:
        return
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise parameters.error(COMPILE, "expected a JSON object of arguments of torch.compile")
    if "model" in told:
        raise parameters.error(COMPILE, "expected no 'model', which is not an optional parameter for 'torch.compile'")


def _check_syntax(file: Path) -> None:
    try:
        ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise BackendError(f"{file}{line}: {type(error).__name__}: {text}") from error
