"""Guards building of plans: profiles, options, the cache, timings, progress, interruption; the command and loading."""

import asyncio
import enum
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tests.fakes.tensorrt as fake
from inferd.backends.api import BackendError, EngineSpec
from inferd.backends.tensorrt import build as module
from inferd.backends.tensorrt.backend import TensorRTBackend
from inferd.backends.tensorrt.cache import key_of
from inferd.backends.tensorrt.profiles import parse_profile, usual_profile
from inferd.backends.tensorrt.progress import Progress
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.errors import NotFound
from tests import gpu_stub
from tests.backends.tensorrt.support import serving, tensorrt
from tests.engine.serving import infer, request
from tests.fakes.tensorrt import plan, tensor
from tests.gpu_stub.fixtures import stub

__all__ = ["stub", "tensorrt"]

ROOT = Path(__file__).resolve().parents[3]
X, Y = tensor("x", "FLOAT", (-1, 4)), tensor("y", "FLOAT", (-1, 4))
MODEL = plan("double", [X], [Y])


@pytest.fixture
def build(tmp_path, tensorrt, stub):
    """Build the model, or another, with these fields of an EngineSpec; what the plan holds."""
    model = tmp_path / "model.onnx"
    told = []

    def run(content=MODEL, **fields):
        if content is not None:
            model.write_bytes(content)
        spec = EngineSpec(model, cache=tmp_path / "cache", **fields)
        path = TensorRTBackend().build(spec, lambda *each: told.append(each))
        return json.loads(path.read_bytes())

    run.told = told
    run.model = model
    run.cache = tmp_path / "cache"
    return run


# -- profiles --


def test_profiles_are_read():
    assert parse_profile("x=1x4,2x4,8x4 s=3") == {
        "x": ((1, 4), (2, 4), (8, 4)),
        "s": ((3,), (3,), (3,)),
    }
    assert parse_profile("a=b=1,2,3") == {"a=b": ((1,), (2,), (3,))}


@pytest.mark.parametrize("text", ["x", "x=", "=1", "x=1x", "x=1,2", "x=1 x=2", "x=-1", "x=1x4,2,8x4", "x=2,1,3"])
def test_profiles_that_cannot_be_read(text):
    with pytest.raises(BackendError, match=r"^profile '"):
        parse_profile(text)


def test_largest_batch_is_a_profile_where_nothing_else_varies():
    assert usual_profile({"x": (-1, 4)}, 8) == {"x": ((1, 4), (8, 4), (8, 4))}
    with pytest.raises(BackendError, match=r'x \[-1, -1\].* such as "x=1x1,8x8,64x64"'):
        usual_profile({"x": (-1, -1)}, 8)
    with pytest.raises(BackendError, match="a profile must have their ranges"):
        usual_profile({"x": (-1, 4)}, 0)


def test_profiles_must_fit_the_model(build):
    for profile, text in (
        ("z=1", "a profile must have the inputs that vary, x; it has z"),
        ("x=1x5,2x5,3x5", r"input 'x' has the shape \[-1, 4\], which \[1, 5\] does not fit"),
        ("x=1", "does not fit"),
    ):
        with pytest.raises(BackendError, match=text):
            build(profiles=(profile,))
    with pytest.raises(BackendError, match="no input of the model varies"):
        build(plan("double", [tensor("x", "FLOAT", (1, 4))], [Y]), profiles=("x=1x4",))


# -- what is built --


def test_plan_has_its_profiles_and_flags(build):
    found = build(
        profiles=("x=1x4,2x4,8x4", "x=1x4,16x4,32x4"),
        precisions=("fp16", "int8"),
        version_compatible=True,
        lean_runtime=False,
        hardware_compatible=True,
        optimization_level=5,
        workspace=1 << 20,
    )
    assert found["profiles"] == [{"x": [[1, 4], [2, 4], [8, 4]]}, {"x": [[1, 4], [16, 4], [32, 4]]}]
    assert found["asked"] == {
        "flags": ["FP16", "INT8", "VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME"],
        "strongly_typed": False,
        "hardware": "AMPERE_PLUS",
        "level": 5,
        "workspace": 1 << 20,
    }


def test_streamed_weights_need_strong_types(build):
    asked = build(max_batch_size=8, weight_streaming=True)["asked"]
    assert (asked["strongly_typed"], asked["flags"]) == (True, ["WEIGHT_STREAMING"])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"precisions": ("fp64",)}, "precision 'fp64' is unknown: expected fp16, bf16, fp8, int8"),
        ({"precisions": ("fp16",), "strongly_typed": True}, "takes its precisions from the model"),
        ({"optimization_level": 6}, "the optimisation level is 6, expected 0 to 5"),
        ({"compute_capability": "8.6"}, "builds plans for the GPU that it runs on"),
        ({"device": 7}, "there is no GPU 7"),
        ({"runtime": "tensorrt_rtx"}, "needs tensorrt_rtx, which is not installed"),
        ({}, "a profile must have their ranges"),
    ],
)
def test_builds_that_cannot_be(build, fields, text):
    with pytest.raises(BackendError, match=text):
        build(**fields)


