"""ONNX Runtime's other execution providers, as far as they can be seen without them: which are asked for, with what.

Sessions are real ones on the CPU; a GPU's memory is the host's, and `FakeGpuSession` says what was bound where.
"""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from inferd.backends.api import AcceleratorSpec, BackendError, GpuSpec, GraphSpec, InstanceSpec
from inferd.backends.onnxruntime import OnnxRuntimeBackend
from inferd.backends.onnxruntime import backend as module
from inferd.backends.onnxruntime.providers import CPU, CUDA, OPENVINO, TENSORRT, gpu_providers
from inferd.backends.onnxruntime.session import engine_cache
from inferd.backends.parameters import Parameters
from tests.backends.fake_batch import NUMPY_TYPES
from tests.backends.models import identity_onnx, onnx_bytes, source

ON_GPU = InstanceSpec("m_0", kind="GPU", device=1)
X, Y, Z = ("x", "FP32", (2,)), ("y", "FP32", (2,)), ("z", "FP32", (-1,))


@pytest.fixture
def built(monkeypatch):
    """ONNX Runtime as a build for everything would name its providers."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, OPENVINO, CPU])


@pytest.fixture
def folder(tmp_path):
    """y = -x, whose shape is fixed but for the batch, and z = |x|, which is configured as open."""
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    x, y, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ("N", 2)) for name in "xyz")
    (tmp_path / "model.onnx").write_bytes(onnx_bytes(nodes, [x], [y, z]))
    return tmp_path


def described(folder, parameters=None, **fields):
    return source(folder, [X], [Y, Z], parameters, max_batch_size=8, **fields)


def providers(parameters=None, *accelerators, **more):
    values = parameters or {}
    spec = described("", values, gpu_accelerators=accelerators).spec
    return gpu_providers(spec, Parameters(values, "model 'm'"), ON_GPU, 4711, **more)


PLACE = {"device_id": "1", "user_compute_stream": "4711"}

# -- which providers, with which options


def test_a_gpu_means_cuda_and_the_rest_on_the_cpu(built):
    assert providers() == [(CUDA, PLACE), (CPU, {})]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"cudnn_conv_algo_search": "0"}, {"cudnn_conv_algo_search": "EXHAUSTIVE"}),
        ({"cudnn_conv_algo_search": "2"}, {"cudnn_conv_algo_search": "DEFAULT"}),
        ({"arena_extend_strategy": "1"}, {"arena_extend_strategy": "kSameAsRequested"}),
        ({"gpu_mem_limit": "4294967296"}, {"gpu_mem_limit": "4294967296"}),
        ({"do_copy_in_default_stream": "1"}, {"do_copy_in_default_stream": "1"}),
    ],
)
def test_options_of_cuda_among_the_parameters_of_the_model(built, parameters, expected):
    assert providers(parameters)[0] == (CUDA, {**expected, **PLACE})


@pytest.mark.parametrize("key", ["cudnn_conv_algo_search", "arena_extend_strategy"])
def test_a_wrong_number_is_refused(built, key):
    with pytest.raises(BackendError, match=f"unsupported {key} value"):
        providers({key: "3"})


def test_options_of_cuda_in_its_accelerator_come_before_those_of_the_model(built):
    cuda = AcceleratorSpec("cuda", {"gpu_mem_limit": "2", "cudnn_conv_use_max_workspace": "1"})
    expected = {"gpu_mem_limit": "2", "cudnn_conv_use_max_workspace": "1", **PLACE}
    assert providers({"gpu_mem_limit": "1"}, cuda)[0] == (CUDA, expected)


def test_tensorrt_is_asked_before_cuda_and_knows_tritons_names(built):
    options = {
        "precision_mode": "FP16",
        "max_workspace_size_bytes": "1073741824",
        "int8_calibration_table_name": "table",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": "/cache",
    }
    expected = {
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": "1073741824",
        "trt_int8_calibration_table_name": "table",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": "/cache",
        **PLACE,
    }
    assert providers(None, AcceleratorSpec("tensorrt", options)) == [(TENSORRT, expected), (CUDA, PLACE), (CPU, {})]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("tensorrt", {"precision_mode": "FP8"}, "unsupported precision mode 'FP8' is requested, expected one of FP32"),
        (
            "tensorrt",
            {"trt_speed": "1"},
            "unknown parameter 'trt_speed' is provided for TensorRT Execution Accelerator",
        ),
        ("cuda", {"device_id": "3"}, "'device_id' follows from the instance group"),
        ("cuda", {"enable_cuda_graph": "1"}, "'enable_cuda_graph' is not served"),
        ("tensorrt", {"trt_cuda_graph_enable": "true"}, "'trt_cuda_graph_enable' is not served"),
        ("tensorrt", {"trt_onnx_bytestream": "4711"}, "'trt_onnx_bytestream' is an address in the server"),
        ("cuda", {"gpu_external_alloc": "4711"}, "'gpu_external_alloc' is an address in the server"),
    ],
)
def test_wrong_options_are_refused(built, name, options, text):
    with pytest.raises(BackendError, match=text):
        providers(None, AcceleratorSpec(name, options))


@pytest.mark.parametrize("key", ["trt_extra_plugin_lib_paths", "trt_engine_cache_path", "trt_timing_cache_path"])
def test_a_client_names_no_libraries_and_no_files(built, key):
    accelerator = AcceleratorSpec("tensorrt", {key: "/tmp/x"})
    assert providers(None, accelerator)[0][1][key] == "/tmp/x"
    with pytest.raises(BackendError, match=f"'{key}' names files, which a configuration that a client brings must not"):
        providers(None, accelerator, from_client=True)


@pytest.mark.parametrize("key", ["trt_engine_cache_prefix", "int8_calibration_table_name"])
def test_a_client_names_no_folder_by_a_part_of_a_files_name(built, key):
    for name in ("../x", "/tmp/x", "a/b"):
        with pytest.raises(BackendError, match=f"'{key}' is '{name}', expected the name of a file without a folder"):
            providers(None, AcceleratorSpec("tensorrt", {key: name}), from_client=True)
        providers(None, AcceleratorSpec("tensorrt", {key: name}))
    providers(None, AcceleratorSpec("tensorrt", {key: "plain"}), from_client=True)


def test_what_is_built_is_kept_apart_from_that_of_other_models(built, folder, tmp_path, monkeypatch):
    """Without a path the provider would keep engines in the working directory, and mistake them for another model's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def kept(**options):
        return providers(None, AcceleratorSpec("tensorrt", options), cache=lambda: engine_cache(described(folder)))[0][
            1
        ]

    first = kept(trt_engine_cache_enable="1", trt_timing_cache_enable="true")
    assert Path(first["trt_engine_cache_path"]).is_relative_to(tmp_path / "cache" / "inferd")
    assert first["trt_timing_cache_path"] == first["trt_engine_cache_path"]
    assert kept(trt_engine_cache_enable="1")["trt_engine_cache_path"] == first["trt_engine_cache_path"]
    assert kept(trt_engine_cache_enable="1", trt_engine_cache_path="/mine")["trt_engine_cache_path"] == "/mine"
    assert "trt_engine_cache_path" not in kept(trt_engine_cache_enable="0")
    file = folder / "model.onnx"
    file.write_bytes(identity_onnx(TensorProto.FLOAT, ("N", 2)))
    assert kept(trt_engine_cache_enable="1")["trt_engine_cache_path"] != first["trt_engine_cache_path"]


