"""Backends compiled for Triton: `libtriton_<name>.so`, loaded unmodified by the worker process of each instance."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from inferd.backends.api import Backend, BackendError, ModelSource
from inferd.backends.python.backend import PythonModel
from inferd.backends.python.options import ENVIRONMENT, KEYS
from inferd.backends.python.program import run_program

log = logging.getLogger("inferd.backends")

PROGRAM = "triton_api_backend.py"
HOST = "inferd.backends.triton_api._host"
ALWAYS_SAID = {"min-compute-capability": "6.000000", "default-max-batch-size": "4"}
"""The configuration that Triton gives every backend by default."""
COMPLETES = b"TRITONBACKEND_ModelSetConfig"
"""A symbol that libraries import if they complete configurations."""


class TritonApiBackend(Backend):
    """Serves the models of one library."""

    name = "triton_api"
    completes = True
    completes_missing = True
    needs_tensors = False

    def __init__(self, config: Mapping[str, str], name: str, library: Path) -> None:
        """A backend.

        Args:
            config: the backend's options of `--backend-config`; the library gets all of them.
            name: the name by which models name the backend.
            library: the path of `libtriton_<name>.so`.
        """
        super().__init__(config)
        self._name = name
        self._library = library

    def load(self, source: ModelSource) -> PythonModel:
        """Describe the workers; each loads the library by itself."""
        if not self._library.is_file():
            raise BackendError(f"backend '{self._name}': there is no file '{self._library}'")
        found = importlib.util.find_spec(HOST)
        if found is None or not found.origin:
            raise BackendError(f"backend '{self._name}' needs the extension {HOST}, which is not built")
        told = {
            "host": found.origin,
            "library": str(self._library.absolute()),
            "backend": self._name,
            "config": {**ALWAYS_SAID, "backend-directory": str(self._library.absolute().parent.parent), **self.config},
            "logs_verbosely": log.isEnabledFor(logging.DEBUG),
        }
        # ENVIRONMENT would choose the worker's interpreter, which must be the one for which the host was built. A
        # backend may use a parameter of this name, as Triton's for Python does: it finds it in the configuration.
        parameters = {key: value for key, value in source.spec.parameters.items() if key != ENVIRONMENT}
        source = replace(source, spec=replace(source.spec, parameters=parameters))
        workers = {key: value for key, value in self.config.items() if key in KEYS}
        return run_program(PROGRAM, source, workers, self.services, {"triton_api": json.dumps(told)})

    def check(self, source: ModelSource) -> None:
        """Look for the library without running it."""
        self.load(source)

    def complete(self, source: ModelSource) -> str | None:
        """Have the library complete the configuration, in a process of its own."""
        try:
            if COMPLETES not in self._library.read_bytes():
                return None
        except OSError as error:
            text = (error.strerror or str(error)).lower()
            raise BackendError(f"backend '{self._name}': '{self._library}': {text}") from error
        return json.dumps(self.load(source).complete())
