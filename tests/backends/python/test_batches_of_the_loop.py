"""The loop itself sends batches to workers and reads results; what takes time it leaves to the instance's thread."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from inferd.backends.python.process import WORK
from inferd.backends.python.worker import protocol
from tests.backends.python.served import CONFIG, MISCHIEF, add_model, ask, serving
from tests.engine.serving import infer, infer_all, request, row
from tests.waiting import until

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
MANY = 100
SEVERAL_OUTPUTS = f"""
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.Tensor(f"y{{i}}", np.full((1, 20_000), i)) for i in range({MANY})]
        return [pb_utils.InferenceResponse(tensors) for _ in requests]
"""


def state(thread: str) -> tuple[str, int]:
    """Whether this process's thread of this name sleeps, and how often it has gone to sleep."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another one that has just ended
            lines = (task / "status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines)
            if status["Name"] == thread:
                return status["State"], int(status["voluntary_ctxt_switches"])
    raise AssertionError(f"there is no thread {thread}")


def sleeps(thread: str) -> int:
    """How often it has gone to sleep."""
    return state(thread)[1]


async def settle(engine) -> int:
    """Ask until the thread of the instance rests while the loop does its work; how often it has slept by then."""
    for _ in range(1000):
        before = state("m_0_0")
        assert (await ask(engine, 1)).status == 0
        if state("m_0_0") == before and before[0].startswith("S"):
            return before[1]
    raise AssertionError("every request wakes the thread of the instance")


async def test_small_batches_pass_no_thread_of_the_server(tmp_path):
    async with serving(tmp_path, m=ECHO) as engine:
        before = await settle(engine)
        answers = await infer_all(engine, *(request(x=row(i)) for i in range(100)))
        assert [answer.array().tolist() for answer in answers] == [[[i]] for i in range(100)]
        assert sleeps("m_0_0") == before


async def test_inputs_that_take_long_to_copy_are_left_to_the_thread(tmp_path):
    async with serving(tmp_path, m=ECHO) as engine:
        before = await settle(engine)
        data = np.arange(100_000).reshape(1, -1)
        answer = await infer(engine, request(x=data))
        assert (answer.array() == data).all()
        assert (await ask(engine, 7)).array().tolist() == [[7]]
        await until(lambda: sleeps("m_0_0") > before)  # the thread goes to sleep again when its batch is answered
        await settle(engine)  # and it gives the instance back


async def test_what_queues_up_meanwhile_is_served(tmp_path):
    async with serving(tmp_path, m=ECHO) as engine:
        await settle(engine)
        large = np.arange(100_000).reshape(1, -1)
        asked = [large if i % 7 == 0 else row(i) for i in range(100)]
        answers = await infer_all(engine, *(request(x=data) for data in asked))
        assert all((answer.array() == data).all() for answer, data in zip(answers, asked, strict=True))


async def test_a_worker_is_given_memory_as_often_as_it_asks(tmp_path):
    outputs = "".join(f'output {{ name: "y{i}" data_type: TYPE_INT64 dims: [ -1 ] }}\n' for i in range(MANY))
    config = CONFIG.replace('output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }\n', outputs)
    add_model(tmp_path, "m", SEVERAL_OUTPUTS, config)
    async with serving(tmp_path) as engine:
        for _ in range(3):
            answer = await ask(engine, 1)
            assert [answer.array(f"y{i}")[0, -1] for i in range(MANY)] == list(range(MANY))


async def test_workers_die_while_the_loop_has_given_them_a_batch(tmp_path):
    add_model(tmp_path, "m", MISCHIEF, CONFIG.replace("count: 1", "count: 2"))
    async with serving(tmp_path) as engine:
        await settle(engine)
        values = [-1 if i % 50 == 25 else i for i in range(200)]
        answers = await infer_all(engine, *(request(x=row(value)) for value in values))
        for value, answer in zip(values, answers, strict=True):
            if answer.status == 0:
                assert answer.array().tolist() == [[value]]
            else:
                assert answer.status == 14, answer.text
                assert "m_0_" in answer.text
        assert all(answers[i].status == 14 for i, value in enumerate(values) if value == -1)


@pytest.mark.parametrize(
    "packet",
    [
        b"too short",
        protocol.HEAD.pack(protocol.HELLO, 0, 0, 0, 1, 0),
        protocol.HEAD.pack(protocol.DONE, 0, 0, 0, 99, 0),  # of another batch
        protocol.HEAD.pack(protocol.DONE, 0, 0, 100, 2, 0) + b"less",
        protocol.HEAD.pack(protocol.DONE, 0, 0, 4, 2, 0) + b"less",  # than the head of a response
        protocol.HEAD.pack(protocol.DONE, protocol.IN_ARENA, 0, 4096, 2, 0),  # where nothing was granted
        protocol.HEAD.pack(protocol.DONE, protocol.IN_ARENA, 0, 100, 2, 2**64 - 5),
    ],
)
async def test_a_worker_that_answers_nonsense_is_ended(tmp_path, packet):
    code = f"""
    import os, time
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            if requests[0].inputs()[0].as_numpy().flat[0] < 0:
                os.write({WORK}, {packet!r})
                time.sleep(3600)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
    """
    async with serving(tmp_path, m=code) as engine:
        assert (await ask(engine, 1)).status == 0
        answer = await ask(engine, -1)
        assert answer.status == 14
        assert "message: its worker was ended because it sent" in answer.text
        assert (await ask(engine, 1)).array().tolist() == [[1]]


async def test_the_model_goes_when_the_loop_has_done_what_it_has_begun(tmp_path):
    async with serving(tmp_path, m=ECHO) as engine:
        await settle(engine)
        asked = asyncio.gather(*(ask(engine, i) for i in range(100)))
        await asyncio.sleep(0)
        await engine.close()
        assert [answer.array().tolist() for answer in await asked] == [[[i]] for i in range(100)]


DELAYED = """
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: %d }
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        rows = sum(r.inputs()[0].shape()[0] for r in requests)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[rows]]))]) for _ in requests]
"""


async def test_requests_are_waited_for_without_a_thread(tmp_path):
    add_model(tmp_path, "m", COUNT, CONFIG + DELAYED % 1000)
    async with serving(tmp_path) as engine:
        before = await settle(engine)
        assert (await ask(engine, 1)).array().tolist() == [[1]]  # after the delay
        answers = await infer_all(engine, *(request(x=row(i)) for i in range(4)))
        assert [answer.array().tolist() for answer in answers] == [[[4]]] * 4
        assert sleeps("m_0_0") == before


async def test_what_waits_for_others_goes_when_the_model_does(tmp_path):
    add_model(tmp_path, "m", COUNT, CONFIG + DELAYED % 3_600_000_000)
    async with serving(tmp_path) as engine:
        full = await infer_all(engine, *(request(x=row(i)) for i in range(4)))
        assert [answer.array().tolist() for answer in full] == [[[4]]] * 4
        waiting = asyncio.gather(*(ask(engine, i) for i in range(3)))
        await asyncio.sleep(0)
        await engine.close()
        assert [answer.array().tolist() for answer in await waiting] == [[[3]]] * 3