def test_no_graph_is_no_request_for_graphs(built):
    found = providers(None, AcceleratorSpec("cuda", {"enable_cuda_graph": "0"}))
    assert found[0] == (CUDA, {"enable_cuda_graph": "0", **PLACE})


# -- builds that lack a provider


@pytest.mark.parametrize(
    ("accelerator", "missing"), [((), CUDA), ((AcceleratorSpec("tensorrt"),), "TensorrtExecutionProvider")]
)
def test_a_build_without_a_provider_is_told_apart(accelerator, missing):
    with pytest.raises(BackendError) as raised:
        providers(None, *accelerator)
    text = str(raised.value)
    assert f"instance 'm_0' needs {missing}, which the installed ONNX Runtime {onnxruntime.__version__}" in text
    assert "CPUExecutionProvider" in text
    assert text.endswith("install onnxruntime-gpu in place of onnxruntime")


def test_a_build_without_openvino_fails_the_load(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    openvino = (AcceleratorSpec("openvino"),)
    on_cpu = (InstanceSpec("m_0"),)
    with pytest.raises(
        BackendError, match=r"model 'm' needs OpenVINOExecutionProvider, .*install onnxruntime-openvino"
    ):
        OnnxRuntimeBackend().load(described(folder, cpu_accelerators=openvino, instances=on_cpu))


def test_openvino_is_asked_first(folder, built, monkeypatch):
    """With a session that does not have it, which is noticed: the runtime says so on its standard error only."""
    asked = []
    opened = module.open_session

    def open_session(described, settings, wanted=((CPU, {}),)):
        asked.append(list(wanted))
        return opened(described, settings)

    monkeypatch.setattr(module, "open_session", open_session)
    openvino = (AcceleratorSpec("openvino", {"num_of_threads": "2"}),)
    with pytest.raises(BackendError, match="model 'm': OpenVINOExecutionProvider of ONNX Runtime could not be loaded"):
        OnnxRuntimeBackend().load(described(folder, cpu_accelerators=openvino, instances=(InstanceSpec("m_0"),)))
    assert asked[-1] == [(OPENVINO, {"device_type": "CPU", "num_of_threads": "2"}), (CPU, {})]


# -- running


def memory(array):
    """The array as a tensor of a device."""
    name = next(v2 for v2, dtype in NUMPY_TYPES.items() if array.dtype == dtype)
    return SimpleNamespace(
        array=array, pointer=array.ctypes.data, datatype=name, shape=array.shape, size=array.nbytes, device=1
    )


class FakeGpuBatch:
    """Stands in for inferd._native.gpu.batch.GpuBatch, in the host's memory."""

    def __init__(self, inputs, outputs, rows):
        self.inputs = {name: None if array is None else memory(array) for name, array in inputs.items()}
        self.types = outputs
        self.rows = rows
        self.outputs = {}
        self.held = []

    def input(self, name):
        return self.inputs[name]

    def wants(self, name):
        return name in self.types

    def output(self, name, shape):
        self.outputs[name] = memory(np.zeros(shape, NUMPY_TYPES[self.types[name]]))
        return self.outputs[name]

    def hold(self, owner):
        self.held.append(owner)


class FakeBinding:
    """Binds to the CPU what is bound to device 1 of CUDA."""

    def __init__(self, session, log):
        self.binding = session.io_binding()
        self.log = log

    def bind_input(self, name, kind, device, element, shape, pointer):
        assert (kind, device) == ("cuda", 1)
        self.log.append(("in", name))
        self.binding.bind_input(name, "cpu", 0, element, shape, pointer)

    def bind_output(self, name, kind, device, element=None, shape=None, pointer=None):
        assert (kind, device) == ("cuda", 1)
        self.log.append(("anywhere" if pointer is None else "in place", name))
        self.binding.bind_output(name, "cpu", 0, element, shape, pointer)

    def get_outputs(self):
        return self.binding.get_outputs()


class FakeGpuSession:
    """A session on the CPU that says it is on a GPU."""

    def __init__(self, session, wanted, log):
        self.session = session
        self.wanted = wanted
        self.log = log

    def __getattr__(self, name):
        return getattr(self.session, name)

    def get_providers(self):
        return [name for name, _ in self.wanted]

    def io_binding(self):
        return FakeBinding(self.session, self.log)

    def run_with_iobinding(self, binding, options):
        entry = "disable_synchronize_execution_providers"
        self.log.append(("run", options.get_run_config_entry(entry)))
        self.session.run_with_iobinding(binding.binding, options)


@pytest.fixture
def gpu(built, monkeypatch):
    """The calls of session and stream, in order."""
    log = []
    opened = module.open_session

    def copy(target, origin, size):
        log.append(("copy", size))
        ctypes.memmove(target, origin, size)

    stream = SimpleNamespace(handle=4711, copy_on_device=copy)
    device = SimpleNamespace(priority=lambda wish: -wish, stream=lambda priority: stream)
    monkeypatch.setattr("inferd.backends.onnxruntime.gpu.device", lambda ordinal: device)
    monkeypatch.setattr(
        "inferd.backends.onnxruntime.gpu.open_session",
        lambda described, settings, wanted: FakeGpuSession(opened(described, settings), wanted, log),
    )
    return log


def instance(folder, **fields):
    return OnnxRuntimeBackend().load(described(folder, instances=(ON_GPU,), **fields)).create_instance(ON_GPU)


def test_a_batch_is_bound_where_it_lies_and_nothing_waits(folder, gpu):
    runner = instance(folder)
    batch = FakeGpuBatch({"x": np.full((3, 2), 4, np.float32)}, {"y": "FP32", "z": "FP32"}, 3)
    runner.submit(batch)
    assert gpu == [("in", "x"), ("in place", "y"), ("anywhere", "z"), ("run", "1"), ("copy", 24)]
    assert batch.outputs["y"].array.tolist() == [[-4, -4]] * 3
    assert batch.outputs["z"].array.tolist() == [[4, 4]] * 3
    assert len(batch.held) == 2, "the binding and what the runtime allocated outlive the work"


def test_an_output_that_nobody_wants_is_not_computed(folder, gpu):
    batch = FakeGpuBatch({"x": np.ones((1, 2), np.float32)}, {"y": "FP32"}, 1)
    instance(folder).submit(batch)
    assert list(batch.outputs) == ["y"]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "INT8", "INT64", "UINT8", "BOOL", "FP64"])
