"""Hostile peers against the connection in memory: wrong frames, floods, bombs, and bytes without sense."""

from __future__ import annotations

import gc
import os
import random

import pytest

from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd._native.transport.thread_pool import PoolThreads
from tests.conformance import h2cases
from tests.conformance.h2cases import CALM, END_HEADERS, END_STREAM, HEADERS, MARK, PREFACE, Seen, frame
from tests.framing import framed
from tests.native.h2peer import Echo, Peer
from tests.native.readers import Given, Read

SPARE = 500  # frames a second that bring no call forward


pytestmark = pytest.mark.usefixtures("native_counters")


class Wire:
    """A connection and the bytes that it has sent."""

    def __init__(self, spare_frames: int = 10_000, reader: type[Given | Read] = Given) -> None:
        self.now = 1000.0
        self.calls = 0
        self.hold = False  # calls stay open
        self.endpoint = Endpoint(self._called, spare_frames=spare_frames)
        self.endpoint.clock = lambda: self.now
        self.connection = Connection(self.endpoint)
        self.connection.flush = lambda: None
        self.reader = reader(self.connection)
        self.sent = bytearray()

    def _called(self, call) -> None:
        self.calls += 1
        if self.hold:
            return
        call.end(12, "nothing is here")

    def send(self, data: bytes) -> None:
        self.reader.feed(data)
        self.take()

    def take(self) -> None:
        while pieces := self.connection.take_output():
            self.sent += b"".join(bytes(piece) for piece in pieces)

    @property
    def seen(self) -> Seen:
        return Seen(h2cases.frames(bytes(self.sent)), self.connection.finished)

    def exchange(self, data: bytes) -> Seen:
        self.send(data)
        return self.seen

    def close(self) -> None:
        self.connection.close()
        self.reader.close()


@pytest.fixture
def wire():
    wire = Wire(SPARE)
    wire.send(PREFACE + h2cases.settings())
    yield wire
    wire.close()


@pytest.mark.parametrize("reader", [Given, Read])
@pytest.mark.parametrize("case", h2cases.cases(), ids=lambda case: case.name)
def test_the_connection_does_in_each_case_what_http2_demands(case, reader):
    wire = Wire(reader=reader)
    h2cases.run(case, wire.exchange)
    wire.close()


def test_there_are_enough_cases():
    cases = h2cases.cases()
    assert len(cases) >= 100
    assert len({case.name for case in cases}) == len(cases)


def test_a_case_byte_by_byte():
    """The outcome does not depend on where the bytes are cut."""
    for case in h2cases.cases():
        if len(case.sent) > 2000:
            continue
        wire = Wire()
        for byte in case.greeting + case.sent + frame(h2cases.PING, 0, 0, MARK):
            wire.reader.feed(bytes([byte]))
        wire.take()
        wire.seen.judge(case)
        wire.close()


# -- floods --

