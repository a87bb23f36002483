"""A repository with the one model that packages are tried with, and a question to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, save
from tritonclient import grpc as triton


def write_repository(folder: Path) -> Path:
    """`twice`, an ONNX model, without a configuration."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "twice", [x], [y])
    (folder / "twice" / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save(model, str(folder / "twice" / "1" / "model.onnx"))
    (folder / "twice" / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\n')
    return folder


def check_answer(address: str) -> None:
    """The model answers what it should."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with triton.InferenceServerClient(address) as client:
        given = triton.InferInput("x", x.shape, "FP32")
        given.set_data_from_numpy(x)
        np.testing.assert_array_equal(client.infer("twice", [given]).as_numpy("y"), 2 * x)
