"""Guards the rules of reshaping, ragged inputs and padding: a broken one is told, in Triton's words if it has some."""

import pytest

from inferd.server.errors import ConfigError

BASE = """backend: "identity" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] %s }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BASE % "reshape { shape: [ 4 ] }", "has different number of variable dimensions for dims and reshape"),
        (BASE % "reshape { shape: [ -1, 3 ] }", "has different size for dims and reshape"),
        (BASE % "reshape { shape: [ 0 ] }", "reshape dimensions must be integer >= 1"),
        ((BASE % "allow_ragged_batch: true").replace("max_batch_size: 4", ""), "is ragged, but max_batch_size is 0"),
        (BASE % "" + 'batch_input { target_name: "a" data_type: TYPE_INT32 }', "expects 1 source input, got 0"),
        (
            BASE % "" + 'batch_input { source_input: "z" target_name: "a" data_type: TYPE_INT32 }',
            "unknown source input",
        ),
        (
            BASE % "" + 'batch_input { source_input: "x" target_name: "a" data_type: TYPE_INT64 }',
            "batch input data type must be TYPE_INT32 or TYPE_FP32",
        ),
        (
            BASE % "" + 'batch_input { source_input: "x" target_name: ["a", "a"] data_type: TYPE_INT32 }',
            "target input name 'a' can only be specified once",
        ),
        (BASE % "" + 'batch_output { source_input: "x" target_name: "y" }', "unknown source input name 'x'"),
        (
            BASE % "allow_ragged_batch: true" + 'batch_output { source_input: "x" target_name: "z" }',
            "unknown target output name 'z'",
        ),
        (BASE % "" + 'parameters { key: "pad" value { string_value: "z=0" } }', "there is no input 'z'"),
        (BASE % "" + 'parameters { key: "pad" value { string_value: "x" } }', "expected NAME=NUMBER"),
        (BASE % "" + 'parameters { key: "pad_buckets" value { string_value: "8,4" } }', "expected ascending"),
        (BASE % "" + 'parameters { key: "pad_buckets" value { string_value: "4294967296" } }', "expected ascending"),
        (BASE % "" + 'parameters { key: "pad" value { string_value: "x=1e39" } }', "cannot be padded with"),
        (BASE % "" + 'parameters { key: "unpad" value { string_value: "y=x" } }', "input 'x' is not padded"),
    ],
)
def test_a_broken_rule_is_told(prepared, text, problem):
    with pytest.raises(ConfigError, match=problem):
        prepared(text)


@pytest.mark.parametrize(
    ("datatype", "good", "bad"),
    [
        ("UINT8", ("0", "255"), ("-1", "256", "1.5", "nan")),
        ("INT8", ("-128", "127"), ("-129", "128")),
        ("INT64", ("-9223372036854775808",), ("9223372036854775808", "inf")),
        ("BOOL", ("0", "1"), ("2",)),
        ("FP16", ("0.1", "-65504", "-inf", "nan"), ("65536",)),
        ("FP64", ("1e300",), ()),
    ],
)
def test_an_input_is_padded_only_with_what_its_datatype_has(prepared, datatype, good, bad) -> None:
    text = (
        BASE.replace("TYPE_FP32", f"TYPE_{datatype}") % "" + 'parameters { key: "pad" value { string_value: "x=%s" } }'
    )
    for value in good:
        assert prepared(text % value).spec.inputs[0].pad_value == pytest.approx(float(value), nan_ok=True)
    for value in bad:
        with pytest.raises(ConfigError, match="input 'x' cannot be padded with"):
            prepared(text % value)
