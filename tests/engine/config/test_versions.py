"""A version's configuration over the model's: how the two are joined, and which file is said to be wrong."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import dataclass

import pytest

from inferd.backends.api import Backend, Model, ModelSource, Signature, TensorSpec
from inferd.server.engine.config import Options
from inferd.server.errors import ConfigError

HEAD = 'backend: "fake"\nmax_batch_size: 8\n'


def write_own(model_dir, text: str, version: int = 1, name: str = "config.pbtxt") -> None:
    path = model_dir / str(version) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_scheduler_of_the_version_stands_for_the_models(prepared, model_dir, io) -> None:
    write_own(model_dir, "sequence_batching { max_sequence_idle_microseconds: 5 }")
    found = prepared(HEAD + io + "dynamic_batching { max_queue_delay_microseconds: 100 }")
    assert found.spec.batching is None
    assert found.spec.sequence.max_idle_us == 5


def test_a_default_value_that_is_written_counts(prepared, model_dir, io) -> None:
    write_own(model_dir, "max_batch_size: 0")
    assert prepared(HEAD + io).spec.max_batch_size == 0


def test_a_platform_of_the_version_takes_the_models_backend_along(prepared, model_dir, io) -> None:
    write_own(model_dir, 'platform: "pytorch_libtorch"')
    found = prepared('platform: "onnxruntime_onnx" backend: "onnxruntime" max_batch_size: 8' + io)
    assert (found.config.platform, found.config.backend) == ("pytorch_libtorch", "pytorch")


def test_a_copy_of_the_models_configuration_changes_nothing(prepared, model_dir, io) -> None:
    text = f'name: "m" {HEAD} {io} version_policy {{ all {{ }} }} parameters {{ key: "a" value {{ }} }}'
    before = prepared(text)
    write_own(model_dir, text)
    after = prepared(text)
    assert (after.config, after.spec) == (before.config, before.spec)


def test_a_version_alone_may_say_everything(prepared, model_dir, io) -> None:
    write_own(model_dir, HEAD + io)
    assert prepared(None).spec.max_batch_size == 8


def test_named_configurations_of_versions(prepared, model_dir, io) -> None:
    """The name chooses in each folder by itself."""
    write_own(model_dir, "max_batch_size: 2")
    write_own(model_dir, "max_batch_size: 3", name="configs/big.pbtxt")
    assert prepared(HEAD + io).spec.max_batch_size == 2
    assert prepared(HEAD + io, options=Options(config_name="big")).spec.max_batch_size == 3
    assert prepared(HEAD + io, options=Options(config_name="other")).spec.max_batch_size == 2


def test_what_one_file_says_is_searched_for_there(prepared, model_dir, io) -> None:
    """Each error names the file that has the field, and its line there."""
    write_own(model_dir, 'parameters { key: "b" value { string_value: "x" } }\nmax_batch_size: -2')
    with pytest.raises(ConfigError, match=r"m/1/config\.pbtxt:2: .*max_batch_size"):
        prepared(HEAD + io)
    write_own(model_dir, "\n\nmax_batch_size: 2")
    with pytest.raises(ConfigError, match=r"m/config\.pbtxt:\d+: .*preferred"):
        prepared(HEAD + io + "dynamic_batching { preferred_batch_size: [ 4 ] }")


def test_a_version_is_completed_by_its_own_file(prepared, model_dir, fake_backend) -> None:
    """Each that is served and lacks something is looked into, and no other."""
    for version in (2, 3):
        (model_dir / str(version)).mkdir()
    write_own(model_dir, 'output { name: "y" data_type: TYPE_FP32 dims: [ 9 ] }', version=3)
    backend = fake_backend(Signature((TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", (5,)),), batches=True))
    found = prepared('backend: "fake" version_policy { latest { num_versions: 2 } }', backend=backend)
    assert sorted(source.version for source in backend.inspected) == [2, 3]
    assert [each.spec.outputs[0].dims for each in found.by_version.values()] == [(5,), (9,)]


def test_versions_that_are_alike_are_checked_once(prepared, model_dir, io, caplog) -> None:
    (model_dir / "2").mkdir()
    found = prepared(HEAD + io + "version_policy { all { } } optimization { priority: PRIORITY_MAX }")
    assert found.of(1) is found.of(2)
    assert sum("priority" in record.getMessage() for record in caplog.records) == 1


def test_a_version_that_cannot_be_served_leaves_the_others(prepared, model_dir, io) -> None:
    (model_dir / "2").mkdir()
    write_own(model_dir, "nonsense", version=1)
    found = prepared(HEAD + io + "version_policy { all { } }")
    assert (found.versions, list(found.by_version), list(found.problems)) == ((1, 2), [2], [1])
    assert str(model_dir / "1" / "config.pbtxt:1:1") in found.problems[1]
    write_own(model_dir, "rubbish", version=2)
    with pytest.raises(ConfigError, match=r"2/config\.pbtxt:1:1: .*'rubbish'"):
        prepared(HEAD + io + "version_policy { all { } }")


def test_a_link_out_of_the_model_is_not_read(prepared, model_dir, tmp_path, io) -> None:
    (tmp_path / "secret").write_text("max_batch_size: 2")
    (model_dir / "1" / "config.pbtxt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="must stay within the model directory"):
        prepared(HEAD + io)


@dataclass
class Comparable(Backend):
    """A backend that defines equality, as a user's may, and therefore has no hash."""

    name = "fake"
    broken: int = 0  # the version whose file cannot be read
    error: type[BaseException] = ValueError
    held: weakref.ref[set[int]] | None = None  # what it had in hand when it failed

    def __post_init__(self) -> None:
        super().__init__()

    def inspect(self, source: ModelSource) -> Signature | None:
        if source.version == self.broken:
            in_hand = {1}
            self.held = weakref.ref(in_hand)
            raise self.error(f"nothing in {len(in_hand)} file")
        return Signature((TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", (5,)),), batches=True)

    def load(self, source: ModelSource) -> Model:
        raise AssertionError("a configuration is prepared without loading")


def test_a_backend_need_not_be_hashable(prepared, io) -> None:
    backend = Comparable()
    with pytest.raises(TypeError, match="unhashable"):
        hash(backend)
    assert prepared(HEAD + io, backend=backend).spec.max_batch_size == 8


@pytest.mark.parametrize("all_fail", [False, True])
def test_what_a_failed_version_had_in_hand_is_freed_at_once(prepared, model_dir, caplog, all_fail) -> None:
    """The error of one version does not hold the frames of its failure until a collection."""
    backend = Comparable(broken=1)
    if not all_fail:
        (model_dir / "2").mkdir()
    caplog.set_level(logging.CRITICAL, "inferd.config")  # the records that tests keep hold what they tell of
    gc.disable()
    try:
        if all_fail:
            with pytest.raises(ValueError, match="nothing in 1 file"):
                prepared('backend: "fake"', backend=backend)
        else:
            found = prepared('backend: "fake" version_policy { all { } }', backend=backend)
            assert found.problems == {1: "ValueError: nothing in 1 file"}
        assert backend.held is not None
        assert backend.held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("base", [ValueError, BaseException])
def test_an_error_whose_text_fails_keeps_only_its_version(prepared, model_dir, caplog, base) -> None:
    class Textless(base):  # type: ignore[misc, valid-type]
        def __str__(self) -> str:
            raise ValueError("no text")

    (model_dir / "2").mkdir()
    found = prepared('backend: "fake" version_policy { all { } }', backend=Comparable(broken=1, error=Textless))
    assert list(found.problems) == [1]
    assert "Textless: it has no text" in found.problems[1]
    caplog.clear()  # frames of the logged errors hold what they were about


def labels(text: str) -> str:
    return f'\nparameters {{ key: "version_labels" value {{ string_value: "{text}" }} }}'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *(
            (text, f"is '{text}', expected LABEL=VERSION")
            for text in ("stable", "7=1", "-1=1", "a=0", "a=b", "a=1, a=2")
        ),
        ("a=4", "label 'a' stands for version 4, which is not served for model 'm': name one of 2, 3, or change"),
        ("a=1", "label 'a' stands for version 1, which is not served"),
    ],
)
def test_wrong_labels_are_refused(prepared, model_dir, io, text, error) -> None:
    """Guards the form of labels, and that each names a version that is served."""
    for version in (2, 3):
        (model_dir / str(version)).mkdir()
    with pytest.raises(ConfigError, match=r"m/config\.pbtxt:\d+: ") as raised:
        prepared(HEAD + io + "version_policy { latest { num_versions: 2 } }" + labels(text))
    assert error in str(raised.value)


def test_a_version_cannot_change_labels(prepared, model_dir, io) -> None:
    (model_dir / "2").mkdir()
    write_own(model_dir, labels("a=2"), version=2)
    found = prepared(HEAD + io + "version_policy { all { } }" + labels("a=1"))
    assert "'version_labels' is the same for all versions of model 'm'" in found.problems[2]
    assert found.labels == {"a": 1}
