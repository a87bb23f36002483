"""The OpenVINO backend, on models of a node or two."""

import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from inferd.backends.api import BackendError, InstanceSpec, RequestError, TensorSpec
from inferd.backends.openvino import OpenVinoBackend
from inferd.backends.openvino.graph import Graph
from inferd.backends.openvino.options import reason
from tests.backends.fake_batch import FakeBatch, FakeView
from tests.backends.models import identity_onnx, instance, refusal, source
from tests.threads import leaves_turns

pytest.importorskip("openvino")

from tests.backends.openvino_models import ops, parameter, same, save, slow

X, Y = ("x", "FP32", (2,)), ("y", "FP32", (2,))
ROWS = np.array([[1, -2], [3, -4]], np.float32)


@pytest.fixture
def backend():
    return OpenVinoBackend({})


def run(made, batch):
    made.execute(batch)
    return batch.outputs


def relu(folder, shape=(-1, 2), **more):
    x = parameter("x", shape=shape, layout=more.get("layout", ""))
    return save(folder, [x], {"y": ops.relu(x)}, **more)


# -- what a model says about itself


@pytest.mark.parametrize(
    ("shape", "layout", "batches", "dims"),
    [
        ((-1, 3, -1), "", True, (3, -1)),
        ((-1,), "", True, ()),
        ((4, 3), "", False, (4, 3)),
        ((4, -1), "", False, (4, -1)),
        ((1, 3), "NC", True, (3,)),
        ((3, 1), "CN", False, (3, 1)),
        ((), "", False, (1,)),
    ],
)
def test_a_free_first_dimension_or_the_layout_makes_a_signature_batch(backend, tmp_path, shape, layout, batches, dims):
    signature = backend.inspect(source(relu(tmp_path, shape, layout=layout)))
    assert (signature.batches, signature.inputs[0].dims, signature.outputs[0].dims) == (batches, dims, dims)
    assert (signature.inputs[0].name, signature.outputs[0].name) == ("x", "y")


def test_one_fixed_first_dimension_means_no_batching(backend, tmp_path):
    x, a = parameter("x"), parameter("a", shape=(1, 2))
    signature = backend.inspect(source(save(tmp_path, [x, a], {"y": ops.relu(x), "b": ops.relu(a)})))
    assert not signature.batches
    assert [tensor.dims for tensor in signature.inputs] == [(-1, 2), (1, 2)]


def test_datatypes_without_a_name_in_the_protocol_are_refused(backend, tmp_path):
    x = parameter("x", "i4")
    save(tmp_path, [x], {"y": ops.convert(x, "f32")})
    with pytest.raises(BackendError, match="model 'm': unsupported datatype i4 of 'x'"):
        backend.inspect(source(tmp_path))
    with pytest.raises(BackendError, match="model 'm': unsupported datatype i4 of input 'x'"):
        backend.load(source(tmp_path, [("x", "INT8", (2,))], [Y], max_batch_size=8))


# -- files


def test_a_missing_file_is_named(backend, tmp_path):
    with pytest.raises(BackendError, match=r"unable to find '.*model\.xml' for model 'm'"):
        backend.load(source(tmp_path, [X], [Y]))


