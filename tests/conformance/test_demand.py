"""Models that are loaded at the first call: real servers, on both doors, and callers who may not cause a load."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from inferd.server.pb import grpc_service_pb2 as pb
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


@pytest.fixture(params=doors.NAMES)
def served(request, tmp_path):
    """A server of two models with nothing loaded; its lines tell what is."""
    for name in ("mine", "other"):
        write(tmp_path / "models", name, model_py=MODEL.format(factor=2))
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    options = ("--model-control-mode=lazy", f"--grpc-token-file={tokens}")
    with doors.running_server(request.param, tmp_path / "models", *options) as process:
        yield process


def loads(served) -> int:
    """How often `mine` was loaded: the index says whether, the statistics begin anew with each load."""
    with grpc.insecure_channel(served.address) as channel:
        metadata = (("authorization", "Bearer operator"),)
        index = Stub(channel).RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata, timeout=60)
        return [model.state for model in index.models if model.name == "mine"].count("READY")


def code(call, *arguments, token: str, **options) -> grpc.StatusCode:
    try:
        call(*arguments, metadata=(("authorization", f"Bearer {token}"),), timeout=60, **options)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_only_who_may_use_a_model_causes_its_load(served) -> None:
    """Neither a request nor a question about the model by somebody else does; a question whether it is ready never."""
    with grpc.insecure_channel(served.address) as channel:
        stub = Stub(channel)
        asked = (
            (stub.ModelInfer, request("mine", floats(1.0))),
            (stub.ModelMetadata, pb.ModelMetadataRequest(name="mine")),
            (stub.ModelReady, pb.ModelReadyRequest(name="mine")),
        )
        for call, message in asked:
            assert code(call, message, token="stranger") == grpc.StatusCode.PERMISSION_DENIED
        assert code(stub.ModelReady, pb.ModelReadyRequest(name="mine"), token="operator") == grpc.StatusCode.OK
        assert loads(served) == 0
        for call, message in asked:
            assert code(call, message, token="operator") == grpc.StatusCode.OK
        assert loads(served) == 1


def test_what_describes_a_model_loads_it(served) -> None:
    """Clients ask for the tensors before they can send any."""
    with grpc.insecure_channel(served.address) as channel:
        metadata = (("authorization", "Bearer operator"),)
        found = Stub(channel).ModelMetadata(pb.ModelMetadataRequest(name="mine"), metadata=metadata, timeout=60)
        assert [tensor.name for tensor in found.inputs] == ["INPUT0"]
        assert loads(served) == 1


def test_the_first_request_of_a_stream_loads_the_model(served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        messages = [request("mine", floats(i)) for i in range(20)]
        metadata = (("authorization", "Bearer operator"),)
        answers = list(Stub(channel).ModelStreamInfer(iter(messages), metadata=metadata, timeout=60))
        assert [answer.error_message for answer in answers] == [""] * 20
        assert loads(served) == 1


@pytest.mark.parametrize("transport", doors.NAMES)
def test_a_model_that_asks_another_one_has_it_loaded(transport, tmp_path) -> None:
    """Also in its warm-up, while it is loaded itself."""
    root = tmp_path / "models"
    write(root, "mine", model_py=MODEL.format(factor=2))
    write(root, "asks", CONFIG.format(backend="python") + WARMED, model_py=ASKS)
    server = doors.running_server(transport, root, "--model-control-mode=lazy")
    with server as process, grpc.insecure_channel(process.address) as channel:
        answer = Stub(channel).ModelInfer(request("asks", floats(1.0)), timeout=60)
        assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [3.0]
