"""Ensembles: what must hold of their graph, by itself and with the models of the steps, with the line of each edge."""

from pathlib import Path

import pytest

from inferd.backends.loader import BackendLoader
from inferd.server import cli
from inferd.server.engine.config import Options, compose, prepare
from inferd.server.engine.repository.folders import scan
from inferd.server.errors import ConfigError

MODEL = """backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
"""

HEAD = """platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
"""


def step(given="x", gives="y", model="m", more=""):
    return (
        f'step {{ model_name: "{model}"\n'
        f'input_map {{ key: "x" value: "{given}" }}\n'
        f'output_map {{ key: "y" value: "{gives}" }}\n{more} }}\n'
    )


def scheduling(*steps, more=""):
    return f"ensemble_scheduling {{\n{''.join(steps)}{more} }}\n"


def gate(name, tensor):
    return f'parameters {{ key: "gate[{name}]" value {{ string_value: "{tensor}" }} }}\n'


def write(root: Path, **configs: str) -> None:
    for name, text in configs.items():
        (root / name / "1").mkdir(parents=True, exist_ok=True)
        (root / name / "config.pbtxt").write_text(text)


def composed(root: Path, **configs: str):
    """All models of a repository with `m` and these."""
    write(root, m=MODEL, **configs)
    return compose({folder.name: prepare(folder, Options(), BackendLoader()) for folder in scan([root])})


def error_of(root: Path, config: str, **configs: str) -> str:
    """The error of the ensemble `e`."""
    try:
        found = composed(root, e=config, **configs)["e"]
    except ConfigError as error:
        found = error
    assert isinstance(found, ConfigError), "the ensemble was accepted"
    return str(found).replace(f"{root}/e/", "")


def test_a_good_ensemble(tmp_path: Path) -> None:
    config = HEAD + scheduling(step("x", "t"), step("t", "y"), more="max_inflight_requests: 4")
    found = composed(tmp_path, e=config)["e"]
    spec = found.spec
    assert [(each.model, each.version) for each in spec.ensemble.steps] == [("m", -1)] * 2
    assert [dict(each.inputs) for each in spec.ensemble.steps] == [{"x": "x"}, {"x": "t"}]
    assert spec.ensemble.max_inflight == 4
    assert (spec.backend, spec.platform, spec.instances, spec.decoupled) == ("", "ensemble", (), False)
    assert not found.config.instance_group
    assert not found.config.HasField("optimization")


