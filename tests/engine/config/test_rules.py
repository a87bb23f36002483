"""What must hold of the served fields, with the place and a way out in every error."""

import pytest

from inferd.server.errors import ConfigError

HEAD = 'backend: "fake"\nmax_batch_size: 8\n'


def error_of(prepared, text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        prepared(text)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "line", "fragment"),
    [
        ("max_batch_size: -1", 2, "'max_batch_size' must be non-negative value for model 'm': got -1"),
        ("max_batch_size: 2147483647", 2, "'max_batch_size' must be <= 1048576"),
        ("max_batch_size: 8\ninput { data_type: TYPE_FP32 dims: 1 }", 3, "model input must specify 'name'"),
        ('max_batch_size: 8\ninput { name: "a" dims: 1 }', 3, "model input 'a' must specify 'data_type'"),
        ('max_batch_size: 8\ninput { name: "a" data_type: TYPE_FP32 }', 3, "must specify 'dims'"),
        ('max_batch_size: 8\noutput { name: "a" data_type: TYPE_FP32\ndims: 0 }', 4, "must be integer >= 1, or -1"),
        ('max_batch_size: 8\noutput { name: "a" data_type: TYPE_FP32 dims: -2 }', 3, "got -2"),
        ('max_batch_size: 8\ninput { name: "x" data_type: TYPE_FP32 dims: 1 }', 3, "'x' is given 2 times"),
        ('max_batch_size: 8\ninput { name: "a\\n" data_type: TYPE_FP32 dims: 1 }', 3, "must be printable"),
        (
            'max_batch_size: 8\ninput { name: "a" data_type: TYPE_FP32\nformat: FORMAT_NCHW dims: [ 1, 2 ] }',
            4,
            "model input NCHW require 3 dims",
        ),
        ("max_batch_size: 8\ndynamic_batching { preferred_batch_size: [ 4,\n 0 ] }", 4, "size must be positive"),
        ("max_batch_size: 8\ndynamic_batching { preferred_batch_size: 9 }", 3, "must be <= max batch size 8"),
        ("max_batch_size: 8\ndynamic_batching { priority_levels: 257 default_priority_level: 1 }", 3, "at most 256"),
        ("max_batch_size: 8\ndynamic_batching { priority_levels: 2 }", 3, "level must be in range [1, 2]"),
        ("max_batch_size: 8\ndynamic_batching {\ndefault_priority_level: 1 }", 4, "no effect without priority_levels"),
        (
            "max_batch_size: 8\ndynamic_batching { priority_levels: 2 default_priority_level: 2\n"
            "priority_queue_policy { key: 3 value { } } }",
            4,
            "priority queue policy must have priority level in range [1, 2]",
        ),
        (
            "max_batch_size: 8\ndynamic_batching { priority_levels: 2 default_priority_level: 2\n"
            "preserve_ordering: true }",
            4,
            "Only one priority level is allowed when 'preserve_ordering' is true",
        ),
        (
            "max_batch_size: 8\ndynamic_batching { preserve_ordering: true\n"
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }",
            3,
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true",
        ),
        (
            "max_batch_size: 8\ndynamic_batching { preserve_ordering: true }\nresponse_cache { enable: true }",
            3,
            "'preserve_ordering' can not be combined with 'response_cache'",
        ),
        (
            'max_batch_size: 8\nparameters { key: "queue_policy.timeout_action" value { string_value: "WAIT" } }',
            3,
            "is 'WAIT', expected REJECT or DELAY",
        ),
        (
            "max_batch_size: 8\ndynamic_batching { }\n"
            'parameters { key: "queue_policy.max_queue_size" value { string_value: "1" } }',
            4,
            "is for models without dynamic_batching",
        ),
        (
            "max_batch_size: 8\nsequence_batching { }\n"
            'parameters { key: "queue_policy.timeout_action" value { string_value: "DELAY" } }',
            4,
            "is for models without sequence_batching for model 'm': remove it: a late sequence is refused",
        ),
        (
            'max_batch_size: 8\nparameters { key: "adaptive_queue_delay" value { string_value: "true" } }',
            3,
            "'adaptive_queue_delay' is for models with max_batch_size and dynamic_batching",
        ),
        (
            'dynamic_batching { }\nparameters { key: "adaptive_queue_delay" value { string_value: "yes" } }',
            3,
            "is 'yes', expected true or false",
        ),
        ("max_batch_size: 8\ninstance_group {\nkind: KIND_GPU }", 4, "KIND_GPU but no GPUs are available"),
        ("max_batch_size: 8\ninstance_group { kind: KIND_CPU gpus: 0 }", 3, "KIND_CPU but specifies one or more GPUs"),
        ("max_batch_size: 8\ninstance_group { count: -1 }", 3, "must not have a negative count"),
        ("max_batch_size: 8\ninstance_group { count: 1000000 }", 3, "at most 1024 instances"),
        ('max_batch_size: 8\ninstance_group [ { name: "a" },\n{ name: "a" } ]', 4, "two instance groups named 'a'"),
        ("max_batch_size: 8\nversion_policy { specific { versions: [ 1, -3 ] } }", 3, "must be non-negative"),
    ],
)
def test_a_broken_rule_is_told_with_its_line(prepared, io: str, text: str, line: int, fragment: str) -> None:
    error = error_of(prepared, f'backend: "fake"\n{text}\n{io}')
    assert f"config.pbtxt:{line}: " in error
    assert fragment in error
    assert "for model 'm'" in error or "of model m " in error


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (
            "instance_group { kind: KIND_CPU count: 2147483647 }",
            "at most 1024 instances are served for model 'm': got 2147483647",
        ),
        (
            "instance_group { kind: KIND_GPU count: 1000 gpus: [ 0, 1 ] }",
            "at most 1024 instances are served for model 'm': got 2000",
        ),
        ('model_warmup { name: "w" count: 4294967295 }', "at most 10000 executions for model 'm': got 4294967295"),
        (
            'max_batch_size: 2147483647 parameters { key: "warmup_batch_sizes" value { string_value: "all" } }',
            "at most 10000 executions for model 'm': got 4294967294",
        ),
    ],
)
def test_numbers_that_would_take_all_memory_are_refused_before_it_is_taken(
    prepared, io: str, text: str, fragment: str, monkeypatch
) -> None:
    def made(*_args):
        raise AssertionError("a specification is made of it")

    monkeypatch.setattr("inferd.server.engine.config.to_spec", made)
    assert fragment in error_of(prepared, f"{HEAD.replace('max_batch_size: 8', '')}{text}\n{io}")


