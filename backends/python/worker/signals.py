"""SIGTERM and SIGINT: the server alone ends a worker, and the model what it has started.

A service manager sends them to every process of a service at once. Workers have to answer before they go, and so have
the processes that help them: a pool of `multiprocessing` never learns that one of its own was ended in the middle of a
task, and waits for it for ever. So a worker ignores both signals, and a process that it forks, or that
`multiprocessing` starts, obeys those alone that the model's own processes send, as `terminate()` does: see
`_outlive.c`.

Programs of other kinds obey any: workers are started with both ignored, but a handler that does nothing takes the place
of that, which is handed on to no other program.
"""

from __future__ import annotations

import os
import signal
import threading
from functools import cache
from typing import Any

SUPERVISOR = "INFERD_SUPERVISOR"
"""The variable of the environment that says whose descendants the model's processes are."""

_USUAL: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
_forking = threading.local()


def outlive() -> None:
    """Have this process, a worker, ignore both, and what it starts obey the model. Called on the main thread."""
    os.environ[SUPERVISOR] = str(os.getppid())
    for number in _USUAL:
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)  # libraries need not expect it
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_obey_the_model)


def outlive_as_helper() -> None:
    """Have this process, which `multiprocessing` has started, obey the model alone, if it is one of a worker's."""
    if SUPERVISOR in os.environ:
        for number in _USUAL:
            _obey_own(number)


def _nothing(_number: int, _frame: Any) -> None:
    pass


def _hold() -> None:
    # A fork that is told to end before it has its own handlers ends when it has them.
    _library()  # not in a fork: a lock of the loader may be held there for ever
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(_USUAL))


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _obey_the_model() -> None:
    try:
        for number, usual in _USUAL.items():
            if signal.getsignal(number) is _nothing:  # the model may have said otherwise
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
    """Of `_outlive.c`; None where it cannot be had: then both signals end what a model has forked."""
    try:
        import ctypes

        return ctypes.CDLL(__file__.rpartition("/")[0] + "/_outlive.abi3.so")
    except (ImportError, OSError):
        return None
