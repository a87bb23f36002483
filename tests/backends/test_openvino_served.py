"""OpenVINO behind the engine: what it shares with other models and clients, and what happens beside a reload."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from onnx import TensorProto, helper

from inferd._native.memory.resource import live_counters
from inferd.server.engine.loading.control import ControlMode, ModelControl
from tests.backends.models import onnx_bytes
from tests.engine.placing import memory
from tests.engine.serving import infer, request, serving_folder

pytest.importorskip("openvino")

from tests.backends.openvino_models import ops, parameter, save, slow

__all__ = ["memory"]

CONFIG = """
{backend}
max_batch_size: 8
input {{ name: "x" data_type: TYPE_INT64 dims: [ -1 ] }}
output {{ name: "y" data_type: TYPE_INT64 dims: [ -1 ] }}
instance_group {{ kind: KIND_CPU count: {instances} }}
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "a" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "b" data_type: TYPE_INT64 dims: [ -1 ] }
ensemble_scheduling {
    step { model_name: "openvino" input_map { key: "x" value: "x" } output_map { key: "y" value: "a" } }
    step { model_name: "onnx" input_map { key: "x" value: "x" } output_map { key: "y" value: "c" } }
    step { model_name: "openvino" input_map { key: "x" value: "c" } output_map { key: "y" value: "b" } }
}
"""


ALL_AT_START = ModelControl(ControlMode.EXPLICIT, ("openvino",))


def plus(folder, number, shape=(-1, -1)):
    """y is x and so much more."""
    x = parameter("x", "i64", shape)
    return save(folder, [x], {"y": ops.add(x, ops.constant(np.int64(number)))})


def add_model(root, name, number=1, instances=1):
    version = root / name / "1"
    version.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(CONFIG.format(backend='backend: "openvino"', instances=instances))
    plus(version, number)
    return version


async def ask(engine, rows, model="openvino", **more):
    return await infer(engine, request(model, x=np.array(rows)), **more)


async def test_steps_of_an_ensemble_share_a_tensor(tmp_path):
    """Two models read the same memory at once, one of them as what it must not write to."""
    add_model(tmp_path, "openvino", instances=2)
    version = tmp_path / "onnx" / "1"
    version.mkdir(parents=True)
    (tmp_path / "onnx" / "config.pbtxt").write_text(CONFIG.format(backend="", instances=1))
    x, y = (helper.make_tensor_value_info(name, TensorProto.INT64, ["N", "M"]) for name in "xy")
    ten = helper.make_tensor("ten", TensorProto.INT64, [1], [10])
    (version / "model.onnx").write_bytes(onnx_bytes([helper.make_node("Mul", ["x", "ten"], ["y"])], [x], [y], [ten]))
    (tmp_path / "both" / "1").mkdir(parents=True)
    (tmp_path / "both" / "config.pbtxt").write_text(ENSEMBLE)
    async with serving_folder(tmp_path) as engine:
        answers = await asyncio.gather(*(ask(engine, [[i, i + 1]], model="both") for i in range(50)))
        for i, answer in enumerate(answers):
            assert answer.array("a").tolist() == [[i + 1, i + 2]]
            assert answer.array("b").tolist() == [[10 * i + 1, 10 * i + 11]]
    assert not any(live_counters().values())


async def test_no_rows_and_no_columns_and_what_does_not_fit(tmp_path):
    add_model(tmp_path, "openvino")
    async with serving_folder(tmp_path) as engine:
        assert (await ask(engine, np.empty((1, 0), np.int64))).array().shape == (1, 0)
        for wrong in (np.empty((0, 2), np.int64), np.zeros(2, np.int64), np.zeros((9, 1), np.int64)):
            answer = await ask(engine, wrong)
            assert answer.text or answer.array().shape == wrong.shape
        assert (await infer(engine, request("openvino", x=np.zeros((1, 2), np.float32)))).status == 3
        assert (await ask(engine, [[1]])).array().tolist() == [[2]]


async def test_every_answer_beside_reloads_is_one_of_a_version(tmp_path):
    version = add_model(tmp_path, "openvino", 1)
    async with serving_folder(tmp_path, control=ALL_AT_START) as engine:
        stop = asyncio.Event()
        wrong = []

        async def keep_asking():
            while not stop.is_set():
                answer = await ask(engine, [[5, 6]])
                if answer.text or answer.array().tolist() not in ([[6, 7]], [[105, 106]]):
                    wrong.append(answer.text or answer.array().tolist())

        asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
        for number in (100, 1, 100):
            plus(version, number)
            await engine.load("openvino")
        stop.set()
        await asyncio.gather(*asking)
        assert not wrong
        assert (await ask(engine, [[5, 6]])).array().tolist() == [[105, 106]]
    assert not any(live_counters().values())


def add_slow_model(root, rows):
    """One whose requests all have so many rows; one of them."""
    version = root / "openvino" / "1"
    version.mkdir(parents=True)
    config = CONFIG.format(backend='backend: "openvino"', instances=1).replace("INT64", "FP32").replace(": 8", ": 0")
    config = config[: config.index("dynamic_batching")].replace("[ -1 ]", f"[ {rows}, 512 ]")
    (version.parent / "config.pbtxt").write_text(config)
    slow(version, rows)
    return np.ones((rows, 512), np.float32)


async def test_a_request_that_is_late_stops_its_run(tmp_path):
    ones = add_slow_model(tmp_path, 1 << 11)
    async with serving_folder(tmp_path) as engine:
        late = await ask(engine, ones, timeout_ns=50_000_000)
        assert late.status == 4
        assert not (await ask(engine, 0 * ones)).array().any()


async def test_full_batches_follow_each_other(tmp_path):
    """The instance and its alternate have memory of their own for what they execute and for what they answer."""
    add_model(tmp_path, "openvino")
    async with serving_folder(tmp_path) as engine:
        given = [np.arange(8 * (1 + i % 3)).reshape(8, -1) + 1000 * i for i in range(80)]
        answers = await asyncio.gather(*(ask(engine, each) for each in given))
        for each, answer in zip(given, answers, strict=True):
            assert answer.array().tolist() == (each + 1).tolist()
    assert not any(live_counters().values())


async def test_a_run_that_waits_for_another_is_stopped_alone(tmp_path):
    ones = add_slow_model(tmp_path, 1 << 11)
    async with serving_folder(tmp_path) as engine:
        tasks = [ask(engine, each * ones, timeout_ns=ns) for each, ns in ((0, -1), (1, 50_000_000), (0, -1))]
        first, late, last = await asyncio.gather(*tasks)
        assert late.status == 4
        assert not first.array().any()
        assert not last.array().any()
