"""The worker process of one model instance. Its main thread is configured, executes batches and finalizes the model."""

from __future__ import annotations

import json
import threading
from typing import Any

from . import driver
from . import protocol as p
from .connection import Connection
from .errors import TritonError, TritonModelException, error_text, exception_text
from .forked import Forks
from .host import Host, ModelFailed
from .lent import Lease, OutputMemory
from .link import INLINE_LIMIT, Link, Packet
from .received import ReceivedRequest
from .regions import Regions
from .request import RELEASE_RESCHEDULE
from .response import InferenceResponse
from .sender import close
from .serialization import Names, RequestReader, ResponseWriter
from .shortage import fitting


class Worker:
    """The life of the worker.

    Args:
        link: the transport.
        package: the name of the package that the model's folder becomes; the version's number if it is empty.
    """

    def __init__(self, link: Link, package: str = "") -> None:
        self._link = link
        self._package = package
        self._names: Names
        self._host: Any = None
        self._connection: Connection
        self._reader: RequestReader
        self._regions: Regions

    def run(self) -> int:
        """Serve until the server sends FINALIZE.

        Returns:
            The exit status.
        """
        link = self._link
        link.send(link.work, p.HELLO, number=p.VERSION)
        if not self._configure(link.receive_work()):
            # The process stays until the server has read its packets, and hangs up or kills it.
            link.receive_work()
            return 1
        while True:
            packet = link.receive_work()
            if packet.kind == p.FINALIZE:
                break
            if packet.kind == p.EXECUTE:
                self._execute(packet)
            del packet
        self._host.finalize()
        self._connection.end_logs()
        link.send(link.work, p.FINALIZED)
        return 0

    def close(self) -> None:
        """Forget the model after `run`, if the process continues."""
        if self._host is not None:
            self._host.close()

    # -----------------------------------------------------------------------------------------------------------------
    # Configuration

    def _configure(self, packet: Packet) -> bool:
        """Load the model, or have it complete its configuration; False: there is nothing more to do."""
        config = json.loads(self._link.record(packet))
        args = config["args"]
        driver.library = config["cuda_driver"]
        self._names = Names(
            [tensor["name"] for tensor in config["inputs"]],
            [tensor["name"] for tensor in config["outputs"]],
            lambda text: self._connection.log(p.LOG_WARNING, text),
        )
        name = args.get("model_instance_name") or args.get("model_name", "")
        self._connection = Connection(
            self._link, name, self._names, config["window"], config["log_verbose"], config["flags"]
        )
        version = args.get("model_version", "1")
        decoupled = config["decoupled"]
        package = self._package or version
        self._host = Host(self._connection, config["model_file"], config["model_dir"], package, decoupled)
        self._host.use_on_this_thread()
        if not self._package:  # in a process of its own
            Forks(self._link, self._host.runtime)
        ready: dict[str, Any] = {}
        try:
            if config["mode"] == "complete":
                ready["config"] = self._host.complete(config["config"], args)
            else:
                self._host.load(args)
                ready["is_ready"] = self._host.has_is_ready
        except TritonModelException as error:
            ready = {"error": exception_text(error) if error.__traceback__ else str(error), "code": p.CODE_INTERNAL}
        except BaseException as error:
            ready = {"error": exception_text(error), "code": p.CODE_INTERNAL}
        self._regions = Regions(config.get("descriptors", ""))
        if "descriptors" in config and self._regions.reaches(config["arena"]):
            ready["regions"] = True
            self._link.on_forget = self._regions.forget
        if self._host.has_is_ready:
            self._connection.on_is_ready = self._check_ready
            self._connection.expect_questions()
        if config["mode"] == "serve":
            self._link.patience = config["patience"]
            self._reader = RequestReader(
                self._host.runtime, self._names, args.get("model_name", ""), int(version), decoupled, self._regions
            )
        try:
            self._send_text(p.READY, json.dumps(ready).encode())
        except TritonModelException as error:  # there is no memory for READY
            ready = {"error": f"the answer to CONFIGURE: {error}", "code": p.CODE_INTERNAL}
            self._send_text(p.READY, json.dumps(ready).encode())
        return "error" not in ready and config["mode"] == "serve"

    def _send_text(self, kind: int, record: bytes, memory: OutputMemory | None = None, **head: int) -> None:
        """Send a record of any size on the work socket.

        Raises:
            TritonModelException: it does not fit into a packet, and the server has no memory for it; nothing was sent.
        """
        link = self._link
        if len(record) <= INLINE_LIMIT:
            link.send(link.work, kind, record, **head)
            return
        offset = (memory or OutputMemory(link, 0, 0)).take(len(record))
        link.memory[offset : offset + len(record)] = record
        link.send_arena(link.work, kind, offset, len(record), **head)

    def _check_ready(self, number: int) -> None:
        # On a thread of its own: a slow check must not delay other work.
        thread = threading.Thread(target=self._answer_ready, args=(number,), name="inferd-is-ready", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads is reached; the thread that reads must go on
            self._connection.tell_ready(number, False, str(error))

    def _answer_ready(self, number: int) -> None:
        ready, why = False, ""
        self._host.use_on_this_thread()
        try:
            ready = self._host.is_ready()
        except BaseException as error:
            why = exception_text(error)
        self._connection.tell_ready(number, ready, why)

    # -----------------------------------------------------------------------------------------------------------------
    # Execution

    def _execute(self, packet: Packet) -> None:
        link = self._link
        lease = Lease(link, packet.id)
        # Read in place: a record in the arena has its tensors there, too, and is lent as long as they are.
        in_arena = packet.flags & p.IN_ARENA
        record = link.memory[packet.offset : packet.offset + packet.size] if in_arena else packet.data
        _, _, offset, size = p.EXECUTE_HEAD.unpack_from(record)
        memory = self._host.runtime.outputs = OutputMemory(link, offset, size, lease)
        try:
            requests = self._reader.read(record, lease.arena)
        except ImportError as error:
            self._reader.unreadable.clear()
            self._regions.let_go()
            text = f"inputs of this size need numpy in the environment of model '{self._host.name}': {error}"
            self._send_text(p.DONE, text.encode(), memory, flags=p.FAILED, number=packet.id)
            return
        writer = ResponseWriter(self._names, link.memory, memory.take, self._regions, memory)
        if self._reader.unreadable:
            self._execute_readable(writer, requests)
        else:
            try:
                self._write_responses(writer, requests, self._host.execute(requests))
            except ModelFailed as error:
                self._write_failures(writer, requests, str(error))
        del requests
        self._regions.let_go()
        if self._reader.reached_gpu:
            from .device import synchronize_all

            synchronize_all()  # the client may write to memory that the model keeps open once it has the answer
        self._host.runtime.outputs = None
        kept = lease.end()
        if kept:
            writer.copy_borrowed()
        flags = p.KEPT if kept else 0
        if kept and memory.kept:
            flags |= p.KEPT_GRANTS
        self._send_done(writer.record(), memory, flags, packet.id)

    def _send_done(self, record: bytes, memory: OutputMemory, flags: int, number: int) -> None:
        """Send DONE; a response without memory becomes an error."""
        try:
            self._send_text(p.DONE, record, memory, flags=flags, number=number)
            return
        except TritonModelException as error:
            text = str(error)
        record = fitting(record, INLINE_LIMIT, text)
        if len(record) > INLINE_LIMIT:  # thousands of requests
            flags, record = flags | p.FAILED, text.encode()
        self._send_text(p.DONE, record, flags=flags, code=p.CODE_INTERNAL, number=number)

    def _execute_readable(self, writer: ResponseWriter, requests: list[ReceivedRequest]) -> None:
        """Write the model's responses to requests with readable inputs, and an error for each other request."""
        unreadable, self._reader.unreadable = self._reader.unreadable, {}
        readable = [request for request in requests if request._key not in unreadable]
        responses: list[InferenceResponse | None] = []
        failed: str | None = None
        try:
            if readable:
                responses = self._host.execute(readable)
        except ModelFailed as error:  # clients of the unreadable requests keep their own error
            failed = str(error)
        following = iter(responses)
        for request in requests:
            if request._key in unreadable:
                self._host.unanswered(request, unreadable[request._key])
                writer.add_error(TritonError.INVALID_ARG, unreadable[request._key])
            elif failed is not None:
                self._write_failures(writer, [request], failed)
            else:
                self._write_responses(writer, [request], [next(following)])

    def _write_responses(
        self, writer: ResponseWriter, requests: list[ReceivedRequest], responses: list[InferenceResponse | None]
    ) -> None:
        for request, response in zip(requests, responses):
            try:
                if response is None:
                    self._write_open(writer, request)
                    continue
                writer.add(response, request._wanted, request._inputs)
            except Exception as error:
                writer.add_error(p.CODE_INTERNAL, error_text(error))

    def _write_open(self, writer: ResponseWriter, request: ReceivedRequest) -> None:
        sender = request._sender
        if request._release == RELEASE_RESCHEDULE and (sender is None or close(sender)):
            if sender is not None and sender._sent:  # the rescheduled request has a new sender
                self._connection.flush(request._key)
            writer.add_reschedule(getattr(request, "_states", ()))
        elif sender is None:
            writer.add_error(
                p.CODE_INTERNAL,
                f"model '{self._host.name}' returned None for a request without calling its get_response_sender()",
            )
        else:
            writer.add_status(p.STATUS_OPEN)

    def _write_failures(self, writer: ResponseWriter, requests: list[ReceivedRequest], text: str) -> None:
        for request in requests:
            if self._host.unanswered(request, text):
                writer.add_error(p.CODE_INTERNAL, text)
            else:
                writer.add_status(p.STATUS_OPEN)
