"""Imports a model's file under the names that it expects."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from .errors import TritonModelException


def import_model(path: str, package: str) -> ModuleType:
    """Run the model's file and return its module.

    Its folder and the one above are on `sys.path`, as Triton has them, and the file is a module of a package, so that
    it reaches its neighbours as `import helpers` and as `from . import helpers`.

    Args:
        path: of the file.
        package: name of the package that its folder becomes.

    Raises:
        TritonModelException: there is no such file, or its name does not end in .py.
        Exception: whatever the file raises.
    """
    folder, name = os.path.split(path)
    if not name.endswith(".py"):
        raise TritonModelException(f"Model name must end with '.py'. Model name is \"{name}\".")
    if not os.path.isfile(path):  # noqa: PTH113 (pathlib costs memory)
        raise TritonModelException(f"Python model file not found in '{path}'")
    for place in (folder, os.path.dirname(folder)):  # noqa: PTH120
        if place not in sys.path:
            sys.path.append(place)
    parent = ModuleType(package)
    parent.__path__ = [folder]
    sys.modules[package] = parent
    full_name = f"{package}.{name[:-3]}"
    spec = importlib.util.spec_from_file_location(full_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full_name]
        raise
    return module


def forget_model(package: str) -> None:
    """Forget the modules of a package that `import_model` made."""
    for name in list(sys.modules):
        if name == package or name.startswith(package + "."):
            del sys.modules[name]


def model_class(module: ModuleType) -> Any:
    """The class that every model defines.

    Raises:
        AttributeError: this one does not.
    """
    return module.TritonPythonModel
