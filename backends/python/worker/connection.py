"""The channel of a worker process: it sends and receives on the side socket and the socket of calls, for any thread."""

from __future__ import annotations

import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from . import protocol as p
from .channel import Call, Channel, Waiter
from .errors import ERROR_CODES, TritonError, TritonModelException, error_text
from .link import INLINE_LIMIT, Grants, Link, Packet, Reader
from .messages import decode_response, encode_request
from .rate import Rate
from .request import SEQUENCE_END, SEQUENCE_START
from .response import InferenceResponse
from .serialization import Names, ResponseWriter, small_record

if TYPE_CHECKING:
    import socket

    from .request import Request

ERROR_LIMIT = 8 << 10
"""Characters of an error that fit into a packet in any encoding: there may be no memory in the arena."""
LOG_LIMIT = 32 << 10
"""Characters of a message to the log; more is cut off, so that it fits into a packet in any encoding."""
LOGS_PER_SECOND = 1000
"""Messages to the log; more are counted and left out."""


USE_DECOUPLED = (
    "Model {0} - Error when running inference: Model {0} is using the decoupled. The current BLS request call doesn't "
    "support models using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
    "'async_exec' calls for decoupled models.'"
)
"""Triton's error for a model that expects one response of a decoupled model."""


class Answer(Waiter):
    """The server's answer to a CALL."""

    __slots__ = ("content",)

    content: dict[str, Any]


class Credit:
    """The number of responses that may still be sent for a request, and the threads that wait to send one, in turn."""

    __slots__ = ("key", "left", "waiting")

    def __init__(self, key: int, left: int) -> None:
        self.key = key
        self.left = left
        self.waiting: deque[Waiter] = deque()


