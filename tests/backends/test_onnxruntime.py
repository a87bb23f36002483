"""The ONNX Runtime backend, on models of a node or two."""

import os

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from inferd.backends.api import BackendError, InstanceSpec, TensorSpec
from inferd.backends.onnx_files import PIECE
from inferd.backends.onnxruntime import OnnxRuntimeBackend, options
from inferd.backends.onnxruntime.session import read_external_data
from inferd.backends.parameters import Parameters, default_intra_op_threads
from tests.backends.fake_batch import NUMPY_TYPES, FakeBatch
from tests.backends.models import identity_onnx, instance, onnx_bytes, source
from tests.threads import in_threads, leaves_turns

ELEMENTS = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}


def value(name, element=TensorProto.FLOAT, shape=("N", 2)):
    return helper.make_tensor_value_info(name, element, shape)


@pytest.fixture
def backend():
    return OnnxRuntimeBackend({})


@pytest.fixture
def add(tmp_path):
    """z = x + y, both (N, 2); w has the value 10 and is added as well when the node asks for it."""
    nodes = [helper.make_node("Add", ["x", "y"], ["s"]), helper.make_node("Add", ["s", "w"], ["z"])]
    weight = numpy_helper.from_array(np.array([10.0], np.float32), "w")
    inputs = [value("x"), value("y"), value("w", shape=(1,))]
    (tmp_path / "model.onnx").write_bytes(onnx_bytes(nodes, inputs, [value("z")], [weight]))
    return tmp_path


def test_a_number_of_threads_that_no_system_has(backend, add):
    parameters = {"intra_op_thread_count": "5000000000"}
    with pytest.raises(BackendError, match="parameter 'intra_op_thread_count' is '5000000000', expected at most"):
        instance(backend, source(add, [X, Y], [Z], parameters, max_batch_size=8))


X, Y, Z = ("x", "FP32", (2,)), ("y", "FP32", (2,)), ("z", "FP32", (2,))


# -- what a model says about itself


def test_signature_of_a_model_that_batches(backend, add):
    signature = backend.inspect(source(add))
    assert signature.batches
    assert signature.inputs == (TensorSpec("x", "FP32", (2,)), TensorSpec("y", "FP32", (2,)))
    assert signature.outputs == (TensorSpec("z", "FP32", (2,)),)


@pytest.mark.parametrize(
    ("shape", "batches", "dims"),
    [
        (("N", 3, "M"), True, (3, -1)),
        ((None, 3), True, (3,)),
        (("N",), True, ()),
        ((4, 3), False, (4, 3)),
        ((4, "M"), False, (4, -1)),
        ((), False, (1,)),
    ],
)
def test_a_signature_batches_when_its_first_dimension_is_free(backend, tmp_path, shape, batches, dims):
    (tmp_path / "model.onnx").write_bytes(identity_onnx(TensorProto.INT64, shape))
    signature = backend.inspect(source(tmp_path))
    assert (signature.batches, signature.inputs[0].dims, signature.outputs[0].dims) == (batches, dims, dims)


def test_one_fixed_first_dimension_means_no_batching(backend, tmp_path):
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["a"], ["b"])]
    model = onnx_bytes(nodes, [value("x"), value("a", shape=(1, 2))], [value("y"), value("b", shape=(1, 2))])
    (tmp_path / "model.onnx").write_bytes(model)
    signature = backend.inspect(source(tmp_path))
    assert not signature.batches
    assert [tensor.dims for tensor in signature.inputs] == [(-1, 2), (1, 2)]


def test_outputs_that_are_no_tensors_are_refused(backend, tmp_path):
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    output = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    (tmp_path / "model.onnx").write_bytes(onnx_bytes([node], [value("x")], [output]))
    with pytest.raises(BackendError, match=r"unsupported datatype seq\(tensor\(float\)\) of 'y'"):
        backend.inspect(source(tmp_path))


# -- files


def test_a_folder_holds_the_model(backend, tmp_path):
    (tmp_path / "model.onnx").mkdir()
    (tmp_path / "model.onnx" / "model.onnx").write_bytes(identity_onnx(TensorProto.FLOAT, ("N", 2)))
    assert backend.inspect(source(tmp_path)).batches


