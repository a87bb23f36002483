"""The accelerator `openvino` of ONNX models where OpenVINO itself has to execute them."""

import json
import logging

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from inferd.backends.api import AcceleratorSpec, BackendError, InstanceSpec
from inferd.backends.onnxruntime import OnnxRuntimeBackend
from tests.backends.fake_batch import FakeBatch
from tests.backends.models import identity_onnx, onnx_bytes, source

pytest.importorskip("openvino")
if "OpenVINOExecutionProvider" in onnxruntime.get_available_providers():
    pytest.skip("the installed ONNX Runtime has OpenVINO's provider", allow_module_level=True)

X, Y = ("x", "FP32", (4,)), ("y", "FP32", (3,))


@pytest.fixture
def layer(tmp_path):
    """y = softmax(x @ w + b)."""
    random = np.random.default_rng(1)
    weights = [
        numpy_helper.from_array(random.normal(size=(4, 3)).astype(np.float32), "w"),
        numpy_helper.from_array(random.normal(size=3).astype(np.float32), "b"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["s"]),
        helper.make_node("Softmax", ["s"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])
    (tmp_path / "model.onnx").write_bytes(onnx_bytes(nodes, [x], [y], weights))
    return tmp_path


def accelerated(folder, parameters=None, inputs=(X,), outputs=(Y,), **fields):
    fields.setdefault("max_batch_size", 8)
    fields.setdefault("instances", (InstanceSpec("m_0"),))
    specs = (AcceleratorSpec("openvino", parameters or {}),)
    return source(folder, inputs, outputs, cpu_accelerators=specs, **fields)


def answers(described, rows=5, backend=None):
    model = (backend or OnnxRuntimeBackend({})).load(described)
    made = model.create_instance(InstanceSpec("m_0"))
    given = np.random.default_rng(2).normal(size=(rows, 4)).astype(np.float32)
    batch = FakeBatch({"x": given}, {"y": "FP32"}, rows=rows)
    made.execute(batch)
    model.close()
    return type(made).__name__, batch.outputs["y"]


def test_answers_are_those_of_onnx_runtime(layer, caplog):
    with caplog.at_level(logging.INFO):
        name, answer = answers(accelerated(layer))
    assert name == "OpenVinoInstance"
    assert "model 'm' is executed by OpenVINO itself, as the installed ONNX Runtime is built without" in caplog.text
    name, expected = answers(source(layer, [X], [Y], max_batch_size=8, instances=(InstanceSpec("m_0"),)))
    assert name == "PlainInstance"
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "parameters",
    [
        {"num_of_threads": "1"},
        {"num_streams": "1", "device_type": "CPU_FP32"},
        {"precision": "ACCURACY"},
        {"precision": "FP32", "enable_opencl_throttling": "true", "device_type": "CPU"},
    ],
)
def test_options_of_the_provider(layer, parameters):
    assert answers(accelerated(layer, parameters))[1].sum() == pytest.approx(5)


def test_a_cache_and_a_file_of_properties(layer, tmp_path):
    (layer / "properties.json").write_text(json.dumps({"CPU": {"NUM_STREAMS": "1"}, "GPU": {"NO": "1"}}))
    cache = tmp_path / "cache"
    answers(accelerated(layer, {"cache_dir": str(cache), "load_config": "properties.json"}))
    assert list(cache.glob("*.blob"))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"device_type": "GPU"}, "parameter 'device_type' is 'GPU', expected CPU"),
        ({"precision": "FP8"}, "parameter 'precision' is 'FP8', expected one of FP32, FP16, ACCURACY"),
        ({"speed": "all"}, "unknown parameter 'speed' is provided for OpenVINO Execution Accelerator"),
        ({"load_config": "none.json"}, "parameter 'load_config' is 'none.json', which cannot be read"),
        ({"load_config": "../x.json"}, "'../x.json' must stay within the model directory"),
        ({"num_of_threads": "all"}, "failed to load 'm': OpenVINO: compiling for CPU"),
    ],
)
def test_a_wrong_option_is_named(layer, parameters, text):
    with pytest.raises(BackendError) as caught:
        OnnxRuntimeBackend({}).load(accelerated(layer, parameters))
    assert text in str(caught.value)


def test_a_client_names_no_files(layer):
    for key in ("cache_dir", "load_config"):
        described = accelerated(layer, {key: "/tmp/x"})
        described = type(described)(described.spec, 1, described.path, from_client=True)
        with pytest.raises(BackendError, match=f"parameter '{key}' is '/tmp/x', expected nothing"):
            OnnxRuntimeBackend({}).load(described)


def test_a_configuration_that_contradicts_the_file(layer):
    with pytest.raises(BackendError, match=r"the model expects shape \[-1,4\]"):
        OnnxRuntimeBackend({}).load(accelerated(layer, inputs=[("x", "FP32", (5,))]))


def test_external_data_outside_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "1"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(8))
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in "xy")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    (folder / "model.onnx").write_bytes(onnx_bytes([node], [x], [y], [tensor]))
    with pytest.raises(BackendError, match="failed to load 'm'"):
        OnnxRuntimeBackend({}).load(accelerated(folder, inputs=[("x", "FP32", (2,))], outputs=[("y", "FP32", (2,))]))


def test_a_folder_holds_the_model(tmp_path):
    (tmp_path / "model.onnx").mkdir()
    (tmp_path / "model.onnx" / "model.onnx").write_bytes(identity_onnx(TensorProto.FLOAT, ("N", 4)))
    assert answers(accelerated(tmp_path, outputs=[("y", "FP32", (4,))]))[1].shape == (5, 4)


def test_without_an_accelerator_the_runtime_stays_out(layer):
    name, _ = answers(source(layer, [X], [Y], max_batch_size=8, instances=(InstanceSpec("m_0"),)))
    assert name == "PlainInstance"
