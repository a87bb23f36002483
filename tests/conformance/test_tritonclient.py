"""tritonclient as its users call it: synchronous, asynchronous, streams, errors."""

from __future__ import annotations

import asyncio
import queue

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server) as client:
        yield client


def tensor(array, datatype="FP32", name="INPUT0"):
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


# ---- information ----


def test_health(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert client.is_model_ready("versions", "3")


def test_metadata(client):
    assert client.get_server_metadata(as_json=True)["name"] == "triton"
    metadata = client.get_model_metadata("simple", as_json=True)
    assert metadata["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": ["-1", "-1"]}]
    assert client.get_model_config("simple").config.max_batch_size == 8
    assert {model.name for model in client.get_model_repository_index().models} >= {"simple", "versions"}
    client.infer("simple", [tensor(ARRAY)])
    assert client.get_inference_statistics("simple").model_stats[0].inference_stats.success.count >= 1


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda client: client.get_model_config("nothing"), "NOT_FOUND"),
        (lambda client: client.get_model_metadata("nothing"), "NOT_FOUND"),
        (lambda client: client.load_model("simple"), "UNAVAILABLE"),
        (lambda client: client.unload_model("simple"), "UNAVAILABLE"),
    ],
)
def test_errors(client, call, code):
    with pytest.raises(InferenceServerException) as caught:
        call(client)
    assert caught.value.status() == f"StatusCode.{code}"
    assert caught.value.message()


# ---- inference ----


def test_infer(client):
    result = client.infer(
        "simple", [tensor(ARRAY)], request_id="my id", outputs=[triton.InferRequestedOutput("OUTPUT0")]
    )
    assert (result.as_numpy("OUTPUT0") == ARRAY).all()
    assert result.get_response().id == "my id"


def test_infer_strings(client):
    array = np.array([["one", "zwei \u2603", ""]], object)
    result = client.infer("strings", [tensor(array, "BYTES")])
    assert result.as_numpy("OUTPUT0").tolist() == [[b"one", "zwei \u2603".encode(), b""]]


def test_infer_bf16(client):
    array = np.array([0.0, 1.5, -2.0], np.float32)
    result = client.infer("type_bf16", [tensor(array.astype(_bfloat16()), "BF16")])
    assert result.as_numpy("OUTPUT0").astype(np.float32).tolist() == array.tolist()


def _bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


def test_async_infer(client):
    answers = queue.SimpleQueue()
    for _ in range(50):
        client.async_infer("simple", [tensor(ARRAY)], callback=lambda result, error: answers.put((result, error)))
    for _ in range(50):
        result, error = answers.get(timeout=60)
        assert error is None
        assert (result.as_numpy("OUTPUT0") == ARRAY).all()


# ---- streams ----


def test_stream(client):
    answers = queue.SimpleQueue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for number in range(20):
        client.async_stream_infer("simple", [tensor(ARRAY + number)], request_id=str(number))
    client.async_stream_infer("nothing", [tensor(ARRAY)], request_id="wrong")
    client.async_stream_infer("simple", [tensor(ARRAY)], request_id="after")
    for number in range(20):
        result, error = answers.get(timeout=60)
        assert error is None
        assert result.get_response().id == str(number)
        assert (result.as_numpy("OUTPUT0") == ARRAY + number).all()
    _, error = answers.get(timeout=60)
    assert error.message() == "Request for unknown model: 'nothing' is not found"
    result, error = answers.get(timeout=60)
    assert error is None
    assert result.get_response().id == "after"
    client.stop_stream()


# ---- asyncio ----


async def test_aio(server):
    async with triton_aio.InferenceServerClient(server) as client:
        assert await client.is_server_ready()
        assert await client.is_model_ready("simple")
        results = await asyncio.gather(*(client.infer("simple", [tensor(ARRAY + number)]) for number in range(50)))
        for number, result in enumerate(results):
            assert (result.as_numpy("OUTPUT0") == ARRAY + number).all()
        with pytest.raises(InferenceServerException, match="unknown model"):
            await client.infer("nothing", [tensor(ARRAY)])


async def test_aio_stream(server):
    async def requests():
        for number in range(20):
            yield {"model_name": "simple", "inputs": [tensor(ARRAY)], "request_id": str(number)}

    async with triton_aio.InferenceServerClient(server) as client:
        ids = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            ids.append(result.get_response().id)
    assert ids == [str(number) for number in range(20)]


async def test_aio_cancellation(server):
    async with triton_aio.InferenceServerClient(server) as client:
        task = asyncio.create_task(client.infer("hang", [tensor(np.ones((1, 1), np.float32))]))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.is_server_live()
