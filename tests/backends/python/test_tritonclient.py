"""Python models behind a real server, asked by tritonclient."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.conformance import doors


def config(name: str, inputs: dict[str, str], outputs: dict[str, str], *, batch: int = 0, more: str = "") -> str:
    def tensors(kind: str, described: dict[str, str]) -> str:
        return "".join(
            f'{kind} {{ name: "{tensor}" data_type: TYPE_{datatype} dims: [ -1 ] }}\n'
            for tensor, datatype in described.items()
        )

    return (
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: {batch}\n{tensors("input", inputs)}'
        f"{tensors('output', outputs)}instance_group {{ count: 1 kind: KIND_CPU }}\n{more}"
    )


IDENTITY = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            def answer(request):
                out = pb_utils.Tensor("y", request.inputs()[0].as_numpy())
                return pb_utils.InferenceResponse([out], parameters={"n": len(requests)})
            return [answer(request) for request in requests]
"""
EVERY = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            def answer(request):
                return [pb_utils.Tensor(x.name().replace("x", "y", 1), x.as_numpy()) for x in request.inputs()]
            return [pb_utils.InferenceResponse(answer(request)) for request in requests]
"""
SAID = """
    import json, numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            out = []
            for r in requests:
                said = {"id": r.request_id(), "parameters": json.loads(r.parameters()), "priority": r.priority(),
                        "timeout": r.timeout(), "outputs": r.requested_output_names(), "name": r.model_name()}
                text = np.array([json.dumps(said)], object)
                out.append(pb_utils.InferenceResponse([pb_utils.Tensor(n, text) for n in ("y", "z")]))
            return out
"""
ASYNC = """
    import asyncio, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        async def execute(self, requests):
            async def one(request):
                x = request.inputs()[0].as_numpy()
                await asyncio.sleep(0)
                return pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)])
            return await asyncio.gather(*map(one, requests))
"""
DATATYPES = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    root = tmp_path_factory.mktemp("models")

    def add(name: str, code: str, *described: dict[str, str], **more: object) -> None:
        version = root / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(textwrap.dedent(code))
        (root / name / "config.pbtxt").write_text(config(name, *described, **more))  # type: ignore[arg-type]

    every = (*DATATYPES, "STRING")
    add("every", EVERY, *({f"{kind}_{datatype}": datatype for datatype in every} for kind in "xy"), batch=8)
    pairs = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }"
    add("pairs", IDENTITY, {"x": "FP32"}, {"y": "FP32"}, batch=8, more=pairs)
    add("said", SAID, {"x": "FP32"}, {"y": "STRING", "z": "STRING"})
    add("async", ASYNC, {"x": "FP32"}, {"y": "FP32"}, batch=8, more="dynamic_batching { }")
    with (
        doors.running_server("native", root) as process,
        triton.InferenceServerClient(process.address) as connected,
    ):
        yield connected


def tensor(name: str, array: np.ndarray) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    return made.set_data_from_numpy(array)


def ask(client: triton.InferenceServerClient, model: str, array: np.ndarray, **more: object) -> triton.InferResult:
    return client.infer(model, [tensor("x", array)], **more)


def test_every_datatype_arrives_and_comes_back_unchanged(client: triton.InferenceServerClient) -> None:
    names = {"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"}
    arrays = {each: np.array([[0, 1, 100]]).astype(names.get(each, each.lower())) for each in DATATYPES}
    arrays["STRING"] = np.array([["", "ü", "a" * 70_000]], object)
    answer = client.infer("every", [tensor(f"x_{name}", array) for name, array in arrays.items()])
    texts = answer.as_numpy("y_STRING")
    assert [text.decode() for text in texts[0]] == arrays.pop("STRING")[0].tolist()
    for name, array in arrays.items():
        assert answer.as_numpy(f"y_{name}").dtype == array.dtype
        assert np.array_equal(answer.as_numpy(f"y_{name}"), array)


def test_a_large_tensor_comes_back_whole(client: triton.InferenceServerClient) -> None:
    array = np.random.default_rng(0).random((2, 500_000), np.float32)
    assert np.array_equal(ask(client, "async", array).as_numpy("y"), array + 1)


def test_requests_are_batched(client: triton.InferenceServerClient) -> None:
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda i: ask(client, "pairs", np.full((1, 3), i, np.float32)), range(2)))
    assert [int(answer.as_numpy("y")[0, 0]) for answer in answers] == [0, 1]
    assert [answer.get_response().parameters["n"].int64_param for answer in answers] == [2, 2]


def test_what_the_model_is_told(client: triton.InferenceServerClient) -> None:
    wanted = [triton.InferRequestedOutput("z")]
    parameters = {"text": "a", "flag": True, "number": 3, "share": 0.5}
    answer = ask(client, "said", np.zeros(1, np.float32), request_id="me", outputs=wanted, parameters=parameters)
    said = json.loads(answer.as_numpy("z")[0])
    expected = {"id": "me", "parameters": parameters, "priority": 0, "timeout": 0, "outputs": ["z"], "name": "said"}
    assert said == expected
    assert answer.as_numpy("y") is None


def test_a_model_may_execute_in_a_coroutine(client: triton.InferenceServerClient) -> None:
    assert ask(client, "async", np.zeros((1, 2), np.float32)).as_numpy("y").tolist() == [[1, 1]]


def test_wrong_requests_do_not_reach_the_model(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="data-type is 'INT64'"):
        ask(client, "said", np.zeros(1, np.int64))