@pytest.mark.parametrize("name", ["model.xml", "model.onnx", "model.tflite", "model.pdmodel"])
def test_what_is_no_model_is_refused(backend, tmp_path, name):
    (tmp_path / name).write_bytes(b"not a model")
    with pytest.raises(BackendError, match=r"failed to load 'm': OpenVINO: reading '.*'") as caught:
        backend.inspect(source(tmp_path, default_model_filename=name))
    assert "Exception from" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_are_cut_off_are_told(backend, tmp_path):
    """A file that is mapped and shorter than it says would end the process when it is read."""
    x = parameter("x", shape=(-1, 512))
    weight = ops.constant(np.random.default_rng(0).random((512, 512), np.float32))
    save(tmp_path, [x], {"y": ops.matmul(x, weight, False, False)})
    whole = (tmp_path / "model.bin").read_bytes()
    (tmp_path / "model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BackendError, match="failed to load 'm': OpenVINO: reading"):
        backend.load(source(tmp_path, [("x", "FP32", (512,))], [("y", "FP32", (512,))], max_batch_size=8))


def test_weights_are_read_not_mapped(backend, tmp_path):
    """A file that is overwritten while its model serves changes no answer and ends no process."""
    x = parameter("x", shape=(-1, 512))
    save(tmp_path, [x], {"y": ops.matmul(x, ops.constant(np.eye(512, dtype=np.float32)), False, False)})
    made = instance(backend, source(tmp_path, [("x", "FP32", (512,))], [("y", "FP32", (512,))], max_batch_size=8))
    (tmp_path / "model.bin").open("r+b").truncate(0)
    row = np.arange(512, dtype=np.float32).reshape(1, 512) % 128  # exact in BF16, in which some CPUs compute
    assert run(made, FakeBatch({"x": row}, {"y": "FP32"}, rows=1))["y"].tolist() == row.tolist()


def test_onnx_files_are_read(backend, tmp_path):
    (tmp_path / "model.onnx").write_bytes(identity_onnx(TensorProto.FLOAT, ("N", 2)))
    described = source(tmp_path, [X], [Y], max_batch_size=8, default_model_filename="model.onnx")
    assert backend.inspect(described).batches
    assert (
        run(instance(backend, described), FakeBatch({"x": ROWS}, {"y": "FP32"}, rows=2))["y"].tolist() == ROWS.tolist()
    )


def test_importing_the_runtime_tells_nobody():
    """OpenVINO's telemetry would send an event to its makers, and write a name for this machine to the home folder."""
    code = (
        "import inferd.backends.openvino, openvino, sys;"
        "print([name for name in sys.modules if name.startswith('openvino_telemetry') and sys.modules[name]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- what the configuration says


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows", "text"),
    [
        ([("a", "FP32", (2,))], [Y], 8, "unexpected inference input 'a' for model 'm', allowed inputs are: x"),
        ([X], [("b", "FP32", (2,))], 8, "unexpected inference output 'b' for model 'm', allowed outputs are: y"),
        ([], [Y], 8, "configuration expects 0 inputs, model provides 1: add x"),
        (
            [("x", "FP32", (3,))],
            [Y],
            8,
            "the model expects shape [-1,2] but the model configuration specifies shape [-1,3]",
        ),
        ([("x", "FP32", (2,))], [Y], 0, "the model expects 2 dimensions (shape [-1,2]) but the model configuration"),
        ([TensorSpec("x", "FP32", (2,), optional=True)], [Y], 8, "input 'x' must not be optional"),
        ([("x", "BYTES", (2,))], [Y], 8, "unexpected datatype BYTES for input 'x', expecting FP32"),
    ],
)
def test_a_configuration_that_contradicts_the_file(backend, tmp_path, inputs, outputs, rows, text):
    assert text in refusal(backend, source(relu(tmp_path), inputs, outputs, max_batch_size=rows))


def test_instances_on_gpus_of_another_maker_are_refused(backend, tmp_path):
    described = source(relu(tmp_path), [X], [Y], max_batch_size=8, instances=(InstanceSpec("m_0", "GPU"),))
    assert "instance 'm_0' is of KIND_GPU, but OpenVINO's are of KIND_CPU; the parameter TARGET_DEVICE" in (
        refusal(backend, described)
    )


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("NUM_STREAMS", "many", "parameter 'NUM_STREAMS' is 'many', expected AUTO, NUMA or a number"),
        ("INFERENCE_NUM_THREADS", "-1", "parameter 'INFERENCE_NUM_THREADS' is '-1', expected at least 0"),
        ("COMPILATION_NUM_THREADS", "x", "expected a whole number"),
        ("PERFORMANCE_HINT", "fast", "expected LATENCY, THROUGHPUT or CUMULATIVE_THROUGHPUT"),
        ("HINT_BF16", "no", "parameter 'HINT_BF16' is 'no', expected YES"),
        ("ENABLE_BATCH_PADDING", "maybe", "parameter 'ENABLE_BATCH_PADDING' is 'maybe', expected true or false"),
        ("TARGET_DEVICE", "toaster", "parameter 'TARGET_DEVICE' is 'toaster', which cannot be used"),
        ("INFERENCE_PRECISION_HINT", "f7", "failed to load 'm': OpenVINO: compiling for CPU"),
        ("CPU_EXTENSION_PATH", "/nowhere.so", "failed to load 'm': OpenVINO: the extension '/nowhere.so'"),
        ("CPU_EXTENSION_PATH", "../x.so", "'../x.so' must stay within the model directory"),
    ],
)
def test_a_wrong_parameter_is_named(backend, tmp_path, key, value, text):
    described = source(relu(tmp_path), [X], [Y], {key: value}, max_batch_size=8)
    assert text in refusal(backend, described)