def test_another_file_name(backend, tmp_path):
    (tmp_path / "other.onnx").write_bytes(identity_onnx(TensorProto.FLOAT, ("N", 2)))
    assert backend.inspect(source(tmp_path, default_model_filename="other.onnx")).batches


def test_a_missing_file_is_named(backend, tmp_path):
    with pytest.raises(BackendError, match=r"unable to find '.*model\.onnx' for model 'm'"):
        backend.load(source(tmp_path))


def test_what_is_no_model_is_refused(backend, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(BackendError, match=r"failed to load 'm' .*INVALID_PROTOBUF"):
        backend.inspect(source(tmp_path))


def external(location):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="length", value="8")
    return tensor


@pytest.mark.parametrize("as_attribute", [False, True])
@pytest.mark.parametrize("location", ["../secret", "in/../../secret", "{absolute}", "link"])
def test_external_data_outside_of_the_folder_is_refused(backend, tmp_path, location, as_attribute):
    folder = tmp_path / "1"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(8))
    (folder / "link").symlink_to(tmp_path / "secret")
    tensor = external(location.format(absolute=tmp_path / "secret"))
    constant = [helper.make_node("Constant", [], ["w"], value=tensor)] if as_attribute else []
    nodes = [*constant, helper.make_node("Add", ["x", "w"], ["y"])]
    model = onnx_bytes(nodes, [value("x")], [value("y")], [] if as_attribute else [tensor])
    (folder / "model.onnx").write_bytes(model)
    for attempt in (backend.inspect, backend.load):
        with pytest.raises(BackendError, match="failed to load 'm'"):
            attempt(source(folder, [("x", "FP32", (2,))], [("y", "FP32", (2,))], max_batch_size=8))


def test_external_data_that_is_shortened_in_place_does_not_end_the_server(backend, tmp_path):
    """A mapped file would: the pages behind its end are gone (SIGBUS)."""
    count = 1 << 16
    (tmp_path / "weights").write_bytes(np.arange(count, dtype=np.float32).tobytes())
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[count], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights")
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    model = onnx_bytes(nodes, [value("x", shape=[count])], [value("y", shape=[count])], [tensor])
    (tmp_path / "model.onnx").write_bytes(model)
    runner = instance(backend, source(tmp_path, [("x", "FP32", (count,))], [("y", "FP32", (count,))]))
    os.truncate(tmp_path / "weights", 0)
    batch = FakeBatch({"x": np.zeros(count, np.float32)}, {"y": "FP32"})
    runner.execute(batch)
    assert batch.outputs["y"][-1] == count - 1


def test_external_data_inside_of_the_folder_is_read(backend, tmp_path):
    (tmp_path / "weights").write_bytes(np.array([1, 2], np.float32).tobytes())
    model = onnx_bytes([helper.make_node("Add", ["x", "w"], ["y"])], [value("x")], [value("y")], [external("weights")])
    (tmp_path / "model.onnx").write_bytes(model)
    runner = instance(backend, source(tmp_path, [X], [("y", "FP32", (2,))], max_batch_size=8))
    batch = FakeBatch({"x": np.zeros((1, 2), np.float32)}, {"y": "FP32"}, rows=1)
    runner.execute(batch)
    assert batch.outputs["y"].tolist() == [[1, 2]]


@pytest.mark.parametrize("name", ["weights", "w" * 200])
def test_external_data_is_found_wherever_its_name_lies(tmp_path, name):
    """A model is searched in pieces: a name may begin in one and end in the next."""
    (tmp_path / name).write_bytes(b"data")
    entry = external(name).SerializeToString()
    for begin in range(PIECE - len(entry) - 1, PIECE + 2):
        (tmp_path / "model.onnx").write_bytes(bytes(begin) + entry)
        assert read_external_data(tmp_path / "model.onnx") == {name: b"data"}, begin


# -- a configuration against the model


