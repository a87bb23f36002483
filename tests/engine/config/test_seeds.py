"""Configurations from public Triton tutorials: refused for what is not served yet and nothing else."""

import re
from pathlib import Path

import pytest

from inferd.backends.api import BackendError
from inferd.backends.loader import BackendLoader
from inferd.server.engine.config import Options, prepare
from inferd.server.engine.repository.folders import ModelFolder
from inferd.server.errors import ConfigError

SEEDS = Path(__file__).resolve().parents[4] / "shared" / "seeds" / "configs"

REASONS = {
    "chat_bls_python": [],  # served
    "chat_torchscript": ["has kind KIND_GPU but no GPUs are available"],
    "rank_savedmodel_amp": [],  # served, once its tensors agree with the model's file
    "sentence_onnx_tensorrt": [],  # its accelerator is a hint for GPUs
    "sentiment_warmup_python": ["there is no file"],  # its data are not among the seeds
}
WITHOUT_MODELS = {"densenet_onnx_tensorrt": 0, "onnx_openvino": 0}
"""Models that leave tensors to a model file, which is not there; and how many GPUs each needs."""


def seed(name: str) -> str:
    path = SEEDS / f"{name}.pbtxt"
    if not path.exists():
        pytest.skip(f"the seeds are not here: {SEEDS}")
    return path.read_text()


def prepare_text(tmp_path: Path, text: str, gpus: int = 0):
    found = re.search(r'^name: "([^"]+)"', text, re.MULTILINE)
    assert found is not None
    path = tmp_path / found[1]
    (path / "1").mkdir(parents=True)
    (path / "config.pbtxt").write_text(text)
    return prepare(ModelFolder(path.name, path, tmp_path, (1,)), Options(gpus=gpus), BackendLoader())


@pytest.mark.parametrize("name", REASONS)
def test_a_seed_is_refused_only_for_what_is_not_served(tmp_path: Path, name: str) -> None:
    if not REASONS[name]:
        prepare_text(tmp_path, seed(name))
        return
    with pytest.raises(ConfigError) as raised:
        prepare_text(tmp_path, seed(name))
    lines = str(raised.value).splitlines()
    assert len(lines) == len(REASONS[name]), lines
    for line, reason in zip(lines, REASONS[name], strict=True):
        assert re.search(r"config\.pbtxt:\d+: ", line)
        assert reason in line


@pytest.mark.parametrize("name", WITHOUT_MODELS)
def test_nothing_but_the_file_of_a_seed_is_missing(tmp_path: Path, name: str) -> None:
    with pytest.raises(BackendError, match=r"unable to find .*onnx"):
        prepare_text(tmp_path, seed(name), WITHOUT_MODELS[name])


def test_an_accelerator_for_gpus_brings_instances_there(tmp_path: Path) -> None:
    found = prepare_text(tmp_path, seed("sentence_onnx_tensorrt"), gpus=2)
    assert [(each.kind, each.device) for each in found.spec.instances] == [("GPU", 0), ("GPU", 1)]
    assert [each.name for each in found.spec.gpu_accelerators] == ["tensorrt"]


def test_all_seeds_are_known() -> None:
    if not SEEDS.exists():
        pytest.skip(f"the seeds are not here: {SEEDS}")
    assert {path.stem for path in SEEDS.glob("*.pbtxt")} == {*REASONS, *WITHOUT_MODELS}


def test_the_torchscript_seed_loads_on_the_cpu(tmp_path: Path) -> None:
    text = seed("chat_torchscript").replace("kind: KIND_GPU", "kind: KIND_CPU").replace("gpus: [ 0 ]", "")
    found = prepare_text(tmp_path, text)
    assert found.spec.backend == "pytorch"
    assert [tensor.name for tensor in found.spec.inputs] == ["INPUT__0", "INPUT__1", "INPUT__2"]
    assert found.spec.parameters == {"INFERENCE_MODE": "true"}


def test_the_sentence_seed_loads_without_its_accelerator(tmp_path: Path) -> None:
    text = re.sub(r"(?s)optimization \{.*", "", seed("sentence_onnx_tensorrt"))
    found = prepare_text(tmp_path, text)
    assert found.spec.backend == "onnxruntime"
    assert len(found.spec.instances) == 2
    assert found.spec.outputs[0].dims == (768,)
