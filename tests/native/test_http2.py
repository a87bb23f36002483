"""Guards the sans-IO connection: framing at any split, flow control both ways, bounded memory, every way to end.

The client is the h2 library, in memory; nothing here has a socket, and only native ModelInfer has a thread.
"""

import gc
import json
import random

import h2.errors
import h2.events
import h2.settings
import numpy as np
import pytest
from hyperframe.frame import GoAwayFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd._native.memory.resource import live_counters
from inferd._native.transport.call import EVENT_CLOSED, EVENT_HALF_CLOSE, EVENT_MESSAGE, EVENT_WRITABLE
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from tests.conformance import h2cases
from tests.native.h2peer import INFER, Answer, Echo, Lanes, Peer, framed, output

ECHO = "/test.Echo/Echo"
UNSENT_LIMIT = 4 << 20
QUEUED_LIMIT = 1 << 20
STREAM_WINDOW = 4 << 20
INTERNAL, UNAVAILABLE = 13, 14
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def peer(echo):
    peer = Peer(echo.endpoint)
    yield peer
    peer.close()


@pytest.fixture
def lanes():
    lanes = Lanes()
    yield lanes
    lanes.close()


def connected(endpoint, **options):
    """A peer whose settings have been exchanged."""
    peer = Peer(endpoint, **options)
    peer.pump()
    return peer


# -- framing --


def recorded(*messages, metadata=()):
    """The bytes that a client sends for one call."""
    scratch = Echo()
    peer = Peer(scratch.endpoint)
    stream = peer.open(ECHO, metadata)
    peer.send(stream, b"".join(framed(message) for message in messages), end=True)
    data = peer.h2.data_to_send()
    peer.close()
    return data


def replay(data, *parts):
    """What the echo answers when these bytes arrive in these parts."""
    echo = Echo()
    peer = Peer(echo.endpoint)
    peer.h2.data_to_send()
    twin = Peer(echo.endpoint)  # speaks for the recorded client: its state is that of a client that has sent `data`
    stream = twin.open(ECHO)
    twin.send(stream, b"", end=True)
    at = 0
    for size in (*parts, len(data)):
        peer.feed(data[at : at + size])
        at += size
    twin.read(peer.take())
    answer = twin.answers[stream]
    peer.close()
    twin.close()
    return answer


MESSAGES = (b"first", b"", b"third message")


def test_every_split_point():
    data = recorded(*MESSAGES, metadata=(("x-key", "value"),))
    for at in range(len(data)):
        answer = replay(data, at)
        assert answer.messages == list(MESSAGES), at
        assert answer.ended
        assert (answer.status, answer.trailers["x-key"]) == (0, "value"), at


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 60), max_size=30))
@settings(max_examples=60)
def test_any_messages_in_any_parts(messages, parts):
    assert replay(recorded(*messages), *parts).messages == messages


def test_joined_frames_of_many_streams(peer):
    """Whole calls of a hundred streams in one read."""
    streams = [peer.open(ECHO) for _ in range(100)]
    for stream in streams:
        peer.send(stream, framed(b"%d" % stream) * 3)
    for stream in reversed(streams):
        peer.h2.end_stream(stream)
    peer.pump()
    for stream in streams:
        answer = peer.answers[stream]
        assert (answer.messages, answer.status, answer.ended) == ([b"%d" % stream] * 3, 0, True)
    assert peer.connection.streams == 0


def test_padding_is_given_back_to_the_window(peer):
    """More padded bytes than any window: credit for the padding must come back too."""
    stream = peer.open(ECHO)
    peer.h2.send_data(stream, framed(b"x" * 40_000)[:5])
    for _ in range(10_000):
        while peer.h2.local_flow_control_window(stream) < 300:
            peer.pump()
        peer.h2.send_data(stream, b"xxxx", pad_length=255)
    peer.pump()
    peer.h2.end_stream(stream)
    peer.pump()
    assert peer.answers[stream].messages == [b"x" * 40_000]


# -- frames of streams that are over --


@pytest.mark.parametrize("answered", [True, False])
def test_headers_of_a_stream_that_the_client_has_ended_end_the_connection(echo, answered):
    peer = connected(echo.endpoint)
    echo.hold = not answered
    stream = peer.open(ECHO)
    peer.send(stream, framed(b"x"), end=True)
    peer.pump()
    assert peer.answers[stream].ended == answered
    peer.feed(h2cases.headers(stream))
    [*_, last] = h2cases.frames(peer.take())
    assert (type(last).__name__, last.error_code) == ("GoAwayFrame", h2cases.CLOSED)
    assert peer.connection.finished
    peer.close()


