"""Tiny models of OpenVINO's own format."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import inferd.backends.openvino  # noqa: F401 (before the runtime, which it keeps from telling its makers of being imported)

openvino = importlib.import_module("openvino")
ops = importlib.import_module("openvino.opset13")

ELEMENTS = {
    "BOOL": "boolean",
    "UINT8": "u8",
    "UINT16": "u16",
    "UINT32": "u32",
    "UINT64": "u64",
    "INT8": "i8",
    "INT16": "i16",
    "INT32": "i32",
    "INT64": "i64",
    "FP16": "f16",
    "FP32": "f32",
    "FP64": "f64",
    "BF16": "bf16",
    "BYTES": "string",
}


def parameter(name: str, element: str = "f32", shape: Sequence[int] | None = (-1, 2), layout: str = "") -> Any:
    """An input; -1 is a dimension that is left open."""
    partial = openvino.PartialShape.dynamic() if shape is None else openvino.PartialShape(list(shape))
    made = ops.parameter(partial, getattr(openvino.Type, element), name=name)
    made.output(0).set_names({name})
    if layout:
        made.set_layout(openvino.Layout(layout))
    return made


def save(
    folder: Path, inputs: Sequence[Any], outputs: Mapping[str, Any], name: str = "model.xml", layout: str = ""
) -> Path:
    """Write a model of these inputs and outputs; returns `folder`."""
    results = []
    for output, node in outputs.items():
        port = node if hasattr(node, "add_names") else node.output(0)
        port.add_names({output})
        result = ops.result(port)
        if layout:
            result.set_layout(openvino.Layout(layout))
        results.append(result)
    openvino.save_model(openvino.Model(results, list(inputs), "m"), folder / name, compress_to_fp16=False)
    return folder


def same(folder: Path, datatype: str = "FP32", shape: Sequence[int] | None = (-1, 2)) -> Path:
    """y is x, which goes through an operator unless it is text."""
    x = parameter("x", ELEMENTS[datatype], shape)
    y = x if datatype == "BYTES" else ops.concat([ops.reshape(x, ops.shape_of(x), False)], 0)
    return save(folder, [x], {"y": y})


def slow(folder: Path, rows: int = -1, layers: int = 64, width: int = 512) -> Path:
    """y takes a while."""
    import numpy as np

    weight = ops.constant(np.eye(width, dtype=np.float32))
    x = parameter("x", shape=(rows, width))
    y = x
    for _ in range(layers):
        y = ops.tanh(ops.matmul(y, weight, False, False))
    return save(folder, [x], {"y": y})


def widened(folder: Path) -> Path:
    """y is twice x, [N, 1] of INT64; a run fails, for want of another row, if an element is 13 to 25."""
    x = parameter("x", "i64", (-1, 1))
    more = ops.reduce_max(ops.divide(x, ops.constant([13], openvino.Type.i64)), [0, 1], False)
    rows = ops.gather(ops.shape_of(x), ops.constant([0], openvino.Type.i64), 0)
    shape = ops.concat([ops.add(rows, more), ops.constant([1], openvino.Type.i64)], 0)
    return save(folder, [x], {"y": ops.reshape(ops.multiply(x, ops.constant([2], openvino.Type.i64)), shape, False)})
