"""gRPC over HTTP/2, frame by frame (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md)."""

from __future__ import annotations

import json
import time
import uuid

import h2.settings
import pytest

from tests.conformance import generic
from tests.conformance.client import floats, request
from tests.conformance.raw import Answer, Client, framed
from tests.waiting import look_until, wait_until

ECHO = f"/{generic.GENERIC}/Echo"
CHAT = f"/{generic.GENERIC}/Chat"
HANG = f"/{generic.GENERIC}/Hang"
COUNT = f"/{generic.GENERIC}/Count"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"

OK, CANCELLED, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL = 0, 1, 4, 12, 13


@pytest.fixture
def raw(server):
    with Client(server) as client:
        yield client


def infer(**arguments):
    return request("simple", floats(1, 2, 3), **arguments).SerializeToString()


def events(address, key, expected):
    """Wait until the generic servicer has recorded `expected`; through a connection of its own."""
    with Client(address) as other:
        look_until(
            lambda: json.loads(other.call(f"/{generic.GENERIC}/Events", key.encode()).messages[0]),
            lambda found: expected in found,
        )


def assert_alive(raw):
    """The connection and the server live on."""
    answer = raw.call(INFER, infer(id="alive"))
    assert (answer.headers[":status"], answer.status) == ("200", OK)
    assert b"alive" in answer.messages[0]


def assert_refused(raw, door, stream):
    """The native door answers a broken call with a status. C core leaves some open until the client gives up."""
    if door != "native":
        raw.reset(stream)
    else:
        answer = raw.answer(stream)
        assert answer.headers[":status"] == "200"
        assert answer.status not in (None, OK)
        assert answer.details
    assert_alive(raw)


# ---- the answer ----


@pytest.mark.parametrize(("path", "message"), [(ECHO, b"text"), (INFER, infer())])
def test_answer_of_a_unary_call(raw, path, message):
    answer = raw.call(path, message)
    assert answer.headers[":status"] == "200"
    assert answer.headers["content-type"].startswith("application/grpc")
    assert "grpc-status" not in answer.headers
    assert answer.trailers["grpc-status"] == "0"
    assert len(answer.messages) == 1


@pytest.mark.parametrize("path", [INFER, f"/{generic.GENERIC}/Abort"])
def test_answer_of_trailers_only(raw, path):
    message = request("nothing").SerializeToString() if path == INFER else b'{"code": 5, "details": "no"}'
    answer = raw.call(path, message)
    assert answer.status == 5
    assert answer.data == b""
    assert answer.headers[":status"] == "200"
    assert answer.headers["content-type"].startswith("application/grpc")


def test_details_are_percent_encoded(raw, hosted):
    answer = raw.call(f"/{generic.GENERIC}/Abort", json.dumps({"code": 5, "details": "a%b\n☺ ~é"}).encode())
    assert answer.details.upper() == "A%25B%0A%E2%98%BA ~%C3%A9".upper()


def test_details_of_a_native_error_are_percent_encoded(raw):
    answer = raw.call(INFER, request("é%\n").SerializeToString())
    assert "'%C3%A9%25%0A'" in answer.details


def test_a_path_that_nobody_serves_is_unimplemented(raw):
    for path in ("/inference.GRPCInferenceService/Nothing", "/Nothing/ModelInfer", "/", "/ModelInfer"):
        answer = raw.call(path)
        assert (answer.headers[":status"], answer.status) == ("200", UNIMPLEMENTED)
        assert answer.details
    assert_alive(raw)


# ---- wrong calls ----


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_content_types_of_grpc(raw, content_type):
    assert raw.call(INFER, infer(), content_type=content_type).status == OK


@pytest.mark.parametrize("path", [ECHO, INFER])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/grpcx", ""])
def test_other_content_types(raw, door, path, content_type):
    message = infer()
    answer = raw.call(path, message, content_type=content_type)
    if door == "native":
        assert answer.headers[":status"] == "415"
        assert answer.status not in (None, OK)
    # C core serves them
    assert_alive(raw)


@pytest.mark.parametrize("path", [ECHO, INFER])
def test_no_content_type(raw, door, path):
    stream = raw.headers(path, without=("content-type",))
    raw.data(stream, framed(infer()), end=True)
    answer = raw.answer(stream)
    if door == "native":
        assert answer.headers[":status"] == "415"
    assert_alive(raw)


@pytest.mark.parametrize("path", [ECHO, INFER])
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_requests_that_are_no_post_are_refused(raw, door, path, method):
    answer = raw.call(path, infer(), pseudo_method=method)
    assert answer.status != OK
    if door == "native":
        assert answer.headers[":status"] == "405"
    assert_alive(raw)


