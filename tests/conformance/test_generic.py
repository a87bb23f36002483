"""A servicer that uses all that gRPC offers to servicers: what every door must support, over both registrations."""

from __future__ import annotations

import base64
import json
import threading
import uuid

import grpc
import pytest

from tests.conformance import generic
from tests.waiting import at_rest, look_until

SPECIAL_MESSAGE = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈, 100 %\t\n"
ERROR_CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


class Client:
    """Calls the generic servicer with bytes, under one of its two names."""

    def __init__(self, channel, service):
        self._channel = channel
        self._service = service

    def __getattr__(self, name):
        return {
            "Concat": self._channel.stream_unary,
            "First": self._channel.stream_unary,
            "Count": self._channel.unary_stream,
            "Flood": self._channel.unary_stream,
            "HangA": self._channel.unary_stream,
            "Chat": self._channel.stream_stream,
        }.get(_kind(name), self._channel.unary_unary)(f"/{self._service}/{name}")

    def events(self, key, *, expected):
        """The events recorded under `key`, once they include `expected`."""
        return look_until(lambda: json.loads(self.Events(key.encode())), lambda events: expected in events)


def _kind(name):
    return next((kind for kind in ("Concat", "First", "Count", "Flood", "HangA", "Chat") if name.startswith(kind)), "")


@pytest.fixture(params=generic.SERVICES)
def client(request, hosted, channel):
    return Client(channel, request.param)


@pytest.fixture
def key():
    return uuid.uuid4().hex


def as_metadata(key):
    return (("key", key),)


def messages(*texts):
    return iter([text.encode() for text in texts])


# ---- unary ----


@pytest.mark.parametrize("name", ["Echo", "EchoSync"])
@pytest.mark.parametrize("size", [0, 1, 16_384, 65_535, 65_536, 1 << 22])
def test_a_unary_call_passes_messages_of_any_size(client, name, size):
    request = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert getattr(client, name)(request) == request


def test_unary_with_a_serializer_and_a_deserializer(client):
    assert client.EchoUpper(b"text") == b"TEXT!"


def test_many_calls_at_once(client):
    calls = [client.Echo.future(str(number).encode() * 100) for number in range(200)]
    assert [call.result(30) for call in calls] == [str(number).encode() * 100 for number in range(200)]


# ---- metadata ----


@pytest.mark.parametrize("name", ["Metadata", "MetadataSync"])
def test_metadata_both_ways(client, name):
    binary = bytes(range(256))
    sent = (("first", "one two"), ("second-bin", binary), ("first", "again"), ("empty", ""), ("empty-bin", b""))
    asked = {
        "initial": [["begun", "yes"], ["begun-bin", base64.b64encode(binary).decode()], ["begun", "twice"]],
        "trailing": [["over", "yes"], ["over-bin", base64.b64encode(binary).decode()], ["over", "twice"]],
    }
    response, call = getattr(client, name).with_call(json.dumps(asked).encode(), metadata=sent)

    received = [tuple(pair) for pair in json.loads(response)]
    for pair_key, value in sent:
        assert (pair_key, base64.b64encode(value).decode() if isinstance(value, bytes) else value) in received
    assert [value for pair_key, value in received if pair_key == "first"] == ["one two", "again"]

    initial = [tuple(pair) for pair in call.initial_metadata()]
    trailing = [tuple(pair) for pair in call.trailing_metadata()]
    assert [value for pair_key, value in initial if pair_key == "begun"] == ["yes", "twice"]
    assert ("begun-bin", binary) in initial
    assert [value for pair_key, value in trailing if pair_key == "over"] == ["yes", "twice"]
    assert ("over-bin", binary) in trailing


def test_servicers_see_no_transport_headers(client):
    received = dict(json.loads(client.Metadata(b"{}")))
    assert not [name for name in received if name.startswith((":", "grpc-")) or name in ("te", "content-type")]
    assert received["user-agent"].startswith("grpc-python/")


def test_metadata_of_a_stream(client):
    call = client.ChatReadWrite(messages("one"))
    assert ("chat", "begun") in [tuple(pair) for pair in call.initial_metadata()]
    assert list(call) == [b"one"]
    assert ("chat", "over") in [tuple(pair) for pair in call.trailing_metadata()]


def test_a_handler_sees_the_address_of_its_client(client):
    assert client.Peer(b"").startswith(b"ipv4:127.0.0.1:")


# ---- status ----


@pytest.mark.parametrize("name", ["Abort", "AbortSync"])
def test_abort_ends_the_call_with_every_status_and_unwinds_the_handler(client, name):
    for code in ERROR_CODES:
        key = uuid.uuid4().hex
        request = json.dumps({"code": code.value[0], "details": "what went wrong"}).encode()
        with pytest.raises(grpc.RpcError) as caught:
            getattr(client, name)(request, metadata=as_metadata(key))
        assert caught.value.code() is code
        assert caught.value.details() == "what went wrong"
        client.events(key, expected="unwound")


@pytest.mark.parametrize("details", ["", SPECIAL_MESSAGE, "%41 stays %41", "x" * 4000])
def test_details_arrive_unchanged(client, details):
    with pytest.raises(grpc.RpcError) as caught:
        client.Abort(json.dumps({"code": 5, "details": details}).encode())
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == details