def test_every_datatype_passes_through_memory_of_the_gpu(tmp_path, gpu, datatype):
    element = {"BF16": TensorProto.BFLOAT16, "FP16": TensorProto.FLOAT16, "FP64": TensorProto.DOUBLE}.get(datatype)
    element = element or getattr(TensorProto, datatype)
    x, y = (helper.make_tensor_value_info(name, element, ("N", 2)) for name in "xy")
    (tmp_path / "model.onnx").write_bytes(onnx_bytes([helper.make_node("Identity", ["x"], ["y"])], [x], [y]))
    given = source(tmp_path, [("x", datatype, (2,))], [("y", datatype, (2,))], max_batch_size=8, instances=(ON_GPU,))
    runner = OnnxRuntimeBackend().load(given).create_instance(ON_GPU)
    array = np.array([[0, 1], [1, 0]]).astype(NUMPY_TYPES[datatype])
    batch = FakeGpuBatch({"x": array}, {"y": datatype}, 2)
    runner.submit(batch)
    assert batch.outputs["y"].array.tolist() == array.tolist()


@pytest.mark.parametrize("shape", [("N", 2), (3, 2)], ids=["varies", "fixed"])
def test_the_time_that_engines_take_is_told(tmp_path, gpu, caplog, shape):
    (tmp_path / "model.onnx").write_bytes(identity_onnx(1, shape))
    rows = 8 if shape[0] == "N" else 0
    dims = shape[1:] if rows else shape
    fields = {"max_batch_size": rows, "gpu_accelerators": (AcceleratorSpec("tensorrt", {}),), "instances": (ON_GPU,)}
    model = OnnxRuntimeBackend().load(source(tmp_path, [("x", "FP32", dims)], [("y", "FP32", dims)], **fields))
    with caplog.at_level("INFO"):
        model.create_instance(ON_GPU)
    assert "instance 'm_0': TensorRT builds the engines of fixed shapes, which may take minutes" in caplog.text
    assert "instance 'm_0': its session is open after" in caplog.text
    assert ("has no model_warmup: its first requests wait" in caplog.text) == (shape[0] == "N")