def test_what_was_sent_before_an_early_answer_came_is_ignored(echo):
    """The client cannot have known that its call was answered."""
    peer = connected(echo.endpoint)
    stream = peer.open("/no", (("grpc-timeout", "soon"),))
    peer.pump()
    assert peer.answers[stream].status == INTERNAL
    peer.feed(h2cases.frame(h2cases.DATA, 0, stream, b"x" * 100))
    peer.feed(h2cases.frame(h2cases.DATA, h2cases.END_STREAM, stream, b"x" * 100))
    assert not h2cases.frames(peer.take())
    assert peer.call(ECHO, b"alive").messages == [b"alive"]
    peer.close()


# -- values with spaces, and what HTTP/2 does not allow --


@pytest.mark.parametrize("value", [b"x ", b" x", b"\t x \t", b"x"])
def test_spaces_around_a_value_are_stripped(echo, value):
    answer = raw_call(echo, ("x-key", value))
    assert (answer.status, answer.headers["x-key"]) == (0, "x")


@pytest.mark.parametrize(("key", "value"), [("x-key", b"a\x01b"), ("x-key", b"a\nb"), ("x key", b"v")])
def test_a_header_that_is_not_allowed_is_told_to_the_server(echo, key, value):
    told = []
    answer = raw_call(echo, (key, value), told.append)
    assert answer.reset == h2cases.PROTOCOL
    assert len(told) == 1
    assert repr(key) in told[0]


def raw_call(echo, pair, on_refused=None):
    """A call with a header as it stands; h2 would strip or refuse it."""
    peer = connected(echo.endpoint)
    peer.connection.on_refused = on_refused
    stream = peer.open(ECHO, end=True)
    peer.h2.data_to_send()
    name, value = pair
    peer.feed(h2cases.headers(stream, 5, h2cases.block(pseudo_path=ECHO, extra=((name, value.decode()),))))
    peer.pump()
    answer = peer.answers[stream]
    peer.close()
    return answer


# -- HTTP/1 --


@pytest.mark.parametrize("parts", [[], [1], [1, 2, 3]])
def test_http1_is_answered_in_http1(echo, parts):
    peer = Peer(echo.endpoint)
    data = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\n\r\n"
    for part in parts:
        peer.feed(data[:part])
        data = data[part:]
    peer.feed(data)
    answer = peer.take()
    head, body = answer.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 ")
    assert f"content-length: {len(body)}".encode() in head
    assert "gRPC" in json.loads(body)["error"]
    assert peer.connection.http1
    assert peer.connection.finished
    assert not peer.take()
    peer.close()


@pytest.mark.parametrize("data", [b"INVALID CONNECTION PREFACE\r\n\r\n", b"\x16\x03\x01\x00\xc8", b"GET / FTP/1.1\r\n"])
def test_other_protocols_get_no_answer_in_http1(echo, data):
    peer = Peer(echo.endpoint)
    peer.feed(data)
    assert not peer.connection.http1
    assert b"HTTP" not in peer.take()
    assert peer.connection.finished
    peer.close()


# -- huge messages through small windows --


@pytest.mark.parametrize("window", [1, 17, 65_535])
def test_huge_message_through_small_windows(echo, window):
    peer = Peer(echo.endpoint, window=window)
    size = 3_000 if window < 65_535 else 40 << 20
    message = random.Random(window).randbytes(size)
    assert peer.call(ECHO, message).messages == [message]
    peer.close()


def test_native_answer_through_a_small_window(lanes):
    """A large output is sent by reference, piece by piece, and arrives whole."""
    peer = connected(lanes.endpoint, window=1000)
    data = random.Random(1).randbytes(300_000)
    stream = peer.open()
    peer.send_all(stream, framed(lanes.request(data, "id")))
    lanes.settle()
    peer.pump()
    [message] = peer.answers[stream].messages
    assert output(message) == ("id", data)
    peer.close()


