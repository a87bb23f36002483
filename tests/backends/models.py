"""Specs and tiny models for the tests of backends."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.api import Backend, BackendError, Instance, InstanceSpec, ModelSource, ModelSpec, TensorSpec

Tensors = Sequence[tuple[str, str, tuple[int, ...]] | TensorSpec]


def tensors(described: Tensors) -> tuple[TensorSpec, ...]:
    return tuple(item if isinstance(item, TensorSpec) else TensorSpec(*item) for item in described)


def source(
    path: Path,
    inputs: Tensors = (),
    outputs: Tensors = (),
    parameters: Mapping[str, str] | None = None,
    **fields: Any,
) -> ModelSource:
    """Version 1 of the model "m", whose files lie in `path`."""
    fields.setdefault("backend", "test")
    spec = ModelSpec("m", inputs=tensors(inputs), outputs=tensors(outputs), parameters=parameters or {}, **fields)
    return ModelSource(spec, 1, path)


def instance(backend: Backend, described: ModelSource) -> Instance:
    """Load the model and make one instance."""
    return backend.load(described).create_instance(InstanceSpec("m_0"))


def refusal(backend: Backend, described: ModelSource) -> str:
    """The text with which a backend refuses to load a model."""
    with pytest.raises(BackendError) as caught:
        backend.load(described)
    return str(caught.value)


def save_script(module: Any, path: Path) -> Path:
    """Write a torch module as path/model.pt; returns `path`."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(module).save(str(path / "model.pt"))
    return path


def onnx_bytes(
    nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], initializers: Sequence[Any] = ()
) -> bytes:
    """A serialised ONNX model."""
    from onnx import helper

    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), initializer=list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString()


def identity_onnx(element: int, shape: Sequence[int | str | None] | None) -> bytes:
    """y is x."""
    from onnx import helper

    x, y = (helper.make_tensor_value_info(name, element, shape) for name in "xy")
    return onnx_bytes([helper.make_node("Identity", ["x"], ["y"])], [x], [y])


def endless_onnx() -> bytes:
    """y counts to the largest x, one step of a Loop at a time; x and y are INT64 [N, 1]."""
    from onnx import TensorProto, helper

    def value(name: str, element: int, shape: Sequence[int | str]) -> Any:
        return helper.make_tensor_value_info(name, element, shape)

    one = helper.make_node("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.INT64, [], [1]))
    body = helper.make_graph(
        [
            one,
            helper.make_node("Add", ["count_in", "one"], ["count_out"]),
            helper.make_node("Identity", ["go_in"], ["go_out"]),
        ],
        "body",
        [
            value("step", TensorProto.INT64, []),
            value("go_in", TensorProto.BOOL, []),
            value("count_in", TensorProto.INT64, []),
        ],
        [value("go_out", TensorProto.BOOL, []), value("count_out", TensorProto.INT64, [])],
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["steps"], keepdims=0),
        helper.make_node("Sub", ["x", "x"], ["zeros"]),
        helper.make_node("ReduceMax", ["zeros"], ["start"], keepdims=0),
        helper.make_node("Loop", ["steps", "", "start"], ["count"], body=body),
        helper.make_node("Add", ["zeros", "count"], ["y"]),
    ]
    x, y = (value(name, TensorProto.INT64, ["N", 1]) for name in "xy")
    return onnx_bytes(nodes, [x], [y])
