"""Models that are loaded at the first call: real servers, on both doors, and callers who may not cause a load."""

from __future__ import annotations

import queue

import grpc
import numpy as np
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request
from tests.conformance.test_repository import CONFIG, MODEL, write

TOKENS = """
operator  all
stranger  groups=inference,health,metadata  models=other
"""

ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="mine", inputs=request.inputs(), requested_output_names=["OUTPUT0"]
            )
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            output = pb_utils.Tensor("OUTPUT0", answer.output_tensors()[0].as_numpy() + 1)
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
"""
"""A model that asks another one."""
WARMED = """
model_warmup { name: "zeros" batch_size: 1
  inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } }
"""

SPEAKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.open = []

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            self.open.append(sender)
            last = not request.inputs()[0].as_numpy().any()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]))
            while last and self.open:
                self.open.pop().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""A decoupled model that answers once, and ends its requests when it gets a zero."""

OPERATOR = {"metadata": (("authorization", "Bearer operator"),), "timeout": 60}


@pytest.fixture(scope="module", params=doors.NAMES)
def address(request, tmp_path_factory):
    """The address of a server that loads its four models on demand."""
    folder = tmp_path_factory.mktemp("demand")
    for name in ("mine", "other"):
        write(folder / "models", name, model_py=MODEL.format(factor=2))
    write(folder / "models", "asks", CONFIG.format(backend="python") + WARMED, model_py=ASKS)
    decoupled = CONFIG.format(backend="python") + "model_transaction_policy { decoupled: true }"
    write(folder / "models", "speaks", decoupled, model_py=SPEAKS)
    tokens = folder / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    options = ("--model-control-mode=lazy", f"--grpc-token-file={tokens}")
    with doors.running_server(request.param, folder / "models", *options) as process:
        yield process.address


@pytest.fixture
def stub(address):
    """A stub of the server, with no model loaded."""
    with grpc.insecure_channel(address) as channel:
        stub = Stub(channel)
        yield stub
        for name in ("asks", "mine", "other", "speaks"):
            stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name), **OPERATOR)


def is_loaded(stub) -> bool:
    """Whether `mine` is, as the index says."""
    index = stub.RepositoryIndex(pb.RepositoryIndexRequest(), **OPERATOR)
    return any((model.name, model.state) == ("mine", "READY") for model in index.models)


def code(call, message, token: str) -> grpc.StatusCode:
    try:
        call(message, metadata=(("authorization", f"Bearer {token}"),), timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_only_who_may_use_a_model_causes_its_load(stub) -> None:
    """Neither a request nor a question about the model by somebody else does; a question whether it is ready never."""
    asked = (
        (stub.ModelInfer, request("mine", floats(1.0))),
        (stub.ModelMetadata, pb.ModelMetadataRequest(name="mine")),
        (stub.ModelReady, pb.ModelReadyRequest(name="mine")),
    )
    for call, message in asked:
        assert code(call, message, "stranger") == grpc.StatusCode.PERMISSION_DENIED
    assert code(stub.ModelReady, pb.ModelReadyRequest(name="mine"), "operator") == grpc.StatusCode.OK
    assert not is_loaded(stub)
    for call, message in asked:
        assert code(call, message, "operator") == grpc.StatusCode.OK
    assert is_loaded(stub)


def test_what_describes_a_model_loads_it(stub) -> None:
    """Clients ask for the tensors before they can send any."""
    found = stub.ModelMetadata(pb.ModelMetadataRequest(name="mine"), **OPERATOR)
    assert [tensor.name for tensor in found.inputs] == ["INPUT0"]
    assert is_loaded(stub)


def test_the_first_request_of_a_stream_loads_the_model(stub) -> None:
    messages = [request("mine", floats(i)) for i in range(20)]
    assert [answer.error_message for answer in stub.ModelStreamInfer(iter(messages), **OPERATOR)] == [""] * 20
    assert is_loaded(stub)


def test_a_decoupled_model_that_is_loaded_for_a_request_holds_up_no_others(stub) -> None:
    """Nothing is known of the model when the request comes: that its answers have no order turns out later."""
    messages: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
    answers = stub.ModelStreamInfer(iter(messages.get, None), **OPERATOR)
    try:
        for model, value in (("speaks", 1.0), ("mine", 2.0), ("speaks", 0.0)):
            messages.put(request(model, floats(value)))
            answer = next(answers)
            assert (answer.infer_response.model_name, answer.error_message) == (model, "")
    finally:
        messages.put(None)
    assert list(answers) == []


def test_a_model_that_asks_another_one_has_it_loaded(stub) -> None:
    """The same for a call in a model's warm-up, while the calling model is being loaded itself."""
    answer = stub.ModelInfer(request("asks", floats(1.0)), **OPERATOR)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [3.0]