def test_precisions_that_this_tensorrt_leaves_to_the_model(build, monkeypatch):
    monkeypatch.setattr(fake, "BuilderFlag", enum.Enum("BuilderFlag", ["VERSION_COMPATIBLE"]))
    with pytest.raises(BackendError, match="takes precisions from the model: convert it to fp16 before"):
        build(max_batch_size=8, precisions=("fp16",))


def test_models_that_cannot_be_read(build):
    with pytest.raises(BackendError, match=r"does not read .*: Assertion failed: .* \(node conv1\)"):
        build(b"no model", max_batch_size=8)
    build.model.unlink()
    with pytest.raises(BackendError, match="there is no file"):
        build(None)


def test_runtime_that_builds_nothing(build, monkeypatch):
    monkeypatch.delattr(fake, "Builder")
    with pytest.raises(BackendError, match="runs plans and builds none: install tensorrt or tensorrt_rtx"):
        build(max_batch_size=8)


# -- the cache --


def test_second_build_comes_from_the_cache(build):
    build(max_batch_size=8)
    assert build.told[-1] == ("Building engine", 100)
    build.told.clear()
    build(max_batch_size=8)
    assert build.told == []


def test_whatever_makes_a_difference_is_built_anew(build, monkeypatch):
    build(max_batch_size=8)
    for change in (
        lambda: build(max_batch_size=9),
        lambda: build(plan("copy", [X], [Y]), max_batch_size=8),
        lambda: ((build.model.parent / "weights.bin").write_bytes(b"1"), build(max_batch_size=8)),
        lambda: ((build.model.parent / "weights.bin").write_bytes(b"22"), build(max_batch_size=8)),
    ):
        build.told.clear()
        change()
        assert build.told


def test_weights_below_the_models_folder_make_a_difference(tmp_path):
    """Guards against a stale plan, where the model says that its weights lie in a folder below."""
    (tmp_path / "below").mkdir()
    (tmp_path / "model.onnx").write_bytes(b"\n\x08location\x12\x0bbelow/w.bin")
    keys = set()
    for weights in (b"", b"1", b"22"):
        (tmp_path / "below" / "w.bin").write_bytes(weights)
        keys.add(key_of(EngineSpec(tmp_path / "model.onnx"), "library", "gpu"))
    assert len(keys) == 3


def test_no_place_for_the_cache(build, tmp_path):
    """Guards that the error of a build says so, as of a disk that is full or a folder that is read-only."""
    build.cache.write_bytes(b"a file in place of the folder")
    with pytest.raises(BackendError, match=r"cannot be read from the cache of plans or kept there: .*cache"):
        build(max_batch_size=8)


def test_cache_is_its_users_own(build):
    build(max_batch_size=8)
    assert build.cache.stat().st_mode & 0o777 == 0o700
    assert not [path for path in build.cache.iterdir() if path.name.startswith(".")]  # no half a file


def test_timings_are_used_again_for_the_same_gpu_only(build, caplog):
    build(max_batch_size=8)
    build(max_batch_size=9)
    (timings,) = build.cache.glob("timings-*")
    assert timings.name == "timings-tensorrt-10.16.1.11-stub_device_0_9_0"
    assert timings.read_bytes() == b"a timing\na timing\n"
    timings.write_bytes(b"of another GPU")
    build(max_batch_size=10)
    assert "are not for this GPU: they are measured anew" in caplog.text
    assert timings.read_bytes() == b"a timing\n"


# -- progress --


def test_progress_sums_nested_phases_and_never_goes_back():
    told = []
    progress = Progress(lambda *each: told.append(each))
    progress.start("all", None, 2)
    progress.start("first", "all", 4)
    progress.step("first", 0)
    progress.step("first", 1)
    progress.finish("first")
    progress.step("all", 0)
    progress.start("second", "all", 1)
    progress.step("second", 0)
    progress.step("second", 1)
    progress.step("unknown", 1)
    progress.finish("all")
    assert told == [("all", 0), ("first", 12), ("first", 25), ("all", 50), ("second", 100)]


def test_interrupted_build_ends_at_its_next_step(build, monkeypatch):
    class Thread:
        """Begins when it is joined for the second time, so that the interrupt certainly comes before."""

        def __init__(self, target, args, name):
            self.run = lambda: target(*args)
            self.joined = 0

        def start(self):
            pass

        def join(self):
            self.joined += 1
            if self.joined == 1:
                raise KeyboardInterrupt
            self.run()

    monkeypatch.setattr(module.threading, "Thread", Thread)
    with pytest.raises(KeyboardInterrupt):
        build(max_batch_size=8)
    assert not list(build.cache.glob("*.plan"))