def test_a_client_names_no_folder_and_no_library_elsewhere(backend, tmp_path):
    for key, value in (("CACHE_DIR", "/tmp/c"), ("WEIGHTS_PATH", "/tmp/w"), ("CPU_EXTENSION_PATH", "/tmp/x.so")):
        described = source(relu(tmp_path), [X], [Y], {key: value}, max_batch_size=8)
        described = type(described)(described.spec, 1, described.path, from_client=True)
        told = refusal(backend, described)
        assert value in told
        assert "must stay within the model directory" in told or "a configuration that a client brings" in told


@pytest.mark.parametrize(
    "parameters",
    [
        {"NUM_STREAMS": "auto"},
        {"NUM_STREAMS": "NUMA"},
        {"NUM_STREAMS": "1", "PERFORMANCE_HINT": "latency"},
        {"PERFORMANCE_HINT": "THROUGHPUT"},
        {"INFERENCE_NUM_THREADS": "1", "COMPILATION_NUM_THREADS": "1"},
        {"HINT_BF16": "YES"},
        {"TARGET_DEVICE": "auto:CPU"},
        {"ENABLE_HYPER_THREADING": "NO"},
        {"SKIP_OV_DYNAMIC_BATCHSIZE": "no", "RESHAPE_IO_LAYERS": "YES"},
    ],
)
def test_parameters_and_properties(backend, tmp_path, parameters):
    made = instance(backend, source(relu(tmp_path), [X], [Y], parameters, max_batch_size=8))
    assert run(made, FakeBatch({"x": ROWS}, {"y": "FP32"}, rows=2))["y"].tolist() == [[1, 0], [3, 0]]


def test_a_parameter_that_nothing_knows_is_told(backend, tmp_path, caplog):
    backend.load(source(relu(tmp_path), [X], [Y], {"NUM_STREAM": "1"}, max_batch_size=8))
    assert "parameter 'NUM_STREAM' has no effect; did you mean 'NUM_STREAMS'?" in caplog.text


def test_integers_that_are_cut_are_told(backend, tmp_path, caplog):
    """The runtime computes them with 32 bits, without a word; this is where it would show that it no longer does."""
    same(tmp_path, "INT64")
    made = instance(backend, source(tmp_path, [("x", "INT64", (2,))], [("y", "INT64", (2,))], max_batch_size=8))
    assert "integers of 64 bits with 32 on CPUs, so what is beyond +-2^31 of 'x', 'y' is cut" in caplog.text
    given = np.array([[3, 2**40]])
    assert run(made, FakeBatch({"x": given}, {"y": "INT64"}, rows=1))["y"].tolist() != given.tolist()


def test_properties_of_all_models_give_way_to_those_of_one(tmp_path):
    backend = OpenVinoBackend({"NUM_STREAMS": "many"})
    relu(tmp_path)
    assert "--backend-config of backend 'openvino': parameter 'NUM_STREAMS' is 'many'" in refusal(
        backend, source(tmp_path, [X], [Y], max_batch_size=8)
    )
    cache = tmp_path / "cache"
    OpenVinoBackend({"CACHE_DIR": str(cache)}).load(source(tmp_path, [X], [Y], max_batch_size=8))
    assert list(cache.glob("*.blob"))


# -- execution


def test_the_configurations_datatype_is_converted(backend, tmp_path):
    made = instance(backend, source(relu(tmp_path), [("x", "INT32", (2,))], [("y", "FP64", (2,))], max_batch_size=8))
    answer = run(made, FakeBatch({"x": ROWS.astype(np.int32)}, {"y": "FP64"}, rows=2))["y"]
    assert answer.tolist() == [[1, 0], [3, 0]]