def test_tensor_bytes_are_not_copied_on_their_way_to_the_socket(lanes):
    """What is given to the socket are pieces of one and the same memory, in order: the block of the output.

    The identity model hands the input back where it was received, and there is no other memory of that size.
    """
    size = 16 << 20
    peer = connected(lanes.endpoint, window=1 << 30)
    peer.h2.increment_flow_control_window(1 << 30)
    before = live_counters()["blocks"]
    stream = peer.open()
    peer.send_all(stream, framed(lanes.request(bytes(size))))
    lanes.settle()
    pieces = []
    while taken := peer.connection.take_output():
        pieces += [np.frombuffer(piece, np.uint8) for piece in taken]
    tensor = [piece for piece in pieces if piece.nbytes >= 4096]
    assert size - 4096 < sum(piece.nbytes for piece in tensor) <= size  # the last frame may be small, and copied
    address = tensor[0].ctypes.data
    for piece in tensor:
        assert piece.ctypes.data == address
        address += piece.nbytes
    assert sum(piece.nbytes for piece in pieces) < size * 1.01
    del pieces, tensor, piece, taken
    assert live_counters()["blocks"] <= before
    peer.close()


# -- back-pressure --


def test_take_output_respects_its_limit(echo):
    peer = connected(echo.endpoint)
    peer.h2.increment_flow_control_window(1 << 30)
    echo.hold = True
    stream = peer.open(ECHO)
    peer.h2.increment_flow_control_window(1 << 30, stream)
    peer.feed(peer.h2.data_to_send())
    for _ in range(64):
        echo.calls[0].send_message(bytes(256 << 10))
    limit = 512 << 10
    total = 0
    while part := peer.take(limit):
        assert len(part) <= limit + (128 << 10)
        total += len(part)
    assert total >= 16 << 20
    peer.close()


def test_slow_reader_parks_further_unary_calls():
    """Answers that wait for the window of their connection stay bounded: beyond the limit its further calls are not
    even started."""
    lanes = Lanes(max_streams=100)
    peer = connected(lanes.endpoint, window=1 << 24, reading=False)
    size = 1 << 20
    streams = []
    for number in range(40):
        stream = peer.open()
        streams.append(stream)
        peer.send_all(stream, framed(lanes.request(bytes([number]) * size, str(number))))
        lanes.settle()
    started = lanes.lane.statistics()["success"][0]
    assert UNSENT_LIMIT // size <= started <= UNSENT_LIMIT // size + 1
    assert peer.connection.unsent <= UNSENT_LIMIT + 2 * size
    peer.h2.reset_stream(streams[-1], h2.errors.ErrorCodes.CANCEL)  # one that is parked leaves
    peer.pump()
    peer.reading = True
    peer.h2.increment_flow_control_window(1 << 30)
    for stream in streams[:-1]:
        peer.h2.increment_flow_control_window(2 * size, stream)
    while not all(peer.answers[stream].ended for stream in streams[:-1]):
        peer.pump()
        lanes.settle()
        peer.pump()
    for number, stream in enumerate(streams[:-1]):
        assert output(peer.answers[stream].messages[0]) == (str(number), bytes([number]) * size)
    assert lanes.lane.statistics()["success"][0] == len(streams) - 1
    peer.close()
    lanes.close()


def test_connection_closed_with_parked_calls():
    lanes = Lanes()
    peer = connected(lanes.endpoint, window=0, reading=False)
    for _ in range(8):
        peer.send_all(peer.open(), framed(lanes.request(bytes(1 << 20))))
        lanes.settle()
    peer.close()
    lanes.close()


def test_credit_is_withheld_while_messages_wait(echo):
    """A call that takes no messages holds at most the queue limit and one window of them."""
    echo.hold = True
    peer = connected(echo.endpoint)
    message = framed(bytes(100_000))
    stream = peer.open(ECHO)
    sent = 0
    while peer.h2.local_flow_control_window(stream):
        sent += peer.send(stream, (message * 100)[sent % len(message) :][: 1 << 20])
        peer.pump()
    assert STREAM_WINDOW <= sent <= QUEUED_LIMIT + STREAM_WINDOW + len(message)
    other = peer.open(ECHO)  # the connection is not blocked by it
    peer.send_all(other, message)
    [call, neighbour] = echo.calls
    assert len(neighbour.take_message()) == 100_000
    taken = 0
    while call.take_message() is not None:
        taken += 1
    assert taken == sent // len(message)
    peer.pump()
    assert peer.h2.local_flow_control_window(stream) > STREAM_WINDOW // 2
    peer.close()


def test_writable_and_its_event(echo):
    echo.hold = True
    peer = connected(echo.endpoint, reading=False)
    stream = peer.open(ECHO)
    peer.pump()
    [call] = echo.calls
    assert call.writable
    call.send_message(bytes(200_000))
    assert not call.writable
    peer.pump()
    assert not call.writable
    assert (0, EVENT_WRITABLE) not in echo.events
    for _ in range(3):
        peer.h2.increment_flow_control_window(65_535)
        peer.h2.increment_flow_control_window(65_535, stream)
        peer.pump()
    assert call.writable
    assert echo.events.count((0, EVENT_WRITABLE)) == 1
    peer.close()


