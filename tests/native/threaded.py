"""An endpoint whose sockets an I/O thread serves. The test is the event loop: it decides when Python hears of what the
thread has done meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Callable

from inferd._native.timers import TimersHandle
from inferd._native.transport.call import Call
from inferd._native.transport.endpoint import Endpoint
from inferd._native.transport.io_thread import IoThreads
from inferd._native.transport.thread_pool import PoolThreads


class Threaded:
    """Endpoint, timers and thread, and the sockets that it has had."""

    def __init__(self, on_call: Callable[[Call], None], pool_threads: PoolThreads | None = None) -> None:
        self.timers = TimersHandle()
        self.pool_threads = pool_threads
        self.endpoint = Endpoint(on_call, timers=self.timers, pool_threads=pool_threads)
        self.timers.hear()
        self.io = IoThreads(self.endpoint)
        self.io.start()
        self.ends: list[socket.socket] = []

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        """A client's end, and the server's, which does not block."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.settimeout(60)
        self.ends += [ours, theirs]
        return ours, theirs

    def close(self) -> None:
        """End the threads, and close the sockets."""
        self.io.stop()
        if self.pool_threads is not None:
            self.pool_threads.close()
        self.timers.run_events()
        for end in self.ends:
            end.close()
