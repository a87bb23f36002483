"""When a batch fails, its clients learn nothing of each other; the log tells the operator."""

from __future__ import annotations

import re

import grpc
import numpy as np
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.client import Stub

CONFIG = """
backend: "{backend}"
max_batch_size: 8
input {{ name: "rows" data_type: TYPE_INT64 dims: [ 1 ] }}
output {{ name: "values" data_type: TYPE_FP32 dims: [ 1 ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
dynamic_batching {{ preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }}
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

TABLE = [1.0, 2.0, 3.0]


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            rows = request.inputs()[0].as_numpy()[:, 0]
            if missing := [row for row in rows if row >= len(TABLE)]:
                raise ValueError(f"there is no row {missing[0]}")
            found = np.float32([[TABLE[row]] for row in rows])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("values", found)]))
        return responses
"""
SECRET = 424242


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Each looks a row up in a table of three, and fails with the number of a row that is not there."""
    root = tmp_path_factory.mktemp("mates")
    for name in ("onnxruntime", "python"):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(CONFIG.format(backend=name))
    write_onnx(root / "onnxruntime" / "1" / "model.onnx")
    (root / "python" / "1" / "model.py").write_text(MODEL)
    return root


def write_onnx(path):
    from onnx import TensorProto, helper, save

    rows, values = (
        helper.make_tensor_value_info(name, kind, ["n", 1])
        for name, kind in (("rows", TensorProto.INT64), ("values", TensorProto.FLOAT))
    )
    table = helper.make_tensor("table", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    nodes = [helper.make_node("Gather", ["table", "rows"], ["values"], axis=0)]
    graph = helper.make_graph(nodes, "g", [rows], [values], initializer=[table])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


@pytest.fixture(scope="module", params=doors.NAMES)
def process(request, models):
    with doors.running_server(request.param, models) as started:
        yield started


def asking(model, *rows):
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name="rows", datatype="INT64", shape=[len(rows), 1])
    message.raw_input_contents.append(np.array(rows, np.int64).tobytes())
    return message


def test_an_error_of_one_request_is_its_own_where_a_failed_batch_is_executed_request_by_request(process):
    with grpc.insecure_channel(process.address) as channel, grpc.insecure_channel(process.address) as other:
        good, bad = (
            Stub(each).ModelInfer.future(asking("onnxruntime", row)) for each, row in ((channel, 1), (other, SECRET))
        )
        assert good.result(60).model_name == "onnxruntime"
        with pytest.raises(grpc.RpcError) as failed:
            bad.result(60)
    assert str(SECRET) in failed.value.details()


def test_an_error_of_one_request_is_not_told_to_its_mates(process):
    with grpc.insecure_channel(process.address) as channel, grpc.insecure_channel(process.address) as other:
        calls = [Stub(each).ModelInfer.future(asking("python", row)) for each, row in ((channel, 1), (other, SECRET))]
        for call in calls:
            with pytest.raises(grpc.RpcError) as failed:
                call.result(60)
            told = failed.value.details()
            assert str(SECRET) not in told
            assert "a batch of 2 requests failed; the server's log says why" in told
    mark = re.search("error [0-9a-f]{8}", told)[0]
    assert str(SECRET) in process.says(f"{mark}: ")


@pytest.mark.parametrize("model", ["onnxruntime", "python"])
def test_who_is_alone_is_told_the_error(process, model):
    with grpc.insecure_channel(process.address) as channel, pytest.raises(grpc.RpcError) as failed:
        Stub(channel).ModelInfer(asking(model, 1, SECRET))
    assert str(SECRET) in failed.value.details()