@pytest.mark.parametrize("path", [ECHO, INFER])
@pytest.mark.parametrize("te", [None, "gzip"])
def test_te_must_say_trailers(raw, door, path, te):
    stream = raw.headers(path, without=("te",) if te is None else (), **({} if te is None else {"te": te}))
    raw.data(stream, framed(infer()), end=True)
    answer = raw.answer(stream)
    if door == "target":
        assert answer.reset is not None or answer.status != OK
        return
    if te is not None and door == "native":  # malformed by RFC 9113 section 8.2.2, whatever gRPC says
        assert answer.reset == 1  # PROTOCOL_ERROR
        assert_alive(raw)
        return
    if te is None and door == "grpcio":  # for C core it is an error of the stream, too
        assert answer.reset is not None
        return
    assert answer.status == INTERNAL
    if door == "native":  # C core refuses the next call on the connection too
        assert "trailers" in answer.details
        assert_alive(raw)


@pytest.mark.parametrize("path", [ECHO, INFER])
@pytest.mark.parametrize("timeout", ["", "1", "S", "1x", "-1S", "123456789S", "1.5S"])
def test_a_timeout_that_cannot_be_read_is_refused(raw, door, path, timeout):
    answer = raw.call(path, infer(), grpc_timeout=timeout)
    if door == "native":
        assert answer.status == INTERNAL
        assert "grpc-timeout" in answer.details
    # C core ignores what it cannot read
    assert_alive(raw)


@pytest.mark.parametrize("timeout", ["1H", "99999999H", "5M", "60S", "60000m", "60000000u", "99999999n"])
def test_good_timeouts(raw, timeout):
    """The longest time in nanoseconds is a tenth of a second, which may pass: the server has read it then, too."""
    answer = raw.call(INFER, infer(), grpc_timeout=timeout)
    if timeout.endswith("n") and answer.status != OK:
        assert answer.reset is not None or answer.status in (CANCELLED, DEADLINE_EXCEEDED)
        return
    assert answer.status == OK


@pytest.mark.parametrize("path", [ECHO, INFER, STREAM])
def test_an_encoding_that_is_not_known_is_refused_with_those_that_are(raw, door, path):
    answer = raw.call(path, infer(), grpc_encoding="snappy")
    if door == "native":
        assert answer.status == UNIMPLEMENTED
        assert answer.headers["grpc-accept-encoding"] == "identity, deflate, gzip"
    else:
        assert answer.status in (UNIMPLEMENTED, INTERNAL)  # the latter is C core's choice
    assert_alive(raw)


@pytest.mark.parametrize("path", [ECHO, INFER, CHAT])
def test_compressed_flag_without_an_encoding(raw, door, path):
    stream = raw.headers(path)
    raw.data(stream, framed(infer(), compressed=1), end=True)
    assert_refused(raw, door, stream)


@pytest.mark.parametrize("path", [ECHO, INFER])
def test_unary_call_without_a_message(raw, door, path):
    assert_refused(raw, door, raw.headers(path, end=True))


@pytest.mark.parametrize("path", [ECHO, INFER])
def test_unary_call_with_two_messages(raw, door, path):
    stream = raw.headers(path)
    raw.data(stream, framed(infer()) * 2, end=True)
    assert_refused(raw, door, stream)


@pytest.mark.parametrize("path", [ECHO, INFER, CHAT, STREAM])
@pytest.mark.parametrize("cut", [1, 4, 5, 9])
def test_call_that_ends_inside_a_message(raw, door, path, cut):
    stream = raw.headers(path)
    raw.data(stream, framed(infer())[:cut], end=True)
    assert_refused(raw, door, stream)


# ---- messages cut and joined anywhere ----