def test_data_for_an_answered_call_does_not_use_up_the_connection(lanes):
    """A client that keeps sending after the final status gets its connection window back."""
    peer = connected(lanes.endpoint)
    for _ in range(8):
        stream = peer.open()
        peer.send(stream, framed(b"", compressed=1) + bytes(60_000))
        peer.feed(peer.h2.data_to_send())
        for _ in range(40):
            peer.send(stream, bytes(60_000))
        peer.feed(peer.h2.data_to_send())
        peer.read(peer.take())
    peer.pump()
    assert peer.h2.outbound_flow_control_window > 1 << 20
    peer.close()


# -- limits --


def test_more_streams_than_allowed_are_refused():
    echo = Echo(max_streams=3)
    echo.hold = True
    peer = Peer(echo.endpoint)
    streams = [peer.open(ECHO) for _ in range(5)]  # before the client has seen the limit
    peer.pump()
    assert [peer.answers[stream].reset for stream in streams] == [None] * 3 + [h2.errors.ErrorCodes.REFUSED_STREAM] * 2
    assert len(echo.calls) == 3
    peer.close()


# -- ends --


def steps_of_a_call(lanes):
    """A native call as separate writes, so that it can end between any two."""
    message = framed(lanes.request(b"payload"))
    return ["headers", message[:3], message[3:5], message[5:20], message[20:], "end", "settle", "read"]


@pytest.mark.parametrize("last", range(8))
@pytest.mark.parametrize("end", ["reset", "close"])
def test_end_at_every_step_of_a_native_call(last, end):
    """RST_STREAM or a lost connection after any step: nothing crashes, nothing is left, the next call is served."""
    lanes = Lanes(running=False)
    peer = connected(lanes.endpoint)
    stream = 0
    for step in steps_of_a_call(lanes)[: last + 1]:
        if step == "headers":
            stream = peer.open()
        elif step == "end":
            peer.h2.end_stream(stream)
        elif step == "settle":
            lanes.run()
            lanes.settle()
        elif step == "read":
            peer.pump()
        else:
            peer.send(stream, step)
        peer.feed(peer.h2.data_to_send())
    if end == "close":
        peer.close()
        peer = connected(lanes.endpoint)
    elif last < 7:
        peer.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        peer.pump()
        assert peer.connection.streams == 0
    if last < 6:
        assert lanes.lane.pending == 0
        lanes.run()
    following = peer.open()
    peer.send_all(following, framed(lanes.request(b"next", "next")))
    lanes.settle()
    peer.pump()
    assert output(peer.answers[following].messages[0]) == ("next", b"next")
    assert lanes.lane.statistics()["success"][0] == (1 if last < 6 else 2)
    peer.close()
    lanes.close()


@pytest.mark.parametrize("last", range(6))
@pytest.mark.parametrize("end", ["reset", "close"])
def test_end_at_every_step_of_a_python_call(echo, last, end):
    echo.hold = True
    peer = connected(echo.endpoint)
    stream = peer.open(ECHO)
    peer.feed(peer.h2.data_to_send())
    [call] = echo.calls
    actions = [
        lambda: peer.send(stream, framed(b"one")[:6]),
        lambda: peer.send(stream, framed(b"one")[6:]),
        lambda: call.send_headers([("x", "y")]),
        lambda: call.send_message(bytes(200_000)),
        lambda: call.end(0, "", [("t-bin", b"\0")]),
    ]
    for action in actions[:last]:
        action()
        peer.feed(peer.h2.data_to_send())
    if end == "reset":
        peer.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        peer.pump()
    else:
        peer.close()
    assert echo.events[-1] == (0, EVENT_CLOSED)
    assert call.closed_by == h2.errors.ErrorCodes.CANCEL
    assert not call.open
    assert call.half_closed
    assert call.take_message() is None
    for late in (lambda: call.send_message(b""), lambda: call.end(0), call.reset, call.send_headers):
        with pytest.raises(ConnectionError, match="the call is over"):
            late()
    assert peer.connection.streams == 0
    peer.close()


def test_server_resets_a_call(echo, peer):
    echo.hold = True
    stream = peer.open(ECHO)
    peer.pump()
    echo.calls[0].send_message(b"unfinished")
    echo.calls[0].reset()
    peer.pump()
    assert peer.answers[stream].reset == h2.errors.ErrorCodes.INTERNAL_ERROR
    assert echo.calls[0].closed_by == h2.errors.ErrorCodes.INTERNAL_ERROR


