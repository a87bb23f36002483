"""Ensembles as clients see them, on both doors: tritonclient, metadata, errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.conformance import doors

IDENTITY = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { }
"""


def ensemble(*models):
    """A chain of these models."""
    tensors = ["INPUT0", *(f"t{n}" for n in range(1, len(models))), "OUTPUT0"]
    steps = "".join(
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "INPUT0" value: "{given}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{gives}" }} }}\n'
        for model, given, gives in zip(models, tensors, tensors[1:], strict=False)
    )
    return f"""
platform: "ensemble"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
ensemble_scheduling {{ {steps} }}
"""


@pytest.fixture(scope="module")
def ensembles(tmp_path_factory):
    root = tmp_path_factory.mktemp("ensembles")
    configs = {
        "fast": IDENTITY,
        "e": ensemble("fast", "fast", "fast"),
        "nested": ensemble("e", "fast"),
    }
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    return root


@pytest.fixture(scope="module", params=doors.NAMES)
def address(request, ensembles):
    if request.config.getoption("--target"):
        pytest.skip("the server needs the models of this test")
    with doors.running_server(request.param, ensembles) as process:
        yield process.address


@pytest.fixture
def client(address):
    with triton.InferenceServerClient(address) as client:
        yield client


def tensor(array):
    tensor = triton.InferInput("INPUT0", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("model", ["e", "nested"])
def test_an_answer_goes_through_all_steps(client, model):
    answer = client.infer(model, [tensor(ARRAY)], request_id="7")
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ARRAY)
    assert (answer.get_response().model_name, answer.get_response().id) == (model, "7")


def test_a_large_tensor(client):
    array = np.random.default_rng(0).random((8, 100_000), np.float32)
    np.testing.assert_array_equal(client.infer("e", [tensor(array)]).as_numpy("OUTPUT0"), array)


def test_a_stream_to_an_ensemble_is_answered_in_order(client):
    answers, done = [], threading.Semaphore(0)

    def callback(result, error):
        answers.append((result, error))
        done.release()

    client.start_stream(callback)
    for number in range(20):
        client.async_stream_infer("e", [tensor(ARRAY + number)], request_id=str(number))
    for _ in range(20):
        assert done.acquire(timeout=20)
    client.stop_stream()
    for number, (result, error) in enumerate(answers):
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ARRAY + number)


def test_readiness_metadata_and_config_are_those_of_an_ensemble(client):
    assert client.is_model_ready("e")
    assert client.get_model_metadata("e").platform == "ensemble"
    config = client.get_model_config("e").config
    assert [step.model_name for step in config.ensemble_scheduling.step] == ["fast"] * 3
    assert (config.platform, config.backend, len(config.instance_group)) == ("ensemble", "", 0)


def test_a_wrong_request_is_told_of_the_ensemble(client):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("e", [tensor(np.zeros((9, 1), np.float32))])
    assert "inference request batch-size must be <= 8 for 'e'" in caught.value.message()