@pytest.mark.parametrize(
    ("inputs", "outputs", "max_batch_size", "text"),
    [
        (
            [X, Y, ("q", "FP32", (2,))],
            [Z],
            8,
            "unexpected inference input 'q' for model 'm', allowed inputs are: x, y, w",
        ),
        ([X, Y], [("q", "FP32", (2,))], 8, "unexpected inference output 'q' for model 'm', allowed outputs are: z"),
        ([X], [Z], 8, "configuration expects 1 inputs, model provides 2: add y"),
        ([X, ("y", "FP16", (2,))], [Z], 8, "unexpected datatype FP16 for input 'y', expecting FP32"),
        ([X, Y], [("z", "INT64", (2,))], 8, "unexpected datatype INT64 for output 'z', expecting FP32"),
        (
            [X, ("y", "FP32", (2, 1))],
            [Z],
            8,
            "tensor 'y': the model expects 2 dimensions (shape [-1,2]) but the model configuration specifies 3 "
            "dimensions (shape [-1,2,1]",
        ),
        (
            [X, ("y", "FP32", (3,))],
            [Z],
            8,
            "the model expects shape [-1,2] but the model configuration specifies shape [-1,3]",
        ),
        (
            [X, Y],
            [Z],
            0,
            "the model expects 2 dimensions (shape [-1,2]) but the model configuration specifies 1 dimensions",
        ),
        (
            [X, Y, ("w", "FP32", (1,))],
            [Z],
            8,
            "has a value in the model (an initializer), so it must be configured with",
        ),
        ([X, TensorSpec("y", "FP32", (2,), optional=True)], [Z], 8, "must not be optional"),
    ],
)
def test_contradictions_are_refused(backend, add, inputs, outputs, max_batch_size, text):
    with pytest.raises(BackendError) as caught:
        backend.load(source(add, inputs, outputs, max_batch_size=max_batch_size))
    assert text in str(caught.value)


def test_batching_needs_a_variable_first_dimension(backend, tmp_path):
    (tmp_path / "model.onnx").write_bytes(identity_onnx(TensorProto.FLOAT, (4, 2)))
    with pytest.raises(
        BackendError, match="model does not support batching while non-zero max_batch_size is specified"
    ):
        backend.load(source(tmp_path, [X], [("y", "FP32", (2,))], max_batch_size=8))


def test_a_device_that_is_not_served_is_refused(backend, add):
    model = backend.load(source(add, [X, Y], [Z], max_batch_size=8))
    with pytest.raises(BackendError, match="KIND_MODEL; this backend serves KIND_CPU and KIND_GPU"):
        model.create_instance(InstanceSpec("m_0", kind="MODEL"))


# -- running


@pytest.mark.parametrize("datatype", ["BYTES", "BF16", "INT64"])  # all of them: test_served
@pytest.mark.parametrize("shape", [(3, 2), (0, 2)])
def test_tensors_pass_that_may_be_empty(backend, tmp_path, datatype, shape):
    (tmp_path / "model.onnx").write_bytes(identity_onnx(ELEMENTS[datatype], ("N", 2)))
    runner = instance(backend, source(tmp_path, [("x", datatype, (2,))], [("y", datatype, (2,))], max_batch_size=8))
    if datatype == "BYTES":
        array = np.array(["a\0b", "é", "", "x" * 300, "1", "2"], object)[: np.prod(shape)].reshape(shape)
        array = np.vectorize(str.encode, otypes=[object])(array)
    else:
        array = np.arange(np.prod(shape)).astype(NUMPY_TYPES[datatype]).reshape(shape)
    batch = FakeBatch({"x": array}, {"y": datatype}, rows=shape[0])
    batch.rows = shape[0]
    runner.execute(batch)
    assert batch.outputs["y"].dtype == NUMPY_TYPES[datatype]
    assert batch.outputs["y"].shape == shape
    assert batch.outputs["y"].tolist() == array.tolist()


def test_several_inputs_and_only_wanted_outputs(backend, tmp_path):
    nodes = [helper.make_node("Add", ["x", "y"], ["s"]), helper.make_node("Sub", ["x", "y"], ["d"])]
    (tmp_path / "model.onnx").write_bytes(onnx_bytes(nodes, [value("x"), value("y")], [value("s"), value("d")]))
    described = source(tmp_path, [Y, X], [("d", "FP32", (2,)), ("s", "FP32", (-1,))], max_batch_size=8)
    runner = instance(backend, described)
    x, y = np.full((2, 2), 5, np.float32), np.full((2, 2), 3, np.float32)
    batch = FakeBatch({"x": x, "y": y}, {"d": "FP32", "s": "FP32"}, rows=2)
    runner.execute(batch)
    assert (batch.outputs["d"][0, 0], batch.outputs["s"][0, 0]) == (2, 8)
    batch = FakeBatch({"x": x, "y": y}, {"d": "FP32", "s": "FP32"}, wanted=["s"], rows=2)
    runner.execute(batch)
    assert list(batch.outputs) == ["s"]


