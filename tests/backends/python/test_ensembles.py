"""Ensembles of Python models: one request goes to several models at once, each of which may write to what it gets."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from tests.backends.python.served import CONFIG, add_model, serving
from tests.engine.serving import infer, request
from tests.engine.test_ensembles import ensemble, step

# Adds to its input in place, and answers with that very array.
IN_PLACE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            for _ in range(10):  # each time something to be seen by whoever reads at the same time
                x += {number}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return responses
"""
NUMBERS = {"one": 1, "two": 100, "three": 10_000}
INSTANCES = CONFIG.replace("count: 1", "count: 2") + "dynamic_batching { }\n"
FAN = ensemble(
    *(step(name, {"x": "x"}, {"y": name}) for name in NUMBERS),
    step("after", {"x": "one"}, {"y": "then"}),
    outputs=(*NUMBERS, "then"),
)


@pytest.mark.parametrize("size", [3, 5_000, 200_000], ids=["inline", "in shared memory", "large"])
async def test_models_that_write_to_their_inputs_do_not_see_each_other(tmp_path, size):
    """Guards that whoever may write to memory has it alone: the steps of a fan-out, and the step behind one of them."""
    for name, number in (NUMBERS | {"after": 1_000_000}).items():
        add_model(tmp_path, name, IN_PLACE.format(number=number), INSTANCES)
    (tmp_path / "fan" / "1").mkdir(parents=True)
    (tmp_path / "fan" / "config.pbtxt").write_text(FAN)
    async with serving(tmp_path) as engine:
        rows = [np.arange(start, start + size, dtype=np.int64)[None] for start in range(0, 160, 10)]
        answers = await asyncio.gather(*(infer(engine, request("fan", x=x)) for x in rows))
        for x, answer in zip(rows, answers, strict=True):
            assert answer.status == 0, answer.text
            for name, number in NUMBERS.items():
                np.testing.assert_array_equal(answer.array(name), x + 10 * number)
            np.testing.assert_array_equal(answer.array("then"), x + 10 + 10_000_000)


async def test_an_output_that_the_next_step_does_not_take_is_refused_with_the_id_of_the_request(tmp_path):
    add_model(tmp_path, "one", IN_PLACE.format(number=1).replace('"y", x', '"y", x.astype("float32")'))
    add_model(tmp_path, "two", IN_PLACE.format(number=1))
    (tmp_path / "chain" / "1").mkdir(parents=True)
    chain = ensemble(step("one", {"x": "x"}, {"y": "between"}), step("two", {"x": "between"}, {"y": "y"}))
    (tmp_path / "chain" / "config.pbtxt").write_text(chain)
    async with serving(tmp_path) as engine:
        answer = await infer(engine, request("chain", x=np.zeros((1, 1), np.int64), request_id="me"))
    expected = (
        "in ensemble 'chain', [request id: me] inference input 'x' data-type is 'FP32', but model 'two' expects 'INT64'"
    )
    assert answer.text == expected


# Answers with the pages that its process has asked the system for so far.
FAULTS = """
import resource
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[faults]]))]) for _ in requests]
"""
NATIVE = CONFIG.replace("python", "identity") + 'parameters { key: "gather" value { string_value: "true" } }\n'


@pytest.mark.parametrize("model", ["m", "e"], ids=["from a client", "from a step"])
async def test_large_inputs_take_no_new_pages_of_the_worker(tmp_path, model):
    """What did not arrive in the shared memory is copied there once, to where the last one lay, and read there."""
    add_model(tmp_path, "m", FAULTS)
    for name, config in {
        "n": NATIVE,
        "e": ensemble(step("n", {"x": "x"}, {"y": "between"}), step("m", {"x": "between"}, {"y": "y"}), outputs=("y",)),
    }.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    async with serving(tmp_path) as engine:
        x = np.zeros((1, 1 << 17), np.int64)
        counts = []
        for _ in range(6):
            answer = await infer(engine, request(model, x=x))
            assert answer.status == 0, answer.text
            counts.append(answer.array().item())
        assert min(after - before for before, after in pairwise(counts)) < x.nbytes // 4096 // 2
