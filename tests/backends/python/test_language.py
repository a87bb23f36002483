"""The language example, and the two public programs that it has models for, run as they were written for Triton."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.conformance import doors

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "language"
SEEDS = ROOT.parent / "shared" / "seeds"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's models, hardly trained: enough to tell that answers come from them."""
    folder = tmp_path_factory.mktemp("language")
    command = [sys.executable, str(EXAMPLE / "make_repository.py"), str(folder), "--steps", "4", "--epochs", "2"]
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


def test_the_public_classifier(repository: Path, seeds: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "sentiment", tmp_path / "sentiment")
    shutil.copy(seeds / "sentiment_batch_model.py", tmp_path / "sentiment" / "1" / "model.py")
    with (
        doors.running_server("native", tmp_path) as process,
        triton.InferenceServerClient(process.address) as client,
    ):
        assert classified(client) == ["正向", "负面"]
