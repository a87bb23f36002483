"""A real server for clients, with models that say what came."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from bench.repository import Identity, write
from tests.conformance.shared import serving

GATHER = {"gather": "true"}
MODELS = (
    Identity("fp32", (("FP32", 1),), parameters=GATHER),
    Identity("fp16", (("FP16", 1),), parameters=GATHER),
    Identity("bf16", (("BF16", 1),), parameters=GATHER),
    Identity("int64", (("INT64", 2),), parameters=GATHER),
    Identity("uint8", (("UINT8", 1),), parameters=GATHER),
    Identity("bool", (("BOOL", 1),), parameters=GATHER),
    Identity("text", (("BYTES", 1),), parameters=GATHER),
    Identity("pair", (("FP32", 1), ("BYTES", 1)), parameters=GATHER),
    Identity("ordered", (("FP32", 1),), batching="sequence_batching { }", parameters=GATHER),
    Identity("late", (("FP32", 1),), batching="", parameters={**GATHER, "delay_us": "400000"}),
    Identity("later", (("FP32", 1),), batching="", parameters={**GATHER, "delay_us": "3000000"}),
)
REPEAT = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends each number back on its own; a negative one is an error."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel():
                if value < 0:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no {value}")))
                else:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
REPEAT_CONFIG = """
name: "repeat"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("client") / "models"
    write(folder, MODELS)
    (folder / "repeat" / "1").mkdir(parents=True)
    (folder / "repeat" / "1" / "model.py").write_text(REPEAT)
    (folder / "repeat" / "config.pbtxt").write_text(REPEAT_CONFIG)
    return folder


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    arguments = ("--model-control-mode", "explicit", "--load-model", "*", "--model-load-overrides")
    with serving("native", models, tmp_path_factory.mktemp("socket"), *arguments) as running:
        yield running


@pytest.fixture(params=["tritonclient", "inferd_client"])
def package(request):
    """The name of a client's package."""
    return request.param


@pytest.fixture
def grpcclient(package):
    """The module of its synchronous client."""
    return importlib.import_module(f"{package}.grpc")


@pytest.fixture
def aioclient(package):
    """The module of its asynchronous client."""
    return importlib.import_module(f"{package}.grpc.aio")
