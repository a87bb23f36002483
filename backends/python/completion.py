"""auto_complete_config: a worker that only has a model complete its configuration."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from inferd._native.memory.arena import ArenaHandle
from inferd.backends.api import BackendError
from inferd.backends.python._link import Link, TeamHandle
from inferd.backends.python.output import Lines
from inferd.backends.python.process import Interrupted, Launch, Worker, WorkerError, bring_up, end
from inferd.backends.python.worker import protocol

log = logging.getLogger("inferd.python")

METHOD = re.compile(rb"\bauto_complete_config\b")


def may_complete(file: Path) -> bool:
    """Whether the model's file, or one beside it, has the method: starting a worker only for that is slow."""
    return any(METHOD.search(each.read_bytes()) for each in {file, *file.parent.glob("*.py")} if each.is_file())


def complete(launch: Launch, arena: ArenaHandle) -> dict[str, Any]:
    """The model's completion of the configuration that CONFIGURE of the launch has in mode "complete". Blocks.

    Raises:
        BackendError: the model's file does not run, or the model refuses its configuration; with its reason.
    """
    listener = _Listener(launch.name)
    link = Link(arena, launch.name, TeamHandle(), 0)
    try:
        worker = Worker(launch, arena)
    except OSError as error:
        raise BackendError(f"{launch.name}: its worker process cannot be started: {error}") from error
    link.connect(
        listener, worker.work, worker.side, worker.calls, worker.pid_fd, worker.supervisor, worker.output, worker.errors
    )
    ready: dict[str, Any] = {}
    why = ""
    cause: Exception | None = None
    try:
        ready = bring_up(link, worker, launch)
    except Interrupted:
        pass  # the worker is ending, and its exit status tells why
    except (WorkerError, MemoryError) as error:
        why, cause = str(error), error.with_traceback(None)  # its frames keep the link
    finally:
        fault = link.fault
        how = end(link, worker)
        listener.lines.end()
        link.ended("", closed=True)
        worker.close()
    config = ready.get("config")
    if not isinstance(config, dict):
        if fault:
            why = f"its worker was ended because it {fault}"
        raise BackendError(f"{launch.name}: {why or f'its {how} before its configuration was complete'}") from cause
    return config


class _Listener:
    def __init__(self, name: str) -> None:
        self.lines = Lines(name)
        self._name = name

    def on_output(self, stream: int, data: bytes) -> None:
        self.lines.add(stream, data)

    def on_packet(self, kind: int, flags: int, code: int, number: int, record: bytes) -> None:  # noqa: ARG002
        if kind == protocol.LOG:
            log.info("%s: %s", self._name, record.decode("utf-8", "backslashreplace"))
