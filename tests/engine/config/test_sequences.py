"""What must hold of sequence_batching, with Triton's texts, and what its files of initial states must hold."""

import numpy as np
import pytest

from inferd.server.errors import ConfigError

HEAD = """backend: "fake"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
FIRST = HEAD.count("\n") + 1  # the line behind it

START = 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START %s } }'
CORRID = 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID %s } }'
STATE = 'state { input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: [ 2 ] %s }'
INITIAL = 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] %s }'
SAME = "use_same_buffer_for_input_output: true"


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "direct { minimum_slot_utilization: 1 max_queue_delay_microseconds: 5 }",
        "oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2, 8 ] preserve_ordering: true }",
        "iterative_sequence: true",
        *(START % f"{kind}_false_true: [ {pair} ]" for kind, pair in (("int32", "0, 1"), ("bool", "true, false"))),
        START % "fp32_false_true: [ -0.5, 1e9 ]",
        *(CORRID % f"data_type: TYPE_{name}" for name in ("UINT64", "INT64", "UINT32", "INT32", "STRING")),
        STATE % "",
        STATE.replace('"b"', '"y"').replace("[ 2 ]", "[ 3, 5 ]")
        % "",  # dims of the output are other ones, as in Triton
        STATE % f"{SAME} use_growable_memory: true",
        STATE % (INITIAL % "zero_data: true"),
        'state { input_name: "a" output_name: "b" data_type: TYPE_STRING dims: [ -1 ] }',
    ],
)
def test_what_is_served(prepared, inside):
    assert prepared(f"{HEAD}sequence_batching {{ {inside} }}").spec.sequence is not None


@pytest.mark.parametrize(
    ("inside", "fragment"),
    [
        ("control_input { control { kind: CONTROL_SEQUENCE_START } }", "control tensor must have a name"),
        ('control_input { name: "S" }', "control tensor 'S' must specify a control kind"),
        (
            'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } '
            "control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }",
            "control tensor 'S' is specified for multiple control kinds",
        ),
        (START % "" + START.replace('"S"', '"T"') % "", "specifies multiple CONTROL_SEQUENCE_START tensors"),
        (
            START % "",
            "must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_START",
        ),
        (START % "int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]", "specifies more than one from"),
        (START % "int32_false_true: [ 0 ]", "'int32_false_true' must have exactly 2 entries"),
        (START % "fp32_false_true: [ 0, 1, 2 ]", "'fp32_false_true' must have exactly 2 entries"),
        (CORRID % "int32_false_true: [ 0, 1 ]", "must not specify either 'int32_false_true'"),
        (CORRID % "", "unexpected data type for control CONTROL_SEQUENCE_CORRID"),
        (CORRID % "data_type: TYPE_FP32", "allowed data types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32"),
        ("direct { minimum_slot_utilization: 1.5 }", "must be in range (0.0, 1.0] for model 'm': got 1.5"),
        ("direct { minimum_slot_utilization: -1 }", "minimum slot utilization must be in range"),
        ("oldest { preferred_batch_size: 0 }", "preferred batch size must be positive"),
        ("oldest { preferred_batch_size: 9 }", "preferred batch size must be <= max batch size 8"),
        ("oldest { max_candidate_sequences: -1 }", "max_candidate_sequences must be in range"),
        ("max_sequence_idle_microseconds: 18446744073709551615", "max_sequence_idle_microseconds must be <="),
        (START.replace('"S"', '"x"') % "int32_false_true: [ 0, 1 ]", "'x' is given 2 times among inputs, control"),
        (STATE % "" + STATE.replace('"a"', '"z"') % "", "2 states have the 'output_name' 'b'"),
        ('state { output_name: "b" data_type: TYPE_FP32 dims: 1 }', "must specify 'input_name' and 'output_name'"),
        ('state { input_name: "a" output_name: "b" dims: 1 }', "state 'a' must specify 'data_type'"),
        ('state { input_name: "a" output_name: "b" data_type: TYPE_FP32 }', "state 'a' must specify 'dims'"),
        (STATE.replace("[ 2 ]", "[ 0 ]") % "", "dimension must be integer >= 1, or -1"),
        (STATE.replace('"b"', '"y"').replace("FP32", "INT8") % "", "'a' and output 'y' must have the same data_type"),
        (STATE.replace("[ 2 ]", "[ 1000000, 1000000 ]") % "", "must begin with at most"),
        (STATE % "use_growable_memory: true", "you must also enable 'use_same_buffer_for_input_output'"),
        (STATE % (INITIAL % "zero_data: true" * 2), "must contain exactly one or zero element"),
        (STATE % (INITIAL.replace("FP32", "INT32") % "zero_data: true"), "does not match the state data type"),
        (STATE % (INITIAL.replace('"i"', '""') % "zero_data: true"), "Field 'name' must be set"),
        (STATE % (INITIAL.replace("[ 2 ]", "[ 2, 1 ]") % "zero_data: true"), "doesn't match the size of 'state'"),
        (STATE % (INITIAL.replace("[ 2 ]", "[ -1 ]") % "zero_data: true"), "contains variable dimensions"),
        (STATE % (INITIAL.replace("[ 2 ]", "[ 3 ]") % "zero_data: true"), "doesn't match 'state' dim description"),
        (STATE % (INITIAL % ""), "to have state_data set"),
    ],
)
def test_a_broken_rule_is_told_with_its_line(prepared, inside, fragment):
    with pytest.raises(ConfigError) as raised:
        prepared(f"{HEAD}sequence_batching {{ {inside} }}")
    assert fragment in str(raised.value)
    assert f"config.pbtxt:{FIRST}: " in str(raised.value)


@pytest.mark.parametrize(
    ("scheduling", "key", "value", "fragment"),
    [
        ("", "sequence_max_backlog", "1", "parameter 'sequence_max_backlog' needs 'sequence_batching'"),
        ("sequence_batching { }", "sequence_end_notice", "true", "needs a control input CONTROL_SEQUENCE_END"),
        ("sequence_batching { }", "sequence_end_reason", "", "must name an input of the model"),
        ("sequence_batching { }", "sequence_max_backlog", "many", "expected a whole number"),
        ("sequence_batching { }", "queue_policy.allow_timeout_override", "true", "a request's timeout may shorten it"),
        ("sequence_batching { }", "coalesce_requests", "true", "coalesce_requests"),
    ],
)
def test_parameters_that_do_not_fit(prepared, scheduling, key, value, fragment):
    with pytest.raises(ConfigError) as raised:
        prepared(f"{HEAD}{scheduling}\n{parameter(key, value)}")
    assert fragment in str(raised.value)


def test_sequences_are_not_cached(prepared):
    with pytest.raises(ConfigError, match="Response Cache does not currently support model"):
        prepared(f"{HEAD}sequence_batching {{ }}\nresponse_cache {{ enable: true }}")


@pytest.mark.parametrize(
    ("datatype", "content", "expected"),
    [
        ("FP32", np.array([1, 2], np.float32).tobytes(), "whole"),
        ("FP32", np.array([1, 2, 3], np.float32).tobytes(), "the first 8 bytes"),
        ("FP32", b"\0" * 7, "expects 8 bytes, but the data provided from begin only has 7 bytes"),
        ("STRING", b"\1\0\0\0a\0\0\0\0", "whole"),
        ("STRING", b"\1\0\0\0a", "expects 2 strings, but begin holds fewer"),
        ("STRING", b"\xff\xff\xff\xffa", "expects 2 strings, but begin holds fewer"),
    ],
)
def test_the_file_of_an_initial_state(prepared, model_dir, datatype, content, expected):
    (model_dir / "initial_state").mkdir()
    (model_dir / "initial_state" / "begin").write_bytes(content)
    text = (STATE % (INITIAL % 'data_file: "begin"')).replace("FP32", datatype)
    config = f"{HEAD}sequence_batching {{ {text} }}"
    if "expects" in expected:
        with pytest.raises(ConfigError, match=expected):
            prepared(config)
    else:
        [state] = prepared(config).spec.sequence.states
        assert state.initial == (content if expected == "whole" else content[:8])


@pytest.mark.parametrize("name", ["nothing", "../../../etc/passwd"])
def test_a_file_that_is_not_there_or_elsewhere(prepared, model_dir, name):
    (model_dir / "initial_state").mkdir()
    state = STATE % (INITIAL % 'data_file: "begin"').replace("begin", name)
    with pytest.raises(ConfigError, match="initial state of 'a'"):
        prepared(f"{HEAD}sequence_batching {{ {state} }}")


def test_the_queue_policy_of_sequences(prepared):
    policy = parameter("queue_policy.max_queue_size", "7") + parameter(
        "queue_policy.default_timeout_microseconds", "500"
    )
    spec = prepared(f"{HEAD}sequence_batching {{ }}\n{policy}").spec
    assert (spec.queue.levels[0].max_size, spec.queue.levels[0].timeout_us) == (7, 500)
