"""Guards plans behind a real engine: batches, profiles, shapes and values, datatypes, graphs, weights, refusals.

TensorRT is the fake of `tests/fakes`, the GPU the stub driver, which reports accesses that nothing orders and what is
left alive: every test here checks that it has nothing to report.
"""

import asyncio

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.tensorrt.plan import Profile
from inferd.server.errors import Status
from inferd.server.rpc.metadata import Identity, Information
from tests.backends.tensorrt.support import serving, tensorrt
from tests.engine.serving import Pending, infer, infer_all, request
from tests.fakes.tensorrt import plan, tensor
from tests.gpu_stub.fixtures import stub

__all__ = ["stub", "tensorrt"]

X, Y = tensor("x", "FLOAT", (-1, 4)), tensor("y", "FLOAT", (-1, 4))
DOUBLE = plan("double", [X], [Y], [{"x": [(1, 4), (4, 4), (8, 4)]}])
VARYING = plan(
    "double",
    [tensor("x", "FLOAT", (-1, -1))],
    [tensor("y", "FLOAT", (-1, -1))],
    [{"x": [(1, 1), (2, 8), (4, 16)]}, {"x": [(1, 1), (8, 2), (16, 4)]}],
)
WHOLE = """
backend: "tensorrt"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
dynamic_batching { }
"""


# Requests, blocks, streams, events and device memory are gone when the engine is closed.
pytestmark = pytest.mark.usefixtures("native_counters", "stub", "tensorrt")


def array(rows, columns=4, start=0.0, dtype=np.float32):
    return (np.arange(rows * columns).reshape(rows, columns) + start).astype(dtype)


async def refused(root, content, config="", **options):
    """Load, which must fail; return the error's text."""
    async with serving(root, content, config, problems=1, **options) as engine:
        return engine.problems["m"]


# -- batches --


async def test_plan_without_configuration_is_completed_and_batched(tmp_path, stub):
    async with serving(tmp_path, DOUBLE) as engine:
        config = engine.model("m").config
        assert (config.backend, config.platform, config.max_batch_size) == ("tensorrt", "tensorrt_plan", 8)
        assert [(each.name, list(each.dims)) for each in (*config.input, *config.output)] == [("x", [4]), ("y", [4])]
        assert config.HasField("dynamic_batching")
        before = stub.executed("kernel")
        sent = [array(1 + i % 3, start=100.0 * i) for i in range(60)]
        with stub.held("kernel"):  # two batches get to the device, the other requests wait and form larger ones
            pending = [Pending(engine, request(x=each)) for each in sent]
        for each, answer in zip(sent, pending, strict=True):
            np.testing.assert_array_equal((await answer.answer()).array(), 2 * each)
        assert stub.executed("kernel") - before < 40


async def test_next_batch_is_uploaded_while_one_computes_and_nothing_waits(tmp_path, stub):
    async with serving(tmp_path, DOUBLE, WHOLE) as engine:
        await infer(engine, request(x=array(1)))
        uploads, kernels = stub.executed("h2d"), stub.executed("kernel")
        waits = ("cuStreamSynchronize", "cuCtxSynchronize", "cuMemAlloc_v2", "cuMemFree_v2")
        before = [stub.calls(name) for name in waits]
        with stub.held("kernel"):
            first = Pending(engine, request(x=array(1)))
            await asyncio.to_thread(stub.wait_executed, "h2d", uploads + 1)
            second = Pending(engine, request(x=array(1, start=9)))
            await asyncio.to_thread(stub.wait_executed, "h2d", uploads + 2)
            assert stub.executed("kernel") == kernels
        for each, start in ((first, 0), (second, 9)):
            np.testing.assert_array_equal((await each.answer()).array(), 2 * array(1, start=start))
        assert [stub.calls(name) for name in waits] == before


async def test_instances_share_a_plan_and_have_contexts_of_their_own(tmp_path):
    async with serving(tmp_path, DOUBLE, WHOLE + "instance_group { count: 3 }") as engine:
        sent = [array(1, start=100.0 * i) for i in range(120)]
        answers = await infer_all(engine, *(request(x=each) for each in sent))
        for each, answer in zip(sent, answers, strict=True):
            np.testing.assert_array_equal(answer.array(), 2 * each)


