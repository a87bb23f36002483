"""Compressed requests and responses with real clients, and what a server must refuse."""

from __future__ import annotations

import asyncio
import gzip
import queue
import struct
import zlib

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from tests.conformance import doors, generic
from tests.conformance.client import Stub, request
from tests.conformance.raw import Client, framed

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 8, 12, 13
MIB = 1 << 20
LARGE = np.arange(150_000, dtype=np.float32).reshape(1, -1) // 100
SMALL = np.arange(6, dtype=np.float32).reshape(1, -1)
NOISE = np.random.default_rng(0).integers(0, 2**32, (1, 50_000), np.uint32).view(np.float32)
COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}
DECOMPRESS = {"gzip": gzip.decompress, "deflate": zlib.decompress}
algorithms = pytest.mark.parametrize("algorithm", COMPRESS)


def tensor(array):
    tensor = triton.InferInput("INPUT0", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


@pytest.fixture(scope="module")
def compressing(door, repository):
    """`host:port` of a real server that compresses its inference responses."""
    if door == "target":
        pytest.skip("needs a server with an option")
    with doors.running_server(door, repository, "--grpc-infer-response-compression-level=medium") as process:
        yield process.address


def assert_same(result, array):
    assert result.as_numpy("OUTPUT0").tobytes() == array.tobytes()


# ---- tritonclient ----


@algorithms
@pytest.mark.parametrize("array", [SMALL, LARGE, NOISE], ids=["small", "large", "noise"])
def test_compressed_requests_of_tritonclient_are_answered(server, algorithm, array):
    with triton.InferenceServerClient(server) as client:
        for _ in range(3):
            assert_same(client.infer("simple", [tensor(array)], compression_algorithm=algorithm), array)


@algorithms
def test_compressed_requests_of_the_asyncio_client_are_answered(server, algorithm):
    async def run():
        async with triton_aio.InferenceServerClient(server) as client:
            arrays = [SMALL, LARGE, SMALL, NOISE] * 5
            calls = (client.infer("simple", [tensor(array)], compression_algorithm=algorithm) for array in arrays)
            for array, result in zip(arrays, await asyncio.gather(*calls), strict=True):
                assert_same(result, array)

    asyncio.run(run())


@algorithms
def test_a_stream_of_compressed_messages_is_answered_in_order(server, algorithm):
    answers = queue.SimpleQueue()
    arrays = [SMALL, LARGE, SMALL, NOISE] * 5
    with triton.InferenceServerClient(server) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), compression_algorithm=algorithm)
        for number, array in enumerate(arrays):
            client.async_stream_infer("simple", [tensor(array)], request_id=str(number))
        for number, array in enumerate(arrays):
            result, error = answers.get(timeout=20)
            assert error is None
            assert result.get_response().id == str(number)
            assert_same(result, array)


@algorithms
def test_compressed_both_ways(compressing, algorithm):
    with triton.InferenceServerClient(compressing) as client:
        for array in (SMALL, LARGE, NOISE):
            assert_same(client.infer("simple", [tensor(array)], compression_algorithm=algorithm), array)


# ---- what travels ----


def call(raw, path, data, **headers):
    """The answer to a call with these bytes, sent as flow control allows."""
    stream = raw.headers(path, **headers)
    answer = raw.answers[stream]
    while data and not answer.ended:
        size = min(raw.h2.local_flow_control_window(stream), raw.h2.max_outbound_frame_size, len(data))
        if size:
            raw.data(stream, data[:size], end=size == len(data))
            data = data[size:]
        else:
            raw.receive_until(lambda: raw.h2.local_flow_control_window(stream) or answer.ended)
    return raw.answer(stream)


def packed(answer):
    """(marks, decompressed messages) of an answer."""
    encoding, data = answer.headers.get("grpc-encoding", "identity"), bytes(answer.data)
    marks, messages = [], []
    while data:
        mark, size = struct.unpack_from(">BI", data)
        message, data = data[5 : 5 + size], data[5 + size :]
        marks.append(mark)
        messages.append(DECOMPRESS[encoding](message) if mark else message)
    return marks, messages


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize(
    ("accept", "chosen"),
    [("identity, deflate, gzip", "gzip"), ("identity,deflate", "deflate"), ("identity", None), (None, None)],
)
def test_responses_in_what_the_client_takes(compressing, door, path, accept, chosen):
    headers = {"grpc_accept_encoding": accept} if accept else {}
    with Client(compressing) as raw:
        answer = call(raw, path, framed(request("simple", LARGE).SerializeToString()), **headers)
    assert answer.status == OK
    if door == "grpcio" and chosen:
        chosen = answer.headers["grpc-encoding"]  # C core has an order of its own
    assert answer.headers.get("grpc-encoding") == chosen
    marks, messages = packed(answer)
    assert marks == [int(chosen is not None)]
    assert LARGE.tobytes() in messages[0]