def test_answer_before_the_request_has_ended(echo, peer):
    """The client is told to stop sending: NO_ERROR after the trailers."""
    echo.hold = True
    stream = peer.open(ECHO)
    peer.send(stream, framed(b"one"))
    peer.pump()
    echo.calls[0].end(5, "gone")
    peer.pump()
    answer = peer.answers[stream]
    assert (answer.status, answer.headers["grpc-message"]) == (5, "gone")
    assert answer.reset == h2.errors.ErrorCodes.NO_ERROR
    assert peer.connection.streams == 0


def test_events_in_order(echo, peer):
    echo.hold = True
    stream = peer.open(ECHO)
    peer.send(stream, framed(b"a") + framed(b"b"), end=True)
    peer.pump()
    assert echo.events == [(0, EVENT_MESSAGE), (0, EVENT_MESSAGE), (0, EVENT_HALF_CLOSE)]
    echo.answer(echo.calls[0])
    peer.pump()
    assert echo.events[-1] == (0, EVENT_CLOSED)
    assert echo.calls[0].closed_by == 0


def test_headers_only_once_and_before_messages(echo, peer):
    echo.hold = True
    peer.open(ECHO)
    peer.pump()
    [call] = echo.calls
    call.send_headers([("x", "y")])
    with pytest.raises(ValueError, match="has been sent"):
        call.send_headers()
    with pytest.raises(ValueError, match="0 to 16"):
        call.end(17)
    with pytest.raises(ValueError):
        call.end(0, metadata=[("Bad Key", "v")])
    assert call.open  # a refused ending changes nothing
    call.end(0)
    with pytest.raises(ConnectionError):
        call.end(0)


# -- GOAWAY --


def test_the_ping_of_an_announcement_comes_behind_it(echo):
    """A peer that answers the PING knows that it may open no more streams, however little it reads at a time."""
    peer = connected(echo.endpoint)
    peer.pump()
    peer.connection.announce_shutdown()
    kinds, written = [], peer.take()
    while written:
        kinds.append(written[3])
        written = written[9 + int.from_bytes(written[:3], "big") :]
    assert kinds == [h2cases.GOAWAY, h2cases.PING]
    peer.close()


def test_graceful_shutdown(echo):
    """Announce, serve what comes meanwhile, refuse the rest, finish what is open, then be finished."""
    echo.hold = True
    peer = connected(echo.endpoint)
    first = peer.open(ECHO)
    peer.pump()
    peer.connection.announce_shutdown()
    second = peer.open(ECHO)
    crossing = peer.h2.data_to_send()  # the client had not seen the announcement
    notice = peer.take()
    peer.feed(crossing)
    assert len(echo.calls) == 2
    peer.connection.go_away()
    final = peer.take()
    assert not peer.connection.finished
    third = peer.open(ECHO)
    peer.feed(peer.h2.data_to_send())
    assert len(echo.calls) == 2, "a stream after GOAWAY is not served"
    for call in echo.calls:
        call.end(0)
    rest = peer.take()
    assert peer.connection.finished
    ended = [event for event in _events(notice + final + rest, peer) if isinstance(event, h2.events.StreamEnded)]
    assert [event.stream_id for event in ended] == [first, second]
    assert not peer.answers[third].ended
    peer.close()


def _events(data, peer):
    """h2 stops at the first GOAWAY; frames say the rest."""
    from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame

    last_streams, out = [], []
    while data:
        frame, length = Frame.parse_frame_header(memoryview(data[:9]))
        frame.parse_body(memoryview(data[9 : 9 + length]))
        data = data[9 + length :]
        if isinstance(frame, GoAwayFrame):
            last_streams.append(frame.last_stream_id)
        if isinstance(frame, HeadersFrame | DataFrame) and "END_STREAM" in frame.flags:
            event = h2.events.StreamEnded.__new__(h2.events.StreamEnded)
            event.stream_id = frame.stream_id
            out.append(event)
    assert last_streams == [(1 << 31) - 1, 3]
    return out


