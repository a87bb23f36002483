"""Streams of inferd_client whose other side is slower: what is not read does not pile up, on either way."""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
from concurrent import futures

import grpc
import numpy as np
import pytest

import inferd_client.grpc as grpcclient
import inferd_client.grpc.aio as aioclient
from inferd_client.grpc import service_pb2 as pb
from inferd_client.grpc import service_pb2_grpc

SIZE = 1 << 18
"""Elements of a message's tensor: 1 MiB."""
MESSAGES = 150
SOME = 60
"""More than two windows have, and less than half of all."""
PATIENCE = 60


class Slow(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server that streams responses, and counts them; it reads requests when it is told to."""

    def __init__(self) -> None:
        self.sent = 0
        self.reads = threading.Event()
        self.read: list[int] = []
        self.wrong: list[int] = []
        self.cancelled = threading.Event()

    def ServerLive(self, request, context):  # noqa: N802 - the protocol's name
        return pb.ServerLiveResponse(live=True)

    def ModelStreamInfer(self, requests, context):  # noqa: N802
        first = next(requests)
        if first.model_name == "sink":
            self.reads.wait(PATIENCE)
            for each in (first, *requests):
                self.read.append(int(each.id))
                for data in each.raw_input_contents:
                    if (np.frombuffer(data, np.float32) != int(each.id)).any():
                        self.wrong.append(int(each.id))
            yield response(len(self.read), 1)
            return
        context.add_callback(self.cancelled.set)
        for i in range(MESSAGES):
            self.sent += 1
            yield response(i, SIZE)


def response(number, size):
    response = pb.ModelStreamInferResponse()
    response.infer_response.id = str(number)
    response.infer_response.outputs.add(name="OUT", datatype="FP32", shape=[size])
    response.infer_response.raw_output_contents.append(np.full(size, number, np.float32).tobytes())
    return response


def right(result, number):
    tensor = result.as_numpy("OUT")
    return result.id == str(number) and tensor.size == SIZE and (tensor == number).all()


@pytest.fixture
def slow():
    servicer = Slow()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    servicer.reads.set()
    server.stop(None)


def request(size=1, number=0):
    content = np.full(size, number, np.float32)
    return [grpcclient.InferInput("IN", [size], "FP32").set_data_from_numpy(content)]


def test_grpcio_itself_with_the_messages_and_stubs(slow):
    """Guards service_pb2 and service_pb2_grpc: a channel of grpcio, both sides; what the server has not is refused."""
    with grpc.insecure_channel(slow.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        slow.reads.set()
        sent = [pb.ModelInferRequest(model_name="sink", id=str(i)) for i in range(3)]
        assert [each.infer_response.id for each in stub.ModelStreamInfer(iter(sent))] == ["3"]
        with pytest.raises(grpc.RpcError) as raised:
            stub.ServerReady(pb.ServerReadyRequest())
        assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_responses_that_a_coroutine_does_not_read_stay_with_the_server(slow):
    """Guards flow control of one stream: it stops, other calls of the connection go on, and all of it comes."""

    async def requests():
        yield {"model_name": "source", "inputs": request()}

    async with aioclient.InferenceServerClient(slow.address) as client:
        responses = client.stream_infer(requests())
        assert right((await anext(responses))[0], 0)
        before, still = -1, 0
        while still < 30:  # it has stopped when it is where it was, for as many calls
            assert await client.is_server_live()
            still = still + 1 if slow.sent == before else 0
            before = slow.sent
        assert slow.sent < SOME
        number = 0
        async for result, error in responses:
            number += 1
            assert error is None
            assert right(result, number)
        assert number == MESSAGES - 1


def test_responses_for_a_callback_that_does_not_return_stay_with_the_server(slow):
    """Guards the same of callbacks, while another thread reads from the connection."""
    goes_on, wrong, count = threading.Event(), [], [0]
    done = threading.Event()

    def told(result, error):
        goes_on.wait(PATIENCE)
        if error is not None or not right(result, count[0]):
            wrong.append(error or count[0])
        count[0] += 1
        if count[0] == MESSAGES:
            done.set()

    with grpcclient.InferenceServerClient(slow.address) as client:
        client.start_stream(told)
        client.async_stream_infer("source", request())
        before, still = -1, 0
        while still < 30 or not slow.sent:
            assert client.is_server_live()
            still = still + 1 if slow.sent == before else 0
            before = slow.sent
        assert slow.sent < SOME
        goes_on.set()
        assert done.wait(PATIENCE)
    assert not wrong


def test_a_callback_that_raises_hears_of_the_next_responses(slow, monkeypatch):
    """The stream can be stopped, and the exception is shown as that of a thread."""
    heard, shown = [], []
    monkeypatch.setattr(sys, "excepthook", lambda *raised: shown.append(raised[0]))

    def told(result, error):
        heard.append(error or result.id)
        raise ZeroDivisionError

    with grpcclient.InferenceServerClient(slow.address) as client:
        client.start_stream(told)
        client.async_stream_infer("source", request())
        client.stop_stream()
    assert heard == [str(number) for number in range(MESSAGES)]
    assert shown == [ZeroDivisionError] * MESSAGES


async def test_requests_that_a_server_does_not_read_are_not_asked_for(slow):
    """Guards the other way: the iterator of requests waits for the server, and all of them come, in order."""
    asked = 0

    async def requests():
        nonlocal asked
        for i in range(MESSAGES):
            asked += 1
            yield {"model_name": "sink", "inputs": request(SIZE, i), "request_id": str(i)}

    async with aioclient.InferenceServerClient(slow.address) as client:
        responses = client.stream_infer(requests())
        waits = asyncio.ensure_future(anext(responses))
        before, still = -1, 0
        while still < 30 or not asked:
            assert await client.is_server_live()
            still = still + 1 if asked == before else 0
            before = asked
        assert asked < SOME
        slow.reads.set()
        result, error = await asyncio.wait_for(waits, PATIENCE)
        assert error is None
        assert result.id == str(MESSAGES)
        assert slow.read == list(range(MESSAGES))
        assert not slow.wrong


def test_threads_send_requests_that_a_server_does_not_read(slow):
    """Guards that the tensors of all requests stay until they are sent, whoever sends at the same time."""
    threads, each = 4, 60

    def send(first):
        for number in range(first, first + each):
            client.async_stream_infer("sink", request(1 << 14, number), request_id=str(number))

    responses = queue.Queue()
    with grpcclient.InferenceServerClient(slow.address) as client:
        client.start_stream(lambda result, error: responses.put(error or result.id))
        with futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(send, range(0, threads * each, each)))
        slow.reads.set()
        client.stop_stream()
    assert responses.get(timeout=PATIENCE) == str(threads * each)
    assert sorted(slow.read) == list(range(threads * each))
    assert not slow.wrong


def test_requests_that_wait_are_not_moved_for_each_further_one():
    """Guards time and memory of a stream whose server reads nothing: the time would grow with the square."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        grpcclient.InferenceServerClient(f"127.0.0.1:{silent.getsockname()[1]}") as client,
    ):
        ended = queue.Queue()
        client.start_stream(lambda result, error: ended.put(error.status()))
        for _ in range(200_000):
            client.async_stream_infer("sink", [])
        client.stop_stream(cancel_requests=True)
        assert ended.get(timeout=PATIENCE) == "StatusCode.CANCELLED"


async def test_a_stream_ends_when_nobody_has_its_iterator(slow):
    """Guards against streams that a coroutine has left by `break`, and that the server would go on with."""
    asking = asyncio.Event()

    async def requests():
        try:
            yield {"model_name": "source", "inputs": request()}
            await asyncio.Event().wait()
        finally:
            asking.set()

    async with aioclient.InferenceServerClient(slow.address) as client:
        async for result, _ in client.stream_infer(requests()):
            assert right(result, 0)
            break
        assert await asyncio.to_thread(slow.cancelled.wait, PATIENCE)
        await asyncio.wait_for(asking.wait(), PATIENCE)
        assert slow.sent < MESSAGES
        assert await client.is_server_live()