async def test_plan_of_one_row(tmp_path):
    """A batch dimension that is fixed at 1, as Triton takes it."""
    content = plan("double", [tensor("x", "FLOAT", (1, 4))], [tensor("y", "FLOAT", (1, 4))])
    async with serving(tmp_path, content) as engine:
        assert engine.model("m").config.max_batch_size == 1
        np.testing.assert_array_equal((await infer(engine, request(x=array(1)))).array(), 2 * array(1))


async def test_plan_that_does_not_batch(tmp_path):
    content = plan("double", [tensor("x", "FLOAT", (2, 4))], [tensor("y", "FLOAT", (2, 4))])
    async with serving(tmp_path, content) as engine:
        assert engine.model("m").config.max_batch_size == 0
        np.testing.assert_array_equal((await infer(engine, request(x=array(2)))).array(), 2 * array(2))


async def test_outputs_that_are_not_configured_have_memory_all_the_same(tmp_path):
    content = plan("both", [X], [tensor("z", "FLOAT", (-1, 4)), Y], [{"x": [(1, 4), (4, 4), (8, 4)]}])
    async with serving(tmp_path, content, WHOLE) as engine:
        for rows in (1, 8, 2):
            np.testing.assert_array_equal((await infer(engine, request(x=array(rows)))).array(), array(rows) + 1)


async def test_outputs_that_nobody_asks_for(tmp_path):
    content = plan("both", [X], [Y, tensor("z", "FLOAT", (-1, 4))], [{"x": [(1, 4), (4, 4), (8, 4)]}])
    async with serving(tmp_path, content) as engine:
        answer = await infer(engine, request(x=array(2), outputs=("z",)))
        assert [each.name for each in answer.response.outputs] == ["z"]
        np.testing.assert_array_equal(answer.array("z"), array(2) - 1)


@pytest.mark.parametrize(
    ("dtype", "datatype", "sent"),
    [
        ("HALF", "FP16", np.array([[1.5, -2]], np.float16)),
        ("BF16", "BF16", np.array([[1.5, -2]], ml_dtypes.bfloat16)),
        ("INT8", "INT8", np.array([[1, -128]], np.int8)),
        ("UINT8", "UINT8", np.array([[1, 255]], np.uint8)),
        ("FP8", "UINT8", np.array([[1.5, -2]], ml_dtypes.float8_e4m3fn)),
        ("INT32", "INT32", np.array([[1, -2]], np.int32)),
        ("INT64", "INT64", np.array([[1, -2]], np.int64)),
        ("BOOL", "BOOL", np.array([[True, False]])),
    ],
)
async def test_datatypes(tmp_path, dtype, datatype, sent):
    """FP8, for which the protocol has no name, goes as UINT8."""
    content = plan(
        "copy", [tensor("x", dtype, (-1, 2))], [tensor("y", dtype, (-1, 2))], [{"x": [(1, 2), (1, 2), (4, 2)]}]
    )
    async with serving(tmp_path, content) as engine:
        message = request(x=sent.view(np.uint16 if datatype == "BF16" else np.uint8))
        message.inputs[0].datatype = datatype
        del message.inputs[0].shape[:]
        message.inputs[0].shape.extend(sent.shape)
        answer = await infer(engine, message)
        assert answer.status == Status.OK, answer.text
        assert answer.response.outputs[0].datatype == datatype
        assert answer.response.raw_output_contents[0] == sent.tobytes()


async def test_a_tensor_without_dimensions_is_served_as_one_element(tmp_path):
    content = plan("double", [tensor("x", "FLOAT", ())], [tensor("y", "FLOAT", ())])
    async with serving(tmp_path, content) as engine:
        answer = await infer(engine, request(x=np.array([21], np.float32)))
        np.testing.assert_array_equal(answer.array(), [42])


# -- profiles --


async def test_profile_that_serves_the_shapes_is_taken(tmp_path):
    config = 'instance_group { profile: [ "0", "1" ] }'
    async with serving(tmp_path, VARYING, config) as engine:
        assert engine.model("m").config.max_batch_size == 16
        for rows, columns in ((4, 16), (16, 4), (1, 1), (9, 3)):
            answer = await infer(engine, request(x=array(rows, columns)))
            assert answer.status == Status.OK, answer.text
            np.testing.assert_array_equal(answer.array(), 2 * array(rows, columns))


