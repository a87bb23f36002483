"""Sequences as Triton's own client sends them, on both doors of a real server, to models of every kind with a state.

Each model answers with the sum of its sequence so far; ONNX and TorchScript get it as implicit state.
"""

from __future__ import annotations

import queue
import random
import time

import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from tests.conformance import doors
from tests.conformance.sums import config, inputs, output, step, write_onnx, write_torch

STREAM = 'parameters { key: "sequence_ends_with_stream" value { string_value: "true" } }'


MODELS = {
    "onnx_direct": config("onnxruntime", "direct { }"),
    "onnx_oldest": config("onnxruntime", "oldest { max_candidate_sequences: 64 max_queue_delay_microseconds: 100 }"),
    "torch_direct": config("pytorch", "direct { }"),
    "torch_oldest": config("pytorch", "oldest { max_candidate_sequences: 64 }"),
    "hasty": config("onnxruntime", "oldest { }", idle_us=1000),
    "tied": config("onnxruntime", "oldest { }", more=STREAM),
}


@pytest.fixture(scope="module", params=doors.NAMES)
def server(request, tmp_path_factory):
    repository = tmp_path_factory.mktemp("sequences")
    for name, text in MODELS.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text)
        (write_torch if "torch" in name else write_onnx)(version)
    with doors.running_server(request.param, repository) as process:
        yield process


@pytest.fixture
def client(server):
    with doors.connected(server) as client:
        yield client


def refusal(client, model: str, sequence: int) -> str:
    with pytest.raises(InferenceServerException) as caught:
        step(client, model, 1, sequence)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    return caught.value.message()


def ended(client, model: str, sequence: int) -> str:
    """Go on with the sequence, ever more slowly, until the server says that it has ended."""
    for n in range(600):
        time.sleep(min(0.001 * n, 0.1))
        try:
            step(client, model, 1, sequence)
        except InferenceServerException as error:
            assert error.status() == "StatusCode.INVALID_ARGUMENT"
            return error.message()
    raise AssertionError("the sequence did not end")


class Stream:
    """One ModelStreamInfer call; answers in order."""

    def __init__(self, client) -> None:
        self.client = client
        self.answers: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: self.answers.put((result, error)))

    def send(self, model: str, value: float, sequence: int, **flags) -> None:
        self.client.async_stream_infer(model, inputs(model, value), sequence_id=sequence, **flags)

    def answer(self, model: str) -> float:
        result, error = self.answers.get(timeout=60)
        assert error is None
        return output(model, result)


@pytest.mark.parametrize("model", ["onnx_direct", "onnx_oldest", "torch_direct", "torch_oldest"])
def test_unary_sequences(client, model):
    """One after the other, with numbers and a new START under a live id."""
    for sequence in (7, 8):
        assert [step(client, model, n, sequence, sequence_start=n == 1) for n in (1, 2, 3)] == [1, 3, 6]
    assert step(client, model, 5, 7, sequence_start=True) == 5
    assert step(client, model, 5, 8, sequence_end=True) == 11
    assert step(client, model, 5, 7, sequence_end=True) == 10
    assert "must specify the START flag on the first request of the sequence" in refusal(client, model, 8)


def test_ids_of_text(client):
    assert step(client, "onnx_oldest", 2, "one", sequence_start=True) == 2
    assert step(client, "onnx_oldest", 3, "two", sequence_start=True, sequence_end=True) == 3
    assert step(client, "onnx_oldest", 2, "one", sequence_end=True) == 4


@pytest.mark.parametrize("model", list(MODELS)[:4])
def test_many_sequences_over_one_stream(client, model):
    """More than `direct` has slots, interleaved at random and all sent at once: each keeps its own sum.

    They fit into the window of requests that a stream reads ahead: answers leave in order, so one that waits for a
    slot holds up those that would free it.
    """
    rng = random.Random(4)
    steps = [(sequence, n) for sequence in range(1, 26) for n in range(5)]
    order = {sequence: iter(range(5)) for sequence, _ in steps}
    rng.shuffle(steps)
    stream = Stream(client)
    sums: dict[int, float] = {}
    expected = []
    for sequence, _ in steps:
        n = next(order[sequence])
        stream.send(model, sequence, sequence, sequence_start=n == 0, sequence_end=n == 4)
        sums[sequence] = sums.get(sequence, 0) + sequence
        expected.append(sums[sequence])
    assert [stream.answer(model) for _ in expected] == expected
    client.stop_stream()


def test_an_idle_sequence_ends(client):
    assert step(client, "hasty", 1, 3, sequence_start=True) == 1
    assert "no request had come for max_sequence_idle_microseconds" in ended(client, "hasty", 3)


def test_a_sequence_ends_with_its_stream(client, server):
    """Requests of other calls may continue it while the stream lives."""
    stream = Stream(client)
    stream.send("tied", 1, 5, sequence_start=True)
    assert stream.answer("tied") == 1
    with triton.InferenceServerClient(server.address) as other:
        assert step(other, "tied", 1, 5) == 2
        client.stop_stream()
        assert "the sequence was ended with the stream that it had started on" in ended(other, "tied", 5)


def test_a_sequence_that_starts_again_on_another_stream_ends_with_that_one(client, server):
    first = Stream(client)
    for sequence in (6, 16):
        first.send("tied", 1, sequence, sequence_start=True)
        assert first.answer("tied") == 1
    with triton.InferenceServerClient(server.address) as other, triton.InferenceServerClient(server.address) as third:
        second = Stream(other)
        second.send("tied", 1, 6, sequence_start=True)
        assert second.answer("tied") == 1
        client.stop_stream()
        ended(third, "tied", 16)
        assert step(third, "tied", 1, 6) == 2
        other.stop_stream()
        assert "the sequence was ended with the stream that it had started on" in ended(third, "tied", 6)


def test_statistics_count_requests_not_rows(client):
    before = client.get_inference_statistics("torch_direct").model_stats[0]
    for sequence in (11, 12, 13):
        step(client, "torch_direct", 1, sequence, sequence_start=True)
    assert step(client, "torch_direct", 1, 13, sequence_end=True) == 2  # in its row, beside idle ones
    for sequence in (11, 12):
        step(client, "torch_direct", 1, sequence, sequence_end=True)
    after = client.get_inference_statistics("torch_direct").model_stats[0]
    assert after.inference_count - before.inference_count == 6
    assert after.inference_stats.success.count - before.inference_stats.success.count == 6