@pytest.mark.parametrize("dims", [(2,), (-1,)])
def test_an_answer_is_not_overwritten_by_the_next_run(backend, tmp_path, dims):
    relu(tmp_path, (-1, *dims))
    made = instance(backend, source(tmp_path, [("x", "FP32", dims)], [("y", "FP32", dims)], max_batch_size=8))
    first = FakeBatch({"x": ROWS}, {"y": "FP32"}, rows=2)
    made.execute(first)
    made.execute(FakeBatch({"x": ROWS * 10}, {"y": "FP32"}, wanted=[], rows=2))
    made.execute(FakeBatch({"x": ROWS * 10}, {"y": "FP32"}, rows=2))
    assert first.outputs["y"].tolist() == [[1, 0], [3, 0]]


@pytest.mark.parametrize("shape", [(-1, 2), (2, 2)])
def test_inputs_are_never_written_to(backend, tmp_path, shape):
    """Whether they may be is asked nowhere, as they may be memory of others."""
    x = parameter("x", shape=shape)
    nodes = {"relu": ops.relu(x), "same": x, "add": ops.add(x, ops.constant(np.float32(1)))}
    save(tmp_path, [x], {**nodes, "flat": ops.reshape(x, ops.constant(np.array([-1, 2])), False)})
    names = [*nodes, "flat"]
    made = instance(backend, source(tmp_path, [("x", "FP32", shape)], [(name, "FP32", shape) for name in names]))
    given = ROWS.copy()
    given.setflags(write=False)
    batch = FakeBatch({"x": given}, dict.fromkeys(names, "FP32"))
    made.execute(batch)
    assert given.tolist() == ROWS.tolist()
    assert batch.outputs["same"].tolist() == batch.outputs["flat"].tolist() == ROWS.tolist()
    assert batch.outputs["add"].tolist() == (ROWS + 1).tolist()
    assert not np.shares_memory(batch.outputs["same"], given)


def test_one_tensor_as_two_outputs(backend, tmp_path):
    x = parameter("x")
    y = ops.relu(x)
    save(tmp_path, [x], {"y": y, "z": y})
    made = instance(backend, source(tmp_path, [X], [Y, ("z", "FP32", (2,))], max_batch_size=8))
    found = run(made, FakeBatch({"x": ROWS}, {"y": "FP32", "z": "FP32"}, rows=2))
    assert found["y"].tolist() == found["z"].tolist() == [[1, 0], [3, 0]]
    assert run(made, FakeBatch({"x": ROWS}, {"y": "FP32", "z": "FP32"}, ["z"], rows=2))["z"].tolist() == [
        [1, 0],
        [3, 0],
    ]


def test_a_scalar_is_one_element(backend, tmp_path):
    x = parameter("x", shape=())
    save(tmp_path, [x], {"y": ops.relu(x), "same": x})
    tensors = [("y", "FP32", (1,)), ("same", "FP32", (1,))]
    made = instance(backend, source(tmp_path, [("x", "FP32", (1,))], tensors))
    found = run(made, FakeBatch({"x": np.array([7], np.float32)}, {"y": "FP32", "same": "FP32"}))
    assert found["y"].tolist() == found["same"].tolist() == [7]
    assert "is a scalar" in refusal(backend, source(tmp_path, [("x", "FP32", (2,))], tensors))


def test_shapes_from_data(backend, tmp_path):
    x = parameter("x", shape=(-1,))
    save(tmp_path, [x], {"y": ops.non_zero(x)})
    made = instance(backend, source(tmp_path, [("x", "FP32", (-1,))], [("y", "INT64", (1, -1))]))
    for values in ([0, 1, 1], [0, 0], [1]):
        answer = run(made, FakeBatch({"x": np.array(values, np.float32)}, {"y": "INT64"}))["y"]
        assert answer.tolist() == np.nonzero(values)[0][None].tolist()


def test_tensors_without_elements_are_executed(backend, tmp_path):
    made = instance(backend, source(relu(tmp_path, (-1, -1)), [("x", "FP32", (-1, -1))], [("y", "FP32", (-1, -1))]))
    for shape in ((0, 2), (2, 0)):
        assert run(made, FakeBatch({"x": np.empty(shape, np.float32)}, {"y": "FP32"}))["y"].shape == shape


def test_output_goes_where_the_client_wants_it(backend, tmp_path):
    made = instance(backend, source(relu(tmp_path), [X], [Y], max_batch_size=8))
    place = np.zeros((2, 2), np.float32)
    batch = FakeBatch({"x": ROWS}, {"y": "FP32"}, rows=2, places={"y": place})
    made.execute(batch)
    assert place.tolist() == [[1, 0], [3, 0]]


