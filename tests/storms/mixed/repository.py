"""The models of the mixed run: each answers so that its client can tell a wrong answer from the right one."""

from __future__ import annotations

import warnings
from pathlib import Path

IDENTITY = """
backend: "identity"
max_batch_size: 16
input { name: "x" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "y" data_type: TYPE_UINT8 dims: [ -1 ] }
dynamic_batching { }
instance_group { kind: KIND_CPU count: 2 }
"""
GATHER = 'parameters { key: "gather" value { string_value: "true" } }\n'
SLOW = 'parameters { key: "delay_us" value { string_value: "20000" } }\n'
COALESCE = 'parameters { key: "coalesce_requests" value { string_value: "true" } }\n'
CACHE = "response_cache { enable: true }\n"

# y = 2 x, computed in place.
DOUBLER = """
backend: "pytorch"
max_batch_size: 16
input { name: "INPUT__0" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUTPUT__0" data_type: TYPE_INT32 dims: [ -1 ] }
dynamic_batching { }
instance_group { kind: KIND_CPU count: 2 }
"""

# y = x + 1, computed in place where the model may write.
ADDER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        try:
            x += 1
        except ValueError:  # it is read-only
            x = x + 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""

# x = (number of responses, nonce, bytes of each): response i is (i, nonce, ...).
MANY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count, nonce, size = (int(v) for v in pb_utils.get_input_tensor_by_name(request, "x").as_numpy().flat[:3])
            sender = request.get_response_sender()
            for index in range(count):
                if request.is_cancelled():
                    break
                y = np.full((1, max(2, size // 4)), nonce, np.int32)
                y[0, 0] = index
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

# y = x unless x begins with -1.
SHAKY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if x.flat[0] == -1:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("on purpose"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""

# y = 2 (x + 1), by calling `adder` and `doubler`.
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        first = pb_utils.InferenceRequest(model_name="adder", requested_output_names=["y"], inputs=[x]).exec()
        if first.has_error():
            return pb_utils.InferenceResponse(error=first.error())
        y = pb_utils.get_output_tensor_by_name(first, "y")
        again = pb_utils.Tensor.from_dlpack("INPUT__0", y.to_dlpack())
        second = pb_utils.InferenceRequest(
            model_name="doubler", requested_output_names=["OUTPUT__0"], inputs=[again]
        ).exec()
        if second.has_error():
            return pb_utils.InferenceResponse(error=second.error())
        y = pb_utils.get_output_tensor_by_name(second, "OUTPUT__0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])
"""

PYTHON = """
backend: "python"
max_batch_size: 16
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
BATCHING = "dynamic_batching { }\n"
DECOUPLED = """
model_transaction_policy { decoupled: true }
parameters { key: "decoupled_model_infer" value { string_value: "true" } }
"""

DECOUPLED_IDENTITY = """
backend: "identity"
max_batch_size: 0
input { name: "x" data_type: TYPE_INT32 dims: [ -1, -1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1, -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


def ensemble(outputs: tuple[str, ...], *steps: tuple[str, dict[str, str], dict[str, str]], more: str = "") -> str:
    """An ensemble over INT32 tensors: steps of (model, inputs by tensor, outputs by tensor)."""
    lines = ["max_batch_size: 16", 'input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }']
    lines += [f'output {{ name: "{name}" data_type: TYPE_INT32 dims: [ -1 ] }}' for name in outputs]
    lines.append("ensemble_scheduling {")
    for model, inputs, results in steps:
        lines.append(f'  step {{ model_name: "{model}" model_version: -1')
        lines += [f'    input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
        lines += [f'    output_map {{ key: "{key}" value: "{value}" }}' for key, value in results.items()]
        lines.append("  }")
    return "\n".join([*lines, "}", more])


def doubled(model: str, source: str, result: str) -> tuple[str, dict[str, str], dict[str, str]]:
    return model, {"INPUT__0": source}, {"OUTPUT__0": result}


def added(source: str, result: str) -> tuple[str, dict[str, str], dict[str, str]]:
    return "adder", {"x": source}, {"y": result}


# Three steps in place, each of whose inputs is also an output or another step's input.
CHAIN = ensemble(
    ("twice", "four", "eight", "plus", "also"),
    doubled("doubler", "x", "twice"),
    doubled("doubler", "twice", "four"),
    doubled("doubler", "four", "eight"),
    added("twice", "plus"),
    added("x", "also"),
)
# The same after a step with a response cache and one that coalesces.
REUSED = ensemble(
    ("twice", "four", "plus"),
    doubled("cached", "x", "twice"),
    doubled("doubler", "twice", "four"),
    added("twice", "plus"),
)
OVER_MANY = ensemble(("y",), ("many", {"x": "x"}, {"y": "y"}), more="model_transaction_policy { decoupled: true }")


def write(folder: Path) -> Path:
    """Write the repository; returns the folder."""
    texts = {
        "echo": IDENTITY + GATHER,
        "shared": IDENTITY,
        "slow": IDENTITY + SLOW,
        "twins": IDENTITY + SLOW + COALESCE,
        "doubler": DOUBLER,
        "cached": DOUBLER + CACHE + COALESCE,
        "adder": PYTHON + BATCHING,
        "shaky": PYTHON + BATCHING,
        "caller": PYTHON + BATCHING,
        "many": PYTHON + DECOUPLED,
        "flood": PYTHON + DECOUPLED,
        "pieces": DECOUPLED_IDENTITY + DECOUPLED,
        "chain": CHAIN,
        "reused": REUSED,
        "over_many": OVER_MANY,
    }
    code = {"adder": ADDER, "shaky": SHAKY, "caller": CALLER, "many": MANY, "flood": MANY}
    for name, text in texts.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(text)
        if name in code:
            (folder / name / "1" / "model.py").write_text(code[name])
        if text.startswith(DOUBLER):
            write_doubler(folder / name / "1" / "model.pt")
    return folder


def write_doubler(path: Path) -> None:
    """A TorchScript module that doubles its input in place."""
    import torch

    class Doubler(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Doubler()).save(str(path))
