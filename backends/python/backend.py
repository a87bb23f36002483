"""The Python backend: `model.py` files, written for Triton's `triton_python_backend_utils`, in worker processes."""

from __future__ import annotations

import ast
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from inferd._native.cuda import driver
from inferd._native.memory.arena import ArenaHandle
from inferd.backends.api import (
    Backend,
    BackendError,
    InstanceSpec,
    Model,
    ModelSource,
    Services,
    TensorSpec,
)
from inferd.backends.python._link import TeamHandle
from inferd.backends.python.arenas import arena_of
from inferd.backends.python.attendant import Post
from inferd.backends.python.completion import complete, may_complete
from inferd.backends.python.environment import SERVERS_OWN, Environment, find_environment
from inferd.backends.python.instance import PythonInstance
from inferd.backends.python.options import ENVIRONMENT, BackendOptions, read_backend_options, read_model_options
from inferd.backends.python.process import Launch

log = logging.getLogger("inferd.python")

MODEL_FILE = "model.py"
MODEL_CLASS = "TritonPythonModel"
THREADS = "OMP_NUM_THREADS"  # torch, MKL, OpenBLAS and OpenMP read them
PROGRAM_ENVIRONMENT = "pb_exec_env_model.py.tar.gz"  # beside the program of a Python-based backend
DATATYPES = {
    "BOOL": 1, "UINT8": 2, "UINT16": 3, "UINT32": 4, "UINT64": 5, "INT8": 6, "INT16": 7, "INT32": 8, "INT64": 9,
    "FP16": 10, "FP32": 11, "FP64": 12, "BYTES": 13, "BF16": 14,
}  # fmt: skip
WINDOW = 64  # responses of one request that a sender may have on their way to the client; as in _slots.pxd


class PythonBackend(Backend):
    """Serves `model.py` files."""

    name = "python"
    completes = True
    model_filename = MODEL_FILE
    runtimes = frozenset({MODEL_FILE})
    needs_tensors = False  # a model may need no inputs, or give no outputs

    def __init__(self, config: Mapping[str, str] = MappingProxyType({}), program: Path | None = None) -> None:
        """`program`: the file that runs every model, instead of the model's own."""
        super().__init__(config)
        self._options: BackendOptions | None = None
        self._program = program

    def for_program(self, name: str, program: Path) -> PythonBackend:  # noqa: ARG002 (errors name the file)
        """See Backend: a Python-based backend, such as Triton's vLLM backend."""
        return PythonBackend(self.config, program)

    def load(self, source: ModelSource) -> PythonModel:
        """Check that the files exist; the model's code is read when its instances are made."""
        if self._options is None:
            self._options = read_backend_options(self.config)
        return PythonModel(source, self._options, self._program, self.services)

    def check(self, source: ModelSource) -> None:
        """Check the model's file without running it."""
        self.load(source).check_syntax()

    def complete(self, source: ModelSource) -> str | None:
        """Run auto_complete_config, if the model has it, in a process that ends with it."""
        if not may_complete(self._program or source.model_file(MODEL_FILE)):
            return None
        return json.dumps(self.load(source).complete())


