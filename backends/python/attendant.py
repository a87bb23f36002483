"""The attendant of one instance: it starts the worker, watches it, sees to its end, and starts the next."""

from __future__ import annotations

import errno
import logging
import math
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from inferd._native.memory.arena import ArenaHandle
from inferd.backends.api import BackendError, WorkerStatus
from inferd.backends.python._link import Link, TeamHandle
from inferd.backends.python.output import Lines
from inferd.backends.python.process import AnyWorker, Interrupted, Launch, Worker, WorkerError, bring_up, end
from inferd.backends.python.thread import ThreadWorker
from inferd.backends.python.worker import protocol

log = logging.getLogger("inferd.python")

LONG_LIFE = 10.0  # seconds that a worker must live for its end to count as an accident of its own
FIRST_DELAY = 0.5  # seconds before the restart after the second end in a row; doubled each time
MOST_DOUBLINGS = 30  # keeps the power finite where a model fails for weeks
LONGEST_DELAY = 30.0
STEP = 0.05  # seconds between checks for open requests while an instance is closed
LOOK = 0.25  # seconds between checks whether anybody still waits for a request that a retired instance executes


def pause_after(failures: int) -> float:
    """Seconds before the next worker is started, after `failures` ends in a row."""
    if failures < 2:
        return 0.0
    return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(failures - 2, MOST_DOUBLINGS))


def _limit_of(error: OSError) -> str:
    """Advice for a process at its limit of open files; empty for other errors."""
    if error.errno != errno.EMFILE:
        return ""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f": the server has reached its limit of {most} open files, raise it (ulimit -n)"