def test_a_call_behind_the_last_one_that_goaway_names_is_not_begun(echo):
    """It came before the GOAWAY was sent. The GOAWAY tells the client that nobody has seen it, so that it may ask
    another server: it must not be executed here."""
    peer = connected(echo.endpoint)
    peer.open(ECHO)
    peer.pump()
    peer.connection.go_away()
    peer.send(peer.open(ECHO), framed(b"late"), end=True)
    peer.feed(peer.h2.data_to_send())
    peer.connection.take_output()
    assert len(echo.calls) == 1
    echo.calls[0].end(0)
    peer.connection.take_output()
    assert peer.connection.finished
    peer.close()


def test_no_goaway_names_a_later_stream_than_the_one_before(peer):
    """The client would take those in between for served, and not ask another server for them."""
    first = peer.open("/test/Echo")
    peer.pump()
    peer.connection.go_away()
    for _ in range(3):
        peer.open("/test/Echo")
    peer.feed(peer.h2.data_to_send())
    peer.connection.calm("enough")
    told = [frame for frame in h2cases.frames(peer.take()) if isinstance(frame, GoAwayFrame)]
    assert [frame.error_code for frame in told] == [h2cases.NO_ERROR, h2cases.CALM]
    assert [frame.last_stream_id for frame in told] == [first, first]


def test_idle_connection_is_finished_by_go_away(peer):
    peer.pump()
    peer.connection.go_away()
    assert not peer.connection.finished
    peer.take()
    assert peer.connection.finished


# -- peers that break the rules --


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 100, PREFACE + b"\xff" * 100])
def test_garbage_finishes_the_connection(peer, garbage):
    peer.feed(garbage)
    peer.take()
    assert peer.connection.finished


@given(st.binary(min_size=9, max_size=400), st.booleans())
@settings(max_examples=150)
def test_arbitrary_bytes_never_crash(garbage, after_a_call):
    echo = Echo()
    peer = Peer(echo.endpoint)
    if after_a_call:
        peer.send(peer.open(ECHO), framed(b"message")[:7])
    peer.feed(peer.h2.data_to_send() if after_a_call else PREFACE)
    peer.feed(garbage, 7)
    peer.take()
    peer.feed(garbage)
    peer.take()
    peer.close()
    assert peer.connection.finished


