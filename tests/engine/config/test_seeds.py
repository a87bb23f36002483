"""Configurations from public Triton tutorials: refused for what is not served yet and nothing else."""

import re
from pathlib import Path

import pytest

from backends.loader import BackendLoader
from server.engine.config import Options, prepare
from server.engine.repository import ModelFolder
from server.errors import ConfigError

SEEDS = Path(__file__).resolve().parents[4] / "shared" / "seeds" / "configs"

REASONS = {
    "chat_bls_python": [],  # served
    "chat_torchscript": ["has kind KIND_GPU but no GPUs are available"],
    "densenet_onnx_tensorrt": ["optimization.execution_accelerators.gpu_execution_accelerator is not supported"],
    "onnx_openvino": ["optimization.execution_accelerators.cpu_execution_accelerator is not supported"],
    "rank_savedmodel_amp": ["platform 'tensorflow_savedmodel' is not served"],
    "sentence_onnx_tensorrt": ["optimization.execution_accelerators.gpu_execution_accelerator is not supported"],
    "sentiment_warmup_python": ["there is no file"],  # its data are not among the seeds
}


def seed(name: str) -> str:
    path = SEEDS / f"{name}.pbtxt"
    if not path.exists():
        pytest.skip(f"the seeds are not here: {SEEDS}")
    return path.read_text()


def prepare_text(tmp_path: Path, text: str):
    found = re.search(r'^name: "([^"]+)"', text, re.MULTILINE)
    assert found is not None
    path = tmp_path / found[1]
    (path / "1").mkdir(parents=True)
    (path / "config.pbtxt").write_text(text)
    return prepare(ModelFolder(path.name, path, tmp_path, (1,)), Options(), BackendLoader())


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


def test_all_seeds_are_known() -> None:
    if not SEEDS.exists():
        pytest.skip(f"the seeds are not here: {SEEDS}")
    assert {path.stem for path in SEEDS.glob("*.pbtxt")} == set(REASONS)


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