async def test_first_profile_is_the_default(tmp_path):
    async with serving(tmp_path, VARYING) as engine:
        assert engine.model("m").config.max_batch_size == 4
        assert (await infer(engine, request(x=array(4, 16)))).status == Status.OK


async def test_shapes_that_no_profile_serves_are_the_fault_of_the_request(tmp_path):
    async with serving(tmp_path, VARYING) as engine:
        answer = await infer(engine, request(x=array(1, 17)))
        assert answer.status == Status.INVALID_ARGUMENT
        assert (
            "failed to find any Optimization Profile to support the requested dimensions (or shape values), with the "
            "whole batch x [1, 17]: expected profile 0: x [1, 1] to [4, 16]"
        ) in answer.text
        assert (await infer(engine, request(x=array(1, 16)))).status == Status.OK


async def test_profiles_that_cannot_be(tmp_path):
    content = VARYING
    assert "configuration specified invalid profile 2" in await refused(
        tmp_path / "a", content, 'instance_group { profile: "2" }'
    )
    whole = WHOLE.replace("dims: [ 4 ]", "dims: [ -1 ]") + 'instance_group { profile: "7" }'
    assert "is configured with profile 7; the plan has 2: 0 to 1" in await refused(tmp_path / "b", content, whole)
    assert "specifies invalid profile first" in await refused(
        tmp_path / "c", content, WHOLE + 'instance_group { profile: "first" }'
    )
    assert "profile field which is only supported for TensorRT models" in await refused(
        tmp_path / "d", b"", WHOLE.replace("tensorrt", "identity") + 'instance_group { profile: "0" }'
    )


async def test_largest_batch_is_the_plans(tmp_path):
    assert "configuration specified max-batch 9 but TensorRT engine only supports max-batch 8" in await refused(
        tmp_path / "a", DOUBLE, "max_batch_size: 9"
    )
    assert "Expecting 8 or less as the profiles of instance 'm_0' allow, but got 9" in await refused(
        tmp_path / "b", DOUBLE, WHOLE.replace("max_batch_size: 8", "max_batch_size: 9")
    )


ranges = st.lists(st.integers(1, 9), min_size=3, max_size=3).map(sorted)
profiles = st.lists(st.tuples(ranges, ranges), min_size=1, max_size=4)


@given(profiles, st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 9))
def test_profile_is_the_nearest_of_those_that_serve(profiles, shape, value):
    """As a model in plain words: the least sum of differences to what each is best for, the first of equals."""
    made = [
        Profile(index, {"x": tuple(zip(rows, columns, strict=True))}, {"s": tuple((each,) for each in columns)})
        for index, (rows, columns) in enumerate(profiles)
    ]
    serving = [
        (abs(rows[1] - shape[0]) + abs(columns[1] - shape[1]) + abs(columns[1] - value), index)
        for index, (rows, columns) in enumerate(profiles)
        if rows[0] <= shape[0] <= rows[2] and columns[0] <= shape[1] <= columns[2] and columns[0] <= value <= columns[2]
    ]
    found = [(each.distance({"x": shape}, {"s": (value,)}), each.index) for each in made]
    assert min([each for each in found if each[0] is not None], default=None) == min(serving, default=None)


# -- ragged inputs, sequences --


async def test_ragged_requests_of_a_batch_each_get_their_own_part(tmp_path):
    content = plan("double", [tensor("x", "FLOAT", (-1,))], [tensor("y", "FLOAT", (-1,))], [{"x": [(1,), (8,), (99,)]}])
    config = """
    backend: "tensorrt" max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
    output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
    batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }
    dynamic_batching { }
    """
    async with serving(tmp_path, content, config) as engine:
        sent = [array(1, 1 + i % 5, start=10.0 * i) for i in range(20)]
        for each, answer in zip(sent, await infer_all(engine, *(request(x=each) for each in sent)), strict=True):
            assert answer.status == Status.OK, answer.text
            np.testing.assert_array_equal(answer.array(), 2 * each)


