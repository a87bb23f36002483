"""Loading identity models; what the executor does with requests is tested with the engine."""

import queue

import numpy as np
import pytest

import inferd_client.grpc as grpcclient
from inferd.backends.api import BackendError, InstanceSpec, NativeInstance
from inferd.backends.identity import IdentityBackend
from tests.backends.models import source
from tests.conformance import doors
from tests.engine.serving import infer, request, serving


@pytest.fixture
def backend():
    return IdentityBackend({})


def test_an_instance_is_native(backend, tmp_path):
    model = backend.load(source(tmp_path, [("x", "FP32", (-1,))], [("y", "FP32", (-1,))]))
    instance = model.create_instance(InstanceSpec("m_0"))
    assert isinstance(instance, NativeInstance)
    assert "inferd.execute_fn" in repr(instance.executor)
    with pytest.raises(TypeError, match="executed through its executor"):
        instance.execute(None)


@pytest.mark.parametrize(
    ("parameters", "delays_us"),
    [
        ({}, (0, 0)),
        ({"delay_us": "250"}, (250, 0)),
        ({"execute_delay_ms": "2"}, (2_000, 0)),
        ({"delay_us": "3", "execute_delay_ms": "2"}, (3, 0)),
        ({"row_delay_us": "7"}, (0, 7)),
    ],
)
def test_both_spellings_of_a_delay_are_read(backend, tmp_path, parameters, delays_us):
    assert backend.load(source(tmp_path, [], [], parameters)).delays_us == delays_us


def test_a_delay_is_a_number(backend, tmp_path):
    with pytest.raises(BackendError, match="model 'm': parameter 'delay_us' is 'long', expected a whole number"):
        backend.load(source(tmp_path, [], [], {"delay_us": "long"}))


@pytest.mark.parametrize("parameter", ["delay_us", "execute_delay_ms", "row_delay_us"])
def test_a_delay_has_a_limit(backend, tmp_path, parameter):
    with pytest.raises(BackendError, match=f"parameter '{parameter}' is '99999999999', expected at most"):
        backend.load(source(tmp_path, [], [], {parameter: "99999999999"}))


def test_inputs_that_nothing_answers_are_fine(backend, tmp_path):
    backend.load(source(tmp_path, [("x", "FP32", (1,)), ("y", "BYTES", (1,))], [("z", "FP32", (1,))]))


def test_pairs_have_one_datatype(backend, tmp_path):
    with pytest.raises(BackendError) as caught:
        backend.load(source(tmp_path, [("x", "FP32", (1,))], [("y", "INT8", (1,))]))
    assert str(caught.value) == (
        "model 'm': output 'y' is INT8, but the identity backend returns input 'x' there, which is FP32"
    )


def test_every_output_needs_an_input(backend, tmp_path):
    with pytest.raises(BackendError, match="the configuration has 0 inputs and 1 outputs"):
        backend.load(source(tmp_path, [], [("y", "INT8", (1,))]))


OPTIONAL = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ 2 ] }
input { name: "extra" data_type: TYPE_FP32 dims: [ -1, 3 ] optional: true }
input { name: "text" data_type: TYPE_STRING dims: [ 2 ] optional: true }
output { name: "y" data_type: TYPE_INT32 dims: [ 2 ] }
output { name: "more" data_type: TYPE_FP32 dims: [ -1, 3 ] }
output { name: "said" data_type: TYPE_STRING dims: [ 2 ] }
"""


@pytest.mark.parametrize("gather", ["false", "true"])
async def test_an_optional_input_that_is_left_out_is_answered_with_zeros(tmp_path, gather):
    """Triton's identity backend answers so: the configured shape with 1 for a variable dimension, empty strings."""
    config = f'{OPTIONAL} parameters {{ key: "gather" value {{ string_value: "{gather}" }} }}'
    async with serving(tmp_path, m=config) as engine:
        answer = await infer(engine, request(x=np.arange(6, dtype=np.int32).reshape(3, 2)))
    assert answer.status == 0, answer.text
    found = {tensor.name: tensor for tensor in answer.response.outputs}
    assert list(found["more"].shape) == [3, 1, 3]
    assert list(found["said"].shape) == [3, 2]
    contents = dict(zip(found, answer.response.raw_output_contents, strict=True))
    assert contents["more"] == bytes(36)
    assert contents["said"] == bytes(24)
    assert contents["y"] == np.arange(6, dtype=np.int32).tobytes()


RESHAPED = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ 2 ] }
input { name: "extra" data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ 2, -1 ] } optional: true }
input { name: "square" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } optional: true }
output { name: "y" data_type: TYPE_INT32 dims: [ 2 ] }
output { name: "more" data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ 2, -1 ] } }
output { name: "flat" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
"""


@pytest.mark.parametrize("gather", ["false", "true"])
async def test_zeros_for_an_input_that_is_left_out_have_the_shape_that_clients_see(tmp_path, gather):
    """With `gather`, a reshaped output once had another shape than its bytes, or none that fitted."""
    config = f'{RESHAPED} parameters {{ key: "gather" value {{ string_value: "{gather}" }} }}'
    async with serving(tmp_path, m=config) as engine:
        answer = await infer(engine, request(x=np.arange(6, dtype=np.int32).reshape(3, 2)))
    assert answer.status == 0, answer.text
    found = {
        tensor.name: (list(tensor.shape), data)
        for tensor, data in zip(answer.response.outputs, answer.response.raw_output_contents, strict=True)
    }
    assert found["more"] == ([3, 1, 2], bytes(24))
    assert found["flat"] == ([3, 4], bytes(48))


DECOUPLED = """
backend: "identity"
input [
  { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "z" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "w" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group { kind: KIND_CPU }
model_transaction_policy { decoupled: true }
"""


def test_a_decoupled_model_has_zeros_for_an_optional_input_that_is_left_out(tmp_path):
    """Guards that it responds as one that is not decoupled: with zeros in the place of that input."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(DECOUPLED)
    heard = queue.Queue()
    with (
        doors.running_server("native", tmp_path) as process,
        grpcclient.InferenceServerClient(process.address) as client,
    ):
        client.start_stream(lambda result, error: heard.put(error or result))
        client.async_stream_infer("m", [grpcclient.InferInput("x", [2], "FP32").set_data(np.float32([3, 4]))])
        client.stop_stream()
    found = [heard.get_nowait() for _ in range(2)]
    assert [each.as_numpy("y").tolist() for each in found] == [[3], [4]]
    assert [each.as_numpy("w").tolist() for each in found] == [[0], [0]]
    assert heard.empty()
