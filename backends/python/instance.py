"""An instance of a Python model: the server's calls to it, and its worker's calls to the server."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from inferd.backends.api import BackendError, NativeInstance, Services, WorkerStatus
from inferd.backends.python._attend import NonsenseError
from inferd.backends.python.attendant import Attendant, Post
from inferd.backends.python.worker import protocol

log = logging.getLogger("inferd.python")

MOST_ASKED = 256  # CALLs of a worker under way
MOST_ASKED_BYTES = 1 << 30  # of their records; one alone may have more
TOO_MANY = "too many calls for models and metrics are under way, or their files have too many bytes"
LONGEST_TEXT = 5000  # characters of an error, which must fit into a packet, as JSON, in any language
LEVELS = {
    protocol.LOG_VERBOSE: logging.DEBUG,
    protocol.LOG_INFO: logging.INFO,
    protocol.LOG_WARNING: logging.WARNING,
    protocol.LOG_ERROR: logging.ERROR,
}


class PythonInstance(NativeInstance):
    """A worker process, and its successors after it dies."""

    def __init__(self, post: Post, model: str, services: Services | None = None) -> None:
        self._name = post.launch.name
        self._model = model
        self._services = services
        self._changed: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._asked = False  # is_ready() of the model
        self._askers: set[Future[bool]] = set()  # callers of `check` that still wait
        self._questions = 0
        self._asking = 0  # CALLs under way
        self._asking_bytes = 0
        self._attendant = Attendant(post, self._on_packet, self._on_change)
        if services is not None:
            self._attendant.link.allow_calls(services.entrance, model)
        try:
            self._attendant.start()
        except BackendError:
            self._forget_measures()
            raise
        self.executor = self._attendant.link.executor
        self.gate = self._attendant.link.gate
        self.remote = self._attendant.link.remote

    def __str__(self) -> str:
        return self._name

    @property
    def ready(self) -> bool:
        """Whether its worker runs and has loaded the model."""
        return self._attendant.up

    @property
    def worker(self) -> WorkerStatus:
        """See Instance."""
        return self._attendant.worker

    def watch(self, changed: Callable[[], object]) -> None:
        """See Instance."""
        self._changed.append(changed)

    def check(self) -> Future[bool] | None:
        """The answer of the model's is_ready(), shared by all callers that ask while it runs."""
        if not self._attendant.ready.get("is_ready"):
            return None
        own: Future[bool] = Future()
        with self._lock:
            if not self._attendant.up:  # no worker would answer, and _on_change has answered the earlier callers
                own.set_result(False)
                return own
            if not self._asked:
                self._asked = True
                self._questions += 1
                self._attendant.link.send_side(protocol.IS_READY, self._questions)
            self._askers.add(own)
        own.add_done_callback(self._forget_asker)
        return own

    def _forget_asker(self, asker: Future[bool]) -> None:
        """The caller has its answer, or has given up: is_ready() may never return."""
        with self._lock:
            self._askers.discard(asker)

    def _answer_askers(self, ready: bool, number: int | None = None) -> None:
        with self._lock:
            if number not in (None, self._questions):
                return  # this answers an earlier call
            askers, self._askers, self._asked = self._askers, set(), False
        for asker in askers:
            if asker.set_running_or_notify_cancel():
                asker.set_result(ready)

    def drain(self) -> None:
        """See Instance."""
        self._attendant.retire()

    def close(self) -> None:
        """Let the worker finalize its model and end."""
        self._attendant.stop()

    def _on_change(self) -> None:
        if not self._attendant.up:
            self._answer_askers(False)
            self._forget_measures()
        for changed in self._changed:
            changed()

    def _on_packet(self, kind: int, flags: int, code: int, number: int, record: bytes) -> None:
        if kind == protocol.HEALTH:
            if record:
                log.debug("%s: is_ready(): %s", self._name, record.decode("utf-8", "backslashreplace"))
            self._answer_askers(bool(flags & protocol.TRUE), number)
        elif kind == protocol.CALL:
            self._serve_call(self._attendant.link.life, number, record)
        elif kind == protocol.METRIC and self._services is not None:
            self._services.measure(self, _object(record))
        elif kind == protocol.LOG:
            log.log(LEVELS.get(code, logging.INFO), "%s: %s", self._name, record.decode("utf-8", "backslashreplace"))

    def _forget_measures(self) -> None:
        if self._services is not None:
            self._services.forget_measures(self)

    def _serve_call(self, life: int, number: int, record: bytes) -> None:
        """Serve a model's call for something other than inference; see CALL in worker/protocol.py.

        The worker may end before the answer comes, and the next worker may use the same number for another call.
        """
        call = _call(record)
        size = len(record)
        with self._lock:
            too_many = self._asking >= MOST_ASKED or (self._asking and self._asking_bytes + size > MOST_ASKED_BYTES)
            self._asking += 1
            self._asking_bytes += size
        if too_many or self._services is None:
            failed: Future[object] = Future()
            failed.set_exception(BackendError(TOO_MANY if too_many else "there is no server around this model"))
            self._answer_call(life, number, size, failed)
            return
        what = str(call.pop("call", ""))
        self._services.ask(what, {**call, "asked_by": self._model}).add_done_callback(
            lambda done: self._answer_call(life, number, size, done)
        )

    def _answer_call(self, life: int, number: int, size: int, done: Future[object]) -> None:
        with self._lock:
            self._asking -= 1
            self._asking_bytes -= size
        self._attendant.link.send_side(protocol.ANSWER, number, json.dumps(_answer_of(done)).encode(), life)


def _object(record: bytes) -> dict[str, Any]:
    """The JSON object that a worker has sent.

    Raises:
        NonsenseError: the record is no JSON object.
    """
    try:
        found = json.loads(record)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NonsenseError
    return found


def _call(record: bytes) -> dict[str, Any]:
    """A CALL: a JSON object, followed by the files that it names, which become its "files".

    Raises:
        NonsenseError: the record does not have this form.
    """
    if len(record) < protocol.CALL_HEAD.size:
        raise NonsenseError
    at = protocol.CALL_HEAD.size + protocol.CALL_HEAD.unpack_from(record)[0]
    call = _object(record[protocol.CALL_HEAD.size : at])
    files = call.get("files") or {}
    if not isinstance(files, dict):
        raise NonsenseError
    contents = {}
    for path, size in files.items():
        if not isinstance(size, int) or not 0 <= size <= len(record) - at:
            raise NonsenseError
        contents[path] = record[at : at + size]
        at += size
    if contents:
        call["files"] = contents
    return call


def _answer_of(done: Future[object]) -> Mapping[str, object]:
    """The content of ANSWER."""
    error = done.exception()
    if error is None:
        return {"result": done.result()}
    text = str(error) or type(error).__name__
    return {"error": text[:LONGEST_TEXT], "code": protocol.CODE_INTERNAL}
