"""Guards the whole way of a request to a GPU, in a server of its own on the stub driver, through a gRPC client."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests import gpu_stub
from tests.fakes.tensorrt import plan, tensor

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "/inference.GRPCInferenceService"
CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 100 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 100 ] }
instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }
dynamic_batching { }
optimization { cuda { graphs: true } }
"""


PLAN = plan(
    "double",
    [tensor("x", "FLOAT", (-1, 100))],
    [tensor("y", "FLOAT", (-1, 100))],
    [{"x": [(1, 100), (8, 100), (8, 100)]}],
)
PLANS = """
instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }
optimization { cuda { graphs: true } }
"""


@pytest.fixture
def server(request, tmp_path):
    """A channel to a server with this configuration and plan, and what is known of it when it has ended."""
    config, content = request.param
    model, address, report = tmp_path / "models" / "m", f"unix:{tmp_path}/socket", tmp_path / "report"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config)
    if content:
        (model / "1" / "model.plan").write_bytes(content)
    command = [sys.executable, "-m", "inferd", "serve", "--model-repository", str(model.parent)]
    command += ["--grpc-address", address, "--cuda-driver", str(gpu_stub.library())]
    command += ["--cuda-memory-pool-byte-size", "0:4194304", "--pinned-memory-pool-byte-size", "8388608"]
    environment = {
        **os.environ,
        "CUDA_STUB": "devices=2,copy_us=50,d2d_us=200",
        "CUDA_STUB_REPORT": str(report),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'fakes'}",  # where a TensorRT is
    }
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    ended = {}

    def end():
        process.send_signal(signal.SIGTERM)
        _, ended["log"] = process.communicate(timeout=60)
        ended["report"] = report.read_text()
        return ended

    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        yield channel, end
    if not ended:
        end()


@pytest.mark.parametrize(
    ("server", "factor"), [((CONFIG, b""), 1), ((PLANS, PLAN), 2)], indirect=["server"], ids=["identity", "tensorrt"]
)
def test_answers_through_two_gpus(server, factor):
    channel, end = server
    infer = channel.unary_unary(
        f"{SERVICE}/ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
    )
    sent = [np.full((1 + i % 3, 100), i, np.float32) for i in range(300)]
    pending = []
    for each in sent:
        message = pb.ModelInferRequest(model_name="m")
        message.inputs.add(name="x", datatype="FP32", shape=each.shape)
        message.raw_input_contents.append(each.tobytes())
        pending.append(infer.future(message, timeout=60))
    for each, answer in zip(sent, pending, strict=True):
        assert answer.result().raw_output_contents[0] == (factor * each).tobytes()
    ended = end()
    assert "GPU 0: stub device 0" in ended["log"]
    assert "GPU 1: stub device 1" in ended["log"]
    assert "violation" not in ended["report"]
