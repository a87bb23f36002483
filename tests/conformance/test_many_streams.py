"""Guards how many calls one connection may have open: a process in which many threads share one, and the option."""

import asyncio

import grpc
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors

CONFIG = """
backend: "identity"
input { name: "x" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }
"""
STREAMS = 300  # more than HTTP/2 libraries allow by themselves
PATIENCE = 120


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(CONFIG)
    return root


SERVICE = "/inference.GRPCInferenceService/"


def stream(channel):
    method = channel.stream_stream(
        SERVICE + "ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    return method(timeout=PATIENCE)


def live(channel):
    method = channel.unary_unary(
        SERVICE + "ServerLive",
        request_serializer=pb.ServerLiveRequest.SerializeToString,
        response_deserializer=pb.ServerLiveResponse.FromString,
    )
    return method(pb.ServerLiveRequest())


def request(number):
    message = pb.ModelInferRequest(model_name="m", id=str(number), raw_input_contents=[number.to_bytes(8, "little")])
    message.inputs.add(name="x", datatype="INT64", shape=[1])
    return message


async def answered_beside_each_other(address, count):
    """How many of so many streams of one connection have an answer while all of them are open."""
    async with grpc.aio.insecure_channel(address) as channel:
        calls = [stream(channel) for _ in range(count)]

        async def first(number, call):
            await call.write(request(number))
            answer = await call.read()
            return answer is not grpc.aio.EOF and answer.infer_response.id == str(number)

        try:
            found = await asyncio.gather(*map(first, range(count), calls), return_exceptions=True)
        finally:
            for call in calls:
                call.cancel()
        return sum(each is True for each in found)


async def test_hundreds_of_streams_share_a_connection(models):
    with doors.running_server("native", models) as process:
        assert await answered_beside_each_other(process.address, STREAMS) == STREAMS


async def test_the_number_of_streams_is_an_option(models):
    """What is beyond it waits in the client: 2 of 3 are answered, and the third when one has ended."""
    with doors.running_server("native", models, "--grpc-max-concurrent-streams", "2") as process:
        async with grpc.aio.insecure_channel(process.address) as channel:
            await live(channel)  # the client has seen the number
            calls = [stream(channel) for _ in range(3)]
            for number, call in enumerate(calls[:2]):
                await call.write(request(number))
                assert (await call.read()).infer_response.id == str(number)
            third = asyncio.ensure_future(calls[2].write(request(2)))
            answer = asyncio.ensure_future(calls[2].read())
            await calls[0].done_writing()
            assert await calls[0].read() is grpc.aio.EOF
            await third
            assert (await answer).infer_response.id == "2"
            calls[1].cancel()
            calls[2].cancel()
