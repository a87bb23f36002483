"""ModelStreamInfer from the client's side: requests one behind the other, and their answers, in order or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inferd_client.pb import grpc_service_pb2 as pb
from tests.simulation.desk import STREAM
from tests.simulation.kinds import ends_apart
from tests.simulation.wire import Stream, Violation, framed, take_message
from tests.simulation.wording import agree, serialized

if TYPE_CHECKING:
    from tests.simulation.clients import Call, Client

LONGEST = 8  # requests of a stream
WITH_END = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
CLOSE_ON_ERROR = "triton_grpc_error"  # a header: an error is the status of the stream


class Talk:
    """One stream.

    Args:
        client: whose it is.
        stream: its HTTP/2 stream.
        length: requests that will be made.
        deadline_ns: of the whole, from now; negative for none.
        headers: that it was opened with, beside those of every call.
    """

    sequence = None  # it has none that others have to wait for
    wrong = False

    def __init__(
        self, client: Client, stream: Stream, length: int, deadline_ns: int, headers: tuple[tuple[str, str], ...]
    ) -> None:
        self.client = client
        self.stream = stream
        self.headers = headers
        self.left = length
        self.action = client.actions  # of the client
        self.asked = 0  # requests
        self.deadline_ns = deadline_ns
        self.opened_ns = client.simulation.world.now()
        self.number = stream.number
        self.sent_ns = 1 << 62
        self.place = 0
        self.open: list[Call] = []  # in the order of their requests
        self.rows: dict[int, set[int]] = {}  # of decoupled requests, that have been answered
        self.ends: set[int] = set()  # decoupled requests with an end of their own
        self.whole: dict[int, Call] = {}  # requests that have all answers, and whose end the server has not said
        self.ends_on_error = False  # an error ends it
        self.puzzled = False  # an error came without the id of its request
        stream.more = True
        kind = client.kind_to_keep()
        # perhaps not all of it
        self.kept = client.begin_sequence(kind, length + client.random.choice((0, 0, 1))) if kind else None

    def __str__(self) -> str:
        deadline = f" deadline {self.deadline_ns // 1000} us" if self.deadline_ns >= 0 else ""
        return f"stream {self.number} of client {self.client.number}{deadline}"

    # -- the client's --

    def say(self) -> None:
        """One more request, or the end of them."""
        client, usual = self.client, self.client.random
        if not self.stream.over:
            client.random = client.stream_of(f"{self.action} request {self.asked}")
            self._say()
            client.random = usual

    def _say(self) -> None:
        client = self.client
        if self.left and self.kept and self.kept.kind.tallies and self.open and not self.puzzled:
            client.later(self.say)  # steps before the one that keeps sequences may change the order of requests
            return
        if self.left == 0:
            self.stream.more = False
            client.tell(f"has no more requests on {self}")
        else:
            self.left -= 1
            self.asked += 1
            kind = self.kept.kind if self.kept else client.streamed_kind()
            if kind is None:
                client.later(self.say)
                return
            call, message = client.request(kind, self.stream, self.deadline_ns, self.headers, self)
            call.opened_ns = self.opened_ns  # its deadline is the stream's
            if call.kind.decoupled:
                self.rows[call.number] = set()
                if client.random.random() < 0.5:
                    message.parameters[WITH_END].bool_param = True
                    self.ends.add(call.number)
            data = serialized(client.random, message)
            call.size = len(data)
            agree(data)
            self.stream.body += framed(data, packed=client.packing)
            self.open.append(call)
            client.tell(f"asks {call.kind.name} on {self}: {call.number}, {call.said}")
            client.later(self.say)
        if self not in client.unsent:
            client.unsent.append(self)
        client.write()

    def receive(self) -> None:
        """Take the answers that have come."""
        while (message := take_message(self.stream.data)) is not None:
            self._answered(pb.ModelStreamInferResponse.FromString(message))

    def _answered(self, response: pb.ModelStreamInferResponse) -> None:
        number = int(response.infer_response.id) if response.infer_response.id.isdecimal() else -1
        call = next((call for call in self.open if call.number == number), None)
        if number < 0 and self.client.simulation.is_faulty:
            self.puzzled = True  # there was no memory to find out whose error it is
            if self.kept:
                self.kept.broken = True
            return
        if call is None and response.error_message and number in self.whole:
            self.client.simulation.oracle.refused(self.whole.pop(number), response.error_message)
            return
        if call is None:
            raise Violation(f"{self}: an answer to request {number}, which is not open: {response.error_message}")

        if response.error_message and self.ends_on_error:
            raise Violation(f"{self}: it goes on after the error of {call}: {response.error_message}")
        self.client.tell(f"has an answer to {call} on {self}: {response.error_message or 'good'}")
        first = next((other for other in self.open if not other.kind.decoupled), None)
        if not (call.kind.decoupled or call is first or self.puzzled):
            raise Violation(f"{self}: the answer to {call} comes before that to {first}")
        final = response.infer_response.parameters[FINAL].bool_param
        if response.error_message:
            if not final:
                raise Violation(f"{self}: an error is not the last answer to {call}: {response.error_message}")
            self.client.simulation.oracle.refused(call, response.error_message)
        elif not call.kind.decoupled:
            self.client.simulation.oracle.check_response(call, response.infer_response)
        elif not self._is_last(call, response.infer_response):
            return
        self.open.remove(call)
        if ends_apart(call.kind) and not (final or response.error_message):
            self.whole[number] = call
        self.client.closed(call, good=not response.error_message and number not in self.whole)

    def _is_last(self, call: Call, response: pb.ModelInferResponse) -> bool:
        """Judge one of the answers of a decoupled model; whether no more are to come."""
        rows = self.rows[call.number]
        final = response.parameters[FINAL].bool_param
        if not response.outputs:
            if not final or call.number not in self.ends or len(rows) != len(call.x):
                raise Violation(f"{call}: an answer without content behind {len(rows)} of {len(call.x)} rows")
            return True
        row = self.client.simulation.oracle.check_row(call, response)
        if row in rows:
            raise Violation(f"{call}: row {row} is answered twice")
        if not call.kind.steps and row != len(rows):
            raise Violation(f"{call}: row {row} is answered behind {len(rows)} others")
        rows.add(row)
        complete = len(rows) == len(call.x)
        if final and not complete:
            raise Violation(f"{call}: the last answer is behind {len(rows) - 1} of {len(call.x)} rows")
        return complete and (final or call.number not in self.ends)

    def ended(self) -> None:
        """The server has ended the stream."""
        self.client.simulation.oracle.stream_ended(self)
        self.let_go()

    def let_go(self) -> None:
        """Called when nothing will come any more: close what is still open."""
        self.stream.cancelled = not self.stream.ended
        for call in list(self.open):
            self.client.closed(call, good=False)
        self.open.clear()
        one = self.kept
        if one is None or one.kind.sequence is None or not one.kind.sequence.ends_with_stream:
            return
        if one.answered and one.sent < one.length and not one.broken:
            self.client.simulation.oracle.ended[one.number] = one


def open_talk(
    client: Client, length: int, deadline_ns: int, headers: tuple[tuple[str, str], ...], *, ends_on_error: bool
) -> Talk:
    """A new one, on a connection that the client has."""
    random = client.stream_of(f"{client.actions} headers")
    if ends_on_error:
        headers = (*headers, (CLOSE_ON_ERROR, random.choice(("true", "1", "True"))))
    elif random.random() < 0.1:
        headers = (*headers, (CLOSE_ON_ERROR, random.choice(("false", "0", "trues", ""))))
    talk = Talk(client, client.wire.open(STREAM, headers, b""), length, deadline_ns, headers)
    talk.ends_on_error = ends_on_error
    return talk


def row_of(x: np.ndarray, y: np.ndarray) -> int:
    """Which row of the request an answer is for, by the number in front."""
    return int(y.reshape(-1)[0] - x[0, 0])
