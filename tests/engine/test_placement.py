"""Guards what models do with tensors in shared memory: read and written in place, or copied, and never kept."""

from __future__ import annotations

import numpy as np
import pytest

from inferd.server.caching import LocalCache
from inferd.server.engine.instances.shared_memory import SYSTEM, User
from tests.engine.placing import USER, Served, memory, placed
from tests.engine.serving import CONFIG, request, row

__all__ = ["memory"]

FIXED = CONFIG.replace('name: "y" data_type: TYPE_INT64 dims: [ -1 ]', 'name: "y" data_type: TYPE_INT64 dims: [ 2 ]')


pytestmark = pytest.mark.usefixtures("native_counters")


def address(batch, name="x"):
    return batch.input(name).numpy().ctypes.data


async def test_a_trusted_region_is_read_and_written_in_place(tmp_path, memory):
    def execute(batch):
        x = batch.input("x").numpy()
        memory[1] = 20  # what the client writes now the model sees: it reads there
        place = batch.place("y").numpy()
        np.multiply(x, 2, out=place)
        batch.set_output("y", place)
        seen.append((x.tolist(), memory[8:10].tolist()))

    seen = []
    async with Served(tmp_path, execute, memory, FIXED) as served:
        memory[:2] = 1, 2
        answer = await served.ask(placed(to=8))
        assert list(answer.response.raw_output_contents) == [b""]
        assert list(answer.response.outputs[0].shape) == [1, 2]
    assert seen == [([[1, 20]], [2, 40])]


async def test_what_is_copied_does_not_change_while_the_model_runs(tmp_path, memory):
    def execute(batch):
        x = batch.input("x").numpy()
        memory[:2] = -1
        places.append(batch.place("y"))
        batch.set_output("y", x + 1)
        assert memory[8] == 0, "nothing is written before the response is complete"

    places = []
    async with Served(tmp_path, execute, memory, FIXED, access="copy") as served:
        memory[:2] = 1, 2
        await served.ask(placed(to=8))
    assert places == [None], "a model does not work in memory that a stranger may change"
    assert memory[8:10].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("options", "in_place"),
    [
        ({}, True),
        ({"user": User(USER.uid, 0)}, False),
        ({"user": None, "shared": True}, False),
        ({"user": None, "shared": True, "access": "map"}, True),
        ({"shared": True}, True),
        ({"access": "copy"}, False),
    ],
    ids=["own user", "in another PID namespace", "over TCP", "over TCP, all trusted", "own user, all admitted", "none"],
)
async def test_whom_the_server_trusts(tmp_path, memory, options, in_place):
    def execute(batch):
        x = batch.input("x").numpy()
        memory[0] = 20
        seen.append(x[0, 0] == 20)
        batch.set_output("y", x + 1)

    seen = []
    async with Served(tmp_path, execute, memory, **options) as served:
        memory[:2] = 1, 2
        await served.ask(placed())
    assert seen == [in_place]


@pytest.mark.parametrize(
    ("config", "message"),
    [(CONFIG, placed(to=8)), (FIXED, placed()), (FIXED, placed(to=8, room=8))],
    ids=["variable shape", "not asked for", "too small"],
)
async def test_outputs_without_a_place(tmp_path, memory, config, message):
    def execute(batch):
        places.append(batch.place("y"))
        batch.set_output("y", batch.input("x").numpy().copy())

    places = []
    async with Served(tmp_path, execute, memory, config) as served:
        await served.start(message).answer()
    assert places == [None]


async def test_padding_does_not_reach_the_client(tmp_path, memory):
    """The model's output is longer than the client's: it has no place in the client's memory."""

    def execute(batch):
        x = batch.input("x").numpy()
        places.append(batch.place("y", x.shape))
        batch.set_output("y", x + 1)

    places = []
    padded = 'parameters { key: "pad" value { string_value: "x=7" } } parameters { key: "pad_buckets" value '
    padded += '{ string_value: "4" } } parameters { key: "unpad" value { string_value: "y=x" } }'
    async with Served(tmp_path, execute, memory, CONFIG + padded) as served:
        memory[:4] = range(4)
        await served.ask(placed(2, rows=2, to=8, room=64))
    assert places == [None]
    assert memory[8:16].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]