async def test_a_ragged_tensor_has_no_batch_dimension_of_which_a_refusal_could_tell(tmp_path):
    content = plan("double", [tensor("x", "FLOAT", (-1, 4))], [Y], [{"x": [(1, 4), (4, 4), (8, 4)]}])
    ragged = WHOLE.replace("[ 4 ] }\no", "[ -1, 5 ] allow_ragged_batch: true }\no")
    told = await refused(tmp_path / "a", content, ragged)
    assert "the plan has shape [-1, 4] but the model configuration specifies [-1]" in told
    assert "with the batch" not in told
    told = await refused(tmp_path / "b", content, WHOLE.replace("[ 4 ]", "[ 5 ]"))
    assert "specifies [-1, 5], with the batch that max_batch_size > 0 means" in told


async def test_state_of_a_sequence(tmp_path):
    """y is the sum so far, which the server keeps."""
    content = plan(
        "sum",
        [X, tensor("before", "FLOAT", (-1, 4))],
        [Y, tensor("after", "FLOAT", (-1, 4))],
        [{"x": [(1, 4), (4, 4), (8, 4)], "before": [(1, 4), (4, 4), (8, 4)]}],
    )
    config = """
    backend: "tensorrt" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
    sequence_batching {
        state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 4 ] }
    }
    """
    async with serving(tmp_path, content, config) as engine:
        for step in range(1, 4):
            for sequence in (1, 2, 3):
                message = request(x=array(1, start=sequence))
                message.parameters["sequence_id"].int64_param = sequence
                message.parameters["sequence_start"].bool_param = step == 1
                message.parameters["sequence_end"].bool_param = step == 3
                answer = await infer(engine, message)
                assert answer.status == Status.OK, answer.text
                np.testing.assert_array_equal(answer.array(), step * array(1, start=sequence))


# -- shapes that depend on data, and shapes as data --


async def test_shape_that_data_decide(tmp_path):
    content = plan(
        "positive", [tensor("x", "FLOAT", (-1,))], [tensor("y", "FLOAT", (-1,))], [{"x": [(1,), (4,), (9,)]}]
    )
    config = "max_batch_size: 0 input { name: 'x' dims: [ -1 ] } output { name: 'y' dims: [ -1 ] }"
    async with serving(tmp_path, content, config) as engine:
        for given in ([1, -2, 3], [-1], [5, 6, 7, 8], [-3, 0]):
            sent = np.array(given, np.float32)
            answer = await infer(engine, request(x=sent))
            assert answer.status == Status.OK, answer.text
            np.testing.assert_array_equal(answer.array(), sent[sent > 0])


TILE = plan(
    "tile",
    [X, tensor("s", "INT64", (3,), is_shape=True)],
    [tensor("y", "FLOAT", (-1, -1, -1)), tensor("t", "INT64", (3,), is_shape=True)],
    [{"x": [(1, 4), (2, 4), (8, 4)], "s": [(1, 1, 1), (2, 2, 2), (8, 5, 5)]}],
)


def values(*numbers):
    return np.array(numbers, np.int64)


async def test_shape_tensors(tmp_path):
    """By value, with or without the batch size in front, which is that of the whole batch for the model."""
    async with serving(tmp_path, TILE) as engine:
        config = engine.model("m").config
        assert [(each.name, list(each.dims), each.is_shape_tensor) for each in (*config.input, *config.output)] == [
            ("x", [4], False),
            ("s", [2], True),
            ("y", [-1, -1], False),
            ("t", [2], True),
        ]
        for sent, s in ((array(3), values(2, 5)), (array(2), values(2, 3, 4))):
            answer = await infer(engine, request(x=sent, s=s))
            assert answer.status == Status.OK, answer.text
            expected = np.broadcast_to(sent[:, :1, None], (len(sent), *s[-2:]))
            np.testing.assert_array_equal(answer.array("y"), expected)
            np.testing.assert_array_equal(answer.array("t"), np.broadcast_to(s[-2:], (len(sent), 2)))


