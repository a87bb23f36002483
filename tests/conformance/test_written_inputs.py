"""A TorchScript model that computes in place, in a real server: what a client, or another step, has stays as it is."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from inferd.server.pb import grpc_service_pb2 as pb
from tests.conformance.client import request
from tests.conformance.shared import Object, connected, register, serving, unregister

WIDTH = 4096

MODEL = """
platform: "pytorch_libtorch"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
STEPS = "".join(
    f'step {{ model_name: "double" model_version: -1 input_map {{ key: "INPUT0" value: "{given}" }} '
    f'output_map {{ key: "OUTPUT0" value: "{made}" }} }}\n'
    for given, made in (("INPUT0", "A"), ("A", "B"), ("B", "OUTPUT0"))
)
ENSEMBLE = f"""
platform: "ensemble"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "A" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "B" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
ensemble_scheduling {{ {STEPS} }}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    torch = pytest.importorskip("torch")

    class Double(torch.nn.Module):
        def forward(self, x):
            x *= 2
            return x

    root = tmp_path_factory.mktemp("written")
    for name, config in {"double": MODEL, "three": ENSEMBLE}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Double()).save(str(root / "double" / "1" / "model.pt"))
    with serving("native", root, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def stub(server):
    with connected(server.unix) as stub:
        yield stub
        unregister(stub)


def numbers(response):
    return {
        output.name: set(np.frombuffer(raw, np.float32).tolist())
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def test_steps_that_compute_in_place(stub):
    def ask(number):
        return numbers(stub.ModelInfer(request("three", np.full((1, WIDTH), number, np.float32)), timeout=30))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(200)))
    assert answers == [{"A": {2 * n}, "B": {4 * n}, "OUTPUT0": {8 * n}} for n in range(200)]


@pytest.mark.parametrize("model", ["double", "three"])
def test_a_region_of_a_client_is_not_written_to(stub, model):
    content = np.full(WIDTH, 3, np.float32).tobytes()
    with Object(content) as made:
        register(stub, "r", made, len(content))
        for _ in range(3):
            message = pb.ModelInferRequest(model_name=model)
            tensor = message.inputs.add(name="INPUT0", datatype="FP32", shape=(1, WIDTH))
            tensor.parameters["shared_memory_region"].string_param = "r"
            tensor.parameters["shared_memory_byte_size"].int64_param = len(content)
            answer = numbers(stub.ModelInfer(message, timeout=30))
            assert answer["OUTPUT0"] == ({6} if model == "double" else {24})
            assert made.read() == content
