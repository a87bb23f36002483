"""A repository with the models that packages are tried with, and a question to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, save
from tritonclient import grpc as triton

OWN = """
import triton_python_backend_utils as pb_utils
import _native, backends.api, server

class TritonPythonModel:
    def execute(self, requests):
        factor = _native.ONE * backends.api.ONE + server.ONE
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x * x.dtype.type(factor))]) for x in given]
"""
OWN_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


def write_own_names(folder: Path) -> Path:
    """`own`, a Python model that imports neighbours whose names are those of folders of the source tree."""
    version = folder / "own" / "1"
    files = {"model.py": OWN, **dict.fromkeys(("server.py", "backends/api.py", "_native/__init__.py"), "ONE = 1\n")}
    for name, text in {**files, "backends/__init__.py": ""}.items():
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        (version / name).write_text(text)
    (folder / "own" / "config.pbtxt").write_text(OWN_CONFIG)
    return folder


def write_repository(folder: Path) -> Path:
    """`twice`, an ONNX model, without a configuration, and `own`."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "twice", [x], [y])
    (folder / "twice" / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save(model, str(folder / "twice" / "1" / "model.onnx"))
    (folder / "twice" / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\n')
    return write_own_names(folder)


def check_response(address: str, model: str = "twice", **tls: object) -> None:
    """The model answers what it should; `tls` is for the client."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with triton.InferenceServerClient(address, **tls) as client:
        given = triton.InferInput("x", x.shape, "FP32")
        given.set_data_from_numpy(x)
        np.testing.assert_array_equal(client.infer(model, [given]).as_numpy("y"), 2 * x)
