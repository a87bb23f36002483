"""Ensembles as clients see them, on both doors: tritonclient, metadata, statistics, errors, deadlines."""

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
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
dynamic_batching {{ }}
{extra}
"""

SLOW = 'parameters { key: "delay_us" value { string_value: "1000000" } }'


def ensemble(*models, extra=""):
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
{extra}
"""


@pytest.fixture(scope="module")
def ensembles(tmp_path_factory):
    root = tmp_path_factory.mktemp("ensembles")
    configs = {
        "fast": IDENTITY.format(extra=""),
        "slow": IDENTITY.format(extra=SLOW),
        "e": ensemble("fast", "fast", "fast"),
        "nested": ensemble("e", "fast"),
        "slow_e": ensemble("fast", "slow"),
        "one_at_a_time": ensemble(
            "slow", extra='parameters { key: "queue_policy.max_queue_size" value { string_value: "1" } }'
        ),
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


@pytest.mark.parametrize("model", ["e", "nested", "slow_e"])
def test_an_answer_goes_through_all_steps(client, model):
    answer = client.infer(model, [tensor(ARRAY)], request_id="7")
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ARRAY)
    assert (answer.get_response().model_name, answer.get_response().id) == (model, "7")


def test_a_large_tensor(client):
    array = np.random.default_rng(0).random((8, 100_000), np.float32)
    np.testing.assert_array_equal(client.infer("e", [tensor(array)]).as_numpy("OUTPUT0"), array)


def test_a_stream(client):
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


def test_information(client):
    assert client.is_model_ready("e")
    assert client.get_model_metadata("e").platform == "ensemble"
    config = client.get_model_config("e").config
    assert [step.model_name for step in config.ensemble_scheduling.step] == ["fast"] * 3
    assert (config.platform, config.backend, len(config.instance_group)) == ("ensemble", "", 0)


def test_statistics(client):
    def counts(name):
        found = client.get_inference_statistics(name).model_stats[0]
        return found.inference_count, found.inference_stats.success.count

    ensemble_before, step_before = counts("e"), counts("fast")
    client.infer("e", [tensor(ARRAY)])
    assert counts("e") == (ensemble_before[0] + 2, ensemble_before[1] + 1)
    assert counts("fast") == (step_before[0] + 6, step_before[1] + 3)


def test_a_wrong_request_is_told_of_the_ensemble(client):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("e", [tensor(np.zeros((9, 1), np.float32))])
    assert "inference request batch-size must be <= 8 for 'e'" in caught.value.message()


def test_the_deadline_of_the_client(client):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("slow_e", [tensor(ARRAY)], client_timeout=0.05)
    assert "DEADLINE_EXCEEDED" in caught.value.status()


def test_the_limit_of_an_ensemble(client):
    results, done = [], threading.Semaphore(0)

    def callback(result, error):
        results.append(error)
        done.release()

    for _ in range(2):
        client.async_infer("one_at_a_time", [tensor(ARRAY)], callback)
    for _ in range(2):
        assert done.acquire(timeout=20)
    [refused] = [error for error in results if error is not None]
    assert "UNAVAILABLE" in refused.status()
    assert "Exceeds maximum queue size: ensemble 'one_at_a_time' version 1" in refused.message()
