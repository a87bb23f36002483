"""Name, platform, backend and the defaults that Triton fills in."""

from pathlib import Path

import pytest

from inferd.server.engine.config import Options
from inferd.server.engine.config.reading import read_written, settle
from inferd.server.engine.repository.folders import versions_of
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb

KIND = pb.ModelInstanceGroup.Kind


def load_config(model_dir: Path, options: Options) -> pb.ModelConfig:
    """What is written for the latest version, with its defaults; it need not be complete."""
    config, source = read_written(model_dir, options)
    settle(config, model_dir, model_dir / str(versions_of(model_dir)[-1]), source, options)
    return config


def load(model_dir: Path, text: str = "") -> pb.ModelConfig:
    (model_dir / "config.pbtxt").write_text(text)
    return load_config(model_dir, Options())


def test_the_name_is_the_folders(model_dir: Path) -> None:
    assert load(model_dir, 'backend: "identity"').name == "m"
    with pytest.raises(ConfigError, match=r"config\.pbtxt:2: unexpected directory name 'm'.*must equal model name"):
        load(model_dir, 'backend: "identity"\nname: "other"')


@pytest.mark.parametrize(
    ("text", "platform", "backend", "filename"),
    [
        ('platform: "onnxruntime_onnx"', "onnxruntime_onnx", "onnxruntime", "model.onnx"),
        ('platform: "pytorch_libtorch"', "pytorch_libtorch", "pytorch", "model.pt"),
        ('backend: "pytorch"', "pytorch_libtorch", "pytorch", "model.pt"),
        ('backend: "onnxruntime" platform: "onnxruntime_onnx"', "onnxruntime_onnx", "onnxruntime", "model.onnx"),
        ('backend: "onnxruntime" default_model_filename: "a.onnx"', "onnxruntime_onnx", "onnxruntime", "a.onnx"),
        ('backend: "identity"', "", "identity", ""),
        ('backend: "mine"', "", "mine", ""),
    ],
)
def test_platform_and_backend_complete_each_other(
    model_dir: Path, text: str, platform: str, backend: str, filename: str
) -> None:
    config = load(model_dir, text)
    assert (config.platform, config.backend, config.default_model_filename) == (platform, backend, filename)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('platform: "nothing"', "unexpected platform type 'nothing' for model 'm'"),
        ('backend: "pytorch"\nplatform: "onnxruntime_onnx"', "pbtxt:2: unexpected 'platform' and 'backend' pair"),
        ("max_batch_size: 1", "must specify 'platform' or 'backend'"),
        ('platform: "onnxruntime"', "did you mean 'onnxruntime_onnx'?"),
        ('{"max_batch_size": 1}', "config.pbtxt: this is JSON; expected protobuf's text format"),
    ],
)
def test_a_wrong_pair_is_refused(model_dir: Path, text: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(model_dir, text)
    assert fragment in str(raised.value)


@pytest.mark.parametrize(
    ("file", "text", "backend"),
    [
        ("1/model.onnx", "", "onnxruntime"),
        ("1/model.pt", "", "pytorch"),
        ("1/model.xml", "", "openvino"),
        ("1/model.savedmodel", "", "tensorflow"),
        ("1/model.graphdef", "", "tensorflow"),
        ("1/net.onnx", 'default_model_filename: "net.onnx"', "onnxruntime"),
        ("7/model.pt", "", "pytorch"),
    ],
)
def test_the_backend_is_told_by_the_file(model_dir: Path, file: str, text: str, backend: str) -> None:
    path = model_dir / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert load(model_dir, text).backend == backend


@pytest.mark.parametrize("file", ["1/resnet.onnx", "model.onnx"])
def test_a_file_that_may_be_the_models_is_told(model_dir: Path, file: str) -> None:
    """Guards the sentence for a file under another name, or beside the version's folder."""
    (model_dir / "1").mkdir(exist_ok=True)
    (model_dir / file).touch()
    with pytest.raises(ConfigError, match=f"{file} is there: name it 1/model.onnx"):
        load(model_dir, "max_batch_size: 1")


def test_the_backend_is_told_by_the_folders_name(tmp_path: Path) -> None:
    (tmp_path / "m.identity" / "1").mkdir(parents=True)
    assert load(tmp_path / "m.identity").backend == "identity"


def test_defaults_are_tritons(model_dir: Path) -> None:
    config = load(model_dir, 'backend: "identity" max_batch_size: 8 dynamic_batching { }')
    assert config.version_policy.latest.num_versions == 1
    assert config.dynamic_batching.preferred_batch_size == [8]
    assert config.optimization.input_pinned_memory.enable
    assert config.optimization.output_pinned_memory.enable
    assert [(g.name, g.count, g.kind) for g in config.instance_group] == [("m", 1, KIND.KIND_CPU)]


def test_what_is_written_stays(model_dir: Path) -> None:
    text = """backend: "identity" max_batch_size: 8
        dynamic_batching { preferred_batch_size: [ 2 ] }
        optimization { input_pinned_memory { enable: false } }
        version_policy { latest { num_versions: 3 } }"""
    config = load(model_dir, text)
    assert config.dynamic_batching.preferred_batch_size == [2]
    assert not config.optimization.input_pinned_memory.enable
    assert config.version_policy.latest.num_versions == 3


@pytest.mark.parametrize(
    ("backend", "group", "count", "kind"),
    [
        ("onnxruntime", "", 2, KIND.KIND_CPU),
        ("onnxruntime", "instance_group { }", 2, KIND.KIND_CPU),
        ("onnxruntime", "instance_group { kind: KIND_CPU count: 1 }", 1, KIND.KIND_CPU),
        ("onnxruntime", "instance_group { kind: KIND_MODEL }", 1, KIND.KIND_MODEL),
        ("pytorch", "instance_group { kind: KIND_AUTO }", 1, KIND.KIND_CPU),
    ],
)
def test_instances_on_the_cpu(model_dir: Path, backend: str, group: str, count: int, kind: int) -> None:
    (found,) = load(model_dir, f'backend: "{backend}" {group}').instance_group
    assert (found.count, found.kind) == (count, kind)


def test_another_configuration_by_name(model_dir: Path) -> None:
    (model_dir / "config.pbtxt").write_text('backend: "identity"')
    (model_dir / "configs").mkdir()
    (model_dir / "configs" / "big.pbtxt").write_text('backend: "identity" max_batch_size: 99')
    assert load_config(model_dir, Options(config_name="big")).max_batch_size == 99
    assert load_config(model_dir, Options(config_name="absent")).max_batch_size == 0


def test_a_missing_file_is_an_empty_one_only_with_auto_complete(model_dir: Path) -> None:
    (model_dir / "1" / "model.onnx").touch()
    assert load_config(model_dir, Options()).backend == "onnxruntime"
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(model_dir, Options(auto_complete=False))