async def test_requests_that_lie_one_behind_the_other_are_one_input(tmp_path, memory):
    def execute(batch):
        seen.append((batch.request_count, batch.placed, address(batch) % 4096))
        batch.set_output("y", batch.input("x").numpy() * 10)

    seen = []
    config = FIXED.replace("dynamic_batching { }", "dynamic_batching { max_queue_delay_microseconds: 1000000 }")
    config = config.replace("max_batch_size: 8", "max_batch_size: 2")
    async with Served(tmp_path, execute, memory, config) as served:
        memory[:4] = range(4)
        pending = [served.start(placed(at=0, to=8)), served.start(placed(at=2, to=10))]
        for each in pending:
            assert (await each.answer()).status == 0
    assert seen == [(2, False, 0)], "in place: the region begins at a page"
    assert memory[8:12].tolist() == [0, 10, 20, 30]


async def test_an_input_that_is_returned_as_it_is_leaves_as_a_copy(tmp_path, memory):
    """The answer is kept until the client reads it: it must not change with the client's memory."""

    def execute(batch):
        batch.set_output("y", batch.input("x").numpy())

    async with Served(tmp_path, execute, memory) as served:
        memory[:1000] = 7
        answer = await served.ask(placed(1000))
        assert answer.array().tolist() == [[7] * 1000]


async def test_tensors_in_regions_are_not_remembered(tmp_path, memory):
    """Requests that look alike have other contents the next time."""

    def execute(batch):
        asked.append(batch.request_count)
        batch.set_output("y", batch.input("x").numpy())

    asked = []
    cached = CONFIG + "response_cache { enable: true }"
    async with Served(tmp_path, execute, memory, cached, cache=LocalCache(1 << 20)) as served:
        for number in (1, 2, 2):
            memory[:2] = number
            assert (await served.ask(placed())).array().tolist() == [[number, number]]
        assert (await served.ask(request(x=row(2, 2)))).array().tolist() == [[2, 2]]
        memory[:2] = 3
        assert (await served.ask(request(x=row(2, 2)))).array().tolist() == [[2, 2]]
    assert len(asked) == 4


async def test_results_of_a_cancelled_request_are_not_written(tmp_path, memory):
    """The client may use its memory for something else by then."""

    def execute(batch):
        pending.ticket.cancel()
        batch.set_output("y", batch.input("x").numpy() + 1)

    async with Served(tmp_path, execute, memory) as served:
        pending = served.start(placed(to=8))
        await served.ask(request(x=row(1)))  # behind it
    assert memory[8] == 0


async def test_the_engine_closes_with_regions_in_use(tmp_path, memory):
    def execute(batch):
        served.engine.shared_memory.unregister(USER, SYSTEM, "")
        batch.set_output("y", batch.input("x").numpy() + 1)

    async with Served(tmp_path, execute, memory) as served:
        pending = served.start(placed(to=8))
    assert (await pending.answer()).status == 0
    assert memory[8] == 1


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "m"
    model_version: -1
    input_map { key: "x" value: "x" }
    output_map { key: "y" value: "y" }
  }
}
"""


@pytest.mark.parametrize(("access", "seen"), [("map", [-1, -1]), ("copy", [1, 2])])
async def test_steps_of_an_ensemble(tmp_path, memory, access, seen):
    """A step gets the client's tensor under the same rules, and the ensemble's result is written to its place."""

    def execute(batch):
        x = batch.input("x").numpy()
        memory[:2] = -1
        batch.set_output("y", x * 2)

    served = Served(tmp_path, execute, memory, access=access)
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text(ENSEMBLE)
    async with served:
        memory[:2] = 1, 2
        message = placed(to=8)
        message.model_name = "e"
        answer = await served.ask(message)
        assert list(answer.response.raw_output_contents) == [b""]
    assert memory[8:10].tolist() == [2 * value for value in seen]
