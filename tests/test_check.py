"""`inferd check` finds what keeps a model from being served, as `inferd serve` does, and looks at every model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.server import cli
from tests.backends.models import identity_onnx

ROOT = Path(__file__).resolve().parents[1]
FLOAT = 1  # of ONNX
ONNX = identity_onnx(FLOAT, ["N", 4])
PYTHON = b"class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"


def config(backend="onnxruntime", *, tensor="x", datatype="TYPE_FP32", dims="4", more=""):
    tensors = "\n".join(
        f'{kind} [ {{ name: "{name}" data_type: {datatype} dims: [ {dims} ] }} ]'
        for kind, name in (("input", tensor), ("output", "y"))
    )
    return f'backend: "{backend}"\nmax_batch_size: 8\n{tensors}\n{more}\n'


GOOD = {"config.pbtxt": config(), "1/model.onnx": ONNX}
WRONG: dict[str, tuple[dict[str, str | bytes], str]] = {
    "missing": (
        {"config.pbtxt": config(), "1/.keep": ""},
        r"unable to find '.*1/model.onnx' for model 'missing': the folder is empty",
    ),
    "misnamed": (
        {"config.pbtxt": config(), "1/my.onnx": ONNX},
        r"unable to find .*: the folder has my.onnx; rename the file",
    ),
    "outside": (
        {"config.pbtxt": config("python"), "model.py": PYTHON, "1/.keep": ""},
        r"it lies beside the version folder, move it into .*/outside/1",
    ),
    "no_version": (
        {"config.pbtxt": config("python"), "model.py": PYTHON},
        r"versions with a folder: none; the model's file belongs into a folder .* such as .*/no_version/1",
    ),
    "ensemble": (
        {"config.pbtxt": 'platform: "ensemble"\nensemble_scheduling { step { model_name: "m" } }'},
        r"an ensemble has no file, but needs an empty folder as its version: mkdir .*/ensemble/1",
    ),
    "warmup": (
        {
            "config.pbtxt": config(
                "python",
                datatype="TYPE_STRING",
                more='model_warmup { name: "one" batch_size: 1 inputs { key: "x" value { data_type: TYPE_STRING '
                'dims: [ 4 ] input_data_file: "texts" } } }',
            ),
            "1/model.py": PYTHON,
            "warmup/texts": "a good film, and a bad one",
        },
        r"warmup/texts must have 4 strings, each its length in 4 bytes, little-endian, and then its bytes: string 0",
    ),
    "wrong_name": ({**GOOD, "config.pbtxt": config(tensor="input")}, r"unexpected inference input 'input'"),
    "wrong_type": ({**GOOD, "config.pbtxt": config(datatype="TYPE_INT32")}, r"unexpected datatype INT32 for input 'x'"),
    "wrong_dims": ({**GOOD, "config.pbtxt": config(dims="5")}, r"the model expects shape \[-1,4\]"),
    "fixed": ({**GOOD, "1/model.onnx": identity_onnx(FLOAT, [1, 4])}, r"model does not support batching"),
    "truncated": ({**GOOD, "1/model.onnx": ONNX[: len(ONNX) // 2]}, r"failed to load 'truncated'"),
    "pointer": ({**GOOD, "1/model.onnx": POINTER}, r"1/model.onnx: it is a pointer of Git LFS.*: run git lfs pull"),
    "syntax": (
        {"config.pbtxt": config("python"), "1/model.py": b"def f(:\n"},
        r"1/model.py:1: SyntaxError: ",
    ),
    "no_class": (
        {"config.pbtxt": config("python"), "1/model.py": b"class Model:\n    pass\n"},
        r"1/model.py: it must define the class TritonPythonModel",
    ),
    "provider": (
        {
            **GOOD,
            "config.pbtxt": config(
                more='optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" '
                'parameters { key: "device_type" value: "GPU" } } } }'
            ),
        },
        r"needs OpenVINOExecutionProvider|parameter 'device_type' is 'GPU', expected CPU",
    ),
    "version": (
        {
            "config.pbtxt": config(more="version_policy { all { } }"),
            "1/model.onnx": ONNX,
            "1/config.pbtxt": "max_batch: 3",
            "2/model.onnx": ONNX,
        },
        r"version/1/config.pbtxt:1:\d+: .*'max_batch_size'",
    ),
    "plan": (
        {"config.pbtxt": config("tensorrt"), "1/model.plan": b"x"},
        r'needs a GPU.*; without one, serve .* platform: "onnxruntime_onnx" and the file model.onnx',
    ),
    "other_name": ({"config.pbtxt.txt": config(), "1/model.onnx": ONNX}, r"Its name must be config.pbtxt"),
    "typo": ({**GOOD, "config.pbtxt": config(more="max_batch: 3")}, r"typo/config.pbtxt:\d+:\d+: .*'max_batch_size'"),
}


def write(repository: Path, name: str, files: dict[str, str | bytes]) -> None:
    for file, content in files.items():
        path = repository / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def check(capsys, repository: Path, *options: str) -> tuple[int, list[str]]:
    status = cli.main(["check", str(repository), *options])
    return status, capsys.readouterr().out.splitlines()


def check_without_a_gpu(repository: Path) -> tuple[int, list[str]]:
    """`inferd check` in a process of its own: this one may have the driver of another test, which is loaded once."""
    found = subprocess.run(
        [sys.executable, "-m", "inferd", "check", repository],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout.splitlines()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, capsys, name: str) -> None:
    files, expected = WRONG[name]
    write(tmp_path, name, files)
    status, lines = check_without_a_gpu(tmp_path) if name == "plan" else check(capsys, tmp_path)
    assert status == 1
    assert len(lines) == 1
    assert re.search(expected, lines[0])


def test_what_torch_saves_is_no_torchscript(tmp_path: Path, capsys) -> None:
    torch = pytest.importorskip("torch")
    write(tmp_path, "state", {"config.pbtxt": config("pytorch"), "1/.keep": ""})
    torch.save({"w": torch.zeros(2)}, tmp_path / "state/1/model.pt")
    status, [line] = check(capsys, tmp_path)
    assert status == 1
    assert "it is what torch.save makes, such as a state_dict" in line


def test_check_and_serve_refuse_the_same_models(tmp_path: Path) -> None:
    for name, (files, _) in WRONG.items():
        write(tmp_path, name, files)
    write(tmp_path, "good", GOOD)
    write(tmp_path, "a b", GOOD)
    write(tmp_path, "with..dots", {**GOOD, "config.pbtxt": "\ufeff" + config()})
    for name in ("lost+found", "__pycache__", "empty"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-m", "inferd"]
    found = subprocess.run([*command, "check", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert [line for line in found.stdout.splitlines() if line.endswith(": ok")] == [
        "a b: ok",
        "good: ok",
        "with..dots: ok",
    ]
    assert "Traceback" not in found.stdout + found.stderr
    served = subprocess.run(
        [*command, "serve", "--model-repository", str(tmp_path), "--grpc-port=0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert served.returncode == 1
    [last] = re.findall(r"(\d+) of the models could not be loaded: (.*); --exit-on-error", served.stderr)
    assert last == (str(len(WRONG)), ", ".join(sorted(WRONG)))


def test_an_unreadable_model_is_one_line_and_the_next_is_looked_at(tmp_path: Path, capsys) -> None:
    write(tmp_path, "first", GOOD)
    write(tmp_path, "second", GOOD)
    os.mkfifo(tmp_path / "first" / "labels")  # a regular file is expected
    (tmp_path / "first" / "config.pbtxt").unlink()
    (tmp_path / "first" / "config.pbtxt").mkdir()
    status, lines = check(capsys, tmp_path)
    assert status == 1
    assert re.match(r".*first/config.pbtxt: expected a regular file", lines[0])
    assert lines[1:] == ["second: ok"]


def test_a_hint_is_shown_once_with_its_model(tmp_path: Path, capsys) -> None:
    write(tmp_path, "m", {**GOOD, "config.pbtxt": config(more="optimization { priority: PRIORITY_MAX }")})
    (tmp_path / "m" / "v2").mkdir()
    status, lines = check(capsys, tmp_path)
    assert status == 0
    assert lines[0] == "m: ok"
    assert sorted(line.partition(": ")[2].partition(": ")[2].partition(": ")[0] for line in lines[1:]) == [
        "ignored",
        "optimization.priority of model 'm' has no effect",
    ]


def test_a_model_is_loaded_only_when_that_is_asked(tmp_path: Path, capsys, caplog) -> None:
    write(
        tmp_path,
        "late",
        {
            "config.pbtxt": config("python"),
            "1/model.py": PYTHON + b"    def initialize(self, args):\n        raise RuntimeError('no weights')\n",
        },
    )
    assert check(capsys, tmp_path) == (0, ["late: ok"])
    status, lines = check(capsys, tmp_path, "--load")
    assert status == 1
    assert lines[0].startswith("failed to load 'late' version 1: ")
    assert "no weights" in lines[0]
    assert not caplog.records  # it is said once


@pytest.mark.parametrize("given", ["m", "m/1/model.onnx", "m/1"])
def test_one_model_is_looked_at(tmp_path: Path, capsys, given: str) -> None:
    """A model's folder, its file, and the folder of the file."""
    write(tmp_path, "m", GOOD)
    (tmp_path / "m" / "config.pbtxt").unlink()
    assert cli.main(["check", str(tmp_path / given)]) == 0
    assert capsys.readouterr().out == "m: ok\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("m", "{}/m/config.pbtxt:1:1: ModelConfig has no field named 'max_batch'"),
        ("named", "{}/named: unable to find '{}/named/1/model.onnx' for model 'other': the folder is empty"),
        ("flat", "{}/flat/config.pbtxt:1:1: ModelConfig has no field named 'max_batch'"),
        ("cut.onnx", "{}/cut.onnx: failed to load 'cut' from '{}/cut.onnx': "),
        ("bare.pt", "{}/bare.pt: there is no config.pbtxt, `inferd models init {}/bare.pt` makes one: "),
    ],
)
def test_what_is_wrong_with_one_model_is_said_with_the_path_that_was_given(
    tmp_path: Path, capsys, given: str, said: str
) -> None:
    """Guards against paths of folders that the server has made for itself."""
    write(tmp_path, "m", {"config.pbtxt": "max_batch: 3", "1/model.onnx": ONNX})
    write(tmp_path, "named", {"config.pbtxt": 'name: "other"\n' + config(), "1/.keep": ""})
    write(tmp_path, "flat", {"config.pbtxt": "max_batch: 3", "model.onnx": ONNX})
    write(tmp_path, "", {"cut.onnx": ONNX[: len(ONNX) // 2], "bare.pt": "x"})
    status, lines = check(capsys, tmp_path / given)
    assert status == 1
    assert lines[0].startswith(said.replace("{}", str(tmp_path)))
    assert "inferd-model-" not in "".join(lines)


@pytest.mark.parametrize("given", ["m/1/model.onnx", "m/1"])
def test_a_part_of_a_model_is_not_looked_at_without_its_configuration(tmp_path: Path, capsys, given: str) -> None:
    write(tmp_path, "m", GOOD)
    assert cli.main(["check", str(tmp_path / "m")]) == 0
    assert cli.main(["check", str(tmp_path / given)]) == 1
    assert f"give the model's folder, {tmp_path / 'm'}\n" in capsys.readouterr().err


def test_check_without_a_model_is_an_error(tmp_path: Path, capsys) -> None:
    assert cli.main(["check"]) == cli.USAGE_ERROR
    assert cli.main(["check", str(tmp_path / "absent")]) == 1
    assert "no such file or directory" in capsys.readouterr().err
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "there is no model in" in capsys.readouterr().err
