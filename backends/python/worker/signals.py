"""SIGTERM and SIGINT: the server alone ends a worker, but what a model starts obeys them as anywhere.

A service manager sends them to every process of a service at once, and workers have to answer before they go. They are
started with both ignored. That would be handed on: a program started by the model would ignore them too, and
`Popen.terminate`, or a pool of `multiprocessing` that is closed, would wait for ever. A handler that does nothing is
handed on to no other program, and a fork gets back what is usual.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

_USUAL: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
_forking = threading.local()


def outlive() -> None:
    """Have this process ignore both, and nothing that it starts. Called on the main thread."""
    for number in _USUAL:
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)  # libraries need not expect it
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_be_usual)


def _nothing(_number: int, _frame: Any) -> None:
    pass


def _hold() -> None:
    # A fork that is told to end before it has its own handler ends when it has it.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _be_usual() -> None:
    for number, usual in _USUAL.items():
        if signal.getsignal(number) is _nothing:  # the model may have said otherwise
            signal.signal(number, usual)
    _let_go()