class PythonModel(Model):
    """One loaded version: the values with which its instances start."""

    def __init__(
        self,
        source: ModelSource,
        options: BackendOptions,
        program: Path | None,
        services: Services | None,
        *,
        environment: str = "",
        arguments: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """A model and its environment.

        Args:
            source: the model.
            options: of the backend.
            program: the file that runs it, if not its own.
            services: see Backend.
            environment: of the worker where the model's parameters name none.
            arguments: further arguments of the program's `initialize`.
        """
        self.source = source
        self._services = services
        self._arguments = arguments
        self._file = program or source.model_file(MODEL_FILE)
        if not self._file.is_file():
            raise source.not_found(self._file)
        model_dir = source.path.parent
        self._model_options = read_model_options(source.spec, options)
        packed = self._file.parent / PROGRAM_ENVIRONMENT
        own = str(packed) if program and packed.is_file() else ""
        found = find_environment(
            self._model_options.environment or environment or own,
            model_dir,
            options.cache,
            options.passed,
            anywhere=not (source.from_client and self._model_options.environment),
            option=ENVIRONMENT if self._model_options.environment else "--backend-config environment",
        )
        self._environment = found if self._model_options.in_process else _with_threads(found, source)
        if (model_dir / "triton_python_backend_stub").exists():
            log.warning(
                "model '%s': triton_python_backend_stub is not used; %s names an environment with any Python from 3.9",
                source.spec.name,
                ENVIRONMENT,
            )
        self._timeout = options.stub_timeout
        # nothing can end a thread
        self._load_timeout = 0.0 if self._model_options.in_process else options.load_timeout
        # a thread of the server that polls would hold the interpreter's lock
        self._patience = 0.0 if self._model_options.in_process else options.busy_poll
        self.arena: ArenaHandle = arena_of(source.spec.name)
        self._team = TeamHandle()

    @property
    def python(self) -> str:
        """The interpreter of its workers."""
        return self._environment.python

    def create_instance(self, spec: InstanceSpec) -> PythonInstance:
        """Start a worker and wait until it has loaded the model."""
        options = self._model_options
        launch = self._launch(spec.name, self._configuration(spec), in_process=options.in_process)
        timeout = 0.0 if options.in_process else options.execution_timeout
        post = Post(launch, self.arena, self._team, timeout, self._timeout)
        instance = PythonInstance(post, self.source.spec.name, self._services)
        if spec.kind == "GPU" and options.gpu_inputs:
            instance.input_device = spec.device
        return instance

    def check_syntax(self) -> None:
        """Parse the file, where the server's own Python runs the model, and check that its class exists.

        Raises:
            BackendError: the file cannot be read or parsed, or does not define the class.
        """
        if self.python != SERVERS_OWN:
            return  # another version of Python may accept syntax that this one does not
        try:
            module = ast.parse(self._file.read_bytes(), str(self._file))
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            text = error.msg if isinstance(error, SyntaxError) else str(error)
            raise BackendError(f"{self._file}{line}: {type(error).__name__}: {text}") from error
        except OSError as error:
            raise BackendError(f"{self._file}: {(error.strerror or str(error)).lower()}") from error
        if not _may_define(module, MODEL_CLASS):
            raise BackendError(f"{self._file}: it must define the class {MODEL_CLASS}")

    def complete(self) -> dict[str, Any]:
        """The configuration as the model completes it.

        Raises:
            BackendError: it refuses.
        """
        name = self.source.spec.name
        configuration = self._configuration(InstanceSpec(name))
        configuration.update(mode="complete", config=json.loads(self.source.config_json))
        return complete(self._launch(name, configuration), self.arena)

    def _launch(self, name: str, configuration: Mapping[str, Any], *, in_process: bool = False) -> Launch:
        return Launch(name, self._environment, configuration, self._timeout, self._load_timeout, in_process)

    def _configuration(self, spec: InstanceSpec) -> dict[str, Any]:
        source = self.source
        config = json.loads(source.config_json) if source.config_json else {}
        return {
            "mode": "serve",
            "model_file": str(self._file),
            "model_dir": str(source.path),
            "args": {
                "model_config": source.config_json,
                "model_instance_kind": spec.kind,
                "model_instance_name": spec.name,
                "model_instance_device_id": str(spec.device),
                "model_repository": str(source.path.parent),
                "model_version": str(source.version),
                "model_name": source.spec.name,
                **self._arguments,
            },
            "inputs": [_tensor(tensor) for tensor in source.spec.model_inputs],
            "outputs": [_tensor(tensor) for tensor in source.spec.model_outputs],
            "max_batch_size": source.spec.max_batch_size,
            "decoupled": bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            "window": WINDOW,
            "log_verbose": log.isEnabledFor(logging.DEBUG),
            "patience": self._patience,
            "cuda_driver": driver.library_name(),
        }


def _may_define(module: ast.Module, name: str) -> bool:
    """Whether the file may define the name, also by `from ... import *`."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and {node.name, node.asname} & {name, "*"}:
            return True
    return False


def _with_threads(environment: Environment, source: ModelSource) -> Environment:
    """The environment with OMP_NUM_THREADS, unless it is set: instances that each use every core slow each other."""
    workers = len(source.spec.instances)
    if workers < 2 or THREADS in environment.variables:
        return environment
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    log.info("model '%s': %s=%d in each of its %d workers", source.spec.name, THREADS, threads, workers)
    return replace(environment, variables={**environment.variables, THREADS: str(threads)})


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": DATATYPES[spec.datatype], "dims": list(spec.dims)}
