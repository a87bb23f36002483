"""The same programs run with tritonclient and with inferd_client; only `import ... as grpcclient` differs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import queue
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as theirs

TENSORS = {
    "fp32": ("FP32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    "fp16": ("FP16", np.arange(6, dtype=np.float16).reshape(2, 3)),
    "bf16": ("BF16", np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)),
    "int64": ("INT64", np.arange(12, dtype=np.int64).reshape(2, 2, 3) - 5),
    "uint8": ("UINT8", np.arange(2000, dtype=np.uint8).reshape(2, 1000)),
    "bool": ("BOOL", np.array([[True, False, True]])),
    "text": ("BYTES", np.array([[b"a", "\xe4\xf6".encode(), b"", b"\0\1"]], dtype=object)),
}
LARGE = np.arange(300_000, dtype=np.float32).reshape(2, -1)


def made(module, tensor, datatype="FP32", name="INPUT0"):
    return module.InferInput(name, list(tensor.shape), datatype).set_data_from_numpy(tensor)


class Calls(queue.Queue):
    """The calls of a callback."""

    def __call__(self, result, error):
        self.put((result, error))

    def next(self):
        return self.get(timeout=60)


@pytest.fixture
def client(grpcclient, server):
    with grpcclient.InferenceServerClient(server.tcp) as made:
        yield made


@pytest.mark.parametrize("model", TENSORS)
def test_tensors_come_back(grpcclient, client, model):
    """Guards how tensors of each datatype are written and read."""
    datatype, tensor = TENSORS[model]
    result = client.infer(model, [made(grpcclient, tensor, datatype)], request_id="7")
    found = result.as_numpy("OUTPUT0")
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert (found == tensor).all()
    assert result.as_numpy("OUTPUT1") is None
    assert result.get_response().id == "7"
    assert result.get_output("OUTPUT0").datatype == datatype
    assert result.get_response(as_json=True)["model_name"] == model


def test_large_tensors_come_back(grpcclient, client):
    """Guards bodies that are sent in pieces, and responses that come in many frames."""
    found = client.infer("fp32", [made(grpcclient, LARGE)]).as_numpy("OUTPUT0")
    assert (found == LARGE).all()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_requests_are_compressed(grpcclient, client, algorithm):
    """Guards compression_algorithm."""
    found = client.infer("fp32", [made(grpcclient, LARGE)], compression_algorithm=algorithm)
    assert (found.as_numpy("OUTPUT0") == LARGE).all()


def test_chosen_outputs(grpcclient, client):
    """Guards which outputs come, and that inputs keep their order."""
    numbers, texts = TENSORS["fp32"][1][:1], TENSORS["text"][1]
    inputs = [made(grpcclient, numbers), made(grpcclient, texts, "BYTES", "INPUT1")]
    result = client.infer("pair", inputs, outputs=[grpcclient.InferRequestedOutput("OUTPUT1")])
    assert (result.as_numpy("OUTPUT1") == texts).all()
    assert result.as_numpy("OUTPUT0") is None
    result = client.infer("pair", inputs[::-1])
    assert (result.as_numpy("OUTPUT0") == numbers).all()


def failed(function):
    """(class, status, message) of what a call raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, error.status(), error.message()
    raise AssertionError("it succeeded")