def test_an_optional_input_has_the_value_of_the_model_when_absent(backend, add):
    optional = TensorSpec("w", "FP32", (1,), optional=True)
    # w is no part of the batch dimension, so the model is served without one
    whole = [("x", "FP32", (-1, 2)), ("y", "FP32", (-1, 2)), optional]
    runner = instance(backend, source(add, whole, [("z", "FP32", (-1, 2))]))
    ones = np.ones((1, 2), np.float32)
    for w, expected in ((None, 12), (np.array([100], np.float32), 102)):
        batch = FakeBatch({"x": ones, "y": ones, "w": w}, {"z": "FP32"})
        runner.execute(batch)
        assert batch.outputs["z"].tolist() == [[expected, expected]]


def test_a_tensor_without_dimensions_is_one_element(backend, tmp_path):
    (tmp_path / "model.onnx").write_bytes(identity_onnx(TensorProto.FLOAT, ()))
    runner = instance(backend, source(tmp_path, [("x", "FP32", (1,))], [("y", "FP32", (1,))]))
    batch = FakeBatch({"x": np.array([3], np.float32)}, {"y": "FP32"})
    runner.execute(batch)
    assert batch.outputs["y"].tolist() == [3]


def test_tensors_are_not_copied(backend, tmp_path):
    (tmp_path / "model.onnx").write_bytes(
        onnx_bytes([helper.make_node("Neg", ["x"], ["y"])], [value("x")], [value("y")])
    )
    runner = instance(backend, source(tmp_path, [X], [("y", "FP32", (2,))], max_batch_size=8))
    batch = FakeBatch({"x": np.ones((4, 2), np.float32)}, {"y": "FP32"}, rows=4)
    runner.execute(batch)
    given = batch.handed_over["y"]
    assert not given.flags.owndata  # it is a window into the runtime's arena
    later = FakeBatch({"x": np.full((4, 2), 7, np.float32)}, {"y": "FP32"}, rows=4)
    runner.execute(later)
    assert given.tolist() == [[-1, -1]] * 4  # the next run does not write there


def test_outputs_are_written_where_the_client_wants_them(backend, tmp_path):
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    (tmp_path / "model.onnx").write_bytes(onnx_bytes(nodes, [value("x")], [value("y"), value("z")]))
    outputs = [("y", "FP32", (2,)), ("z", "FP32", (-1,))]
    runner = instance(backend, source(tmp_path, [X], outputs, max_batch_size=8))
    places = {name: np.zeros((4, 2), np.float32) for name in ("y", "z")}
    given = FakeBatch({"x": np.ones((4, 2), np.float32)}, {"y": "FP32", "z": "FP32"}, rows=4, places=places)
    runner.execute(given)
    assert np.shares_memory(given.handed_over["y"], places["y"])
    assert places["y"].tolist() == [[-1, -1]] * 4
    assert given.outputs["z"].tolist() == [[1, 1]] * 4  # its shape is not fixed: where it is, depends on its names


def test_bf16_outputs_live_as_long_as_their_arrays(backend, tmp_path):
    (tmp_path / "model.onnx").write_bytes(identity_onnx(TensorProto.BFLOAT16, ("N", 2)))
    runner = instance(backend, source(tmp_path, [("x", "BF16", (2,))], [("y", "BF16", (2,))], max_batch_size=8))
    kept = []
    for number in range(20):
        batch = FakeBatch({"x": np.full((1000, 2), number, ml_dtypes.bfloat16)}, {"y": "BF16"}, rows=1000)
        runner.execute(batch)
        kept.append(batch.handed_over.pop("y"))
    assert [float(array[-1, -1]) for array in kept] == list(range(20))


