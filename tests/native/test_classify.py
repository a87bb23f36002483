"""The classification extension against a model in numpy."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd._native.tensors.classify import classify_tensor
from tests.native.classes import DTYPES, order, ours, texts

COMMA = struct.pack("<8I4s2I", 0x20031114, 6, 32, 34, 35, 36, 40, 44, b",", ord(","), 0) + b"ASCII\0"
"""glibc's LC_NUMERIC of a locale with a decimal comma: the offsets of its six fields, and these."""


def test_text_of_each_element():
    row = np.array([[0.5, -1.25, 3e9]], "<f4")
    assert ours(row, 3, ["cat", "", "dog"]) == ["3000000000.000000:2:dog", "0.500000:0:cat", "-1.250000:1"]
    assert ours(np.array([[7, -3]], "<i8"), 1, ["größe"]) == ["7:0:größe"]


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if "f" not in d])
def test_the_least_and_largest_integers_are_in_order(dtype):
    limits = np.iinfo(dtype)
    row = np.array([[limits.min, 0, limits.max, limits.max - 1, limits.min + 1]], dtype)
    assert ours(row, 5) == texts(row, 5)
    assert ours(row, 1) == [f"{limits.max}:2"]


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_nan_infinities_and_signed_zeros_are_in_order(dtype):
    limits = np.finfo(dtype)
    values = [np.nan, -np.nan, np.inf, -np.inf, limits.max, limits.min, limits.tiny, -limits.tiny, -0.0, 0.0]
    row = np.array([values, values[::-1]], dtype)
    assert ours(row, 10) == texts(row, 10)


def test_equal_values_come_by_index():
    row = np.zeros((1, 50), "<f4")
    row[0, 30:] = 1
    assert ours(row, 7) == [f"1.000000:{i}" for i in range(30, 37)]
    row[0, ::2] = -0.0
    assert [int(t.split(":")[1]) for t in ours(row, 50)] == order(row[0])


def test_no_class_is_asked_for_or_there():
    assert classify_tensor(bytes(8), "FP32", 1, 2, 0) == b""
    assert classify_tensor(b"", "FP32", 0, 2, 3) == b""
    assert classify_tensor(b"", "FP32", 4, 0, 3) == b""
    assert len(ours(np.zeros((2, 3), "<f4"), 100)) == 6


@pytest.mark.parametrize(("datatype", "size"), [("FP16", 2), ("BF16", 2), ("BOOL", 1), ("BYTES", 0)])
def test_datatypes_without_classes(datatype, size):
    with pytest.raises(TypeError, match=datatype):
        classify_tensor(bytes(4 * size), datatype, 1, 4, 1)


def test_a_row_has_a_million_elements_at_most():
    row = np.arange(1_000_000, dtype="<i4").reshape(1, -1)
    assert ours(row, 2) == ["999999:999999", "999998:999998"]
    assert ours(np.repeat(row, 2, axis=0), 1) == ["999999:999999"] * 2
    with pytest.raises(OverflowError):
        classify_tensor(bytes(1_000_001), "UINT8", 1, 1_000_001, 1)


@given(st.data(), st.sampled_from(list(DTYPES.values())))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_tensor_is_classified_as_by_the_model(data, dtype):
    rows, elements = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 40))
    content = data.draw(st.binary(min_size=rows * elements * 8, max_size=rows * elements * 8))
    array = np.frombuffer(content, dtype)[: rows * elements].reshape(rows, elements)
    if data.draw(st.booleans()):  # many equal values
        array = array[:, :1].repeat(elements, axis=1) if elements else array
    k = data.draw(st.integers(0, elements + 2))
    labels = data.draw(st.lists(st.text(max_size=5), max_size=elements + 1))
    assert ours(array, k, labels) == texts(array, k, labels)


def test_numbers_have_a_decimal_point_in_every_locale(tmp_path):
    """A model may set a locale for the whole process; clients parse the texts."""
    (tmp_path / "comma").mkdir()
    (tmp_path / "comma" / "LC_NUMERIC").write_bytes(COMMA)
    code = """
import locale, struct
from inferd._native.tensors.classify import classify_tensor
locale.setlocale(locale.LC_NUMERIC, "comma")
text = classify_tensor(struct.pack("<d", 1.5), "FP64", 1, 1, 1)
print(locale.format_string("%f", 1.5), text[4:].decode(), locale.format_string("%f", 1.5))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LOCPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1,500000", "1.500000:0", "1,500000"]