@pytest.mark.parametrize(
    "attempt",
    [
        lambda m, c: c.infer("nobody", [made(m, TENSORS["fp32"][1])]),
        lambda m, c: c.infer("fp32", [made(m, TENSORS["int64"][1], "INT64")]),
        lambda m, c: c.infer("fp32", [], model_version="9"),
        lambda m, c: c.infer("fp32", [], model_version=1),
        lambda m, c: c.infer("fp32", [], parameters={"sequence_id": 1}),
        lambda m, c: c.infer("fp32", [], parameters={"triton_x": 1}),
        lambda m, c: c.infer("fp32", [], parameters={"x": [1]}),
        lambda m, c: c.get_model_config("nobody"),
        lambda m, c: c.load_model("nobody"),
        lambda m, c: c.async_stream_infer("repeat", []),
        lambda m, c: c.unregister_plugin(),
        lambda m, c: made(m, np.zeros(3, np.float32), "INT32"),
        lambda m, c: m.InferInput("x", [2], "FP32").set_data_from_numpy(np.zeros(3, np.float32)),
        lambda m, c: m.InferInput("x", [2], "FP32").set_data_from_numpy([1.0, 2.0]),
        lambda m, c: m.InferRequestedOutput("x", 3).set_shared_memory("y", 1),
        lambda m, c: c.infer("later", [made(m, TENSORS["fp32"][1])], client_timeout=0.05),
    ],
)  # fmt: skip
def test_the_same_errors(server, attempt):
    """Guards errors: class, status and text are those that programs for tritonclient look for."""
    found = []
    for name in ("tritonclient.grpc", "inferd_client.grpc"):
        module = importlib.import_module(name)
        with module.InferenceServerClient(server.tcp) as client:
            found.append(failed(partial(attempt, module, client)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "question",
    [
        lambda c: c.is_server_live(),
        lambda c: c.is_server_ready(),
        lambda c: [c.is_model_ready(name) for name in ("fp32", "nobody")],
        lambda c: c.get_server_metadata(as_json=True),
        lambda c: c.get_model_metadata("pair", "1", as_json=True),
        lambda c: c.get_model_config("pair", as_json=True),
        lambda c: c.get_model_repository_index(as_json=True),
        lambda c: c.get_trace_settings(as_json=True),
        lambda c: c.get_log_settings(as_json=True),
        lambda c: c.get_system_shared_memory_status(as_json=True),
        lambda c: c.get_cuda_shared_memory_status(as_json=True),
        lambda c: c.get_inference_statistics("uint8", as_json=True)["model_stats"][0]["name"],
        lambda c: c.update_log_settings({"log_verbose_level": 0, "log_info": True}, as_json=True),
        lambda c: c.get_model_metadata("pair").SerializeToString(deterministic=True),
    ],
)  # fmt: skip
def test_the_same_responses(server, question):
    """Guards the RPCs beside inference."""
    found = []
    for name in ("tritonclient.grpc", "inferd_client.grpc"):
        with importlib.import_module(name).InferenceServerClient(server.tcp) as client:
            found.append(question(client))
    assert found[0] == found[1]


def test_models_are_unloaded_and_loaded(client):
    """Guards the repository's RPCs."""
    client.unload_model("uint8")
    found = {model.name: model.state for model in client.get_model_repository_index().models}
    assert found["uint8"] != "READY"
    client.load_model("uint8")
    assert client.is_model_ready("uint8")


def test_called_back(grpcclient, client):
    """Guards async_infer: each callback has the response of its request."""
    calls = [Calls() for _ in range(100)]
    for i, call in enumerate(calls):
        client.async_infer("fp32", [made(grpcclient, np.full((1, 4), i, np.float32))], call)
    for i, call in enumerate(calls):
        result, error = call.next()
        assert error is None
        assert (result.as_numpy("OUTPUT0") == i).all()


def test_a_call_is_cancelled(grpcclient, client):
    """Guards CallContext.cancel."""
    calls = Calls()
    context = client.async_infer("later", [made(grpcclient, TENSORS["fp32"][1])], calls)
    context.cancel()
    result, error = calls.next()
    assert result is None
    assert error.status() == "StatusCode.CANCELLED"
    assert error.message() == "Locally cancelled by application!"


def numbers(module, *values):
    return [made(module, np.array(values, np.int32), "INT32", "IN")]


def test_a_stream(grpcclient, client):
    """Guards streams: responses in order, an error that does not end it, the empty final response, the end."""
    calls = Calls()
    client.start_stream(calls)
    with pytest.raises(grpcclient.InferenceServerException, match="cannot start another stream"):
        client.start_stream(calls)
    client.async_stream_infer("repeat", numbers(grpcclient, 1, 2, -3), request_id="a")
    assert [calls.next()[0].as_numpy("OUT")[0] for _ in range(2)] == [1, 2]
    result, error = calls.next()
    assert result is None
    assert "no -3" in str(error)
    client.async_stream_infer("repeat", numbers(grpcclient, 5), enable_empty_final_response=True)
    assert calls.next()[0].as_numpy("OUT")[0] == 5
    final = calls.next()[0].get_response()
    assert final.parameters["triton_final_response"].bool_param
    client.async_stream_infer("fp32", [made(grpcclient, LARGE)])
    client.async_stream_infer("nobody", [])
    client.stop_stream()
    assert (calls.next()[0].as_numpy("OUTPUT0") == LARGE).all()
    assert calls.next()[1] is not None
    assert calls.empty()


def test_a_stream_is_cancelled(grpcclient, client):
    """Guards stop_stream(cancel_requests=True), and that another stream can follow."""
    calls = Calls()
    client.start_stream(calls)
    client.async_stream_infer("later", [made(grpcclient, TENSORS["fp32"][1])])
    client.stop_stream(cancel_requests=True)
    assert calls.next()[1].status() == "StatusCode.CANCELLED"
    client.start_stream(calls, compression_algorithm="gzip")
    client.async_stream_infer("repeat", numbers(grpcclient, 1))
    assert calls.next()[0].as_numpy("OUT")[0] == 1
    client.stop_stream()


def test_a_streams_deadline(grpcclient, client):
    """Guards stream_timeout."""
    calls = Calls()
    client.start_stream(calls, stream_timeout=0.1)
    with contextlib.suppress(Exception):  # it may have passed before the request is sent
        client.async_stream_infer("later", [made(grpcclient, TENSORS["fp32"][1])])
    assert calls.next()[1].status() == "StatusCode.DEADLINE_EXCEEDED"
    client.stop_stream()


def test_a_plugin_sees_headers(package, grpcclient, client):
    """Guards plugins."""
    seen = []

    class Plugin(grpcclient.InferenceServerClientPlugin):
        def __call__(self, request):
            seen.append(dict(request.headers))
            request.headers["x-more"] = "1"

    plugin = Plugin()
    client.register_plugin(plugin)
    assert client.plugin() is plugin
    client.infer("fp32", [made(grpcclient, TENSORS["fp32"][1])], headers={"x-one": "1"})
    client.is_server_live()
    assert seen == [{"x-one": "1"}, {}]
    client.unregister_plugin()
    request = grpcclient.Request({})
    importlib.import_module(f"{package}.grpc.auth").BasicAuth("who", "what")(request)
    assert request.headers == {"authorization": "Basic d2hvOndoYXQ="}


def test_shared_memory(package, grpcclient, server):
    """Guards utils.shared_memory: what goes in comes out, and nothing is left."""
    shm = importlib.import_module(f"{package}.utils.shared_memory")
    tensor, texts = TENSORS["fp32"][1], TENSORS["text"][1]
    packed = grpcclient.serialize_byte_tensor(texts)
    assert grpcclient.serialized_byte_size(texts) == 7
    key = f"/inferd-same-{package}"
    region = shm.create_shared_memory_region("region", key, 4096, create_only=True)
    try:
        assert shm.mapped_shared_memory_regions() == [key]
        shm.set_shared_memory_region(region, [tensor])
        shm.set_shared_memory_region(region, [packed], offset=1024)
        with grpcclient.InferenceServerClient(server.unix) as client:
            client.register_system_shared_memory("region", key, 4096)
            numbers, words = grpcclient.InferInput("INPUT0", [1, 3], "FP32"), made(grpcclient, texts, "BYTES", "INPUT1")
            numbers.set_shared_memory("region", 12)
            wanted = [grpcclient.InferRequestedOutput("OUTPUT0"), grpcclient.InferRequestedOutput("OUTPUT1")]
            wanted[0].set_shared_memory("region", 12, offset=512)
            wanted[1].set_shared_memory("region", len(packed.item()), offset=2048)
            client.infer("pair", [numbers, words], outputs=wanted)
            assert (shm.get_contents_as_numpy(region, np.float32, [1, 3], offset=512) == tensor[:1]).all()
            assert (shm.get_contents_as_numpy(region, np.object_, [1, 4], offset=2048) == texts).all()
            client.unregister_system_shared_memory("region")
    finally:
        shm.destroy_shared_memory_region(region)
    assert shm.mapped_shared_memory_regions() == []


async def test_coroutines(aioclient, server):
    """Guards the asynchronous client: many calls at once, each with its own response."""
    async with aioclient.InferenceServerClient(server.tcp) as client:
        assert await client.is_server_ready()
        assert (await client.get_model_metadata("fp32", as_json=True))["name"] == "fp32"
        inputs = [[made(aioclient, np.full((1, 5), i, np.float32))] for i in range(200)]
        results = await asyncio.gather(*(client.infer("fp32", each) for each in inputs))
        assert [result.as_numpy("OUTPUT0")[0, 4] for result in results] == list(range(200))
        with pytest.raises(aioclient.InferenceServerException, match=r"\[StatusCode.NOT_FOUND\]"):
            await client.infer("nobody", inputs[0])
        with pytest.raises(aioclient.InferenceServerException, match=r"\[StatusCode.DEADLINE_EXCEEDED\]"):
            await client.infer("later", inputs[0], client_timeout=0.05)


async def test_a_coroutine_is_cancelled(aioclient, server):
    """Guards that cancelling a task ends its call, and that the client goes on."""
    async with aioclient.InferenceServerClient(server.tcp) as client:
        tensor = [made(aioclient, TENSORS["fp32"][1])]
        await client.infer("fp32", tensor)
        task = asyncio.create_task(client.infer("later", tensor))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.infer("fp32", tensor)).as_numpy("OUTPUT0") is not None


