"""The running model for which the functions of `triton_python_backend_utils` act."""

from __future__ import annotations

import contextvars
import sys
import threading
from typing import TYPE_CHECKING, Any

from .errors import TritonModelException

if TYPE_CHECKING:
    from .channel import Channel
    from .lent import OutputMemory


class Runtime:
    """One instance of a model.

    Attributes:
        channel: the way to the server; a fork of the process has another one. So callers keep the runtime and read its
            channel each time.
        model_dir: the version directory.
        module: the name of the package into which the model's file is imported.
        initialized, finalizing: the model may call other models between the two.
        outputs: memory for the outputs of the batch that the worker executes, its OutputMemory.
    """

    __slots__ = ("channel", "finalizing", "initialized", "model_dir", "module", "outputs")

    def __init__(self, channel: Channel, model_dir: str, module: str) -> None:
        self.channel = channel
        self.model_dir = model_dir
        self.module = module
        self.initialized = False
        self.finalizing = False
        self.outputs: OutputMemory | None = None


NO_PARENT = (0, "")
PARENT: contextvars.ContextVar[tuple[int, str]] = contextvars.ContextVar("inferd_parent", default=NO_PARENT)
"""Key and id of the request being executed, if it is alone; calls to other models are made on its behalf."""

# A worker process has one runtime. The server's process has one for each instance of its in-process models: there the
# thread decides, or, on a thread that a model started, the module whose code is on the stack.
_runtimes: list[Runtime] = []
_thread = threading.local()


def add(runtime: Runtime) -> None:
    """Register a runtime."""
    _runtimes.append(runtime)


def remove(runtime: Runtime) -> None:
    """Unregister a runtime whose model is gone."""
    _runtimes.remove(runtime)


def use_on_this_thread(runtime: Runtime | None) -> None:
    """Set the runtime that this thread belongs to."""
    _thread.runtime = runtime


def current() -> Runtime:
    """The runtime that the caller belongs to.

    Raises:
        TritonModelException: there is none: triton_python_backend_utils works within a served model only.
    """
    if len(_runtimes) == 1:
        return _runtimes[0]
    runtime: Runtime | None = getattr(_thread, "runtime", None) or _of_the_stack()
    if runtime is None:
        raise TritonModelException("this function works within a model that is being served")
    return runtime


def _of_the_stack() -> Runtime | None:
    packages = {runtime.module: runtime for runtime in _runtimes}
    frame: Any = sys._getframe(2)
    while frame is not None:
        runtime = packages.get(frame.f_globals.get("__name__", "").partition(".")[0])
        if runtime is not None:
            return runtime
        frame = frame.f_back
    return None
