"""Guards the delays that test suites of Triton's clients ask for: where a call waits, and which calls do."""

import asyncio

import grpc
import pytest

from inferd.server.rpc.delays import DelayError, Delays
from inferd.server.rpc.service import Method
from tests.conformance import doors
from tests.conformance.client import Stub, floats, output, pb, request
from tests.waiting import wait_until

HOUR = str(3600 * 1000)
TIMED_OUT = grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.fixture(params=doors.NAMES)
def serving(request, repository, monkeypatch):
    """Starts a server with variables, and gives the stub of a channel to it."""
    opened = []

    def start(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        running = doors.running_server(request.param, repository)
        address = running.__enter__().address
        channel = grpc.insecure_channel(address)
        opened.extend((running, channel))
        return Stub(channel)

    yield start
    running, channel = opened
    channel.close()
    running.__exit__(None, None, None)


def inferences(stub):
    return stub.ModelStatistics(pb.ModelStatisticsRequest(name="simple")).model_stats[0].inference_count


def times_out(call, message):
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=1.5)
    return caught.value.code() is TIMED_OUT


def test_calls_but_inference_are_answered_later(serving):
    stub = serving(TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC="3600")
    assert times_out(stub.ServerMetadata, pb.ServerMetadataRequest())
    assert times_out(stub.ModelMetadata, pb.ModelMetadataRequest(name="nobody"))
    assert output(stub.ModelInfer(request("simple", floats(7)))).item() == 7


def test_a_request_waits_before_it_is_queued(serving):
    stub = serving(TRITONSERVER_DELAY_GRPC_PROCESS=HOUR)
    assert times_out(stub.ModelInfer, request("simple", floats(7)))
    assert inferences(stub) == 0


def test_an_answer_waits_after_the_execution(serving):
    stub = serving(TRITONSERVER_DELAY_RESPONSE_COMPLETION=HOUR)
    call = stub.ModelInfer.future(request("simple", floats(7)))
    stream = stub.ModelStreamInfer(iter([request("simple", floats(7))]))
    wait_until(lambda: inferences(stub) >= 2)
    with pytest.raises(grpc.FutureTimeoutError):
        call.result(0.5)
    assert not stream.done()
    for waiting in (call, stream):
        waiting.cancel()


@pytest.mark.parametrize("delay_ms", ["50", HOUR])
async def test_a_cancellation_is_noticed_later(delay_ms):
    began, ended = asyncio.Event(), asyncio.Event()

    async def handler(_request, _call):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    method = Method("ModelInfer", None, None, False, False, handler)
    [delayed] = Delays.of({"TRITONSERVER_DELAY_GRPC_NOTIFICATION": delay_ms}).applied([method])
    call = asyncio.ensure_future(delayed.handler(b"", None))
    await began.wait()
    call.cancel()
    if delay_ms == HOUR:
        for _ in range(30):
            await asyncio.sleep(0)
        assert not ended.is_set()
        call.cancel()  # the wait for that hour
        await asyncio.wait([call])
        return
    await ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_a_value_that_is_no_number_is_named():
    with pytest.raises(DelayError, match="TRITONSERVER_DELAY_GRPC_PROCESS is '5s': a whole number"):
        Delays.of({"TRITONSERVER_DELAY_GRPC_PROCESS": "5s"})
