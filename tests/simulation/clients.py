"""Clients of every temper, with their own bytes of HTTP/2 cut where the seed says."""

from __future__ import annotations

import math
import os
import signal
import ssl
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inferd.server.front.door import STOPPING
from inferd_client.pb import grpc_service_pb2 as pb
from tests.simulation.ages import judge_refused, may_drop
from tests.simulation.beside import VARIANTS, Given
from tests.simulation.kind import CLIENTS, FIRST_QUESTION, IDLE_US, SCALE, SHAPED, Kind
from tests.simulation.kinds import STEPS
from tests.simulation.questions import Question
from tests.simulation.regions import SLOT, Region
from tests.simulation.secure import HANDSHAKE
from tests.simulation.sockets import BROKEN, OPEN, End
from tests.simulation.talks import LONGEST, Talk, open_talk
from tests.simulation.wire import FRAME, Stream, Violation, Wire, framed
from tests.simulation.wording import agree, lead_astray, reword, serialized, spoil

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.simulation import Scale, Simulation

INFER = "/inference.GRPCInferenceService/ModelInfer"
US = 1000
MS = 1000 * US
HOUR = 3_600_000 * MS
NEVER = 1 << 62
LATE_END = 10_000 * MS  # in which a connection has ended whose end was announced, and on which nothing is open
QUESTIONS = 6  # different ones that are asked of models which reuse answers
LARGE = 40_000  # numbers in a large tensor
TEXT = 10  # times as long are numbers as strings, about, and to write them takes long
VAST = 1 << 25  # bytes that are under way to a client with such tensors
LARGE_FRAMES = (FRAME + 1, 50_000, (1 << 24) - 1)  # that clients take
BROAD = 0.5  # of clients: they send frames as large as the server takes, so that it reads large tensors to their places
HUGE = 640_000  # and in one that exceeds the window of a stream, and what may be unsent before calls have to wait
IDLE_TEXT = "no request had come for max_sequence_idle_microseconds"
CHUNKS, SMALL = 16, 100  # that arrive at a time, at most, of chunks that have fewer bytes
AT_ONCE = 1 << 18  # bytes that a client offers to its socket at a time, which takes fewer
IN_ACTION = 512  # numbers of requests tell the client, and which it is of how many of an action
FEW = 0.05  # of calls that are large
LONG = 60  # requests of a sequence
TIMEOUTS_US = (1, 50, 300, 5000, 1 << 40)  # that requests ask for
ENDS_ON_ERROR = 0.15  # of streams
LONG_TALKS, LONG_TALK = 0.03, 300  # how often a stream is long, and how many requests it has then, at most
LONG_OF_PACKED = 0.1  # the same, where messages are compressed: what leaks of each is found when there have been many
TOO_MUCH = 0.2  # of requests that take one answer, where clients err
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
        largest: numbers in such a call, at most.
        weight: how often there is such a client.
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
    largest: int = LARGE
    weight: float = 1.0

    @property
    def patient(self) -> bool:
        """Whether it has no deadlines that pass."""
        return min((each for each in self.deadlines if each >= 0), default=HOUR) == HOUR

    @property
    def dawdles(self) -> bool:
        """Whether it may take longer to read than the server waits for the end of a connection."""
        return self.read_ns > 1000 * MS

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
    # calls whose time is over while their large messages arrive
    Temper(
        "pressed",
        large=0.5,
        chunk=30_000,
        burst=3,
        window=1 << 24,
        deadlines=(-1, 100 * US, 300 * US, 2 * MS, HOUR),
        weight=0.5,
    ),
    # large calls that come or are read in the course of seconds: the server ends them when it holds too much
    Temper(
        "dawdling",
        large=0.5,
        chunk=30_000,
        send_ns=200 * MS,
        read_ns=2000 * MS,
        gulp=20_000,
        burst=2,
        pause_ns=200 * MS,
        window=1 << 24,
        weight=0.5,
    ),
    Temper("huge", large=0.15, largest=HUGE, read_ns=20 * MS, burst=4, pause_ns=5 * MS, window=1 << 24, weight=0.25),
)


def draw_temper(random: Random, scale: Scale) -> Temper:
    """Draw one of the tempers that the scale admits."""
    tempers = [temper for temper in TEMPERS if not scale.tempers or temper.name in scale.tempers]
    tempers = [temper for temper in tempers if scale.cancels or not (temper.cancels or temper.hangs_up)]
    tempers = [temper for temper in tempers if scale.deadlines or min(temper.deadlines) < 0] or [*TEMPERS[:1]]
    [temper] = random.choices(tempers, [temper.weight for temper in tempers])
    return temper


