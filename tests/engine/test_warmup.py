"""Guards warm-up: what is executed before a model is ready, on which thread, and that it is no traffic."""

import asyncio
import threading

import numpy as np
import pytest

from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.errors import ServerError
from tests.engine.serving import CONFIG, Gate, Loader, infer, request, row, scale, serving, serving_folder

EXPLICIT = ModelControl(ControlMode.EXPLICIT, (ALL,))
SAMPLE = """
model_warmup {
  name: "%s" batch_size: %d count: %d
  inputs { key: "x" value { data_type: TYPE_INT64 dims: [ 2 ] %s } }
}
"""


pytestmark = pytest.mark.usefixtures("native_counters")


class Seen:
    """Remembers the batches, and the threads that they ran on."""

    def __init__(self):
        self.batches, self.threads = [], []

    def __call__(self, batch):
        self.batches.append(batch.input("x").numpy().copy())
        self.threads.append(threading.current_thread().name)
        batch.set_output("y", batch.input("x").numpy())


async def problem_of(root, execute, **configs):
    """The error of loading these models, one of which is "m"."""
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    async with serving_folder(root, Loader({"m": execute}), problems=1) as engine:
        [problem] = engine.problems.values()
    return problem


async def test_samples_run_on_each_instance_before_it_serves_and_do_not_count(tmp_path):
    seen = Seen()
    config = CONFIG.replace("count: 1", "count: 2") + SAMPLE % ("zeros", 3, 2, "zero_data: true")
    async with serving(tmp_path, seen, m=config) as engine:
        assert [batch.tolist() for batch in seen.batches] == [[[0, 0]] * 3] * 4
        assert sorted(seen.threads) == ["m_0_0", "m_0_0", "m_0_1", "m_0_1"]
        statistics = engine.model("m").statistics()
        assert statistics.execution_count == statistics.inference_count == 0
        assert statistics.inference_stats.success.count == 0
        assert not statistics.batch_stats
        await infer(engine, request(x=row(7)))
        assert engine.model("m").statistics().execution_count == 1


async def test_instances_that_are_added_while_it_serves_are_warmed_and_do_not_count(tmp_path):
    seen = Seen()
    async with serving(
        tmp_path, seen, control=EXPLICIT, m=CONFIG + SAMPLE % ("zeros", 3, 2, "zero_data: true")
    ) as engine:
        await infer(engine, request(x=row(7)))
        await scale(engine, tmp_path, 3)
        assert len(seen.batches) == 2 + 1 + 4
        statistics = engine.model("m").statistics()
        assert statistics.execution_count == statistics.inference_stats.success.count == 1
        assert [batch.batch_size for batch in statistics.batch_stats] == [1]


async def test_random_data_and_files(tmp_path):
    seen = Seen()
    folder = tmp_path / "m" / "warmup"
    folder.mkdir(parents=True)
    (folder / "two").write_bytes(np.array([5, 6], dtype=np.int64).tobytes())
    config = CONFIG + SAMPLE % ("a", 1, 0, "random_data: true") + SAMPLE % ("b", 1, 0, 'input_data_file: "two"')
    async with serving(tmp_path, seen, m=config):
        random, file = seen.batches
        assert random.shape == (1, 2)
        assert file.tolist() == [[5, 6]]


async def test_a_sample_of_batch_size_0_is_skipped(tmp_path):
    seen = Seen()
    async with serving(tmp_path, seen, m=CONFIG + SAMPLE % ("none", 0, 1, "zero_data: true")):
        assert seen.batches == []


async def test_all_batch_sizes_with_one_line(tmp_path):
    seen = Seen()
    line = 'parameters { key: "warmup_batch_sizes" value { string_value: "all" } }'
    async with serving(tmp_path, seen, m=CONFIG.replace("dims: [ -1 ]", "dims: [ 3 ]") + line):
        assert [batch.shape for batch in seen.batches] == [(size, 3) for size in range(1, 9) for _ in range(2)]


async def test_all_buckets_of_a_padded_input(tmp_path):
    seen = Seen()
    lines = """
        parameters { key: "warmup_batch_sizes" value { string_value: "1,8" } }
        parameters { key: "pad" value { string_value: "x=0" } }
        parameters { key: "pad_buckets" value { string_value: "4,16" } }
    """
    async with serving(tmp_path, seen, m=CONFIG + lines):
        shapes = [batch.shape for batch in seen.batches]
        assert shapes == [shape for shape in [(1, 4), (1, 16), (8, 4), (8, 16)] for _ in range(2)]


async def test_samples_at_several_batch_sizes(tmp_path):
    seen = Seen()
    line = 'parameters { key: "warmup_batch_sizes" value { string_value: "2,4" } }'
    async with serving(tmp_path, seen, m=CONFIG + SAMPLE % ("s", 0, 1, "zero_data: true") + line):
        assert [batch.shape for batch in seen.batches] == [(2, 2), (2, 2), (4, 2), (4, 2)]


def fail(batch):
    raise ValueError("cold")


