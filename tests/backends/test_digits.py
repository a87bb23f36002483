"""The demo's models: both formats recognise held-out digits and agree; making them again changes nothing."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backends.loader import BackendLoader
from tests.backends.fake_batch import FakeBatch
from tests.backends.models import instance, source

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"
IMAGE, PROBABILITIES = ("image", "FP32", (1, 8, 8)), ("probabilities", "FP32", (10,))


def make(folder):
    command = [sys.executable, str(EXAMPLE / "make_repository.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def held_out():
    sys.path.insert(0, str(EXAMPLE))
    try:
        from digits_data import load
    finally:
        sys.path.remove(str(EXAMPLE))
    return load()[1]


def answers(repository, name, backend, images):
    described = source(repository / name / "1", [IMAGE], [PROBABILITIES], max_batch_size=64)
    batch = FakeBatch({"image": images}, {"probabilities": "FP32"}, rows=len(images))
    instance(BackendLoader().backend(backend), described).execute(batch)
    return batch.outputs["probabilities"]


def test_both_formats_recognise_digits_and_agree(repository, held_out):
    script = answers(repository, "digits_torchscript", "pytorch", held_out.images)
    onnx = answers(repository, "digits_onnx", "onnxruntime", held_out.images)
    assert (script.argmax(1) == held_out.labels).mean() > 0.95
    np.testing.assert_allclose(script, onnx, atol=1e-5)
    np.testing.assert_allclose(script.sum(1), 1, rtol=1e-5)


def test_what_is_up_to_date_is_kept(repository):
    def times():
        return {file: file.stat().st_mtime_ns for file in repository.rglob("*") if file.is_file()}

    before = times()
    assert make(repository).splitlines() == ["digits: up to date", "identity_fp32: up to date"]
    assert times() == before


def test_a_lost_file_is_made_again(repository):
    lost = repository / "digits_onnx" / "labels.txt"
    lost.unlink()
    make(repository)
    assert lost.read_text().split()[3] == "three"
