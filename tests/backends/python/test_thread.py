"""In-process mode: the same `model.py` on a thread of the server."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from tests.backends.python.served import CONFIG, add_model, ask, serving

IN_PROCESS = CONFIG + 'parameters { key: "EXECUTION_MODE" value { string_value: "in-process" } }\n'

# Answers with its input plus the number in the model's folder, from wherever the input says.
MODEL = """
import os, threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.pid = os.getpid()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def number(self):
        return int(open(os.path.join(pb_utils.get_model_dir(), "number.txt")).read())

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if x.flat[0] == -1:
            raise ValueError("a mistake of the model")
        if x.flat[0] == -2:
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[self.pid]]))])
        if x.flat[0] == -3:
            raise SystemExit(1)
        found = []
        thread = threading.Thread(target=lambda: found.append(self.number()))
        thread.start()
        thread.join()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x + self.number() + 100 * found[0])])
"""


def add(root, name, number=0, config=IN_PROCESS, code=MODEL):
    (add_model(root, name, code, config) / "number.txt").write_text(str(number))


async def test_models_live_side_by_side_in_the_server(tmp_path):
    add(tmp_path, "one", 1)
    add(tmp_path, "two", 2)
    async with serving(tmp_path) as engine:
        answers = await asyncio.gather(*(ask(engine, i, model=name) for i in range(5) for name in ("one", "two")))
        values = [answer.array().item() for answer in answers]
        assert values == [value for i in range(5) for value in (i + 101, i + 202)]
        assert (await ask(engine, -2, model="one")).array().item() == os.getpid()
        assert any(name.startswith("inferd_model_") for name in sys.modules)
    assert not any(name.startswith("inferd_model_") for name in sys.modules)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("one", "two"))]


@pytest.mark.parametrize(("value", "text"), [(-1, "ValueError: a mistake of the model"), (-3, "SystemExit: 1")])
async def test_what_it_raises_fails_its_batch_only(tmp_path, value, text):
    add(tmp_path, "m")
    async with serving(tmp_path) as engine:
        answer = await ask(engine, value)
        assert answer.status == 13
        assert text in answer.text
        assert (await ask(engine, 7)).array().item() == 7


# Speaks past the module to the server, as no model should; at the second time it answers.
NONSENSE = """
import sys
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        if x.flat[0] == -1:
            link = sys.modules["inferd.backends.python.worker.runtime"].current().channel._link
            link.send(link.work, 200)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""


async def test_a_thread_that_sends_nonsense_is_replaced(tmp_path):
    add(tmp_path, "m", code=NONSENSE)
    async with serving(tmp_path) as engine:
        answer = await asyncio.wait_for(ask(engine, -1), 30)
        assert (answer.status, "its worker was ended because it sent" in answer.text) == (14, True)
        assert (await asyncio.wait_for(ask(engine, 7), 30)).array().item() == 7


async def test_a_large_tensor_reaches_a_model_on_a_thread(tmp_path):
    add(tmp_path, "m")
    async with serving(tmp_path) as engine:
        assert (await ask(engine, *range(100_000))).array()[0, -1] == 99_999


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("EXECUTION_MODE", "thread", "expected process or in-process"),
        ("EXECUTION_ENV_PATH", "env", "is the server's own interpreter"),
        ("EXECUTION_TIMEOUT_SECONDS", "3", "nothing can end a thread"),
    ],
)
async def test_what_does_not_go_with_it_is_refused(tmp_path, key, value, text):
    config = IN_PROCESS if key != "EXECUTION_MODE" else CONFIG
    add(tmp_path, "m", config=config + f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    async with serving(tmp_path, problems=1) as engine:
        assert text in str(engine.index())


async def test_the_time_limit_of_all_models_does_not_hold_for_it_and_the_log_says_so(tmp_path, caplog):
    caplog.set_level("INFO", "inferd.python")
    add(tmp_path, "m", config=IN_PROCESS)
    async with serving(tmp_path, {"execution-timeout-seconds": "3"}):
        pass
    assert "model 'm': execution-timeout-seconds does not hold for it" in caplog.text


async def test_variables_that_only_processes_get_are_not_told(tmp_path, caplog):
    caplog.set_level("INFO", "inferd.python")
    add(tmp_path, "m", config=IN_PROCESS.replace("count: 1", "count: 2"))
    async with serving(tmp_path):
        pass
    assert "m_0_1: thread is ready" in caplog.text
    assert "OMP_NUM_THREADS" not in caplog.text
