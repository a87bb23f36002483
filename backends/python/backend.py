"""The Python backend: `model.py` files, written for Triton's `triton_python_backend_utils`, in worker processes."""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from _native.cuda import driver
from _native.memory.arena import ArenaHandle
from backends.api import (
    Backend,
    BackendError,
    InstanceSpec,
    Model,
    ModelSource,
    NativeInstance,
    Services,
    TensorSpec,
    WorkerStatus,
)
from backends.python._attend import FloodError, NonsenseError, TeamHandle
from backends.python.arenas import arena_of
from backends.python.attendant import Attendant, Post
from backends.python.completion import complete, may_complete
from backends.python.environment import Environment, find_environment
from backends.python.options import BackendOptions, read_backend_options, read_model_options
from backends.python.process import Launch
from backends.python.worker import protocol

log = logging.getLogger("inferd.python")

MODEL_FILE = "model.py"
MODEL_CLASS = "TritonPythonModel"
THREADS = "OMP_NUM_THREADS"  # what torch, MKL, OpenBLAS and OpenMP look at
PROGRAM_ENVIRONMENT = "pb_exec_env_model.py.tar.gz"  # beside the program of a Python-based backend
DATATYPES = {
    "BOOL": 1, "UINT8": 2, "UINT16": 3, "UINT32": 4, "UINT64": 5, "INT8": 6, "INT16": 7, "INT32": 8, "INT64": 9,
    "FP16": 10, "FP32": 11, "FP64": 12, "BYTES": 13, "BF16": 14,
}  # fmt: skip
WINDOW = 64  # responses of one request that a sender may have on their way to the client; as in _slots.pxd
MOST_ASKED = 256  # CALLs of a worker under way
MOST_ASKED_BYTES = 1 << 30
LEVELS = {
    protocol.LOG_VERBOSE: logging.DEBUG,
    protocol.LOG_INFO: logging.INFO,
    protocol.LOG_WARNING: logging.WARNING,
    protocol.LOG_ERROR: logging.ERROR,
}


class PythonBackend(Backend):
    """Serves `model.py` files."""

    name = "python"
    completes = True
    model_filename = MODEL_FILE
    needs_tensors = False  # one may make its outputs of nothing, or act without answering

    def __init__(self, config: Mapping[str, str] = MappingProxyType({}), program: Path | None = None) -> None:
        """`program`: what runs every model, where it is not a file of the model's own."""
        super().__init__(config)
        self._options: BackendOptions | None = None
        self._program = program

    def for_program(self, name: str, program: Path) -> PythonBackend:  # noqa: ARG002 (errors name the file)
        """See Backend: a Python-based backend, such as Triton's vLLM backend."""
        return PythonBackend(self.config, program)

    def load(self, source: ModelSource) -> PythonModel:
        """Check what is there; the model's code is not looked at before its instances are made."""
        if self._options is None:
            self._options = read_backend_options(self.config)
        return PythonModel(source, self._options, self._program, self.services)

    def check(self, source: ModelSource) -> None:
        """Look at the model's file without running it."""
        self.load(source).check_syntax()

    def complete(self, source: ModelSource) -> str | None:
        """Run auto_complete_config, if the model has it, in a process that ends with it."""
        if not may_complete(self._program or source.model_file(MODEL_FILE)):
            return None
        return json.dumps(self.load(source).complete())


