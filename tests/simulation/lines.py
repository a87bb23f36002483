"""Trials of connections in memory, with limits, a clock and handlers of their own: the server has them beside its door.

Two clients with a few connections each make calls that Python handles, break their quotas, send too slowly, read too
little, ask for too much, and hang up. Each refusal has to have its reason, and each reason its refusal.
"""

from __future__ import annotations

import base64
import gzip
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from urllib.parse import unquote

from inferd._native.transport.call import (
    EVENT_CLOSED,
    EVENT_DEADLINE,
    EVENT_HALF_CLOSE,
    EVENT_MESSAGE,
    EVENT_WRITABLE,
    Call,
    CallOverError,
)
from inferd._native.transport.client import ClientUse
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd._native.transport.thread_pool import PoolThreads
from tests.simulation.quotas import ANNOUNCED, IN_FLIGHT
from tests.simulation.wire import FRAME, PING, SETTINGS, Stream, Violation, Wire, frame, request_headers, take_message

PATH = "/test/Stream"
PREFIX = 5
SIZES = (0, 1, 17, 100, 900, 5000, 20_000, 70_000)
CALM, CANCELLED = 11, 8  # codes of RST_STREAM
SLOWEST = 16 << 10  # bytes a second
WRITABLE = 64 << 10  # unsent bytes below which a call may go on
SMALL = 2000  # bytes: smaller messages need not be compressed
POOLED = 64 << 10  # bytes from which threads of a pool may be asked
LIMITED, LATE, UNKNOWN = 8, 4, 2
TOGETHER = re.compile(r"the request announces a message of (\d+) bytes; all clients together may have (\d+)$")
LARGER = re.compile(r"Received message larger than max \((\d+) vs\. (\d+)\)$")
INFLATED = re.compile(r"Received message larger than max after decompression \(limit (\d+)\)$")
HELD = re.compile(r"the requests and responses that the server held had more bytes than its limit of (\d+)$")
SLOW = re.compile(r"the request has not arrived within ([\d.e+]+) s: (.*)$")
WRONG_HEADS = (  # and what each is told
    ((":method", "GET"), "the HTTP method of a gRPC call must be POST"),
    (("content-type", "text/html"), "the content-type of a gRPC call must begin with application/grpc"),
    (("te", ""), "a gRPC call must carry the header 'te: trailers'"),
    (("grpc-timeout", "123456789m"), "grpc-timeout must be at most 8 digits and one of H M S m u n"),
    (("grpc-encoding", "gzips"), "the grpc-encoding of the request is not supported, accepted encodings: identity, "),
    (("grpc-encoding", "br"), "the grpc-encoding of the request is not supported, accepted encodings: identity, "),
    (("x-large", "n" * 17_000), "the request headers exceed 16384 bytes"),
)
TINY, TINY_COST = 16, 10  # a message of fewer bytes costs as much as so many frames
HELD_BYTES = 200_000
CALL_MEMORY = 16 << 10  # bytes of a call beside its message, at most
GOOD_FAITH = 256 << 10  # bytes that each call is credited with
SETTINGS_TOLD = {4: 4 << 20, 5: 256 << 10, 6: 16 << 10}  # window of a stream, frames and headers that are taken
FLOOD = 450  # PINGs
ROUNDS = 8  # of timers: what is set anew while they ring, and due already, rings in the next one
BOMB = b"\x40\x06x-bomb\x7f" + bytes([0xA1, 0x1E]) + b"b" * 4000 + b"\xbe" * 80  # one header, again and again
TEXTS = ("", "fine", "größe 100%", "a\tb")
KINDS = {"calls": "max_calls", "streams": "max_streams", "bytes": "max_bytes"}
COSTS = {PING: 1, SETTINGS: 10, 8: 1, 3: 10, 2: 1}  # frames of the budget, at most, by type of frame


@dataclass
class Limits:
    """Those of the server, and those of a client; None: any number."""

    max_message: int | None
    max_inflated: int | None
    max_held_bytes: int | None
    receive_timeout: float
    send_timeout: float
    spare_frames: int