def test_text_must_be_utf8(backend, tmp_path):
    (tmp_path / "model.onnx").write_bytes(identity_onnx(TensorProto.STRING, ("N",)))
    runner = instance(backend, source(tmp_path, [("x", "BYTES", (-1,))], [("y", "BYTES", (-1,))]))
    with pytest.raises(BackendError, match="input 'x' has an element that is not UTF-8 text"):
        runner.execute(FakeBatch({"x": np.array([b"\xff"], object)}, {"y": "BYTES"}))


def test_a_failed_run_says_why_and_the_next_one_works(backend, tmp_path, capfd):
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    inputs = [value("x", shape=("N",)), value("shape", TensorProto.INT64, ("K",))]
    (tmp_path / "model.onnx").write_bytes(onnx_bytes([node], inputs, [value("y", shape=None)]))
    described = source(tmp_path, [("x", "FP32", (-1,)), ("shape", "INT64", (-1,))], [("y", "FP32", (-1, -1))])
    runner = instance(backend, described)
    x = np.zeros(6, np.float32)
    with pytest.raises(BackendError, match=r"onnx runtime error: .*Reshape"):
        runner.execute(FakeBatch({"x": x, "shape": np.array([4, 2])}, {"y": "FP32"}))
    batch = FakeBatch({"x": x, "shape": np.array([3, 2])}, {"y": "FP32"})
    runner.execute(batch)
    assert batch.outputs["y"].shape == (3, 2)
    assert capfd.readouterr() == ("", "")  # the runtime does not print what it also raises


def test_the_gil_is_released_while_a_model_runs(backend, tmp_path):
    n = 700
    weight = numpy_helper.from_array(np.ones((n, n), np.float32), "w")
    nodes, at = [], "x"
    for i in range(12):
        nodes.append(helper.make_node("MatMul", [at, "w"], [f"t{i}"]))
        at = f"t{i}"
    model = onnx_bytes(nodes, [value("x", shape=("N", n))], [value(at, shape=("N", n))], [weight])
    (tmp_path / "model.onnx").write_bytes(model)
    described = source(
        tmp_path, [("x", "FP32", (n,))], [(at, "FP32", (n,))], {"intra_op_thread_count": "1"}, max_batch_size=n
    )
    runner = instance(backend, described)
    batch = FakeBatch({"x": np.zeros((n, n), np.float32)}, {at: "FP32"}, rows=n)
    assert leaves_turns(lambda: runner.execute(batch))


def test_instances_share_the_session(backend, add):
    model = backend.load(source(add, [X, Y], [Z], max_batch_size=8))
    instances = [model.create_instance(InstanceSpec(f"m_{i}")) for i in range(3)]
    assert {id(made.session) for made in instances} == {id(model.session)}
    answers = []

    def work(numbered):
        number, made = numbered
        for _ in range(200):
            x = np.full((2, 2), number, np.float32)
            batch = FakeBatch({"x": x, "y": x}, {"z": "FP32"}, rows=2)
            made.execute(batch)
            answers.append(batch.outputs["z"].tolist() == [[2 * number + 10] * 2] * 2)

    in_threads(work, enumerate(instances))
    assert len(answers) == 600
    assert all(answers)


# -- parameters


def settings(parameters, config=None, **fields):
    spec = source(None, parameters=parameters, **fields).spec
    return options.for_model(
        spec, Parameters(parameters, "model 'm'"), Parameters(config or {}, "backend 'onnxruntime'")
    )


def test_settings_of_a_session_without_parameters():
    made = settings({})
    assert made.intra_op_num_threads == default_intra_op_threads()
    assert made.inter_op_num_threads == 0
    assert made.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    assert made.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert (made.enable_cpu_mem_arena, made.enable_mem_pattern) == (True, True)


