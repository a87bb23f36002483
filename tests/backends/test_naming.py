"""The naming conventions of TorchScript models."""

import pytest

from inferd.backends.api import BackendError
from inferd.backends.pytorch.naming import input_positions, output_positions

FORWARD = ["image", "mask", "scale"]


@pytest.mark.parametrize(
    ("names", "positions"),
    [
        (["INPUT__0", "INPUT__1"], [0, 1]),
        (["INPUT__1", "INPUT__0"], [1, 0]),
        (["a__2", "b__0", "c__1"], [2, 0, 1]),
        (["a__b__0"], [0]),
        (["image", "mask"], [0, 1]),
        (["scale", "image"], [2, 0]),
        (["first", "second"], [0, 1]),
        (["image", "other"], [0, 1]),  # not all are arguments: the order counts
        (["x__y"], [0]),
        ([], []),
    ],
)
def test_names_of_inputs_give_their_positions(names, positions):
    assert input_positions("m", names, FORWARD) == positions


def test_argument_names_may_look_like_indexes():
    assert input_positions("m", ["x__5", "mask"], ["mask", "x__5"]) == [1, 0]


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["INPUT__0", "INPUT__2"], "INPUT__2"),
        (["INPUT__0", "other__0"], "INPUT__0"),
        (["INPUT__1"], "INPUT__1"),
        (["INPUT__0", "other"], "other"),
        (["other", "INPUT__0"], "other"),
    ],
)
def test_gaps_and_mixes_are_refused(names, named):
    text = f"'{named}' does not follow the <name>__<index> naming convention"
    with pytest.raises(BackendError, match=f"model 'm': input {text}"):
        input_positions("m", names, FORWARD)
    with pytest.raises(BackendError, match=f"model 'm': output {text}"):
        output_positions("m", names)


def test_more_inputs_than_arguments():
    with pytest.raises(BackendError, match=r"configured with 4 inputs, but forward\(\) takes 3: image, mask, scale"):
        input_positions("m", ["a", "b", "c", "d"], FORWARD)


@pytest.mark.parametrize(
    ("names", "positions"), [(["OUTPUT__1", "OUTPUT__0"], [1, 0]), (["probability", "label"], [0, 1])]
)
def test_names_of_outputs_give_their_positions(names, positions):
    assert output_positions("m", names) == positions