@dataclass
class Asked:
    """One call."""

    line: Line
    stream: Stream
    number: int
    single: bool
    packed: str  # how its messages are compressed; empty: they are not
    timeout: float  # seconds; negative: none
    opened: float
    accepts: str
    offered: list[bytes] = field(default_factory=list)  # whole messages, as they are before they are compressed
    sizes: list[int] = field(default_factory=list)  # of these, on the wire
    call: Call | None = None
    taken: int = 0
    answers: list[bytes] = field(default_factory=list)
    heard: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    end: tuple[int, str, tuple[tuple[str, str], ...]] | None = None
    events: Counter[str] = field(default_factory=Counter)
    refused_stream: bool = False
    judged: bool = False
    wrong: str = ""  # what its head has to be told
    sent: int = 0  # bytes
    begun: float = 0.0  # when the message that is being sent was begun
    known: int = 0  # bytes of answers that had come when it was stuck last
    held: int = 0  # bytes that its handler holds
    encoding: str = ""  # of the answers; empty: none
    shrinks: list[bool] = field(default_factory=list)  # which answers have to be compressed then
    stuck: float = -1.0  # since when its client takes nothing; negative: it does

    @property
    def over(self) -> bool:
        return self.stream.over or self.line.gone

    @property
    def is_awaited(self) -> bool:
        """Whether the server waits for more of a message."""
        if self.stream.sent_end:
            return False
        ends, at = {0}, 0
        for size in self.sizes:
            at += PREFIX + size
            ends.add(at)
        return self.single or self.sent not in ends


class Line:
    """One connection."""

    def __init__(self, front: Front, number: int) -> None:
        random = front.random
        self.front, self.number = front, number
        self.use, self.limits = random.choice(front.uses)
        self.connection = Connection(front.endpoint, f"ipv4:10.1.0.{number}:1", use=self.use)
        self.connection.flush = lambda: None
        self.refusals: list[str] = []
        self.connection.on_refused = self.refusals.append
        self.pings = 0
        self.connection.on_ping = self.pinged
        window, takes = random.choice((100, 20_000, 1 << 20)), random.choice((FRAME, FRAME, 50_000))
        self.wire = Wire(window, 1 << 24, broad=random.random() < 0.5, takes=takes)
        self.reads = True
        self.gone = False
        self.frames: list[tuple[float, int]] = []  # what was sent that costs something, at most: when and how much
        self.answers = 0  # frames that earn something

    def pinged(self) -> None:
        self.pings += 1

    def exchange(self) -> None:
        """Send what there is, and read, until both are silent."""
        while not self.gone:
            sent = bytes(self.wire.out)
            self.wire.out.clear()
            if sent and not self.connection.parting:
                self._count(sent)
                step = self.front.random.choice((len(sent), len(sent), 1000, 9))
                for at in range(0, len(sent), step if len(sent) < 3000 else len(sent)):
                    self.connection.receive(sent[at : at + step] if len(sent) < 3000 else sent)
            self.front.endpoint.flush_dirty()
            got = self._take() if self.reads else b""
            if got:
                self.wire.receive(got)
            if not sent and not got:
                break
        if not self.gone and self.connection.finished and self.reads:
            self.hang_up()

    def _take(self) -> bytes:
        limit = self.front.random.choice((1 << 20, 1 << 20, 500))
        if self.front.random.random() < 0.7:
            return b"".join(bytes(piece) for piece in self.connection.take_output(limit))
        size = self.connection.collect_output(limit)
        got = b"".join(bytes(piece) for piece in self.connection.take_ready())
        if size != len(got):
            raise Violation(f"{size} bytes of output are ready, and {len(got)} are taken")
        return got

    def _count(self, sent: bytes) -> None:
        """What these bytes cost; the preface and a first HEADERS of a call cost nothing."""
        if sent.startswith(b"PRI"):
            sent = sent[24:]
        now = self.front.clock.now
        at = 0
        while at + 9 <= len(sent):
            size, kind = int.from_bytes(sent[at : at + 3], "big"), sent[at + 3]
            self.frames.append((now, COSTS.get(kind, 1 if size == 0 else 0)))
            at += 9 + size

    def hang_up(self) -> None:
        """The peer is gone."""
        self.gone = True
        self.connection.close()
        self.front.judge_end(self)


