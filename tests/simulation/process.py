"""Worker processes that the main thread plays by a script, at the other ends of real sockets and in the real arena.

A worker keeps to the protocol (`inferd.backends.python.worker.protocol`), or it ends in the middle, says nothing any
more, or sends what none may send.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inferd._native.memory.arena import ArenaHandle
from inferd.backends.python.process import AnyWorker
from inferd.backends.python.worker import protocol as p
from tests.simulation.beside import NUMBERS
from tests.simulation.inquiries import Inquiry
from tests.simulation.instances import Value
from tests.simulation.kind import SCALE
from tests.simulation.lies import ENDED_FOR, NO_RESPONSE, OVERDUE, OVERFLOWS, draw_lie
from tests.simulation.replies import CODES, STATUS_OF, Reply, code_of, draw_parameters, spoilt, ushered
from tests.simulation.senders import WINDOW, Sender
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.processes import Launch

US = 1000
MS = 1000 * US
TEMPERS = ("good", "good", "dying", "silent", "talking")
DATATYPES = {8: np.int32, 9: np.int64, 5: np.uint64}  # by the numbers of model_config.proto
X, START, READY, CORRID, STATE = range(5)  # tensors of models that keep sequences
BESIDE = 1  # of others
FLOOD = 100  # pieces of output, some of them large
MOST = 3  # calls that are made for one batch
HEARD = "heard"  # the parameter of an answer that says which parameters the request had
PROMISED = Reply(None, promised=True)
LAGGING, LATE_NS = 0.3, 20 * MS
QUESTION = b'{"call": "is_model_ready", "name": "plain", "version": ""}'


@dataclass
class Asked:
    """A request of an EXECUTE.

    Attributes:
        wire: the number that the wire gives it.
        tensors: by their indices in the configuration.
        place: where x lies in the arena, or -1.
        beside: the other input as it came: its datatype by number, its shape and its bytes; None: it did not.
        told: its parameters, as JSON.
    """

    wire: int
    tensors: dict[int, np.ndarray]
    place: int
    beside: tuple[int, tuple[int, ...], bytes] | None = None
    told: str = "{}"

    @property
    def x(self) -> np.ndarray:
        return self.tensors[X]

    @property
    def number(self) -> int:
        """The number that its client has given the request."""
        return int(abs(self.x[0, 0])) // SCALE


@dataclass
class Order:
    """An EXECUTE.

    Attributes:
        number: of the batch.
        grant, grant_size: where outputs may lie.
    """

    number: int
    requests: list[Asked]
    grant: int
    grant_size: int

    @property
    def size(self) -> int:
        """Bytes of all outputs in the arena."""
        return sum(-(-asked.x.nbytes // 64) * 64 for asked in self.requests)


class Process(AnyWorker):
    """A worker.

    Args:
        launch: what it is.
        arena: of its model.
    """

    def __init__(self, launch: Launch, arena: ArenaHandle) -> None:
        self.launch = launch
        self.backend = launch.backend
        self.kind = launch.backend.kind
        self.town = launch.backend.town
        self.name = launch.name
        self.random = Random(f"{launch.backend.salt} {launch.name} {next(launch.lives)}")
        self.temper = self.random.choice(TEMPERS) if self.kind.mortal else "good"
        kind, flags = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK, 0
        pairs = [socket.socketpair(socket.AF_UNIX, kind, flags) for _ in range(3)]
        for mine, _ in pairs:
            mine.setblocking(True)
        self._mine = [mine for mine, _ in pairs]
        self._theirs = [its for _, its in pairs]
        self.work, self.side, self.calls = (mine.fileno() for mine in self._mine)
        self.its_work, self.its_side, self.its_calls = self._theirs
        self._waiting: dict[socket.socket, deque[bytes]] = {end: deque() for end in self._theirs}  # to be sent
        self.pid_fd, self._running = os.pipe2(os.O_CLOEXEC)
        self.memory = mmap.mmap(arena.fd, 0)
        self.order: Order | None = None
        self.flags = 0  # where it says in the arena which requests are cancelled
        self.ids = itertools.count(1)
        self.inquiries: dict[int, Inquiry] = {}
        self.questions: set[int] = set()  # that have no answer yet
        self.senders: dict[int, Sender] = {}  # by the request that each answers
        self._wanted: dict[int, Callable[[int], None]] = {}  # by request for memory: takes its offset
        self._pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
        self.output, self.errors = (its_end for its_end, _ in self._pipes)
        self.printed = {1: bytearray(), 2: bytearray()}
        for heard in launch.heard.values():
            heard.clear()
        self.babbles: dict[
            int, Callable[[int], None]
        ] = {}  # requests with more responses than one; they wait for credit
        self.lies: set[str] = set()  # for what the server may end it
        self.must_end = False  # for one of these
        self.lag = Random(f"{self.random.random()} lag")
        self.lags = self.lag.random() < LAGGING  # it reads late what is not its work, and there is little room for it
        if self.lags:
            self._mine[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            self._mine[2].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, p.PACKET)
        for end in self._theirs:
            self.town.watch(self, end)
        self.say(self.its_work, p.HELLO, number=p.VERSION)

    # -- what the attendant does with it

    def kill(self) -> None:
        self.end()

    def kill_supervisor(self) -> None:
        pass

    def await_end(self) -> str:
        return "worker process has ended"

    def close(self) -> None:
        self.end()
        for mine in self._mine:
            mine.close()
        for its_end, _ in self._pipes:
            os.close(its_end)
        os.close(self.pid_fd)
        if self.printed != self.launch.heard:
            sizes = [(len(told), len(self.launch.heard[stream])) for stream, told in self.printed.items()]
            self.backend.executions.complain(f"{self.name}: bytes that were printed, and heard of these: {sizes}")

    # -- its life, on the main thread

    def end(self) -> None:
        """End the process, whatever it was doing."""
        if self._running < 0:
            return
        self.launch.states.clear()  # nobody knows what the server has taken, not even behind a DONE
        for end in self._theirs:
            self.town.forget(end)
            end.close()
        for _, mine in self._pipes:
            os.close(mine)
        self.memory.close()
        os.close(self._running)
        self._running = -1

    @property
    def alive(self) -> bool:
        return self._running >= 0

    def say(
        self,
        to: socket.socket,
        kind: int,
        record: bytes = b"",
        *,
        flags: int = 0,
        code: int = 0,
        number: int = 0,
        offset: int = 0,
    ) -> None:
        """Send a packet, if the server is there."""
        size = 0 if flags & p.IN_ARENA else len(record)
        self._put(to, p.HEAD.pack(kind, flags, code, len(record), number, offset) + record[:size])

    def _put(self, to: socket.socket, data: bytes) -> None:
        """Send a packet behind those that wait."""
        if self.alive:
            waiting = self._waiting[to]
            waiting.append(data)
            if len(waiting) == 1:
                self._pour(to)

    def _pour(self, to: socket.socket) -> None:
        """Send as much as there is room for, in order; the rest goes later."""
        waiting = self._waiting[to]
        try:
            while waiting:
                to.send(waiting[0])
                waiting.popleft()
        except BlockingIOError:
            self.later(self.random.randint(0, 100 * US), lambda: self._pour(to))
        except OSError:
            self.end()

    def later(self, ns: int, what: Callable[[], None]) -> None:
        """Do it then, if it still lives."""
        self.town.simulation.later(ns, lambda: what() if self.alive else None)

    def read(self, end: socket.socket) -> None:
        """One packet."""
        try:
            data = end.recv(p.PACKET)
        except OSError:
            data = b""
        if not data:
            self.end()
            return
        if self.lags and end is not self.its_work and self.lag.random() < 0.5:
            self.town.rest(end)
            self.later(self.lag.randint(0, LATE_NS), lambda: self.town.go_on(end))
        kind, flags, code, size, number, offset = p.HEAD.unpack_from(data)
        place = offset if flags & p.IN_ARENA else -1
        record = self.memory[offset : offset + size] if flags & p.IN_ARENA else data[p.HEAD.size :]
        if kind == p.CONFIGURE:
            self._configure(record)
        elif kind == p.EXECUTE:
            self._execute(number, record, place)
        elif kind == p.ALLOCATED and end is self.its_work:
            if self.order is not None:
                self._answer_in_arena(self.order, offset if code == 0 else -1)
        elif kind == p.ALLOCATED and number in self._wanted:
            self._wanted.pop(number)(offset if code == 0 else -1)
        elif kind == p.CREDIT:
            self._take_credit(number, offset)
        elif kind == p.ALLOCATED and number in self.inquiries:
            self.inquiries[number].allocated(offset if code == 0 else -1)
        elif kind == p.ALLOCATED and code == 0:
            self.say(self.its_side, p.FREE, offset=offset)
        elif kind == p.BLS_RESPONSE:
            if number not in self.inquiries:
                raise Violation(f"{self.name}: an answer to call {number}, which is not under way")
            self.inquiries[number].take(flags, code, record, place)
        elif kind == p.ANSWER:
            self._take_answer(number, record)
        elif kind == p.FINALIZE:
            self.say(self.its_work, p.FINALIZED)
            self.end()

    def _configure(self, record: bytes) -> None:
        """Learn what it is; the record lies in the arena if it is long."""
        try:
            configuration = json.loads(record)
        except ValueError:
            configuration = None
        if not isinstance(configuration, dict) or configuration["name"] != self.launch.name:
            raise Violation(f"{self.name}: its configuration is {record[:80]!r}")
        self.flags = configuration["flags"]
        self.later(self.random.randint(0, MS), lambda: self.say(self.its_work, p.READY, b"{}"))

    def _take_credit(self, number: int, credit: int) -> None:
        if number in self.babbles:
            self.babbles.pop(number)(credit)
        elif number in self.senders:
            self.senders[number].take_credit(credit)
        elif not self.kind.decoupled:
            raise Violation(f"{self.name}: credit for request {number}, which does not need it")

    def ask_memory(self, size: int, use: Callable[[int], None]) -> None:
        """Have it used when the server has answered: where it lies in the arena, or a negative number for nowhere."""
        number = next(self.ids)
        self._wanted[number] = use
        self.say(self.its_side, p.ALLOCATE, number=number, offset=size)

    def _take_answer(self, number: int, record: bytes) -> None:
        if number not in self.questions or json.loads(record) != {"result": True}:
            raise Violation(f"{self.name}: question {number} is answered {record!r}")
        self.questions.remove(number)

    # -- executions

    def _execute(self, number: int, record: bytes, place: int) -> None:
        count, rows, grant, grant_size = p.EXECUTE_HEAD.unpack_from(record)
        offsets = struct.unpack_from(f"<{count}I", record, p.EXECUTE_HEAD.size)
        self.order = order = Order(number, [self._asked(record, at, place) for at in offsets], grant, grant_size)
        self._note([asked.number for asked in order.requests], rows)
        if self.temper == "dying" and self.random.random() < 0.2:
            self.later(self.random.randint(0, 300 * US), self.end)
        elif self.temper == "silent" and self.random.random() < 0.05:
            return
        elif self.temper == "talking" and self.random.random() < 0.3:
            self._talk_nonsense(order)
        elif self.kind.asks:
            self._ask_others(order)
        else:
            self._work(order)

    def _asked(self, record: bytes, at: int, place: int) -> Asked:
        """The request that begins there."""
        wire, _, count, _, extra, _ = p.REQUEST.unpack_from(record, at)
        at += p.REQUEST.size
        tensors, places, beside = {}, {}, None
        for _ in range(count):
            index, datatype, rank, where, offset, size = p.TENSOR.unpack_from(record, at)
            shape = struct.unpack_from(f"<{rank}q", record, at + p.TENSOR.size)
            at += p.TENSOR.size + 8 * rank
            source = self.memory if where == p.ARENA else record
            content = bytes(source[offset : offset + size])
            if self.kind.beside is not None and index == BESIDE:
                beside = (datatype, shape, content)
                continue
            tensors[index] = np.frombuffer(content, DATATYPES[datatype]).reshape(shape)
            places[index] = offset if where == p.ARENA else place + offset if place >= 0 else -1
        asked = Asked(wire, tensors, places[X], beside)
        self._check_extra(asked, record, extra)
        return asked

    def _check_extra(self, asked: Asked, record: bytes, at: int) -> None:
        """Check that the worker is told what the client has sent beside tensors."""
        told_id, parameters = "", b""
        if at:
            fields = p.EXTRA.unpack_from(record, at)
            wanted, id_size, correlation_size, parameter_size = fields[3:7]
            at += p.EXTRA.size + (0 if wanted == p.ALL_OUTPUTS else 2 * wanted)
            told_id = record[at : at + id_size].decode()
            at += id_size + correlation_size
            parameters = record[at : at + parameter_size]
        told = json.loads(parameters or b"{}", strict=False)
        asked.told = json.dumps(told, sort_keys=True)
        call = self.town.simulation.oracle.open.get(asked.number)
        if call is None or call.kind is not self.kind or call.message is None:
            return
        if told_id != str(call.number) or told != self.town.simulation.forwarding.said(call):
            raise Violation(f"{call}: its worker is told of request '{told_id}' with {told}")
        self.is_cancelled(asked)

    def is_cancelled(self, asked: Asked) -> bool:
        """Whether the server says so, where it may."""
        is_cancelled = self.memory[self.flags + (asked.wire & p.SLOT_MASK)] != 0
        oracle = self.town.simulation.oracle
        call = oracle.open.get(asked.number)
        fails = self.kind.splits and self.kind.fails  # another part has failed
        # its time in the queue may be over just when the work that it waits for is taken from there
        may_expire = self.kind.reuses and call is not None and call.timeout_us > 0
        is_known = call is not None and call.kind is self.kind and not (fails or may_expire)
        if is_cancelled and call is not None and is_known and not oracle.may_have_ended(call):
            raise Violation(f"{call}: its worker is told that it is cancelled")
        return is_cancelled

    def _note(self, numbers: list[int], rows: int) -> None:
        backend, executions = self.backend, self.backend.executions
        executions.batches += 1
        backend.executed += 1
        if rows > self.kind.rows:
            executions.complain(f"a batch of {rows} rows for model '{self.kind.name}'")
        executions.log(self.name, f"executes {numbers} in its worker")
        for number in dict.fromkeys(numbers):
            executions.count[self.kind.name, number] = executions.count.get((self.kind.name, number), 0) + 1
            executions.begun_ns[number] = self.town.world.now()

    def _work(self, order: Order) -> None:
        """Answer when that is computed."""
        duration = int(self.random.random() ** 4 * self.kind.duration_us * US)
        self.later(duration, lambda: self._answer(order))

    def _ask_others(self, order: Order) -> None:
        """Have other models answer something before."""
        for _ in range(self.random.randint(0, MOST)):
            parent = self.random.choice([*order.requests, None])
            inquiry = Inquiry(self, next(self.ids), parent, lambda: self._heard(order))
            self.inquiries[inquiry.id] = inquiry
        for inquiry in list(self.inquiries.values()):
            inquiry.begin()
        if not self.inquiries:
            self._work(order)

    def _heard(self, order: Order) -> None:
        """A call is over."""
        if not self.inquiries and self.order is order:
            self._work(order)

    def _answer_wrongly(self, order: Order) -> None:
        """Answer one of the requests with what is none: its client hears that, or the worker is ended."""
        replies, victim = [self._reply(asked) for asked in order.requests], self.random.randrange(len(order.requests))
        record = b""
        for index, reply in enumerate(replies):
            piece = reply.record(len(record), -1)
            if index == victim:
                number = order.requests[index].number
                piece, said = spoilt(self.random, piece, reply, len(self.memory))
                self.backend.executions.spoilt[number] = said
                if not said:
                    self.lies.add(NO_RESPONSE)
                    self.must_end = True
            record += piece
        self.order = None
        self.say(self.its_work, p.DONE, record, number=order.number)

    def _talk_nonsense(self, order: Order) -> None:
        """Break the protocol, or answer with what is no answer."""
        if not self.kind.decoupled and order.size < p.PACKET // 2 and self.random.random() < 0.4:
            self._answer_wrongly(order)
            return
        if self.kind.asks and self.random.random() < 0.2:
            inquiry = Inquiry(self, next(self.ids), None, lambda: None)
            self.inquiries[inquiry.id] = inquiry
            inquiry.begin()
            self.lies.add(OVERFLOWS)
            self.say(self.its_calls, p.BLS_CREDIT, number=inquiry.id, offset=p.BLS_WINDOW + 1)
            self._work(order)
            return
        is_small = order.size < p.PACKET // 2
        lie = draw_lie(self.random, order, answers=is_small and not self.kind.decoupled)
        self.lies |= lie.told
        self.must_end = self.must_end or lie.certain
        if lie.flooded:
            self.backend.executions.faults[lie.flooded] = (
                f"model '{self.kind.name}' has given more than one response, the request takes only one"
            )
        self.backend.executions.log(self.name, f"lies: {', '.join(sorted(lie.told))}")
        for socket_number, data in lie.packets:
            self._put(self._theirs[socket_number], data)
        if lie.certain:
            return
        if is_small and not self.kind.decoupled:
            self._done(order, [self._reply(asked) for asked in order.requests], [])
        else:
            self._work(order)

    def judge(self, why: str) -> str:
        """Check why the server says that it has ended: what is wrong with that, empty: nothing."""
        if self.backend.executions.is_faulty:
            return ""
        if why.startswith(ENDED_FOR) and why.removeprefix(ENDED_FOR) not in self.lies:
            return f"{why}, which it has not: {sorted(self.lies)}"
        if why.startswith(OVERDUE) and self.must_end:
            return f"{why}, and not because of {sorted(self.lies)}"
        return ""

    # -- answers

    def _reply(self, asked: Asked) -> Reply:
        """The model's reply."""
        executions, kind = self.backend.executions, self.kind
        if kind.fails and (asked.x[:, 0] < 0).any():
            executions.failed.add(asked.number)
            return Reply(None, error=(code_of(asked.number), "negative"))
        if kind.mute and asked.number % 2 == 0:
            self.later(self.random.randint(0, MS), lambda: self._end_without(asked))
            return PROMISED
        y, state = asked.x.copy(), None
        if kind.remembers == "times":
            state = asked.tensors[max(asked.tensors)]
            self._check_state(asked, state, np.full_like(state, executions.count[kind.name, asked.number] - 1))
            state = state + 1
        if kind.sequential:
            one, starts = int(asked.tensors[CORRID].reshape(-1)[0]), bool(asked.tensors[START].reshape(-1)[0])
            expected = np.full((len(y), 1), kind.initial) if starts else self.launch.states.get(one)
            if expected is not None:
                self._check_state(asked, asked.tensors[STATE], expected)
            state = asked.tensors[STATE] + y[:, 1:2]
            y[:, 1] = state.sum(axis=1)
            self.launch.states[one] = state
        else:
            y[:, 1:] *= 2
        if kind.repeats and self.random.random() < 0.4:
            return Reply(None, state, again=True)
        parameters: dict[str, Value] = draw_parameters(self.random) if self.random.random() < 0.3 else {}
        if kind.reuses:
            parameters = {HEARD: asked.told}
        if kind.ushers:
            parameters = ushered(asked.number)
        self._remember(asked, parameters)
        return Reply(y, state, parameters, beside=self._beside(asked))

    def _beside(self, asked: Asked) -> tuple[int, tuple[int, ...], bytes] | None:
        """The other output, where the model has one: as the input was."""
        beside = self.kind.beside
        if beside is None:
            return None
        if asked.beside is not None:
            if asked.beside[0] != NUMBERS[beside.datatype]:
                raise Violation(f"{self.name}: w of {asked.number} has datatype {asked.beside[0]}")
            return asked.beside
        shape, data = beside.lacking(len(asked.x), not self.kind.flat, of_model=True)
        return NUMBERS[beside.datatype], shape, data

    def _remember(self, asked: Asked, parameters: dict[str, Value]) -> None:
        self.backend.executions.said[asked.number] = parameters

    def _check_state(self, asked: Asked, state: np.ndarray, expected: np.ndarray) -> None:
        if asked.number and not np.array_equal(state, expected) and not self.backend.executions.is_faulty:
            raise Violation(f"{self.name}: the state for {asked.number} is {state.tolist()}, not {expected.tolist()}")

    def _answer(self, order: Order) -> None:
        """By one of the ways in which outputs may come."""
        if self.kind.decoupled:
            for asked in order.requests:
                self.senders[asked.wire] = Sender(self, asked)
            self.later(self.random.choice((0, MS)), lambda: self._done(order, [PROMISED for _ in order.requests], []))
            return
        is_alone = not (self.kind.splits or self.kind.reuses or self.kind.sequence)
        if self.kind.fails and is_alone and self.random.random() < 0.05:
            self._fail(order)
            return
        ways = ["inline", "open"] if order.size < p.PACKET // 2 else []
        ways += ["asked"]
        if order.size <= order.grant_size:
            ways += ["granted", "granted"]
        if all(asked.place >= 0 for asked in order.requests):
            ways += ["in place"]
        way = self.random.choice(ways)
        if way == "inline":
            self._done(order, [self._reply(asked) for asked in order.requests], [])
        elif way == "open" and self.kind.sequence is None:
            self._open(order)
        elif way == "granted":
            self._answer_in_arena(order, order.grant)
        elif way == "in place":
            self._done(order, [self._reply(asked) for asked in order.requests], [each.place for each in order.requests])
        else:
            self.say(self.its_work, p.ALLOCATE, number=self.random.randrange(1 << 30), offset=order.size)

    def _fail(self, order: Order) -> None:
        """All of the batch."""
        executions, code = self.backend.executions, self.random.choice(CODES)
        executions.failed.update(asked.number for asked in order.requests)
        executions.failed_with.update((asked.number, STATUS_OF[code]) for asked in order.requests)
        self.order = None
        self.say(self.its_work, p.DONE, b"nothing works", flags=p.FAILED, code=code, number=order.number)
        self._chat()

    def _done(self, order: Order, replies: list[Reply], places: list[int]) -> None:
        """The end of the batch, with outputs at these places of the arena, or in the record."""
        record = b""
        for index, reply in enumerate(replies):
            at = places[index] if places else -1
            if reply.y is not None and at >= 0:
                self.memory[at : at + reply.y.nbytes] = reply.y.tobytes()
            record += reply.record(len(record), at)
        self.order = None
        keeps = self.random.random() < 0.1  # what the EXECUTE has referred to
        flags = self.random.choice((p.KEPT, p.KEPT | p.KEPT_GRANTS)) if keeps else 0
        releases_early = keeps and self.random.random() < 0.3
        if releases_early:
            self.say(self.its_side, p.RELEASE, number=order.number)
        self.say(self.its_work, p.DONE, record, flags=flags, number=order.number)
        if keeps and not releases_early:
            longest = self.lag.choice((MS, MS, 1000 * MS))  # it may have ended before
            self.later(self.random.randint(0, longest), lambda: self.say(self.its_side, p.RELEASE, number=order.number))
        self._chat()

    def _chat(self) -> None:
        """Say something beside the work."""
        self._print()
        if not self.alive or self.random.random() > 0.2:
            return
        kind = self.random.choice((p.LOG, p.METRIC, p.HEALTH, p.ALLOCATE, p.CALL))
        number = 0
        if kind == p.CALL:
            number = next(self.ids)
            self.questions.add(number)
        record = {p.METRIC: b'{"op": "nothing"}', p.ALLOCATE: b"", p.CALL: p.CALL_HEAD.pack(len(QUESTION)) + QUESTION}
        offset = self.random.randint(1, 1 << 16) if kind == p.ALLOCATE else 0
        self.say(self.its_side, kind, record.get(kind, b"well"), number=number, offset=offset)

    def _print(self) -> None:
        """Perhaps, and perhaps more than is read in a second."""
        if not self.alive or self.random.random() > 0.1:
            return
        for _ in range(FLOOD if self.random.random() < 0.02 else 1):
            stream = self.random.choice((1, 2))
            text = self.random.choice((b"one line\n", b"a part", b"\n", b"x" * 60_000))
            self.later(self.random.randint(0, MS), partial(self._write, stream, text))

    def _write(self, stream: int, text: bytes) -> None:
        """Write as much of the text as there is room for."""
        with suppress(BlockingIOError):
            self.printed[stream] += text[: os.write(self._pipes[stream - 1][1], text)]

    def _answer_in_arena(self, order: Order, at: int) -> None:
        if at < 0:
            error = (p.CODE_UNAVAILABLE, "no memory for outputs")
            self._done(order, [Reply(None, error=error) for _ in order.requests], [])
            return
        places = []
        for asked in order.requests:
            places.append(at)
            at += -(-asked.x.nbytes // 64) * 64
        self._done(order, [self._reply(asked) for asked in order.requests], places)

    def _open(self, order: Order) -> None:
        """Answer by senders, before or after DONE."""
        for asked in order.requests:
            if self.random.random() < 0.3:
                self._send(asked)
            else:
                delay = self.random.randint(0, MS)
                self.later(delay, lambda asked=asked: self._send(asked))  # type: ignore[misc]
        self._done(order, [PROMISED for _ in order.requests], [])

    def _end_without(self, asked: Asked) -> None:
        """End a request without an answer."""
        self.say(self.its_side, p.RESPONSE, flags=p.FINAL | p.EMPTY, number=asked.wire)

    def _babble(self, asked: Asked) -> None:
        """Answer a request more than once: its client hears of that, and the other responses use up no credit."""
        self.backend.executions.faults[asked.number] = (
            f"model '{self.kind.name}' has given more than one response, the request takes only one"
        )
        record = self._reply(asked).record(0, -1)

        def say(count: int) -> None:
            for _ in range(count):
                self.say(self.its_side, p.RESPONSE, record, number=asked.wire)

        def go_on(credit: int) -> None:
            say(credit)
            self.say(self.its_side, p.RESPONSE, flags=p.FINAL | p.EMPTY, number=asked.wire)

        count = self.random.choice((2, 3, WINDOW))
        say(count)
        if count == WINDOW:
            self.babbles[asked.wire] = go_on
            self.say(self.its_side, p.CREDIT, number=asked.wire)
        else:
            go_on(0)

    def _send(self, asked: Asked) -> None:
        if self.kind.clumsy and asked.number and self.random.random() < 0.3:
            self._babble(asked)
            return
        if self.kind.mute and asked.number % 2 == 0:
            self._end_without(asked)
            return
        record = self._reply(asked).record(0, -1)
        if self.random.random() < 0.5:
            self.say(self.its_side, p.RESPONSE, record, flags=p.FINAL, number=asked.wire)
            return
        self.say(self.its_side, p.RESPONSE, record, number=asked.wire)
        self.say(self.its_side, p.RESPONSE, flags=p.FINAL | p.EMPTY, number=asked.wire)
