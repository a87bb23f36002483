"""The frozen specification, and the files that a configuration names."""

import os
from pathlib import Path

import pytest

from inferd.backends.api import BatchingSpec, InstanceSpec, QueuePolicySpec, QueueSpec, TensorSpec
from inferd.server.errors import ConfigError

HEAD = 'backend: "fake"\nmax_batch_size: 8\n'
X = 'input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }\n'


def test_each_field_of_the_config_is_in_the_specification(prepared, model_dir: Path) -> None:
    (model_dir / "labels.txt").write_text("cat\ndog\r\n\nfour\n")
    found = prepared(
        HEAD
        + """
        input [ { name: "a" data_type: TYPE_STRING dims: [ -1, 2 ] optional: true } ]
        output [ { name: "y" data_type: TYPE_BF16 dims: [ 4 ] label_filename: "labels.txt" } ]
        dynamic_batching { preferred_batch_size: [ 4, 2 ] max_queue_delay_microseconds: 250 }
        instance_group [ { count: 2 }, { name: "own" kind: KIND_MODEL } ]
        parameters { key: "INFERENCE_MODE" value { string_value: "false" } }
        optimization { graph { level: -1 } }
        """
    ).spec
    assert found.name == "m"
    assert found.backend == "fake"
    assert found.max_batch_size == 8
    assert found.inputs == (TensorSpec("a", "BYTES", (-1, 2), optional=True),)
    assert found.outputs == (TensorSpec("y", "BF16", (4,), labels=("cat", "dog", "", "four")),)
    assert found.batching == BatchingSpec((4, 2), 250)
    assert found.instances == (
        InstanceSpec("m_0_0", "CPU"),
        InstanceSpec("m_0_1", "CPU"),
        InstanceSpec("own_0", "MODEL"),
    )
    assert found.parameters == {"INFERENCE_MODE": "false"}
    assert found.graph_level == -1


def test_queue_policies_by_level(prepared, io: str) -> None:
    text = """
        dynamic_batching {
          priority_levels: 3 default_priority_level: 2 default_queue_policy { max_queue_size: 5 }
          priority_queue_policy { key: 3 value { timeout_action: DELAY default_timeout_microseconds: 9 } }
          priority_queue_policy { key: 1 value { allow_timeout_override: true } }
        }
    """
    assert prepared(HEAD + text + io).spec.queue == QueueSpec(
        (QueuePolicySpec(overridable=True), QueuePolicySpec(max_size=5), QueuePolicySpec(timeout_us=9, yields=True)), 2
    )
    assert prepared(HEAD + "dynamic_batching { preserve_ordering: true }" + io).spec.queue.preserve_ordering
    assert prepared(HEAD + io).spec.queue == QueueSpec()


def test_queue_policy_by_parameters(prepared, io: str) -> None:
    values = {
        "max_queue_size": 7,
        "default_timeout_microseconds": 8,
        "allow_timeout_override": "true",
        "timeout_action": "DELAY",
    }
    text = "".join(
        f'parameters {{ key: "queue_policy.{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in values.items()
    )
    found = prepared(HEAD + text + io).spec
    assert found.queue.levels == (QueuePolicySpec(7, 8, overridable=True, yields=True),)
    assert found.parameters == {}


def test_instances_without_a_group(prepared, io: str) -> None:
    found = prepared(HEAD + io).spec
    assert found.instances == (InstanceSpec("m_0", "CPU"),)
    assert found.graph_level is None


@pytest.mark.parametrize(("written", "sizes"), [("", (8,)), ("8", (8,)), ("2", (2,)), ("8, 2", (8, 2))])
def test_preferred_sizes_arrive_as_model_config_shows_them(
    prepared, io: str, written: str, sizes: tuple[int, ...]
) -> None:
    text = f"dynamic_batching {{ preferred_batch_size: [ {written} ] }}"
    assert prepared(HEAD + text + io).spec.batching == BatchingSpec(sizes)


def test_batching_of_a_model_without_batch_dimension_is_off(prepared, io: str) -> None:
    assert prepared('backend: "fake" max_batch_size: 0 dynamic_batching { }' + io).spec.batching is None


def outside(model_dir: Path, name: str) -> None:
    (model_dir.parent / "secret").write_text("secret")
    match name:
        case "link":
            (model_dir / "link").symlink_to(model_dir.parent / "secret")
        case "link_dir/secret":
            (model_dir / "link_dir").symlink_to(model_dir.parent)
        case "fifo":
            os.mkfifo(model_dir / "fifo")
        case "zero":
            (model_dir / "zero").symlink_to("/dev/zero")
        case "folder":
            (model_dir / "folder").mkdir()
        case "latin1":
            (model_dir / "latin1").write_bytes(b"\xe4")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "/etc/passwd",
        "1/../../secret",
        "link",
        "link_dir/secret",
        "fifo",
        "zero",
        "folder",
        "absent",
        "latin1",
    ],
)
def test_a_label_file_is_a_regular_file_of_the_model(prepared, model_dir: Path, name: str) -> None:
    outside(model_dir, name)
    with pytest.raises(ConfigError) as raised:
        prepared(f'{HEAD}{X}output {{ name: "y" data_type: TYPE_FP32 dims: 1\nlabel_filename: "{name}" }}')
    assert "config.pbtxt:5: label file of output 'y'" in str(raised.value)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "../2/model.pt"])
def test_a_model_file_stays_in_its_version(prepared, io: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"pbtxt:3: default_model_filename .*must stay within the model directory"):
        prepared(f'{HEAD}default_model_filename: "{name}"{io}')


def test_a_model_file_may_not_be_a_link_out(prepared, model_dir: Path, io: str) -> None:
    outside(model_dir, "link")
    (model_dir / "1" / "model.bin").symlink_to(model_dir.parent / "secret")
    with pytest.raises(ConfigError, match="but it is a link to"):
        prepared(f'{HEAD}default_model_filename: "model.bin"{io}')
