"""The analysis of an ensemble: in what order steps can run, and what happens once for each response of a step."""

import pytest

from inferd._native.ensembles.plan import Analysis, PlanError
from inferd.backends.api import EnsembleSpec, ModelSpec, StepSpec, TensorSpec


def graph(*steps: StepSpec, outputs=("y",)) -> Analysis:
    inputs = (TensorSpec("x", "FP32", (1,)),)
    found = tuple(TensorSpec(name, "FP32", (1,)) for name in outputs)
    return Analysis(ModelSpec("e", "", inputs=inputs, outputs=found, ensemble=EnsembleSpec(steps)))


def step(reads: str, writes: str, **more) -> StepSpec:
    """A step that reads and writes the tensors of these letters."""
    return StepSpec("m", inputs={f"in_{name}": name for name in reads}, outputs={name: name for name in writes}, **more)


def test_steps_come_behind_those_that_they_depend_on():
    found = graph(step("bc", "y"), step("a", "c"), step("a", "b"), step("x", "a"))
    position = {index: place for place, index in enumerate(found.order)}
    assert position[3] < min(position[1], position[2])
    assert position[0] == 3


def test_a_gate_is_read_like_an_input():
    found = graph(step("x", "y", gate="g"), step("x", "g"))
    assert found.order == [1, 0]


def test_scopes_of_decoupled_steps():
    found = graph(step("x", "a", decoupled=True), step("ax", "b"), step("b", "c", decoupled=True), step("cab", "y"))
    scope_of = dict(zip(found.tensors, found.tensor_scope, strict=True))
    assert found.scopes == [-1, 0, 1]
    assert found.opens == [1, -1, 2, -1]
    assert found.step_scope == [0, 1, 1, 2]
    assert scope_of == {"x": 0, "a": 1, "b": 1, "c": 2, "y": 2}


@pytest.mark.parametrize(
    ("steps", "text", "where"),
    [
        ([step("xb", "a"), step("a", "b"), step("b", "y")], "depends on itself", 0),
        ([step("q", "y")], "reads 'q', which nothing writes", 0),
        (
            [step("x", "a", decoupled=True), step("x", "b", decoupled=True), step("ab", "y")],
            "receives inputs originated from different decoupled models",
            2,
        ),
        (
            [step("x", "y", gate="x"), step("x", "y", gate="x", gate_inverted=True, decoupled=True)],
            "run at different times: before, and for each response of a decoupled step",
            1,
        ),
    ],
)
def test_graphs_that_cannot_be_served(steps, text, where):
    with pytest.raises(PlanError, match=text) as caught:
        graph(*steps)
    assert caught.value.step == where
