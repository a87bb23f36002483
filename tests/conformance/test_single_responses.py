"""A call for one answer gets one, whatever its model sends, and no other call gets anything of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from tests.conformance import doors
from tests.conformance.client import Stub, floats, output, request

PARTS = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
model_transaction_policy { decoupled: true }
parameters { key: "decoupled_model_infer" value { string_value: "true" } }
"""
"""One response for each row, then the final one, which is empty."""

PLAIN = PARTS.partition("model_transaction_policy")[0]

SENDER = PARTS.replace("identity", "python")
SENDER_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            tensor = pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())
            if tensor.as_numpy()[0, 0] >= 0:
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step {
  model_name: "sender" model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" }
} }
parameters { key: "decoupled_model_infer" value { string_value: "true" } }
"""

ONE = ("parts", "sender", "ensemble")
"""Models that give one response to a request of one row, and say only afterwards that it was the last."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("one")
    for name, config in {"parts": PARTS, "plain": PLAIN, "sender": SENDER, "ensemble": ENSEMBLE}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "sender" / "1" / "model.py").write_text(SENDER_MODEL)
    return root


@pytest.fixture(scope="module", params=doors.NAMES)
def stub(request, models):
    if request.config.getoption("--target"):
        pytest.skip("the server needs the models of this test")
    with doors.running_server(request.param, models) as process, grpc.insecure_channel(process.address) as channel:
        yield Stub(channel)


def ask(stub, model, *rows):
    message = request(model, np.array([[row] for row in rows], np.float32).reshape(-1, 1))
    return stub.ModelInfer(message, timeout=60)


def test_nobody_gets_an_answer_of_another(stub):
    """The end of a request comes when its stream may long be somebody else's."""

    def asked(number):
        model = (*ONE, "plain")[number % 4]
        return [output(ask(stub, model, number * 100 + turn)).item() for turn in range(30)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(asked, range(8)))
    assert answers == [[number * 100 + turn for turn in range(30)] for number in range(8)]


def test_a_second_response_is_an_error(stub):
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, "parts", 1, 2, 3)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "more than one response, the request takes only one" in caught.value.details()
    assert output(ask(stub, "parts", 4)).tolist() == [[4]]


def test_an_end_without_a_response_is_an_error(stub):
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, "sender", -1)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "without a response" in caught.value.details()


def test_a_call_may_leave_between_its_answer_and_its_end(stub):
    """Cancelled at any time, a call leaves nothing behind that others could get."""
    for turn in range(40):
        calls = [stub.ModelInfer.future(request(model, floats(turn))) for model in ONE]
        for call in calls:
            call.cancel()
        assert output(ask(stub, "plain", turn)).tolist() == [[turn]]