def test_text_that_would_be_cut_is_refused(backend, tmp_path):
    made = instance(backend, source(same(tmp_path, "BYTES"), [("x", "BYTES", (2,))], [("y", "BYTES", (2,))],
                                    max_batch_size=8))  # fmt: skip
    with pytest.raises(RequestError, match="input 'x' has an element with a zero byte at its end"):
        made.execute(FakeBatch({"x": np.array([[b"a\0", b""]], object)}, {"y": "BYTES"}, rows=1))


def test_one_long_text_among_many_is_refused(backend, tmp_path):
    """OpenVINO's Python takes them as an array in which all are as long as the longest: gigabytes of one megabyte."""
    tensors = [("x", "BYTES", (-1,))], [("y", "BYTES", (-1,))]
    made = instance(backend, source(same(tmp_path, "BYTES", (-1, -1)), *tensors, max_batch_size=8))
    words = np.array([[b"a"] * 100_000 + [b"b" * 1_000_000]], object)
    with pytest.raises(
        RequestError, match="the longest has 1000000 bytes, and OpenVINO takes all 100001 at that length"
    ):
        made.execute(FakeBatch({"x": words}, {"y": "BYTES"}, rows=1))


def test_a_package_that_is_not_whole_is_told(tmp_path, monkeypatch):
    relu(tmp_path)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match="OpenVINO does not start: ModuleNotFoundError"):
        OpenVinoBackend({}).load(source(tmp_path, [X], [Y], max_batch_size=8))


def test_an_error_of_the_model_is_told_and_the_next_batch_works(backend, tmp_path):
    x, z = parameter("x", shape=(-1, -1)), parameter("z", shape=(-1, -1))
    save(tmp_path, [x, z], {"y": ops.add(x, z)})
    any_dims = [("x", "FP32", (-1,)), ("z", "FP32", (-1,))]
    made = instance(backend, source(tmp_path, any_dims, [("y", "FP32", (-1,))], max_batch_size=8))
    with pytest.raises(BackendError, match="openvino error: ") as caught:
        made.execute(FakeBatch({"x": np.ones((2, 2), np.float32), "z": np.ones((2, 3), np.float32)}, {"y": "FP32"}))
    assert "\n" not in str(caught.value)
    assert run(made, FakeBatch({"x": ROWS, "z": ROWS}, {"y": "FP32"}, rows=2))["y"].tolist() == (ROWS * 2).tolist()


def test_state_is_not_kept_from_batch_to_batch(backend, tmp_path):
    """A model that keeps something between runs would show it to the next client."""
    from tests.backends.openvino_models import openvino

    x = parameter("x")
    variable = "kept"
    begin = ops.constant(np.zeros((1, 2), np.float32))
    read = ops.read_value(begin, variable, openvino.Type.f32, openvino.PartialShape([1, 2]))
    total = ops.add(read, ops.reduce_sum(x, ops.constant(np.array([0])), True))
    assign = ops.assign(total, variable)
    result = ops.result(ops.add(total, ops.multiply(x, ops.constant(np.float32(0)))))
    result.output(0).add_names({"y"})
    openvino.save_model(openvino.Model([result], [assign], [x], "m"), tmp_path / "model.xml")
    made = instance(backend, source(tmp_path, [X], [Y], max_batch_size=8))
    for _ in range(2):
        answer = run(made, FakeBatch({"x": np.ones((1, 2), np.float32)}, {"y": "FP32"}, rows=1))
        assert answer["y"].tolist() == [[1, 1]]


# -- batches of one size


def rigid(folder):
    """A model that has 4 rows written into it: y is x, and no other number of rows will do."""
    x = parameter("x", shape=(4, 2))
    return save(folder, [x], {"y": ops.relu(ops.reshape(x, ops.constant(np.array([4, 2])), False))})


def batch_of(rows, dtype=np.float32):
    return FakeBatch({"x": np.arange(1, 2 * rows + 1).reshape(rows, 2).astype(dtype)}, {"y": "FP32"}, rows=rows)


