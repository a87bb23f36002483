"""Guards the names: what the backend calls is there in the TensorRTs that are installed, each in a process of its own.

Nothing is executed on a device, and no `Runtime` is made: without a driver that crashes. What is not installed is
skipped, and said. `tensorrt_rtx` also parses and builds a real model, for which it needs no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.backends.tensorrt import library
from tests.backends.tensorrt.models import expand, linear

ROOT = Path(__file__).resolve().parents[3]
OF_MAKE = ROOT / "build" / "tensorrt" / "bin" / "python"  # made by `make setup WITH=tensorrt`
PYTHON = os.environ.get("INFERD_TENSORRT_PYTHON") or str(OF_MAKE if OF_MAKE.exists() else sys.executable)
"""An interpreter that has some TensorRT, where this one has none."""

RUNNING = {
    "ExecutionContextAllocationStrategy": "STATIC ON_PROFILE_CHANGE",
    "ICudaEngine": (
        "num_io_tensors get_tensor_name get_tensor_mode get_tensor_dtype get_tensor_shape get_tensor_location "
        "get_tensor_format get_tensor_format_desc get_tensor_vectorized_dim is_shape_inference_io "
        "num_optimization_profiles get_tensor_profile_shape get_tensor_profile_values create_execution_context "
        "streamable_weights_size weight_streaming_budget_v2 get_weight_streaming_automatic_budget"
    ),
    "IExecutionContext": (
        "set_optimization_profile_async set_input_shape infer_shapes get_tensor_shape set_tensor_address "
        "set_output_allocator execute_async_v3"
    ),
    "ILogger": "Severity",
    "IOutputAllocator": "__init__",
    "Runtime": "deserialize_cuda_engine engine_host_code_allowed",
    "TensorIOMode": "INPUT OUTPUT",
    "TensorLocation": "HOST DEVICE",
    "DataType": "FLOAT HALF BF16 INT8 UINT8 INT32 INT64 BOOL FP8",
}
BUILDING = {
    "Builder": "create_network create_builder_config create_optimization_profile build_serialized_network",
    "BuilderFlag": "VERSION_COMPATIBLE EXCLUDE_LEAN_RUNTIME WEIGHT_STREAMING",
    "HardwareCompatibilityLevel": "AMPERE_PLUS",
    "IBuilderConfig": (
        "progress_monitor set_flag hardware_compatibility_level builder_optimization_level set_memory_pool_limit "
        "create_timing_cache set_timing_cache get_timing_cache add_optimization_profile"
    ),
    "INetworkDefinition": "num_inputs get_input",
    "IOptimizationProfile": "set_shape set_shape_input",
    "IProgressMonitor": "__init__",
    "ITensor": "name shape is_shape_tensor",
    "ITimingCache": "serialize",
    "MemoryPoolType": "WORKSPACE",
    "NetworkDefinitionCreationFlag": "STRONGLY_TYPED",
    "OnnxParser": "parse_from_file num_errors get_error",
    "ParserError": "desc node_name",
}


def run(program, *arguments):
    """A program in an interpreter that may have a TensorRT; what it prints last, as JSON. None: it is not installed."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [PYTHON, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


NAMES = """
import importlib, json, sys
found = None
for name in json.loads(sys.argv[1]):
    try:
        module = importlib.import_module(name)
    except ImportError:
        continue
    found = {"version": module.__version__}
    for part, names in json.loads(sys.argv[2]).items():
        has = dir(getattr(module, part, None))
        found[part] = [each for each in names.split() if each not in has]
    document = module.ICudaEngine.get_tensor_profile_values.__doc__
    found["index first"] = document.index("Int") < document.index("str")
    break
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("name", "parts"),
    [("tensorrt", {**RUNNING, **BUILDING}), ("tensorrt_lean", RUNNING), ("tensorrt_rtx", {**RUNNING, **BUILDING})],
)
def test_names_are_there(name, parts):
    found = run(NAMES, json.dumps(library.MODULES[name]), json.dumps(parts))
    if found is None:
        pytest.skip(f"{name} is not installed for {PYTHON}")
    print(f"{name} {found.pop('version')}")
    assert found.pop("index first")  # of the arguments of get_tensor_profile_values, whose names are exchanged
    assert {part: missing for part, missing in found.items() if missing} == {}


BUILD = """
import json, sys
from pathlib import Path
from inferd.backends.api import EngineSpec
from inferd.backends.tensorrt.backend import TensorRTBackend
from inferd.backends.tensorrt.library import open_library, is_installed
if not is_installed("tensorrt_rtx"):
    print("null")
    raise SystemExit
told = []
spec = EngineSpec(Path(sys.argv[1]), profiles=tuple(json.loads(sys.argv[2])), max_batch_size=8, runtime="tensorrt_rtx",
                  compute_capability=sys.argv[3], cache=Path(sys.argv[4]))
try:
    plan = TensorRTBackend().build(spec, lambda what, percent: told.append(percent))
    found = {"size": plan.stat().st_size, "told": told}
except Exception as error:
    found = {"error": str(error)}
print(json.dumps({"version": open_library("tensorrt_rtx").version, **found}))
"""


@pytest.fixture
def model(tmp_path):
    linear(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def built(model, profiles=(), capability="8.6"):
    found = run(BUILD, model, json.dumps(profiles), capability, model.parent / "cache")
    if found is None:
        pytest.skip(f"tensorrt_rtx is not installed for {PYTHON}")
    print(f"tensorrt_rtx {found['version']}")
    return found


def test_tensorrt_rtx_builds_without_a_gpu(model):
    found = built(model)
    assert found["size"] > 1000
    assert found["told"][-1] == 100
    assert built(model)["told"] == []  # from the cache
    assert built(model, ["x=1x16,2x16,4x16", "x=1x16,8x16,64x16"])["size"] > 1000


def test_tensorrt_rtx_takes_values_of_shape_tensors(tmp_path):
    expand(tmp_path / "expand.onnx")
    assert built(tmp_path / "expand.onnx", ["x=1x1,4x1,8x1 s=1x1,4x4,8x16"])["size"] > 1000
    assert (
        "a profile must have the inputs that vary, x, s; it has x"
        in built(tmp_path / "expand.onnx", ["x=1x1,4x1,8x1"])["error"]
    )


def test_tensorrt_rtx_says_what_is_wrong(model):
    assert "does not fit" in built(model, ["x=1x15,2x15,4x15"])["error"]
    assert "builds no plan for 1.0: expected 7.5" in built(model, capability="1.0")["error"]
    model.write_bytes(b"no model")
    assert "Failed to parse the ONNX model" in built(model)["error"]
