"""`inferd models init`: what it writes serves, for each kind of model file."""

from __future__ import annotations

import functools
import json
import re
import sys
import types
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import tests.backends.openvino_models as openvino_models
from inferd.server import cli
from tests.backends.models import identity_onnx
from tests.backends.test_tensorflow import PLAIN, saved
from tests.engine.serving import infer, request, serving_folder

FLOAT = 1  # of ONNX


class Picture(torch.nn.Module):
    """A convolution and a layer, for pictures of 28 x 28."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.second = torch.nn.Linear(4 * 14 * 14, 10)

    def forward(self, image):
        return self.second(torch.max_pool2d(torch.relu(self.first(image - 0.5)), 2).flatten(1))


class Text(torch.nn.Module):
    """Two results of words, of which some are masked."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(100, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor):
        found = self.words(ids) * mask.unsqueeze(-1)
        return found.sum(1), found.argmax(2)


class Sums(torch.nn.Module):
    """Which has no batch."""

    def forward(self, x: torch.Tensor, bias: float = 0.0):
        return x.sum().reshape(1) + bias


class Named(torch.nn.Module):
    """A module that takes a dictionary."""

    def forward(self, tensors: dict[str, torch.Tensor]):
        return tensors["a"] + tensors["b"]


@pytest.fixture
def make(tmp_path, capsys):
    """Run `inferd models init` on a file; what it wrote."""

    def run(file: Path, *arguments: str, status: int = 0) -> str:
        command = ["models", "init", str(file), "--repository", str(tmp_path / "models"), *arguments]
        assert cli.main(command) == status, capsys.readouterr()
        return (tmp_path / "models" / file.stem / "config.pbtxt").read_text()

    return run


def scripted(path: Path, module: torch.nn.Module) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(module.eval()).save(str(path))
    return path