def test_the_platform_may_be_left_out(tmp_path: Path) -> None:
    text = HEAD.replace('platform: "ensemble"\n', "") + scheduling(step())
    assert composed(tmp_path, e=text)["e"].config.platform == "ensemble"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            HEAD.replace('platform: "ensemble"', 'backend: "identity"') + scheduling(step()),
            "config.pbtxt:5: ensemble scheduling cannot be set for model 'e' whose platform is not ensemble: ",
        ),
        (HEAD, "config.pbtxt: must specify 'step' for ensemble 'e'"),
        (
            HEAD + "instance_group { }\n" + scheduling(step()),
            "config.pbtxt:5: instance group should not be specified for ensemble 'e': ",
        ),
        (
            HEAD + "optimization { }\n" + scheduling(step()),
            "config.pbtxt:5: optimization should not be specified for ensemble 'e': ",
        ),
        (
            HEAD + 'ensemble_scheduling { step {\noutput_map { key: "y" value: "y" } } }',
            "config.pbtxt:5: must specify 'model_name' in step 0 of ensemble 'e'\n"
            "config.pbtxt:5: must specify 'input_map' in step 0 of ensemble 'e'",
        ),
        (
            HEAD + scheduling(step(more="model_version: -2")),
            "config.pbtxt:9: the model_version of step 0 must be a version, or -1 for the latest for model 'e': got -2",
        ),
        (HEAD + scheduling(step(model="e")), "config.pbtxt:6: step 0 of ensemble 'e' is the ensemble itself"),
        (
            HEAD + scheduling(step(), step()),
            "config.pbtxt:12: ensemble tensor 'y' can appear in an output map only once for ensemble 'e' step 1: ",
        ),
        (
            HEAD + scheduling(step("x", "y"), step("y", "x")),
            "config.pbtxt:12: ensemble tensor 'x' is an input of ensemble 'e' and cannot be written by step 1",
        ),
        (
            HEAD + 'input { name: "u" data_type: TYPE_FP32 dims: [ 3 ] }\n' + scheduling(step()),
            "config.pbtxt:5: ensemble input 'u' for ensemble e is not used",
        ),
        (
            HEAD + 'output { name: "u" data_type: TYPE_FP32 dims: [ 3 ] }\n' + scheduling(step()),
            "config.pbtxt:5: ensemble output 'u' for ensemble e is not used: no step writes it",
        ),
        (
            HEAD + scheduling(step("x", "t"), step("u", "y"), step("t", "z")),
            "config.pbtxt:4: output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 'u', "
            "is not connected\n"
            "config.pbtxt:11: ensemble tensor 'u' is unused in ensemble 'e': no step writes it and it is no input of "
            "the ensemble\n"
            "config.pbtxt:16: ensemble tensor 'z' is unused in ensemble 'e': no step reads it and it is no output of "
            "the ensemble",
        ),
        (
            HEAD + scheduling(step("x", "t"), step("v", "u"), step("u", "v"), step("v", "y")),
            "config.pbtxt:4: output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 'u', "
            "is not connected",
        ),
    ],
)
def test_a_wrong_graph_is_told_with_the_line_of_the_edge(tmp_path: Path, config: str, expected: str) -> None:
    assert expected in error_of(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "models", "expected"),
    [
        (
            HEAD + scheduling(step(model="absent")),
            {},
            "config.pbtxt:6: ensemble 'e' contains models that are not available or ambiguous: absent",
        ),
        (
            HEAD + scheduling(step(more="model_version: 3")),
            {},
            "config.pbtxt:9: ensemble 'e' depends on 'm' whose required version 3 is not loaded: versions served: 1",
        ),
        (
            HEAD.replace("max_batch_size: 8", "max_batch_size: 9") + scheduling(step()),
            {},
            "config.pbtxt:6: ensemble e allows maximum batch size 9, but it contains model m which only allows maximum "
            "batch size to be 8",
        ),
        (
            HEAD + scheduling(step("x", "t"), step("t", "y", model="other")),
            {"other": MODEL.replace('x" data_type: TYPE_FP32', 'x" data_type: TYPE_INT8')},
            "config.pbtxt:11: in ensemble e, ensemble tensor t: inconsistent data type: TYPE_FP32 is inferred from "
            "model m while TYPE_INT8 is inferred from model other",
        ),
        (
            HEAD + scheduling(step("x", "t"), step("t", "y", model="other")),
            {"other": MODEL.replace("[ 3 ]", "[ 4 ]")},
            "config.pbtxt:11: in ensemble e, ensemble tensor t: inconsistent shape: [-1,3] is inferred from model m "
            "while [-1,4] is inferred from model other",
        ),
        (
            HEAD + scheduling(step(more='input_map { key: "z" value: "x" }')),
            {},
            "config.pbtxt:9: in ensemble e, ensemble tensor x is mapping to non-existing input z in model m: its "
            "inputs: x",
        ),
        (
            HEAD + scheduling(step(more='output_map { key: "z" value: "t" }'), step("t", "u")) + "",
            {},
            "ensemble tensor 'u' is unused in ensemble 'e'",
        ),
        (
            HEAD.replace('"y"', '"z"') + scheduling(step(more='output_map { key: "w" value: "z" }'), step("y", "v")),
            {},
            "ensemble tensor 'v' is unused in ensemble 'e'",
        ),
        (
            HEAD + scheduling('step { model_name: "m"\ninput_map { key: "x" value: "x" }\n'
                              'output_map { key: "w" value: "y" } }'),
            {},
            "config.pbtxt:8: in ensemble e, ensemble tensor y is mapped from non-existing output w in model m: its "
            "outputs: y",
        ),
        (
            HEAD + scheduling(step()),
            {"m": MODEL + 'input { name: "z" data_type: TYPE_FP32 dims: [ 3 ] }\n'},
            "config.pbtxt:7: in ensemble e, input z in model m is not mapped to any ensemble tensors",
        ),
    ],
)  # fmt: skip
def test_an_edge_that_does_not_fit_its_model(tmp_path: Path, config: str, models: dict, expected: str) -> None:
    write(tmp_path, m=MODEL, e=config)
    write(tmp_path, **models)
    try:
        found = compose({folder.name: prepare(folder, Options(), BackendLoader()) for folder in scan([tmp_path])})["e"]
    except ConfigError as error:
        found = error
    assert isinstance(found, ConfigError)
    assert expected in str(found)


