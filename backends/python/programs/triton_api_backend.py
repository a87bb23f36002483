"""A backend that was compiled for Triton's C API, in the process of one instance."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import ExtensionFileLoader
from typing import Any

import triton_python_backend_utils as pb_utils


def load_host(path: str) -> Any:
    """The extension that hosts the backend. Libraries that are loaded later find its symbols."""
    loader = ExtensionFileLoader("_host", path)
    spec = importlib.util.spec_from_file_location("_host", path, loader=loader)
    assert spec is not None
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    finally:
        sys.setdlopenflags(flags)
    return module


def compact(value: dict[str, Any]) -> str:
    """JSON as Triton writes it."""
    return json.dumps(value, separators=(",", ":"))


def loaded(args: dict[str, str], config: dict[str, Any], completes: bool) -> Any:
    """The backend with its model.

    Raises:
        TritonModelException: the backend does not load, or refuses the model.
    """
    options = json.loads(args["triton_api"])
    settings = {**options["config"], "auto-complete-config": "true" if completes else "false"}
    host = load_host(options["host"])
    backend = host.CompiledBackend(
        options["library"], options["backend"], compact({"cmdline": settings}), options["logs_verbosely"]
    )
    folder, version = args["model_repository"], int(args["model_version"])
    backend.load(args["model_name"], folder, version, compact(config), completes)
    return backend


class TritonPythonModel:
    """Hands batches to the backend."""

    @staticmethod
    def complete_with_arguments(config: pb_utils.ModelConfig, args: dict[str, str]) -> pb_utils.ModelConfig:
        """Have the backend complete the configuration."""
        backend = loaded(args, config.as_dict(), True)
        completed = pb_utils.ModelConfig(backend.config())
        backend.close()
        return completed

    def initialize(self, args: dict[str, str]) -> None:
        """Load the backend, the model and the instance."""
        config = json.loads(args["model_config"])
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        sequences = config.get("sequence_batching", {})
        states = [
            (each["input_name"], each["output_name"], bool(each.get("use_same_buffer_for_input_output")))
            for each in sequences.get("state", ())
        ]
        iterative = bool(sequences.get("iterative_sequence"))
        self._backend = loaded(args, config, False)
        kind, device = args["model_instance_kind"], int(args["model_instance_device_id"])
        self._backend.start(args["model_instance_name"], kind, device, states, self._decoupled, iterative)
        if self._backend.says_ready:
            self.is_ready = self._backend.is_ready

    def execute(self, requests: list[Any]) -> Any:
        """Give the backend a batch."""
        responses = self._backend.execute(requests)
        return None if self._decoupled else responses

    def finalize(self) -> None:
        """Finalize the instance, the model and the backend."""
        self._backend.close()
