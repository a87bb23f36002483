"""Work that its client has given up ends: an ONNX model that would run for ever, on the only instance of its model."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.backends.models import endless_onnx
from tests.conformance import doors

CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


@pytest.fixture(scope="module", params=doors.NAMES)
def served(request, tmp_path_factory):
    """The address of a server with the model."""
    pytest.importorskip("onnxruntime")
    root = tmp_path_factory.mktemp("models")
    (root / "endless" / "1").mkdir(parents=True)
    (root / "endless" / "1" / "model.onnx").write_bytes(endless_onnx())
    (root / "endless" / "config.pbtxt").write_text(CONFIG)
    with doors.running_server(request.param, root) as process:
        yield process.address


def steps(count: int) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", [1, 1], "INT64")
    tensor.set_data_from_numpy(np.full((1, 1), count, np.int64))
    return [tensor]


def answers(address: str, count: int) -> int:
    """What the model says; the instance is free then."""
    with triton.InferenceServerClient(address) as client:
        return client.infer("endless", steps(count), client_timeout=60).as_numpy("y").item()


def test_a_deadline_frees_the_instance(served):
    late = pytest.raises(InferenceServerException, match="Deadline Exceeded")
    with triton.InferenceServerClient(served) as client, late:
        client.infer("endless", steps(2**62), client_timeout=1)
    assert answers(served, 3) == 3


def test_a_cancelled_call_frees_the_instance(served):
    with triton.InferenceServerClient(served) as client:
        call = client.async_infer("endless", steps(2**62), lambda result, error: None)
        assert client.is_server_live()  # the call before it has arrived
        call.cancel()
        assert answers(served, 4) == 4


def test_a_lost_connection_frees_the_instance(served):
    with triton.InferenceServerClient(served) as client:
        client.async_infer("endless", steps(2**62), lambda result, error: None)
        assert client.is_server_live()
    assert answers(served, 5) == 5
