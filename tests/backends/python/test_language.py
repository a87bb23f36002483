"""The language example, and the two public programs that it has models for, run as they were written for Triton."""

from __future__ import annotations

import importlib.util
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.conformance import doors

pytestmark = pytest.mark.long
if not all(map(importlib.util.find_spec, ("torch", "transformers"))):  # they are for the models, not for this process
    pytest.skip("needs torch and transformers", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "language"
SEEDS = ROOT.parent / "shared" / "seeds"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's models, hardly trained: enough to tell that answers come from them."""
    folder = tmp_path_factory.mktemp("language")
    command = [sys.executable, str(EXAMPLE / "make_repository.py"), str(folder), "--steps", "3", "--epochs", "1"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


@pytest.fixture(scope="module")
def seeds() -> Path:
    if not SEEDS.is_dir():
        pytest.skip(f"the seeds are not here: {SEEDS}")
    return SEEDS


def texts(*lines: str) -> triton.InferInput:
    array = np.array([[line.encode()] for line in lines], object)
    return triton.InferInput("text", list(array.shape), "BYTES").set_data_from_numpy(array)


def classified(client: triton.InferenceServerClient) -> list[str]:
    said = texts("The function returns the value.", "It is an error, and an exception is raised.")
    return [label.decode() for label in client.infer("sentiment", [said]).as_numpy("prob").ravel()]


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[triton.InferenceServerClient]:
    with (
        doors.running_server("native", repository) as process,
        triton.InferenceServerClient(process.address) as connected,
    ):
        yield connected


def test_the_classifier_of_the_example(client: triton.InferenceServerClient) -> None:
    assert classified(client) == ["good news", "bad news"]


def said(answers: queue.Queue[Any]) -> list[str]:
    """The words of a stream."""
    words = []
    while True:
        answer = answers.get(timeout=120)
        assert not isinstance(answer, Exception), answer
        if answer.get_response().parameters["triton_final_response"].bool_param:
            return words
        words.append(answer.as_numpy("word").item().decode())


def test_the_chat_of_the_example_streams_words(client: triton.InferenceServerClient) -> None:
    def chat(seed: int) -> list[str]:
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error or result))
        try:
            text = np.array([b"What does len do?"], object)
            given = triton.InferInput("text", [1], "BYTES").set_data_from_numpy(text)
            parameters = {"seed": seed, "longest": 6}
            client.async_stream_infer("chat", [given], parameters=parameters, enable_empty_final_response=True)
            return said(answers)
        finally:
            client.stop_stream()

    first = chat(1)
    assert 0 < len(first) <= 6
    assert all(first)
    assert chat(1) == first
    assert chat(2) != first


def test_the_public_chat(repository: Path, seeds: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "ibuddha_chitchat", tmp_path / "ibuddha_chitchat")
    program = tmp_path / "ibuddha_chitchat_bls" / "1"
    program.mkdir(parents=True)
    shutil.copy(seeds / "chat_bls_model.py", program / "model.py")
    shutil.copy(seeds / "configs" / "chat_bls_python.pbtxt", program.parent / "config.pbtxt")
    tokens = ([0, 13086, 5, 6, 7, 13087], [1] * 6, [13086] * 5 + [13087])
    inputs = [
        triton.InferInput(f"INPUT__{i}", [1, 6], "INT64").set_data_from_numpy(np.array([values]))
        for i, values in enumerate(tokens)
    ]
    with (
        doors.running_server("native", tmp_path) as process,
        triton.InferenceServerClient(process.address) as client,
    ):
        answer = client.infer("ibuddha_chitchat_bls", inputs)
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("ibuddha_chitchat_bls", inputs)
        streamed = answers.get(timeout=120)
        client.stop_stream()
    for each in (answer, streamed):
        found, confidences = each.as_numpy("OUTPUT__0"), each.as_numpy("OUTPUT__1")
        assert found.dtype == np.int32
        assert 1 <= len(found) == len(confidences) <= 64
        assert not set(found.tolist()) & {0, 1, 2, 13086, 13087}
        assert ((confidences > 0) & (confidences <= 1)).all()


def test_the_public_classifier(repository: Path, seeds: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "sentiment", tmp_path / "sentiment")
    shutil.copy(seeds / "sentiment_batch_model.py", tmp_path / "sentiment" / "1" / "model.py")
    with (
        doors.running_server("native", tmp_path) as process,
        triton.InferenceServerClient(process.address) as client,
    ):
        assert classified(client) == ["正向", "负面"]
