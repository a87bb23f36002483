"""Small ONNX models for the real builders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _save(path: Path, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], weights: Sequence[Any] = ()):
    from onnx import helper, save

    def described(tensors: Sequence[Any]) -> list[Any]:
        return [helper.make_tensor_value_info(*each) for each in tensors]

    graph = helper.make_graph(nodes, "m", described(inputs), described(outputs), list(weights))
    path.parent.mkdir(parents=True, exist_ok=True)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)


WEIGHTS = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)


def linear(path: Path) -> None:
    """y = max(0, x WEIGHTS), for batches of any size."""
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    x, y = ("x", TensorProto.FLOAT, ["n", 16]), ("y", TensorProto.FLOAT, ["n", 8])
    _save(path, nodes, [x], [y], [numpy_helper.from_array(WEIGHTS, "w")])


def where(path: Path) -> None:
    """y are the indices of the elements of x that are not 0: how many, only the data tell."""
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    x, y = ("x", TensorProto.FLOAT, [64]), ("y", TensorProto.INT64, [1, "found"])
    _save(path, [helper.make_node("NonZero", ["x"], ["y"])], [x], [y])


def expand(path: Path) -> None:
    """y is x of one column, repeated to the shape s, whose first value is the batch size."""
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    x, s = ("x", TensorProto.FLOAT, ["n", 1]), ("s", TensorProto.INT64, [2])
    _save(path, [helper.make_node("Expand", ["x", "s"], ["y"])], [x, s], [("y", TensorProto.FLOAT, ["n", "k"])])
