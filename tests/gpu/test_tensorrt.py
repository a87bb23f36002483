"""Shows TensorRT on a real GPU: plans that are built here, batches, profiles, graphs, shapes as data and from data.

Each TensorRT that is installed and builds is taken; without one the tests are skipped, and say so.
"""

import shutil

import numpy as np
import pytest

from inferd.backends.api import EngineSpec
from inferd.backends.loader import BackendLoader
from inferd.backends.tensorrt.library import is_installed
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.gpu import Gpus
from inferd.server.engine.instances.instances import Hardware
from inferd.server.errors import Status
from tests.backends.tensorrt import models
from tests.engine.serving import infer, infer_all, request, serving_folder

GRAPHS = "optimization { cuda { graphs: true graph_spec { batch_size: 8 graph_lower_bound { batch_size: 1 } } } }"
BUILT = 'backend: "tensorrt" default_model_filename: "model.onnx" max_batch_size: 8 '


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def runtime(request, gpu):
    if not is_installed(request.param):
        pytest.skip(f"needs {request.param}")
    return request.param


@pytest.fixture
def serve(tmp_path, runtime):
    """Start an engine with the model "m"; its folder is made by then."""
    engines = []

    async def start(config, **options):
        (tmp_path / "models" / "m" / "config.pbtxt").write_text(config)
        loader = BackendLoader({"tensorrt": {"runtime": runtime, "engine-cache": str(tmp_path / "cache"), **options}})
        gpus = Gpus()
        engine = Engine([tmp_path / "models"], loader, Options(gpus=gpus.count), hardware=Hardware(gpus=gpus))
        engines.append(engine)
        assert await engine.start() == []
        return engine

    yield start
    assert not [engine for engine in engines if engine.live], "the test closes what it starts"


def folder(tmp_path):
    return tmp_path / "models" / "m" / "1"


def parameter(key, value):
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


async def check_linear(engine, requests=400):
    random = np.random.default_rng(1)
    sent = [random.standard_normal((1 + i % 4, 16), np.float32) for i in range(requests)]
    answers = await infer_all(engine, *(request(x=each) for each in sent))
    for each, answer in zip(sent, answers, strict=True):
        assert answer.status == Status.OK, answer.text
        np.testing.assert_allclose(answer.array(), np.maximum(0, each @ models.WEIGHTS), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("options", ["", GRAPHS, "instance_group { count: 3 }"])
async def test_batches_are_answered_with_graphs_and_with_three_instances(tmp_path, serve, options):
    models.linear(folder(tmp_path) / "model.onnx")
    engine = await serve(BUILT + "dynamic_batching { }" + options)
    try:
        await check_linear(engine)
    finally:
        await engine.close()


async def test_configuration_from_the_plan_and_profiles(tmp_path, serve, runtime):
    models.linear(tmp_path / "model.onnx")
    spec = EngineSpec(
        tmp_path / "model.onnx",
        profiles=("x=1x16,1x16,4x16", "x=1x16,32x16,64x16"),
        runtime=runtime,
        cache=tmp_path / "cache",
    )
    plan = BackendLoader().backend("tensorrt").build(spec, lambda what, percent: None)
    folder(tmp_path).mkdir(parents=True)
    shutil.copyfile(plan, folder(tmp_path) / "model.plan")
    engine = await serve('instance_group { profile: [ "0", "1" ] }')
    try:
        assert engine.model("m").config.max_batch_size == 64
        await check_linear(engine)
        answer = await infer(engine, request(x=np.ones((64, 16), np.float32)))
        assert answer.array().shape == (64, 8)
    finally:
        await engine.close()


async def test_shape_that_data_decide(tmp_path, serve, runtime):
    if runtime == "tensorrt_rtx":
        pytest.skip("TensorRT-RTX 1.7 reads no NonZero")
    models.where(folder(tmp_path) / "model.onnx")
    engine = await serve(BUILT.replace("max_batch_size: 8", ""))
    try:
        for count in (0, 1, 5, 64):
            sent = np.zeros(64, np.float32)
            sent[:count] = 1
            answer = await infer(engine, request(x=sent))
            assert answer.status == Status.OK, answer.text
            np.testing.assert_array_equal(answer.array(), [np.arange(count)])
    finally:
        await engine.close()


async def test_a_tensor_may_give_the_shape_of_the_output_within_its_profile(tmp_path, serve):
    models.expand(folder(tmp_path) / "model.onnx")
    engine = await serve(BUILT + parameter("build.profiles", "x=1x1,4x1,8x1 s=1x1,4x4,8x16"))
    try:
        for rows, columns in ((1, 1), (8, 16), (3, 5)):
            sent = np.arange(rows, dtype=np.float32).reshape(rows, 1)
            answer = await infer(engine, request(x=sent, s=np.array([rows, columns])))
            assert answer.status == Status.OK, answer.text
            np.testing.assert_array_equal(answer.array(), np.repeat(sent, columns, axis=1))
        answer = await infer(engine, request(x=sent, s=np.array([3, 17])))
        assert answer.status == Status.INVALID_ARGUMENT
    finally:
        await engine.close()


async def test_a_plan_without_weights_on_the_device_answers_the_same(tmp_path, serve):
    models.linear(folder(tmp_path) / "model.onnx")
    engine = await serve(BUILT + parameter("weight_streaming_budget", "0"))
    try:
        await check_linear(engine, requests=40)
    finally:
        await engine.close()


async def test_lean_runtime_runs_a_version_compatible_plan(tmp_path, serve, runtime):
    if runtime != "tensorrt" or not is_installed("tensorrt_lean"):
        pytest.skip("needs tensorrt and tensorrt_lean")
    models.linear(tmp_path / "model.onnx")
    spec = EngineSpec(
        tmp_path / "model.onnx",
        max_batch_size=8,
        version_compatible=True,
        lean_runtime=False,
        runtime="tensorrt",
        cache=tmp_path / "cache",
    )
    plan = BackendLoader().backend("tensorrt").build(spec, lambda what, percent: None)
    folder(tmp_path).mkdir(parents=True)
    shutil.copyfile(plan, folder(tmp_path) / "model.plan")
    engine = await serve("", runtime="tensorrt_lean")
    try:
        await check_linear(engine)
    finally:
        await engine.close()


async def test_plan_that_is_none(tmp_path, runtime):
    """TensorRT says why, and the process goes on."""
    folder(tmp_path).mkdir(parents=True)
    (folder(tmp_path) / "model.plan").write_bytes(b"no plan" * 100)
    (tmp_path / "models" / "m" / "config.pbtxt").touch()
    loader = BackendLoader({"tensorrt": {"runtime": runtime}})
    async with serving_folder(tmp_path / "models", loader, 1, Gpus()) as engine:
        assert "cannot read the plan" in str(engine.problems)
