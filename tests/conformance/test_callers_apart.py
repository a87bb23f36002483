"""What callers who are known do not share: their sequences, and, if the operator wants it, their cached answers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.conformance import doors
from tests.conformance.sums import config, inputs, output, write_onnx
from tests.front.certificates import Authority

CACHED = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
response_cache { enable: true }
"""

AS_NOBODY = """
import os, sys
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from tests.conformance.sums import inputs

os.setuid(65534)
with triton.InferenceServerClient(sys.argv[1]) as client:
    try:
        client.infer("sum", inputs("sum", 1), sequence_id=77)
    except InferenceServerException as error:
        print(error.message())
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("apart")
    for name, text in (("sum", config("onnxruntime", "oldest { }")), ("cached", CACHED)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(text)
    write_onnx(root / "sum" / "1")
    return root


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text("alice all\nbob all\n* groups=inference\n")
    file.chmod(0o600)
    return file


class Caller:
    def __init__(self, address, token="", credentials=None):
        self._client = triton.InferenceServerClient(address, ssl=credentials is not None, creds=credentials)
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def step(self, value, **flags):
        given = inputs("sum", value)
        return output("sum", self._client.infer("sum", given, sequence_id=77, headers=self._headers, **flags))

    def refused(self, **flags):
        with pytest.raises(InferenceServerException) as caught:
            self.step(1, **flags)
        return caught.value.message()

    def streamed(self, value, **flags):
        answers = []
        self._client.start_stream(lambda result, error: answers.append(error or result), headers=self._headers)
        self._client.async_stream_infer("sum", inputs("sum", value), sequence_id=77, **flags)
        self._client.stop_stream()
        [answer] = answers
        return str(answer) if isinstance(answer, Exception) else output("sum", answer)

    def cached(self):
        """Ask what everybody asks; returns hits of the cache so far."""
        self._client.infer("cached", inputs("cached", 1), headers=self._headers)
        [model] = self._client.get_inference_statistics("cached", headers=self._headers).model_stats
        return model.inference_stats.cache_hit.count


@pytest.fixture(scope="module", params=doors.NAMES)
def served(request, models, tokens):
    cache = "--cache-config=local,size=1048576"
    with doors.running_server(
        request.param, models, f"--grpc-token-file={tokens}", cache, "--cache-per-caller"
    ) as process:
        yield process.address


def test_a_caller_does_not_go_on_with_the_sequence_of_another(served):
    alice, bob, anybody = Caller(served, "alice"), Caller(served, "bob"), Caller(served)
    assert alice.step(1, sequence_start=True) == 1
    for stranger in (bob, anybody):
        for flags in ({}, {"sequence_end": True}):
            assert "must specify the START flag" in stranger.refused(**flags)
            assert "must specify the START flag" in stranger.streamed(1, **flags)
    assert bob.step(10, sequence_start=True) == 10, "77 of his own"
    assert anybody.streamed(100, sequence_start=True) == 100
    assert alice.step(2) == 3
    assert bob.streamed(10, sequence_end=True) == 20
    assert alice.step(3, sequence_end=True) == 6
    assert anybody.step(1, sequence_end=True) == 101


def test_a_caller_gets_no_answer_that_another_has_asked_for(served):
    alice, bob = Caller(served, "alice"), Caller(served, "bob")
    begin = alice.cached()
    assert alice.cached() == begin + 1
    assert bob.cached() == begin + 1
    assert bob.cached() == begin + 2


def test_onnx_runtime_keeps_no_telemetry(models, tmp_path, monkeypatch):
    """As soon as it is imported, ONNX Runtime would open a store of events in the home folder."""
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with doors.running_server("native", models) as process:
        assert Caller(process.address).step(1, sequence_start=True, sequence_end=True) == 1
    assert [str(path) for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("transport", doors.NAMES)
def test_callers_share_what_the_operator_says(models, tokens, transport):
    options = (f"--grpc-token-file={tokens}", "--sequence-sharing", "--cache-config=local,size=1048576")
    with doors.running_server(transport, models, *options) as process:
        alice, bob = Caller(process.address, "alice"), Caller(process.address, "bob")
        assert alice.step(1, sequence_start=True) == 1
        assert bob.step(1, sequence_end=True) == 2
        alice.cached()
        assert bob.cached() == 1


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize("transport", doors.NAMES)
def test_owners_of_certificates_have_sequences_of_their_own(models, authority, transport):
    """Whoever has a certificate of the same names is the same, so that one can be renewed."""
    server, alice, bob = authority.issue("server", "DNS:localhost"), authority.issue("alice"), authority.issue("bob")

    def caller(pair, token=""):
        credentials = (each.read_bytes() for each in (authority.root, pair.key, pair.certificate))
        return Caller(f"localhost:{port}", token, grpc.ssl_channel_credentials(*credentials))

    files = {"root-cert": authority.root, "server-cert": server.certificate, "server-key": server.key}
    options = [f"--grpc-{name}={path}" for name, path in files.items()]
    cache = ("--cache-config=local,size=1048576", "--cache-per-caller")
    with doors.running_server(transport, models, "--grpc-use-ssl-mutual", *options, *cache) as process:
        port = process.address.rpartition(":")[2]
        first, second = caller(alice), caller(bob)
        assert first.step(1, sequence_start=True) == 1
        for flags in ({}, {"sequence_end": True}):
            assert "must specify the START flag" in second.refused(**flags)
            assert "must specify the START flag" in second.streamed(1, **flags)
        assert second.step(10, sequence_start=True) == 10
        before = first.cached()
        assert second.cached() == before
        assert first.streamed(2) == 3
        namesake = caller(authority.issue("alice", organisation="another"))
        assert "must specify the START flag" in namesake.refused()
        renewed = caller(authority.issue("alice"))
        assert renewed.step(3, sequence_end=True) == 6
        assert second.streamed(1, sequence_end=True) == 11


@pytest.mark.parametrize("sharing", [False, True])
def test_users_of_a_unix_socket_have_sequences_of_their_own(models, sharing):
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        address = f"unix:{folder}/s"
        options = ("--grpc-address=127.0.0.1:0", f"--grpc-address=unix://{folder}/s,mode=0666")
        with doors.running_server("native", models, *options, *(["--sequence-sharing"] if sharing else [])):
            assert Caller(address).step(1, sequence_start=True) == 1
            command = [sys.executable, "-c", AS_NOBODY, address]
            made = subprocess.run(command, cwd=doors.ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
            assert ("must specify the START flag" in made.stdout) is not sharing
            assert Caller(address).step(1, sequence_end=True) == (3 if sharing else 2)