class Clock:
    """Seconds that pass when they are told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Front:
    """An endpoint with its clients."""

    def __init__(self, random: Random, limits: Limits | None = None) -> None:
        self.random = random
        is_free = limits is not None  # the world has neither quotas nor a pool
        self.is_prompt = is_free  # each client hears at once what the server sends
        limits = limits or Limits(
            max_message=random.choice((None, None, 10_000)),
            max_inflated=random.choice((None, None, 30_000)),
            max_held_bytes=random.choice((None, 1 << 19, 1 << 17, 60_000)),
            receive_timeout=random.choice((math.inf, 10.0)),
            send_timeout=random.choice((math.inf, 10.0)),
            spare_frames=random.choice((100, 10_000, 10_000)),
        )
        self.limits = limits
        self.pool = None if is_free or random.random() < 0.7 else PoolThreads(1)  # which never has its turn
        self.max_streams = random.choice((5, 100))
        self.endpoint = Endpoint(self._begins, max_streams=self.max_streams, pool_threads=self.pool, **vars(limits))
        self.clock = self.endpoint.clock = Clock()
        self.uses = []
        for name in ("first", "second"):
            quota = {
                "max_calls": random.choice((None, None, 3)),
                "max_streams": random.choice((None, None, 0, 2)),
                "max_bytes": random.choice((None, None, 60_000)),
            }
            quota = dict.fromkeys(quota) if is_free else quota
            self.uses.append((ClientUse(name, **quota), quota))
        self.lines: list[Line] = []
        self.asked: dict[int, Asked] = {}
        self.numbers = 0
        for number in range(3):
            self.lines.append(Line(self, number))
            self.lines[-1].exchange()
            told = self.lines[-1].wire.told
            if told != SETTINGS_TOLD | {3: self.max_streams}:
                raise Violation(f"the server tells the settings {told}")

    # -- the handler

    def _begins(self, call: Call) -> None:
        metadata = dict(call.metadata)
        asked = self.asked[int(metadata["number"])]
        asked.call = call
        expect = {"number": str(asked.number), "beside-bin": b"\0" + str(asked.number).encode(), **dict(asked.headers)}
        told = {name: value for name, value in metadata.items() if not name.startswith("grpc-")}
        if told != expect or call.path != PATH:
            raise Violation(f"call {asked.number} has {metadata}, where {expect} was sent")
        if asked.timeout >= 0 and call.timeout_ns != round(asked.timeout * 1e9):
            raise Violation(f"call {asked.number} has {call.timeout_ns} ns, where {asked.timeout} s was sent")

        def hear(event: str) -> None:
            asked.events[event] += 1
            if event == EVENT_DEADLINE:
                self._expires(asked)

        call.on_event = hear
        if not call.open:
            return
        if asked.single:
            call.expect_one()
            return
        use, before = asked.line.use, asked.line.use.streams
        most = asked.line.limits["max_streams"]
        good = call.count_as_stream()
        if good != (most is None or before < most):
            raise Violation(f"{before} streams are open of {most}, and one more may be: {good}")
        asked.refused_stream = not good
        if good and use.streams != before + 1:
            raise Violation(f"{use.streams} streams are open, where {before + 1} were expected")

    def _expires(self, asked: Asked) -> None:
        if asked.timeout < 0 or self.clock.now < asked.opened + asked.timeout or asked.events[EVENT_DEADLINE] > 1:
            raise Violation(f"call {asked.number} has heard of its deadline {asked.events} at {self.clock.now}")
        assert asked.call is not None
        if asked.call.open:
            asked.call.expire()
            asked.end = (LATE, "Deadline Exceeded", ())

    def _handle(self, asked: Asked) -> None:
        """Do something as the handler of this call."""
        random, call = self.random, asked.call
        if call is None:
            return
        what = random.random()
        was_open = call.open
        try:
            if what < 0.4:
                self._take(asked)
            elif what < 0.45:
                encoding = random.choice(("", "gzip", "deflate", "identity", "br"))
                is_wrong = encoding == "br" or self._has_begun(asked)
                if self._refuses(lambda: call.set_compression(encoding, 1), is_wrong):
                    asked.encoding = chosen_of(encoding, asked.accepts)
            elif what < 0.5:
                self._refuses(lambda: call.send_headers([("x-first", "1")]), self._has_begun(asked))
                asked.events["headers"] += 1
            elif what < 0.75:
                message = random.randbytes(random.choice(SIZES) // 2) + bytes(random.choice(SIZES) // 2)
                packs = random.random() < 0.7
                call.send_message(message, packs)
                asked.answers.append(message)
                asked.shrinks.append(packs and SMALL <= len(message) < POOLED and message.count(0) > len(message) // 2)
            elif what < 0.83:
                self._hold(asked, call, was_open=was_open)
            elif what < 0.86:
                call.let_go()
            elif what < 0.88:
                call.reset()
                asked.events["reset"] += 1
            elif what < 0.9:
                status, text = random.choice((3, 8, 14)), random.choice(TEXTS)
                call.refuse(status, text)
                asked.end = (status, text, ())
            elif call.half_closed or what > 0.97:
                status, text = random.choice((0, 0, 5)), random.choice(TEXTS)
                metadata = (("x-last", "2"),) if random.random() < 0.5 else ()
                self._refuses(lambda: call.end(99), True)
                call.end(status, text, metadata)
                asked.end = (status, text, metadata)
        except CallOverError:
            if was_open:
                raise Violation(f"call {asked.number} was open, and is over") from None
            return
        if not was_open and 0.5 <= what < 0.75:
            raise Violation(f"call {asked.number} is over, and a message was sent")

    def _hold(self, asked: Asked, call: Call, *, was_open: bool) -> None:
        """Charge the call for more, or for less."""
        before = self.endpoint.ledger["executed"]
        size = self.random.choice((0, 500, 3000, -asked.held))
        call.hold(size)
        found = self.endpoint.ledger["executed"] - before
        if found != (size if was_open else 0):
            raise Violation(f"call {asked.number} is charged for {found} bytes, where its handler holds {size} more")
        asked.held += size * was_open
        self._refuses(lambda: call.hold(-asked.held - 1), True)

    def _has_begun(self, asked: Asked) -> bool | None:
        """Whether the headers of its answer are sent; None: unless a thread of the pool has to compress that first."""
        if asked.answers and self.pool is not None and not asked.events["headers"]:
            return None
        return bool(asked.answers) or asked.events["headers"] > 0

    def _refuses(self, do: Callable[[], None], is_wrong: bool | None) -> bool:
        """Have a handler do it, which is wrong or not, or perhaps; whether it was done."""
        try:
            do()
        except CallOverError:
            raise
        except ValueError:
            if is_wrong is False:
                raise Violation("a handler is refused what it may do") from None
            return False
        if is_wrong:
            raise Violation("a handler may do what is wrong")
        return True

    def _take(self, asked: Asked) -> None:
        assert asked.call is not None
        message = asked.call.take_message()
        if message is None:
            return
        if asked.taken >= len(asked.offered) or message != asked.offered[asked.taken]:
            raise Violation(f"call {asked.number} has taken another message than its client has sent")
        asked.taken += 1

    # -- the client

    def _open(self, line: Line) -> None:
        random = self.random
        self.numbers += 1
        timeout = random.choice((-1.0, -1.0, 0.0, 3.0, 30.0))
        packed = random.choice(("", "", "gzip", "deflate"))
        accepts = random.choice(("identity", "gzip", "deflate,gzip", " br, deflate ", "gzips,deflated", ""))
        wrong, told = random.choice(WRONG_HEADS) if random.random() < 0.08 else (("", ""), "")
        extra = (("x-more", random.choice(("a", "b" * 300))),) if random.random() < 0.3 else ()
        headers = [("number", str(self.numbers)), ("beside-bin", base64_of(b"\0" + str(self.numbers).encode())), *extra]
        if timeout >= 0:
            headers.append(("grpc-timeout", f"{int(timeout * 1000)}m"))
        headers += [("grpc-encoding", packed)] * bool(packed)
        headers += [("grpc-accept-encoding", accepts)] * bool(accepts)
        if told:
            headers = [pair for pair in headers if pair[0] != wrong[0]] + [wrong]
        before = line.use.calls
        stream = line.wire.open(PATH, tuple(headers), b"")
        stream.more = True
        asked = Asked(line, stream, self.numbers, random.random() < 0.5, packed, timeout, self.clock.now, accepts)
        asked.headers = extra
        asked.begun = self.clock.now
        asked.wrong = told
        self.asked[self.numbers] = asked
        line.exchange()
        most = line.limits["max_calls"]
        if most is not None and before >= most and asked.call is not None and not line.gone:
            raise Violation(f"client {line.use.name} has {before} calls of {most}, and one more is served")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds
        for _ in range(ROUNDS):
            self.endpoint.expire()

    def begin(self, line: Line) -> Asked | None:
        """Open a call, if that is possible."""
        if line.gone or line.wire.went_away is not None or line.connection.streams >= self.max_streams:
            return None
        self._open(line)
        asked = self.asked[self.numbers]
        return None if asked.over else asked

    def offer(self, asked: Asked, message: bytes) -> None:
        """One message."""
        asked.offered.append(message)
        asked.sizes.append(len(message))
        asked.stream.body += b"\0" + struct.pack(">I", len(message)) + message

    def _offer(self, asked: Asked) -> None:
        """A message, or the end."""
        random, stream = self.random, asked.stream
        if stream.sent_end or not stream.more:
            return
        if random.random() < 0.3 or (asked.single and asked.offered and random.random() < 0.8):
            stream.more = False
            if not stream.body and not stream.over:
                stream.sent_end = True
                asked.line.wire.out += frame(0, 1, stream.number, b"")
            return
        message = bytes(random.choice(SIZES)) + random.randbytes(random.choice((0, 3, 500)))
        wire = message
        if asked.packed:
            wire = gzip.compress(message, 1, mtime=0) if asked.packed == "gzip" else zlib.compress(message, 1)
        if not asked.single and len(wire) < TINY:
            asked.line.frames.append((self.clock.now, TINY_COST))
        asked.offered.append(message)
        asked.sizes.append(len(wire))
        stream.body += bytes([bool(asked.packed)]) + struct.pack(">I", len(wire)) + wire

    def _send(self, asked: Asked) -> None:
        if asked.stream.body and not asked.stream.over:
            if not asked.is_awaited:
                asked.begun = self.clock.now
            before = len(asked.stream.body)
            for _ in range(self.random.choice((1, 1, 10))):
                asked.line.wire.push(asked.stream, self.random.choice((1, 3, 40, 5000, 1 << 20)))
            asked.sent += before - len(asked.stream.body)

    def step(self) -> None:
        """Somebody does something."""
        random = self.random
        lines = [line for line in self.lines if not line.gone]
        if not lines:
            return
        line = random.choice(lines)
        mine = [asked for asked in self.asked.values() if asked.line is line and not asked.over]
        what = random.random()
        if what < 0.15 or not mine:
            if line.wire.went_away is not None:
                line.hang_up()
            elif max(line.connection.streams, len(mine)) < self.max_streams:
                self._open(line)
        elif what < 0.35:
            self._offer(random.choice(mine))
        elif what < 0.6:
            self._send(random.choice(mine))
        elif what < 0.8:
            for _ in range(random.choice((1, 4))):
                self._handle(random.choice(mine))
        elif what < 0.83:
            asked = random.choice(mine)
            line.wire.cancel(asked.stream)
        elif what < 0.9:
            asked = random.choice(mine)
            size = random.choice((1, 1000, 100_000))
            line.wire.give(asked.stream, size)
            if random.random() < 0.5:
                line.wire.give(None, size)
        elif what < 0.92:
            self._ping(line, random.choice((1, 1, 1, 30, FLOOD)))
        elif what < 0.93:
            line.reads = not line.reads
        elif what < 0.98:
            self.wait(random.choice((0.001, 1.0, 5.0, 11.0)))
        elif what < 0.983:
            line.hang_up()
        elif what < 0.985:
            self._bomb(line)
        elif what < 0.99:
            random.choice((line.connection.announce_shutdown, line.connection.go_away, line.connection.ping))()
        for each in 2 * self.lines:
            each.exchange()
        self.check()

    def _ping(self, line: Line, count: int) -> None:
        """Many are too many."""
        for _ in range(count):
            line.wire.ping()
        line.exchange()
        most = 2 * self.limits.spare_frames + 3 * line.connection.response_frames
        if count > most and not line.gone and line.reads and line.wire.went_away != CALM:
            raise Violation(f"{count} PINGs are answered, where {most} frames may come in a second")

    def _bomb(self, line: Line) -> None:
        """Few bytes that stand for very many headers."""
        if line.wire.went_away is None and line.connection.streams < self.max_streams:
            line.wire.out += frame(1, 4, line.wire.next_stream, request_headers(PATH, ()) + BOMB)
            line.wire.next_stream += 2
            line.exchange()
            if not line.gone and line.reads and line.wire.went_away != CALM:
                raise Violation("headers of any size are taken")

    # -- rules

    def check(self) -> None:
        """What holds at any time.

        Raises:
            Violation: it does not.
        """
        endpoint = self.endpoint
        endpoint.flush_dirty()
        if not endpoint.ledger_agrees() or endpoint.held != sum(endpoint.ledger.values()):
            raise Violation(f"the sums of the ledger do not agree: {endpoint.ledger}")
        if endpoint.held - endpoint.departed != sum(use.bytes_held for use, _ in self.uses):
            raise Violation(f"{endpoint.held} bytes are held, of clients {[use.bytes_held for use, _ in self.uses]}")
        if endpoint.streams != sum(use.calls for use, _ in self.uses):
            raise Violation(f"{endpoint.streams} streams are open, of clients {[use.calls for use, _ in self.uses]}")
        most = self.limits.max_held_bytes
        if most is not None and endpoint.held - endpoint.departed > most:
            raise Violation(f"{endpoint.held} bytes are held, and {most} may be")
        for asked in self.asked.values():
            if not asked.judged:
                self._judge(asked)

    def _judge(self, asked: Asked) -> None:
        stream, line = asked.stream, asked.line
        if stream.headers is not None and stream.headers is not stream.trailers:
            encoding = stream.headers.get("grpc-encoding", "")
            if encoding != asked.encoding:
                raise Violation(f"call {asked.number} has answers in '{encoding}', not '{asked.encoding}'")
        while True:
            is_packed = bool(stream.data) and stream.data[0] == 1
            if (message := take_message(stream.data)) is None:
                break
            if asked.heard >= len(asked.answers) or message != asked.answers[asked.heard]:
                raise Violation(f"call {asked.number} has another answer than its handler has sent")
            if is_packed and not asked.encoding:
                raise Violation(f"call {asked.number} has a compressed answer, and no encoding")
            if asked.encoding and asked.shrinks[asked.heard] and not is_packed:
                raise Violation(f"call {asked.number} has an answer of {len(message)} bytes that is not compressed")
            asked.heard += 1
        call = asked.call
        if call is not None and not asked.over and line.reads:
            self._check_reader(asked)
            if call.open:
                self._check_open(asked, call)
        if asked.over:
            asked.judged = True
            if stream.trailers is not None:
                self._judge_status(asked)
            elif stream.reset is not None:
                self._judge_reset(asked)

    def _check_open(self, asked: Asked, call: Call) -> None:
        """What holds for a call that is open."""
        now = self.clock.now
        if (
            asked.timeout >= 0
            and now >= asked.opened + asked.timeout
            and self.moved_after(asked.opened + asked.timeout)
        ):
            raise Violation(
                f"call {asked.number} is open, {now - asked.opened} s after its client gave it {asked.timeout}"
            )
        due = asked.begun + self.limits.receive_timeout + asked.sent / SLOWEST + 0.1
        if asked.is_awaited and now > due and not asked.wrong:
            raise Violation(f"call {asked.number} has not come for {now - asked.begun} s, and is still awaited")
        unsent = sum(len(message) + PREFIX for message in asked.answers[asked.heard :]) - len(asked.stream.data)
        if not call.writable and unsent < WRITABLE and not self.pool:
            raise Violation(f"call {asked.number} has {unsent} bytes unsent, and may send no more")
        if asked.taken < asked.events[EVENT_MESSAGE] - len(asked.offered):
            raise Violation(f"call {asked.number} hears of {asked.events[EVENT_MESSAGE]} messages")
        if call.half_closed and not asked.stream.sent_end:
            raise Violation(f"call {asked.number} is half closed, and its client goes on")
        if asked.events[EVENT_HALF_CLOSE] > 1 or asked.events[EVENT_CLOSED]:
            raise Violation(f"call {asked.number} is open, and has heard {asked.events}")

    def _check_reader(self, asked: Asked) -> None:
        """A client that takes nothing of what waits for it loses its call."""
        known, now = sum(map(len, asked.answers[: asked.heard])) + len(asked.stream.data), self.clock.now
        is_stuck = (
            asked.heard < len(asked.answers)
            and asked.stream.credit <= 0
            and asked.line.reads
            and asked.line.wire.credit > 0
        )
        if not is_stuck:
            asked.stuck = -1.0
        elif asked.stuck < 0 or known != asked.known:
            asked.stuck, asked.known = now, known
        elif now - asked.stuck > self.limits.send_timeout + known / SLOWEST + 1 and self.pool is None:
            raise Violation(f"call {asked.number} waits for its client for {now - asked.stuck} s, and is still there")

    def moved_after(self, due: float) -> bool:
        """Whether timers were asked since then."""
        return self.clock.now > due + 0.002

    def _judge_status(self, asked: Asked) -> None:
        trailers = asked.stream.trailers or {}
        status, text = int(trailers["grpc-status"]), unquote(trailers.get("grpc-message", ""))
        if asked.end is not None and (status, text) == asked.end[:2]:
            metadata = dict(asked.end[2])
            if any(trailers.get(name) != value for name, value in metadata.items()):
                raise Violation(f"call {asked.number} ends with {trailers}, where {metadata} was sent")
            if asked.heard != len(asked.answers):
                raise Violation(f"call {asked.number} has {asked.heard} of {len(asked.answers)} answers, and a status")
            return
        if asked.wrong and asked.call is not None:
            raise Violation(f"call {asked.number} is served, where it was to be told: {asked.wrong}")
        if not self._explains(asked, status, text):
            raise Violation(f"call {asked.number} of {asked.line.limits} ends with {status} '{text}', not {asked.end}")

    def _explains(self, asked: Asked, status: int, text: str) -> bool:
        """Whether the server may refuse a call so."""
        if asked.wrong and text.startswith(asked.wrong):
            return status > 0
        limits, mine, name = self.limits, asked.line.limits, asked.line.use.name
        if found := IN_FLIGHT.match(text):
            limit = mine[KINDS[found[3]]]
            enough = int(found[2]) >= limit if found[3] == "streams" else int(found[2]) > limit
            return status == LIMITED and found[1] == name and int(found[4]) == limit and enough
        if found := ANNOUNCED.match(text):
            of, limit = int(found[2]), mine["max_bytes"]
            return status == LIMITED and found[1] == name and of in asked.sizes and of > limit == int(found[3])
        if found := TOGETHER.match(text):
            return (
                status == LIMITED
                and int(found[1]) in asked.sizes
                and int(found[1]) > int(found[2]) == limits.max_held_bytes
            )
        if found := LARGER.match(text):
            return (
                status == LIMITED
                and int(found[1]) in asked.sizes
                and int(found[1]) > int(found[2]) == limits.max_message
            )
        if found := INFLATED.match(text):
            most = min(each for each in (limits.max_inflated, limits.max_message, 1 << 32) if each is not None)
            return status == LIMITED and int(found[1]) == most and max(map(len, asked.offered)) > most
        if found := HELD.match(text):
            self._judge_eviction(asked)
            return status == LIMITED and int(found[1]) == limits.max_held_bytes
        if found := SLOW.match(text):
            seconds = float(found[1])
            part = re.match(r"(\d+) bytes of its message have come$", found[2])
            come = int(part[1]) if part else 0
            is_so = part is not None or "END_STREAM is missing" in found[2]
            due = limits.receive_timeout + come / SLOWEST
            return status == LATE and is_so and seconds * 1.01 >= due and seconds <= self.clock.now - asked.opened + 0.1
        if text == "Deadline Exceeded":
            return status == LATE and 0 <= asked.timeout <= self.clock.now - asked.opened
        if text == "expected one request message, got more":
            return asked.single and len(asked.offered) > 1
        return False

    def _judge_eviction(self, evicted: Asked) -> None:
        """The server held too much: no other client owes clearly more than who has lost this call."""
        if not self.is_prompt:
            return  # the client hears of it later, when others owe more
        most = self._debt(evicted.line.use, evicted, least=False)
        for use, _ in self.uses:
            if use is not evicted.line.use and (owed := self._debt(use, None, least=True)) > max(1.0, most + 0.5):
                raise Violation(
                    f"call {evicted.number} of {evicted.line.use.name} had to go, owing {most} at most, {owed}"
                )

    def _debt(self, use: ClientUse, gone: Asked | None, *, least: bool) -> float:
        """What a client owes, at least or at most: bytes that do not come or are not read, by their age."""
        debt, now = 0.0, self.clock.now
        for asked in self.asked.values():
            if asked.line.use is not use or asked.line.gone or not (asked is gone or not asked.over):
                continue
            done = 0
            for size in asked.sizes:
                done += PREFIX + size
                if asked.sent < done:
                    break
            if asked.sent < done:
                come = max(0, asked.sent - (done - size))
                owed = come if least else size + 8192
                debt += owed * (now - asked.begun) / (come + GOOD_FAITH)
            unread = sum(map(len, asked.answers[asked.heard :])) - len(asked.stream.data)
            since = (now - asked.stuck if asked.stuck >= 0 else 0.0) if least else now - asked.opened
            is_known = asked.accepts == "identity" and self.pool is None
            if unread > 0 and (is_known or not least):
                moved = sum(map(len, asked.answers[: asked.heard])) + len(asked.stream.data) if least else 0
                debt += unread * since / (moved + GOOD_FAITH)
        return debt

    def _judge_reset(self, asked: Asked) -> None:
        """The server has reset a call: its handler has, or its client has not read for too long, or held too much."""
        code = asked.stream.reset
        if asked.events["reset"] or asked.line.wire.went_away is not None:
            return
        if code == CALM and self.limits.send_timeout == math.inf and self.limits.max_held_bytes is not None:
            self._judge_eviction(asked)
        may = self.limits.send_timeout < math.inf and self.clock.now - asked.opened > self.limits.send_timeout
        may = may or self.limits.max_held_bytes is not None
        if not (may and code in (CALM, CANCELLED)):
            raise Violation(f"call {asked.number} is reset with {code}, and nobody knows why")

    def judge_end(self, line: Line) -> None:
        """A connection has ended.

        Raises:
            Violation: for no reason.
        """
        if line.wire.went_away == CALM and line.wire.farewell in ("too_many_frames", "too_many_messages"):
            spent = sum(cost for _, cost in line.frames)
            if spent <= self.limits.spare_frames:
                raise Violation(
                    f"{spent} frames cost too much, where {self.limits.spare_frames} may be sent in a second"
                )

    def end(self) -> None:
        """All hang up, and nothing is left."""
        for line in self.lines:
            if not line.gone:
                line.reads = True
                line.exchange()
        self.check()
        for line in self.lines:
            if not line.gone:
                line.hang_up()
        self.endpoint.flush_dirty()
        if self.pool is not None:
            self.pool.close()
            self.endpoint.collect_jobs()
        held, streams = self.endpoint.held, self.endpoint.streams
        if held or streams or any(use.calls or use.streams or use.bytes_held for use, _ in self.uses):
            raise Violation(f"all have hung up, and {held} bytes and {streams} streams are held")
        for asked in self.asked.values():
            if asked.call is not None and asked.events[EVENT_CLOSED] != 1:
                raise Violation(f"call {asked.number} has heard {asked.events}, and its client is gone")
            if asked.events[EVENT_WRITABLE] and not asked.answers:
                raise Violation(f"call {asked.number} hears that it may go on, and has sent nothing")
            asked.call = None


def try_evictions(random: Random) -> None:
    """A server that holds too much ends calls of who owes most, or, if nobody owes much, of who holds most."""
    front = Front(random, Limits(None, None, HELD_BYTES, math.inf, math.inf, 10_000))
    time_passes = random.random() < 0.6
    for number in range(3, 6):
        front.lines.append(Line(front, number))
        front.lines[-1].exchange()
    debtor = random.choice(front.uses)[0]
    for _ in range(random.choice((20, 60))):
        line = random.choice(front.lines)
        held = {use.name: use.bytes_held for use, _ in front.uses}
        asked = front.begin(line)
        size = random.choice((3000, 20_000, 45_000))
        owes = line.use is debtor
        if asked is not None:
            front.offer(asked, bytes(size))
            line.wire.push(asked.stream, random.randint(size // 2, size - 1) if owes else 1 << 20)
            for _ in range(4):
                line.wire.push(asked.stream, 0 if owes else 1 << 20)
            asked.sent = size + PREFIX - len(asked.stream.body)
            asked.begun = front.clock.now
        gone = [each for each in front.asked.values() if not each.over]
        for each in 2 * front.lines:  # what one sends may end calls of those before
            each.exchange()
        gone = [each for each in gone if "server held" in (each.stream.trailers or {}).get("grpc-message", "")]
        if not time_passes:
            _judge_holders(line, held, gone, size + 2 * CALL_MEMORY)
        front.check()
        if time_passes and random.random() < 0.4:
            front.wait(random.choice((1.0, 30.0)))
            for each in front.lines:
                each.exchange()
    front.end()


def _judge_holders(sender: Line, held: dict[str, int], gone: list[Asked], size: int) -> None:
    """Nobody owes anything: who has lost a call first held most."""
    held = {name: count + (size if name == sender.use.name else 0) for name, count in held.items()}
    largest = max(count - (size if name == sender.use.name else 0) for name, count in held.items())
    if gone and all(held[asked.line.use.name] < largest for asked in gone):
        raise Violation(f"calls of {[asked.line.use.name for asked in gone]} had to go, with these bytes held: {held}")


def chosen_of(wanted: str, accepts: str) -> str:
    """The encoding of answers, where the handler wants this one, or the best; empty: none."""
    accepted = [name.strip() for name in accepts.split(",")]
    if not wanted:
        return next((name for name in ("gzip", "deflate") if name in accepted), "")
    return wanted if wanted in accepted and wanted != "identity" else ""


def base64_of(data: bytes) -> str:
    """As headers have it."""
    return base64.b64encode(data).decode().rstrip("=")


def try_lines(random: Random) -> None:
    """Clients of a front in memory do what they like for a while."""
    front = Front(random)
    for _ in range(random.choice((30, 80, 150))):
        front.step()
    front.end()
