"""Auto-complete from what the model file says."""

import pytest

from inferd.backends.api import BatchingSpec, Signature, TensorSpec
from inferd.server.engine.config import Options
from inferd.server.errors import ConfigError

BATCHING = Signature((TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "INT64", (-1, 2)),), batches=True)
FIXED = Signature((TensorSpec("x", "FP32", (1, 3)),), (TensorSpec("y", "BYTES", (5,)),), batches=False)

HEAD = 'backend: "fake"\n'
X = 'input { name: "x" data_type: TYPE_FP32 dims: %s }\n'
Y = 'output { name: "y" data_type: TYPE_INT64 dims: %s }\n'


def test_nothing_written_and_a_model_that_batches(prepared) -> None:
    found = prepared(HEAD, BATCHING)
    assert found.spec.max_batch_size == 4
    assert found.spec.inputs == BATCHING.inputs
    assert found.spec.outputs == BATCHING.outputs
    assert found.spec.batching == BatchingSpec((4,))
    assert found.config.dynamic_batching.preferred_batch_size == [4]


def test_nothing_written_and_a_model_that_does_not_batch(prepared) -> None:
    found = prepared(HEAD, FIXED)
    assert found.spec.max_batch_size == 0
    assert found.spec.batching is None
    assert found.spec.inputs == FIXED.inputs
    assert found.spec.outputs == FIXED.outputs


def test_the_default_maximum_can_be_changed(prepared) -> None:
    assert prepared(HEAD, BATCHING, Options(default_max_batch_size=16)).spec.max_batch_size == 16
    one = prepared(HEAD, BATCHING, Options(default_max_batch_size=1))
    assert (one.spec.max_batch_size, one.spec.batching) == (1, None)


def test_a_written_maximum_stays_and_adds_no_scheduler(prepared) -> None:
    found = prepared(HEAD + "max_batch_size: 32", BATCHING)
    assert found.spec.max_batch_size == 32
    assert found.spec.batching is None


def test_a_written_zero_means_no_batching_and_whole_shapes(prepared) -> None:
    found = prepared(HEAD + "max_batch_size: 0", BATCHING)
    assert found.spec.max_batch_size == 0
    assert found.spec.inputs[0].dims == (-1, 3)
    assert found.spec.outputs[0].dims == (-1, -1, 2)


def test_tensors_written_with_their_batch_dimension_mean_no_batching(prepared) -> None:
    found = prepared(HEAD + X % "[ -1, 3 ]" + Y % "[ -1, -1, 2 ]", BATCHING)
    assert found.spec.max_batch_size == 0


def test_tensors_written_without_it_mean_batching(prepared) -> None:
    found = prepared(HEAD + X % "[ 3 ]" + Y % "[ -1, 2 ]", BATCHING)
    assert found.spec.max_batch_size == 4


def test_a_maximum_for_a_model_that_cannot_batch_is_refused(prepared) -> None:
    with pytest.raises(ConfigError, match=r"pbtxt:2: .*model does not support batching while non-zero max_batch_size"):
        prepared(HEAD + "max_batch_size: 8", FIXED)


def test_only_what_is_left_out_is_filled_in(prepared) -> None:
    found = prepared(
        HEAD + 'max_batch_size: 2 input { name: "x" optional: true } output { name: "y" dims: [ 7, 2 ] }', BATCHING
    )
    assert found.spec.inputs == (TensorSpec("x", "FP32", (3,), optional=True),)
    assert found.spec.outputs == (TensorSpec("y", "INT64", (7, 2)),)


def test_an_output_of_one_value_a_row(prepared) -> None:
    rows = Signature(BATCHING.inputs, (TensorSpec("label", "INT64", ()),), batches=True)
    assert prepared(HEAD, rows).spec.outputs == rows.outputs


def test_a_complete_configuration_does_not_open_the_model(prepared, fake_backend) -> None:
    backend = fake_backend(BATCHING)
    prepared(HEAD + "max_batch_size: 2\n" + X % "[ 3 ]" + Y % "[ 2 ]", backend=backend)
    assert backend.inspected == []
    prepared(HEAD + "max_batch_size: 2\n" + X % "[ 3 ]", backend=backend)
    (source,) = backend.inspected
    assert (source.version, source.path.name, source.spec.name) == (1, "1", "m")


def test_without_auto_complete_the_file_is_all(prepared) -> None:
    with pytest.raises(ConfigError, match="must contain at least one input"):
        prepared(HEAD, BATCHING, Options(auto_complete=False))


def test_a_format_that_records_nothing_completes_nothing(prepared) -> None:
    with pytest.raises(ConfigError, match="must contain at least one output"):
        prepared(HEAD + X % "[ 3 ]", None)


def test_a_parameter_that_cannot_be_read_is_told_before_the_models_code_runs(prepared, fake_backend, io) -> None:
    class Completing(fake_backend):
        completes = True

        def complete(self, source):
            raise AssertionError("the model's code runs")

    wrong = 'backend: "fake"\nparameters { key: "split_requests" value { string_value: "maybe" } }'
    with pytest.raises(ConfigError, match=r"config.pbtxt:2: parameter 'split_requests' is 'maybe', expected true or"):
        prepared(wrong + io, backend=Completing())
