"""The driver and the soak test against a small identity server on grpc.aio, right and wrong on purpose."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

import grpc
import grpc.aio
import pytest

from inferd_client.driver import Driver, Fixed
from inferd_client.pb import grpc_service_pb2 as pb
from tests.bench.test_nonce import answer
from tests.storms.soak import Plan, drive, growth, theil_sen

Context: TypeAlias = "grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelInferResponse]"
Handler: TypeAlias = "Callable[[pb.ModelInferRequest, Context], Awaitable[pb.ModelInferResponse]]"


def fault_of(request: pb.ModelInferRequest) -> grpc.StatusCode | None:
    """The status of a request that is wrong on purpose."""
    if request.model_name == "nosuch":
        return grpc.StatusCode.NOT_FOUND
    first = request.inputs[0]
    if first.name == "NOSUCH" or first.datatype == "FP99" or wrong_size(request):
        return grpc.StatusCode.INVALID_ARGUMENT
    return None


def wrong_size(request: pb.ModelInferRequest) -> bool:
    sizes = {"BOOL": 1, "BF16": 2, "INT8": 1, "UINT8": 1}
    tensor = request.inputs[0]
    if not request.raw_input_contents:
        return False
    raw = request.raw_input_contents[0]
    elements = 1
    for dim in tensor.shape:
        elements *= dim
    if tensor.datatype != "BYTES":
        size = sizes.get(tensor.datatype) or int(tensor.datatype.lstrip("UINTFP")) // 8
        return len(raw) != elements * size
    offset = 0
    for _ in range(elements):
        offset += 4 + int.from_bytes(raw[offset : offset + 4], "little")
    return offset != len(raw)


async def infer(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
    code = fault_of(request)
    if code is not None:
        await context.abort(code, "wrong on purpose")
    return answer(request)


class CrossingServer:
    """Gives every hundredth answer to the next request instead."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: pb.ModelInferResponse | None = None

    async def infer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        response = await infer(request, context)
        self.count += 1
        kept, self.kept = self.kept, response if self.count % 100 == 0 else None
        return kept or response


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Serve a ModelInfer handler from a thread; the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[grpc.aio.Server] = []

    async def start(handler: Handler) -> int:
        method = grpc.unary_unary_rpc_method_handler(
            handler,
            request_deserializer=pb.ModelInferRequest.FromString,
            response_serializer=pb.ModelInferResponse.SerializeToString,
        )
        server = grpc.aio.server()
        service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method})
        server.add_generic_rpc_handlers((service,))
        servers.append(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return port

    def run(handler: Handler) -> str:
        return f"127.0.0.1:{asyncio.run_coroutine_threadsafe(start(handler), loop).result(60)}"

    yield run
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_right_server_passes(serve: Callable[[Handler], str]) -> None:
    report = drive(serve(infer), Plan(requests=2000, connections=2, cancel_fraction=0.0, deadline_fraction=0.0))
    assert report.wrong == {}, report.samples
    assert (report.requests, report.correct, report.lost, report.reset) == (2000, 2000, 0, 0)
    assert set(report.statuses) == {0, 3, 5}


def test_cancelled_calls_and_deadlines_are_accounted_for(serve: Callable[[Handler], str]) -> None:
    report = drive(serve(infer), Plan(requests=2000, connections=2, cancel_fraction=0.3, deadline_fraction=0.3))
    assert report.requests == report.answered + report.cancelled + report.reset + report.lost == 2000
    assert report.lost == 0
    assert report.cancelled > 100
    assert report.deadlines > 400


def test_crossed_answers_are_caught(serve: Callable[[Handler], str]) -> None:
    crossing = CrossingServer()
    report = drive(serve(crossing.infer), Plan(requests=2000, cancel_fraction=0.0, deadline_fraction=0.0))
    assert sum(report.wrong.values()) > 10
    assert report.samples


def test_an_open_loop_keeps_its_rate(serve: Callable[[Handler], str]) -> None:
    request = pb.ModelInferRequest(model_name="nosuch").SerializeToString()
    with Driver(serve(infer), connections=2) as driver:
        report = driver.run(Fixed([request]), in_flight=8, rate=200.0, seconds=1.0)
    assert report.statuses.keys() == {5}
    assert report.requests == pytest.approx(200, abs=5)


def test_a_server_that_goes_away_loses_calls() -> None:
    with pytest.raises(OSError, match="refused"):
        Driver("127.0.0.1:1")


def test_memory_growth_is_the_slope_of_the_last_two_thirds() -> None:
    flat = [(float(i), 1000 + (7 if i % 10 == 0 else 0)) for i in range(90)]
    rising = [(float(i), 10 * i) for i in range(90)]
    assert growth(flat) == 0
    assert growth(rising) == 590
    assert theil_sen(rising) == 10
    assert growth(rising[:10]) is None
