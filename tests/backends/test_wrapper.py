"""What is read from the source that PyTorch generates for a package: the shapes that its library can be given."""

import pytest

from inferd.backends.api import BackendError
from inferd.backends.pytorch.wrapper import UNBOUNDED, Dimension, ExpectedInput, expected_inputs, mismatch


def source(*inputs, dtype="float32"):
    """A wrapper's source as PyTorch writes it; each input has checks and a layout, as (sizes, strides) or None."""
    text = ""
    for index, (checks, layout) in enumerate(inputs):
        text += f'    inputs_info_[{index}].name = "arg{index}_1";\n'
        text += f"AOTI_NOINLINE static void check_input_{index}(\n    AtenTensorHandle* input_handles\n) {{\n"
        text += f"    int32_t arg{index}_1_expected_dtype = aoti_torch_dtype_{dtype}();\n"
        for check in checks:
            text += f"    if ({check.format(f'arg{index}_1_size')}) {{\n        throw 1;\n    }}\n"
        text += "}\n"
        if layout is not None:
            sizes, strides = layout
            text += f'    assert_size_stride(arg{index}_1, {{{sizes}}}, {{{strides}}}, "input");\n'
    return text


def dims(*inputs, **options):
    return [each.dims for each in expected_inputs(source(*inputs, **options))]


def test_fixed_and_variable_dimensions():
    checks = ["{}[0] < 2", "{}[0] > 64", "16 != {}[1]"]
    [found] = dims((checks, ("s31, 16L", "16L, 1L")))
    assert found == (Dimension(1, 64, "s31"), Dimension(16, 16))


def test_a_dimension_without_a_check_has_no_bounds():
    [found] = dims(([], ("s0, s1", "s1, 1L")))
    assert found == (Dimension(1, UNBOUNDED, "s0"), Dimension(1, UNBOUNDED, "s1"))


def test_the_lower_bound_of_one_is_taken_at_its_word_only_where_the_model_asks_for_more():
    for bound, lowest in ((2, 1), (3, 3), (10, 10)):
        [found] = dims(([f"{{}}[0] < {bound}"], ("s0, ", "1L, ")))
        assert found[0].lowest == lowest


def test_an_input_without_dimensions_has_an_empty_shape():
    assert dims(([], ("", ""))) == [()]


def test_an_input_that_is_not_used_has_no_layout():
    [found] = dims((["{}[0] < 2", "{}[0] > 8", "5 != {}[1]", "1 != arg0_1_stride[1]"], None))
    assert found == (Dimension(1, 8), Dimension(5, 5))


def test_a_dimension_computed_from_another():
    [found] = dims((["{}[1] < 6", "{}[1] > 200"], ("s0, 2L*s1 + 1L", "2L*s1 + 1L, 1L")))
    assert found[1] == Dimension(6, 200, "s1", 2, 1)


@pytest.mark.parametrize("size", ["s0*s1", "s0 + s1", "s0*s0", "-s0", "max(s0, 2L)"])
def test_a_dimension_that_cannot_be_checked_is_refused(size):
    with pytest.raises(BackendError, match="cannot be checked for each request"):
        dims(([], (f"s0, s1, {size}", "1L, 1L, 1L")))


def test_a_layout_that_is_not_contiguous_is_refused():
    with pytest.raises(BackendError, match="export it with a contiguous example"):
        dims(([], ("s0, 3L, 8L", "24L, 1L, 3L")))


def test_a_datatype_of_no_protocol_is_refused():
    with pytest.raises(BackendError, match="input 0 has the datatype complex64"):
        dims(([], ("s0, ", "1L, ")), dtype="complex64")


@pytest.mark.parametrize("text", ["", "int main() {}", 'inputs_info_[1].name = "a";'])
def test_another_source_says_nothing(text):
    assert expected_inputs(text) is None or expected_inputs(text) == ()


SHARED = (
    ExpectedInput("FP32", (Dimension(1, 8, "s0"), Dimension(2, 20, "s1", 2))),
    ExpectedInput("FP32", (Dimension(1, 8, "s0"), Dimension(1, 10, "s1"))),
)


@pytest.mark.parametrize(
    ("shapes", "wrong"),
    [
        (((3, 8), (3, 4)), ""),
        (((1, 2), (1, 1)), ""),
        (((9, 8), (9, 4)), "dimension 0 of input 0 is 9, the compiled model takes 1 to 8"),
        (((3, 8), (2, 4)), "dimension 0 of input 1 is 2, the compiled model takes 3"),
        (((3, 8), (3, 5)), "dimension 1 of input 0 is 8, the compiled model takes 10"),
        (((3, 7), (3, 4)), "dimension 1 of input 0 is 7, the compiled model takes 8"),
        (((3,), (3, 4)), "input 0 has 1 dimensions, the compiled model takes 2"),
    ],
)
def test_a_wrong_shape_is_named_with_what_the_library_takes(shapes, wrong):
    found = mismatch(SHARED, shapes)
    assert found.startswith(wrong) and bool(found) == bool(wrong)