async def test_a_failure_fails_the_load_with_the_name_of_the_sample(tmp_path):
    problem = await problem_of(tmp_path, fail, m=CONFIG + SAMPLE % ("first", 1, 1, "zero_data: true"))
    assert problem == "failed to load 'm' version 1: failed to run warmup sample 'first': cold"


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (SAMPLE % ("s", 9, 1, "zero_data: true"), "has batch_size 9"),
        (SAMPLE % ("s", 1, 1, ""), "needs zero_data, random_data or input_data_file"),
        ((SAMPLE % ("s", 1, 1, "zero_data: true")).replace('"x"', '"z"'), "an input 'z' that the model lacks"),
        ((SAMPLE % ("s", 1, 1, "zero_data: true")).replace("INT64", "FP32"), "must be TYPE_INT64"),
        ((SAMPLE % ("s", 1, 1, "zero_data: true")).replace("[ 2 ]", "[ -1 ]"), "must have all dims given"),
        (SAMPLE % ("s", 1, 1, 'input_data_file: "none"'), "there is no file"),
        (SAMPLE % ("s", 1, 1, 'input_data_file: "../config.pbtxt"'), "must stay within the model directory"),
        ('parameters { key: "warmup_batch_sizes" value { string_value: "9" } }', "there is no batch of 9"),
        ('parameters { key: "warmup_batch_sizes" value { string_value: "some" } }', "expected all, or ascending"),
        ('parameters { key: "warmup_batch_sizes" value { string_value: "1" } }', "variable dimension without buckets"),
    ],
)
async def test_wrong_samples_are_told(tmp_path, sample, problem):
    assert problem in await problem_of(tmp_path, Seen(), m=CONFIG + sample)


async def test_a_sample_that_does_not_fit_the_model_fails_the_load(tmp_path):
    config = CONFIG.replace("dims: [ -1 ]", "dims: [ 3 ]") + SAMPLE % ("narrow", 1, 1, "zero_data: true")
    problem = await problem_of(tmp_path, Seen(), m=config)
    assert "failed to run warmup sample 'narrow'" in problem
    assert "Expected [-1,3], got [1,2]" in problem


async def test_a_native_executor_is_warmed(tmp_path):
    config = CONFIG.replace('"puppet"', '"identity"') + SAMPLE % ("zeros", 8, 5, "zero_data: true")
    async with serving(tmp_path, m=config) as engine:
        assert engine.model("m").statistics().execution_count == 0
        assert (await infer(engine, request(x=row(1)))).array().tolist() == [[1]]


ENSEMBLE = (
    """
platform: "ensemble" max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "m" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } }
  step { model_name: "m" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "y" } }
}
"""
    + SAMPLE % ("through", 2, 3, "zero_data: true")
)


async def test_an_ensemble_is_warmed_through_its_steps(tmp_path):
    seen = Seen()
    async with serving(tmp_path, {"m": seen}, m=CONFIG, e=ENSEMBLE) as engine:
        assert sum(len(batch) for batch in seen.batches) == 2 * 2 * 3
        assert [engine.model(name).statistics().execution_count for name in "em"] == [0, 0]
        assert (await infer(engine, request("e", x=row(4)))).array().tolist() == [[4]]


HURRIED = "default_queue_policy { default_timeout_microseconds: 1 }"


async def test_no_timeout_of_a_queue_ends_the_warm_up_of_an_ensemble(tmp_path):
    """Samples of an ensemble wait for its cold steps without any timeout."""
    seen = Seen()
    step = CONFIG.replace("dynamic_batching { }", f"dynamic_batching {{ {HURRIED} }}")
    async with serving(tmp_path, {"m": seen}, m=step, e=ENSEMBLE) as engine:
        assert sum(len(batch) for batch in seen.batches) == 2 * 2 * 3
        assert engine.problems == {}


async def test_an_ensemble_whose_sample_fails_is_not_served(tmp_path):
    problem = await problem_of(tmp_path, fail, m=CONFIG, e=ENSEMBLE)
    assert problem == "failed to load 'e' version 1: failed to run warmup sample 'through': in ensemble 'e', cold"


LONG = CONFIG + SAMPLE % ("many", 1, 1000, "zero_data: true")


@pytest.mark.parametrize("end", ["unload", "close"])
@pytest.mark.parametrize("before", [False, True], ids=["first load", "reload"])
async def test_an_end_does_not_wait_for_the_rest_of_a_warm_up(tmp_path, end, before):
    """The sample that is executed is finished, most of the 1000 are not begun; the load fails and says why."""
    gate = Gate()
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    engine = Engine([tmp_path], Loader({"m": gate}), Options(), control=ModelControl(ControlMode.EXPLICIT))
    assert await engine.start() == []
    try:
        if before:
            await engine.load("m")
        (tmp_path / "m" / "config.pbtxt").write_text(LONG)
        load = asyncio.create_task(engine.load("m"))
        await gate.entered()
        ending = asyncio.create_task(engine.unload("m") if end == "unload" else engine.close())
        while not load.done():
            gate.go()  # one sample at a time
            await asyncio.wait({load}, timeout=0.05)
        with pytest.raises(ServerError, match="unloaded before" if end == "unload" else "server stops before"):
            await load
        await asyncio.wait_for(ending, 30)
        assert len(gate.batches) < 500
        assert all(entry.state in ("UNLOADING", "UNAVAILABLE") for entry in engine.index())
    finally:
        gate.go(1000)
        if end == "unload":
            await engine.close()
