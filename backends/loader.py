"""Finds backends by name and imports each when the first model asks for it."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType

from inferd.backends.api import Backend, BackendError, Services
from inferd.backends.installing import pip_install
from inferd.backends.opening import import_framework, open_libraries
from inferd.backends.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Entry:
    """A backend that comes with the server."""

    target: str  # "module:class"
    model_filename: str = ""
    requires: str = ""  # the framework's import name; empty when it needs none
    libraries: tuple[str, ...] = ()  # of the framework's package, to be opened before it is imported
    on_gpu: bool = False  # instances go to a GPU, if there is one, unless the configuration says otherwise


BUILTIN: Mapping[str, Entry] = MappingProxyType(
    {
        "identity": Entry("inferd.backends.identity:IdentityBackend"),
        "pytorch": Entry(
            "inferd.backends.pytorch:PyTorchBackend", "model.pt", "torch", ("lib/libtorch_python.so",), on_gpu=True
        ),
        "onnxruntime": Entry(
            "inferd.backends.onnxruntime:OnnxRuntimeBackend",
            "model.onnx",
            "onnxruntime",
            ("capi/onnxruntime_pybind11_state*.so",),
        ),
        "openvino": Entry("inferd.backends.openvino:OpenVinoBackend", "model.xml", "openvino", ("_pyopenvino*.so",)),
        "tensorflow": Entry("inferd.backends.tensorflow:TensorFlowBackend", "model.savedmodel", on_gpu=True),
        "tensorrt": Entry("inferd.backends.tensorrt:TensorRTBackend", "model.plan", on_gpu=True),
        "python": Entry("inferd.backends.python:PythonBackend", "model.py"),
    }
)

PLATFORMS: Mapping[str, str] = MappingProxyType(
    {
        "pytorch_libtorch": "pytorch",
        "torch_aoti": "pytorch",
        "onnxruntime_onnx": "onnxruntime",
        "tensorflow_savedmodel": "tensorflow",
        "tensorflow_graphdef": "tensorflow",
        "tensorrt_plan": "tensorrt",
    }
)
"""The backend of each `platform` of `config.pbtxt`. A backend's first platform is its usual one."""

OWN_FILES: Mapping[str, str] = MappingProxyType({"torch_aoti": "model.pt2", "tensorflow_graphdef": "model.graphdef"})
"""The model file of a platform, where it is not its backend's usual one."""

ENTRY_POINTS = "inferd.backends"
"""The group of entry points by which installed packages bring backends: the name of each is the backend's."""

GLOBAL = ""
"""The name under which `--backend-config` options for every backend are kept."""

PROGRAM = "model.py"
"""In a folder of `--backend-directory`: a backend that is a program for the Python backend."""

LIBRARY = "libtriton_{}.so"
"""The file of a backend that was compiled for Triton: in a folder of `--backend-directory`, or with a model."""
LIBRARY_OPTION = "library"
"""A key of `--backend-config`: the path of that file, which then serves in place of the server's own backend."""

PRELOAD = "preload"
"""A key of `--backend-config`: whether the server imports the backend, and its framework, before it serves."""

# A backend's name becomes part of a path and of a module name.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def backend_of_platform(platform: str) -> str | None:
    """The backend's name; None for a platform that no backend here serves."""
    return PLATFORMS.get(platform)


@cache
def model_files(backend: str) -> Mapping[str, str]:
    """The platforms of a backend that comes with the server, and the model file of each; "" where there is none."""
    usual = BUILTIN[backend].model_filename
    platforms = [platform for platform, name in PLATFORMS.items() if name == backend] or [""]
    return {platform: OWN_FILES.get(platform, usual) for platform in platforms}