# -- the command, and models --


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "inferd", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'fakes'}", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_builds_a_plan_with_the_profiles_that_are_asked_for(tmp_path):
    (tmp_path / "model.onnx").write_bytes(MODEL)
    driver, cache = ("--cuda-driver", gpu_stub.library()), ("--cache", tmp_path / "cache")
    done = command("build-engine", tmp_path / "model.onnx", "--max-batch-size", 8, *driver, *cache)
    assert done.returncode == 0, done.stderr
    assert "100 % Building engine" in done.stderr
    assert json.loads((tmp_path / "model.plan").read_bytes())["profiles"] == [{"x": [[1, 4], [8, 4], [8, 4]]}]
    profiles = ("--profile", "x=1x4,2x4,3x4", "--profile", "x=4x4")
    done = command("build-engine", tmp_path / "model.onnx", "-o", tmp_path / "b.plan", *profiles, *driver, *cache)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "b.plan").read_bytes())["profiles"]) == 2


def test_command_without_a_gpu_does_not_crash(tmp_path):
    """TensorRT would take the process with it."""
    (tmp_path / "model.onnx").write_bytes(MODEL)
    done = command("build-engine", tmp_path / "model.onnx", "--max-batch-size", 8, "--cuda-driver", "/nowhere/cuda.so")
    assert done.returncode == 1
    assert "a plan of TensorRT needs a GPU" in done.stderr


def test_check_without_a_gpu_does_not_crash(tmp_path):
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "1" / "model.plan").write_bytes(MODEL)
    why = "model 'm': a plan of TensorRT needs a GPU, also to be looked into, and there is no GPU 0"
    done = command("check", tmp_path / "models")
    assert done.returncode == 1
    assert why in done.stdout
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(
        """backend: "tensorrt" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }"""
    )
    done = command("serve", "--model-repository", tmp_path / "models", "--grpc-address", f"unix:{tmp_path}/socket")
    assert done.returncode == 1
    assert why in done.stderr


async def test_onnx_model_is_built_when_it_is_loaded(tmp_path, tensorrt, stub, caplog):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(MODEL)
    config = """
    backend: "tensorrt" default_model_filename: "model.onnx" max_batch_size: 8
    parameters { key: "build.precisions" value { string_value: "fp16" } }
    parameters { key: "build.profiles" value { string_value: "x=1x4,2x4,4x4; x=1x4,8x4,8x4" } }
    instance_group { profile: "1" }
    """
    with caplog.at_level("INFO", "inferd.tensorrt"):
        async with serving(tmp_path, b"", config, backend={"engine-cache": str(tmp_path / "cache")}) as engine:
            sent = np.ones((8, 4), np.float32)
            np.testing.assert_array_equal((await infer(engine, request(x=sent))).array(), 2 * sent)
    assert "model m: its plan is built, 100 %" in caplog.text
    (built,) = (tmp_path / "cache").glob("*.plan")
    assert json.loads(built.read_bytes())["asked"]["flags"] == ["FP16"]


async def test_a_model_is_not_ready_while_its_plan_is_built(tmp_path, tensorrt, stub, monkeypatch, caplog):
    """Readiness and requests say so; others are served meanwhile."""
    building, go = threading.Event(), threading.Event()
    go.set()
    build_for_real = fake.Builder.build_serialized_network

    def build_slowly(self, network, config):
        building.set()
        assert go.wait(60)
        return build_for_real(self, network, config)

    monkeypatch.setattr(fake.Builder, "build_serialized_network", build_slowly)
    config = """
    backend: "tensorrt" default_model_filename: "model.onnx" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
    """
    for name in ("m", "slow"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.onnx").write_bytes(MODEL)
    (tmp_path / "slow" / "config.pbtxt").write_text(
        config + ' parameters { key: "build.precisions" value { string_value: "fp16" } }'
    )
    row = np.ones((1, 4), np.float32)
    backend, control = {"engine-cache": str(tmp_path / "cache")}, ModelControl(ControlMode.EXPLICIT, ("m",))
    with caplog.at_level("INFO", "inferd.tensorrt"):
        async with serving(tmp_path, b"", config, backend=backend, control=control) as engine:
            building.clear()
            go.clear()
            load = asyncio.create_task(engine.load("slow"))
            assert await asyncio.to_thread(building.wait, 60)
            states = {entry.name: entry.state for entry in engine.index()}
            assert states == {"m": "READY", "slow": "LOADING"}
            with pytest.raises(NotFound):
                engine.model("slow")
            np.testing.assert_array_equal((await infer(engine, request(x=row))).array(), 2 * row)
            go.set()
            await load
            assert engine.model("slow").ready
            np.testing.assert_array_equal((await infer(engine, request("slow", x=row))).array(), 2 * row)
    assert "model slow: its plan is built, 100 %" in caplog.text