def test_a_failed_run_says_why(tmp_path, gpu):
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N",))
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, ("K",))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    (tmp_path / "model.onnx").write_bytes(onnx_bytes([node], [x, shape], [y]))
    inputs = [("x", "FP32", (-1,)), ("shape", "INT64", (-1,))]
    given = source(tmp_path, inputs, [("y", "FP32", (-1, -1))], instances=(ON_GPU,))
    runner = OnnxRuntimeBackend().load(given).create_instance(ON_GPU)
    values = {"x": np.zeros(6, np.float32), "shape": np.array([4, 2])}
    with pytest.raises(BackendError, match=r"onnx runtime error: .*Reshape"):
        runner.submit(FakeGpuBatch(values, {"y": "FP32"}, 1))


def test_what_cannot_be_on_a_gpu_is_refused(folder, gpu):
    graphs = GpuSpec(graphs=(GraphSpec(4, 4),))
    with pytest.raises(BackendError, match=r"not captured in CUDA graphs: remove optimization\.cuda\.graphs"):
        instance(folder, gpu=graphs)
    (folder / "model.onnx").write_bytes(identity_onnx(TensorProto.STRING, ("N", 2)))
    text = source(folder, [("x", "BYTES", (2,))], [("y", "BYTES", (2,))], max_batch_size=8, instances=(ON_GPU,))
    with pytest.raises(BackendError, match="'x' is BYTES, which no GPU takes"):
        OnnxRuntimeBackend().load(text).create_instance(ON_GPU)


def test_a_model_on_gpus_has_no_session_on_the_cpu(folder, gpu, monkeypatch):
    opened = []
    real = module.open_session

    def count(described, settings, *rest):
        opened.append(settings.graph_optimization_level)
        return real(described, settings, *rest)

    monkeypatch.setattr(module, "open_session", count)
    instance(folder)
    assert opened == [onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL], "one, to look into"