@pytest.mark.parametrize("dims", ["[ -1 ]", "[ 3 ]"])
def test_a_variable_dimension_fits_any(tmp_path: Path, dims: str) -> None:
    config = HEAD.replace("[ 3 ]", dims) + scheduling(step("x", "t"), step("t", "y"))
    assert not isinstance(composed(tmp_path, e=config)["e"], ConfigError)


def test_a_model_without_batch_dimension_may_have_it_as_its_own(tmp_path: Path) -> None:
    whole = MODEL.replace("max_batch_size: 8", "max_batch_size: 0").replace("[ 3 ]", "[ -1, 3 ]")
    config = HEAD + scheduling(step("x", "t", model="whole"), step("t", "y"))
    assert not isinstance(composed(tmp_path, whole=whole, e=config)["e"], ConfigError)


def test_ensembles_that_depend_on_each_other(tmp_path: Path) -> None:
    found = composed(tmp_path, e=HEAD + scheduling(step(model="f")), f=HEAD + scheduling(step(model="e")))
    errors = sorted(str(found[name]) for name in ("e", "f"))
    assert any("circular dependency between ensembles: " in error for error in errors)
    assert all(isinstance(found[name], ConfigError) for name in ("e", "f"))


GATED = HEAD + 'input { name: "g" data_type: TYPE_BOOL dims: [ 1 ] }\n'


def test_a_gate_belongs_to_its_step_and_may_be_inverted(tmp_path: Path) -> None:
    two = GATED + scheduling(step(), step(model="n")) + gate("m", "g") + gate(1, "!g")
    steps = composed(tmp_path, n=MODEL, e=two)["e"].spec.ensemble.steps
    assert [(each.gate, each.gate_inverted) for each in steps] == [("g", False), ("g", True)]


@pytest.mark.parametrize(
    ("gates", "expected"),
    [
        (gate(7, "g"), "parameter 'gate[7]' names no step: there are 2 steps, counted from 0"),
        (gate("q", "g"), "parameter 'gate[q]' names no step: no step has the model 'q'"),
        (gate("m", "g"), "steps 0, 1 have the model 'm': write one of these numbers"),
        (gate(0, "nothing") + gate(1, "g"), "the gate 'nothing' does not exist for model 'e'"),
        (gate(0, "x") + gate(1, "g"), "the gate 'x' of step 0 must be TYPE_BOOL for model 'e'"),
        (gate(0, "!") + gate(1, "g"), "parameter 'gate[0]' must name a tensor of the ensemble"),
        (gate(0, "g"), "can appear in an output map only once"),
    ],
)
def test_a_gate_that_names_no_step_or_no_tensor_is_refused(tmp_path: Path, gates: str, expected: str) -> None:
    two = scheduling(step(gives="t"), step(gives="t" if "only once" in expected else "u"), step("t", "y"))
    two = two.replace("step {", "step {", 1)
    last = "" if "only once" in expected else 'output { name: "u" data_type: TYPE_FP32 dims: [ 3 ] }\n'
    if "counted" in expected or "steps 0, 1" in expected:
        two = scheduling(step(), step("x", "u"))
    assert expected in error_of(tmp_path, GATED + last + two + gates)


def test_an_ensemble_has_no_queue_to_delay_in(tmp_path: Path) -> None:
    key = "queue_policy.timeout_action"
    text = f'{HEAD}{scheduling(step())}parameters {{ key: "{key}" value {{ string_value: "DELAY" }} }}\n'
    assert "cannot be DELAY: there is no queue in an ensemble for model 'e': write REJECT" in error_of(tmp_path, text)


def test_check_names_the_edge(tmp_path: Path, capsys) -> None:
    write(tmp_path, m=MODEL, e=HEAD + scheduling(step("x", "t"), step("t", "y")))
    assert cli.main(["check", str(tmp_path)]) == 0
    write(tmp_path, m=MODEL.replace("TYPE_FP32 dims: [ 3 ] }\noutput", "TYPE_FP32 dims: [ 4 ] }\noutput"))
    assert cli.main(["check", str(tmp_path)]) == 1
    expected = "e/config.pbtxt:7: in ensemble e, ensemble tensor x: inconsistent shape: [-1,3] is inferred"
    assert expected in capsys.readouterr().out
