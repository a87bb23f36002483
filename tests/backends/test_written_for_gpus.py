"""Configurations that were written for machines with GPUs: what of them is a hint, and what has to be there."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from tests import gpu_stub
from tests.backends.models import onnx_bytes, save_script
from tests.backends.test_tensorflow import PLAIN, environment, saved
from tests.engine.serving import infer, request, serving_folder

ROOT = Path(__file__).resolve().parents[2]


def gpu(accelerator: str) -> str:
    return f"optimization {{ execution_accelerators {{ gpu_execution_accelerator: [ {{ {accelerator} }} ] }} }}"


IMAGE = """
name: "image"
platform: "onnxruntime_onnx"
""" + gpu('name: "tensorrt" parameters { key: "precision_mode" value: "FP16" }')  # its tensors are in the file
IDS = """
platform: "onnxruntime_onnx"
max_batch_size: 32
input [ { name: "ids" data_type: TYPE_INT64 dims: [-1] }, { name: "mask" data_type: TYPE_INT64 dims: [-1] } ]
output [ { name: "vector" data_type: TYPE_INT64 dims: [-1] } ]
version_policy: { latest {num_versions: 1}}
dynamic_batching { }
""" + gpu('name: "tensorrt"')
LAYER = """
platform: "onnxruntime_onnx"
optimization { execution_accelerators {cpu_execution_accelerator : [ {name : "openvino"}]
}}
"""
RANK = """
platform: "tensorflow_savedmodel"
max_batch_size: 128
input [ { name: "x" data_type: TYPE_FP32 dims: [2] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [2] } ]
dynamic_batching { }
""" + gpu('name: "auto_mixed_precision"')
SCRIPT = """
platform: "pytorch_libtorch"
max_batch_size: 64
input [ { name: "INPUT__0" data_type: TYPE_INT64 dims: [-1] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_INT64 dims: [-1] } ]
dynamic_batching { }
parameters: { key: "INFERENCE_MODE" value: { string_value:"true" } }
instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]
"""
MODULE = SCRIPT.replace('platform: "pytorch_libtorch"', 'backend: "pytorch" runtime: "model.py"')


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x


SAME = "import torch\n\nclass Same(torch.nn.Module):\n    def forward(self, x):\n        return x\n"


def add(root: Path, name: str, config: str) -> Path:
    version = root / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config)
    return version


def add_onnx(root: Path, name: str, config: str, kind: int, shape: list, inputs: list[str], output: str) -> None:
    """The output is the sum of the inputs."""
    values = [helper.make_tensor_value_info(each, kind, shape) for each in (*inputs, output)]
    node = helper.make_node("Sum" if kind == TensorProto.FLOAT else "Add", inputs, [output])
    (add(root, name, config) / "model.onnx").write_bytes(onnx_bytes([node], values[:-1], values[-1:]))


async def test_accelerators_of_gpus_are_hints_on_a_cpu(tmp_path, caplog):
    add_onnx(tmp_path, "image", IMAGE, TensorProto.FLOAT, [1, 3, 8, 8], ["data"], "same")
    add_onnx(tmp_path, "ids", IDS, TensorProto.INT64, ["B", "L"], ["ids", "mask"], "vector")
    async with serving_folder(tmp_path) as engine:
        pixels = np.random.default_rng(1).random((1, 3, 8, 8), np.float32)
        assert (await infer(engine, request("image", data=pixels))).array("same").tolist() == pixels.tolist()
        ones = np.ones((2, 7), np.int64)
        assert (await infer(engine, request("ids", ids=ones, mask=ones))).array("vector").tolist() == [[2] * 7] * 2
        assert [each.kind for each in engine.model("image").config.instance_group] == [2]  # KIND_CPU
    for name in ("image", "ids"):
        assert (
            f"gpu_execution_accelerator of model '{name}' has no effect: no instance of the model is on" in caplog.text
        )


async def test_the_accelerator_openvino_with_tensors_from_the_file(tmp_path):
    if "OpenVINOExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.importorskip("openvino")
    add_onnx(tmp_path, "layer", LAYER, TensorProto.FLOAT, ["N", 4], ["x"], "y")
    async with serving_folder(tmp_path) as engine:
        assert engine.model("layer").config.max_batch_size == 4
        rows = np.arange(16, dtype=np.float32).reshape(4, 4)
        assert (await infer(engine, request("layer", x=rows))).array("y").tolist() == rows.tolist()


def test_a_gpu_that_the_framework_cannot_use_is_told_with_what_to_install(tmp_path):
    """A server with a driver and builds of the frameworks for CPUs: it computes nothing elsewhere than it is told."""
    expected, options = {}, []
    if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
        add_onnx(tmp_path, "image", IMAGE, TensorProto.FLOAT, [1, 3, 8, 8], ["data"], "same")
        expected["image"] = "install onnxruntime-gpu in place of onnxruntime"
    if torch.version.cuda is None:
        save_script(Same(), add(tmp_path, "script", SCRIPT))
        (add(tmp_path, "module", MODULE) / "model.py").write_text(SAME)
        expected["script"] = expected["module"] = "-m pip install --force-reinstall torch), or write kind: KIND_CPU"
    if environment():
        saved(add(tmp_path, "rank", RANK), serving_default=PLAIN)
        expected["rank"] = '-m pip install "tensorflow[and-cuda]" (in place of tensorflow-cpu), or write kind: KIND_CPU'
        options = ["--backend-config", f"tensorflow,environment={environment()}"]
    if not expected:
        pytest.skip("all frameworks here are built for GPUs")
    command = [sys.executable, "-m", "inferd", "serve", "--model-repository", str(tmp_path)]
    command += ["--cuda-driver", str(gpu_stub.library()), "--grpc-address", f"unix:{tmp_path}/socket", *options]
    variables = {**os.environ, "CUDA_STUB": "devices=1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    for model, text in expected.items():
        (line,) = (line for line in done.stderr.splitlines() if f"failed to load '{model}'" in line)
        assert text in line.replace('\\"', '"'), line
