"""Clients of every temper, with their own bytes of HTTP/2 cut where the seed says."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from _native.transport.connection import Connection
from server.pb import grpc_service_pb2 as pb
from tests.simulation.models import IDLE_US, SCALE, Kind
from tests.simulation.wire import Stream, Violation, Wire

if TYPE_CHECKING:
    from tests.simulation.simulation import Scale, Simulation

INFER = "/inference.GRPCInferenceService/ModelInfer"
US = 1000
MS = 1000 * US
HOUR = 3_600_000 * MS
QUESTIONS = 6  # different ones that are asked of models which reuse answers
LARGE = 40_000  # numbers in a large row
PATIENT = 4  # of requests of one sequence under way


@dataclass(frozen=True)
class Temper:
    """How a client behaves.

    Attributes:
        name: for the story.
        burst: calls at a time, at most.
        pause_ns: between bursts, at most.
        chunk: bytes that reach the server at a time, at most; 0 for all.
        send_ns, read_ns: until what was written arrives there or here, at most.
        gulp: bytes that are read at a time, at most.
        window: of a stream.
        cancels, hangs_up: how often, of one.
        deadlines: that calls have, -1 for none.
        large: how often a call is large, of one.
    """

    name: str
    burst: int = 4
    pause_ns: int = 500 * US
    chunk: int = 0
    send_ns: int = 30 * US
    read_ns: int = 30 * US
    gulp: int = 1 << 20
    window: int = 1 << 20
    cancels: float = 0.0
    hangs_up: float = 0.0
    deadlines: tuple[int, ...] = (-1, -1, -1, HOUR)
    large: float = 0.02

    @property
    def prompt(self) -> bool:
        """Whether it takes what it is sent as soon as it comes."""
        return self.read_ns <= MS and self.gulp >= 1 << 16 and self.window >= 1 << 20


TEMPERS = (
    Temper("polite"),
    Temper("bursting", burst=40, pause_ns=5 * MS, chunk=5000),
    Temper("by the byte", chunk=7, send_ns=3 * US, large=0.0),
    Temper("slow to send", chunk=60, send_ns=2 * MS, large=0.0),
    Temper("slow to read", read_ns=5 * MS, gulp=300, window=1000, large=0.05),
    Temper("cancelling", cancels=0.3, burst=8),
    Temper("hurried", deadlines=(-1, 0, 50 * US, 300 * US, 2 * MS, HOUR), burst=10),
    Temper("reconnecting", hangs_up=0.1, cancels=0.1, deadlines=(-1, 300 * US)),
    Temper("large", large=0.5, chunk=30_000, burst=3, window=1 << 24),
)


def draw_temper(random: Random, scale: Scale) -> Temper:
    """One of those that the scale lets in."""
    tempers = [temper for temper in TEMPERS if scale.cancels or not (temper.cancels or temper.hangs_up)]
    return random.choice([temper for temper in tempers if scale.deadlines or min(temper.deadlines) < 0])


@dataclass
class Sequence:
    """One of a client's."""

    number: int
    kind: Kind
    length: int
    sent: int = 0
    total: int = 0
    under_way: int = 0
    broken: bool = False  # one of its requests was not answered: what follows is anything
    touched_ns: int = 0


@dataclass
class Call:
    """One call."""

    number: int
    client: Client
    kind: Kind
    x: np.ndarray
    expected: np.ndarray
    deadline_ns: int
    opened_ns: int
    stream: Stream
    level: int = 1
    place: int = 0  # among the calls of its connection
    sent_ns: int = 1 << 62  # when its last byte was sent
    sequence: Sequence | None = None
    over: bool = False

    def __str__(self) -> str:
        deadline = f" deadline {self.deadline_ns // US} us" if self.deadline_ns >= 0 else ""
        return f"call {self.number} of client {self.client.number} to {self.kind.name}{deadline}"


@dataclass
class Pipe:
    """Bytes on their way to the server."""

    data: bytearray = field(default_factory=bytearray)
    busy: bool = False


