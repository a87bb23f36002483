"""Guards what the steps of an ensemble are told of its request, and what a step may change for those behind it."""

import json

import numpy as np
import pytest

from tests.engine.serving import infer, request, row, serving
from tests.engine.test_ensembles import plus, step, tensors

TELL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([json.dumps({
            "id": request.request_id(),
            "correlation": request.correlation_id(),
            "flags": request.flags(),
            "priority": request.priority(),
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters()),
        }).encode()], object))]) for request in requests]
"""

CHANGE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(
            [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())],
            parameters=PARAMETERS,
        ) for request in requests]
"""


def python_model(out):
    return (
        'backend: "python"\nmax_batch_size: 0\n'
        + tensors("input", "x", dims="[ -1, -1 ]")
        + out
        + "instance_group { kind: KIND_CPU count: 1 }\n"
    )


TOLD = tensors("output", "y", datatype="STRING", dims="[ 1 ]")
SAME = tensors("output", "y", dims="[ -1, -1 ]")


def ensemble(*steps):
    head = 'platform: "ensemble"\nmax_batch_size: 0\n' + tensors("input", "x", dims="[ -1, -1 ]") + TOLD
    return f"{head}ensemble_scheduling {{ {''.join(steps)} }}\n"


def write(root, name, program):
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(program)


pytestmark = pytest.mark.usefixtures("native_counters")


def asked(**parameters):
    message = request("e", "the id", x=row(1))
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[key], kind, value)
    return message


async def told(engine, message):
    answer = await infer(engine, message)
    assert answer.status == 0, answer.text
    return json.loads(answer.array().item()), answer.response.parameters


def sequence_of(parameters):
    """The id, and whether it starts and ends, of the parameters of a response."""
    identity = parameters["sequence_id"]
    number = getattr(identity, identity.WhichOneof("parameter_choice"))
    return number, parameters["sequence_start"].bool_param, parameters["sequence_end"].bool_param


async def test_steps_are_told_what_the_request_says(tmp_path):
    write(tmp_path, "tell", TELL)
    first = python_model(SAME).replace("python", "puppet")
    config = ensemble(step("first", {"x": "x"}, {"y": "t"}), step("tell", {"x": "t"}, {"y": "y"}))
    async with serving(tmp_path, {"first": plus(1)}, first=first, tell=python_model(TOLD), e=config) as engine:
        message = asked(sequence_id=7, sequence_start=True, priority=3, timeout=5_000_000, mine="own", other=4)
        found, parameters = await told(engine, message)
        assert (found["id"], found["correlation"], found["flags"]) == ("the id", 7, 1)
        assert (found["priority"], found["timeout"]) == (3, 5_000_000)
        assert {"mine": "own", "other": 4}.items() <= found["parameters"].items()
        assert sequence_of(parameters) == (7, True, False)
        found, _ = await told(engine, asked(sequence_id="abc", sequence_end=True))
        assert (found["correlation"], found["flags"]) == ("abc", 2)


@pytest.mark.parametrize(
    ("said", "expected"),
    [({}, (0, False, False)), ({"sequence_id": "abc", "sequence_end": True}, ("abc", False, True))],
)
async def test_each_response_names_the_sequence(tmp_path, said, expected):
    """Guards what Triton does, also without a sequence, and through an ensemble that is a step of another."""
    one = python_model(SAME).replace("python", "puppet")
    inner = ensemble(step("one", {"x": "x"}, {"y": "y"})).replace(TOLD, SAME)
    outer = ensemble(step("inner", {"x": "x"}, {"y": "y"})).replace(TOLD, SAME)
    async with serving(tmp_path, {"one": plus(1)}, one=one, inner=inner, e=outer) as engine:
        answer = await infer(engine, asked(**said))
        assert answer.status == 0, answer.text
        assert sequence_of(answer.response.parameters) == expected


@pytest.mark.parametrize("identity", [12, "a name"])
async def test_a_step_may_change_the_sequence_for_those_behind_it(tmp_path, identity):
    parameters = {"sequence_id": identity, "sequence_start": True, "unrelated": 1}
    write(tmp_path, "tell", TELL)
    write(tmp_path, "change", CHANGE.replace("PARAMETERS", repr(parameters)))
    between = python_model(SAME).replace("python", "puppet")
    config = ensemble(
        step("change", {"x": "x"}, {"y": "t"}),
        step("between", {"x": "t"}, {"y": "u"}),
        step("tell", {"x": "u"}, {"y": "y"}),
    )
    configs = {"change": python_model(SAME), "between": between, "tell": python_model(TOLD), "e": config}
    async with serving(tmp_path, {"between": plus(1)}, **configs) as engine:
        found, shown = await told(engine, asked(sequence_id=7, sequence_end=True))
        assert (found["correlation"], found["flags"]) == (identity, 1)
        assert sequence_of(shown) == (identity, True, False)


async def test_a_change_of_the_wrong_type_fails_the_request(tmp_path):
    write(tmp_path, "tell", TELL)
    write(tmp_path, "change", CHANGE.replace("PARAMETERS", '{"sequence_start": "yes"}'))
    config = ensemble(step("change", {"x": "x"}, {"y": "t"}), step("tell", {"x": "t"}, {"y": "y"}))
    async with serving(tmp_path, {}, change=python_model(SAME), tell=python_model(TOLD), e=config) as engine:
        answer = await infer(engine, request("e", x=np.ones((1, 1), np.int64)))
        assert answer.text == "in ensemble 'e', expect parameter 'sequence_start' to be TRITONSERVER_PARAMETER_BOOL"
