"""SIGTERM and SIGINT: the server alone ends a worker, and a model what it has started.

A service manager sends them to every process of a service at once. Workers have to answer before they go, and so have
the processes that help them: a pool of `multiprocessing` never learns that one of its own has ended in the middle of a
task, and waits for it. So a worker ignores both signals, and a process that it forks, or that `multiprocessing` starts,
obeys those alone that the model sends: who sends one with `os.kill`, as `terminate()` does, writes that down before,
where all of them see it.

Programs of other kinds obey any: a handler is handed on to no other program, as the signals that the worker was started
with would be if it left them ignored.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from typing import Any

SIGNALS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""What is usual for each."""

PLACE = "INFERD_WORKER_SIGNALS"
"""The variable of the environment that tells processes of `multiprocessing` which file is the table."""

PROCESSES = 1 << 22  # that a kernel has at most
TABLE = PROCESSES * 2 * 2

_forking = threading.local()
_table: mmap.mmap  # of what was sent: see _entry. Of its 16 MiB only pages that were written to exist
_parent = 0  # of a fork
_kill, _killpg, _raise = os.kill, os.killpg, signal.raise_signal


def outlive() -> None:
    """Have this process, a worker, ignore both, and what it starts obey the model. Called on the main thread."""
    descriptor = -1
    if hasattr(os, "memfd_create"):  # else, in an interpreter built for an old system, only forks get to the table
        descriptor = os.memfd_create("signals")
        os.ftruncate(descriptor, TABLE)
        os.environ[PLACE] = f"/proc/{os.getpid()}/fd/{descriptor}"
    for number in SIGNALS:
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)  # libraries need not expect it
    _use(descriptor)


def obey_the_model() -> None:
    """Have this process, started by `multiprocessing`, obey the model alone, if it belongs to a worker."""
    try:
        descriptor = os.open(os.environ[PLACE], os.O_RDWR)
    except (KeyError, OSError):
        return
    _use(descriptor)
    os.close(descriptor)
    _take_over()


def _use(descriptor: int) -> None:
    global _table
    _table = mmap.mmap(descriptor, TABLE)
    os.kill, os.killpg, signal.raise_signal = _noted_kill, _noted_killpg, _noted_raise
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_in_fork)


# ---------------------------------------------------------------------------------------------------------------------
# Who sends one


def _entry(target: int, number: int, group: bool) -> int:
    """The place in the table of a signal for a process, or for a group of them."""
    return (target * 2 + (number == signal.SIGINT)) * 2 + group


def _note(target: int, number: int, group: bool) -> None:
    if number in SIGNALS and 0 < target < PROCESSES:
        _table[_entry(target, number, group)] = 1


def _noted_kill(pid: int, number: int, /) -> None:
    if pid > 0:
        _note(pid, number, False)
    else:
        _note(-pid or os.getpgrp(), number, True)
    _kill(pid, number)


def _noted_killpg(group: int, number: int, /) -> None:
    _note(group or os.getpgrp(), number, True)
    _killpg(group, number)


def _noted_raise(number: int, /) -> None:
    _note(os.getpid(), number, False)
    _raise(number)


# ---------------------------------------------------------------------------------------------------------------------
# Who gets one


def _nothing(_number: int, _frame: Any) -> None:
    pass


def _obey(number: int, frame: Any) -> None:
    if not _of_the_model(number):
        return
    usual = SIGNALS[number]
    if usual is signal.SIG_DFL:
        signal.signal(number, usual)
        _raise(number)
    else:
        usual(number, frame)


def _of_the_model(number: int) -> bool:
    own = _entry(os.getpid(), number, False)
    if _table[own]:
        _table[own] = 0  # another process will have this one's number
        return True
    if _table[_entry(os.getpgrp(), number, True)]:
        return True
    return _parent != 0 and os.getppid() != _parent  # the kernel may have been asked to send it when the parent ends


def _hold() -> None:
    # A process that is told to end before it has its own handler ends when it has it.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_fork() -> None:
    global _parent
    _parent = os.getppid()
    _take_over()
    _let_go()


def _take_over() -> None:
    for number, usual in SIGNALS.items():
        if signal.getsignal(number) in (_nothing, _obey, usual):  # the model may have said otherwise
            signal.signal(number, _obey)