async def test_a_stream_of_coroutines(aioclient, server):
    """Guards stream_infer: responses, errors and the end."""

    async def requests():
        yield {"model_name": "repeat", "inputs": numbers(aioclient, 1, 2), "request_id": "a"}
        yield {"model_name": "repeat", "inputs": numbers(aioclient, -1)}
        yield {"model_name": "fp32", "inputs": [made(aioclient, LARGE)]}

    async with aioclient.InferenceServerClient(server.tcp) as client:
        found, errors = [], []
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                errors.append(str(error))
            elif result.as_numpy("OUT") is not None:
                found.append(int(result.as_numpy("OUT")[0]))
            else:
                assert (result.as_numpy("OUTPUT0") == LARGE).all()
        assert found == [1, 2]
        assert len(errors) == 1


async def test_a_stream_of_coroutines_is_cancelled(aioclient, server):
    """Guards cancel() of the iterator of responses."""
    endless = asyncio.Event()

    async def requests():
        yield {"model_name": "repeat", "inputs": numbers(aioclient, 4)}
        await endless.wait()

    async with aioclient.InferenceServerClient(server.tcp) as client:
        responses = client.stream_infer(requests())
        assert (await anext(responses))[0].as_numpy("OUT")[0] == 4
        responses.cancel()
        with pytest.raises(asyncio.CancelledError):
            await anext(responses)


