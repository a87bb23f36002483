"""Bounds on the requests that the server holds, through real clients, on both doors; and the details of every error."""

from __future__ import annotations

import time
from collections import Counter

import grpc
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.conformance import doors, models
from tests.conformance.client import Stub, floats, request

MANY = 24
BUSY = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module", params=doors.NAMES)
def door(request):
    return request.param


def channel_of(door, folder, option):
    """A channel to a server with this limit."""
    models.write_repository(folder)
    with doors.running_server(door, folder, option) as process, grpc.insecure_channel(process.address) as channel:
        Stub(channel).ServerLive(pb.ServerLiveRequest())
        yield channel


@pytest.fixture(scope="module")
def short_queues(door, tmp_path_factory):
    yield from channel_of(door, tmp_path_factory.mktemp("models"), "--max-queued-requests-per-model=2")


@pytest.fixture(scope="module")
def small_house(door, tmp_path_factory):
    yield from channel_of(door, tmp_path_factory.mktemp("models"), "--max-inflight-requests=8")


def outcomes(stub, count=MANY):
    """`count` requests for the slow model at once; the codes, and the errors of those refused."""
    calls = [stub.ModelInfer.future(request("slow", floats(n), id=str(n))) for n in range(count)]
    codes = Counter(call.code() for call in calls)
    return codes, [call for call in calls if call.code() is not grpc.StatusCode.OK]


def test_what_exceeds_the_queue_of_a_model_is_refused_at_once(short_queues):
    stub = Stub(short_queues)
    codes, refused = outcomes(stub)
    assert set(codes) == {grpc.StatusCode.OK, BUSY}
    assert codes[grpc.StatusCode.OK] >= 2
    for error in refused:
        assert error.details().startswith("Exceeds maximum queue size: model 'slow' version 1 ")
        rich = richerrors.of(error)
        assert (rich.reason, rich.retry_seconds) == ("QUEUE_FULL", 0.1)
    # the other models are not touched, and this one takes requests again
    assert stub.ModelInfer(request("simple", floats(1))).model_name == "simple"
    assert stub.ModelInfer(request("slow", floats(1))).model_name == "slow"


def test_what_exceeds_the_house_is_refused_whatever_its_model(small_house):
    stub = Stub(small_house)
    for _ in range(20):
        slow = [stub.ModelInfer.future(request("slow", floats(n))) for n in range(8)]
        more = stub.ModelInfer.future(request("simple", floats(1)))
        assert stub.ServerReady(pb.ServerReadyRequest()).ready  # only inference is bounded
        assert [call.code() for call in slow] == [grpc.StatusCode.OK] * 8
        if more.code() is not grpc.StatusCode.OK:  # it is, where the slow ones were over before it came
            break
    assert more.code() is BUSY
    assert more.details().startswith("Exceeds maximum queue size: the server already holds 8 requests")
    assert richerrors.of(more).reason == "SERVER_FULL"
    for _ in range(10):  # nothing stays counted
        stub.ModelInfer(request("simple", floats(1)))


def test_cancelled_and_wrong_requests_leave_the_house(small_house):
    stub = Stub(small_house)
    for call in [stub.ModelInfer.future(request("slow", floats(n))) for n in range(4)]:
        call.cancel()
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(request("nope", floats(1)))
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(request("slow", floats(1)), timeout=0.001)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        codes, _ = outcomes(stub, 7)
        if codes == {grpc.StatusCode.OK: 7}:
            return
    pytest.fail(f"requests stay counted: {codes}")


def test_a_stream_is_told_inside_and_goes_on(short_queues):
    requests = [request("slow", floats(n), id=str(n)) for n in range(MANY)]
    answers = list(Stub(short_queues).ModelStreamInfer(iter(requests)))
    assert [answer.infer_response.id for answer in answers] == [str(n) for n in range(MANY)]
    texts = [answer.error_message for answer in answers]
    assert any(text.startswith("Exceeds maximum queue size") for text in texts)
    assert any(not text for text in texts)


def test_a_stream_that_asks_for_it_ends_with_the_rich_error(short_queues):
    requests = [request("slow", floats(n)) for n in range(MANY)]
    call = Stub(short_queues).ModelStreamInfer(iter(requests), metadata=(("triton_grpc_error", "true"),))
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    assert richerrors.of(error.value).reason == "QUEUE_FULL"


def test_every_error_is_rich(short_queues):
    stub = Stub(short_queues)
    cases = (
        (stub.ModelInfer, request("nope", floats(1)), "NOT_FOUND"),
        (stub.ModelInfer, request("simple", floats(1), version="x"), "INVALID_REQUEST"),
        (stub.ModelMetadata, pb.ModelMetadataRequest(name="nope"), "NOT_FOUND"),
        (stub.raw("ModelInfer"), b"\xff", "INTERNAL"),
        (stub.raw("ModelMetadata"), b"\xff", "INTERNAL"),
    )
    for method, message, reason in cases:
        with pytest.raises(grpc.RpcError) as error:
            method(message)
        assert richerrors.of(error.value).reason == reason