def test_parameters_reach_the_session():
    made = settings(
        {
            "intra_op_thread_count": "3",
            "inter_op_thread_count": "2",
            "execution_mode": "1",
            "enable_mem_arena": "0",
            "enable_mem_pattern": "0",
            "session.use_device_allocator_for_initializers": "1",
            "session.intra_op.allow_spinning": "0",
        }
    )
    assert (made.intra_op_num_threads, made.inter_op_num_threads) == (3, 2)
    assert made.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert (made.enable_cpu_mem_arena, made.enable_mem_pattern) == (False, False)
    assert made.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"
    assert made.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.parametrize(
    "name",
    [
        "collect_node_memory_stats_to_file",
        "layer_assignment_settings",
        "model_external_initializers_file_folder_path",
        "node_partition_config_file",
        "optimized_model_filepath",
        "resource_cuda_partitioning_settings",
    ],
)
def test_a_client_names_no_files_of_the_session(name):
    """Some of which ONNX Runtime would write."""
    parameters = {f"session.{name}": "/tmp/x", "session.intra_op.allow_spinning": "0"}
    spec = source(None, parameters=parameters).spec
    texts = Parameters(parameters, "model 'm'"), Parameters({}, "backend 'onnxruntime'")
    with pytest.raises(BackendError, match=f"'session.{name}' is '/tmp/x', expected nothing: a configuration that a "):
        options.for_model(spec, *texts, from_client=True)
    assert options.for_model(spec, *texts).get_session_config_entry(f"session.{name}") == "/tmp/x"


@pytest.mark.parametrize(
    ("level", "expected"),
    [(None, "ENABLE_ALL"), (0, "ENABLE_ALL"), (1, "ENABLE_EXTENDED"), (-1, "ENABLE_BASIC"), (2, "DISABLE_ALL")],
)
def test_the_graph_level_of_a_config_is_that_of_onnx_runtime(level, expected):
    wanted = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{expected}")
    assert settings({}, graph_level=level).graph_optimization_level == wanted


def test_an_unknown_graph_level_is_refused():
    with pytest.raises(BackendError, match=r"optimization\.graph\.level is 7, expected -1, 0, 1 or 2"):
        settings({}, graph_level=7)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("execution_mode", "2", "Expected values for execution_mode are 0 or 1"),
        ("intra_op_thread_count", "many", "expected a whole number"),
        ("inter_op_thread_count", "-1", "expected at least 0"),
        ("enable_mem_arena", "maybe", "expected true or false"),
    ],
)
def test_wrong_values_are_refused(key, text, expected):
    with pytest.raises(BackendError) as caught:
        settings({key: text})
    assert str(caught.value) == f"model 'm': parameter '{key}' is '{text}', {expected}"


def test_arena_shrinkage_reaches_each_run(backend, add):
    key = "memory.enable_memory_arena_shrinkage"
    described = source(add, [X, Y], [Z], {key: "cpu:0"}, max_batch_size=8)
    runner = instance(backend, described)
    assert runner.run_options.get_run_config_entry(key) == "cpu:0"
    ones = np.ones((1, 2), np.float32)
    batch = FakeBatch({"x": ones, "y": ones}, {"z": "FP32"}, rows=1)
    runner.execute(batch)
    assert batch.outputs["z"].tolist() == [[12, 12]]


def test_unknown_parameters_are_told_and_allowed(backend, add, caplog):
    backend.load(source(add, [X, Y], [Z], {"intra_op_thread_cout": "1", "gpu_mem_limit": "9"}, max_batch_size=8))
    assert caplog.messages == [
        "model 'm': parameter 'intra_op_thread_cout' has no effect; did you mean 'intra_op_thread_count'?"
    ]


GLOBAL_POOL = """
import os, sys
from pathlib import Path
from inferd.backends.onnxruntime import OnnxRuntimeBackend
from tests.backends.models import source
backend = OnnxRuntimeBackend({"enable-global-threadpool": "1", "intra_op_thread_count": "3"})
tensor = lambda name: (name, "FP32", (2,))
described = source(Path(sys.argv[1]), [tensor("x"), tensor("y")], [tensor("z")], max_batch_size=8)
backend.inspect(described)
before = len(os.listdir("/proc/self/task"))
models = [backend.load(described) for _ in range(3)]
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_pool_for_all_models(add):
    """Set once in a process, so it is tried in a process of its own."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", GLOBAL_POOL, str(add)], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"  # sessions made later have no threads of their own


def test_onnx_checker_accepts_the_models_of_these_tests(add):
    onnx.checker.check_model(str(add / "model.onnx"))