async def test_requests_with_equal_values_share_a_batch_and_others_do_not(tmp_path, stub):
    async with serving(tmp_path, TILE) as engine:
        await infer(engine, request(x=array(1), s=values(1, 1)))
        uploads, kernels = stub.executed("h2d"), stub.executed("kernel")
        with stub.held("kernel"):
            first = Pending(engine, request(x=array(1), s=values(1, 1)))
            await asyncio.to_thread(stub.wait_executed, "h2d", uploads + 1)
            # the model waits for the device with its shape tensors: the others wait for the instance
            sent = [(array(1 + i % 2, start=10.0 * i), values(2, 2 + i // 3)) for i in range(6)]
            pending = [Pending(engine, request(x=x, s=s)) for x, s in sent]
        await first.answer()
        for (x, s), each in zip(sent, pending, strict=True):
            np.testing.assert_array_equal(
                (await each.answer()).array("y"), np.broadcast_to(x[:, :1, None], (len(x), *s))
            )
        assert stub.executed("kernel") == kernels + 3  # the first, and one for each of the two values


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (
            values(3, 2, 2),
            "the first value of shape tensor 's' for model 'm' must be the batch size of the request, 2, got 3",
        ),
        (values(2), "unexpected shape for input 's' for model 'm'. Expected [2], got [1]."),
        (values(2, 2, 2, 2), "unexpected shape for input 's' for model 'm'. Expected [2], got [4]."),
        (values(2, 9), "failed to find any Optimization Profile"),
    ],
)
async def test_shape_values_that_cannot_be(tmp_path, s, text):
    async with serving(tmp_path, TILE) as engine:
        answer = await infer(engine, request(x=array(2), s=s))
        assert answer.status == Status.INVALID_ARGUMENT
        assert text in answer.text
        assert (await infer(engine, request(x=array(2), s=values(2, 2)))).status == Status.OK


async def test_values_that_the_model_cannot_follow_are_the_fault_of_the_request(tmp_path):
    async with serving(tmp_path, TILE) as engine:
        answer = await infer(engine, request(x=array(5), s=values(5, 5)))
        assert answer.status == Status.INVALID_ARGUMENT
        assert "the shapes of the inputs do not go together: dimensions not compatible for tile" in answer.text
        assert (await infer(engine, request(x=array(4), s=values(5, 5)))).status == Status.OK


async def test_metadata_shows_a_shape_tensor_as_clients_send_it(tmp_path):
    from inferd_client.pb import grpc_service_pb2 as pb

    async with serving(tmp_path, TILE) as engine:
        shown = await Information(engine, Identity()).model_metadata(pb.ModelMetadataRequest(name="m"), None)
        assert [list(each.shape) for each in shown.inputs] == [[-1, 4], [3]]


async def test_shape_tensors_are_warmed_up(tmp_path):
    sample = """
    model_warmup { name: "w" batch_size: 2
        inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
        inputs { key: "s" value { data_type: TYPE_INT64 dims: [ 2 ] input_data_file: "s" } } }
    """
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "s").write_bytes(values(2, 2).tobytes())
    async with serving(tmp_path, TILE, sample) as engine:
        assert (await infer(engine, request(x=array(1), s=values(1, 1)))).status == Status.OK


SHAPES = "is_shape_tensor: true }\noutput"


@pytest.mark.parametrize(
    ("backend", "input_x", "text"),
    [
        ("tensorrt", "TYPE_FP32 dims: [ 4 ]", "shape tensor 'x' must be TYPE_INT32 or TYPE_INT64"),
        ("tensorrt", "TYPE_INT32 dims: [ -1 ]", "must have one dimension, which does not vary"),
        ("identity", "TYPE_INT32 dims: [ 4 ]", "shape tensors are only supported for TensorRT platform"),
    ],
)
async def test_shape_tensors_that_cannot_be(tmp_path, backend, input_x, text):
    config = WHOLE.replace("tensorrt", backend).replace("TYPE_FP32 dims: [ 4 ] }\noutput", f"{input_x} {SHAPES}")
    assert text in await refused(tmp_path, DOUBLE, config)