@pytest.mark.parametrize(
    "text",
    [
        'parameters { key: "split_requests" value { string_value: "false" } }',
        'parameters { key: "coalesce_requests" value { string_value: "0" } }\nsequence_batching { }',
        'parameters { key: "sequence_end_notice" value { string_value: "false" } } sequence_batching { }',
    ],
)
def test_a_feature_that_is_switched_off_breaks_no_rule(prepared, io: str, text: str) -> None:
    assert prepared(f'backend: "fake"\n{text}{io}').config.name == "m"


def test_all_broken_rules_are_told_at_once(prepared, io: str) -> None:
    error = error_of(
        prepared,
        HEAD
        + io
        + 'input { name: "a" data_type: TYPE_FP32 dims: 0 }\nmodel_warmup { batch_size: 300000 }\n'
        + "instance_group { kind: KIND_GPU }",
    )
    assert len(error.splitlines()) == 3


@pytest.mark.parametrize("size", [2**63 - 1, 2**40])
def test_a_shape_that_no_memory_holds_is_refused(prepared, io: str, size: int) -> None:
    assert "elements in the largest batch" in error_of(
        prepared, f'{HEAD}{io}input {{ name: "a" data_type: TYPE_FP32 dims: [ {size}, -1, 7 ] }}'
    )


def test_too_many_dimensions_are_refused(prepared, io: str) -> None:
    sixteen = ", ".join(["1"] * 16)
    tensor = f'input {{ name: "a" data_type: TYPE_FP32 dims: [ {sixteen} ] }}'
    assert "has 17 dimensions, at most 16 are served" in error_of(prepared, HEAD + io + tensor)
    reshaped = f'input {{ name: "a" data_type: TYPE_FP32 dims: [ 1 ] reshape {{ shape: [ {sixteen} ] }} }}'
    assert "is reshaped to 17 dimensions, at most 16 are served" in error_of(prepared, HEAD + io + reshaped)


@pytest.mark.parametrize("count", [5_000, 100_000])
def test_many_inputs_are_refused_soon(prepared, io: str, count: int) -> None:
    many = "".join(f'input{{name:"i{i}" data_type:TYPE_FP32 dims:1}}\n' for i in range(count))
    error = error_of(prepared, HEAD + io + many)
    assert "at most 4096 inputs" in error or "more than 1048576 bytes" in error


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('metric_tags { key: "a-b" value: "x" }', "metric_tags key 'a-b' is not of letters, digits and _"),
        ('model_metrics { metric_control { metric_identifier { family: "x" } } }', "model_metrics names 'x'"),
        (
            'model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" } '
            "histogram_options { buckets: [ 2, 1 ] } } }",
            "the buckets of 'nv_inference_first_response_histogram_ms' are [2.0, 1.0]",
        ),
        *(
            (
                'model_metrics { metric_control { metric_identifier { family: "inference_inter_response_histogram_us" '
                f"}} histogram_options {{ buckets: [ {bound} ] }} }} }}",
                f"the buckets of 'inference_inter_response_histogram_us' are [{float(bound)}]",
            )
            for bound in ("nan", "inf", "1e306", "1e17", "1e-9", "-1")
        ),
    ],
)
def test_what_is_said_of_metrics_must_be_possible(prepared, io, text, problem):
    with pytest.raises(ConfigError) as raised:
        prepared(HEAD + text + io)
    assert problem in str(raised.value)


def test_copies_of_a_tensor_are_left_out_with_a_warning(prepared, caplog: pytest.LogCaptureFixture) -> None:
    """Published configurations have an output twice, and Triton serves them. Lines of later errors stay right."""
    twice = 'output { name: "a" data_type: TYPE_FP32 dims: 1 }\n'
    config = prepared(HEAD + 'input { name: "x" data_type: TYPE_FP32 dims: 1 }\n' + twice + twice).config
    assert [tensor.name for tensor in config.output] == ["a"]
    (warning,) = [message for message in caplog.messages if "has no effect" in message]
    assert "config.pbtxt:5: output 'a' is the same as one before it" in warning
    error = error_of(prepared, HEAD + twice + twice + 'output { name: "b" data_type: TYPE_FP32\ndims: 0 }')
    assert "config.pbtxt:6: model output 'b' dimension must be" in error


def test_two_different_tensors_of_one_name_are_an_error(prepared) -> None:
    other = "".join(f'output {{ name: "a" data_type: TYPE_FP32 dims: {dim} }}\n' for dim in (1, 2))
    assert "output 'a' is given 2 times" in error_of(prepared, HEAD + other)