async def test_what_it_writes_serves(tmp_path, make):
    """Guards ONNX, OpenVINO, and TorchScript: traced and scripted, with and without a batch, of a dictionary."""
    (tmp_path / "onnx.onnx").write_bytes(identity_onnx(FLOAT, ["N", 4]))
    make(tmp_path / "onnx.onnx")
    openvino_models.same(tmp_path, shape=(-1, 2))
    (tmp_path / "model.xml").rename(tmp_path / "vino.xml")
    (tmp_path / "model.bin").rename(tmp_path / "vino.bin")
    make(tmp_path / "vino.xml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        traced = torch.jit.trace(Picture().eval(), torch.zeros(1, 1, 28, 28))
    traced.save(str(tmp_path / "picture.pt"))
    assert "dims: [ 1, 28, 28 ]" in make(tmp_path / "picture.pt")
    text = make(scripted(tmp_path / "text.pt", Text()))
    assert 'input { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }' in text
    assert re.findall(r"output .*(TYPE_\w+) dims: \[ (.*) \]", text) == [("TYPE_FP32", "8"), ("TYPE_INT64", "-1")]
    assert "max_batch_size: 0" in make(
        scripted(tmp_path / "sums.pt", Sums()), "--max-batch-size", "0", "--input", "x:FP32:-1"
    )
    make(scripted(tmp_path / "named.pt", Named()), "--input", "a:FP32:3", "--input", "b:FP32:3")
    make(scripted(tmp_path / "whole.pt", torch.nn.Linear(3, 2)), "--max-batch-size", "0")
    asked = {
        "onnx": request("onnx", x=np.ones((2, 4), np.float32)),
        "vino": request("vino", x=np.ones((2, 2), np.float32)),
        "picture": request("picture", image=np.ones((3, 1, 28, 28), np.float32)),
        "text": request("text", ids=np.ones((2, 5), np.int64), mask=np.ones((2, 5), np.int64)),
        "sums": request("sums", x=np.ones(7, np.float32)),
        "named": request("named", a=np.ones((2, 3), np.float32), b=np.ones((2, 3), np.float32)),
        "whole": request("whole", input=np.ones((5, 3), np.float32)),
    }
    async with serving_folder(tmp_path / "models") as engine:
        answers = {name: await infer(engine, each) for name, each in asked.items()}
        found = {name: each.array(each.response.outputs[0].name) for name, each in answers.items()}
    assert [found["picture"].shape, found["whole"].shape] == [(3, 10), (5, 2)]
    assert found["sums"] == 7
    np.testing.assert_array_equal(found["named"], np.full((2, 3), 2, np.float32))


HANDLER = """
import json
from pathlib import Path


class Adder:
    def initialize(self, context):
        self.offset = int(Path(context.system_properties["model_dir"], "offset.txt").read_text())

    def handle(self, data, context):
        return [{"sum": sum(json.loads(each["body"])) + self.offset} for each in data]
"""
UPPER = """
def upper(data, context):
    return None if data is None else [each["body"].upper() for each in data]
"""


def archived(path: Path, handler: str, **files: str) -> Path:
    """An archive as TorchServe has them."""
    manifest = {"runtime": "python", "model": {"modelName": path.stem, "handler": handler, "modelVersion": "1.0"}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, text in files.items():
            archive.writestr(name, text)
    return path


async def test_models_of_other_servers_serve(tmp_path, make):
    """Guards archives of TorchServe, with handlers of both kinds, and settings of MLServer: what is made answers."""
    joblib = pytest.importorskip("joblib")
    make(archived(tmp_path / "adder.mar", "handler.py", **{"handler.py": HANDLER, "offset.txt": "7"}))
    make(archived(tmp_path / "upper.mar", "fn:upper", **{"fn.py": UPPER}))
    (tmp_path / "line").mkdir()
    stand_in = types.SimpleNamespace(predict=functools.partial(np.sum, axis=1))  # importing sklearn takes seconds
    joblib.dump(stand_in, tmp_path / "line" / "model.joblib")
    settings = {
        "name": "line",
        "implementation": "mlserver_sklearn.SKLearnModel",
        "parameters": {"uri": "./model.joblib"},
    }
    (tmp_path / "line" / "model-settings.json").write_text(json.dumps(settings))
    make(tmp_path / "line")
    asked = {
        "adder": request("adder", data=np.array([[b"[1, 2]"], [b"[3]"]], np.object_)),
        "upper": request("upper", data=np.array([[b"one"]], np.object_)),
        "line": request("line", predict=np.array([[1, 2], [3, 4]], np.float32)),
    }
    async with serving_folder(tmp_path / "models") as engine:
        answers = {name: await infer(engine, each) for name, each in asked.items()}
        found = {name: each.array(each.response.outputs[0].name).tolist() for name, each in answers.items()}
    assert found == {"adder": [[b'{"sum": 10}'], [b'{"sum": 10}']], "upper": [[b"ONE"]], "line": [[3.0], [7.0]]}


def test_what_is_no_model_of_another_server_is_said(tmp_path, capsys):
    """Guards the errors of archives and settings that cannot be served, and that nothing is written outside."""
    broken = tmp_path / "broken.mar"
    broken.write_bytes(b"PK")
    outside = archived(tmp_path / "outside.mar", "fn:upper", **{"fn.py": UPPER, "../x": "1"})
    settings = tmp_path / "model-settings.json"
    settings.write_text(json.dumps({"name": "x", "implementation": "mlserver_mlflow.MLflowRuntime"}))
    told = {"name": "x", "implementation": "mlserver_sklearn.SKLearnModel"}
    wrong = []
    for key, value in (
        ("inputs", ["x"]),
        ("inputs", [{"shape": None}]),
        ("inputs", [{"shape": [-1, "x"]}]),
        ("outputs", [{"name": 1}]),
        ("outputs", [{"datatype": []}]),
        ("max_batch_size", "many"),
        ("max_batch_size", 1 << 31),
    ):
        (tmp_path / str(len(wrong))).mkdir()
        (tmp_path / str(len(wrong)) / "model.joblib").write_bytes(b"")
        wrong.append(tmp_path / str(len(wrong)) / "model-settings.json")
        wrong[-1].write_text(json.dumps(told | {key: value}))
    for file, said in (
        *((each, "expected a") for each in wrong),
        (broken, "no archive of TorchServe"),
        (outside, "outside of the archive"),
        (archived(tmp_path / "none.mar", "handler.py"), "neither in the archive"),
        (settings, "expected one of mlserver_sklearn.SKLearnModel"),
    ):
        assert cli.main(["models", "init", str(file), "--repository", str(tmp_path / "models")]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_a_model_is_made_where_its_file_lies(tmp_path, capsys):
    """Guards --force for a model folder that lacks its configuration."""
    file = tmp_path / "models" / "m" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text("class TritonPythonModel: pass")
    cli.main(["models", "init", str(file), "--repository", str(tmp_path / "models"), "--force"])
    assert 'backend: "python"' in (tmp_path / "models" / "m" / "config.pbtxt").read_text(), capsys.readouterr()
    assert file.read_text() == "class TritonPythonModel: pass"


def test_a_saved_model_is_described_without_its_framework(tmp_path, make, capsys):
    """Guards the folder as a model file, and the environment that is to execute it."""
    saved(tmp_path, serving_default=PLAIN).joinpath("model.savedmodel").rename(tmp_path / "linear.savedmodel")
    (tmp_path / "environment" / "bin").mkdir(parents=True)
    (tmp_path / "environment" / "bin" / "python").symlink_to(sys.executable)
    option = f"tensorflow,environment={tmp_path}/environment"
    written = make(tmp_path / "linear.savedmodel", "--backend-config", option)
    assert 'backend: "tensorflow"\n' in written
    assert 'input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }' in written
    assert (tmp_path / "models" / "linear" / "1" / "model.savedmodel" / "saved_model.pb").is_file()
    command = f"serve it:    inferd serve --model-repository {tmp_path}/models --backend-config {option}\n"
    assert command in capsys.readouterr().out


def test_a_file_of_a_version_has_the_name_of_its_model(tmp_path):
    """Guards the name: a file of a usual name is called by its model's folder, not by its version's."""
    file = tmp_path / "repo" / "resnet" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(identity_onnx(FLOAT, ["N", 4]))
    assert cli.main(["models", "init", str(file), "--repository", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new/resnet/config.pbtxt").is_file()


def test_what_cannot_be_found_out_is_said(tmp_path, make, capsys):
    """Guards the status 1 and the word about --input; and wrong ones, which are status 2."""
    written = make(scripted(tmp_path / "named.pt", Named()), status=1)
    assert "# The model cannot be served yet: model 'named': forward() takes a dictionary" in written
    assert "--input NAME:DATATYPE:SIZE,SIZE" in capsys.readouterr().err
    assert "no argument 'y': it takes x, bias" in make(
        scripted(tmp_path / "sums.pt", Sums()), "--input", "y:FP32:1", status=1
    )
    for wrong in ("x", "x:FP32", "x:FLOAT:1", "x:FP32:0", "x:FP32:a"):
        assert cli.main(["models", "init", str(tmp_path / "sums.pt"), "--force", "--input", wrong]) == cli.USAGE_ERROR
        assert "expected NAME:DATATYPE:SIZE,SIZE" in capsys.readouterr().err
    (tmp_path / "x.onnx").write_bytes(identity_onnx(FLOAT, ["N", 4]))
    assert cli.main(["models", "init", str(tmp_path / "x.onnx"), "--input", "x:FP32:4"]) == cli.USAGE_ERROR
