"""Models with a state that answer with the sum of their sequence so far, in ONNX and TorchScript, and their client."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from tritonclient import grpc as triton

CONFIG = """
backend: "%s"
max_batch_size: 8
input { name: "%s" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "%s" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 2 }
sequence_batching {
  %s
  max_sequence_idle_microseconds: %d
  control_input { name: "%s" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "%s" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
  state { input_name: "%s" output_name: "%s" data_type: TYPE_FP32 dims: [ 1 ]
          initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
}
%s
"""
ONNX_NAMES = ("x", "y", "START", "READY", "state", "state_out")
TORCH_NAMES = ("INPUT__0", "OUTPUT__0", "START__1", "READY__2", "STATE__3", "STATE_OUT__1")
MINUTE = 60_000_000


def config(backend: str, strategy: str, idle_us: int = MINUTE, more: str = "") -> str:
    x, y, start, ready, state, state_out = ONNX_NAMES if backend == "onnxruntime" else TORCH_NAMES
    return CONFIG % (backend, x, y, strategy, idle_us, start, ready, state, state_out, more)


def write_onnx(path: Path, gain: float = 1) -> None:
    """y and the state are gain * x + state * (1 - START), 0 where there is no sequence."""
    from onnx import TensorProto, helper, save

    tensors = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in ONNX_NAMES}
    constants = [
        helper.make_tensor(*each)
        for each in (("one", TensorProto.FLOAT, [1], [1.0]), ("gain", TensorProto.FLOAT, [1], [float(gain)]))
    ]
    nodes = [
        helper.make_node("Sub", ["one", "START"], ["going_on"]),
        helper.make_node("Mul", ["state", "going_on"], ["kept"]),
        helper.make_node("Mul", ["x", "gain"], ["more"]),
        helper.make_node("Add", ["more", "kept"], ["sum"]),
        helper.make_node("Mul", ["sum", "READY"], ["y"]),
        helper.make_node("Identity", ["y"], ["state_out"]),
    ]
    inputs = [tensors[name] for name in ("x", "START", "READY", "state")]
    graph = helper.make_graph(nodes, "g", inputs, [tensors["y"], tensors["state_out"]], initializer=constants)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path / "model.onnx"))


def write_torch(path: Path) -> None:
    import torch

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, start: torch.Tensor, ready: torch.Tensor, state: torch.Tensor):
            total = (x + state * (1 - start)) * ready
            return total, total

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Sum()).save(str(path / "model.pt"))


def inputs(model: str, value: float):
    tensor = triton.InferInput("INPUT__0" if "torch" in model else "x", [1, 1], "FP32")
    return [tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))]


def output(model: str, result) -> float:
    return result.as_numpy("OUTPUT__0" if "torch" in model else "y").item()


def step(client, model: str, value: float, sequence: int | str, **flags) -> float:
    return output(model, client.infer(model, inputs(model, value), sequence_id=sequence, **flags))