class Packets(Protocol):
    """Takes the packets that need Python."""

    def __call__(self, kind: int, flags: int, code: int, number: int, record: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Post:
    """The worker to look after, and its limits."""

    launch: Launch
    arena: ArenaHandle
    team: TeamHandle
    execution_timeout: float  # seconds; 0: none
    finish_timeout: float  # seconds for a worker to finish when the instance is closed


def _to_nobody(*_: object, **__: object) -> None:
    """Do nothing: replaces the callbacks of an ended attendant."""


class Attendant:
    """Looks after the worker of one instance, on a thread of its own, from `start` to `stop`.

    Args:
        post: the worker and its limits.
        on_packet: takes what the worker sends and needs Python, on the attendant's thread.
        on_change: called, on the attendant's thread, when `up` has changed.
    """

    def __init__(self, post: Post, on_packet: Packets, on_change: Callable[[], None]) -> None:
        self._post = post
        self._name = post.launch.name
        self._on_packet = on_packet
        self._on_change = on_change
        self._lines = Lines(self._name)
        self.link = Link(post.arena, self._name, post.team, int(post.execution_timeout * 1e9))
        self.up = False
        self._restarts = 0
        self._waits = False  # before the next worker is started
        self._pid = 0
        self.ready: dict[str, Any] = {}  # the content of READY, by which the worker said that its model is loaded
        self._refusal: Exception | None = None  # why the last worker could not be started or looked after
        self._retired = threading.Event()
        self._closing = threading.Event()
        self._loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"attend {self._name}", daemon=True)

    def start(self) -> None:
        """Start the first worker and wait until it has loaded the model.

        Raises:
            BackendError: it did not come up.
        """
        self._thread.start()
        try:
            self._loaded.result()
        except BackendError:
            self._thread.join()
            self._loaded = Future()  # the future keeps the error, whose traceback keeps this object
            raise

    def retire(self) -> None:
        """No batches will come but those that are queued: a worker whose requests no client waits for may be ended."""
        self._retired.set()
        self.link.leave()
        self.link.nudge()

    def stop(self) -> None:
        """Let the worker finish and end. No EXECUTE is under way, and none will come."""
        self._closing.set()
        self.link.nudge()
        self._thread.join()

    @property
    def worker(self) -> WorkerStatus:
        """See Instance."""
        state = "up" if self.up else "waiting" if self._waits else "starting"
        return WorkerStatus(state, self._restarts, self._pid)

    # -- what the link tells

    def on_output(self, stream: int, data: bytes) -> None:
        """The worker has printed something."""
        self._lines.add(stream, data)

    def on_packet(self, kind: int, flags: int, code: int, number: int, record: bytes) -> None:
        """The worker has sent something."""
        self._on_packet(kind, flags, code, number, record)

    # -- the thread

    def _run(self) -> None:
        try:
            self._keep_one_alive()
        except Exception as error:  # an error of ours: those that wait for the worker must get it
            log.exception("%s: its workers are not looked after any more", self._name)
            why = f"{type(error).__name__}: {error}"
            self.link.ended(why, closed=True)
            self._set_up(False)
            if not self._loaded.done():
                self._loaded.set_exception(BackendError(f"{self._name}: {why}"))
        finally:
            self._on_packet = self._on_change = _to_nobody  # they keep the instance, which keeps this

    def _keep_one_alive(self) -> None:
        failures = 0
        while not self._closing.is_set():
            begun = time.monotonic()
            worker, why = self._live()
            first = not self._loaded.done()
            failures = 0 if time.monotonic() - begun > LONG_LIFE else failures + 1
            delay = pause_after(failures)
            closing = self._closing.is_set()
            last = self._retired.is_set() or closing  # nothing waits for another worker
            closed = first or last
            self.link.ended(
                why, patient=not (closed or delay), closed=closed
            )  # after that, nothing uses the worker's descriptors
            self._pid = 0
            if worker is not None:
                worker.close()
            self._set_up(False)
            if first:
                failure = BackendError(f"{self._name}: {why}")
                failure.__cause__, self._refusal = self._refusal, None
                self._loaded.set_exception(failure)
                return
            if last:
                if not closing:
                    log.error("%s: %s", self._name, why)
                return
            log.error("%s: %s; %s", self._name, why,
                      f"another is started in {delay:g} s" if delay else "another is started")  # fmt: skip
            self._waits = delay > 0
            self._closing.wait(delay)
            self._waits = False
            self._restarts += 1

    def _set_up(self, up: bool) -> None:
        if up != self.up:
            self.up = up
            self._on_change()

    def _live(self) -> tuple[AnyWorker | None, str]:
        """Run one worker from its start to its end; return the reason of its end, as a sentence for callers."""
        make: type[ThreadWorker | Worker] = ThreadWorker if self._post.launch.in_process else Worker
        self._refusal = None
        try:
            worker = make(self._post.launch, self._post.arena)
        except OSError as error:
            self._refusal = error.with_traceback(None)  # its frames keep this object
            return None, f"its worker process cannot be started: {error}{_limit_of(error)}"
        self._pid = worker.pid
        link = self.link
        link.connect(
            self, worker.work, worker.side, worker.calls, worker.pid_fd, worker.supervisor, worker.output, worker.errors
        )
        reason = ""
        try:
            self.ready = bring_up(link, worker, self._post.launch)
            self._come_up(worker)
            reason = self._attend()
        except Interrupted:
            pass
        except WorkerError as error:
            reason = str(error)
        except Exception as error:  # an error of ours, or a worker that breaks the protocol
            log.exception("%s: its worker cannot be looked after", self._name)
            self._refusal = error.with_traceback(None)
            reason = f"{type(error).__name__}: {error}"
        overdue, fault = link.overdue, link.fault
        how = end(link, worker)
        self._lines.end()
        if overdue:
            return worker, (
                f"an execution took longer than {self._post.execution_timeout:g} s, so its worker process was ended"
            )
        if fault:
            return worker, f"its worker was ended because it {fault}"
        return worker, reason or f"its {how}"

    def _come_up(self, worker: AnyWorker) -> None:
        log.info("%s: %s is ready", self._name, worker)
        self.link.up(self.ready.get("regions") is True)
        self._set_up(True)
        if not self._loaded.done():
            self._loaded.set_result(None)

    def _attend(self) -> str:
        """Serve the worker until it ends, by itself or because the instance is closed.

        Returns:
            Why the server has to end the worker; empty if it does not.
        """
        until = math.inf
        while True:
            event = self.link.attend(False, LOOK if self._looks else None)[0]
            if event == "end" or self.link.ending:
                return ""
            if self._closing.is_set():
                self._finish()
                return ""
            now = time.monotonic()
            until = min(until, now + self._post.finish_timeout) if self._looks and self.link.given_up else math.inf
            if now >= until:
                return (
                    f"its model was unloaded or replaced, and all its requests have been given up, but it still "
                    f"executes them after {self._post.finish_timeout:g} s, so its worker process was ended"
                )

    @property
    def _looks(self) -> bool:
        """Whether the worker is ended when no client waits for its requests; a thread cannot be ended."""
        return self._retired.is_set() and not self._post.launch.in_process

    def _finish(self) -> None:
        """Wait for open requests, then have the worker finalize its model and exit."""
        until = time.monotonic() + self._post.finish_timeout
        while self.link.open and time.monotonic() < until:
            if self.link.attend(False, STEP)[0] == "end" or self.link.ending:
                return
        self.link.send_work(protocol.FINALIZE)
        event = ""
        while event not in ("end", "time") and not self.link.ending:  # FINALIZED comes, then the end; `retire` may wake
            event = self.link.attend(True, max(0.0, until - time.monotonic()))[0]
        if event == "time":
            log.warning("%s: its worker did not finish within %g s and is killed", self._name,
                        self._post.finish_timeout)  # fmt: skip
