"""Versions of a model with configurations of their own: what clients see of them, and what a change of one does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import grpc
import numpy as np
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.backends.models import identity_onnx
from tests.conformance import doors
from tests.conformance.client import Stub

FLOAT = 1  # of ONNX
CONFIG = """
backend: "identity"
max_batch_size: 8
version_policy { all { } }
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group { name: "here" kind: KIND_CPU count: 1 }
parameters { key: "a" value { string_value: "model" } }
parameters { key: "b" value { string_value: "model" } }
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step { model_name: "widths" model_version: 1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""


class Server:
    """A server that loads what it is asked for, of a repository that the test writes."""

    def __init__(self, root: Path, stub: Stub) -> None:
        self.root = root
        self.stub = stub

    def write(self, name: str, **files: str | bytes) -> None:
        """Files of a model: config=..., and v1_config or v2_model for what lies in a version's folder."""
        names = {"config": "config.pbtxt", "model": "model.onnx"}
        for key, content in files.items():
            version, _, kind = key.rpartition("_")
            path = self.root / name / version.removeprefix("v") / names[kind]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def load(self, name: str, **parameters: str) -> str:
        """Load; return the error that the client gets, empty when the model is loaded."""
        message = pb.RepositoryModelLoadRequest(model_name=name)
        for key, value in parameters.items():
            message.parameters[key].string_param = value
        try:
            self.stub.RepositoryModelLoad(message, timeout=60)
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    def config(self, name: str, version: str = ""):
        request = pb.ModelConfigRequest(name=name, version=version)
        return self.stub.ModelConfig(request, timeout=60).config

    def infer(self, name: str, version: str, rows: int, width: int = 4) -> bool:
        """Whether so many rows are answered; the answer is what was asked."""
        x = np.arange(rows * width, dtype=np.float32)
        message = pb.ModelInferRequest(model_name=name, model_version=version, raw_input_contents=[x.tobytes()])
        message.inputs.add(name="x", datatype="FP32", shape=[rows, width])
        try:
            answer = self.stub.ModelInfer(message, timeout=60)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            return False
        return answer.raw_output_contents[0] == x.tobytes()

    def counts(self, name: str) -> dict[str, int]:
        """Requests that each version has executed since it was loaded."""
        found = self.stub.ModelStatistics(pb.ModelStatisticsRequest(name=name), timeout=60)
        return {each.version: each.execution_count for each in found.model_stats}

    def index(self, name: str) -> dict[str, tuple[str, str]]:
        found = self.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=60)
        return {each.version: (each.state, each.reason) for each in found.models if each.name == name}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    options = ("--model-control-mode=explicit", "--model-load-overrides")
    with (
        doors.running_server("native", root, *options) as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        yield Server(root, Stub(channel))


def test_a_version_is_configured_by_the_model_but_for_what_it_writes(server) -> None:
    own = 'max_batch_size: 2\ninstance_group { count: 2 }\nparameters { key: "b" value { string_value: "version" } }\n'
    server.write("m", config=CONFIG, v1_model=b"", v2_config=own)
    assert server.load("m") == ""
    first, second = server.config("m", "1"), server.config("m", "2")
    assert (first.max_batch_size, second.max_batch_size) == (8, 2)
    assert [(group.name, group.count) for group in first.instance_group] == [("here", 1)]
    assert [(group.name, group.count) for group in second.instance_group] == [("m_0", 2)], "a field is replaced whole"
    values = [{key: value.string_value for key, value in each.parameters.items()} for each in (first, second)]
    assert values == [{"a": "model", "b": "model"}, {"a": "model", "b": "version"}]
    assert first.input == second.input
    assert server.config("m") == second, "of the latest, where no version is named"
    assert server.infer("m", "1", rows=4)
    assert not server.infer("m", "2", rows=4)
    assert server.infer("m", "", rows=2)


def test_versions_may_have_other_tensors_and_backends(server) -> None:
    """Each is completed by its own file, and an ensemble fits the version that its step names."""
    third = 'backend: "identity"\nmax_batch_size: 1\n' + "\n".join(CONFIG.splitlines()[4:6])
    models = [identity_onnx(FLOAT, ["N", width]) for width in (4, 6)]
    server.write("widths", config="version_policy { all { } }", v1_model=models[0], v2_model=models[1], v3_config=third)
    server.write("one", config=ENSEMBLE, v1_model=b"")
    assert server.load("one") == ""
    assert [server.config("widths", version).backend for version in "123"] == ["onnxruntime", "onnxruntime", "identity"]
    assert [list(server.config("widths", version).input[0].dims) for version in "123"] == [[4], [6], [4]]
    assert server.infer("widths", "1", rows=3, width=4)
    assert server.infer("widths", "2", rows=3, width=6)
    assert not server.infer("widths", "2", rows=3, width=4)
    assert server.infer("widths", "3", rows=1, width=4)
    assert server.infer("one", "", rows=3, width=4)


def test_a_change_of_a_versions_configuration_loads_that_version_alone(server) -> None:
    server.write("changing", config=CONFIG, v1_config="max_batch_size: 4", v2_config="max_batch_size: 2")
    assert server.load("changing") == ""

    def executed_anew(**files: str) -> dict[str, int]:
        """The counts after a load with these files, and one request to each version before it."""
        assert server.infer("changing", "1", rows=1)
        assert server.infer("changing", "2", rows=1)
        server.write("changing", **files)
        assert server.load("changing") == ""
        return server.counts("changing")

    assert executed_anew(v1_config="max_batch_size: 3") == {"1": 0, "2": 1}
    assert not server.infer("changing", "1", rows=4)
    assert executed_anew(v2_config="max_batch_size: 2  # said otherwise") == {"1": 1, "2": 2}
    scaled = 'max_batch_size: 2 instance_group { name: "here" kind: KIND_CPU count: 3 }'
    assert executed_anew(v2_config=scaled) == {"1": 2, "2": 3}, "instances are made while it serves"
    assert server.config("changing", "2").instance_group[0].count == 3
    assert server.config("changing", "1").instance_group[0].count == 1
    (server.root / "changing" / "1" / "config.pbtxt").unlink()
    assert executed_anew() == {"1": 0, "2": 4}
    assert server.config("changing", "1").max_batch_size == 8


WRONG = {
    "policy": ("\nversion_policy { latest { } }", r":2: version_policy is the same for all versions of model 'policy'"),
    "name": ('name: "other"', r":1: name is the same for all versions of model 'name'"),
    "ensemble": ('platform: "ensemble"', r":1: all versions of model 'ensemble' are ensembles, or none is"),
    "typo": ("max_batch: 3", r":1:\d+: .*'max_batch_size'"),
    "rule": ("\n\nmax_batch_size: -1", r":3: .*max_batch_size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_versions_configuration_names_its_file(server, name: str) -> None:
    """The other versions are served; of what is served already nothing changes."""
    text, expected = WRONG[name]
    server.write(name, config=CONFIG, v1_config=text, v2_config="max_batch_size: 2")
    told = server.load(name)
    path = server.root / name / "1" / "config.pbtxt"
    assert re.search(re.escape(str(path)) + expected, told)
    assert server.index(name)["2"] == ("READY", "")
    state, reason = server.index(name)["1"]
    assert state == "UNAVAILABLE"
    assert reason in told
    server.write(name, v1_config="max_batch_size: 3")
    assert server.load(name) == ""
    assert server.config(name, "1").max_batch_size == 3
    server.write(name, v1_config=text)
    assert str(path) in server.load(name)
    assert server.index(name) == {"1": ("READY", ""), "2": ("READY", "")}


def test_all_versions_of_an_ensemble_have_one_configuration(server) -> None:
    server.write("widths", config="version_policy { all { } }", v1_model=identity_onnx(FLOAT, ["N", 4]))
    server.write("two", config=ENSEMBLE, v1_config="max_batch_size: 2")
    told = server.load("two")
    assert f"{server.root}/two/1/config.pbtxt: all versions of ensemble 'two' have one configuration" in told


def test_a_configuration_that_comes_with_a_load_stands_for_all_of_them(server) -> None:
    server.write("given", config=CONFIG, v1_config="max_batch_size: 4", v2_config="max_batch_size: 2")
    assert server.load("given") == ""
    tensors = {
        kind: [{"name": name, "data_type": "TYPE_FP32", "dims": [4]}]
        for kind, name in (("input", "x"), ("output", "y"))
    }
    config = {"backend": "identity", "max_batch_size": 5, "version_policy": {"all": {}}, **tensors}
    assert server.load("given", config=json.dumps(config)) == ""
    assert [server.config("given", version).max_batch_size for version in "12"] == [5, 5]
    assert server.load("given") == ""
    assert [server.config("given", version).max_batch_size for version in "12"] == [4, 2]