async def test_shape_tensors_are_marked_on_both_sides(tmp_path):
    tile = """
    backend: "tensorrt" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } input { name: "s" data_type: TYPE_INT64 dims: [ 2 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
    """
    assert "input 's' for model 'm' is a shape tensor but the model configuration doesn't mark it" in await refused(
        tmp_path / "a", TILE, tile
    )
    whole = WHOLE.replace("TYPE_FP32 dims: [ 4 ] }\noutput", f"TYPE_INT32 dims: [ 3 ] {SHAPES}")
    content = plan("copy", [tensor("x", "INT32", (-1, 3))], [Y], [{"x": [(1, 3), (1, 3), (8, 3)]}])
    assert "input 'x' for model 'm' is incorrectly marked as a shape tensor" in await refused(
        tmp_path / "b", content, whole
    )


# -- graphs, weights, contexts --

GRAPHS = "optimization { cuda { graphs: true graph_spec { batch_size: 8 graph_lower_bound { batch_size: 3 } } } }"


async def test_graphs_are_captured_at_load_and_launched(tmp_path, stub):
    async with serving(tmp_path, DOUBLE, WHOLE + GRAPHS) as engine:
        launched = stub.calls("cuGraphLaunch")
        for rows, by_graph in ((8, True), (2, False), (5, True), (3, True), (1, False)):
            np.testing.assert_array_equal((await infer(engine, request(x=array(rows)))).array(), 2 * array(rows))
            launched += by_graph
            assert stub.calls("cuGraphLaunch") == launched


async def test_graphs_that_cannot_be(tmp_path):
    graphs = "optimization { cuda { graphs: true } }"
    assert "no CUDA graphs" in await refused(
        tmp_path / "a",
        plan("positive", [tensor("x", "FLOAT", (4,))], [tensor("y", "FLOAT", (-1,))]),
        graphs,
    )
    assert "CUDA graphs cannot answer with shape tensors" in await refused(tmp_path / "b", TILE, graphs)
    assert "CUDA graphs cannot hold streamed weights" in await refused(
        tmp_path / "c",
        DOUBLE.replace(b'"weights": 0', b'"weights": 1000'),
        graphs + parameter("weight_streaming_budget", "1"),
    )


def parameter(key, value):
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


@pytest.mark.parametrize(("text", "kept"), [("300", 300), ("5000", 1000), ("25%", 250), ("auto", 250), ("0", 0)])
async def test_the_budget_says_how_much_of_the_weights_stays_on_the_device(tmp_path, caplog, text, kept):
    content = DOUBLE.replace(b'"weights": 0', b'"weights": 1000')
    with caplog.at_level("INFO", "inferd.tensorrt"):
        async with serving(tmp_path, content, parameter("weight_streaming_budget", text)) as engine:
            np.testing.assert_array_equal((await infer(engine, request(x=array(1)))).array(), 2 * array(1))
    assert f"model m: {kept} of 1000 bytes of weights stay on the device" in caplog.text


async def test_parameters_that_cannot_be(tmp_path):
    for index, (key, value, text) in enumerate(
        [
            ("weight_streaming_budget", "101%", "expected bytes, a share such as 50%, or auto"),
            ("weight_streaming_budget", "5", "needs a plan that was built for weight streaming"),
            ("execution_context_allocation_strategy", "LAZY", "expected STATIC or ON_PROFILE_CHANGE"),
            ("runtime", "tensorflow", "there is no runtime 'tensorflow' of TensorRT"),
            ("runtime", "tensorrt_lean", "needs tensorrt_lean, which is not installed"),
        ]
    ):
        assert text in await refused(tmp_path / str(index), DOUBLE, parameter(key, value))


async def test_memory_of_contexts_by_profile(tmp_path):
    strategy = parameter("execution_context_allocation_strategy", "ON_PROFILE_CHANGE")
    async with serving(tmp_path, DOUBLE, strategy) as engine:
        np.testing.assert_array_equal((await infer(engine, request(x=array(1)))).array(), 2 * array(1))


# -- plans that cannot be read --