class Client:
    """One client with a connection at a time.

    Args:
        simulation: whose it is.
        number: of the client.
        temper: how it behaves.
        calls: that it makes.
    """

    def __init__(self, simulation: Simulation, number: int, temper: Temper, calls: int) -> None:
        self.simulation = simulation
        self.number = number
        self.temper = temper
        self.random = Random(f"{simulation.outcome.seed} client {number}")
        self.left = calls
        self.life = 0
        self.calls: dict[int, Call] = {}  # that are open, by stream
        self.unsent: list[Call] = []
        self.sequences: list[Sequence] = []
        self.name = f"client {number}"
        self.places = 0
        self.reading = False
        self._connect()

    @property
    def active(self) -> bool:
        return self.left > 0 or bool(self.calls)

    def _connect(self) -> None:
        simulation = self.simulation
        self.life += 1
        self.wire = Wire(self.temper.window, 1 << 24)
        self.pipe = Pipe()
        use = simulation.uses[self.number % len(simulation.uses)]
        self.connection = Connection(simulation.endpoint, f"sim:{self.number}", use=use)
        self.connection.flush = self._flushed
        self.connection.on_refused = self.tell
        self.tell(f"connects, {self.temper.name}")

    def tell(self, what: str) -> None:
        self.simulation.tell(self.name, what)

    def begin(self) -> None:
        self.write()
        self._act_later()

    def close(self) -> None:
        self.connection.flush = None
        self.connection.close()

    # -- what it does --

    def _act_later(self) -> None:
        self.simulation.later(self.random.randint(0, self.temper.pause_ns), self.act)

    def act(self) -> None:
        """A burst of calls, or something worse."""
        if self.random.random() < self.temper.hangs_up and self.life < 20:
            self.hang_up()
        for _ in range(min(self.left, self.random.randint(1, self.temper.burst))):
            if len(self.calls) < 90:
                self.left -= 1
                self.call()
        if self.temper.cancels:
            for call in list(self.calls.values()):
                if call.sequence is None and self.random.random() < self.temper.cancels * 0.5:
                    self.cancel(call)
        if self.random.random() < 0.05:
            self.wire.ping()
        self.write()
        if self.left > 0:
            self._act_later()

    def hang_up(self) -> None:
        self.tell(f"hangs up with {len(self.calls)} calls open")
        self.close()
        for call in list(self.calls.values()):
            self._over(call, answered=False)
        self.unsent.clear()
        self.sequences.clear()
        self._connect()

    def cancel(self, call: Call) -> None:
        self.tell(f"cancels {call.number}")
        self.wire.cancel(call.stream)
        self._over(call, answered=False)

    def call(self) -> None:
        """One call, to whichever model."""
        simulation = self.simulation
        kinds = list(simulation.kinds.values())
        [kind] = self.random.choices(kinds, [kind.weight for kind in kinds])
        number = simulation.outcome.calls
        sequence = self._sequence(kind) if kind.sequence is not None else None
        x = self._tensor(kind, number, sequence)
        expected = x.copy()
        expected[:, 1:] *= kind.factor
        message = pb.ModelInferRequest(model_name=kind.name, id=str(number))
        message.inputs.add(name="x", datatype="INT64", shape=x.shape)
        message.raw_input_contents.append(x.tobytes())
        level = kind.queue.default_level
        if len(kind.queue.levels) > 1 and self.random.random() < 0.8:
            level = self.random.randint(1, len(kind.queue.levels))
            message.parameters["priority"].int64_param = level
        deadline = -1
        if sequence is None and simulation.scale.deadlines:
            deadline = self.random.choice(self.temper.deadlines)
        if sequence is not None:
            self._put_in_sequence(message, sequence, x, expected)
        encoded = message.SerializeToString()
        body = b"\0" + len(encoded).to_bytes(4, "big") + encoded
        extra = (("grpc-timeout", grpc_timeout(deadline)),) if deadline >= 0 else ()
        stream = self.wire.open(INFER, extra, body)
        call = Call(number, self, kind, x, expected, deadline, simulation.world.now(), stream, level, sequence=sequence)
        self.calls[stream.number] = call
        self.unsent.append(call)
        simulation.opened(call)
        self.tell(f"calls {kind.name} as {number}: {list(x.shape)}, {call}")

    def _tensor(self, kind: Kind, number: int, sequence: Sequence | None) -> np.ndarray:
        random = self.random
        rows = 1 if sequence is not None or random.random() < 0.6 else random.randint(1, kind.max_rows)
        width = 4 if random.random() < 0.8 or sequence is not None else random.randint(2, 6)
        if random.random() < self.temper.large and sequence is None:
            width = random.randint(1000, LARGE) // rows + 2
        if kind.reuses and random.random() < 0.8:
            number, rows, width = random.randrange(QUESTIONS), 1 + number % 2, 4
        x = np.arange(rows * width, dtype=np.int64).reshape(rows, width) + number * SCALE
        x[:, 0] = number * SCALE + np.arange(rows)
        if kind.fails and number and random.random() < 0.2:
            x[:, 0] *= -1
        return x

    def _sequence(self, kind: Kind) -> Sequence:
        open_ones = [one for one in self.sequences if one.kind is kind and one.under_way < PATIENT]
        if open_ones and self.random.random() < 0.85:
            return self.random.choice(open_ones)
        simulation = self.simulation
        one = Sequence(1 + self.number + 100 * simulation.outcome.calls, kind, self.random.randint(1, 6))
        one.touched_ns = simulation.world.now()
        self.sequences.append(one)
        return one

    def _put_in_sequence(
        self, message: pb.ModelInferRequest, one: Sequence, x: np.ndarray, expected: np.ndarray
    ) -> None:
        message.parameters["sequence_id"].int64_param = one.number
        message.parameters["sequence_start"].bool_param = one.sent == 0
        message.parameters["sequence_end"].bool_param = one.sent + 1 == one.length
        one.sent += 1
        one.under_way += 1
        one.total += int(x[0, 1])
        expected[:] = x
        expected[0, 1] = one.total
        if one.sent == one.length:
            self.sequences.remove(one)

    # -- bytes --

    def write(self) -> None:
        """Send what windows allow, and have it carried to the server."""
        progress = True
        while progress and self.unsent:
            progress = False
            call = self.unsent[0]
            if call.stream.over:
                self.unsent.pop(0)
                progress = True
                continue
            if self.simulation.scale.forgetful and self.left == 0:
                self.unsent.pop(0)
                continue
            before = len(call.stream.body)
            done = self.wire.push(call.stream, self.random.choice((1 << 20, 1 << 20, 100)))
            progress = done or len(call.stream.body) < before
            if done:
                self.places += 1
                call.place = self.places
                self.unsent.remove(call)
            elif not progress and call.sequence is None and len(self.unsent) > 1 and self.wire.send_window > 0:
                self.unsent.append(self.unsent.pop(0))  # its own window is used up
                progress = any(each.stream.window > 0 for each in self.unsent)
        if self.wire.out:
            self.pipe.data += self.wire.out
            self.wire.out.clear()
            self._carry_later()

    def _carry_later(self) -> None:
        if not self.pipe.busy:
            self.pipe.busy = True
            pipe = self.pipe
            self.simulation.later(self.random.randint(0, self.temper.send_ns), lambda: self._carry(pipe))

    def _carry(self, pipe: Pipe) -> None:
        """A chunk arrives at the server."""
        pipe.busy = False
        if pipe is not self.pipe or not pipe.data:
            return
        limit = self.random.randint(1, self.temper.chunk) if self.temper.chunk else len(pipe.data)
        buffer = self.connection.receive_buffer()
        with memoryview(buffer) as whole, whole.cast("B") as view:
            size = min(limit, len(pipe.data), len(view))
            view[:size] = pipe.data[:size]
        del pipe.data[:size]
        self.simulation.world.may_fail(1)
        self.connection.received(size)
        self.simulation.world.may_fail(0)
        self._read_later()
        if pipe.data:
            self._carry_later()
        else:
            now = self.simulation.world.now()
            for call in self.calls.values():
                if call.stream.sent_end and call.sent_ns > now:
                    call.sent_ns = now

    def _flushed(self) -> None:
        self._read_later()

    def _read_later(self) -> None:
        if not self.reading:
            self.reading = True
            self.simulation.later(self.random.randint(0, self.temper.read_ns), self._read)

    def _read(self) -> None:
        """Take some of what the server has for it."""
        self.reading = False
        connection = self.connection
        data = b"".join(bytes(piece) for piece in connection.take_output(self.random.randint(1, self.temper.gulp)))
        if data:
            self._receive(data)
            self._read_later()
        elif connection.finished and self.simulation.is_faulty:
            self.hang_up()
            self.write()
        elif connection.finished:
            raise Violation(
                f"{self.name}: the server ends the connection: GOAWAY {self.wire.went_away} '{self.wire.farewell}'"
            )

    def _receive(self, data: bytes) -> None:
        wire = self.wire
        wire.receive(data)
        for stream in wire.begun:
            call = self.calls.get(stream.number)
            if call is not None:
                self.simulation.oracle.begun(call)
        wire.begun.clear()
        for stream in wire.finished:
            call = self.calls.get(stream.number)
            if call is not None:
                self._over(call, answered=True)
                del wire.streams[stream.number].data[:]
        wire.finished.clear()
        if wire.credit < 1 << 23:
            wire.give(None, (1 << 24) - wire.credit)
        for call in self.calls.values():
            stream = call.stream
            if stream.credit < self.temper.window // 2:
                wire.give(stream, self.temper.window - stream.credit)
        self.write()

    def _over(self, call: Call, *, answered: bool) -> None:
        del self.calls[call.stream.number]
        call.over = True
        simulation = self.simulation
        simulation.oracle.open.pop(call.number, None)
        if answered:
            self.tell(f"has status {simulation.oracle.status(call)} for {call.number}")
        simulation.over(call, answered)
        one = call.sequence
        if one is not None:
            one.under_way -= 1
            one.touched_ns = simulation.world.now()
            if not answered or simulation.oracle.status(call) != 0:
                one.broken = True
                if one in self.sequences:
                    self.sequences.remove(one)

    def sequence_may_end(self, call: Call) -> bool:
        """Whether a request of a sequence may be refused: one before it was, or none had come for long."""
        one = call.sequence
        if one is None:
            return False
        return one.broken or self.simulation.world.now() - one.touched_ns > IDLE_US * US // 2


def grpc_timeout(ns: int) -> str:
    """As the header says it."""
    return f"{ns // US}u" if ns < 90_000 * MS else f"{ns // (1000 * MS)}S"
