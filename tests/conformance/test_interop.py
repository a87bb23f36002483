"""gRPC's interop cases against both doors, with gRPC's C core and with grpc-js as clients.

What each case does is written in https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md; the names
are from there.
"""

from __future__ import annotations

import json
import queue
import subprocess

import grpc
import pytest

from tests.conformance.interop import INITIAL, PROTO, SERVICE, TRAILING, pb
from tests.conformance.test_grpc_js import FOLDER, node  # noqa: F401 - a fixture

REQUEST_SIZES = (27182, 8, 1828, 45904)
RESPONSE_SIZES = (31415, 9, 2653, 58979)
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"


class TestService:
    """The methods, for this client."""

    __test__ = False

    def __init__(self, channel, service=SERVICE):
        def method(kind, name, request, response):
            return kind(f"/{service}/{name}", request.SerializeToString, response.FromString)

        self.empty = method(channel.unary_unary, "EmptyCall", pb.Empty, pb.Empty)
        self.unary = method(channel.unary_unary, "UnaryCall", pb.SimpleRequest, pb.SimpleResponse)
        self.output = method(
            channel.unary_stream, "StreamingOutputCall", pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse
        )
        self.input = method(
            channel.stream_unary, "StreamingInputCall", pb.StreamingInputCallRequest, pb.StreamingInputCallResponse
        )
        self.duplex = method(
            channel.stream_stream, "FullDuplexCall", pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse
        )
        self.unimplemented = method(channel.unary_unary, "UnimplementedCall", pb.Empty, pb.Empty)


@pytest.fixture
def service(hosted, channel):
    return TestService(channel)


def payload(size):
    return pb.Payload(body=bytes(size))


def wanted(*sizes, interval_us=0, **fields):
    parameters = [pb.ResponseParameters(size=size, interval_us=interval_us) for size in sizes]
    return pb.StreamingOutputCallRequest(response_parameters=parameters, **fields)


def sizes(responses):
    return [len(response.payload.body) for response in responses]


class Pings:
    """Requests of a stream, sent when they are asked for."""

    def __init__(self):
        self._queue = queue.SimpleQueue()

    def send(self, request):
        self._queue.put(request)

    def __iter__(self):
        return iter(self._queue.get, None)


def test_empty_unary(service):
    assert service.empty(pb.Empty()) == pb.Empty()


def test_large_unary(service):
    response = service.unary(pb.SimpleRequest(response_size=314159, payload=payload(271828)))
    assert response.payload.body == bytes(314159)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_client_compressed_unary(service, compression):
    request = pb.SimpleRequest(response_size=314159, payload=payload(271828))
    assert service.unary(request, compression=compression).payload.body == bytes(314159)
    assert service.unary(request).payload.body == bytes(314159)


@pytest.mark.parametrize("compressed", [True, False])
def test_server_compressed_unary(service, compressed):
    asked = pb.SimpleRequest(response_size=314159, payload=payload(271828))
    asked.response_compressed.value = compressed
    response, call = service.unary.with_call(asked)
    assert response.payload.body == bytes(314159)
    assert dict(call.initial_metadata()).get("grpc-encoding", "identity") in ("gzip", "identity")


def test_client_streaming(service):
    requests = (pb.StreamingInputCallRequest(payload=payload(size)) for size in REQUEST_SIZES)
    assert service.input(requests).aggregated_payload_size == sum(REQUEST_SIZES)


def test_client_compressed_streaming(service):
    requests = (pb.StreamingInputCallRequest(payload=payload(size)) for size in REQUEST_SIZES)
    answer = service.input(requests, compression=grpc.Compression.Gzip)
    assert answer.aggregated_payload_size == sum(REQUEST_SIZES)


def test_server_streaming(service):
    assert sizes(service.output(wanted(*RESPONSE_SIZES))) == list(RESPONSE_SIZES)


def test_server_compressed_streaming(service):
    request = wanted(*RESPONSE_SIZES)
    for position, parameters in enumerate(request.response_parameters):
        parameters.compressed.value = position % 2 == 0
    assert sizes(service.output(request)) == list(RESPONSE_SIZES)


def test_ping_pong(service):
    pings = Pings()
    responses = service.duplex(iter(pings))
    for asked, sent in zip(RESPONSE_SIZES, REQUEST_SIZES, strict=True):
        pings.send(wanted(asked, payload=payload(sent)))
        assert len(next(responses).payload.body) == asked
    pings.send(None)
    assert list(responses) == []
    assert responses.code() is grpc.StatusCode.OK


def test_empty_stream(service):
    responses = service.duplex(iter(()))
    assert list(responses) == []
    assert responses.code() is grpc.StatusCode.OK


def test_cancel_after_begin(service):
    call = service.input.future(iter(Pings()))
    call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED


def test_cancel_after_first_response(service):
    pings = Pings()
    responses = service.duplex(iter(pings))
    pings.send(wanted(31415, payload=payload(27182)))
    assert len(next(responses).payload.body) == 31415
    responses.cancel()
    assert responses.code() is grpc.StatusCode.CANCELLED


def test_timeout_on_sleeping_server(service):
    pings = Pings()
    responses = service.duplex(iter(pings), timeout=0.001)
    pings.send(wanted(31415, interval_us=2_000_000, payload=payload(27182)))
    with pytest.raises(grpc.RpcError):
        next(responses)
    assert responses.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_custom_metadata(service):
    metadata = ((INITIAL, "test_initial_metadata_value"), (TRAILING, b"\xab\xab\xab"))
    _, unary = service.unary.with_call(
        pb.SimpleRequest(response_size=314159, payload=payload(271828)), metadata=metadata
    )
    duplex = service.duplex(iter([wanted(314159, payload=payload(271828))]), metadata=metadata)
    assert sizes(duplex) == [314159]
    for call in (unary, duplex):
        assert dict(call.initial_metadata())[INITIAL] == "test_initial_metadata_value"
        assert dict(call.trailing_metadata())[TRAILING] == b"\xab\xab\xab"


@pytest.mark.parametrize("text", ["test status message", SPECIAL], ids=["status_code_and_message", "special"])
def test_status_code_and_message(service, text):
    """Also special_status_message."""
    status = pb.EchoStatus(code=2, message=text)
    with pytest.raises(grpc.RpcError) as error:
        service.unary(pb.SimpleRequest(response_status=status))
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNKNOWN, text)
    call = service.duplex(iter([wanted(response_status=status)]))
    with pytest.raises(grpc.RpcError):
        next(call)
    assert (call.code(), call.details()) == (grpc.StatusCode.UNKNOWN, text)


@pytest.mark.parametrize("name", [SERVICE, "grpc.testing.UnimplementedService"], ids=["method", "service"])
def test_unimplemented(hosted, channel, name):
    with pytest.raises(grpc.RpcError) as error:
        TestService(channel, name).unimplemented(pb.Empty())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_grpc_js(node, hosted):  # noqa: F811 - the fixture
    """The same cases from Node.js; each tells "ok" or what it found."""
    command = [node, FOLDER / "interop.js", hosted, PROTO]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert len(report) == 17
    assert set(report.values()) == {"ok"}, report