@dataclass
class Sequence:
    """A sequence of one client."""

    number: int
    kind: Kind
    length: int
    rows: int = 1
    sent: int = 0
    totals: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of its rows
    under_way: int = 0
    answered: int = 0
    broken: bool = False  # one of its requests was not answered: what follows is anything
    touched_ns: int = 0
    begun_ns: int = 0


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
    timeout_us: int = 0  # that it may wait in the queue; 0: any time
    asked_level: int = 0  # that it names; 0: none
    asked_us: int = 0  # that it names as the time that it may wait; 0: none
    place: int = 0  # among the calls of its connection
    sent_ns: int = 1 << 62  # when its last byte was sent
    sequence: Sequence | None = None
    talk: Talk | None = None  # on which it was made; else by a call of its own
    region: Region | None = None  # in which its input lies
    answer_at: int = -1  # and there its output is to lie
    lost: bool = False  # its region was spoilt
    given: Given | None = None  # of the other input, where its model has one
    wanted: tuple[str, ...] = ()  # outputs
    classes: int = 0  # that are asked for in place of numbers
    wrong: bool = False  # it has to be refused
    too_many: bool = False  # its model gives more than the one answer that it takes
    refusal: str = ""  # what that has to say
    message: pb.ModelInferRequest | None = None
    headers: tuple[tuple[str, str], ...] = ()  # of the call, or of the stream that it is on
    size: int = 0  # of the message
    address: str = ""  # of its client, as the server knows it
    over: bool = False

    @property
    def yields(self) -> bool:
        """Whether it waits on, behind others, when its time to wait is over."""
        return self.kind.level(self.level).yields

    @property
    def question(self) -> int:
        """The number that models see: requests of models which reuse answers have the same ones."""
        return abs(int(self.x[0, 0])) // SCALE

    @property
    def said(self) -> str:
        """The call in words, for people."""
        deadline = f", deadline {self.deadline_ns // US} us" if self.deadline_ns >= 0 else ""
        parameters = self.message.parameters if self.message is not None else {}
        named = {key: parameters[key] for key in ("priority", "timeout") if key in parameters}
        told = "".join(f", {key} {value.int64_param}" for key, value in named.items())
        if self.sequence is not None:
            told += f", sequence {self.sequence.number}"
            told += ", START" * parameters["sequence_start"].bool_param
            told += ", END" * parameters["sequence_end"].bool_param
        told += f", classes {self.classes}" * bool(self.classes) + ", in a region" * (self.region is not None)
        told += ", which is wrong" * self.wrong
        others = sorted(key for key in parameters if key not in named and not key.startswith("sequence_"))
        return f"{list(self.x.shape)}{told}{deadline}{f', with {others}' if others else ''}"

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
        self.talks: dict[int, Talk | Question] = {}  # the same
        self.unsent: list[Call | Talk | Question] = []
        self.given_up: list[Call] = []  # of which the server has not heard that yet
        self.region: Region | None = None
        self.regions = 0  # that it has had
        self.packs = self.random.random() < simulation.packing
        packing = Random(f"{simulation.outcome.seed} client {number} packing")
        self.packing = packing.choice(("gzip", "gzip", "deflate")) if self.packs else ""
        self.accepted = packing.choice(
            (self.packing, "gzip,deflate", "identity, deflate , gzip", "br,identity", "deflate")
        )
        self.pause_ns = temper.pause_ns * simulation.pace
        self.sequences: list[Sequence] = []
        self.name = f"client {number}"
        self.places = 0
        self.begun = 0  # sequences
        self.actions = 0  # calls and streams
        self.reading = False
        self.rests = False  # it does nothing new until it has another connection
        frames = Random(f"{simulation.outcome.seed} client {number} frames")
        self.broad, self.takes = frames.random() < BROAD, frames.choice((FRAME, FRAME, *LARGE_FRAMES))
        self._connect()

    @property
    def active(self) -> bool:
        return self.left > 0 or bool(self.calls or self.talks)

    def _connect(self) -> None:
        simulation = self.simulation
        self.life += 1
        self.wire = Wire(self.temper.window, 1 << 24, broad=self.broad, takes=self.takes)
        self.pipe = Pipe()
        self.cipher = simulation.secure.cipher()
        if self.cipher is not None:
            self.pipe.data += self.cipher.said()
        self.connected_ns = simulation.world.now()
        random = Random(f"{simulation.outcome.seed} client {self.number} socket {self.life}")
        output = VAST if self.temper.largest > LARGE else 0  # more than a connection may write in one turn
        self.end = simulation.sockets.connect(self, self.number, random, self.temper.chunk, output=output)
        self.tell(f"connects, {self.temper.name}")

    def tell(self, what: str) -> None:
        self.simulation.tell(self.name, what)

    def begin(self) -> None:
        self._carry_later()
        self.write()
        self._act_later()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on its way between it and the server."""
        end = self.end
        return end.peer is None or not (self.pipe.data or end.untaken or self.reading or end.done != end.sent)

    def judge(self) -> None:
        """All is said and heard.

        Raises:
            Violation: the server has not answered all.
        """
        if self.end.peer is not None and self.end.seen == OPEN and self.wire.went_away is None:
            self.wire.judge()

    def leave(self) -> None:
        """For good."""
        self.end.part(reset=False)
        if self.region is not None:
            self.region.close()

    # -- what it does --

    def later(self, what: Callable[[], None]) -> None:
        """After a pause."""
        self.simulation.later(self.random.randint(0, self.pause_ns), what)

    def _act_later(self) -> None:
        self.later(self.act)

    def act(self) -> None:
        """A burst of calls, or something worse."""
        if self.random.random() < self.temper.hangs_up and self.life < 20:
            self.hang_up()
        left = self.left
        is_leaving = self.wire.went_away is not None
        for _ in range(min(left, self.random.randint(1, self.temper.burst))):
            if self.left > 0 and len(self.calls) + len(self.talks) < 90 and not is_leaving:
                self._begin_something()
        if self.region is not None and self.region.sound and self.random.random() < 0.05:
            self.region.spoil(truncate=self.random.random() < 0.5)
        if self.temper.cancels:
            for call in list(self.calls.values()):
                if self.random.random() < self.temper.cancels * 0.2:
                    self.cancel(call)
            for talk in list(self.talks.values()):
                if self.random.random() < self.temper.cancels * 0.2:
                    self.cancel_talk(talk)
        if self.left < left and self.random.random() < 0.05:  # one that only waits would ping too often
            self.wire.ping()
        self.write()
        if is_leaving:
            self.rests = True
            self._look_at_end(self.end, was_idle=False)
        elif self.left > 0:
            self._act_later()

    def _look_at_end(self, end: End, *, was_idle: bool) -> None:
        """The server has said that it ends this connection: it does, when nothing is open on it."""
        is_idle = not (self.calls or self.talks)
        if end is not self.end or end.peer is None:
            return
        if is_idle and was_idle:
            raise Violation(f"{self.name}: its old connection does not end")
        self.simulation.later(LATE_END, lambda: self._look_at_end(end, was_idle=is_idle))

    def hang_up(self) -> None:
        self.tell(f"hangs up with {len(self.calls)} calls open")
        simulation = self.simulation
        simulation.bounds.left(soon=True)
        given_up = [*self.calls.values(), *self.given_up]
        self.end.when_done(NEVER, lambda: simulation.oracle.given_up(*given_up), anyway=True)
        self.end.part(reset=self.random.random() < 0.5)
        for call in list(self.calls.values()):
            self._over(call, answered=False)
        self.given_up.clear()
        for talk in list(self.talks.values()):
            self._talk_over(talk, answered=False)
        self.unsent.clear()
        self.sequences.clear()
        if simulation.operator.is_stopping and simulation.sockets.listening is None:
            self.left = 0  # nobody accepts it
        if self.left > 0:
            self._connect()
            self._carry_later()
            if self.rests:
                self.rests = False
                self._act_later()

    def _cancel_if_open(self, call: Call) -> None:
        if not call.over:
            self.cancel(call)
            self.write()

    def leave_question(self, question: Question) -> None:
        """Cancel it, if it is still open."""
        if self.talks.get(question.number) is question:
            self.cancel_talk(question)
            self.write()

    def cancel(self, call: Call) -> None:
        self.tell(f"cancels {call.number}")
        self.wire.cancel(call.stream)
        self.given_up.append(call)
        self._over(call, answered=False)

    def cancel_talk(self, talk: Talk | Question) -> None:
        self.tell(f"cancels {talk}")
        self.simulation.bounds.left(soon=True)
        self.wire.cancel(talk.stream)
        self._talk_over(talk, answered=False)

    def _begin_something(self) -> None:
        """A call, or a stream: what it is depends on nothing but the client and how many it has begun before."""
        self.actions += 1
        if self.is_left_out(self.actions):
            self.left -= 1
            return
        usual = self.random
        self.random = self.stream_of(str(self.actions))
        self._do_something()
        self.random = usual

    def is_left_out(self, action: int) -> bool:
        """Whether a simulation that is made smaller does without it."""
        return any(
            client == self.number and first <= action <= last for client, first, last in self.simulation.scale.left_out
        )

    def _number(self, talk: Talk | None) -> int:
        """The number of a request: the same whatever other clients do."""
        action, place = (talk.action, talk.asked) if talk is not None else (self.actions, 0)
        return (action * IN_ACTION + place) * CLIENTS + self.number

    def stream_of(self, action: str) -> Random:
        """Random numbers for this action."""
        return Random(f"{self.simulation.outcome.seed} client {self.number} action {action}")

    def _do_something(self) -> None:
        if self.simulation.scale.crashes:
            os.kill(os.getpid(), signal.SIGSEGV)
        questions = self.simulation.questions
        if questions.share and self.random.random() < questions.share:
            self.left -= 1
            questions.ask(self)
            return
        if self.random.random() < self.simulation.talks:
            share = LONG_OF_PACKED if self.packs else LONG_TALKS
            is_long = self.random.random() < share and self.left > LONGEST
            length = self.random.randint(1, LONG_TALK) if is_long else min(self.left, self.random.randint(1, LONGEST))
            self.left = max(0, self.left - length)
            deadline = self.random.choice(self.temper.deadlines) if self.simulation.scale.deadlines else -1
            ends = self.stream_of(f"{self.actions} ends").random() < ENDS_ON_ERROR
            talk = open_talk(self, length, deadline, self.headers(deadline), ends_on_error=ends)
            self.talks[talk.number] = talk
            self.tell(f"opens {talk}")
            self.later(talk.say)
            return
        self.left -= 1
        kinds = self._kinds(streamed=False)
        kind = self._choose(kinds) if kinds else None
        if kind is not None and kind.name in self.simulation.kinds:
            self.call(kind)

    def _kinds(self, *, streamed: bool) -> list[Kind]:
        """Models that may be asked so. Requests of one sequence go by calls, which the server takes in order."""
        kinds = self.simulation.known.values()
        if streamed:
            return [kind for kind in kinds if kind.weight and not kind.sequential]
        return [kind for kind in kinds if kind.weight and (kind.single or not kind.decoupled)]

    def _choose(self, kinds: list[Kind]) -> Kind:
        [kind] = self.random.choices(kinds, [kind.weight for kind in kinds])
        return kind

    def kind_to_keep(self) -> Kind | None:
        """A kind that keeps sequences, for a stream of one sequence's requests; None for a stream of other requests."""
        kinds = [kind for kind in self.simulation.known.values() if kind.weight and kind.sequential]
        others = self._kinds(streamed=True)
        chosen = self._choose(kinds) if kinds and (not others or self.random.random() < 0.3) else None
        return chosen if chosen is not None and chosen.name in self.simulation.kinds else None

    def streamed_kind(self) -> Kind | None:
        """One to ask by a stream; None: it has been left out."""
        kinds = self._kinds(streamed=True)
        kind = self._choose(kinds) if kinds else None
        return kind if kind is not None and kind.name in self.simulation.kinds else None

    def headers(self, deadline_ns: int, *, steady: bool = False) -> tuple[tuple[str, str], ...]:
        """The headers of a call with this deadline; negative for none. With `steady` the identity never changes."""
        packing = (("grpc-encoding", self.packing), ("grpc-accept-encoding", self.accepted)) if self.packs else ()
        timeout = (("grpc-timeout", grpc_timeout(deadline_ns)),) if deadline_ns >= 0 else ()
        simulation, random = self.simulation, self.random
        shown = (*simulation.rights.headers(self.number, random, steady=steady), *simulation.forwarding.headers(random))
        return (*packing, *timeout, *simulation.traces.headers(random), *shown)

    def call(self, kind: Kind) -> None:
        """One call."""
        deadline = self.random.choice(self.temper.deadlines) if self.simulation.scale.deadlines else -1
        headers = self.headers(deadline, steady=kind.sequential)
        stream = self.wire.open(INFER, headers, b"")
        call, message = self.request(kind, stream, deadline, headers)
        is_free = call.sequence is None and call.region is None and not (kind.shaped or kind.sequential)
        call.wrong = is_free and self.random.random() < self.simulation.errors
        if call.wrong:
            data, call.refusal = spoil(self.random, call, message)
        else:
            if kind.sequential and call.sequence is None:
                call.wrong, call.refusal = True, lead_astray(Random(f"{call.number} astray"), call, message)
            data = serialized(self.random, message)
        call.size = len(data)
        agree(data)
        stream.body += framed(data, packed=self.packing)
        self.calls[stream.number] = call
        self.unsent.append(call)
        self.tell(f"calls {kind.name} as {call.number}: {call.said}")
        if self.random.random() < self.temper.cancels * (0.2 if call.sequence else 1):
            # soon, whatever its pauses are
            self.simulation.later(self.random.randint(0, MS), lambda: self._cancel_if_open(call))

    def request(
        self,
        kind: Kind,
        stream: Stream,
        deadline: int,
        headers: tuple[tuple[str, str], ...],
        talk: Talk | None = None,
    ) -> tuple[Call, pb.ModelInferRequest]:
        """One request, and what it says."""
        simulation = self.simulation
        number = self._number(talk)
        sequence = talk.kept if talk is not None else None
        goes_astray = kind.sequence is not None and Random(f"{number} goes astray").random() < simulation.errors
        if talk is None and kind.sequential and not goes_astray:
            sequence = self._sequence(kind)
        x = self._tensor(kind, number, sequence)
        too_many = kind.single and talk is None and len(x) > 1 and self._asks_too_much()
        if kind.single and talk is None and not too_many:
            x = x[:1].copy()
        expected = x.copy()
        expected[:, 1:] *= kind.factors(number)["y"]
        message = pb.ModelInferRequest(model_name=kind.name, id=str(number))
        message.inputs.add(name="x", datatype=kind.datatype, shape=x.shape)
        message.raw_input_contents.append(kind.encoded(x))
        level = kind.queue.default_level
        asked_level = 0
        if len(kind.queue.levels) > 1 and self.random.random() < 0.8:
            level = asked_level = self.random.randint(1, len(kind.queue.levels))
            message.parameters["priority"].int64_param = level
        timeout_us = self._timeout(kind, message)
        if sequence is not None:
            self._put_in_sequence(message, sequence, x, expected)
        now = simulation.world.now()
        call = Call(number, self, kind, x, expected, deadline, now, stream, level, sequence=sequence, talk=talk)
        call.too_many = too_many
        call.timeout_us = kind.time_to_wait(level, timeout_us)
        call.asked_level, call.asked_us = asked_level, timeout_us
        shares = sequence is None and not (kind.decoupled or kind.more or kind.is_coded)
        if shares and self.random.random() < simulation.sharing:
            self._share(call, message)
        if kind.beside is not None:
            self._put_beside(call, message)
        if kind.shaped:
            message.inputs.add(name="s", datatype="INT32", shape=[len(SHAPED)])
            message.raw_input_contents.append(np.array(kind.shape_values(call.question), np.int32).tobytes())
        reword(self.random, call, message)
        asked = {output.name for output in message.outputs}
        call.wanted = tuple(name for name in kind.outputs(call.question) if not asked or name in asked)
        simulation.forwarding.forge(self.random, message)
        call.message = message
        call.headers = headers
        call.address = self.end.address
        simulation.opened(call)
        return call, message

    def _asks_too_much(self) -> bool:
        """Whether this request has more than one answer, although it takes one."""
        return self.simulation.errors > 0 and self.stream_of(f"{self.actions} too much").random() < TOO_MUCH

    def _put_beside(self, call: Call, message: pb.ModelInferRequest) -> None:
        """Give the other input of the model, or leave it out."""
        kind, random = call.kind, self.random
        assert kind.beside is not None
        if kind.reuses:  # there are few different requests of each question
            random = Random(f"{call.question} {random.randrange(VARIANTS)}")
        call.given = kind.beside.draw(random, len(call.x), batches=not kind.flat)
        kind.beside.put(message, call.given)
        if call.given is not None and call.region is None and self.random.random() < 0.3:
            for field in (message.inputs, message.raw_input_contents):
                both = list(field)
                del field[:]  # type: ignore[attr-defined]
                field.extend(reversed(both))  # type: ignore[attr-defined]

    def _timeout(self, kind: Kind, message: pb.ModelInferRequest) -> int:
        """How long the request says that it may wait; 0: it does not."""
        timeout_us = 0
        asks = any(level.overridable for level in kind.queue.levels)
        # requests that share an execution have the terms of the first
        if asks and not kind.coalesces and self.random.random() < 0.4:
            timeout_us = self.random.choice(TIMEOUTS_US)
            message.parameters["timeout"].int64_param = timeout_us
        return timeout_us

    def _share(self, call: Call, message: pb.ModelInferRequest) -> None:
        """Have its tensors lie in shared memory, if they are small."""
        if call.x.nbytes > SLOT:
            return
        if self.region is None or not self.region.has_room:
            if self.region is not None:
                self.region.spoil(truncate=False)
                self.region.close()
            self.region = Region(self, trusted=self.random.random() < 0.5)
        self.region.put(call, message, output=self.random.random() < 0.5)

    def _tensor(self, kind: Kind, number: int, sequence: Sequence | None) -> np.ndarray:
        random = self.random
        rows = 1 if random.random() < 0.6 else random.randint(1, kind.max_rows)
        if sequence is not None:
            rows = sequence.rows
        width = 4 if random.random() < 0.8 or sequence is not None else random.randint(2, 6)
        if random.random() < self.temper.large and sequence is None:
            largest = self.temper.largest // (TEXT if kind.text else 1)
            width = random.randint(largest // 40, largest) // rows + 2
        if kind.reuses and random.random() < 0.8:
            number, rows, width = FIRST_QUESTION + random.randrange(QUESTIONS), 1 + number % 2, 4
        x = np.arange(rows * width, dtype=np.int64).reshape(rows, width) + number * SCALE
        x[:, 0] = number * SCALE + np.arange(rows)
        if kind.fails and sequence is None and random.random() < 0.2:
            x[:, 0] *= -1
        return x

    def _sequence(self, kind: Kind) -> Sequence:
        # steps before the one that keeps sequences may change their order, and so may handlers in Python
        most = 1 if kind.tallies or self.simulation.by_python else PATIENT
        open_ones = [one for one in self.sequences if one.kind is kind and one.under_way < most]
        if open_ones and self.random.random() < 0.85:
            return self.random.choice(open_ones)
        is_long = kind.remembers == "history" and self.random.random() < 0.3  # its state outgrows its memory
        one = self.begin_sequence(kind, self.random.randint(1, LONG if is_long else 6))
        self.sequences.append(one)
        return one

    def begin_sequence(self, kind: Kind, length: int) -> Sequence:
        """Begin a sequence of `length` requests."""
        self.begun += 1
        now = self.simulation.world.now()
        rows = self.random.randint(1, kind.sequence_rows)
        return Sequence(1 + self.number + 100 * self.begun, kind, length, rows, touched_ns=now, begun_ns=now)

    def _put_in_sequence(
        self, message: pb.ModelInferRequest, one: Sequence, x: np.ndarray, expected: np.ndarray
    ) -> None:
        if one.kind.named:
            message.parameters["sequence_id"].string_param = str(one.number)
        else:
            message.parameters["sequence_id"].int64_param = one.number
        starts = one.sent == 0 or (self.random.random() < 0.05 and not self._may_have_ended(one))
        if starts:
            one.totals = np.full(one.rows, one.kind.initial)  # it begins anew, where sequences begin now
        message.parameters["sequence_start"].bool_param = starts
        message.parameters["sequence_end"].bool_param = one.sent + 1 == one.length
        one.sent += 1
        one.under_way += 1
        one.totals = one.totals + x[:, 1]
        expected[:] = x
        expected[:, 1] = one.totals
        if one.sent == one.length and one in self.sequences:
            self.sequences.remove(one)

    def _may_have_ended(self, one: Sequence) -> bool:
        """Whether the server may have ended it while requests of it wait: one that begins now runs beside these."""
        return one.broken or any(
            call.sequence is one and call.deadline_ns >= 0 for call in self.simulation.oracle.open.values()
        )

    # -- bytes --

    def write(self) -> None:
        """Send what windows allow, and have it carried to the server."""
        if self.end.peer is None or self._shakes:
            return
        progress, sent = True, []
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
                sent.append(call)
            elif not progress and call.sequence is None and len(self.unsent) > 1 and self.wire.send_window > 0:
                self.unsent.append(self.unsent.pop(0))  # its own window is used up
                progress = any(each.stream.window > 0 for each in self.unsent)
        if self.wire.out:
            self.pipe.data += self.wire.out if self.cipher is None else self.cipher.seal(bytes(self.wire.out))
            self.wire.out.clear()
            self._carry_later()
        if sent or self.given_up:
            given_up = self.given_up[:]
            self.given_up.clear()
            at = self.end.sent + len(self.pipe.data)
            self.end.when_done(at, lambda: self._has_come(sent, given_up))

    def _has_come(self, sent: list[Call | Talk | Question], given_up: list[Call]) -> None:
        """The server has read it, and acted upon it."""
        now = self.simulation.world.now()
        for each in sent:
            if not isinstance(each, Call):
                each.sent_ns = min(each.sent_ns, now)
            elif each.stream.sent_end and not each.over:
                each.sent_ns = now
                self.simulation.oracle.arrived(each)
        if given_up:
            self.simulation.bounds.left()
            self.simulation.oracle.given_up(*given_up)

    def _carry_later(self) -> None:
        if not self.pipe.busy:
            self.pipe.busy = True
            pipe = self.pipe
            self.simulation.later(self.random.randint(0, self.temper.send_ns), lambda: self._carry(pipe))

    def _carry(self, pipe: Pipe) -> None:
        """A chunk arrives at the server."""
        pipe.busy = False
        if pipe is not self.pipe or not pipe.data or self.end.peer is None:
            return
        chunk = self.temper.chunk
        # small chunks arrive a few at a time, with nothing between them
        limit = self.random.randint(1, chunk * (CHUNKS if chunk < SMALL else 1)) if chunk else len(pipe.data)
        data = bytes(pipe.data[: min(limit, AT_ONCE)])
        size = self.end.send(data)
        del pipe.data[:size]
        if size == len(data) and pipe.data:
            self._carry_later()  # else there is no room

    def heard(self) -> None:
        """See `sockets.Peer`."""
        if self.pipe.data:
            self._carry_later()
        if self.end.untaken or self.end.seen != OPEN:
            self.read_later()

    def read_later(self) -> None:
        if not self.reading:
            self.reading = True
            self.simulation.later(self.random.randint(0, self.temper.read_ns), self._read)

    def _read(self) -> None:
        """Take some of what the server has for it."""
        self.reading = False
        if self.end.peer is None:
            return
        data = self.end.take(self.random.randint(1, self.temper.gulp))
        if data:
            self._receive(self._opened(data))
            self.heard()
        elif self.end.seen != OPEN:
            self._lost()

    @property
    def _shakes(self) -> bool:
        """Whether its handshake is under way, and it has nothing else to say until that is over."""
        return self.cipher is not None and not self.cipher.ready

    def _opened(self, data: bytes) -> bytes:
        """What these bytes of the server say."""
        if self.cipher is None:
            return data
        try:
            opened = self.cipher.open(data)
        except ssl.SSLError as error:
            raise Violation(f"{self.name}: the server does not keep to TLS: {error}") from error
        if said := self.cipher.said():
            self.pipe.data += said
            self._carry_later()
        return opened

    def _lost(self) -> None:
        """The server has ended the connection."""
        simulation = self.simulation
        if not (simulation.is_faulty or self._may_end()):
            how = "breaks" if self.end.seen == BROKEN else "ends"
            told = f"GOAWAY {self.wire.went_away} '{self.wire.farewell}'"
            raise Violation(f"{self.name}: the server {how} the connection: {told}")
        self.hang_up()
        self.write()

    def _may_end(self) -> bool:
        """Whether the server may end the connection: it said so, and has answered what it had taken."""
        simulation = self.simulation
        if STOPPING in self.end.over:
            return True  # the grace is over: who takes longer to read the last answers does not get them
        if self.temper.dawdles:
            return True  # the server has no more time for it
        if simulation.held_limit and (self.end.full_ns or self.temper.large > FEW):
            return True  # the server holds too much, and this client has not read what it was sent, or holds most of it
        if may_drop(self):
            return True
        if self._shakes or not self.wire.acknowledged:
            took_ns = simulation.world.now() - self.connected_ns
            if self.cipher is not None and (took_ns > HANDSHAKE or simulation.operator.is_stopping):
                return True
        if self.calls or self.talks or (self.end.seen == BROKEN and not simulation.stood_ns):
            return False
        return self.wire.farewell == "max_age" or (self.wire.went_away == 0 and simulation.operator.is_stopping)

    def _lose_refused(self) -> None:
        """Calls behind the last one that the server has taken have not begun."""
        last = self.wire.last_stream
        for call in [call for number, call in self.calls.items() if number > last]:
            executed = self.simulation.executions.count.get((call.kind.name, call.number), 0)
            judge_refused(self, call, executed=bool(executed) and not call.kind.reuses)
            call.stream.cancelled = True
            self._over(call, answered=False)
        for talk in [talk for number, talk in self.talks.items() if number > last]:
            judge_refused(self, talk, executed=False)
            self._talk_over(talk, answered=False)

    def _receive(self, data: bytes) -> None:
        wire = self.wire
        wire.receive(data)
        for stream in wire.begun:
            call = self.calls.get(stream.number)
            if call is not None:
                self.simulation.oracle.begun(call)
        wire.begun.clear()
        for talk in list(self.talks.values()):
            talk.receive()
        for stream in wire.finished:
            call = self.calls.get(stream.number)
            if call is not None:
                self._over(call, answered=True)
                del wire.streams[stream.number].data[:]
            elif stream.number in self.talks:
                self._talk_over(self.talks[stream.number], answered=True)
        wire.finished.clear()
        self._lose_refused()
        if wire.credit < 1 << 23:
            wire.give(None, (1 << 24) - wire.credit)
        for each in (*self.calls.values(), *self.talks.values()):
            stream = each.stream
            if stream.credit < self.temper.window // 2:
                wire.give(stream, self.temper.window - stream.credit)
        self.write()

    def _talk_over(self, talk: Talk | Question, *, answered: bool) -> None:
        del self.talks[talk.number]
        if answered:
            self.tell(f"has status {self.simulation.oracle.status(talk)} for {talk}")
            talk.ended()
        else:
            talk.let_go()

    def closed(self, call: Call, *, good: bool) -> None:
        """A request on a stream is over."""
        call.over = True
        self.simulation.closed(call, good)
        self._note_in_sequence(call, good)

    def _over(self, call: Call, *, answered: bool) -> None:
        del self.calls[call.stream.number]
        call.over = True
        simulation = self.simulation
        if answered:
            self.tell(f"has status {simulation.oracle.status(call)} for {call.number}")
        simulation.over(call, answered)
        self._note_in_sequence(call, answered and simulation.oracle.status(call) == 0)

    def _note_in_sequence(self, call: Call, good: bool) -> None:
        """A request of a sequence is over."""
        one = call.sequence
        if one is None:
            return
        one.under_way -= 1
        simulation = self.simulation
        # the client may hear of it long afterwards
        one.touched_ns = simulation.executions.begun_ns.get(call.number, call.opened_ns)
        one.answered += good
        if not good:
            one.broken = True
            if one in self.sequences:
                self.sequences.remove(one)

    def sequence_may_end(self, call: Call, text: str) -> bool:
        """Whether a request of a sequence may be refused: one before it was, or none had come for long."""
        one = call.sequence
        if one is None:
            return False
        simulation = self.simulation
        cut_ns = max(simulation.cut_ns.get(name, 0) for name in STEPS[call.kind.name])
        spec = call.kind.sequence
        idle_us = spec.max_idle_us if spec is not None else IDLE_US
        idle = simulation.world.now() - one.touched_ns > idle_us * US // 2
        if call.kind.mourns:  # which is told of it, and knows when that may be
            # a version that serves since later does not know why
            is_old = simulation.oracle.since.get(one.kind.name, math.inf) >= one.begun_ns
            idle = (idle and is_old) or IDLE_TEXT in text or one.number in simulation.executions.mourned
            if IDLE_TEXT in text:
                simulation.oracle.ended[one.number] = one
        return one.broken or idle or cut_ns >= one.begun_ns


def grpc_timeout(ns: int) -> str:
    """A time as the header grpc-timeout has it."""
    return f"{ns // US}u" if ns < 90_000 * MS else f"{ns // (1000 * MS)}S"
