"""A model in the server's own process: the worker's side of the wire on a thread, instead of in a process.

The `model.py`, the transport and the requests are the same as for a worker process. But the model
shares the interpreter lock, the modules and the memory of the server, and nothing protects the server from it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
from typing import NoReturn

from inferd._native.memory.arena import ArenaHandle
from inferd.backends.python.process import AnyWorker, Launch, socket_pair
from inferd.backends.python.worker import utils
from inferd.backends.python.worker.link import Link
from inferd.backends.python.worker.worker import Worker

_numbers = itertools.count(1)


class ThreadWorker(AnyWorker):
    """A worker that is a thread. `kill` abandons the thread, which ends when the model returns.

    It has no pipes: the model prints to the server's own output.
    """

    def __init__(self, launch: Launch, arena: ArenaHandle) -> None:
        # The names by which models import it.
        sys.modules.setdefault("triton_python_backend_utils", utils)
        sys.modules.setdefault("c_python_backend_utils", utils)
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        work, its_work = socket_pair(self._sockets)
        side, its_side = socket_pair(self._sockets)
        calls, its_calls = socket_pair(self._sockets)
        self.work, self.side, self.calls = work.fileno(), side.fileno(), calls.fileno()
        # Readable when the thread has ended, as a pidfd is for a process.
        self.pid_fd, self._running = os.pipe2(os.O_CLOEXEC)
        link = Link(its_work.detach(), its_side.detach(), its_calls.detach(), os.dup(arena.fd), _end)
        # The model's package gets a unique name: abandoned threads keep theirs.
        package = f"inferd_model_{next(_numbers)}"
        threading.Thread(target=self._run, args=(link, package), name=launch.name, daemon=True).start()

    def __str__(self) -> str:
        return "thread"

    def _run(self, link: Link, package: str) -> None:
        worker = Worker(link, package)
        try:
            with contextlib.suppress(SystemExit):  # see _end
                worker.run()
        finally:
            worker.close()
            link.close()
            self._say_end()

    def _say_end(self) -> None:
        with self._lock:
            if self._running >= 0:
                os.close(self._running)
                self._running = -1

    def kill(self) -> None:
        # the thread is abandoned
        for end in self._sockets:
            with contextlib.suppress(OSError):  # it has closed its end already
                end.shutdown(socket.SHUT_RDWR)
        self._say_end()

    def kill_supervisor(self) -> None:
        pass  # nothing else can end a thread

    def await_end(self) -> str:
        return "thread has ended"

    def close(self) -> None:
        for end in self._sockets:
            end.close()
        os.close(self.pid_fd)


def _end() -> NoReturn:
    # Ends the thread that finds the server's end of a socket closed.
    raise SystemExit
