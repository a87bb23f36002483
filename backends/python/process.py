"""One worker process: its start, the load of its model, its end."""

from __future__ import annotations

import abc
import contextlib
import errno
import json
import logging
import marshal
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferd._native.memory.arena import ArenaHandle
from inferd.backends.python import _spawn
from inferd.backends.python._link import Link
from inferd.backends.python._spawn import spawn
from inferd.backends.python.environment import Environment, passed_on
from inferd.backends.python.options import LOAD_TIMEOUT
from inferd.backends.python.worker import protocol

log = logging.getLogger("inferd.python")

MAIN = Path(__file__).parent / "worker" / "__main__.py"
SUPERVISOR = Path(__file__).parent / "supervisor.py"
EXTENSION = _spawn.__file__
WORK, SIDE, CALLS, ARENA = 3, 4, 5, 6  # its descriptors, behind the standard ones
SOCKET_BUFFER = 1 << 20  # bytes in flight in one direction, if the system allows that many
LOADS_LONG = 30.0  # seconds of a load before the log says that the worker still loads its model; doubled each time
LAST_PATIENCE = 10.0  # seconds for a killed worker and all that it has started to end


class WorkerError(Exception):
    """A worker does not come up; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The values with which every worker of an instance starts."""

    name: str  # of the instance
    environment: Environment
    configuration: Mapping[str, Any]  # see CONFIGURE in worker/protocol.py
    timeout: float  # seconds until its interpreter must be there
    load_timeout: float = 0.0  # seconds for its model to be loaded; 0: any time
    in_process: bool = False  # on a thread of the server: see thread.ThreadWorker


def socket_pair(sockets: list[socket.socket]) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets of the wire's type, also appended to the list, whose owner closes them."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets += pair
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    return pair


class AnyWorker(abc.ABC):
    """A worker that an attendant looks after: a process or a thread.

    Attributes:
        work, side, calls: the server's ends of its sockets.
        pid: of its process; 0: no process.
        pid_fd: readable when it has ended.
        supervisor: the socket to its supervisor, which ends it when this is shut down for sending; -1: none.
        output, errors: the pipes of its standard output and standard error; -1: none.
    """

    work: int
    side: int
    calls: int
    pid_fd: int
    pid: int = 0
    supervisor: int = -1
    output: int = -1
    errors: int = -1

    @abc.abstractmethod
    def kill(self) -> None:
        """End the worker at once, and all that it has started."""

    @abc.abstractmethod
    def kill_supervisor(self) -> None:
        """End the worker even if the supervisor does not react."""

    @abc.abstractmethod
    def await_end(self) -> str:
        """Wait for the end of a worker that has ended or is about to; return how it ended."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close its descriptors, which are no longer used, and wait for its end if `await_end` has not."""


class Worker(AnyWorker):
    """A worker process and its supervisor, which ends the worker and all that it has started: see `supervisor`.

    Its `pid_fd` is that of the supervisor, which ends when the worker and its descendants have.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, launch: Launch, arena: ArenaHandle) -> None:
        self._sockets: list[socket.socket] = []
        self._files: list[int] = []
        self._child = 0  # the supervisor, until `await_end` or `close` has waited for it
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
        self._life, its_life = socket_pair(self._sockets)
        output, its_output = self._pipe()
        errors, its_errors = self._pipe()
        nothing = self._kept(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        configuration = self._kept(os.memfd_create("worker", os.MFD_CLOEXEC))
        _write(configuration, marshal.dumps(_start_of(launch)))
        self._child = spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(SUPERVISOR), EXTENSION, launch.name],
            passed_on(os.environ, ("*",)),
            str(Path.cwd()),
            [nothing, its_output, its_errors, *(end.fileno() for end in (its_work, its_side, its_calls)), arena.fd,
             its_life.fileno(), configuration],
            outlives=True,
        )  # fmt: skip
        self.pid_fd = os.pidfd_open(self._child)
        for descriptor in (nothing, configuration, its_output, its_errors):
            os.close(descriptor)
            self._files.remove(descriptor)
        for end in (its_work, its_side, its_calls, its_life):
            end.close()
            self._sockets.remove(end)
        self.work, self.side, self.calls = work.fileno(), side.fileno(), calls.fileno()
        self.supervisor = self._life.fileno()
        self.output, self.errors = output, errors
        self._await_start(launch)

    def _await_start(self, launch: Launch) -> None:
        self._life.settimeout(launch.timeout)
        try:
            event, _, number = self._life.recv(64).partition(b" ")
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"its supervisor did not start within {launch.timeout:g} s") from None
        self._life.setblocking(False)
        if event == b"failed":
            raise OSError(int(number), os.strerror(int(number)), launch.environment.python)
        if event != b"started":
            text = os.read(self.errors, 4096).decode("utf-8", "replace") if _readable(self.errors) else ""
            raise OSError(errno.ECHILD, f"its supervisor {sys.executable} ended at once: {text.strip()[-1000:]}")
        self.pid = int(number)

    def _kept(self, descriptor: int) -> int:
        self._files.append(descriptor)
        return descriptor

    def _pipe(self) -> tuple[int, int]:
        pair = os.pipe2(os.O_CLOEXEC)
        self._files += pair
        return pair

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)
            signal.pidfd_send_signal(self.pid_fd, signal.SIGCONT)  # SIGSTOP may have stopped it

    def kill_supervisor(self) -> None:
        # the kernel ends the worker then
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pid_fd, signal.SIGKILL)

    def await_end(self) -> str:
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        try:
            event, _, number = self._life.recv(64).partition(b" ")
        except OSError:
            event = b""
        if event == b"ended":
            return f"worker process {how_ended(int(number))}"
        return f"supervisor process {how_ended(status)}"

    def close(self) -> None:
        for end in self._sockets:
            end.close()
        if self._child:
            os.kill(self._child, signal.SIGKILL)  # it may hang; the kernel ends the worker then
            os.waitpid(self._child, 0)
            self._child = 0
        for descriptor in self._files:
            os.close(descriptor)
        if self.pid_fd >= 0:
            os.close(self.pid_fd)
        self._sockets.clear()
        self._files.clear()
        self.pid_fd = -1


def _start_of(launch: Launch) -> tuple[str, list[str], dict[str, str], str]:
    """The supervisor's orders: the worker's program, arguments, environment and folder."""
    python = launch.environment.python
    arguments = [python, str(MAIN), str(WORK), str(SIDE), str(CALLS), str(ARENA), launch.name]
    return python, arguments, dict(launch.environment.variables), str(Path.cwd())


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _readable(descriptor: int) -> bool:
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


_HINTS: dict[int, str] = {
    signal.SIGKILL: ", as the system does when memory runs out",
    signal.SIGBUS: ", as when a client shortens shared memory that a request refers to",
}


def how_ended(status: int) -> str:
    """A status of `waitpid` in words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "a real-time signal"
        hint = _HINTS.get(number, "")
        return f"was killed by signal {number} ({name}){hint}"
    return f"exited with status {os.waitstatus_to_exitcode(status)}"