class PythonModel(Model):
    """One loaded version: what all its instances are started with."""

    def __init__(
        self, source: ModelSource, options: BackendOptions, program: Path | None, services: Services | None
    ) -> None:
        self.source = source
        self._services = services
        self._file = program or source.model_file(MODEL_FILE)
        if not self._file.is_file():
            raise source.not_found(self._file)
        model_dir = source.path.parent
        self._model_options = read_model_options(source.spec, options)
        packed = self._file.parent / PROGRAM_ENVIRONMENT
        environment = self._model_options.environment or (str(packed) if program and packed.is_file() else "")
        found = find_environment(
            environment,
            model_dir,
            options.cache,
            options.passed,
            anywhere=not (source.from_client and self._model_options.environment),
        )
        self._environment = _with_threads(found, source)
        if (model_dir / "triton_python_backend_stub").exists():
            log.warning(
                "model '%s': triton_python_backend_stub is not used; %s names an environment with any Python from 3.9",
                source.spec.name,
                "EXECUTION_ENV_PATH",
            )
        self._timeout = options.stub_timeout
        # a thread of the server that looks would keep the interpreter from the others
        self._patience = 0.0 if self._model_options.in_process else options.busy_poll
        self.arena: ArenaHandle = arena_of(source.spec.name)
        self._team = TeamHandle()

    def create_instance(self, spec: InstanceSpec) -> PythonInstance:
        """Start a worker and wait until it has loaded the model."""
        options = self._model_options
        launch = Launch(spec.name, self._environment, self._configuration(spec), self._timeout, options.in_process)
        timeout = 0.0 if options.in_process else options.execution_timeout  # nothing can end a thread
        post = Post(launch, self.arena, self._team, timeout, self._timeout)
        instance = PythonInstance(post, self.source.spec.name, self._services)
        if spec.kind == "GPU" and options.gpu_inputs:
            instance.input_device = spec.device
        return instance

    def check_syntax(self) -> None:
        """Find what the parser finds, where the server's own Python runs the model, and a class that is missing.

        Raises:
            BackendError: the file cannot be read or parsed, or does not define the class.
        """
        if self._environment.python != sys.executable:
            return  # another version may take what this one does not
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
        return complete(Launch(name, self._environment, configuration, self._timeout), self.arena)

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
    """Whether the file has the name where that may define it, or imports everything of a module."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and {node.name, node.asname} & {name, "*"}:
            return True
    return False


def _with_threads(environment: Environment, source: ModelSource) -> Environment:
    """The environment with OMP_NUM_THREADS, unless that is set: instances that each use every core slow each other."""
    config = json.loads(source.config_json) if source.config_json else {}
    workers = sum(int(group.get("count", 1)) for group in config.get("instance_group", ()))
    if workers < 2 or THREADS in environment.variables:
        return environment
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    log.info("model '%s': %s=%d in each of its %d workers", source.spec.name, THREADS, threads, workers)
    return replace(environment, variables={**environment.variables, THREADS: str(threads)})


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": DATATYPES[spec.datatype], "dims": list(spec.dims)}


class PythonInstance(NativeInstance):
    """A worker process, and the one that follows it when it dies."""

    def __init__(self, post: Post, model: str, services: Services | None = None) -> None:
        self._name = post.launch.name
        self._model = model
        self._services = services
        self._changed: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._asked: Future[bool] | None = None  # is_ready() of the model
        self._questions = 0
        self._asking = 0  # CALLs under way
        self._asking_bytes = 0
        self._attendant = Attendant(post, self._on_packet, self._on_change)
        if services is not None:
            self._attendant.link.allow_calls(services.entrance)
        try:
            self._attendant.start()
        except BackendError:
            self._forget_measures()
            raise
        self.executor = self._attendant.link.executor
        self.gate = self._attendant.link.gate
        self.remote = self._attendant.link.remote

    def __str__(self) -> str:
        return self._name

    @property
    def ready(self) -> bool:
        """Its worker is there and has loaded the model."""
        return self._attendant.up

    @property
    def worker(self) -> WorkerStatus:
        """See Instance."""
        return self._attendant.worker

    def watch(self, changed: Callable[[], object]) -> None:
        """See Instance."""
        self._changed.append(changed)

    def check(self) -> Future[bool] | None:
        """What the model's is_ready() says; those who ask while it is thinking share its answer."""
        if not self._attendant.said.get("is_ready"):
            return None
        with self._lock:
            if not self._attendant.up:  # nobody would answer, as _on_change has been here or will be
                unready: Future[bool] = Future()
                unready.set_result(False)
                return unready
            if self._asked is None or self._asked.done():
                self._asked = Future()
                self._questions += 1
                self._attendant.link.send_side(protocol.IS_READY, self._questions)
            return self._shared(self._asked)

    @staticmethod
    def _shared(asked: Future[bool]) -> Future[bool]:
        """A future of the same answer that its holder may cancel."""
        own: Future[bool] = Future()
        asked.add_done_callback(
            lambda done: own.set_result(done.result()) if own.set_running_or_notify_cancel() else None
        )
        return own

    def drain(self) -> None:
        """See Instance."""
        self._attendant.link.leave()

    def close(self) -> None:
        """Let the worker finalize its model and end."""
        self._attendant.stop()

    def _on_change(self) -> None:
        if not self._attendant.up:
            with self._lock:
                asked, self._asked = self._asked, None
            if asked is not None and not asked.done():
                asked.set_result(False)
            self._forget_measures()
        for changed in self._changed:
            changed()

    def _answered(self, number: int, ready: bool) -> None:
        with self._lock:
            asked = self._asked if number == self._questions else None
        if asked is not None and not asked.done():
            asked.set_result(ready)

    def _on_packet(self, kind: int, flags: int, code: int, number: int, record: bytes) -> None:
        if kind == protocol.HEALTH:
            if record:
                log.debug("%s: is_ready(): %s", self._name, record.decode("utf-8", "backslashreplace"))
            self._answered(number, bool(flags & protocol.TRUE))
        elif kind == protocol.CALL:
            self._serve_call(number, record)
        elif kind == protocol.METRIC and self._services is not None:
            self._services.measure(self, _object(record))
        elif kind == protocol.LOG:
            log.log(LEVELS.get(code, logging.INFO), "%s: %s", self._name, record.decode("utf-8", "backslashreplace"))

    def _forget_measures(self) -> None:
        if self._services is not None:
            self._services.forget_measures(self)

    def _serve_call(self, number: int, record: bytes) -> None:
        """What the model asks of the server that is no inference; see CALL in worker/protocol.py."""
        call = _call(record)
        with self._lock:
            if self._asking == MOST_ASKED or self._asking_bytes + len(record) > MOST_ASKED_BYTES:
                raise FloodError
            self._asking += 1
            self._asking_bytes += len(record)
        if self._services is None:
            nobody: Future[object] = Future()
            nobody.set_exception(BackendError("there is no server around this model"))
            self._answer_call(number, len(record), nobody)
            return
        what = str(call.pop("call", ""))
        self._services.ask(what, {**call, "asked_by": self._model}).add_done_callback(
            lambda done: self._answer_call(number, len(record), done)
        )

    def _answer_call(self, number: int, size: int, done: Future[object]) -> None:
        with self._lock:
            self._asking -= 1
            self._asking_bytes -= size
        self._tell(number, _said(done))

    def _tell(self, number: int, answer: Mapping[str, object]) -> None:
        self._attendant.link.send_side(protocol.ANSWER, number, json.dumps(answer).encode())


def _object(record: bytes) -> dict[str, Any]:
    """What a worker has written as a JSON object.

    Raises:
        NonsenseError: it is none.
    """
    try:
        found = json.loads(record)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NonsenseError
    return found


def _call(record: bytes) -> dict[str, Any]:
    """A CALL: a JSON object, and behind it the files that it names, which become its "files".

    Raises:
        NonsenseError: it is none.
    """
    if len(record) < protocol.CALL_HEAD.size:
        raise NonsenseError
    at = protocol.CALL_HEAD.size + protocol.CALL_HEAD.unpack_from(record)[0]
    call = _object(record[protocol.CALL_HEAD.size : at])
    files = call.get("files") or {}
    if not isinstance(files, dict):
        raise NonsenseError
    contents = {}
    for path, size in files.items():
        if not isinstance(size, int) or not 0 <= size <= len(record) - at:
            raise NonsenseError
        contents[path] = record[at : at + size]
        at += size
    if contents:
        call["files"] = contents
    return call


def _said(done: Future[object]) -> Mapping[str, object]:
    error = done.exception()
    if error is None:
        return {"result": done.result()}
    return {"error": str(error) or type(error).__name__, "code": protocol.CODE_INTERNAL}
