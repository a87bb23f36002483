"""The three packages of TensorRT: choice, import, and their log.

`tensorrt` builds and runs plans; `tensorrt_lean`, a tenth of its size, runs plans that were built version-compatible;
`tensorrt_rtx` builds and runs plans of its own kind, for consumer GPUs. The functions that this backend uses have the
same names in all of them, from version 10 on (`tests/backends/tensorrt/test_contract.py`).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from inferd.backends.api import BackendError
from inferd.backends.installing import pip_install

log = logging.getLogger("inferd.tensorrt")

AUTO = "auto"
MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tensorrt": ("tensorrt", "tensorrt_bindings"),
        "tensorrt_lean": ("tensorrt_lean", "tensorrt_lean_bindings"),
        "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
    }
)
"""The TensorRTs in the order of the search, and the names of modules that each may have.

A package without code, which not every installation has, re-exports the module under the first name.
"""

LEAN = "tensorrt_lean"
"""Runs plans, and builds none."""

LEVELS = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING, "INFO": logging.DEBUG}


class Library:
    """An imported TensorRT.

    Args:
        name: one of MODULES.
        module: the imported module.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.module = module
        self.version = str(module.__version__)
        self.loading = threading.Lock()
        """Held while a plan is read or a context made: TensorRT does not document that as safe in several threads."""
        self._said = threading.local()
        self.logger = _logger(module, self._hear)  # one for the process: TensorRT ignores a second one

    def __str__(self) -> str:
        return f"TensorRT {self.version} ({self.name})"

    @contextmanager
    def complaints(self) -> Iterator[list[str]]:
        """Collect TensorRT's errors on this thread. They are logged at the end, unless an exception ends the block."""
        errors: list[str] = []
        before = getattr(self._said, "errors", None)
        self._said.errors = errors
        try:
            yield errors
        finally:
            self._said.errors = before
        for text in errors:
            log.error("%s", text)

    def _hear(self, severity: str, text: str) -> None:
        level = LEVELS.get(severity, 0)
        errors = getattr(self._said, "errors", None)
        if level == logging.ERROR and errors is not None:
            errors.append(text)
        elif level:
            log.log(level, "%s", text)

    def load_plugins(self, files: Sequence[str]) -> None:
        """Register TensorRT's own plugins, and those of the shared libraries `files`.

        Raises:
            BackendError: a library does not load.
        """
        for file in files:
            try:
                ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise BackendError(f"plugins '{file}' of TensorRT do not load: {error}") from None
        if hasattr(self.module, "init_libnvinfer_plugins"):
            self.module.init_libnvinfer_plugins(self.logger, "")


def _logger(module: Any, hear: Any) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]  # the class is known at run time only
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            hear(severity.name, msg)

    return Logger()


def reason(complaints: Sequence[str], otherwise: str) -> str:
    """The first of TensorRT's errors, from which the others follow, or `otherwise`."""
    return complaints[0].strip() if complaints else otherwise


def is_installed(name: str) -> bool:
    """Whether some module of this TensorRT could be imported."""
    return any(importlib.util.find_spec(module) is not None for module in MODULES[name])


_imported: dict[str, Library] = {}
_lock = threading.Lock()


def open_library(wanted: str, *, builds: bool = False) -> Library:
    """Import a TensorRT, once.

    Args:
        wanted: one of MODULES, or AUTO for the first of them that is installed.
        builds: whether AUTO must build plans, which `tensorrt_lean` cannot.

    Raises:
        BackendError: none is installed, or none imports; the text says how to get one.
    """
    if wanted not in (AUTO, *MODULES):
        raise BackendError(f"there is no runtime '{wanted}' of TensorRT: expected {AUTO}, {', '.join(MODULES)}")
    names = [wanted]
    if wanted == AUTO:
        names = [name for name in MODULES if is_installed(name) and not (builds and name == LEAN)]
    if not names or not is_installed(names[0]):
        package = "tensorrt" if wanted == AUTO else wanted
        extra = package.replace("_", "-")
        raise BackendError(
            f"backend 'tensorrt' needs {package}, which is not installed: {pip_install(f'inferd[{extra}]')}"
        )
    failures = []
    with _lock:
        for name in names:
            if name in _imported:
                return _imported[name]
            try:
                _imported[name] = Library(name, _import(name))
            except (ImportError, OSError) as error:  # a library that is missing, or made for another driver
                failures.append(f"{name} does not import: {error}")
                continue
            log.info("%s is used", _imported[name])
            return _imported[name]
    raise BackendError(f"backend 'tensorrt' has no TensorRT that works: {'; '.join(failures)}")


def _import(name: str) -> Any:
    module = next(module for module in MODULES[name] if importlib.util.find_spec(module) is not None)
    return importlib.import_module(module)
