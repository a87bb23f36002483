"""Sequences over a reload, an unload and SIGTERM, as clients see it: servers of their own, asked by tritonclient.

A model answers with the sum of its sequence times a gain. Each version that is loaded has another one, so an answer
tells whether the sequence has stayed where it began.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from tests.conformance import doors
from tests.conformance.sums import MINUTE, config, step, write_onnx
from tests.waiting import wait_until

STRATEGIES = {"direct": "direct { }", "oldest": "oldest { max_candidate_sequences: 64 }"}
LIVE = 50
CONTROL = ("--model-control-mode=explicit", "--load-model=*")

CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="sums", requested_output_names=["y"], inputs=request.inputs(),
                correlation_id=request.correlation_id(), flags=request.flags(),
            ).exec()
            answers.append(pb_utils.InferenceResponse(inner.output_tensors(), inner.error()))
        return answers
"""
CALLER_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
ENSEMBLE_CONFIG = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: "sums" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }
}
"""


def write(root, text: str, gain: float = 1, version: str = "1") -> None:
    folder = root / "sums" / version
    folder.mkdir(parents=True, exist_ok=True)
    (root / "sums" / "config.pbtxt").write_text(text)
    write_onnx(folder, gain)


@contextmanager
def serving(transport: str, root, text: str, *options: str):
    """A server with the model "sums"; its process and a client."""
    write(root, text)
    with doors.running_server(transport, root, *options) as process, doors.connected(process) as client:
        yield process, client


@pytest.fixture(params=doors.NAMES)
def transport(request):
    return request.param


def refused(client, sequence: int, *, start: bool = False) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        step(client, "sums", 1, sequence, sequence_start=start)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def states(client) -> dict[str, tuple[str, str]]:
    return {entry.version: (entry.state, entry.reason) for entry in client.get_model_repository_index().models}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sequences_that_live_over_reloads(transport, strategy, tmp_path):
    """The model is loaded anew twice while sequences run: with changed files, and under another version number.

    Each gets the sums that it gets without, and so do those that begin after each load.
    """
    text = config("onnxruntime", STRATEGIES[strategy]).replace("max_batch_size: 8", "max_batch_size: 32")
    versions = {1: "1", 2: "1", 3: "2"}  # by gain
    loaded = {gain: threading.Event() for gain in versions}
    begun = {gain: threading.Barrier(LIVE + 1) for gain in versions}
    over = threading.Event()

    def run(number: int, gain: int) -> None:
        """One sequence, which begins under one gain and lasts until all loads are over."""
        assert loaded[gain].wait(60)
        rng = np.random.default_rng(number)
        total, steps, last = 0.0, 0, False
        while not last:
            x = float(rng.integers(100))
            total += gain * x
            last = over.is_set() and steps > 3
            assert step(client, "sums", x, number, sequence_start=steps == 0, sequence_end=last) == total
            if steps == 0:
                begun[gain].wait(60)
            steps += 1

    with serving(transport, tmp_path, text, *CONTROL) as (_, client), ThreadPoolExecutor(3 * LIVE) as pool:
        running = [pool.submit(run, 100 * gain + n, gain) for gain in versions for n in range(LIVE)]
        for gain, version in versions.items():
            write(tmp_path, text, gain, version)
            client.load_model("sums")
            loaded[gain].set()
            begun[gain].wait(60)
        over.set()
        for each in running:
            each.result(60)
        wait_until(lambda: states(client) == {"2": ("READY", "")})


def test_ensembles_and_models_that_call(transport, tmp_path):
    """Through an ensemble and from a Python model, a sequence meets the version that it began on."""
    for name, text in (("ensemble", ENSEMBLE_CONFIG), ("caller", CALLER_CONFIG)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(text)
    (tmp_path / "caller" / "1" / "model.py").write_text(CALLER)
    text = config("onnxruntime", STRATEGIES["oldest"])
    with serving(transport, tmp_path, text, *CONTROL) as (_, client):
        ways = {"sums": 1, "ensemble": 2, "caller": 3}
        for model, sequence in ways.items():
            assert step(client, model, 1, sequence, sequence_start=True) == 1
        write(tmp_path, text, gain=100)
        client.load_model("sums")
        for model, sequence in ways.items():
            assert step(client, model, 1, sequence + 10, sequence_start=True) == 100
            assert step(client, model, 1, sequence) == 2
        for model, sequence in ways.items():
            assert step(client, model, 1, sequence, sequence_end=True) == 3
            assert step(client, model, 1, sequence + 10, sequence_end=True) == 200


def test_an_unloaded_model_finishes_its_sequences(transport, tmp_path):
    with serving(transport, tmp_path, config("onnxruntime", STRATEGIES["direct"]), *CONTROL) as (_, client):
        for sequence in (1, 2):
            assert step(client, "sums", 1, sequence, sequence_start=True) == 1
        client.unload_model("sums")
        assert states(client) == {"1": ("UNLOADING", "2 sequences go on")}
        assert not client.is_model_ready("sums")
        assert client.is_server_ready()
        for sequence, start in ((3, True), (1, True), (3, False)):
            status, text = refused(client, sequence, start=start)
            assert status == "UNAVAILABLE"
            assert text.endswith("'sums' is unloading: only requests of sequences that have begun on it are served")
        for sequence in (1, 2):
            assert step(client, "sums", 1, sequence) == 2
            assert step(client, "sums", 1, sequence, sequence_end=True) == 3
        wait_until(lambda: states(client) == {"1": ("UNAVAILABLE", "unloaded")})
        assert refused(client, 1)[0] == "NOT_FOUND"


def test_a_server_that_is_told_to_stop_finishes_sequences(transport, tmp_path):
    """The server serves sequences until the last one has ended, and refuses to begin others."""
    text = config("onnxruntime", STRATEGIES["direct"])
    with serving(transport, tmp_path, text, "--exit-timeout-secs=200", *CONTROL) as (process, client):
        assert step(client, "sums", 1, 1, sequence_start=True) == 1
        write(tmp_path, text, gain=100)
        client.load_model("sums")
        assert step(client, "sums", 0.01, 2, sequence_start=True) == 1
        process.terminate()
        wait_until(lambda: not client.is_server_ready())
        status, text = refused(client, 3, start=True)
        assert status == "UNAVAILABLE"
        assert "Server is stopping, scheduler for model has stopped accepting new inference requests" in text
        for n in range(2, 20):
            assert step(client, "sums", 1, 1) == n
        with triton.InferenceServerClient(process.address) as other:
            assert step(other, "sums", 1, 1, sequence_end=True) == 20
        assert step(client, "sums", 0, 2, sequence_end=True) == 1
        client.close()  # C core waits for clients to answer a ping
        assert process.wait() == 0
    assert "stopping: 2 sequences have 150 s to end" in "\n".join(process.lines)


@pytest.mark.parametrize(("idle_us", "exit_seconds"), [(200_000, 300), (MINUTE, 1)], ids=["idles", "does not end"])
def test_a_sequence_that_is_left_does_not_keep_a_server(transport, tmp_path, idle_us, exit_seconds):
    text = config("onnxruntime", STRATEGIES["oldest"], idle_us=idle_us)
    with serving(transport, tmp_path, text, f"--exit-timeout-secs={exit_seconds}") as (process, client):
        assert step(client, "sums", 1, 1, sequence_start=True) == 1
        client.close()
        process.terminate()
        assert process.wait() == 0
