"""`inferd check-backend`: a backend that keeps to its contract passes, one that breaks a rule is told which."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.server.cli import main

CONFIG = """
backend: "mine"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "words" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 2 }
dynamic_batching { max_queue_delay_microseconds: 5000 }
"""
BACKEND = """
import numpy as np
from inferd.backends.api import Backend, BackendError, Instance, Model

class Mine(Backend):
    name = "mine"
    def load(self, source):
        path = source.path / "factor"
        if not path.exists():
            raise BackendError(f"unable to find '{path}'")
        return Loaded()

class Loaded(Model):
    def create_instance(self, spec):
        return Running()

class Running(Instance):
    kept = None
    calls = 0
    def execute(self, batch):
        Running.calls += 1
        batch.set_output("y", batch.input("x").numpy() * 2)
"""
BROKEN = {
    "a missing model file is a BackendError": ("raise BackendError(", "raise KeyError("),
    "requests are answered": ('batch.set_output("y", batch.input("x").numpy() * 2)', "pass"),
    "a response is the same the next time": ("* 2)", "* np.float32(2 + Running.calls))"),
    "a response is the same in a batch of others, and on any instance": (
        "numpy() * 2)",
        "numpy() * np.float32(batch.rows > 4))",
    ),
    "nothing is left when the models are gone": (
        "        batch.set_output",
        '        import builtins; builtins.inferd_kept = batch.input("x"); batch.set_output',
    ),
}


def checked(tmp_path: Path, capsys, code: str, config: str = CONFIG) -> tuple[int, dict[str, str]]:
    """The status of the command, and what it says by rule."""
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    (version / "factor").touch()
    (version.parent / "config.pbtxt").write_text(config)
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "mine.py").write_text(code)
    status = main(["check-backend", str(tmp_path / "models"), "--backend-directory", str(tmp_path / "backends")])
    out, err = capsys.readouterr()
    assert err == ""  # the findings say everything
    return status, dict(line.removeprefix("m: ").split(": ", 1) for line in out.splitlines())


def test_a_good_backend_passes(tmp_path, capsys):
    status, said = checked(tmp_path, capsys, BACKEND)
    assert (status, said) == (0, dict.fromkeys(BROKEN, "ok"))


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("is decoupled", "dynamic_batching { } model_transaction_policy { decoupled: true }"),
        ("has sequences", "sequence_batching { }"),
    ],
)
def test_what_is_not_checked_is_said(tmp_path, capsys, kind, extra):
    config = CONFIG[: CONFIG.index("dynamic_batching")] + extra
    status, said = checked(tmp_path, capsys, BACKEND, config)
    assert (status, said["requests are answered"]) == (0, f"not checked: the model {kind}")


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(tmp_path, capsys, rule):
    import builtins

    status, said = checked(tmp_path, capsys, BACKEND.replace(*BROKEN[rule]))
    vars(builtins).pop("inferd_kept", None)
    assert status == 1
    assert said[rule] != "ok"


def test_what_is_no_number_is_another_value_than_one(tmp_path, capsys):
    """Guards outputs that are NaN where a request is alone: only NaN is the same."""
    rule = "a response is the same in a batch of others, and on any instance"
    worse = BACKEND.replace("* 2)", "* np.float32(2 if batch.rows > 4 else np.nan))")
    status, said = checked(tmp_path, capsys, worse)
    assert (status, said[rule]) == (1, "output 'y' has other values")
    assert checked(tmp_path / "always", capsys, BACKEND.replace("* 2)", "* np.float32(np.nan))"))[1][rule] == "ok"


def test_a_broken_backend_is_told_in_one_sentence(tmp_path, capfd):
    """Not once for each request, nor in the log; it names the line of the backend."""
    code = BACKEND.replace('batch.set_output("y"', 'batch.set_output("z"')
    _, said = checked(tmp_path, capfd, code)
    line = code[: code.index('batch.set_output("z"')].count("\n") + 1
    assert said["requests are answered"].startswith("a request with x FP32 [")
    assert said["requests are answered"].endswith(f"the model has no output 'z' ({tmp_path}/backends/mine.py:{line})")


def test_memory_that_a_backend_keeps_in_its_module_is_found(tmp_path, capsys):
    status, said = checked(tmp_path, capsys, BACKEND.replace("kept = None", "kept = []").replace(
        "        batch.set_output", '        Running.kept.append(batch.input("x")); batch.set_output'))  # fmt: skip
    assert status == 1
    assert said.pop("nothing is left when the models are gone").startswith("the backend keeps ")
    assert set(said.values()) == {"ok"}


def test_a_backend_that_does_not_load_is_told_once(tmp_path, capfd):
    status, said = checked(tmp_path, capfd, BACKEND.replace("return Running()", "raise RuntimeError('no')"))
    assert status == 1
    assert said["models load"].startswith("failed to load 'm' version 1: no (")


def test_a_backend_to_begin_with_keeps_the_contract(tmp_path, capsys):
    """What `backends init` writes: strings, an optional input, and batches."""
    assert main(["backends", "init", "mine", "--folder", str(tmp_path)]) == 0
    folders = [str(tmp_path / "models"), "--backend-directory", str(tmp_path / "backends")]
    assert main(["check-backend", *folders]) == 0, capsys.readouterr().out
    assert main(["backends", "init", "mine", "--folder", str(tmp_path)]) == 1  # it exists
    assert main(["backends", "init", "Mine", "--folder", str(tmp_path)]) == 2


def test_a_repository_is_needed(capsys):
    assert main(["check-backend"]) == 2
