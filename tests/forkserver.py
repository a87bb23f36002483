"""Servers of tests, each a fork of one process that has imported the server: that takes milliseconds, not a second.

A fork does what `python -m MODULE ARGUMENTS` does, from the first line of the module on, in an environment and with
outputs of its own. `Forked` is its handle and has the methods of `subprocess.Popen` that tests use.

`python -m tests.forkserver FD` is the process that forks; FD is its end of a socket, and it ends with the other one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
MODULES = ("inferd", "tests.conformance.doors", "tests.front.host")
"""What may be started here: their imports start no thread and open nothing, so that a fork is like a new process."""
LONGEST = 1 << 17  # bytes of a command with its environment

_lock = threading.Lock()
_forkserver: Forkserver | None = None


class Forked:
    """A process that the fork server has started for this one."""

    def __init__(self, command: Sequence[str], told: socket.socket) -> None:
        self.args = command
        self.returncode: int | None = None
        self._told = told
        pid, [self._descriptor], _, _ = socket.recv_fds(told, 100, 1)
        self.pid = int(pid)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative as the number of a signal, when the process has ended.

        Raises:
            subprocess.TimeoutExpired: It has not ended in so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._told.recv(100) or -signal.SIGKILL)
            self._told.close()
            os.close(self._descriptor)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended: its parent has not told yet
                signal.pidfd_send_signal(self._descriptor, number)  # its number may be another process's by now

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forkserver:
    """The process that forks, and the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: int, errors: int) -> Forked:
        """Start `command`, of which "python -m" is left out."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            packet = json.dumps({"command": command, "environment": dict(environment)}).encode()
            socket.send_fds(self._socket, [packet], [output, errors, theirs.fileno()])
        return Forked(command, ours)


def can_start(command: Sequence[str]) -> bool:
    """Whether the command is one of `MODULES`, by this interpreter."""
    return list(command[:2]) == [sys.executable, "-m"] and command[2] in MODULES


def start(command: Sequence[str], environment: Mapping[str, str], output: int, errors: int) -> Forked:
    """Start `python -m MODULE ARGUMENTS` in the folder of the project; the descriptors are for stdout and stderr."""
    global _forkserver
    with _lock:
        if _forkserver is None:
            _forkserver = Forkserver()
    return _forkserver.start(command[2:], environment, output, errors)


def run(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """What `python -m ARGUMENTS` prints, and how it ends.

    Raises:
        subprocess.TimeoutExpired: It has not ended in so many seconds.
    """
    command = [sys.executable, "-m", *map(str, arguments)]
    assert can_start(command), command
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start(command, {**os.environ, "PYTHONPATH": str(ROOT)}, output.fileno(), errors.fileno())
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        printed = []
        for file in (output, errors):
            file.seek(0)
            printed.append(file.read())
    return subprocess.CompletedProcess(command, status, *printed)


# ---- in the process that forks --------------------------------------------------------------------------------------


class Parent:
    """Forks what it is asked for, and tells of the ends of its children."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process

    def serve(self) -> tuple[list[str], dict[str, str]]:
        """Fork until the other end is closed; returns in each fork, with what it is to do."""
        while True:
            ready, _, _ = select.select([self._asked, *self._children], [], [])
            for descriptor in self._children.keys() & ready:
                self._has_ended(descriptor)
            if self._asked in ready and (work := self._fork()):
                return work

    def _fork(self) -> tuple[list[str], dict[str, str]] | None:
        """None in this process."""
        packet, descriptors, _, _ = socket.recv_fds(self._asked, LONGEST, 3)
        if not packet:
            self._end()
        *outputs, told = descriptors
        teller = socket.socket(fileno=told)
        pid = os.fork()
        if pid == 0:
            for number, output in enumerate(outputs, 1):
                os.dup2(output, number)
                os.close(output)
            faulthandler.enable()  # for a process that does not end: SIGABRT has it tell what its threads do
            teller.close()
            self._forget()
            work = json.loads(packet)
            return work["command"], work["environment"]
        for output in outputs:
            os.close(output)
        descriptor = os.pidfd_open(pid)
        socket.send_fds(teller, [b"%d" % pid], [descriptor])
        self._children[descriptor] = pid, teller
        return None

    def _has_ended(self, descriptor: int) -> None:
        pid, teller = self._children.pop(descriptor)
        _, status = os.waitpid(pid, 0)
        os.close(descriptor)
        with teller, contextlib.suppress(OSError):  # nobody may ask any more
            teller.send(b"%d" % os.waitstatus_to_exitcode(status))

    def _forget(self) -> None:
        """Close what only the parent needs."""
        self._asked.close()
        for descriptor, (_, teller) in self._children.items():
            os.close(descriptor)
            teller.close()

    def _end(self) -> NoReturn:
        """With what the other end has left running."""
        for pid, _ in self._children.values():
            os.kill(pid, signal.SIGKILL)
        sys.exit()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def import_what_servers_need() -> None:
    """All that needs no thread: the server with both doors, and the libraries of the fake engine's process."""
    before = _threads()  # the thread sanitizer has one of its own, and begins it again in a fork
    for name in (
        "inferd.server.cli",
        "inferd.server.app",
        "tests.conformance.fake_engine",
        "tests.conformance.generic",
    ):
        importlib.import_module(name)
    begun = _threads() - before
    assert begun == 0, f"a fork has one thread, and the imports have begun {begun} more"


def main() -> None:
    import_what_servers_need()
    command, environment = Parent(socket.socket(fileno=int(sys.argv[1]))).serve()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
