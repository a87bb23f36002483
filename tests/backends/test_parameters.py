"""Texts to typed values."""

import os

import pytest

from inferd.backends.api import BackendError
from inferd.backends.parameters import Parameters, default_intra_op_threads


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("TRUE", True), ("1", True), ("false", False), (" False ", False), ("0", False)],
)
def test_a_flag_is_read_in_each_spelling(text, expected):
    assert Parameters({"k": text}, "model 'm'").flag("k", not expected) is expected


def test_a_value_that_is_absent_is_its_default():
    parameters = Parameters({}, "model 'm'")
    assert parameters.flag("k", True) is True
    assert parameters.integer("k") is None
    assert parameters.integer("k", 3) == 3
    assert parameters.text("k", "t") == "t"


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (lambda p: p.flag("k", True), "maybe", "expected true or false"),
        (lambda p: p.integer("k"), "1.5", "expected a whole number"),
        (lambda p: p.integer("k", minimum=1), "0", "expected at least 1"),
    ],
)
def test_errors_name_owner_key_value_and_what_to_write(read, text, expected):
    with pytest.raises(BackendError) as caught:
        read(Parameters({"k": text}, "model 'm'"))
    assert str(caught.value) == f"model 'm': parameter 'k' is '{text}', {expected}"


def test_unknown_keys_are_told(caplog):
    Parameters({"known": "1", "knwon": "2", "zzz": "3"}, "model 'm'").warn_unknown({"known"})
    assert caplog.messages == [
        "model 'm': parameter 'knwon' has no effect; did you mean 'known'?",
        "model 'm': parameter 'zzz' has no effect",
    ]


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 32)])
def test_half_of_the_cpus_are_the_default_threads(monkeypatch, cpus, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert default_intra_op_threads() == threads
