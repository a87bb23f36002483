"""The options of the Python backend: `--backend-config=python,<key>=<value>`, and the parameters of a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inferd.backends.api import ModelSpec
from inferd.backends.parameters import Parameters

log = logging.getLogger("inferd.python")

STUB_TIMEOUT = "stub-timeout-seconds"
LOAD_TIMEOUT = "load-timeout-seconds"
EXECUTION_TIMEOUT = "execution-timeout-seconds"
BUSY_POLL = "busy-poll-microseconds"
CACHE_DIRECTORY = "environment-cache-directory"
PASSED = "environment-variables"
MOST_SECONDS = 10**9
BUSY_POLL_DEFAULT = 60  # µs; about the cost of sleeping and of waking an idle core of a virtual machine
WITHOUT_MEANING = {
    "shm-default-byte-size": "shared memory begins empty and grows with what is written to it",
    "shm-growth-byte-size": "shared memory grows by what is written to it",
    "shm_message_queue_size": "there is no queue of messages to be sized",
    "shm-region-prefix-name": "shared memory has no name in any file system",
    "thread-pool-size": "responses and BLS calls need no threads of the server",
}
"""Keys of Triton's backend that are accepted without effect, and the reasons."""
KEYS = frozenset({STUB_TIMEOUT, LOAD_TIMEOUT, EXECUTION_TIMEOUT, BUSY_POLL, CACHE_DIRECTORY, PASSED, *WITHOUT_MEANING})
GLOBAL = ("backend-directory", "default-max-batch-size", "min-compute-capability", "auto-complete-config")

ENVIRONMENT = "EXECUTION_ENV_PATH"
CPU_ONLY_INPUTS = "FORCE_CPU_ONLY_INPUT_TENSORS"
MODEL_TIMEOUT = "EXECUTION_TIMEOUT_SECONDS"
MODE = "EXECUTION_MODE"
PROCESS, IN_PROCESS = "process", "in-process"


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The options of all Python models."""

    stub_timeout: float  # seconds for a worker's interpreter to start, and for a worker to finish
    load_timeout: float  # seconds for a worker to load its model; 0: any time
    execution_timeout: float  # seconds; 0: none
    busy_poll: float  # seconds for which a worker looks for its next packet before it sleeps
    cache: Path | None  # where archives with environments are unpacked; None: the user has no home folder
    passed: tuple[str, ...]  # names of the server's environment variables that workers get; see `passed_on`


def read_backend_options(config: Mapping[str, str]) -> BackendOptions:
    """Read `--backend-config`, and log options that have no effect.

    Raises:
        BackendError: a value is not what its key takes.
    """
    parameters = Parameters(config, "--backend-config of backend 'python'")
    for key in config:
        if key in WITHOUT_MEANING:
            log.info("--backend-config=python,%s has no effect: %s", key, WITHOUT_MEANING[key])
    parameters.warn_unknown(KEYS | set(GLOBAL))
    return BackendOptions(
        stub_timeout=parameters.integer(STUB_TIMEOUT, 30, minimum=1, maximum=MOST_SECONDS) or 30,
        load_timeout=_seconds(parameters, LOAD_TIMEOUT, 0.0),
        execution_timeout=_seconds(parameters, EXECUTION_TIMEOUT, 0.0),
        busy_poll=(parameters.integer(BUSY_POLL, BUSY_POLL_DEFAULT, maximum=MOST_SECONDS) or 0) / 1e6,
        cache=Path(folder) if (folder := parameters.text(CACHE_DIRECTORY)) else default_cache(),
        passed=tuple(filter(None, parameters.text(PASSED, "*").split(":"))),
    )


def default_cache() -> Path | None:
    """`$XDG_CACHE_HOME/inferd/environments`, by default in ~/.cache; None if the user has no home folder."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError:  # without HOME, and without an entry in the table of users
        return None
    return base / "inferd" / "environments"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The parameters of one model."""

    environment: str  # EXECUTION_ENV_PATH as written; "": the server's own interpreter
    execution_timeout: float  # seconds; 0: none
    in_process: bool  # EXECUTION_MODE: the model runs on a thread of the server
    gpu_inputs: bool  # FORCE_CPU_ONLY_INPUT_TENSORS "no": inputs on the GPU of an instance stay there


def read_model_options(spec: ModelSpec, backend: BackendOptions) -> ModelOptions:
    """Read a model's parameters. Those that the backend does not know are the model's own and reach it by its config.

    Raises:
        BackendError: a value is not what its parameter takes.
    """
    parameters = Parameters(spec.parameters, f"model '{spec.name}'")
    options = ModelOptions(
        environment=parameters.text(ENVIRONMENT).strip(),
        execution_timeout=_seconds(parameters, MODEL_TIMEOUT, backend.execution_timeout),
        in_process=_in_process(parameters),
        gpu_inputs=not _cpu_only(parameters),
    )
    if options.in_process and options.environment:
        raise parameters.error(ENVIRONMENT, f"expected nothing: {MODE} {IN_PROCESS} is the server's own interpreter")
    if options.in_process and parameters.text(MODEL_TIMEOUT) and options.execution_timeout:
        raise parameters.error(MODEL_TIMEOUT, f"expected nothing: with {MODE} {IN_PROCESS} nothing can end a thread")
    if options.in_process and options.execution_timeout:
        log.info("model '%s': %s does not hold for it: with %s %s nothing can end a thread", spec.name,
                 EXECUTION_TIMEOUT, MODE, IN_PROCESS)  # fmt: skip
    return options


def _in_process(parameters: Parameters) -> bool:
    mode = parameters.text(MODE, PROCESS).strip()
    if mode not in (PROCESS, IN_PROCESS):
        raise parameters.error(MODE, f"expected {PROCESS} or {IN_PROCESS}")
    return mode == IN_PROCESS


def _cpu_only(parameters: Parameters) -> bool:
    text = parameters.text(CPU_ONLY_INPUTS, "yes")
    if text not in ("yes", "no"):
        raise parameters.error(CPU_ONLY_INPUTS, "expected yes or no")
    return text == "yes"


def _seconds(parameters: Parameters, key: str, default: float) -> float:
    text = parameters.text(key)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        raise parameters.error(key, "expected a number of seconds") from None
    if not 0 <= seconds <= MOST_SECONDS:
        raise parameters.error(key, f"expected 0 (no limit) to {MOST_SECONDS} seconds")
    return seconds
