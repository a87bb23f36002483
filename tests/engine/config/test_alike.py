"""Guards that models that differ in nothing but their names share what was found out about one, and nothing else."""

import logging

import pytest

from inferd.backends.api import BackendError
from inferd.backends.loader import BackendLoader
from inferd.server.engine.config import Alike, Options, preparation, prepare
from inferd.server.engine.repository.folders import ModelFolder
from inferd.server.errors import ConfigError

IO = """
backend: "identity"
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
"""
STATE = """max_batch_size: 2
sequence_batching { state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: [ 1 ]
    initial_state { name: "s" data_type: TYPE_FP32 dims: [ 1 ] data_file: "s" } } }
"""

CONFIGS = {
    "plain": IO,
    "batching": f"{IO}max_batch_size: 8\ndynamic_batching {{ preferred_batch_size: [ 2, 4 ] }}",
    "instances": f"{IO}instance_group [ {{ count: 3 }}, {{ count: 2 }} ]",
    "own names": f'{IO}instance_group {{ name: "mine" count: 2 }}',
    "groups of one name": f'{IO}instance_group {{ name: "%s" }}\ninstance_group {{ name: "%s" }}',
    "groups by rule": f'{IO}instance_group {{ name: "%s" }}\ninstance_group {{ name: "%s_1" }}',
    "another model's name": f'{IO}instance_group {{ name: "first_0" }}',
    "parameters": f'{IO}parameters {{ key: "delay_us" value {{ string_value: "7" }} }}',
    "wrong": f"{IO}max_batch_size: -1",
    "wrong for the backend": IO
    + 'optimization { execution_accelerators { cpu_execution_accelerator { name: "no" } } }',
    "states": IO + STATE,
    "labels": f'{IO}output {{ name: "l" data_type: TYPE_INT64 dims: [ 2 ] label_filename: "labels" }}',
    "warm-up": IO
    + 'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_INT64 dims: [ 1 ] input_data_file: "f" } } }',
}


@pytest.fixture
def outcome(tmp_path):
    """A function that gives a configuration's outcome: the specification, or the error."""

    def run(name, text, alike=None):
        path = tmp_path / name
        (path / "1").mkdir(parents=True, exist_ok=True)
        for each in ("warmup", "initial_state"):
            (path / each).mkdir(exist_ok=True)
        (path / "initial_state" / "s").write_bytes(f"{name:4}".encode()[:4])
        (path / "labels").write_text(f"of {name}\nother")
        (path / "warmup" / "f").write_bytes(bytes(8 if name == "first" else 7))
        (path / "config.pbtxt").write_text(text.replace("%s", name))
        folder = ModelFolder(name, path, tmp_path, (1,))
        try:
            found = prepare(folder, Options(), loader, alike=alike)
        except (ConfigError, BackendError) as error:
            return str(error)
        assert found.config.name == name
        return found.config.SerializeToString(deterministic=True), found.spec

    loader = BackendLoader()
    return run


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_another_model_of_the_kind_is_what_it_is_by_itself(outcome, text):
    alike = Alike()
    for name in ("first", "another", "a"):
        assert outcome(name, text, alike) == outcome(name, text)


def test_what_is_wrong_with_a_kind_is_wrong(outcome):
    """The cases above are what they are called."""
    wrong = {
        name: {key for key, text in CONFIGS.items() if isinstance(outcome(name, text), str)} for name in ("first", "a")
    }
    always = {"groups of one name", "wrong", "wrong for the backend"}
    assert wrong == {"first": always, "a": always | {"warm-up"}}


def test_kinds_are_told_apart(outcome):
    """Whatever came before, a configuration becomes what it becomes alone."""
    alike = Alike()
    for name in ("first", "another"):
        for text in CONFIGS.values():
            assert outcome(name, text, alike) == outcome(name, text)


def test_a_second_model_of_the_kind_is_not_checked_again(outcome, monkeypatch):
    """So many models of few kinds are loaded quickly, and share what their specifications have in common."""
    alike = Alike()
    _, first = outcome("first", IO, alike)

    def refuse(*_):
        raise AssertionError("it was checked before")

    monkeypatch.setattr(preparation, "validate", refuse)
    monkeypatch.setattr(preparation, "to_spec", refuse)
    _, another = outcome("another", IO, alike)
    assert another.inputs is first.inputs
    assert [each.name for each in another.instances] == ["another_0"]


def test_each_model_is_warned_about(outcome, caplog):
    text = f"{IO}optimization {{ priority: PRIORITY_MAX }}"
    alike = Alike()
    with caplog.at_level(logging.WARNING, "inferd.config"):
        for name in ("first", "another"):
            outcome(name, text, alike)
    assert [name for name in ("first", "another") for each in caplog.messages if f"'{name}'" in each] == [
        "first",
        "another",
    ]


def test_kinds_that_have_not_been_seen_for_long_are_forgotten(outcome, monkeypatch):
    monkeypatch.setattr("inferd.server.engine.config.alike.KINDS", 2)
    alike = Alike()
    for delay in (1, 2, 1, 3):
        outcome("first", f'{IO}parameters {{ key: "delay_us" value {{ string_value: "{delay}" }} }}', alike)
    monkeypatch.setattr(preparation, "validate", lambda *_: pytest.fail("checked"))
    outcome("another", f'{IO}parameters {{ key: "delay_us" value {{ string_value: "1" }} }}', alike)
    with pytest.raises(pytest.fail.Exception):
        outcome("another", f'{IO}parameters {{ key: "delay_us" value {{ string_value: "2" }} }}', alike)
