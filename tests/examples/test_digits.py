"""The demo's models and ensembles, made, served and asked by the programs of the examples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inferd.backends.loader import BackendLoader
from tests.backends.fake_batch import FakeBatch
from tests.backends.models import instance, source
from tests.conformance import doors

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
IMAGE, PROBABILITIES = ("image", "FP32", (1, 8, 8)), ("probabilities", "FP32", (10,))


def run(program, *arguments):
    command = [sys.executable, str(EXAMPLES / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unread(program, *arguments):
    """What it says on standard error when nobody reads what it prints, as behind `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(EXAMPLES / program), *map(str, arguments)]
    try:
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False).stderr
    finally:
        os.close(writer)


def imported(name, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    return __import__(name)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    run("digits/make_repository.py", folder)
    run("ensembles/make_repository.py", folder)
    return folder


def answers(repository, name, backend, images):
    described = source(repository / name / "1", [IMAGE], [PROBABILITIES], max_batch_size=64)
    batch = FakeBatch({"image": images}, {"probabilities": "FP32"}, rows=len(images))
    instance(BackendLoader().backend(backend), described).execute(batch)
    return batch.outputs["probabilities"]


def test_both_formats_recognise_digits_and_agree(repository, monkeypatch):
    _, held_out = imported("digits_data", "digits", monkeypatch).load()
    script = answers(repository, "digits_torchscript", "pytorch", held_out.images)
    onnx = answers(repository, "digits_onnx", "onnxruntime", held_out.images)
    assert (script.argmax(1) == held_out.labels).mean() > 0.95
    np.testing.assert_allclose(script, onnx, atol=1e-5)
    np.testing.assert_allclose(script.sum(1), 1, rtol=1e-5)


def test_pictures_and_sentences_are_recognised(repository):
    with doors.running_server("native", repository) as process:
        shown = run("ensembles/client.py", "-u", process.address, "--count", 20)
        assert "BrokenPipe" not in unread("digits/client.py", "-u", process.address)
    rights = [int(right) for right in re.findall(r"^(\d+) of 20 right$", shown, re.MULTILINE)]
    assert len(rights) == 2
    assert rights[0] >= 18, shown
    assert rights[1] >= 12, shown


@pytest.mark.long
def test_what_is_up_to_date_is_kept(repository):
    def times():
        return {file: file.stat().st_mtime_ns for file in repository.rglob("*") if file.is_file()}

    before = times()
    assert run("digits/make_repository.py", repository).splitlines() == [
        "digits: up to date",
        "identity_fp32: up to date",
    ]
    assert times() == before


def test_what_is_lost_or_older_than_its_source_is_made_again(tmp_path, monkeypatch):
    """Guards what both programs ask before they make anything."""
    is_current = imported("making", "", monkeypatch).is_current
    file, source_ = tmp_path / "model.onnx", tmp_path / "make_repository.py"
    source_.touch()
    assert not is_current([file], [source_])
    file.touch()
    assert is_current([file], [source_])
    assert not is_current([file, tmp_path / "labels.txt"], [source_])
    os.utime(file, (0, 0))
    assert not is_current([file], [source_])