def bring_up(link: Link, worker: AnyWorker, launch: Launch) -> dict[str, Any]:
    """Wait for a connected worker's interpreter, have it load the model, and wait for that.

    Returns:
        The content of READY.

    Raises:
        WorkerError: the worker does not come up; if the model raised, the text is its error with the traceback.
        Interrupted: `Link.nudge` was called.
        MemoryError: there is no memory for its configuration.
    """
    event, kind, number, _ = link.attend(True, launch.timeout)
    _expect(event, f"its interpreter {launch.environment.python} did not start within {launch.timeout:g} s")
    if kind != protocol.HELLO or number != protocol.VERSION:
        raise WorkerError(f"it speaks version {number} of the protocol, expected {protocol.VERSION}")
    configuration = {**launch.configuration, "flags": link.flags}
    if not launch.in_process and launch.configuration["mode"] == "serve":
        configuration.update(descriptors=f"/proc/{os.getpid()}/fd", arena=link.arena_fd)
    link.send_work(protocol.CONFIGURE, json.dumps(configuration).encode())
    kind, record = _await_load(link, worker, launch)
    if kind != protocol.READY:
        raise WorkerError(f"it sent a packet of kind {kind} while its model was being loaded")
    try:
        ready = json.loads(record)
    except (ValueError, RecursionError):
        ready = None
    if not isinstance(ready, dict):
        raise WorkerError("its packet READY cannot be read as a JSON object")
    if "error" in ready:
        raise WorkerError(str(ready["error"]))
    return ready


def _await_load(link: Link, worker: AnyWorker, launch: Launch) -> tuple[int, bytes]:
    """Wait for the packet that ends the load; the log names the worker meanwhile."""
    began = time.monotonic()
    limit = launch.load_timeout or math.inf
    patience = LOADS_LONG
    while True:
        waited = time.monotonic() - began
        event, kind, _, record = link.attend(True, max(0.0, min(patience, limit) - waited))
        if event != "time":
            _expect(event, "")
            return kind, record
        if time.monotonic() - began >= limit:
            raise WorkerError(f"its {worker} did not load the model within {limit:g} s ({LOAD_TIMEOUT})")
        ends = f"ended after {limit:g} s" if launch.load_timeout else f"not limited ({LOAD_TIMEOUT} limits it)"
        log.warning("%s: its %s has loaded the model for %g s; this is %s", launch.name, worker, patience, ends)
        patience *= 2


def end(link: Link, worker: AnyWorker) -> str:
    """End a worker, read the packets that it has sent, wait for its end, and return how it ended."""
    worker.kill()
    until = time.monotonic() + LAST_PATIENCE
    while link.attend(False, max(0.0, until - time.monotonic()))[0] != "end":
        if time.monotonic() >= until:
            worker.kill_supervisor()
            until = time.monotonic() + LAST_PATIENCE
    return worker.await_end()


class Interrupted(Exception):
    """The wait for a worker was interrupted."""


def _expect(event: str, late: str) -> None:
    if event == "wake":
        raise Interrupted
    if event == "time":
        raise WorkerError(late)
    if event == "end":
        raise WorkerError("")  # its exit status tells more