def test_frames_that_arrive_byte_by_byte(raw):
    """Every byte of HTTP/2 itself comes alone."""
    stream = raw.h2.get_next_available_stream_id()
    message = infer()
    raw.h2.send_headers(
        stream,
        [(":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "x"), ("te", "trailers"),
         ("content-type", "application/grpc")],
    )  # fmt: skip
    raw.h2.send_data(stream, framed(message), end_stream=True)
    raw.answers[stream] = Answer()
    for byte in raw.h2.data_to_send():
        raw.socket.sendall(bytes([byte]))
    assert raw.answer(stream).messages == raw.call(INFER, message).messages


def test_several_messages_in_one_frame(raw, hosted):
    stream = raw.headers(CHAT)
    messages = [b"", b"a", b"b" * 300, b"c"]
    raw.data(stream, b"".join(map(framed, messages)), end=True)
    assert raw.answer(stream).messages == messages


def test_messages_joined_and_split_in_a_stream(raw):
    body = framed(infer(id="one")) + framed(infer(id="two")) + framed(infer(id="three"))
    for step in (1, 7, len(body) // 2):
        stream = raw.headers(STREAM)
        for start in range(0, len(body), step):
            raw.data(stream, body[start : start + step])
        raw.end(stream)
        answer = raw.answer(stream)
        assert answer.status == OK
        assert len(answer.messages) == 3


def test_padded_and_empty_frames(raw, door):
    if door == "grpcio":
        pytest.skip("C core takes padding for a protocol error")
    stream = raw.headers(INFER)
    body = framed(infer())
    raw.data(stream, b"", pad=10)
    raw.data(stream, body[:9], pad=200)
    raw.data(stream, b"")
    raw.data(stream, body[9:], end=True, pad=0)
    assert raw.answer(stream).status == OK


def test_bytes_of_twenty_calls_may_come_in_turns(raw):
    streams = [raw.headers(INFER) for _ in range(20)]
    bodies = {stream: framed(infer(id=f"id {stream}")) for stream in streams}
    for position in range(max(map(len, bodies.values()))):
        for stream in streams:
            if position < len(bodies[stream]):
                raw.data(stream, bodies[stream][position : position + 1], end=position == len(bodies[stream]) - 1)
    for stream in streams:
        assert f"id {stream}".encode() in raw.answer(stream).messages[0]


# ---- flow control ----


@pytest.mark.parametrize("window", [1, 5, 100])
@pytest.mark.parametrize("path", [ECHO, INFER])
def test_a_response_fits_through_the_smallest_windows(raw, server, path, window):
    with Client(server, settings={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}) as raw:
        raw.h2.ping(b"settings")
        raw.flush()
        raw.receive_until(lambda: raw.pings == 1)
        answer = raw.call(path, infer())
        assert answer.status == OK
        assert len(answer.messages) == 1


@pytest.mark.parametrize("path", [ECHO, INFER])
def test_no_more_than_the_window_is_sent(raw, server, path):
    with Client(server, acknowledge_data=False) as raw:
        message = request("simple", floats(*range(100_000))).SerializeToString() if path == INFER else b"x" * 400_000
        stream = raw.headers(path)
        body = framed(message)
        while body:
            size = min(raw.h2.local_flow_control_window(stream), 16384, len(body))
            if size == 0:
                before = raw.h2.local_flow_control_window(stream)
                raw.receive_until(lambda before=before: raw.h2.local_flow_control_window(stream) > before)
                continue
            raw.data(stream, body[:size], end=size == len(body))
            body = body[size:]
        answer = raw.answers[stream]
        raw.receive_until(lambda: len(answer.data) >= 65535)
        assert len(answer.data) == 65535
        raw.h2.increment_flow_control_window(10_000_000)
        raw.h2.increment_flow_control_window(10_000_000, stream)
        raw.flush()
        assert raw.answer(stream).status == OK
        assert len(answer.messages[0]) >= 400_000


# ---- deadlines, resets, lost connections ----


@pytest.mark.parametrize("path", [HANG, INFER])
def test_server_ends_the_call_at_its_deadline(raw, door, path):
    """This client has no clock of its own."""
    message = request("hang", floats(1)).SerializeToString()
    started = time.monotonic()
    answer = raw.call(path, message, grpc_timeout="300m")
    assert time.monotonic() - started > 0.2
    if door == "native":
        assert answer.status == DEADLINE_EXCEEDED
    else:
        assert answer.reset is not None or answer.status in (DEADLINE_EXCEEDED, CANCELLED)
    assert_alive(raw)


def test_a_reset_cancels_the_handler(raw, hosted):
    key = uuid.uuid4().hex
    stream = raw.headers(HANG, key=key)
    raw.data(stream, framed(b""), end=True)
    events(hosted, key, "started")
    raw.reset(stream)
    events(hosted, key, "cancelled")
    assert_alive(raw)


def test_lost_connection_cancels(hosted):
    key = uuid.uuid4().hex
    with Client(hosted) as raw:
        stream = raw.headers(HANG, key=key)
        raw.data(stream, framed(b""), end=True)
        events(hosted, key, "started")
    events(hosted, key, "cancelled")


def test_reset_and_lost_connections_leave_nothing_behind(hosted, control):
    with Client(hosted) as raw:
        hang = framed(request("hang", floats(1)).SerializeToString())
        streams = [raw.headers(path) for path in (INFER, STREAM) for _ in range(10)]
        for stream in streams:
            raw.data(stream, hang)
            if stream % 4 == 1:
                raw.end(stream)
        for stream in streams[::2]:
            raw.reset(stream)
    wait_until(lambda: not control.live_requests())


def test_a_ping_is_answered_once(raw):
    raw.h2.ping(b"12345678")
    raw.flush()
    raw.receive_until(lambda: raw.pings)
    assert raw.pings == 1


def test_server_stream_ends_with_trailers(raw, hosted):
    answer = raw.call(COUNT, b"3")
    assert answer.messages == [b"0", b"1", b"2"]
    assert (answer.headers[":status"], answer.trailers["grpc-status"]) == ("200", "0")


def test_early_answer_stops_the_client(raw, hosted):
    """The server answers before the client has finished: it must say that it wants no more, or just end."""
    stream = raw.headers(f"/{generic.GENERIC}/ChatAbort")
    raw.data(stream, framed(b"one"))
    answer = raw.answer(stream)
    assert answer.messages == [b"one"]
    assert answer.status == 10
    assert_alive(raw)


def test_no_http2_at_all(server):
    with Client(server) as raw:
        raw.socket.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        raw.receive_until(lambda: False, timeout=60)
        assert raw.closed
    with Client(server) as raw:
        assert_alive(raw)