def test_the_same_names():
    """Guards that what programs import of tritonclient is there: names, methods and the order of arguments."""
    import inspect

    inner = {"CudaStream", "call_cuda_function", "maybe_set_device"}  # of what they are made with
    for name in ("grpc", "grpc.aio", "utils", "utils.shared_memory", "utils.cuda_shared_memory"):
        their, our = (importlib.import_module(f"{package}.{name}") for package in ("tritonclient", "inferd_client"))
        named = getattr(their, "__all__", None) or [
            key for key, value in vars(their).items()
            if getattr(value, "__module__", "").startswith(their.__name__) and not key.startswith("_")
        ]  # fmt: skip
        named = [key for key in named if key not in inner]
        missing = [key for key in named if not hasattr(our, key)]
        assert not missing, f"{name}: {missing}"
        for key in named:
            compare(inspect, getattr(their, key), getattr(our, key), f"{name}.{key}")
    assert theirs.service_pb2.ModelInferRequest(id="1").SerializeToString()


def compare(inspect, their, our, where):
    """Each public method has the same arguments, perhaps further ones after them."""
    if inspect.isclass(their):
        for key, method in vars(their).items():
            if inspect.isfunction(method) and (not key.startswith("_") or key == "__init__"):
                compare(inspect, method, getattr(our, key), f"{where}.{key}")
    elif inspect.isfunction(their):
        expected, found = (list(inspect.signature(each).parameters) for each in (their, our))
        assert found[: len(expected)] == expected, where
