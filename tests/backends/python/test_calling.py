"""Models that call models (BLS) behind a real server, asked by tritonclient."""

from __future__ import annotations

import queue
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.backends.python.test_tritonclient import config
from tests.conformance import doors

HEAD = """
import asyncio, json, threading
import numpy as np, triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
def ask(model, x, **more):
    value = pb_utils.Tensor("x", np.asarray(x, np.float32))
    return pb_utils.InferenceRequest(model_name=model, inputs=[value], requested_output_names=["y"], **more)
def y(response):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
def out(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.asarray(value, np.float32))])
def x(request):
    return request.inputs()[0].as_numpy()
class TritonPythonModel:
"""
MODELS = {
    # One more than the model that it calls; the last one adds alone.
    "add": "def execute(self, requests): return [out(x(r) + 1) for r in requests]",
    "add_two": 'def execute(self, requests): return [out(y(ask("add", x(r)).exec()) + 1) for r in requests]',
    "add_three": 'def execute(self, requests): return [out(y(ask("add_two", x(r)).exec()) + 1) for r in requests]',
    "chain": """
def execute(self, requests):
    def three(value):
        for _ in range(3):
            value = y(ask("native", y(ask("add", value).exec())).exec())
        return value
    return [out(three(x(r))) for r in requests]
""",
    "gather": """
async def execute(self, requests):
    async def one(request):
        parts = await asyncio.gather(*(ask("add", x(request) * i).async_exec() for i in range(4)))
        return out(sum(map(y, parts)))
    return await asyncio.gather(*map(one, requests))
""",
    "threads": """
def execute(self, requests):
    values = {}
    def work(i):
        values[i] = y(ask("add", x(requests[0]) * i).exec())
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return [out(sum(values.values()))]
""",
    "ready": """
def execute(self, requests):
    return [out([[pb_utils.is_model_ready("add"), pb_utils.is_model_ready("add", "7"), pb_utils.is_model_ready("no")]])
            for _ in requests]
""",
    "errors": """
def execute(self, requests):
    wanted = {0: "nothing", 1: "fails", 2: "count", 3: "add"}[int(x(requests[0]).flat[0])]
    value = np.ones((1, 2), np.int64) if wanted == "add" else np.ones((1, 1), np.float32)
    request = pb_utils.InferenceRequest(
        model_name=wanted, inputs=[pb_utils.Tensor("x", value)], requested_output_names=["y"])
    error = request.exec().error()
    return [pb_utils.InferenceResponse(error=pb_utils.TritonError(error.message(), error.code()))]
""",
    "fails": 'def execute(self, requests): raise ValueError("on purpose")',
    "sum": """
def execute(self, requests):
    responses = ask("count", x(requests[0])).exec(decoupled=True)
    return [out([[sum(y(r).item() for r in responses if r.output_tensors())]])]
""",
    "large": """
def execute(self, requests):
    value = np.arange(300_000, dtype=np.float32).reshape(1, -1)
    return [out([[float(np.array_equal(y(ask("add", value).exec()), value + 1))]])]
""",
}
STREAMS = {
    "count": """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for i in range(int(x(request).flat[0])):
            sender.send(out([[i]]))
        sender.send(flags=FINAL)
""",
    "relay": """
async def execute(self, requests):
    async def one(request):
        sender = request.get_response_sender()
        async for response in await ask("count", x(request)).async_exec(decoupled=True):
            if response.output_tensors():
                sender.send(out(y(response) * 10))
        sender.send(flags=FINAL)
    await asyncio.gather(*map(one, requests))
""",
}
NATIVE = """
name: "native"
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { count: 1 kind: KIND_CPU }
"""
IN_PROCESS = 'parameters { key: "EXECUTION_MODE" value { string_value: "in-process" } }\n'


@pytest.fixture(scope="module", params=["process", "in-process"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("models")
    mode = IN_PROCESS if request.param == "in-process" else ""
    for name, body in (MODELS | STREAMS).items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(HEAD + textwrap.indent(body, "    "))
        more = mode + ("model_transaction_policy { decoupled: true }" if name in STREAMS else "")
        (root / name / "config.pbtxt").write_text(config(name, {"x": "FP32"}, {"y": "FP32"}, batch=8, more=more))
    (root / "native" / "1").mkdir(parents=True)
    (root / "native" / "config.pbtxt").write_text(NATIVE)
    with (
        doors.running_server("native", root) as process,
        triton.InferenceServerClient(process.address) as connected,
    ):
        yield connected


def tensor(value: float) -> triton.InferInput:
    return triton.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.full((1, 1), value, np.float32))


def ask(client: triton.InferenceServerClient, model: str, value: float, **more: Any) -> float:
    return float(client.infer(model, [tensor(value)], **more).as_numpy("y").item())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("add", 6),
        ("add_two", 7),
        ("add_three", 8),
        ("chain", 8),
        ("gather", 34),
        ("threads", 34),
        ("sum", 10),
        ("large", 1),
    ],
)
def test_every_form_of_a_call_gets_its_response(
    client: triton.InferenceServerClient, model: str, expected: float
) -> None:
    assert ask(client, model, 5) == expected


def test_a_decoupled_model_with_many_responses(client: triton.InferenceServerClient) -> None:
    assert ask(client, "sum", 500) == sum(range(500))


def test_many_clients_at_once(client: triton.InferenceServerClient) -> None:
    models = ["add_three", "chain", "gather", "threads"] * 20
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda model: ask(client, model, 1), models))
    assert answers == [4, 4, 10, 10] * 20


@pytest.mark.parametrize(("model", "expected"), [("count", [0, 1, 2, 3]), ("relay", [0, 10, 20, 30])])
def test_every_response_of_a_decoupled_model_comes_in_order(
    client: triton.InferenceServerClient, model: str, expected: list[float]
) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result))
    try:
        client.async_stream_infer(model, [tensor(4)], enable_empty_final_response=True)
        values = []
        while True:
            result = answers.get(timeout=60)
            assert not isinstance(result, Exception), result
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            values.append(result.as_numpy("y").item())
    finally:
        client.stop_stream()
    assert values == expected


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        (
            0,
            "NOT_FOUND",
            "Model nothing - Error when running inference: Request for unknown model: 'nothing' is not found",
        ),
        (1, "INTERNAL", "ValueError: on purpose"),
        (2, "", "Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models"),
        (3, "INVALID_ARGUMENT", "data-type is 'INT64'"),
    ],
)
def test_errors_come_back_as_responses(client: triton.InferenceServerClient, what: int, code: str, text: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        ask(client, "errors", what)
    assert text in raised.value.message()
    assert code in raised.value.status()


def test_readiness_of_other_models(client: triton.InferenceServerClient) -> None:
    assert client.infer("ready", [tensor(0)]).as_numpy("y").tolist() == [[1, 0, 0]]


def test_statistics_count_calls(client: triton.InferenceServerClient) -> None:
    def count() -> int:
        found = client.get_inference_statistics("native", as_json=True)
        return int(found["model_stats"][0]["inference_stats"].get("success", {}).get("count", 0))

    before = count()
    ask(client, "chain", 1)
    assert count() == before + 3
