"""Tools that speak gRPC from a shell: `buf curl` by server reflection, curl and h2load with a hand-framed message."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings

import grpc
import pytest

from tests.conformance.client import Stub, floats, pb, request

SERVICE = "inference.GRPCInferenceService"
_UNKNOWN = "Request for unknown model: 'nothing' is not found"
_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")


@pytest.fixture
def buf(node_modules, address):
    """A function that calls a method with JSON messages: the completed process of `buf curl`."""
    programs = list(node_modules.glob("@bufbuild/buf-*/bin/buf"))
    if not programs:
        warnings.warn("buf is NOT tested: there is no buf for this machine", stacklevel=1)
        pytest.skip("there is no buf for this machine")

    def call(*arguments, messages=()):
        body = "".join(map(json.dumps, messages))
        command = [programs[0], "curl", "--http2-prior-knowledge", "--protocol", "grpc", *arguments[:-1]]
        command += ["--data", body] * bool(messages) + [f"http://{address}{arguments[-1]}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    return call


def _tool(name):
    if path := shutil.which(name):
        return path
    warnings.warn(f"{name} is NOT tested: not installed; tools/client_packages.sh installs it", stacklevel=2)
    return pytest.skip(f"not installed: {name}")


def _tensor(model, number, name=""):
    contents = {"fp32_contents": [number]}
    return {
        "model_name": model,
        "id": name,
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "contents": contents}],
    }


def _framed(message):
    body = message.SerializeToString()
    return b"\0" + len(body).to_bytes(4, "big") + body


def test_buf_lists_what_reflection_tells(buf):
    methods = buf("--list-methods", "").stdout.split()
    assert f"{SERVICE}/ModelInfer" in methods
    assert "grpc.health.v1.Health/Check" in methods


def test_buf_asks_for_health_and_metadata(buf):
    health = buf("/grpc.health.v1.Health/Check", messages=[{"service": "simple"}])
    assert json.loads(health.stdout) == {"status": "SERVING"}
    metadata = json.loads(buf(f"/{SERVICE}/ModelMetadata", messages=[{"name": "simple"}]).stdout)
    assert metadata["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": ["-1", "-1"]}]


def test_buf_calls_model_infer_by_reflection(buf):
    answer = json.loads(buf(f"/{SERVICE}/ModelInfer", messages=[_tensor("simple", 1, "one")]).stdout)
    assert (answer["id"], answer["rawOutputContents"]) == ("one", ["AACAPw=="])


def test_buf_shows_what_only_this_server_counts(buf):
    buf(f"/{SERVICE}/ModelInfer", messages=[_tensor("simple", 1)])
    [found] = json.loads(buf(f"/{SERVICE}/ModelStatistics", messages=[{"name": "simple"}]).stdout)["modelStats"]
    assert set(found["failReasons"]) == {"REJECTED", "CANCELED", "BACKEND", "OTHER"}
    waited = sum(int(bucket.get("count", 0)) for bucket in found["queueTimes"])
    assert waited == int(found["inferenceStats"]["queue"]["count"]) > 0


def test_buf_shows_an_error(buf):
    failed = buf(f"/{SERVICE}/ModelInfer", messages=[_tensor("nothing", 1)])
    assert failed.returncode == 8 * grpc.StatusCode.NOT_FOUND.value[0]
    shown = json.loads(failed.stderr)  # and "details", the rich error, where the server sends it
    assert (shown["code"], shown["message"]) == ("not_found", _UNKNOWN)


def test_buf_calls_model_stream_infer_by_reflection(buf):
    messages = [_tensor("simple", 1, "first"), _tensor("nothing", 1, "wrong"), _tensor("simple", 2, "last")]
    text = buf(f"/{SERVICE}/ModelStreamInfer", messages=messages).stdout
    answers = json.loads("[" + text.replace("\n}\n{", "\n},\n{") + "]")
    seen = [(answer["inferResponse"]["id"], answer.get("errorMessage", "")) for answer in answers]
    assert seen == [("first", ""), ("wrong", _UNKNOWN), ("last", "")]


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [(request("simple", floats(1), id="one"), 0, ""), (request("nothing", floats(1)), 5, _UNKNOWN)],
)
def test_curl_gets_a_framed_response_or_a_status(message, status, text, address, tmp_path):
    curl = _tool("curl")
    (tmp_path / "request").write_bytes(_framed(message))
    command = [curl, "-sS", "--http2-prior-knowledge", *_HEADERS, "--data-binary", f"@{tmp_path / 'request'}"]
    command += ["-D", tmp_path / "headers", "-o", tmp_path / "answer", f"http://{address}/{SERVICE}/ModelInfer"]
    subprocess.run(command, check=True, timeout=30)
    lines = (tmp_path / "headers").read_text().splitlines()
    assert lines[0].split() == ["HTTP/2", "200"]
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    assert headers["content-type"] == "application/grpc"
    assert (int(headers["grpc-status"]), headers.get("grpc-message", "")) == (status, text)
    if status == 0:
        answer = (tmp_path / "answer").read_bytes()
        assert answer[:5] == b"\0" + (len(answer) - 5).to_bytes(4, "big")
        assert pb.ModelInferResponse.FromString(answer[5:]).id == "one"


def test_h2load(address, tmp_path):
    """h2load does not read grpc-status, so the server's own count says which calls succeeded."""
    h2load = _tool("h2load")
    before = _succeeded(address)
    (tmp_path / "request").write_bytes(_framed(request("simple", floats(1))))
    command = [h2load, "-n", "2000", "-c", "4", "-m", "16", *_HEADERS, "-d", tmp_path / "request"]
    command.append(f"http://{address}/{SERVICE}/ModelInfer")
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.search("2000 done, 2000 succeeded, 0 failed, 0 errored, 0 timeout", printed)
    assert _succeeded(address) - before == 2000


def _succeeded(address):
    with grpc.insecure_channel(address) as channel:
        answer = Stub(channel).ModelStatistics(pb.ModelStatisticsRequest(name="simple"))
    return answer.model_stats[0].inference_stats.success.count