def test_abort_with_trailing_metadata(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.Abort(json.dumps({"code": 5, "trailing": [["hint", "look elsewhere"]]}).encode())
    assert ("hint", "look elsewhere") in [tuple(pair) for pair in caught.value.trailing_metadata()]


def test_set_code_and_details(client):
    with pytest.raises(grpc.RpcError) as caught:
        client.Code(json.dumps({"code": 9, "details": "not in this state"}).encode())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == "not in this state"


def test_an_exception_ends_the_call_only(client, door):
    with pytest.raises(grpc.RpcError) as caught:
        client.Fail(b"")
    # grpc.aio decides this for servicers that do not guard themselves; ours all do
    expected = grpc.StatusCode.UNKNOWN if door == "grpcio" else grpc.StatusCode.INTERNAL
    assert caught.value.code() is expected
    if door != "grpcio":
        assert "secret" not in caught.value.details()
    assert client.Echo(b"alive") == b"alive"


@pytest.mark.parametrize("method", ["/conformance.Generic/Nothing", "/conformance.Nothing/Echo", "/x", "/a/b/c"])
def test_a_method_that_nobody_serves_is_unimplemented(hosted, channel, method):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details()


# ---- deadlines ----


def test_a_handler_sees_the_time_until_the_deadline_or_none(client):
    assert json.loads(client.TimeRemaining(b"")) is None
    assert 50 < json.loads(client.TimeRemaining(b"", timeout=60)) < 61  # clients round what they send


def test_deadline_cancels_the_handler(client, key):
    for seconds in (0.3, 3, 30):
        with pytest.raises(grpc.RpcError) as caught:
            client.Hang(b"", timeout=seconds, metadata=as_metadata(key))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if json.loads(client.Events(key.encode())):  # else it had passed before the handler was there
            break
    assert "cancelled" in client.events(key, expected="done")


# ---- cancellation ----


def test_a_unary_call_that_is_cancelled_is_done_for_its_handler(client, key):
    call = client.Hang.future(b"", metadata=as_metadata(key))
    client.events(key, expected="started")
    call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    assert "cancelled" in client.events(key, expected="done")


def test_done_callback_of_a_finished_call(client, key):
    assert client.Finish(b"", metadata=as_metadata(key)) == b"finished"
    client.events(key, expected="done")


def test_cancelled_server_stream(client, key):
    call = client.HangAfterFirst(b"", metadata=as_metadata(key))
    assert next(call) == b"first"
    call.cancel()
    client.events(key, expected="closed")


def test_closed_channel_cancels(hosted, client, key):
    with grpc.insecure_channel(hosted) as other:
        call = other.unary_unary(f"/{generic.GENERIC}/Hang").future(b"", metadata=as_metadata(key))
        client.events(key, expected="started")
    assert call.done()
    client.events(key, expected="cancelled")


# ---- client streams ----


@pytest.mark.parametrize("name", ["Concat", "ConcatSync", "ConcatRead"])
def test_a_handler_reads_all_messages_of_a_client_stream(client, name):
    assert getattr(client, name)(messages()) == b""
    assert getattr(client, name)(messages("a", "", "b", "c" * 100_000)) == b"ab" + b"c" * 100_000


def test_answer_before_the_client_is_done(client):
    sent = threading.Event()

    def endless():
        yield b"first"
        sent.wait(60)

    assert client.First(endless()) == b"first"
    sent.set()


# ---- server streams ----


@pytest.mark.parametrize("name", ["Count", "CountSync", "CountWrite"])
@pytest.mark.parametrize("number", [0, 1, 300])
def test_a_client_gets_all_messages_of_a_server_stream(client, name, number):
    assert list(getattr(client, name)(str(number).encode())) == [str(n).encode() for n in range(number)]


def test_abort_after_messages(client):
    call = client.CountThenAbort(b"3")
    received = []
    with pytest.raises(grpc.RpcError) as caught:
        for response in call:
            received.append(response)  # noqa: PERF402 - kept when the loop raises
    assert received == [b"0", b"1", b"2"]
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert caught.value.details() == "lost after the last one"


def test_a_client_that_does_not_read_holds_up_the_writer(client, key):
    call = client.Flood(b"", metadata=as_metadata(key))
    written = at_rest(lambda: client.events(key, expected="written").count("written"))
    assert written < generic.FLOOD / 2, "the transport takes more than flow control allows to send"
    assert sum(len(response) for response in call) == generic.FLOOD * generic.CHUNK


# ---- both ways ----


@pytest.mark.parametrize("name", ["Chat", "ChatSync", "ChatReadWrite"])
def test_a_handler_answers_each_message_of_a_bidirectional_stream(client, name):
    texts = ["one", "", "two" * 50_000, "three"]
    assert list(getattr(client, name)(messages(*texts))) == [text.encode() for text in texts]
    assert list(getattr(client, name)(messages())) == []


@pytest.mark.parametrize("name", ["Chat", "ChatSync", "ChatReadWrite"])
def test_ping_pong(client, name):
    """Each message is sent only after the answer to the one before."""
    answered = threading.Semaphore(1)

    def pings():
        for number in range(20):
            assert answered.acquire(timeout=60)
            yield str(number).encode()

    received = []
    for response in getattr(client, name)(pings()):
        received.append(response)
        answered.release()
    assert received == [str(number).encode() for number in range(20)]


def test_server_ends_the_chat_first(client):
    assert list(client.ChatUntilStop(messages("one", "stop", "never read"))) == [b"one"]


def test_abort_in_a_chat(client):
    call = client.ChatAbort(messages("one", "two"))
    assert next(call) == b"one"
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert caught.value.details() == "after the first answer"
