"""Guards execution accelerators: those that a backend knows, on instances that can use them, and no others."""

import pytest

from inferd.backends.loader import BackendLoader
from inferd.server.engine.config import Options, prepare
from inferd.server.engine.repository.folders import ModelFolder
from inferd.server.errors import ConfigError

CONFIG = """backend: "{backend}"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}
"""


def accelerator(kind, name, **parameters):
    given = "".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    return f'optimization {{ execution_accelerators {{ {kind}_execution_accelerator {{ name: "{name}" {given} }} }} }}'


def prepared(tmp_path, text, backend="onnxruntime", gpus=0):
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG.format(backend=backend) + text)
    return prepare(ModelFolder("m", folder, tmp_path, (1,)), Options(gpus=gpus), BackendLoader()).spec


def test_they_reach_the_backend(tmp_path):
    spec = prepared(tmp_path, accelerator("gpu", "tensorrt", precision_mode="FP16"), gpus=1)
    [found] = spec.gpu_accelerators
    assert (found.name, dict(found.parameters)) == ("tensorrt", {"precision_mode": "FP16"})
    assert spec.instances[0].kind == "GPU", "one for GPUs brings KIND_AUTO there"


def test_one_for_the_cpu_leaves_instances_there(tmp_path):
    spec = prepared(tmp_path, accelerator("cpu", "openvino"), gpus=1)
    assert [each.name for each in spec.cpu_accelerators] == ["openvino"]
    assert {each.kind for each in spec.instances} == {"CPU"}


@pytest.mark.parametrize(
    ("text", "backend", "gpus", "expected"),
    [
        (
            accelerator("gpu", "speed"),
            "onnxruntime",
            1,
            "unknown Execution Accelerator 'speed' is requested for model 'm': those of backend 'onnxruntime' are",
        ),
        (accelerator("gpu", "openvino"), "onnxruntime", 1, "unknown Execution Accelerator 'openvino' is requested"),
        (accelerator("gpu", "tensorrt"), "identity", 1, "unknown Execution Accelerator 'tensorrt' is requested"),
    ],
)
def test_others_are_refused(tmp_path, text, backend, gpus, expected):
    with pytest.raises(ConfigError) as raised:
        prepared(tmp_path, text, backend, gpus)
    assert expected in str(raised.value)
    assert "config.pbtxt:" in str(raised.value)
