"""The supervisor of one worker: a small process between the server and the worker, run as a program of its own.

    <python> -I -S supervisor.py <path of _spawn> <name of the instance>

The worker is the supervisor's child, and the supervisor is the subreaper: the kernel gives it every descendant of the
worker whose parent has ended, also in other sessions. When the worker ends, or the socket to the server is closed (by
the server, or by the kernel because the server has ended), the supervisor kills every descendant, waits for them, and
exits. So no process of a model outlives its worker, and no worker outlives the server. It needs no privileges.
Emulators of another processor (qemu-user) know no subreapers: there, descendants whose parent has ended are killed if
they are in the worker's process group.

The supervisor's descriptors are those of the worker (0 to 6), the socket to the server, and a file with the arguments
of `spawn` in `marshal`'s format: program, arguments, environment and folder. It sends one packet each: "started <pid>"
or "failed <errno>", and last "ended <wait status of the worker>". The server sends nothing: it orders the end of all by
closing its direction of the socket.
"""

from __future__ import annotations

import errno
import importlib.machinery
import marshal
import os
import select
import signal
import sys
import time

# Each further import would slow the start of every worker.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

SERVER, CONFIGURATION = 7, 8
WORKERS = range(SERVER)  # the worker's descriptors
PATIENCE = 5.0  # seconds for killed processes to end; a process that waits for a broken device may not end
LOOK_AGAIN = 0.05  # seconds between looks for processes that were forked meanwhile
OOM_SCORE = 300  # added to a worker's score (of 1000): without memory the kernel kills it rather than the server


def load_spawn(path: str) -> ModuleType:
    """The extension, without the package that it belongs to."""
    loader = importlib.machinery.ExtensionFileLoader("_spawn", path)
    module = loader.create_module(importlib.machinery.ModuleSpec("_spawn", loader, origin=path))
    loader.exec_module(module)
    return module


def children() -> list[int]:
    """The process ids of this process's children."""
    own = str(os.getpid()).encode()
    out = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = file.read().rpartition(b")")[2].split()[1]
            except OSError:
                continue
            if parent == own:
                out.append(int(name))
    return out


class Supervisor:
    """One worker and its descendants."""

    def __init__(self) -> None:
        self.worker = 0
        self.status: int | None = None  # of the worker, once it has ended
        self.adopts = True  # orphans become its children
        # A byte comes when a child has ended.
        self.woken, self.wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(self.wake, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def start(self, spawn: Callable[..., int], configuration: tuple[object, ...]) -> bool:
        """Start the worker; False if that fails."""
        try:
            self.worker = spawn(*configuration, list(WORKERS))
        except OSError as error:
            os.write(SERVER, b"failed %d" % (error.errno or 0))
            return False
        # The supervisor closes its copies of the worker's descriptors, so that the server sees it when the worker's
        # close.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in WORKERS:
            os.dup2(nothing, descriptor)
        prefer_when_memory_runs_out(self.worker)
        os.write(SERVER, b"started %d" % self.worker)
        return True

    def watch(self) -> None:
        """Wait until the worker has ended, or the server orders its end."""
        poll = select.poll()
        poll.register(SERVER, select.POLLIN)
        poll.register(self.woken, select.POLLIN)
        while self.status is None:
            ready = [descriptor for descriptor, _ in poll.poll()]
            self.collect()
            if SERVER in ready:
                return

    def collect(self) -> bool:
        """Collect all children that have ended; False: no child is left."""
        try:
            os.read(self.woken, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.worker:
                self.status = status

    def end_all(self) -> None:
        """Kill every descendant: the children, and the orphans that become children then."""
        until = time.monotonic() + PATIENCE
        if not self.adopts:
            try:
                os.killpg(self.worker, signal.SIGKILL)
            except OSError:  # the group has no process any more
                pass
        while self.collect() and time.monotonic() < until:
            for pid in children():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:  # it has ended, or belongs to another user
                    pass
            select.select([self.woken], [], [], LOOK_AGAIN)


def prefer_when_memory_runs_out(pid: int) -> None:
    """Have the kernel kill the worker rather than the server."""
    try:
        with open("/proc/self/oom_score_adj") as file:
            own = int(file.read())
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(str(min(1000, own + OOM_SCORE)))
    except (OSError, ValueError):  # it may have ended already
        pass


def main() -> None:
    """Supervise one worker."""
    extension = load_spawn(sys.argv[1])
    supervisor = Supervisor()
    try:
        extension.adopt_orphans()
    except OSError as error:
        if error.errno != errno.EINVAL:  # an emulator's
            raise
        supervisor.adopts = False
    with open(CONFIGURATION, "rb") as file:
        file.seek(0)
        configuration = marshal.load(file)
    if supervisor.start(extension.spawn, configuration):
        supervisor.watch()
        supervisor.end_all()
        if supervisor.status is not None:
            try:
                os.write(SERVER, b"ended %d" % supervisor.status)
            except OSError:  # the server is gone
                pass
    # The interpreter has nothing to clean up.
    os._exit(0)


if __name__ == "__main__":
    main()