FLOODS = {
    "PING": frame(h2cases.PING, 0, 0, bytes(8)),
    "PING ACK": frame(h2cases.PING, 1, 0, bytes(8)),
    "SETTINGS": h2cases.settings(),
    "SETTINGS with a window": h2cases.settings((4, 70_000)),
    "WINDOW_UPDATE": h2cases.window(0, 1),
    "WINDOW_UPDATE of a stream": h2cases.window(1, 1),
    "PRIORITY": h2cases.priority(1),
    "PRIORITY of idle streams": h2cases.priority(1001),
    "empty DATA": frame(h2cases.DATA, 0, 1),
    "tiny messages of a stream": frame(h2cases.DATA, 0, 1, (b"\0\0\0\0\x0f" + bytes(15))),
    "padding": frame(h2cases.DATA, 8, 1, b"\x05abcde"),
    "RST_STREAM of a closed stream": h2cases.reset(1),
    "GOAWAY": h2cases.goaway(),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_any_frame_ends_the_connection(wire, name):
    wire.hold = True
    if "closed" in name:
        wire.send(h2cases.OPEN + h2cases.reset(1))
    elif name not in ("GOAWAY",):
        wire.send(h2cases.headers(payload=h2cases.block(pseudo_path="/x"), flags=END_HEADERS))
    for _ in range(SPARE * 2):
        wire.send(FLOODS[name])
        if wire.connection.finished:
            break
    assert wire.connection.finished
    if name != "GOAWAY":  # a peer that goes away is let go, once its calls are over
        assert wire.seen.goaway == CALM


def test_messages_of_a_stream_that_may_be_requests_are_no_flood(wire):
    """From 16 bytes on, a message of a stream may be a request for a model, however many there are."""
    wire.hold = True
    wire.send(h2cases.headers(payload=h2cases.block(pseudo_path="/x"), flags=END_HEADERS))
    for _ in range(4):
        wire.send(frame(h2cases.DATA, 0, 1, (b"\0\0\0\0\x10" + bytes(16)) * SPARE))
    assert not wire.connection.finished


def test_a_flood_in_one_read(wire):
    wire.send(FLOODS["PING"] * 10_000)
    assert wire.seen.goaway == CALM
    assert wire.connection.finished
    assert len(wire.sent) < 100_000


def test_acknowledgements_that_nobody_reads_are_bounded():
    """A thousand PINGs wait for their answers; a client that reads none of these is sent away."""
    wire = Wire(1_000_000)
    wire.send(PREFACE + h2cases.settings())
    wire.send(FLOODS["PING"] * 900)
    assert not wire.connection.finished
    wire.send(FLOODS["PING"] * 1100)
    assert wire.seen.goaway == CALM
    wire.close()


def test_who_stays_below_the_rate_is_served(wire):
    for _ in range(20):
        wire.send(FLOODS["PING"] * (SPARE // 2))
        wire.now += 0.5
    assert not wire.connection.finished
    wire.send(FLOODS["PING"] * SPARE)
    wire.send(FLOODS["PING"] * SPARE)
    assert wire.connection.finished


def opened_and_reset(count: int, start: int = 1) -> bytes:
    block = h2cases.block()
    return b"".join(
        h2cases.headers(stream, payload=block) + h2cases.reset(stream) for stream in range(start, start + 2 * count, 2)
    )


def test_rapid_reset(wire):
    """Calls that are reset in the read in which they begin are never heard of."""
    wire.send(opened_and_reset(SPARE // 20))
    assert not wire.connection.finished
    wire.send(opened_and_reset(SPARE, 2 * SPARE + 1))
    assert wire.seen.goaway == CALM
    assert wire.calls <= 1  # the one whose reset is not processed any more


def test_resets_by_the_server_count(wire):
    """The peer makes the server reset its streams: a window beyond its limit on each (CVE-2025-8671)."""
    wire.hold = True
    for stream in range(1, 4 * SPARE, 2):
        wire.send(h2cases.headers(stream, flags=END_HEADERS) + h2cases.window(stream, 2**31 - 1))
        if wire.connection.finished:
            break
    assert wire.seen.goaway == CALM


def test_streams_beyond_the_limit_count():
    calls = []
    wire = Wire(SPARE)
    wire.endpoint = Endpoint(calls.append, spare_frames=SPARE)
    wire.endpoint.clock = lambda: 1000.0  # else frames are earned back while a slow machine sends
    wire.connection = Connection(wire.endpoint)
    wire.connection.flush = lambda: None
    wire.reader = Given(wire.connection)
    wire.send(PREFACE + h2cases.settings())
    for stream in range(1, 4 * SPARE, 2):
        wire.send(h2cases.headers(stream, flags=END_HEADERS | END_STREAM))
        if wire.connection.finished:
            break
    assert len(calls) == 256
    assert wire.seen.goaway == CALM
    assert wire.seen.resets.count(h2cases.REFUSED) >= SPARE // 2
    wire.close()


def test_a_continuation_flood_ends_soon(wire):
    wire.send(frame(HEADERS, 0, 1, h2cases.block()))
    for _ in range(1000):
        wire.send(frame(h2cases.CONTINUATION, 0, 1, b""))
        if wire.connection.finished:
            break
    assert wire.seen.goaway == CALM


def test_many_header_lists_that_are_too_large():
    """Each is refused by itself, and the connection lives."""
    wire = Wire()
    wire.send(PREFACE + h2cases.settings() + frame(h2cases.SETTINGS, h2cases.ACK))
    extra = tuple((f"x-{n}", "y" * 500) for n in range(60))
    for stream in range(1, 41, 2):
        wire.send(h2cases.headers(stream, END_HEADERS | END_STREAM, h2cases.block(extra=extra)))
    assert not wire.connection.finished
    assert wire.calls == 0
    wire.close()


def test_a_client_that_acknowledges_each_frame_of_a_large_answer_is_served():
    """Two WINDOW_UPDATE for each DATA frame: answers earn them."""
    answers = []

    def called(call):
        call.on_event = lambda kind: None
        call.send_message(bytes(8 << 20))
        answers.append(call)

    wire = Wire(SPARE)
    wire.endpoint = Endpoint(called, spare_frames=SPARE)
    wire.connection = Connection(wire.endpoint)
    wire.connection.flush = lambda: None
    wire.reader = Given(wire.connection)
    wire.send(PREFACE + h2cases.settings() + h2cases.OPEN)
    received = 0
    while received < (8 << 20) + 5:
        got, wire.sent = bytes(wire.sent), bytearray()
        parts = [f for f in h2cases.frames(got) if f.type == h2cases.DATA]
        assert parts or received == 0, "the server is silent"
        received += sum(len(f.data) for f in parts)
        for part in parts:
            for stream in (0, 1):
                wire.send(h2cases.window(stream, len(part.data)))
    assert not wire.connection.finished
    wire.close()


# -- bytes without sense --


def test_ten_thousand_random_byte_streams():
    """Random bytes, and valid conversations with random damage."""
    generator = random.Random(20261121)
    valid = [case.sent for case in h2cases.cases() if len(case.sent) < 4000]
    for number in range(10_000):
        wire = Wire(reader=(Given, Read)[number // 4 % 2])
        if number % 4 == 0:
            data = generator.randbytes(generator.randrange(1, 300))
        else:
            data = bytearray(b"".join(generator.choices(valid, k=4)))
            for _ in range(generator.randrange(5)):
                data[generator.randrange(len(data))] = generator.randrange(256)
        wire.send((PREFACE + h2cases.settings() if number % 4 else b"") + bytes(data))
        wire.close()


def test_pool_threads_that_cannot_be_made_close_nothing(monkeypatch):
    def fail(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.eventfd", fail)
    with pytest.raises(OSError, match="Too many open files"):
        PoolThreads(1)
    gc.collect()
    os.fstat(0)  # still open


def test_a_call_for_which_there_is_no_memory_is_refused(native_counters):
    """One allocation of the interpreter fails, each in turn: the call is answered or refused, and the server lives."""
    hooks = pytest.importorskip("_testcapi")
    statuses = []
    for at in range(40):
        echo = Echo()
        peer = Peer(echo.endpoint)
        peer.pump()
        stream = peer.open("/test/Echo", (("key", "value"),))
        peer.send(stream, framed(b"x"), end=True)
        data, receive = peer.h2.data_to_send(), peer.connection.receive
        hooks.set_nomemory(at, at + 1)
        try:
            receive(data)
        except MemoryError:  # the owner of the connection closes it then
            heard = True
        else:
            heard = False
        finally:
            hooks.remove_mem_hooks()
        peer.pump()
        if not heard:
            statuses.append(peer.answers[stream].status)
        peer.close()
    assert set(statuses) <= {0, 8}
    assert 8 in statuses