def test_a_fixed_first_dimension_is_opened(backend, tmp_path):
    made = instance(backend, source(relu(tmp_path, (1, 2)), [X], [Y], max_batch_size=8))
    for rows in (1, 5, 3):
        assert run(made, batch_of(rows))["y"].shape == (rows, 2)


@pytest.mark.parametrize("parameters", [{}, {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES"}])
def test_a_model_of_one_batch_size_takes_no_other(backend, tmp_path, parameters):
    made = instance(backend, source(rigid(tmp_path), [X], [Y], parameters, max_batch_size=4))
    assert run(made, batch_of(4))["y"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    with pytest.raises(RequestError, match=r"expected requests with batch size '4', got '3'.*'ENABLE_BATCH_PADDING'"):
        made.execute(batch_of(3))


@pytest.mark.parametrize("model", [rigid, relu])
def test_batches_are_filled_up(backend, tmp_path, model):
    made = instance(backend, source(model(tmp_path), [X], [Y], {"ENABLE_BATCH_PADDING": "YES"}, max_batch_size=4))
    for rows in (1, 4, 3):
        assert run(made, batch_of(rows))["y"].tolist() == batch_of(rows).inputs["x"].tolist()


def test_a_model_that_cannot_batch_so(backend, tmp_path):
    text = refusal(backend, source(rigid(tmp_path), [X], [Y], max_batch_size=8))
    assert text.startswith(("failed to load 'm': OpenVINO", "model 'm': model does not support batching"))


def test_inputs_take_the_shapes_of_the_configuration(backend, tmp_path):
    relu(tmp_path, (1, 3, 4, 4))
    tensors = [("x", "FP32", (-1, 3, -1, -1))], [("y", "FP32", (-1, 3, -1, -1))]
    made = instance(backend, source(tmp_path, *tensors, {"RESHAPE_IO_LAYERS": "yes"}))
    for shape in ((2, 3, 5, 1), (1, 3, 4, 4)):
        assert run(made, FakeBatch({"x": np.ones(shape, np.float32)}, {"y": "FP32"}))["y"].shape == shape


# -- beside other threads


def test_loading_and_running_leave_the_interpreter_to_others(backend, tmp_path):
    described = source(slow(tmp_path), [("x", "FP32", (512,))], [("y", "FP32", (512,))], max_batch_size=4096)
    made = []
    assert leaves_turns(lambda: made.append(instance(backend, described)))
    batch = FakeBatch({"x": np.ones((2048, 512), np.float32)}, {"y": "FP32"}, rows=2048)
    assert leaves_turns(lambda: made[0].execute(batch))


def test_a_run_is_stopped_and_the_next_one_works(backend, tmp_path):
    shape = 1 << 11, 512
    made = instance(backend, source(slow(tmp_path, shape[0]), [("x", "FP32", shape)], [("y", "FP32", shape)]))
    assert made.stoppable
    begun = threading.Event()

    class Batch(FakeBatch):
        def input(self, name):
            begun.set()
            return super().input(name)

    caught = []

    def execute():
        try:
            made.execute(Batch({"x": np.ones(shape, np.float32)}, {"y": "FP32"}))
        except BackendError as error:
            caught.append(str(error))

    thread = threading.Thread(target=execute)
    thread.start()
    begun.wait()
    made.stop()
    thread.join()
    assert caught
    made.resume()
    assert not run(made, FakeBatch({"x": np.zeros(shape, np.float32)}, {"y": "FP32"}))["y"].any()


def test_runs_with_dynamic_shapes_are_not_stopped(backend, tmp_path):
    """Guards against wrong results of the next run: OpenVINO takes the shapes of a cancelled run for done."""
    assert not instance(backend, source(relu(tmp_path), [X], [Y], max_batch_size=4)).stoppable


def reshaping(folder):
    """y is x in a shape that a request gives."""
    x, s = parameter("x", shape=[-1]), parameter("s", "i64", [2])
    save(folder, [x, s], {"y": ops.relu(ops.reshape(x, s, False))})
    right = {"x": np.arange(6, dtype=np.float32), "s": np.array([2, 3])}
    return right, right | {"s": np.array([4, 2])}, right["x"].reshape(2, 3)


def adding(folder):
    """y is the sum of two tensors."""
    x, s = parameter("x", shape=[-1]), parameter("s", "i64", [-1])
    save(folder, [x, s], {"y": ops.add(ops.relu(x), ops.relu(ops.convert(s, "f32")))})
    right = {"x": np.arange(3, dtype=np.float32), "s": np.array([1, 1, 1])}
    return right, right | {"s": np.array([1, 1, 1, 1])}, right["x"] + 1


@pytest.fixture(params=[reshaping, adding])
def failing(backend, tmp_path, request):
    """Makes the instances of a model; and what it is asked rightly and wrongly, and the right answer."""
    *asked, expected = request.param(tmp_path)
    inputs = [("x", "FP32", (-1,)), ("s", "INT64", (2 if request.param is reshaping else -1,))]
    outputs = [("y", "FP32", (-1,) * expected.ndim)]

    def make(count):
        specs = tuple(InstanceSpec(f"m_{index}") for index in range(count))
        model = backend.load(source(tmp_path, inputs, outputs, instances=specs))
        return [model.create_instance(spec) for spec in specs]

    return make, *(FakeBatch(one, {"y": "FP32"}) for one in asked), expected


@pytest.mark.parametrize("count", [1, 2])
def test_a_failed_run_changes_no_other_answer(failing, count):
    """OpenVINO keeps half of its shapes: it would answer what must fail, and fail what is right."""
    make, right, wrong, expected = failing
    made = make(count)
    for turn, batch in enumerate([right, wrong, wrong, right, right, wrong, wrong, right, right, wrong]):
        if batch is wrong:
            with pytest.raises(BackendError, match="openvino error"):
                made[turn % count].execute(batch)
        else:
            batch.outputs.clear()
            assert run(made[turn % count], batch)["y"].tolist() == expected.tolist()


def test_what_was_begun_before_a_run_failed_is_executed_again(failing):
    make, right, wrong, expected = failing
    [made] = make(1)
    for _ in range(2):
        made.begin(right)
        made.alternate.begin(wrong)
        made.end(right)
        made.begin(right)
        with pytest.raises(BackendError, match="openvino error"):
            made.alternate.end(wrong)
        right.outputs.clear()
        made.end(right)
        assert right.outputs["y"].tolist() == expected.tolist()


def test_a_model_that_cannot_be_mended_is_compiled_again(failing, monkeypatch):
    make, right, wrong, expected = failing
    [made] = make(1)
    monkeypatch.setattr(Graph, "_takes", lambda *_: False)
    for batch in (right, wrong, wrong, right):
        if batch is wrong:
            with pytest.raises(BackendError, match="openvino error"):
                made.execute(batch)
        else:
            assert run(made, batch)["y"].tolist() == expected.tolist()


def test_instances_run_side_by_side(backend, tmp_path):
    """Instances share the compiled model, and each has tensors of its own."""
    instances = (InstanceSpec("m_0"), InstanceSpec("m_1"))
    model = backend.load(source(relu(tmp_path), [X], [Y], max_batch_size=64, instances=instances))
    made = [model.create_instance(spec) for spec in instances]
    wrong = []

    def work(index):
        for turn in range(200):
            rows = np.full((1 + turn % 7, 2), index * 1000 + turn, np.float32)
            batch = FakeBatch({"x": rows}, {"y": "FP32"}, rows=len(rows))
            made[index].execute(batch)
            if batch.outputs["y"].tolist() != rows.tolist():
                wrong.append((index, turn))

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_reasons_are_one_line():
    error = RuntimeError("Exception from src/a.cpp:1:\nException from src/b.cpp:2:\nNot\n good\n\n")
    assert reason(error) == "Not good"
    assert reason(RuntimeError("")) == "RuntimeError"


def test_bf16_comes_as_its_bits_where_nothing_knows_the_type(backend, tmp_path):
    same(tmp_path, "BF16")
    made = instance(backend, source(tmp_path, [("x", "BF16", (2,))], [("y", "BF16", (2,))], max_batch_size=8))
    given = np.array([[1, -2.5]], ml_dtypes.bfloat16)

    class Bits(FakeBatch):
        def input(self, name):
            view = FakeView(given, "BF16")
            view.array = given.view(np.uint16)
            return view

    batch = Bits({"x": given}, {"y": "BF16"}, rows=1)
    made.execute(batch)
    assert batch.outputs["y"].tolist() == [[1, -2.5]]
