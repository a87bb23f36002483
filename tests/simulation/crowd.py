"""Crowds: clients that ask much, for little; what they say and check is in `crowd.c`.

Beside the other clients, they ask the same models at the same time. The oracle judges what they are refused.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.kind import Kind
from tests.simulation.kinds import CHOSEN, KINDS, STEPS
from tests.simulation.sockets import OPEN
from tests.simulation.wire import Violation, decoded
from tests.simulation.world import library

if TYPE_CHECKING:
    from tests.simulation.simulation import Scale, Simulation

US = 1000
MS = 1000 * US
FIRST = 1 << 31  # numbers of requests; other clients have lower ones
REUSES, FAILS, ORDERED, ONCE, LACKS = 1, 2, 4, 8, 32
GRAIN = MS + MS // 5  # that an outcome may come behind its deadline, but for the time until the client reads it
TEXTS = 4096  # of refusals that are remembered
WAITING = 2000  # bytes of the text that tells which calls are open
MOST = 60  # calls of a line that are open: with so many it waits
READING = ((30 * US, 1 << 20), (300 * US, 1 << 20), (MS, 1 << 20), (2 * MS, 6000))  # until it reads, and how much
CHUNKS = 40  # that arrive at a time, at most
BITS = {name: bit for bit, name in enumerate(CHOSEN)}  # of kinds that a crowd may ask
STYLES = ("fresh", "in place", "native", "native brief", "native gathered", "again", "gpu")


class Mood(ctypes.Structure):
    """What a line is like; see `crowd.c`."""

    _fields_ = [
        ("window", ctypes.c_int32),
        ("conn_window", ctypes.c_int32),
        ("cancels_ppm", ctypes.c_int32),
        ("hurried", ctypes.c_int32),
        ("has_deadlines", ctypes.c_int32),
        ("indexed", ctypes.c_int32),
        ("single_rows", ctypes.c_int32),
        ("usual_widths", ctypes.c_int32),
        ("large_ppm", ctypes.c_int32),
        ("split_permille", ctypes.c_int32),
        ("strict_ns", ctypes.c_int64),
    ]


class Refusal(ctypes.Structure):
    """A call that has another status than OK."""

    _fields_ = [
        ("number", ctypes.c_int64),
        ("content", ctypes.c_int64),
        ("deadline_ns", ctypes.c_int64),
        ("opened_ns", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("level", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("block", ctypes.c_int32),
    ]


@dataclass
class Refused:
    """A refused call in the form in which the oracle looks at calls; see `clients.Call`."""

    number: int
    question: int  # the number that models see
    kind: Kind
    deadline_ns: int
    opened_ns: int
    level: int
    line: Line
    headers: tuple[tuple[str, str], ...] = ()
    lost: bool = False
    wrong: bool = False
    too_many: bool = False
    asked_us: int = 0

    @property
    def asked_level(self) -> int:
        return self.level

    @property
    def timeout_us(self) -> int:
        """How long the call may wait in the queue; 0: any time."""
        return self.kind.time_to_wait(self.level, 0)

    @property
    def yields(self) -> bool:
        """Whether it waits on, behind others, when its time to wait is over."""
        return self.kind.level(self.level).yields

    @property
    def client(self) -> Line:
        return self.line

    def __str__(self) -> str:
        deadline = f" deadline {self.deadline_ns // US} us" if self.deadline_ns >= 0 else ""
        return f"call {self.number} of {self.line.name} to {self.kind.name}{deadline}"


Learn = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int))


def load() -> ctypes.PyDLL:
    """The part in C; what it does never waits, so that it need not let go of the GIL."""
    lib = ctypes.PyDLL(str(library("crowd")))
    pointer, i64, i32, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t
    sizes = ctypes.POINTER(size)
    for name, result, arguments in (
        ("crowd_new", pointer, [i64, Learn, i32, i32]),
        ("crowd_free", None, [pointer]),
        ("crowd_add_kind", None, [pointer, ctypes.c_char_p, i32, i32, i32, i32, i32, i32]),
        ("crowd_add_output", None, [pointer, ctypes.c_char_p, i32, i32]),
        ("crowd_loaded", None, [pointer, i32, i64]),
        ("crowd_over", ctypes.c_uint64, [pointer, i32]),
        ("crowd_executed", i32, [pointer, i32, i32, pointer, i32]),
        ("crowd_problem", ctypes.c_char_p, [pointer]),
        ("crowd_asked", i64, [pointer]),
        ("crowd_cancelled", i64, [pointer]),
        ("crowd_statuses", ctypes.POINTER(ctypes.c_uint64), [pointer]),
        ("crowd_log", pointer, [pointer, sizes]),
        ("crowd_forget_blocks", None, [pointer]),
        ("line_new", pointer, [pointer, i32, ctypes.c_uint64, ctypes.POINTER(Mood)]),
        ("line_free", i32, [pointer]),
        ("line_ask", i32, [pointer, i32, i64, i32]),
        ("line_cancel", i32, [pointer, i32]),
        ("line_out", pointer, [pointer, sizes]),
        ("line_carried", None, [pointer, size, i64]),
        ("line_receive", i32, [pointer, ctypes.c_char_p, size, i64, i64, i64]),
        ("line_refusals", ctypes.POINTER(Refusal), [pointer, ctypes.POINTER(i32)]),
        ("line_went_away", i32, [pointer]),
        ("line_taken", i32, [pointer]),
        ("line_waiting", None, [pointer, ctypes.c_char_p, size]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def can_ask(kind: Kind) -> bool:
    """Whether crowds know what such a model answers."""
    steps = [KINDS[name] for name in STEPS[kind.name]]
    return (
        kind.weight > 0
        and kind.name in BITS
        and all(each.style in (*STYLES, "odd") for each in steps)
        and not any(
            each.isolates
            or each.beside
            or each.clumsy
            or each.is_coded
            or each.decoupled
            or each.sequential
            or each.remembers
            for each in steps
        )
    )


class Crowd:
    """The crowd of a simulation.

    Args:
        simulation: whose it is.
        calls: that it makes.
    """

    def __init__(self, simulation: Simulation, calls: int) -> None:
        self.simulation = simulation
        self.random = Random(f"{simulation.outcome.seed} crowd")
        self.lib = load()
        self.texts: list[str] = []
        self.most = calls
        self._learn = Learn(self._take_block)
        scale = simulation.scale
        lies = self.random.randrange(1, calls) if scale.lies else 0
        self.handle = self.lib.crowd_new(calls, self._learn, simulation.story.on, lies)
        self.kinds = [kind for kind in simulation.kinds.values() if can_ask(kind)]
        self.places = {kind.name: place for place, kind in enumerate(self.kinds)}
        self._asking = {
            name: [place for place, kind in enumerate(self.kinds) if name in STEPS[kind.name]]
            for name in simulation.kinds
        }
        for kind in self.kinds:
            self._add(kind)
            self.loaded(kind.name)
            simulation.oracle.asked(kind, at_any_time=True)
        count = min(scale.lines, self.random.choice((2, 4, 8, scale.lines)))
        self.lines = [Line(self, number) for number in range(count)]

    def _add(self, kind: Kind) -> None:
        is_told = not (kind.style.startswith(("native", "gpu")) or kind.steps or kind.reuses)
        flags = REUSES * kind.reuses | FAILS * kind.fails | ORDERED * kind.queue.preserve_ordering | ONCE * is_told
        flags |= LACKS * bool(kind.lacks and kind.steps)
        levels, level = len(kind.queue.levels), kind.queue.default_level
        weight = kind.weight * self.random.choice((1, 1, 4))
        if kind.popular:
            weight *= 4
        elif kind.batching is None:
            weight = 1
        self.lib.crowd_add_kind(
            self.handle, kind.name.encode(), flags, kind.max_rows, levels, level, weight, BITS[kind.name]
        )
        for name, factor in kind.factors(1).items():
            self.lib.crowd_add_output(self.handle, name.encode(), factor, kind.even_factor)

    def begin(self) -> None:
        for line in self.lines:
            line.begin()

    @property
    def left(self) -> int:
        """Calls that it has still to make."""
        return self.most - int(self.lib.crowd_asked(self.handle))

    @property
    def active(self) -> bool:
        return self.left > 0 or any(line.open for line in self.lines)

    def loaded(self, name: str) -> None:
        """Another version of a model serves."""
        if name in self.places:
            self.lib.crowd_loaded(self.handle, self.places[name], self.simulation.world.now())

    def over(self, name: str) -> int:
        """Calls that ask this model, and are over."""
        return sum([self.lib.crowd_over(self.handle, place) for place in self._asking[name]])

    def executed(self, kind: Kind, numbers: list[int]) -> list[int]:
        """A model executes requests of these numbers; those of other clients."""
        if kind.name not in BITS:
            return numbers
        count = len(numbers)
        once = not (kind.splits or kind.reuses or kind.repeats)
        if not self.lib.crowd_executed(self.handle, BITS[kind.name], once, (ctypes.c_int64 * count)(*numbers), count):
            self.simulation.executions.complain(self.problem)
        return [number for number in numbers if number < FIRST]

    @property
    def problem(self) -> str:
        return str(self.lib.crowd_problem(self.handle).decode(errors="replace"))

    def _take_block(self, data: int, size: int, index: ctypes._Pointer[ctypes.c_int]) -> int:
        """A header block that has not come before: its status, -1 for none, -2 for what none may send."""
        try:
            fields = decoded(ctypes.string_at(data, size))
        except Exception:  # of any sort, since nobody would take it
            return -2
        index[0] = len(self.texts)
        self.texts.append(fields.get("grpc-message", ""))
        if "grpc-status" in fields:
            return int(fields["grpc-status"])
        return -1 if fields.get(":status") == "200" else -2

    def forget_texts(self) -> None:
        if len(self.texts) > TEXTS:
            self.texts.clear()
            self.lib.crowd_forget_blocks(self.handle)

    def tell(self) -> None:
        """Have the story tell what has happened."""
        if not self.simulation.story.on:
            return
        size = ctypes.c_size_t()
        data = self.lib.crowd_log(self.handle, size)
        for text in ctypes.string_at(data, size.value).decode().splitlines() if size.value else ():
            self.simulation.tell("crowd", text)

    def waiting(self) -> list[str]:
        """The calls that are open."""
        return [text for line in self.lines if (text := line.waiting())]

    def end(self) -> None:
        """All is over: what has happened is known."""
        outcome = self.simulation.outcome
        outcome.crowd = int(self.lib.crowd_asked(self.handle))
        outcome.calls += outcome.crowd
        outcome.cancelled += self.lib.crowd_cancelled(self.handle)
        statuses = self.lib.crowd_statuses(self.handle)
        for status in range(128):
            if statuses[status]:
                outcome.statuses[status] = outcome.statuses.get(status, 0) + statuses[status]
        for place, kind in enumerate(self.kinds):
            self.simulation.books.asked(kind, int(self.lib.crowd_over(self.handle, place)))
        for line in self.lines:
            line.leave()
        self.lib.crowd_free(self.handle)


def draw_mood(random: Random, scale: Scale) -> Mood:
    """How a line is."""
    mood = Mood()
    mood.window, mood.conn_window = random.choice(((1 << 20, 1 << 24), (1 << 20, 1 << 24), (300, 1 << 16)))
    mood.cancels_ppm = random.choice((0, 0, 0, 20_000)) if scale.cancels else 0
    mood.has_deadlines = scale.deadlines
    mood.hurried = random.choice((0, 0, 0, 0, 0, 1))
    mood.indexed = random.choice((0, 1, 1))
    mood.single_rows = random.choice((80, 95, 100))  # of a hundred calls, how many have one row
    mood.usual_widths = random.choice((80, 98, 100))  # and of a usual width
    mood.large_ppm = random.choice((0, 0, 3000))
    mood.split_permille = random.choice((0, 0, 100))
    return mood


class Line:
    """A connection of a crowd.

    Args:
        crowd: whose it is.
        number: of the line.
    """

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd = crowd
        self.lib = crowd.lib
        self.simulation = crowd.simulation
        self.number = number
        self.name = f"crowd {number}"
        seed, scale = self.simulation.outcome.seed, self.simulation.scale
        self.random = random = Random(f"{seed} crowd {number}")
        self.mood = draw_mood(random, scale)
        self.burst = random.choice((10, 60, 90, 90))
        self.pause_ns = random.choice((100 * US, 500 * US, 3 * MS))
        self.send_ns = random.choice((0, 0, 30 * US))
        self.chunk = random.choice((0, 0, 0, 5000, 500))  # bytes that come at a time, at most; 0 for all
        self.read_ns, self.gulp = random.choice(READING)
        self.hangs_up = random.choice((0.0, 0.0, 0.0, 0.02)) if scale.cancels else 0.0
        is_prompt = self.gulp >= 1 << 16 and self.mood.window >= 1 << 20 and not self.simulation.is_faulty
        self.mood.strict_ns = GRAIN + self.read_ns if is_prompt else -1
        self.life = 0
        self.waits = False  # for answers, before it asks more
        self.enough = MOST  # calls may be open then
        self._connect()

    def _connect(self) -> None:
        simulation = self.simulation
        self.life += 1
        self.reading = self.carrying = False
        self.handle = self.lib.line_new(
            self.crowd.handle, self.number, self.random.getrandbits(64), ctypes.byref(self.mood)
        )
        self.open = 0
        random = Random(f"{simulation.outcome.seed} crowd {self.number} socket {self.life}")
        self.end = simulation.sockets.connect(self, self.number, random)
        self.carried = 0  # bytes of which the line knows that they have come
        self._tell("connects")

    def _tell(self, what: str) -> None:
        self.simulation.tell(self.name, what)

    def begin(self) -> None:
        self._act_later()

    def leave(self) -> None:
        """For good."""
        self.end.part(reset=False)
        self.lib.line_free(self.handle)

    def waiting(self) -> str:
        text = ctypes.create_string_buffer(WAITING)
        self.lib.line_waiting(self.handle, text, WAITING)
        return text.value.decode()

    def sequence_may_end(self, call: Refused, text: str) -> bool:
        """See `clients.Client`: crowds have no sequences."""
        return False

    def _act_later(self) -> None:
        self.simulation.later(self.random.randrange(self.pause_ns), self._act)

    def _act(self) -> None:
        """A burst of calls, or something worse."""
        simulation, crowd = self.simulation, self.crowd
        if self.hangs_up and self.random.random() < self.hangs_up:
            self._hang_up()
        if self.mood.cancels_ppm:
            self._has_ended(self.lib.line_cancel(self.handle, self.mood.cancels_ppm))
        count = self.random.randint(1, self.burst)
        forgets = simulation.scale.forgetful
        begun = self.lib.line_ask(self.handle, count, simulation.world.now(), forgets)
        if begun and simulation.calls_open == 0:
            simulation.last_answer_ns = simulation.world.now()
        simulation.calls_open += begun
        self.open += begun
        crowd.tell()
        if self.send_ns or self.carrying:
            self._carry_later()
        else:
            self._carry(self.life)
        self._act_again()

    def _act_again(self) -> None:
        """Soon, or when enough calls have ended, so that there can be a burst again."""
        self.waits = self.open >= MOST or (self.waits and self.open > self.enough)
        if not self.waits:
            self.enough = self.random.randrange(MOST)
            if self.crowd.left:
                self._act_later()

    def _has_ended(self, count: int) -> None:
        self.simulation.calls_open -= count
        self.open -= count
        if count:
            self.simulation.last_answer_ns = self.simulation.world.now()
            if self.waits:
                self._act_again()

    def _hang_up(self) -> None:
        self._tell(f"hangs up with {self.open} calls open")
        self.end.part(reset=self.random.random() < 0.5)
        self._has_ended(self.lib.line_free(self.handle))
        self._connect()

    def _carry_later(self) -> None:
        if not self.carrying:
            self.carrying = True
            life = self.life
            self.simulation.later(self.random.randint(0, self.send_ns), lambda: self._carry(life))

    def _carry(self, life: int) -> None:
        """Carry what was written to the server."""
        if life != self.life:
            return
        self.carrying = False
        size = ctypes.c_size_t()
        at = self.lib.line_out(self.handle, size)
        under_way = self.end.sent - self.carried
        data = ctypes.string_at(at + under_way, size.value - under_way) if size.value > under_way else b""
        if self.chunk:
            data = data[: self.random.randint(1, self.chunk * CHUNKS)]
        if data and self.end.send(data) == len(data) and size.value > under_way + len(data):
            self._carry_later()  # else there is no room

    def heard(self) -> None:
        """See `sockets.Peer`."""
        done = self.end.done
        if done > self.carried:
            self.lib.line_carried(self.handle, done - self.carried, self.simulation.world.now())
            self.carried = done
        size = ctypes.c_size_t()
        self.lib.line_out(self.handle, size)
        if size.value > self.end.sent - self.carried:
            self._carry_later()
        if self.end.untaken or self.end.seen != OPEN:
            self._read_later()

    def _read_later(self) -> None:
        if not self.reading:
            self.reading = True
            life = self.life
            self.simulation.later(self.random.randint(0, self.read_ns), lambda: self._read(life))

    def _read(self, life: int) -> None:
        """Take what the server has for it."""
        if life != self.life:
            return
        self.reading = False
        while data := self.end.take(self.gulp):
            self._receive(data)
            if self.gulp < 1 << 16:
                self._read_later()
                return
        if self.end.seen != OPEN:
            simulation = self.simulation
            if simulation.operator.is_stopping and not self.open:
                self.end.part(reset=False)
                return
            # when the grace is over, too, who takes longer to read the last answers does not get them
            is_old = simulation.ages and self.lib.line_went_away(self.handle)
            is_old = is_old and (self.end.over or not self.lib.line_taken(self.handle))
            if not (simulation.is_faulty or is_old):
                raise Violation(f"{self.name}: the server ends the connection")
            self._hang_up()

    def _receive(self, data: bytes) -> None:
        simulation, lib = self.simulation, self.lib
        now, jumped_ns = simulation.world.now(), simulation.jumped_ns
        pressed_ns = max(simulation.pressed_ns, self.end.full_ns)
        over = lib.line_receive(self.handle, data, len(data), now, jumped_ns, pressed_ns)
        if over < 0:
            raise Violation(self.crowd.problem)
        if over:
            self._has_ended(over)
            count = ctypes.c_int()
            refusals = lib.line_refusals(self.handle, count)
            for place in range(count.value):
                self._judge(refusals[place])
            self.crowd.forget_texts()
        self.crowd.tell()
        size = ctypes.c_size_t()
        lib.line_out(self.handle, size)
        if size.value:
            self._carry_later()

    def _judge(self, it: Refusal) -> None:
        """A call was refused: may it be?"""
        kind = self.crowd.kinds[it.kind]
        text = self.crowd.texts[it.block] if it.block >= 0 else ""
        call = Refused(it.number, it.content, kind, it.deadline_ns, it.opened_ns, it.level, self)
        self.simulation.oracle.judge(call, it.status, text)
