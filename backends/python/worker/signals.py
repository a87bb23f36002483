"""SIGTERM and SIGINT: only the server ends a worker, and only the model ends its own processes.

A service manager sends both signals to every process of a service at once. Workers and their helper processes must
finish their requests first: a pool of `multiprocessing` does not notice that a signal ended one of its processes in a
task, and waits for ever. So a worker ignores both signals, and a process that it forks, or that `multiprocessing`
starts, obeys only signals of the model's own processes, as `terminate()` sends them: see `_outlive.c`.

Other programs that the model starts obey every signal. A worker starts with both signals ignored, which programs would
inherit; it replaces that by a handler that does nothing, which they do not inherit.
"""

from __future__ import annotations

import os
import signal
import threading
from functools import cache
from typing import Any

SUPERVISOR = "INFERD_SUPERVISOR"
"""The environment variable with the process id of the model's supervisor."""

_USUAL: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
_forking = threading.local()


def outlive() -> None:
    """Make this worker ignore both signals, and its processes obey the model. On the main thread only."""
    os.environ[SUPERVISOR] = str(os.getppid())
    for number in _USUAL:
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)  # libraries may not expect EINTR
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_obey_the_model)


def outlive_as_helper() -> None:
    """Make this process, which `multiprocessing` has started, obey only the model, if a worker is its ancestor."""
    if SUPERVISOR in os.environ:
        for number in _USUAL:
            _obey_own(number)


def _nothing(_number: int, _frame: Any) -> None:
    pass


def _hold() -> None:
    # Signals wait until the fork has its handlers.
    _library()  # not in a fork, where the loader's lock may be held for ever
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(_USUAL))


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _obey_the_model() -> None:
    try:
        for number, usual in _USUAL.items():
            if signal.getsignal(number) is _nothing:  # the model may have set its own
                signal.signal(number, usual)
                _obey_own(number)
    finally:
        _let_go()


def _obey_own(number: int) -> None:
    library = _library()
    if library is not None and SUPERVISOR in os.environ:  # the model may have cleared it
        library.inferd_outlive(int(number), int(os.environ[SUPERVISOR]))


@cache
def _library() -> Any:
    """The library of `_outlive.c`; None if it is missing: then both signals end the model's forks."""
    try:
        import ctypes

        return ctypes.CDLL(__file__.rpartition("/")[0] + "/_outlive.abi3.so")
    except (ImportError, OSError):
        return None