async def test_plan_of_another_version_gpu_or_kind(tmp_path):
    def changed(old, new):
        return DOUBLE.replace(old, new)

    reads = "TensorRT 10.16.1.11 (tensorrt) cannot read the plan"
    where = "on GPU 0 (stub device 0, compute capability 9.0)"
    for index, (content, text) in enumerate(
        [
            (changed(b"10.16.1.11", b"10.3.0"), "expecting library version 10.16.1.11 got 10.3.0"),
            (changed(b"[9, 0]", b"[8, 6]"), "generated on an incompatible device"),
            (b"no plan", "magic_tag_read == kMAGIC_TAG"),
        ]
    ):
        problem = await refused(tmp_path / str(index), content)
        assert reads in problem
        assert where in problem
        assert text in problem
        assert "build it anew with this TensorRT on such a GPU, by inferd build-engine" in problem
    (tmp_path / "empty" / "m" / "1").mkdir(parents=True)
    (tmp_path / "empty" / "m" / "1" / "model.plan").touch()
    assert "model.plan' is empty" in await refused(tmp_path / "empty", b"", WHOLE)
    assert "unable to find" in await refused(tmp_path / "none", b"", WHOLE)


async def test_plan_with_code_for_the_host(tmp_path):
    content = plan("double", [X], [Y], [{"x": [(1, 4), (4, 4), (8, 4)]}], host_code=True)
    assert "Allow it by --backend-config tensorrt,version-compatible=true" in await refused(tmp_path / "a", content)
    async with serving(tmp_path / "b", content, backend={"version-compatible": "true"}) as engine:
        np.testing.assert_array_equal((await infer(engine, request(x=array(1)))).array(), 2 * array(1))


async def test_plans_for_each_kind_of_gpu(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model_90.plan").write_bytes(DOUBLE)
    config = WHOLE + 'cc_model_filenames { key: "9.0" value: "model_90.plan" }'
    async with serving(tmp_path, b"not for this GPU", config) as engine:
        np.testing.assert_array_equal((await infer(engine, request(x=array(1)))).array(), 2 * array(1))
    for index, (wrong, text) in enumerate(
        [
            ('cc_model_filenames { key: "9.0" value: "../../x.plan" }', "cc_model_filenames"),
            ('cc_model_filenames { key: "hopper" value: "x.plan" }', "'hopper' is no compute capability of a GPU"),
        ]
    ):
        assert text in await refused(tmp_path / str(index), DOUBLE, WHOLE + wrong)


async def test_configurations_that_contradict_the_plan(tmp_path):
    for index, (config, text) in enumerate(
        [
            (WHOLE.replace('"x"', '"a"'), "configuration expects 1 inputs, the plan has 1: add x"),
            (WHOLE.replace('"y"', '"b"'), "unexpected inference output 'b' for model 'm', allowed outputs are: y"),
            (WHOLE.replace("FP32", "FP16"), "unexpected datatype TYPE_FP16 for input 'x'"),
            (WHOLE.replace("[ 4 ]", "[ 5 ]"), "the plan has shape [-1, 4] but the model configuration spe"),
            (WHOLE.replace("[ 4 ] }\no", "[ 4 ] optional: true }\no"), "'x' cannot be optional"),
            (WHOLE + "instance_group { kind: KIND_CPU }", "is of KIND_CPU; plans of TensorRT run on GPUs"),
            (WHOLE.replace("[ 4 ] }\no", "[ 4 ] is_non_linear_format_io: true }\no"), "tensors are row-major"),
        ]
    ):  # fmt: skip
        assert text in await refused(tmp_path / str(index), DOUBLE, config)


async def test_tensors_that_are_not_served(tmp_path):
    vectors = plan("double", [tensor("x", "FLOAT", (-1, 4), format="CHW4")], [Y], [{"x": [(1, 4), (4, 4), (8, 4)]}])
    assert "tensor 'x' has the format CHW4 format: tensors are row-major here" in await refused(tmp_path / "a", vectors)
    nibbles = plan("double", [tensor("x", "INT4", (-1, 4))], [Y])
    assert "tensor 'x' is INT4, which is not served" in await refused(tmp_path / "b", nibbles)


async def test_execution_that_fails(tmp_path):
    content = plan("double", [X], [Y], [{"x": [(1, 4), (4, 4), (8, 4)]}], broken=True)
    async with serving(tmp_path, content) as engine:
        answer = await infer(engine, request(x=array(1)))
        assert answer.status == Status.INTERNAL
        assert "TensorRT execution failed: IExecutionContext: Error Code 3: Cask convolution execution" in answer.text
