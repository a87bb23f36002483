"""Direct reads: a large message goes from the socket into the memory where it stays, and that may be what its model
shares with its workers.
"""

from __future__ import annotations

import gzip
import hashlib
import mmap
import random
import socket

import pytest
from hpack import Decoder
from hyperframe.frame import HeadersFrame, WindowUpdateFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd._native.memory.arena import ArenaHandle
from inferd._native.service.authorizer import Authorizer
from inferd._native.transport.call import EVENT_HALF_CLOSE, EVENT_MESSAGE
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd.server.front.tokens import parse
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import h2cases
from tests.conformance.h2cases import DATA as DATA_FRAME
from tests.conformance.h2cases import END_HEADERS, END_STREAM, PADDED, PREFACE, frame
from tests.native.h2peer import INFER, Lanes, Peer, framed, output
from tests.native.readers import Given, Read, waits

KIB = 1 << 10
NOT_FOUND = 5
LARGE = 40 * KIB
DATA = bytes(range(256)) * (LARGE // 256)


pytestmark = pytest.mark.usefixtures("native_counters")


class ArenaLanes(Lanes):
    """The model has an arena."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = ArenaHandle("test")
        self.lane.receive_into(self.arena)


@pytest.fixture
def lanes():
    lanes = ArenaLanes()
    yield lanes
    lanes.close()
    del lanes.arena  # pytest keeps the fixture's value


@pytest.fixture
def peer(lanes):
    peer = Peer(lanes.endpoint)
    yield peer
    peer.close()


def finish(lanes, peer, stream):
    lanes.settle()
    peer.pump()
    answer = peer.answers[stream]
    assert answer.status == 0
    return output(answer.messages[0])


def begin(peer, message, *parts):
    """A call whose message is sent in pieces that end there; the rest of it."""
    stream = peer.open()
    at = 0
    for end in parts:
        peer.send(stream, message[at:end])
        peer.pump()
        at = end
    return stream, message[at:]


def test_a_large_message_arrives_in_the_arena_of_its_model(lanes, peer):
    message = framed(lanes.request(DATA, "7"))
    stream, rest = begin(peer, message, 20 * KIB)
    assert lanes.arena.used >= len(message) - 5
    with mmap.mmap(lanes.arena.fd, 1 << 20, access=mmap.ACCESS_READ) as seen:
        assert seen.find(message[5 : 20 * KIB]) >= 0
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("7", DATA)
    assert lanes.arena.used == 0


def test_a_small_message_does_not(lanes, peer):
    stream, rest = begin(peer, framed(lanes.request(bytes(10 * KIB))), 5 * KIB)
    assert lanes.arena.used == 0
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("", bytes(10 * KIB))


@pytest.mark.parametrize("first", [5, 6, 7])
def test_a_message_gets_its_place_when_enough_of_it_has_come_to_name_the_model(lanes, peer, first):
    message = framed(lanes.request(DATA))
    stream, rest = begin(peer, message, first)
    assert lanes.arena.used == 0
    peer.send(stream, rest[: 20 * KIB])
    peer.pump()
    assert lanes.arena.used >= 40 * KIB
    rest = rest[20 * KIB :]
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("", DATA)


def test_claims_take_nothing_of_the_arena(lanes, peer):
    """A few bytes that announce a large message leave the model's memory to others."""
    for _ in range(100):
        begin(peer, b"\0" + (8 << 20).to_bytes(4, "big") + lanes.request(b"x")[:100], 105)
    assert lanes.arena.used == 0
    message = framed(lanes.request(DATA, "7"))
    stream, rest = begin(peer, message, 20 * KIB)
    assert lanes.arena.used >= 40 * KIB
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("7", DATA)


def test_a_caller_who_may_not_use_the_model_takes_nothing_of_its_memory(lanes, peer):
    """The call ends as soon as the message has named the model."""
    authorizer = Authorizer()
    authorizer.set_tokens(parse(b"mine groups=inference models=other\n", "tokens", authorizer.key))
    authorizer.install(lanes.endpoint)
    lanes.service.guard(authorizer)
    stream = peer.open(metadata=(("authorization", "Bearer mine"),))
    peer.send(stream, framed(lanes.request(DATA))[: 20 * KIB])
    peer.pump()
    assert lanes.arena.used == 0
    assert peer.answers[stream].status == 7
    assert lanes.endpoint.held == 0


def test_the_name_behind_other_fields_is_not_looked_for(lanes, peer):
    request = pb.ModelInferRequest.FromString(lanes.request(DATA))
    request.ClearField("model_name")
    stream, rest = begin(peer, framed(request.SerializeToString() + b"\x0a\x01m"), 20 * KIB)
    assert lanes.arena.used == 0
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("", DATA)


def test_a_message_for_a_model_that_nobody_has_takes_nothing(lanes, peer):
    request = pb.ModelInferRequest.FromString(lanes.request(DATA))
    request.model_name = "other"
    stream, rest = begin(peer, framed(request.SerializeToString()), 20 * KIB)
    assert lanes.arena.used == 0
    peer.send_all(stream, rest)
    lanes.settle()
    peer.pump()
    assert peer.answers[stream].status == NOT_FOUND


def test_a_compressed_message_is_inflated_into_ordinary_memory(lanes, peer):
    packed = gzip.compress(lanes.request(DATA), compresslevel=0)
    stream = peer.open(INFER, metadata=(("grpc-encoding", "gzip"),))
    peer.send_all(stream, b"\x01" + len(packed).to_bytes(4, "big") + packed)
    assert lanes.arena.used == 0
    assert finish(lanes, peer, stream) == ("", DATA)


def test_what_a_client_has_sent_before_it_left_is_given_back(lanes, peer):
    begin(peer, framed(lanes.request(DATA)), 20 * KIB)
    assert lanes.arena.used
    peer.close()
    assert lanes.arena.used == 0


def test_what_was_sent_of_a_call_that_is_reset_is_given_back(lanes, peer):
    stream, _ = begin(peer, framed(lanes.request(DATA)), 20 * KIB)
    assert lanes.arena.used
    peer.h2.reset_stream(stream)
    peer.pump()
    assert lanes.arena.used == 0


# ---- where it is read to ---------------------------------------------------------------------------------------------

MIB = 1 << 20
WORTH = 32 * KIB  # bytes of a message and of a frame from which a read of their own pays
HEAD = 9
OPEN = h2cases.headers(payload=h2cases.block(pseudo_path="/1"), flags=END_HEADERS)
GREETING = PREFACE + h2cases.settings() + frame(h2cases.SETTINGS, h2cases.ACK)
RANDOM = random.Random(7).randbytes(2 * MIB)


def digest(message):
    return hashlib.sha256(message).hexdigest()


class Server:
    """A connection that takes messages, and one way to get bytes into it."""

    def __init__(self, reader) -> None:
        self.calls = {}  # by path, the digests of the messages
        self.endpoint = Endpoint(self._called)
        self.connection = Connection(self.endpoint)
        self.connection.flush = lambda: None
        self.reader = reader(self.connection)

    def _called(self, call) -> None:
        messages = self.calls.setdefault(call.path, [])

        def on_event(kind):
            while kind == EVENT_MESSAGE and call.open and (message := call.take_message()) is not None:
                messages.append(digest(message))
            if kind == EVENT_HALF_CLOSE and call.open:
                call.end(0)

        call.on_event = on_event

    def frames(self, broken):
        """What it sent, by stream: without window updates, which depend on how much came at a time."""
        found = {}
        decoder = Decoder()
        for each in h2cases.frames(b"".join(bytes(piece) for piece in self.connection.take_output())):
            fields = decoder.decode(each.data) if isinstance(each, HeadersFrame) else repr(each)
            if not isinstance(each, WindowUpdateFrame) and f"/{each.stream_id}" not in broken:
                found.setdefault(each.stream_id, []).append((type(each), each.flags, fields))
        return found

    def close(self) -> None:
        self.connection.close()
        self.reader.close()


@pytest.fixture
def direct():
    server = Server(Read)
    server.reader.feed(GREETING + OPEN)
    yield server
    server.close()
    server.calls.clear()


def outcome(reader, parts, broken=()):
    """What comes of bytes that arrive in these parts (messages of calls that are not broken off, frames, whether the
    connection is over), and how many bytes were not copied."""
    server = Server(reader)
    for part in parts:
        server.reader.feed(part)
    calls = {path: messages for path, messages in server.calls.items() if path not in broken}
    found = (calls, server.frames(broken), server.connection.finished)
    direct = server.endpoint.direct
    server.close()
    assert server.endpoint.held == 0
    return found, direct


def cut(data, sizes):
    """The data in parts of these sizes, and the rest."""
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size
    yield data[at:]


def frames_of(body, stream=1, size=100_000):
    """DATA frames with the body, the last one ending the stream."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    flags = [0] * (len(parts) - 1) + [END_STREAM]
    return b"".join(frame(DATA_FRAME, flag, stream, part) for flag, part in zip(flags, parts, strict=True))


def test_cut_anywhere_it_is_the_same_message():
    """At each position around the heads of frames and messages, and at many in between."""
    body = framed(RANDOM[:150_000]) + framed(RANDOM[:40_000])
    data = GREETING + OPEN + frames_of(body, size=70_000)
    expected, _ = outcome(Given, [data])
    assert expected[0] == {"/1": [digest(RANDOM[:150_000]), digest(RANDOM[:40_000])]}
    edges = [len(GREETING), len(GREETING + OPEN)]
    edges += [edges[1] + number * (HEAD + 70_000) for number in (1, 2)]
    edges += [edges[1] + HEAD + 5, edges[3] + HEAD + 10_005, len(data) - 1]
    places = {place for edge in edges for place in range(edge - 12, edge + 24)} | set(range(0, len(data), 1009))
    for place in sorted(places):
        assert outcome(Read, cut(data, [place]))[0] == expected, place


class Conversation:
    """Bytes of a client, and which calls it breaks off: how much of those is heard of is a matter of time."""

    def __init__(self) -> None:
        self.data = GREETING
        self.broken = set()
        self.pending = {}  # by stream, what is still to be sent of its body

    def open(self, stream, body):
        self.data += h2cases.headers(stream, END_HEADERS, h2cases.block(pseudo_path=f"/{stream}"))
        self.pending[stream] = body

    def send(self, stream, size, padding=None):
        """A DATA frame with the next bytes."""
        part, rest = cut(self.pending.pop(stream), [size])
        flags = 0 if rest else END_STREAM
        if rest:
            self.pending[stream] = rest
        if padding is not None:
            part = bytes([padding]) + part + bytes(padding)
            flags |= PADDED
        self.data += frame(DATA_FRAME, flags, stream, part)

    def disturb(self, kind, stream):
        """Something else, between two frames."""
        if kind == "ping":
            self.data += frame(h2cases.PING, 0, 0, h2cases.MARK)
        elif kind == "unknown":
            self.data += frame(0xBB, 0, stream, RANDOM[:50_000])
        elif kind == "reset":
            self.data += h2cases.reset(stream)
        elif kind == "trailers":
            self.data += h2cases.headers(stream, END_HEADERS | END_STREAM, h2cases.literals((("x", "y"),)))
        elif kind == "wrong":
            self.data += frame(DATA_FRAME, 0, 2001, RANDOM[:50_000])  # of an idle stream: the connection ends
        if kind in ("reset", "trailers"):
            self.broken.add(f"/{stream}")
            self.pending.pop(stream, None)


@st.composite
def conversations(draw):
    """Messages of all sizes on some streams, their frames mixed with each other and with whatever else may come."""
    made = Conversation()
    for stream in range(1, 2 * draw(st.integers(1, 3)), 2):
        sizes = draw(st.lists(st.sampled_from([0, 7, 20_000, WORTH, 33_000, 100_000, 300_000]), min_size=1, max_size=3))
        start = draw(st.integers(0, 1000))
        made.open(stream, b"".join(framed(RANDOM[start : start + size]) for size in sizes))
    while made.pending:
        stream = draw(st.sampled_from(sorted(made.pending)))
        size = draw(st.sampled_from([1, 5, 6, 9, 16_384, WORTH, 40_000, 100_000, 256 * KIB - 256]))
        made.send(stream, size, draw(st.sampled_from([None, None, None, 0, 255])))
        made.disturb(draw(st.sampled_from(["not"] * 12 + ["ping", "unknown", "reset", "trailers", "wrong"])), stream)
    return made


@given(conversations(), st.lists(st.sampled_from([1, 8, 9, 10, 1000, 16_384, 60_000, 300_000]), max_size=20))
@settings(max_examples=100, deadline=None)
def test_any_conversation_in_any_parts_has_the_same_outcome(conversation, sizes):
    """Frames may be padded or ignored, and calls or the connection may end in the middle of messages."""
    expected, copied = outcome(Given, cut(conversation.data, sizes), conversation.broken)
    assert copied == 0
    assert outcome(Read, cut(conversation.data, sizes), conversation.broken)[0] == expected


def test_damaged_frames_have_the_same_outcome():
    """Bits in or near the heads of large frames are wrong: the call ends somehow, or the connection."""
    generator = random.Random(20261122)
    for _ in range(300):
        size = generator.choice([WORTH, 90_000])
        data = bytearray(GREETING + OPEN + frames_of(framed(RANDOM[:300_000]), size=size))
        for _ in range(generator.randrange(1, 4)):
            head = len(GREETING + OPEN) + generator.randrange(3) * (HEAD + size)
            data[head + generator.randrange(12)] ^= 1 << generator.randrange(8)
        sizes = [generator.choice([9, 16_384, 70_000]) for _ in range(5)]
        expected, _ = outcome(Given, cut(bytes(data), sizes), broken=["/1"])
        assert outcome(Read, cut(bytes(data), sizes), broken=["/1"])[0] == expected


def test_a_large_message_is_not_copied(direct):
    """Only its beginning, which comes with the headers, is copied, and a short end in a frame of its own."""
    direct.reader.feed(frames_of(framed(RANDOM), size=256 * KIB))
    assert direct.calls == {"/1": [digest(RANDOM)]}
    assert direct.endpoint.direct >= len(RANDOM) - 17 * KIB


def test_a_compressed_message_is_not_copied_before_it_is_inflated(direct):
    packed = gzip.compress(RANDOM)
    block = h2cases.block(pseudo_path="/3", extra=(("grpc-encoding", "gzip"),))
    direct.reader.feed(h2cases.headers(3, END_HEADERS, block) + frames_of(framed(packed, 1), 3, 256 * KIB))
    assert direct.calls == {"/1": [], "/3": [digest(RANDOM)]}
    assert direct.endpoint.direct >= len(packed) - 17 * KIB


@pytest.mark.parametrize("size", [16_384, WORTH - 1])
def test_small_frames_are_read_together(direct, size):
    """A read for each would cost more than the copy."""
    direct.reader.feed(frames_of(framed(RANDOM), size=size))
    assert direct.calls == {"/1": [digest(RANDOM)]}
    assert direct.endpoint.direct == 0


def test_a_native_message_is_read_into_the_arena(lanes):
    connection = Peer(lanes.endpoint)
    reader = Read(connection.connection)
    connection.feed = reader.feed
    data = RANDOM[: 256 * KIB]
    stream = connection.open()
    connection.pump()
    connection.send_all(stream, framed(lanes.request(data, "7")))
    assert lanes.endpoint.direct >= len(data) - 16 * KIB
    assert lanes.arena.used >= len(data)
    assert finish(lanes, connection, stream) == ("7", data)
    connection.close()
    reader.close()


def test_others_have_their_turn():
    """A client that sends without end is not read without end."""
    server = Server(Read)
    server.reader.feed(GREETING + OPEN)
    sent = server.reader.theirs.send(frame(DATA_FRAME, 0, 1, framed(RANDOM)[: 256 * KIB]) * 8)
    assert sent > MIB
    server.reader.read()
    assert server.endpoint.direct < MIB
    server.close()


class Costly:
    """A client whose bytes cost as much as the test says, whatever the machine needs for them."""

    def __init__(self) -> None:
        self.server = Server(Read)
        self.cost = 0.0  # seconds between two looks at the clock
        self.now = 1000.0
        self.server.endpoint.clock = self._look
        self.server.reader.feed(GREETING + OPEN)
        self.message = framed(RANDOM)

    def _look(self) -> float:
        self.now += self.cost
        return self.now

    def send(self, size: int, *, in_frames_of: int) -> None:
        """The next bytes of the message."""
        part, self.message = self.message[:size], self.message[size:]
        data = b"".join(frame(DATA_FRAME, 0, 1, part[at : at + in_frames_of]) for at in range(0, size, in_frames_of))
        assert self.server.reader.theirs.send(data) == len(data)

    def turn(self, cost: float) -> int:
        """Bytes that one turn takes."""
        self.cost = cost
        before = self._waiting()
        self.server.reader.read()
        return before - self._waiting()

    def _waiting(self) -> int:
        return len(self.server.reader.ours.recv(MIB, socket.MSG_PEEK)) if waits(self.server.reader.ours) else 0


@pytest.fixture
def costly():
    client = Costly()
    yield client
    client.server.close()


MORE_THAN_A_TURN = 0.0003


def test_a_turn_ends_by_its_time(costly):
    """A frame costs about the same however small it is: many of them in few bytes do not keep others waiting."""
    costly.send(100_000, in_frames_of=50)
    assert [costly.turn(MORE_THAN_A_TURN) for _ in range(3)] == [16_384, 10_922, 7281]


def test_cheap_bytes_do_not_let_costly_ones_keep_others_waiting(costly):
    """The frames behind large ones may be small, and so cost more for each byte."""
    costly.send(400_000, in_frames_of=16 * KIB)
    while costly.turn(0):
        pass
    costly.send(100_000, in_frames_of=10)
    assert costly.turn(MORE_THAN_A_TURN) == 64 * KIB


def test_a_large_message_read_to_its_place_says_nothing_of_small_ones(costly):
    """A large message costs nearly nothing; small frames are read after it as they were before it."""
    costly.send(30_000, in_frames_of=50)
    assert [costly.turn(MORE_THAN_A_TURN) for _ in range(2)] == [16_384, 10_922]
    while costly.turn(MORE_THAN_A_TURN):
        pass
    data = frame(DATA_FRAME, 0, 1, costly.message[: 256 * KIB])
    costly.message = costly.message[256 * KIB :]
    for part in cut(data, [500]):
        costly.server.reader.theirs.send(part)
        assert costly.turn(0) == len(part)
    costly.send(30_000, in_frames_of=50)
    assert costly.turn(MORE_THAN_A_TURN) < 16_384
