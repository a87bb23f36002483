"""Guards what models do with tensors in shared memory: read and written in place, or copied, and never kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from server.caching import LocalCache
from server.engine.config import Options
from server.engine.engine import Engine
from server.engine.shared_memory import SYSTEM, SharedMemoryPolicy, User
from tests.engine.serving import CONFIG, Loader, Pending, infer, request, row

FIXED = CONFIG.replace('name: "y" data_type: TYPE_INT64 dims: [ -1 ]', 'name: "y" data_type: TYPE_INT64 dims: [ 2 ]')
USER = User(os.geteuid(), os.getpid())
SIZE = 1 << 16


@pytest.fixture(autouse=True)
def _nothing_left(native_counters):
    """Requests and regions are gone when the engine is closed."""


@pytest.fixture
def memory():
    """A shared memory object of 64 KiB, as an array that begins at its first byte."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="inferd-test-") as file:
        file.truncate(SIZE)
        array = np.memmap(file.name, np.int64, "r+")
        array.key = Path(file.name).name
        yield array


class Served:
    """An engine around one model, with the region "r"."""

    def __init__(self, root, execute, memory, config=CONFIG, *, access="auto", cache=None):
        (root / "m" / "1").mkdir(parents=True)
        (root / "m" / "config.pbtxt").write_text(config)
        policy = SharedMemoryPolicy(access=access)
        self.engine = Engine([root], Loader({"m": execute}), Options(), cache=cache, shared_memory=policy)
        self.memory = memory

    async def __aenter__(self):
        assert await self.engine.start() == []
        self.engine.shared_memory.register_system(USER, "r", self.memory.key, 0, SIZE)
        return self

    async def __aexit__(self, *_):
        await self.engine.close()

    def start(self, message):
        return Pending(self.engine, message, user=USER.uid)

    async def ask(self, message):
        answer = await infer(self.engine, message, user=USER.uid)
        assert answer.status == 0, answer.text
        return answer


def placed(columns=2, *, at=0, to=None, room=None, rows=1):
    """A request with x at this element of the region, and y to be written at another one."""
    message = request()
    tensor = message.inputs.add(name="x", datatype="INT64", shape=[rows, columns])
    refer(tensor, at, 8 * rows * columns)
    if to is not None:
        refer(message.outputs.add(name="y"), to, 8 * rows * columns if room is None else room)
    return message


def refer(tensor, at, size):
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_offset"].int64_param = 8 * at
    tensor.parameters["shared_memory_byte_size"].int64_param = size


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