@pytest.mark.parametrize("array", [SMALL, NOISE], ids=["small", "noise"])
def test_responses_that_do_not_shrink(compressing, door, array):
    if door != "native":
        pytest.skip("C core compresses small messages too")
    with Client(compressing) as raw:
        answer = call(raw, INFER, framed(request("simple", array).SerializeToString()), grpc_accept_encoding="gzip")
    assert "grpc-encoding" not in answer.headers
    assert packed(answer)[0] == [0]


def test_only_inference_responses(compressing, door):
    if door != "native":
        pytest.skip("C core's level is for all responses")
    with Client(compressing) as raw:
        path = "/inference.GRPCInferenceService/RepositoryIndex"
        assert "grpc-encoding" not in raw.call(path, grpc_accept_encoding="gzip").headers


def test_no_compression_by_default(server, door):
    if door == "target":
        pytest.skip("depends on the server's options")
    with Client(server) as raw:
        answer = call(raw, INFER, framed(request("simple", LARGE).SerializeToString()), grpc_accept_encoding="gzip")
    assert "grpc-encoding" not in answer.headers
    assert packed(answer)[0] == [0]


@pytest.mark.parametrize("method", ["Compressed", "CompressedSync"])
def test_servicers_choose(hosted, door, method):
    """set_compression of a servicer's context."""
    with grpc.insecure_channel(hosted) as channel:
        assert channel.unary_unary(f"/{generic.GENERIC}/{method}")(b"x") == b"x" * 10_000
    with Client(hosted) as raw:
        answer = raw.call(f"/{generic.GENERIC}/{method}", b"x", grpc_accept_encoding="identity,gzip")
    assert packed(answer)[1] == [b"x" * 10_000]
    if door == "native":
        assert answer.headers["grpc-encoding"] == "gzip"
        assert packed(answer)[0] == [1]


# ---- what is refused ----


@pytest.fixture
def raw(server, door):
    if door == "grpcio":
        pytest.skip("C core's own: it answers broken compression in its own ways")
    with Client(server) as client:
        yield client


def compressed_call(raw, path, message, encoding):
    return call(raw, path, framed(message, compressed=1), grpc_encoding=encoding)


@algorithms
@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize("array", [SMALL, LARGE], ids=["small", "large"])
def test_compressed_data_that_is_broken_is_refused(raw, algorithm, path, array):
    message = COMPRESS[algorithm](request("simple", array).SerializeToString())
    for wrong in (b"", message[:-20], message + b"x", b"\0" + message[1:]):
        assert compressed_call(raw, path, wrong, algorithm).status in (
            (INTERNAL,) if wrong != message[:-20] else (INTERNAL, RESOURCE_EXHAUSTED)
        )
    assert compressed_call(raw, path, message, algorithm).status == OK


@algorithms
@pytest.mark.parametrize("path", [INFER, STREAM])
def test_a_message_that_inflates_beyond_the_limit_is_refused(raw, algorithm, path):
    message = COMPRESS[algorithm](bytes(64 * MIB + 1))
    for _ in range(3):
        answer = compressed_call(raw, path, message, algorithm)
        assert answer.status == RESOURCE_EXHAUSTED
        assert answer.details.startswith("Received message larger than max")
    assert raw.call(INFER, request("simple", SMALL).SerializeToString()).status == OK


def test_the_limit_is_an_option(door, repository):
    if door != "native":
        pytest.skip("C core has one limit for both sizes")
    message = gzip.compress(request("simple", LARGE).SerializeToString())
    for limit, status in ((500_000, RESOURCE_EXHAUSTED), (700_000, OK)):
        with (
            doors.running_server(door, repository, f"--grpc-max-decompressed-size={limit}") as process,
            Client(process.address) as raw,
        ):
            assert compressed_call(raw, INFER, message, "gzip").status == status


def test_the_message_limit_of_c_core_holds_after_decompression(door, repository):
    if door != "grpcio":
        pytest.skip("of C core")
    with (
        doors.running_server(door, repository, "--grpc-max-message-size=500000") as process,
        grpc.insecure_channel(process.address, compression=grpc.Compression.Gzip) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        Stub(channel).ModelInfer(request("simple", LARGE))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
