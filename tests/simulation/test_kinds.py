"""Guards that simulations have all that a configuration may say, and any two features that may meet."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass

import pytest

from inferd.backends.api import ModelSpec
from inferd.backends.specs import (
    BatchingSpec,
    EnsembleSpec,
    InstanceSpec,
    QueuePolicySpec,
    QueueSpec,
    ResourceSpec,
    SequenceSpec,
    StateSpec,
    StepSpec,
    SuppliedSpec,
    TensorSpec,
)
from tests.simulation.covering import pairs_of
from tests.simulation.features import FEATURES, ROWS, RULES, SPACE
from tests.simulation.kinds import KINDS

FIELDS = {
    f"{spec.__name__}.{field.name}"
    for spec in (
        ModelSpec,
        BatchingSpec,
        EnsembleSpec,
        InstanceSpec,
        QueuePolicySpec,
        QueueSpec,
        ResourceSpec,
        SequenceSpec,
        StateSpec,
        StepSpec,
        SuppliedSpec,
        TensorSpec,
    )
    for field in fields(spec)
}

ELSEWHERE = {
    "InstanceSpec.device": "kernels.py draws them for each version",
    "InstanceSpec.host_policy": "processors and memory nodes are not of the world",
    "InstanceSpec.passive": "an instance that gets nothing",
    "InstanceSpec.profiles": "of TensorRT",
    "ModelSpec.cpu_accelerators": "of frameworks",
    "ModelSpec.default_model_filename": "models are made without files",
    "ModelSpec.gpu": "kernels.py draws it for each version",
    "ModelSpec.gpu_accelerators": "of frameworks",
    "ModelSpec.graph_level": "of frameworks",
    "ModelSpec.model_filenames": "models are made without files",
    "ModelSpec.parameters": "of backends",
    "ModelSpec.runtime": "of frameworks",
    "ResourceSpec.is_global": "there is one device",
    "SequenceSpec.drain_seconds": "the operator of the world says when a version ends",
    "StepSpec.optional": "models in ensembles have one input",
    "StepSpec.version": "models have one version",
}
"""Fields that no kind sets, and why not."""


def fields_set(spec: object) -> set[str]:
    """The fields that do not have their defaults, in the whole of a specification."""
    found = set()
    usual = type(spec)
    for field in fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        if value != (field.default if field.default_factory is MISSING else field.default_factory()):
            found.add(f"{usual.__name__}.{field.name}")
        inner = value if isinstance(value, tuple) else (value,)
        found.update(*(fields_set(each) for each in inner if is_dataclass(each)))
    return found


def test_every_field_of_a_configuration_is_in_a_kind():
    """A field that is added to the specification of a model is tried by simulations, or somebody says why not."""
    tried = set().union(*(fields_set(kind.spec("v", 2)) for kind in KINDS.values()))
    assert FIELDS - tried == set(ELSEWHERE), "features.py makes kinds of features; ELSEWHERE says what no kind has"


def test_any_two_features_meet():
    """What may be together is together in one kind at least; what may not be is in none."""
    met = set().union(*(pairs_of(row) for row in ROWS))
    assert met == set(SPACE.pairs())
    assert all(tuple(row) == tuple(FEATURES) for row in ROWS)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("order", "kept"), ("timeout", "refused")),
        (("order", "kept"), ("timeout", "asked")),
        (("idle", "short"), ("ends", "told")),
        (("inflight", "one"), ("steps", "gated")),
        (("reuse", "cached"), ("levels", "three")),
    ],
)
def test_pairs_that_once_were_in_no_kind_are_in_one(one, two):
    """Faults that were planted in these have not been found before."""
    assert any(row[one[0]] == one[1] and row[two[0]] == two[1] for row in ROWS)


def test_rules_are_about_features():
    """A rule names values that there are."""
    for rule in RULES:
        assert set(rule.values) <= set(FEATURES[rule.feature])
        assert set(rule.allowed) <= set(FEATURES[rule.other])
