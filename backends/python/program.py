"""Models that one of the server's programs executes, in workers like those of Python models."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from inferd.backends.api import BackendError, ModelSource, Services
from inferd.backends.installing import pip_install
from inferd.backends.python.backend import PythonModel
from inferd.backends.python.environment import MODEL_DIRECTORY, SERVERS_OWN
from inferd.backends.python.options import KEYS, MODE, PROCESS, read_backend_options

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = "environment"
"""The key of `--backend-config` for the environment of a backend's models that name none of their own."""


def run_program(
    name: str,
    source: ModelSource,
    config: Mapping[str, str],
    services: Services | None,
    arguments: Mapping[str, str] = MappingProxyType({}),
    needs: str = "",
) -> PythonModel:
    """A model that a program executes.

    Args:
        name: of the program's file in `PROGRAMS`.
        source: the model.
        config: of the backend: the options of the Python backend, and `environment`.
        services: see Backend.
        arguments: what the program's `initialize` gets in addition.
        needs: the import name of the package that the interpreter must have.

    Raises:
        BackendError: the interpreter lacks the package, or a parameter is wrong.
    """
    if source.spec.parameters.get(MODE, PROCESS) != PROCESS:
        raise BackendError(
            f"model '{source.spec.name}': parameter '{MODE}' is '{source.spec.parameters[MODE]}', expected {PROCESS}: "
            f"models of backend '{source.spec.backend}' have worker processes"
        )
    environment = config.get(ENVIRONMENT, "")
    if environment and not environment.startswith(MODEL_DIRECTORY):
        environment = str(Path(environment).absolute())  # of the command line: relative to the working directory
    options = read_backend_options({key: value for key, value in config.items() if key in KEYS})
    model = PythonModel(source, options, PROGRAMS / name, services, environment=environment, arguments=arguments)
    if needs and model.python == SERVERS_OWN and importlib.util.find_spec(needs) is None:
        raise BackendError(
            f"model '{source.spec.name}' needs {needs}, which {sys.executable} does not find: "
            f"{pip_install(needs)}, or name an environment that has it, by --backend-config "
            f"{source.spec.backend},{ENVIRONMENT}=... for all models or by the parameter EXECUTION_ENV_PATH for one"
        )
    return model