@given(st.data())
@settings(max_examples=150)
def test_damaged_streams_never_crash(data):
    """A valid exchange with some bytes changed, cut or doubled; whatever happens, it can be closed."""
    raw = bytearray(recorded(b"message", b"x" * 50, metadata=(("k", "v"),)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(len(PREFACE), len(raw) - 1))
        kind = data.draw(st.sampled_from(["change", "cut", "double"]))
        if kind == "change":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del raw[at : at + data.draw(st.integers(1, 9))]
        else:
            raw[at:at] = raw[at : at + data.draw(st.integers(1, 30))]
    echo = Echo(max_message=1 << 20)
    peer = Peer(echo.endpoint)
    peer.feed(bytes(raw), data.draw(st.sampled_from([1, 5, 1000])))
    peer.take()
    peer.close()


def test_connect_and_headers_without_path(echo, peer):
    """CONNECT carries no :path at all."""
    stream = peer.h2.get_next_available_stream_id()
    peer.h2.config.validate_outbound_headers = False
    peer.h2.send_headers(stream, [(":method", "CONNECT"), (":authority", "test")])
    peer.answers[stream] = Answer()
    peer.h2.send_data(stream, framed(b"x"), end_stream=True)
    peer.pump()
    assert peer.answers[stream].headers[":status"] == "405"
    assert echo.calls == []
    assert peer.call(ECHO, b"alive").messages == [b"alive"]


def test_headers_beyond_the_limit(echo, peer):
    answer = peer.call(ECHO, metadata=tuple((f"k{i}", "v" * 1000) for i in range(20)))
    assert answer.status == 8
    assert echo.calls == []
    assert peer.call(ECHO, b"alive").messages == [b"alive"]


@pytest.mark.parametrize("begin", [False, True], ids=["status", "initial-metadata"])
def test_headers_of_a_response_that_are_too_large_end_the_call(echo, peer, begin):
    """The library does not send them: the client must not wait for a response."""
    echo.hold = True
    stream = peer.open("/test.Echo/Large")
    peer.pump()
    large = [("k", "v" * 70_000)]
    if begin:
        echo.calls[0].send_headers(large)
    else:
        echo.calls[0].end(0, metadata=large)
    peer.pump()
    assert peer.answers[stream].reset == h2.errors.ErrorCodes.INTERNAL_ERROR
    assert echo.endpoint.streams == 0


def test_many_resets(echo):
    """Streams opened and reset at once leave nothing behind."""
    peer = connected(echo.endpoint)
    for _ in range(50):
        streams = [peer.open(ECHO) for _ in range(20)]
        for stream in streams:
            peer.h2.reset_stream(stream)
        peer.pump()
    assert peer.connection.streams == 0
    assert peer.call(ECHO, b"alive").messages == [b"alive"]
    peer.close()


# -- owners --


def test_connection_closed_with_open_streams(lanes):
    """The streams are half sent, queued, running, answered and unread, and handled by Python."""
    peer = connected(lanes.endpoint, window=0, reading=False)
    for _ in range(4):
        peer.send_all(peer.open(), framed(lanes.request(bytes(50_000))))
    lanes.settle()
    for _ in range(4):
        peer.send(peer.open(), framed(lanes.request(b"12345"))[:30])
    for _ in range(4):
        peer.send(peer.open(), framed(lanes.request(b"12345")), end=True)
    peer.open(ECHO)
    peer.feed(peer.h2.data_to_send())
    assert peer.connection.streams == 13
    closed = []
    lanes.calls[0].on_event = closed.append
    peer.close()
    assert closed == [EVENT_CLOSED]
    assert peer.connection.streams == 0
    assert peer.connection.finished
    assert peer.take() == b""
    peer.connection.receive(bytes(10))
    peer.close()


def test_connection_dropped_without_close(echo):
    """An owner that forgets `close`: the endpoint must not remember a connection that is gone."""
    for cycle in (False, True):
        peer = connected(echo.endpoint)
        if cycle:
            peer.connection.flush = peer.pump
        peer.connection.announce_shutdown()
        del peer
        gc.collect()
    echo.endpoint.flush_dirty()


def test_flush_is_asked_once_for_each_connection_with_output(lanes):
    peers = [connected(lanes.endpoint) for _ in range(3)]
    flushed = []
    for index, peer in enumerate(peers):
        peer.connection.flush = lambda index=index: flushed.append(index)
        for _ in range(4):
            peer.send_all(peer.open(), framed(lanes.request(b"x")))
    lanes.endpoint.flush_dirty()
    flushed.clear()
    lanes.settle()
    assert sorted(flushed) == [0, 1, 2]
    for peer in peers:
        peer.close()


def test_what_connections_ask_one_after_the_other_is_begun_when_the_round_ends(lanes):
    """Not every one of reads that follow each other closely wakes an instance; the end of the round loses none."""
    now = 1000.0
    lanes.endpoint.rounds = True
    lanes.endpoint.clock = lambda: now
    peers = [connected(lanes.endpoint) for _ in range(4)]
    answers = []
    for begin in (1001.0, 1002.0):
        now = begin
        for peer in peers:
            stream = peer.open()
            answers.append(peer.answers[stream])
            peer.send_all(stream, framed(lanes.request(b"x")))
        lanes.endpoint.flush_dirty()
        lanes.settle()
    for _ in range(3):
        now += 0.001
        stream = peers[0].open()
        answers.append(peers[0].answers[stream])
        peers[0].send_all(stream, framed(lanes.request(b"x")))
        lanes.settle()
    for peer in peers:
        peer.pump()
        peer.close()
    assert {output(answer.messages[0]) for answer in answers} == {("", b"x")}


def test_a_model_ends_before_the_round_in_which_it_was_asked(lanes):
    """The model's lane is not looked at any more when the round ends."""
    now = 1000.0
    lanes.endpoint.rounds = True
    lanes.endpoint.clock = lambda: now
    peers = [connected(lanes.endpoint) for _ in range(2)]
    now += 1
    for peer in peers:
        peer.send_all(peer.open(), framed(lanes.request(b"x")))
    lanes.service.forget(lanes.lane)
    endpoint = lanes.endpoint
    for peer in peers:
        peer.close()
    lanes.close()
    endpoint.flush_dirty()


def test_a_flush_may_close_any_connection(lanes):
    peers = [connected(lanes.endpoint) for _ in range(3)]
    for peer in peers:
        peer.connection.flush = lambda: [other.connection.close() for other in peers]
        peer.send_all(peer.open(), framed(lanes.request(b"x")))
    lanes.settle()
    assert live_counters()["connections"] == 0


def test_a_raising_receiver_loses_no_event_of_others(echo):
    """What is behind it comes with the next call."""
    echo.hold = True
    peer = connected(echo.endpoint)
    for _ in range(3):
        peer.open(ECHO)
    peer.pump()
    echo.calls[0].on_event = lambda kind: 1 / 0
    events = []
    echo.calls[1].on_event = events.append
    for stream in peer.answers:
        peer.send(stream, framed(b""))
    with pytest.raises(ZeroDivisionError):
        peer.feed(peer.h2.data_to_send())
    with pytest.raises(ZeroDivisionError):
        peer.close()
    peer.close()
    assert events == [EVENT_MESSAGE, EVENT_CLOSED]


def test_endpoint_outlives_its_makers():
    connection = Connection(Endpoint(lambda call: None), "test")
    gc.collect()
    assert connection.take_output()
    connection.close()


def test_native_calls_of_many_connections_are_not_crossed(lanes):
    rng = random.Random(7)
    peers = [connected(lanes.endpoint) for _ in range(5)]
    expected = []
    for number in range(300):
        peer = rng.choice(peers)
        stream = peer.open()
        data = rng.randbytes(rng.choice([0, 1, 100, 5000]))
        peer.send_all(stream, framed(lanes.request(data, str(number))))
        expected.append((peer, stream, str(number), data))
        if rng.random() < 0.2:
            lanes.settle()
    lanes.settle()
    for peer in peers:
        peer.pump()
    for peer, stream, number, data in expected:
        assert output(peer.answers[stream].messages[0]) == (number, data)
    for peer in peers:
        peer.close()


def test_paths_are_told_apart(lanes):
    peer = connected(lanes.endpoint)
    peer.open(INFER + "X")
    peer.open(INFER[:-1])
    peer.pump()
    assert [call.path for call in lanes.calls] == [INFER + "X", INFER[:-1]]
    peer.close()


# -- headers that are known from the call before --

FIELDS = {
    "te": ["trailers", "trailers", None],
    "content-type": ["application/grpc", "application/grpc", "application/grpc+proto", "text/plain", None],
    "grpc-accept-encoding": ["identity, deflate, gzip", "gzip", None],
    "grpc-encoding": [None, None, "identity", "gzip", "snappy"],
    "grpc-timeout": [None, None, "100S", "2H", "soon"],
    "user-agent": ["a client", "another client", None],
    "x-note": [None, "one", "two", "v" * 17_000],
}
HEADS = st.tuples(
    st.sampled_from([INFER, INFER, INFER + "X", ECHO]),
    st.sampled_from(["POST", "POST", "POST", "GET"]),
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FIELDS.items()}),
    st.permutations(sorted(FIELDS)),
)


