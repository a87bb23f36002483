"""One worker process: started, spoken to until its model is loaded, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _native.memory.arena import ArenaHandle
from backends.python._attend import Link
from backends.python._spawn import spawn
from backends.python.environment import Environment
from backends.python.worker import protocol

MAIN = Path(__file__).parent / "worker" / "__main__.py"
WORK, SIDE, CALLS, ARENA = 3, 4, 5, 6  # its descriptors, behind the standard ones
SOCKET_BUFFER = 1 << 20  # bytes on their way in one direction; what the system allows of it
OOM_SCORE = 300  # how much rather than the server a worker is killed when memory runs out (of 1000)


class WorkerError(Exception):
    """A worker does not come up; the text says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What every worker of an instance is started with."""

    name: str  # of the instance
    environment: Environment
    configuration: Mapping[str, Any]  # see CONFIGURE in worker/protocol.py
    timeout: float  # seconds until its interpreter must be there
    in_process: bool = False  # on a thread of the server: see thread.ThreadWorker


def socket_pair(sockets: list[socket.socket]) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, as the wire has them; they are added to the list at once, which closes them."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets += pair
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    return pair


class Worker:
    """A process that was started. Its creator's thread must live as long as it: the kernel ends it with that thread.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, launch: Launch, arena: ArenaHandle) -> None:
        self._sockets: list[socket.socket] = []
        self._pipes: list[int] = []
        self.pid = 0
        self.pid_fd = -1
        try:
            self._start(launch, arena)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return f"worker process {self.pid}"

    def _start(self, launch: Launch, arena: ArenaHandle) -> None:
        work, its_work = socket_pair(self._sockets)
        side, its_side = socket_pair(self._sockets)
        calls, its_calls = socket_pair(self._sockets)
        output, its_output = self._pipe()
        errors, its_errors = self._pipe()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._pipes.append(nothing)
        python = launch.environment.python
        self.pid = spawn(
            python,
            [python, str(MAIN), str(WORK), str(SIDE), str(CALLS), str(ARENA), launch.name],
            dict(launch.environment.variables),
            str(Path.cwd()),
            [nothing, its_output, its_errors, *(end.fileno() for end in (its_work, its_side, its_calls)), arena.fd],
        )
        self.pid_fd = os.pidfd_open(self.pid)
        for descriptor in (nothing, its_output, its_errors):
            os.close(descriptor)
            self._pipes.remove(descriptor)
        for end in (its_work, its_side, its_calls):
            end.close()
            self._sockets.remove(end)
        self.work, self.side, self.calls = work.fileno(), side.fileno(), calls.fileno()
        self.output, self.errors = output, errors
        _prefer_when_memory_runs_out(self.pid)

    def _pipe(self) -> tuple[int, int]:
        pair = os.pipe2(os.O_CLOEXEC)
        self._pipes += pair
        return pair

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pid_fd, signal.SIGKILL)

    def reap(self) -> str:
        """Kill what is left of it, and of what it has started itself; how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its group, which exists until it is waited for
        _, status = os.waitpid(self.pid, 0)
        return f"worker process {how_ended(status)}"

    def close(self) -> None:
        """Close its descriptors. Nobody may use them any more."""
        for end in self._sockets:
            end.close()
        for descriptor in self._pipes:
            os.close(descriptor)
        if self.pid_fd >= 0:
            os.close(self.pid_fd)
        self._sockets.clear()
        self._pipes.clear()
        self.pid_fd = -1


def _prefer_when_memory_runs_out(pid: int) -> None:
    """Have the kernel kill the worker and not the server."""
    with contextlib.suppress(OSError, ValueError):  # it may have ended already
        own = int(Path("/proc/self/oom_score_adj").read_text())
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(1000, own + OOM_SCORE)))


def how_ended(status: int) -> str:
    """What the status of `waitpid` says, for people."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "a real-time signal"
        hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
        return f"was killed by signal {number} ({name}){hint}"
    return f"exited with status {os.waitstatus_to_exitcode(status)}"


def bring_up(link: Link, launch: Launch) -> dict[str, Any]:
    """Wait for a connected worker's interpreter, have it load the model, and wait for that as long as it takes.

    Returns:
        What READY says.

    Raises:
        WorkerError: it does not come up; the text is the model's, with its traceback, where that has raised.
        Interrupted: `Link.nudge` was called.
    """
    event, kind, number, _ = link.attend(True, launch.timeout)
    _expect(event, f"its interpreter {launch.environment.python} did not start within {launch.timeout:g} s")
    if kind != protocol.HELLO or number != protocol.VERSION:
        raise WorkerError(f"it speaks version {number} of the protocol, expected {protocol.VERSION}")
    configuration = {**launch.configuration, "flags": link.flags}
    link.send_work(protocol.CONFIGURE, json.dumps(configuration).encode())
    event, kind, _, record = link.attend(True)
    _expect(event, "")
    if kind != protocol.READY:
        raise WorkerError(f"it sent a packet of kind {kind} while its model was being loaded")
    said: dict[str, Any] = json.loads(record)
    if "error" in said:
        raise WorkerError(str(said["error"]))
    return said


class Interrupted(Exception):
    """The wait for a worker was given up."""


def _expect(event: str, late: str) -> None:
    if event == "wake":
        raise Interrupted
    if event == "time":
        raise WorkerError(late)
    if event == "end":
        raise WorkerError("")  # how it ended says more