class Connection(Channel):
    """The way from a worker process to the server.

    Args:
        link: the transport.
        name: of the instance.
        names: of inputs and outputs.
        window: how many responses of a request may be sent before the server takes one.
        verbose: whether the server wants verbose messages.
        flags: offset in the arena of the cancellation flags.

    Attributes:
        on_is_ready: called with the id of an IS_READY; `tell_ready` answers it.
    """

    def __init__(self, link: Link, name: str, names: Names, window: int, verbose: bool, flags: int) -> None:
        self.name = name
        self.on_is_ready: Callable[[int], None] = lambda _: None
        self._link = link
        self._names = names
        self.output_index = names.output_index
        self._window = window
        self._verbose = verbose
        self._flags = flags
        self._side = Reader(link, link.side, self._dispatch, "inferd-side")
        self._responses = Reader(link, link.calls, self._call_answered, "inferd-calls")
        self._grants = Grants(link, self._side)
        self._calls: dict[int, Call] = {}
        self._answers: dict[int, Answer] = {}
        # By slot, not by key: a thread may still send a response when another one has ended the request. What it leaves
        # here is replaced by the next request of the slot.
        self._credits: dict[int, Credit] = {}
        self._logs = Rate(LOGS_PER_SECOND, self._tell_dropped)
        # Re-entrant: while this thread holds the lock, the interpreter may drop a sender, which then answers.
        self._credit_lock = threading.RLock()

    def wait(self, call: Call) -> None:
        self._responses.wait(call)

    def expect(self) -> None:
        self._responses.read_always()

    def expect_questions(self) -> None:
        """Have a thread read the side socket: IS_READY may come."""
        self._side.read_always()

    def _dispatch(self, packet: Packet) -> None:
        if packet.kind == p.CREDIT:
            self._credit_arrived(packet)
        elif packet.kind == p.ALLOCATED:
            self._grants.arrived(packet)
        elif packet.kind == p.ANSWER:
            answer = self._answers.pop(packet.id)
            answer.content = json.loads(self._record(packet))
            answer.finish()
        elif packet.kind == p.IS_READY:
            self.on_is_ready(packet.id)

    def _record(self, packet: Packet) -> bytes:
        """The record as bytes; its memory in the arena is given back."""
        record = self._link.record(packet)
        if packet.flags & p.IN_ARENA:
            self._link.send(self._link.side, p.RELEASE, offset=packet.offset)
        return record

    def _send(self, kind: int, record: bytes, *, flags: int = 0, code: int = 0, number: int = 0) -> None:
        """Send a record of any size.

        Raises:
            TritonModelException: it needs memory of the arena, and there is none.
        """
        if len(record) <= INLINE_LIMIT:
            self._link.send(self._link.side, kind, record, flags=flags, code=code, number=number)
            return
        offset = self._grants.take(len(record))
        self._link.memory[offset : offset + len(record)] = record
        self._link.send_arena(self._link.side, kind, offset, len(record), flags=flags, code=code, number=number)

    # -----------------------------------------------------------------------------------------------------------------
    # Answering

    def respond(self, key: int, response: InferenceResponse | None, final: bool, wanted: frozenset[int] | None) -> None:
        flags = p.FINAL if final else 0
        if response is None:
            self._link.send(self._link.side, p.RESPONSE, flags=flags | p.EMPTY, number=key)
            self._end_credit(key)
            return
        self._spend_credit(key)
        taken: list[int] = []
        try:
            record = small_record(self._names, response, wanted)
            if record is None:
                writer = ResponseWriter(self._names, self._link.memory, self._take_into(taken))
                writer.add(response, wanted)
                record = writer.record()
            self._send(p.RESPONSE, record, flags=flags, number=key)
        except Exception as error:
            # The request still gets an answer, and the model an error.
            for offset in taken:
                self._link.send(self._link.side, p.FREE, offset=offset)
            writer = ResponseWriter(self._names, self._link.memory, self._grants.take)
            writer.add_error(p.CODE_INTERNAL, error_text(error)[:ERROR_LIMIT])
            self._link.send(self._link.side, p.RESPONSE, writer.record(), flags=flags, number=key)
            raise
        finally:
            if final:
                self._end_credit(key)

    def respond_written(self, key: int, record: bytes, final: bool) -> None:
        self._spend_credit(key)
        self._link.send(self._link.side, p.RESPONSE, record, flags=p.FINAL if final else 0, number=key)
        if final:
            self._end_credit(key)

    def _take_into(self, taken: list[int]) -> Callable[[int], int]:
        def take(size: int) -> int:
            taken.append(self._grants.take(size))
            return taken[-1]

        return take

    def _spend_credit(self, key: int) -> None:
        with self._credit_lock:
            credit = self._credits.get(key & p.SLOT_MASK)
            if credit is None or credit.key < key:
                for late in credit.waiting if credit is not None else ():
                    late.finish()  # they wait to send a response to a request that has ended
                credit = self._credits[key & p.SLOT_MASK] = Credit(key, self._window)
            elif credit.key > key:
                return  # the request has ended: the server ignores the response
            if credit.left:
                credit.left -= 1
                return
            waiter = Waiter()
            credit.waiting.append(waiter)
            first = len(credit.waiting) == 1
        if first:
            self._link.send(self._link.side, p.CREDIT, number=key)
        self._side.wait(waiter)

    def _credit_arrived(self, packet: Packet) -> None:
        with self._credit_lock:
            credit = self._credits.get(packet.id & p.SLOT_MASK)
            if credit is None or credit.key != packet.id:
                return  # the request has ended
            credit.left += packet.offset
            while credit.left and credit.waiting:
                credit.left -= 1
                credit.waiting.popleft().finish()
            more = bool(credit.waiting)
        if more:
            self._link.send(self._link.side, p.CREDIT, number=packet.id)

    def _end_credit(self, key: int) -> None:
        """The request has ended: let threads go that wait to send a response, which the server will ignore."""
        with self._credit_lock:
            credit = self._credits.get(key & p.SLOT_MASK)
            ended = credit is not None and credit.key == key
            waiting = self._credits.pop(key & p.SLOT_MASK).waiting if ended else ()
            for waiter in waiting:
                waiter.finish()
        if waiting:
            self._exchange()  # one of these threads may wait in a read of the socket, which this ends

    def _exchange(self) -> None:
        """Ask for memory, and give it back: when it comes, the server has read all that was sent before."""
        with suppress(TritonModelException):
            self._link.send(self._link.side, p.FREE, offset=self._grants.take(1))

    def flush(self, key: int) -> None:
        """Wait until the server has read everything sent for a request, before DONE reschedules it."""
        self._end_credit(key)
        self._exchange()

    def is_cancelled(self, key: int) -> bool:
        return self._link.memory[self._flags + (key & p.SLOT_MASK)] != 0

    # -----------------------------------------------------------------------------------------------------------------
    # Calls to other models

    def call(self, request: Request, call: Call, parent: tuple[int, str]) -> None:
        call.number = self._link.next_id()
        self._calls[call.number] = call
        try:
            call.large = self._send_call(request, call.number, p.DECOUPLED if call.decoupled else 0, parent)
        except BaseException:
            self._calls.pop(call.number)
            raise

    def _send_call(self, request: Request, call: int, flags: int, parent: tuple[int, str]) -> bool:
        """Send a call; True if the request did not fit into a packet."""
        number, request_id = parent
        pieces = encode_request(
            request._model_name,
            str(request._model_version) if request._model_version >= 0 else "",
            request._request_id or request_id,
            call_parameters(request),
            request._inputs,
            request._outputs,
        )
        size = sum(map(len, pieces))
        head = p.BLS_HEAD.pack(request._trace._key or number, 0, size, 0)
        link = self._link
        if p.BLS_HEAD.size + size <= INLINE_LIMIT:
            link.send(link.calls, p.BLS_REQUEST, b"".join((head, *pieces)), flags=flags, number=call)
            return False
        offset = at = self._grants.take(p.BLS_HEAD.size + size)
        for piece in (head, *pieces):
            link.memory[at : at + len(piece)] = piece
            at += len(piece)
        link.send_arena(link.side, p.BLS_REQUEST, offset, at - offset, flags=flags, number=call)
        return True

    def _call_answered(self, packet: Packet) -> None:
        final = bool(packet.flags & p.FINAL)
        call = self._calls.pop(packet.id, None) if final else self._calls.get(packet.id)
        if call is None:
            self._record(packet)  # no call waits for it: give its memory back
            return
        call.deliver(self._response_of(packet, call.model), final)

    def _response_of(self, packet: Packet, model: str) -> InferenceResponse:
        if packet.flags & p.FAILED:
            text = self._record(packet).decode("utf-8", "replace")
            if packet.flags & p.DECOUPLED:
                text = USE_DECOUPLED.format(model)
            elif packet.flags & p.EMPTY:
                text = f"Model {model} - Error when running inference: {text}"
            return InferenceResponse(error=TritonError(text, ERROR_CODES[packet.code]))
        if packet.flags & p.EMPTY:
            return InferenceResponse()
        try:
            if packet.flags & p.IN_ARENA:
                buffer = self.lend(lambda: self._link.send(self._link.side, p.RELEASE, offset=packet.offset))
                message = self._link.memory[packet.offset : packet.offset + packet.size]
                outputs, parameters = decode_response(message, buffer, packet.offset)
            else:
                outputs, parameters = decode_response(memoryview(packet.data), packet.data, 0)
        except Exception as error:  # any error: this caller waits, and so do later ones
            return InferenceResponse(error=TritonError(f"the response cannot be read: {error}"))
        response = InferenceResponse(outputs)
        response._parameters = parameters or None
        return response

    def lend(self, give_back: Callable[[], None]) -> Any:
        """The arena as the base of tensors; calls `give_back` when nothing refers to it any more."""
        import numpy as np

        # Views of an array keep that array as their base, unless its own base is an array.
        whole = np.frombuffer(self._link.arena, np.uint8)
        weakref.finalize(whole, give_back).atexit = False
        return whole

    def consumed(self, call: Call) -> None:
        self._link.send(self._socket_of(call), p.BLS_CREDIT, number=call.number, offset=1)

    def cancel(self, call: Call) -> None:
        self._link.send(self._socket_of(call), p.BLS_CANCEL, number=call.number)

    def _socket_of(self, call: Call) -> socket.socket:
        # the socket of its request: the packet must not overtake it
        return self._link.side if call.large else self._link.calls

    # -----------------------------------------------------------------------------------------------------------------
    # Everything else

    def ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        answer = Answer()
        number = self._link.next_id()
        self._answers[number] = answer
        try:
            self._send(p.CALL, call_record(question, arguments), number=number)
        except BaseException:
            self._answers.pop(number)
            raise
        self._side.wait(answer)
        if "error" in answer.content:
            raise TritonModelException(answer.content["error"])
        return answer.content.get("result")

    def metric(self, change: Mapping[str, Any]) -> None:
        self._send(p.METRIC, json.dumps(change).encode())

    def report(self, key: int, kind: int, index: int, infer_ns: int, output_ns: int) -> None:
        """Report the times of a response to the request with this key, as in `protocol`, STATISTICS."""
        record = p.STATISTICS_RECORD.pack(index, 0, infer_ns, output_ns)
        self._link.send(self._link.side, p.STATISTICS, record, code=kind, number=key)

    def log(self, level: int, text: str, *, always: bool = False) -> None:
        if always or ((level != p.LOG_VERBOSE or self._verbose) and self._logs.admits()):
            self._send_log(level, text)

    def _send_log(self, level: int, text: str) -> None:
        record = text[:LOG_LIMIT].encode("utf-8", "replace")[:INLINE_LIMIT]
        self._link.send(self._link.side, p.LOG, record, code=level)

    def _tell_dropped(self, count: int) -> None:
        self._send_log(p.LOG_WARNING, f"left out {count} messages: more than {LOGS_PER_SECOND} came in a second")

    def end_logs(self) -> None:
        """Report the messages that were left out: nothing more will be logged."""
        self._logs.tell_dropped()

    def tell_ready(self, number: int, ready: bool, why: str) -> None:
        """Answer the question whether the model is ready."""
        record = why[:LOG_LIMIT].encode("utf-8", "replace")[:INLINE_LIMIT]
        self._link.send(self._link.side, p.HEALTH, record, flags=p.TRUE if ready else 0, number=number)


def call_record(question: str, arguments: Mapping[str, Any]) -> bytes:
    """The record of a CALL; files are bytes by their paths."""
    content = {"call": question, **arguments}
    files = content.get("files") or {}
    if files:
        content["files"] = {path: len(content) for path, content in files.items()}
    text = json.dumps(content).encode()
    return b"".join((p.CALL_HEAD.pack(len(text)), text, *files.values()))


def call_parameters(request: Request) -> dict[str, Any]:
    """The parameters of a call, with what the protocol carries among them."""
    parameters = dict(request._parameters or {})
    if request._correlation_id:
        parameters["sequence_id"] = request._correlation_id
        parameters["sequence_start"] = bool(request._flags & SEQUENCE_START)
        parameters["sequence_end"] = bool(request._flags & SEQUENCE_END)
    if request._timeout:
        parameters["timeout"] = request._timeout
    if request._priority:
        parameters["priority"] = request._priority
    return parameters