def call_with(lanes, peer, head):
    """The outcome of such a call: its response, and what the owner of a call that is not native sees of it."""
    path, method, fields, order = head
    stream = peer.h2.get_next_available_stream_id()
    headers = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "test")]
    peer.h2.send_headers(stream, headers + [(name, fields[name]) for name in order if fields[name] is not None])
    answer = peer.answers[stream] = Answer()
    del lanes.calls[:]
    peer.send(stream, framed(lanes.request(bytes(2000), "id")), end=True)
    peer.pump()
    lanes.settle()
    seen = [(call.path, call.metadata, call.timeout_ns) for call in lanes.calls]
    for call in lanes.calls:
        call.set_compression("")
        call.send_message(bytes(2000))
        call.end(0)
    peer.pump()
    return answer.headers, answer.trailers, answer.reset, bytes(answer.data), seen


@settings(deadline=None, max_examples=20)
@given(st.lists(HEADS, min_size=2, max_size=6))
def test_headers_say_the_same_whatever_the_calls_before_have_said(heads):
    lanes = Lanes(native_level=6)
    peer = connected(lanes.endpoint)
    try:
        for head in heads:
            fresh = connected(lanes.endpoint)
            assert call_with(lanes, peer, head) == call_with(lanes, fresh, head)
            fresh.close()
        (started, _) = lanes.endpoint.calls()[INFER]
        assert started == 2 * sum(path == INFER for path, *_ in heads)
    finally:
        peer.close()
        lanes.close()


def test_a_call_that_is_ended_while_its_headers_come_does_not_begin(echo):
    """A server that stops ends it between two parts of its headers: nobody hears of it, and nothing is charged."""
    peer = connected(echo.endpoint)
    stream = peer.open(ECHO)
    headers = peer.h2.data_to_send()
    peer.feed(headers[:-1])
    peer.connection.fail_calls("stopping")
    peer.feed(headers[-1:])
    assert echo.endpoint.held == 0, echo.endpoint.ledger
    peer.pump()
    assert not echo.calls
    assert (peer.answers[stream].status, peer.answers[stream].details) == (UNAVAILABLE, "stopping")
    peer.close()
