"""Loading and unloading by clients: a server of its own with --model-control-mode, asked by tritonclient."""

from __future__ import annotations

import json
import shutil

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.client import Stub
from tests.waiting import wait_until

CONFIG = """
backend: "{backend}"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "step" model_version: -1
    input_map { key: "INPUT0" value: "INPUT0" }
    output_map { key: "OUTPUT0" value: "OUTPUT0" }
  }
}
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each * {factor})]) for each in x]
"""
ARRAY = np.array([[1, 2, 3]], np.float32)


def write(root, name, config=None, **files):
    """A model with one version: the identity, unless other files are given."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config or CONFIG.format(backend="python" if files else "identity"))
    for path, text in files.items():
        (folder / "1" / path.replace("_py", ".py")).write_text(text)


@pytest.fixture(scope="module", params=doors.NAMES)
def served(request, tmp_path_factory):
    """Address and repository of a server with explicit control that has loaded "first"."""
    root = tmp_path_factory.mktemp("controlled")
    for name in ("first", "second", "step"):
        write(root, name)
    write(root, "chain", ENSEMBLE)
    write(root, "times", model_py=MODEL.format(factor=2))
    write(root, "broken", CONFIG.format(backend="nowhere"))
    options = ("--model-control-mode=explicit", "--load-model=first", "--model-load-overrides")
    with doors.running_server(request.param, root, *options) as process:
        yield process.address, root


@pytest.fixture
def client(served):
    with triton.InferenceServerClient(served[0]) as client:
        yield client


@pytest.fixture
def stub(served):
    with grpc.insecure_channel(served[0]) as channel:
        yield Stub(channel)


def index(client):
    """The entries of the index: name to (version, state, reason)."""
    found = client.get_model_repository_index().models
    return {model.name: (model.version, model.state, model.reason) for model in found}


def infer(client, model):
    tensor = triton.InferInput("INPUT0", list(ARRAY.shape), "FP32").set_data_from_numpy(ARRAY)
    return client.infer(model, [tensor]).as_numpy("OUTPUT0").tolist()


def refused(call, *arguments, **keywords):
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **keywords)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_only_what_is_named_is_loaded_at_the_start(client):
    assert client.is_server_ready()
    assert client.is_model_ready("first")
    found = index(client)
    assert found["first"] == ("1", "READY", "")
    assert found["second"] == ("", "", "")
    assert {model.name for model in client.get_model_repository_index().models} >= {"chain", "step", "times"}
    assert refused(infer, client, "second") == ("NOT_FOUND", "Request for unknown model: 'second' is not found")


def test_a_model_is_loaded_and_unloaded(client):
    client.load_model("second")
    assert client.is_model_ready("second")
    assert infer(client, "second") == ARRAY.tolist()
    client.unload_model("second")
    assert refused(infer, client, "second") == (
        "NOT_FOUND",
        "Request for unknown model: 'second' has no available versions",
    )
    assert client.is_server_ready()
    client.load_model("second")
    assert infer(client, "second") == ARRAY.tolist()
    client.unload_model("second")


def test_health_follows(client, served):
    """grpc.health.v1 tells of a model when it is loaded, and goes on telling when it is not served any more."""
    with grpc.insecure_channel(served[0]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("second", "second/1"):
            watch = health.Watch(health_pb2.HealthCheckRequest(service=name))
            before = next(watch).status
            assert before != health_pb2.HealthCheckResponse.SERVING
            client.load_model("second")
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            client.unload_model("second")
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()


def test_what_is_not_there(client):
    text = "failed to load 'nothing', failed to poll from model repository"
    assert refused(client.load_model, "nothing") == ("INTERNAL", text)
    client.unload_model("nothing")
    assert "nothing" not in index(client)


@pytest.mark.parametrize("name", ["", " ", "../first", "a/b"])
def test_names_that_are_none(client, name):
    for call in (client.load_model, client.unload_model):
        status, text = refused(call, name)
        assert status == "INVALID_ARGUMENT"
        assert "Model name cannot be empty" in text or "path traversal characters" in text


def test_a_model_that_does_not_load(client):
    status, text = refused(client.load_model, "broken")
    assert status == "INVALID_ARGUMENT"
    assert text.startswith("load failed for model 'broken': ")
    assert "nowhere" in text
    assert index(client)["broken"][1] == "UNAVAILABLE"
    assert not client.is_server_ready(), "somebody wants it"
    client.unload_model("broken")
    assert client.is_server_ready()


def test_a_changed_file_is_loaded_anew_and_a_wrong_one_is_not(client, served):
    file = served[1] / "times" / "1" / "model.py"
    client.load_model("times")
    assert infer(client, "times") == (2 * ARRAY).tolist()
    file.write_text(MODEL.format(factor=30))
    client.load_model("times")
    assert infer(client, "times") == (30 * ARRAY).tolist()
    file.write_text("this is no program")
    status, text = refused(client.load_model, "times")
    assert (status, text[:55]) == ("INVALID_ARGUMENT", "load failed for model 'times': version 1 is at UNAVAILA")
    assert infer(client, "times") == (30 * ARRAY).tolist()
    assert index(client)["times"] == ("1", "READY", "")
    client.unload_model("times")


def test_a_configuration_comes_with_the_load(client):
    config = {"backend": "identity", "max_batch_size": 3}
    for name, kind in (("input", "INPUT0"), ("output", "OUTPUT0")):
        config[name] = [{"name": kind, "data_type": "TYPE_FP32", "dims": [-1]}]
    client.load_model("second", config=json.dumps(config))
    assert client.get_model_config("second").config.max_batch_size == 3
    client.load_model("second")  # what is in the repository has not changed, but it is not what is served
    assert client.get_model_config("second").config.max_batch_size == 8
    client.unload_model("second")
    status, text = refused(client.load_model, "second", config="{")
    assert status == "INVALID_ARGUMENT"
    assert text.startswith("failed to load 'second', failed to poll from model repository: Invalid config override: ")


def test_files_come_with_the_load(client, served):
    config = {"backend": "python", "max_batch_size": 8}
    for name, kind in (("input", "INPUT0"), ("output", "OUTPUT0")):
        config[name] = [{"name": kind, "data_type": "TYPE_FP32", "dims": [-1]}]
    files = {"file:1/model.py": MODEL.format(factor=5).encode(), "file:2/model.py": MODEL.format(factor=7).encode()}
    config["version_policy"] = {"all": {}}
    client.load_model("times", config=json.dumps(config), files=files)
    assert infer(client, "times") == (7 * ARRAY).tolist()
    assert client.is_model_ready("times", "1")
    (served[1] / "times" / "1" / "model.py").write_text(MODEL.format(factor=2))
    client.load_model("times")
    assert infer(client, "times") == (2 * ARRAY).tolist()
    assert not client.is_model_ready("times", "2")
    client.unload_model("times")
    text = "Load parameter 'config' must be specified for model file override"
    assert refused(client.load_model, "times", files=files) == ("INVALID_ARGUMENT", text)
    outside = {"file:../1/model.py": b""}
    status, text = refused(client.load_model, "times", config=json.dumps(config), files=outside)
    assert status == "INVALID_ARGUMENT"
    assert "must stay within model directory" in text
    status, text = refused(client.load_model, "times", config=json.dumps(config), files={"file:" + "A" * 256: b""})
    assert status == "INTERNAL"
    assert text.startswith("failed to load 'times', failed to poll from model repository: ")


def test_an_ensemble_comes_and_goes_with_its_steps(client):
    client.load_model("chain")
    assert infer(client, "chain") == ARRAY.tolist()
    assert client.is_model_ready("step")
    client.unload_model("chain", unload_dependents=True)
    assert not client.is_model_ready("chain")
    assert not client.is_model_ready("step")
    client.load_model("step")
    client.load_model("chain")
    client.unload_model("chain", unload_dependents=True)
    assert client.is_model_ready("step")  # somebody has asked for it by its name
    client.load_model("chain")
    client.unload_model("step")
    status, text = refused(infer, client, "chain")
    assert status in ("NOT_FOUND", "UNAVAILABLE")
    assert text.startswith("in ensemble 'chain', Request for unknown model: 'step'")
    assert index(client)["chain"][1] == "UNAVAILABLE"
    client.unload_model("chain")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"what": pb.ModelRepositoryParameter(string_param="x")}, "unrecognized load parameter 'what'."),
        (
            {"config": pb.ModelRepositoryParameter(int64_param=1)},
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            {"file:1/model.py": pb.ModelRepositoryParameter(string_param="x")},
            "invalid value type for load parameter 'file:1/model.py', expected bytes_param.",
        ),
    ],
)
def test_parameters_of_a_load(stub, parameters, text):
    with pytest.raises(grpc.RpcError) as caught:
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="first", parameters=parameters))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_parameters_of_an_unload(stub):
    wrong = {"unload_dependents": pb.ModelRepositoryParameter(string_param="yes")}
    with pytest.raises(grpc.RpcError) as caught:
        stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="first", parameters=wrong))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"])
def test_there_is_one_repository(stub, method):
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(getattr(pb, f"{method}Request")(repository_name="models"))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "'repository_name' specification is not supported"


@pytest.mark.parametrize("transport", doors.NAMES)
def test_who_may_control(tmp_path, transport):
    write(tmp_path, "first")
    options = ("--model-control-mode=explicit", "--grpc-restricted-protocol=model-repository:role=operator")
    with (
        doors.running_server(transport, tmp_path, *options) as process,
        triton.InferenceServerClient(process.address) as client,
    ):
        for call in (client.load_model, client.unload_model):
            assert refused(call, "first")[0] in ("UNAUTHENTICATED", "PERMISSION_DENIED")
        headers = {"triton-grpc-protocol-role": "operator"}
        client.load_model("first", headers=headers)
        assert infer(client, "first") == ARRAY.tolist()
        client.unload_model("first", headers=headers)


def test_a_polled_repository(tmp_path):
    """What is put into the repository is served, what changes is served anew, what is taken out is not."""
    write(tmp_path, "first")
    options = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with (
        doors.running_server("native", tmp_path, *options) as process,
        triton.InferenceServerClient(process.address) as client,
    ):
        assert refused(client.load_model, "first")[0] == "UNAVAILABLE"
        write(tmp_path, "times", model_py=MODEL.format(factor=2))
        wait_until(lambda: index(client).get("times", ("",) * 3)[1] == "READY")
        assert infer(client, "times") == (2 * ARRAY).tolist()
        (tmp_path / "times" / "1" / "model.py").write_text(MODEL.format(factor=40))
        wait_until(lambda: infer(client, "times") == (40 * ARRAY).tolist())
        shutil.rmtree(tmp_path / "times")
        wait_until(lambda: "times" not in index(client))
        assert refused(infer, client, "times")[1] == "Request for unknown model: 'times' is not found"
        assert infer(client, "first") == ARRAY.tolist()


def test_a_load_of_a_name_that_a_second_repository_has_too_fails_although_the_first_is_unchanged(tmp_path):
    """The operator learns of the second copy, also from the index, and the version that serves goes on."""
    one, other = tmp_path / "one", tmp_path / "other"
    other.mkdir()
    write(one, "m")
    options = ("--model-control-mode=explicit", "--load-model=m", f"--model-repository={other}")
    with (
        doors.running_server("native", one, *options) as process,
        triton.InferenceServerClient(process.address) as client,
    ):
        client.load_model("m")
        write(other, "m")
        with pytest.raises(InferenceServerException, match="model appears in two or more repositories"):
            client.load_model("m")
        assert client.is_model_ready("m")
        assert index(client) == {"m": ("1", "READY", "model appears in two or more repositories")}
        shutil.rmtree(other / "m")
        assert index(client) == {"m": ("1", "READY", "")}
        client.load_model("m")