class BackendLoader:
    """Makes each backend once. Safe to use from several threads.

    Args:
        configs: `--backend-config` by backend name; options for every backend under `GLOBAL`.
        directory: `--backend-directory`, which may have backends as files. The backend <name> is the first of:
            1. `<name>.py` or `<name>/__init__.py` in the directory, or `<name>/model.py`, a program for the Python
               backend that serves all models which name it. So such a file replaces a backend of the server.
            2. The server's own backend.
            3. `<name>/libtriton_<name>.so` in the directory, compiled for Triton: a directory of Triton's has some of
               the same names as the server's own backends.
            4. The backend of an installed package, by an entry point of the group `ENTRY_POINTS`.
    """

    def __init__(
        self, configs: Mapping[str, Mapping[str, str]] = MappingProxyType({}), directory: Path | None = None
    ) -> None:
        self._configs = configs
        self._directory = directory
        self._made: dict[str, Backend] = {}
        self._services: Services | None = None
        self._lock = threading.RLock()

    def backend(self, name: str) -> Backend:
        """The backend of this name or platform.

        Raises:
            BackendError: there is none, or what it needs is not installed; the text says how to get it.
        """
        name = PLATFORMS.get(name, name)
        with self._lock:
            if name not in self._made:
                self._made[name] = self._make(name)
                self._made[name].services = self._services
            return self._made[name]

    def backend_of_model(self, name: str, folders: Sequence[Path]) -> Backend:
        """The backend of a model: a library that lies with the model, else the one of this name.

        Args:
            name: of the backend, or a platform.
            folders: of the version and of the model, in the order of the search.

        Raises:
            BackendError: as for `backend`.
        """
        if NAME.fullmatch(name):
            for folder in folders:
                library = f"{folder}/{LIBRARY.format(name)}"
                if os.path.isfile(library):  # noqa: PTH113 (a start looks for up to four such files for each model)
                    made = _compiled(self._config(name), name, Path(library))
                    made.services = self._services
                    return made
        return self.backend(name)

    def preload(self) -> None:
        """Import the backends that the configuration names for import before the server serves.

        Raises:
            BackendError: one is not installed, or the configuration is wrong.
        """
        for name, config in self._configs.items():
            wanted = Parameters(config, f"--backend-config={name or 'KEY=VALUE'}")
            if not wanted.flag(PRELOAD, False):
                continue
            if name == GLOBAL:
                raise wanted.error(PRELOAD, f"expected with a backend's name: BACKEND,{PRELOAD}=true")
            self.backend(name)
            if name in BUILTIN and BUILTIN[name].requires:
                try:
                    import_framework(BUILTIN[name].requires)
                except (ImportError, OSError) as error:
                    raise BackendError(
                        f"backend '{name}': {BUILTIN[name].requires} does not import: {type(error).__name__}: {error}"
                    ) from error

    def unknown(self) -> list[str]:
        """Names in the configuration that no backend has."""
        return [
            name
            for name in self._configs
            if name not in {GLOBAL, *BUILTIN, *_entry_points()}
            and self._user_file(name) is None
            and self._library(name) is None
        ]

    def serve(self, services: Services) -> None:
        """Give every backend the services of the server, those made later included."""
        with self._lock:
            self._services = services
            for backend in self._made.values():
                backend.services = services

    def _config(self, name: str) -> Mapping[str, str]:
        given = {**self._configs.get(GLOBAL, {}), **self._configs.get(name, {})}
        return MappingProxyType({key: value for key, value in given.items() if key != PRELOAD})

    def _make(self, name: str) -> Backend:
        config = self._config(name)
        file = self._user_file(name)
        if file is not None and file.name == PROGRAM and file.parent.name == name:
            python = _builtin_class("python", BUILTIN["python"])
            return python(MappingProxyType({**self._config("python"), **config})).for_program(name, file)
        if file is not None:
            return _only_backend(_import_file(name, file), name)(config)
        library = self._library(name)
        if library is not None and (name not in BUILTIN or LIBRARY_OPTION in config):
            return _compiled(config, name, library)
        if name not in BUILTIN:
            installed = _installed_class(name)
            if installed is None:
                raise BackendError(f"unable to find backend '{name}'{self._looked_in(name)}")
            return installed(config)
        return _builtin_class(name, BUILTIN[name])(config)

    def _user_file(self, name: str) -> Path | None:
        if self._directory is None or not NAME.fullmatch(name):
            return None
        folder = self._directory / name
        candidates = (self._directory / f"{name}.py", folder / "__init__.py", folder / PROGRAM)
        return next((file for file in candidates if file.is_file()), None)

    def _library(self, name: str) -> Path | None:
        """The library of a backend that was compiled for Triton."""
        named = self._configs.get(name, {}).get(LIBRARY_OPTION)
        if named:
            return Path(named)
        if self._directory is None or not NAME.fullmatch(name):
            return None
        found = self._directory / name / LIBRARY.format(name)
        return found if found.is_file() else None

    def _looked_in(self, name: str) -> str:
        close: list[str] = []
        if NAME.fullmatch(name):
            close = [each for each in BUILTIN if name in each] or difflib.get_close_matches(name, BUILTIN, 1)
        meant = f"did you mean '{close[0]}'? It" if close else "it"
        place = f", nor is it in the backend directory '{self._directory}'" if self._directory else ""
        return f": {meant} is none of {', '.join((*BUILTIN, *_entry_points()))}{place}"


def _compiled(config: Mapping[str, str], name: str, library: Path) -> Backend:
    found: type[Backend] = importlib.import_module("inferd.backends.triton_api").TritonApiBackend
    make: Callable[..., Backend] = found
    return make(config, name, library)


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points of the backends of installed packages, by name."""
    return {each.name: each for each in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _installed_class(name: str) -> type[Backend] | None:
    """The backend of this name that an installed package brings; None if none does.

    Raises:
        BackendError: the entry point cannot be imported, or is no backend.
    """
    point = _entry_points().get(name)
    if point is None:
        return None
    package = f" of '{point.dist.name}'" if point.dist is not None else ""
    try:
        found = point.load()
    except Exception as error:
        raise BackendError(
            f"backend '{name}'{package} does not import from '{point.value}': {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, type) or not issubclass(found, Backend):
        raise BackendError(
            f"backend '{name}'{package}: '{point.value}' must be a subclass of inferd.backends.api.Backend"
        )
    return found


def _builtin_class(name: str, entry: Entry) -> type[Backend]:
    # Only found, not imported: the first load of a model imports the framework.
    if entry.requires and not _is_installed(entry.requires):
        raise BackendError(
            f"backend '{name}' needs {entry.requires}, which {sys.executable} does not find: "
            f"{pip_install(entry.requires)}"
        )
    if entry.requires:
        open_libraries(entry.requires, entry.libraries)
    module, _, attribute = entry.target.partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), attribute)
    return found


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _import_file(name: str, file: Path) -> ModuleType:
    """Import a user's module under a name that cannot hide an installed package.

    Raises:
        BackendError: the module raises.
    """
    spec = importlib.util.spec_from_file_location(f"inferd_backend_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise BackendError(
            f"backend '{name}' does not import from '{file}': {type(error).__name__}: {error}"
        ) from error
    return module


def _only_backend(module: ModuleType, name: str) -> type[Backend]:
    """The one class of the module that is a Backend and was written there."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Backend) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        raise BackendError(f"backend '{name}': '{module.__file__}' must define one subclass of Backend, it has {names}")
    return found[0]
