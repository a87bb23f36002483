"""Backends compiled for Triton's C API that ask other models, see triton_caller.c."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.backends.triton_models import add_model, ask, compile_backend, said
from tests.conformance import doors

FAILS, KEEPS = -1, -9  # what the probe does, see triton_probe.c
TENSORS = """
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }
"""
STREAM = TENSORS + "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    backends, root = tmp_path_factory.mktemp("backends"), tmp_path_factory.mktemp("models")
    for name in ("probe", "caller"):
        compile_backend(backends, name)
    add_model(root, "probe", TENSORS)
    add_model(root, "stream", STREAM)
    add_model(root, "caller", TENSORS, "caller", count=2)
    with doors.running_server("native", root, f"--backend-directory={backends}") as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def call(client, asked, *numbers, **how):
    return ask(client, *numbers, model="caller", parameters={"model": asked, **how})


def refusal(client, asked, *numbers, **how):
    with pytest.raises(InferenceServerException) as caught:
        call(client, asked, *numbers, **how)
    return caught.value


@pytest.mark.parametrize("how", [{}, {"later": "yes"}], ids=["from the execution", "from a thread of its own"])
def test_what_another_model_answers(client, how):
    for numbers in ([1, 2, 3], list(range(4000))):  # in a packet, and in memory of the arena
        answer = call(client, "probe", *numbers, **how)
        assert answer.as_numpy("y").tolist() == [numbers]
        assert said(answer) == {"ready": True, "decoupled": False, "responses": 1, "buffers": 0}


def test_more_responses_than_may_be_under_way(client):
    answer = call(client, "stream", 100)
    assert answer.as_numpy("y").tolist() == [list(range(100))]
    assert said(answer) == {"ready": True, "decoupled": True, "responses": 100, "buffers": 0}


def test_a_decoupled_model_that_ends_without_a_response(client):
    answer = call(client, "stream", 0)
    assert (answer.as_numpy("y").size, said(answer)["responses"]) == (0, 0)


def test_many_calls_at_a_time(client):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: call(client, "probe", number, later="yes"), range(40)))
    assert [int(answer.as_numpy("y")[0, 0]) for answer in answers] == list(range(40))


def test_the_error_of_another_model_comes_with_its_code(client):
    error = refusal(client, "probe", FAILS)
    assert "the probe does not find it" in error.message()
    assert error.status() == "StatusCode.NOT_FOUND"


def test_a_model_that_there_is_not(client):
    assert "none" in refusal(client, "none", 1).message()


def test_a_call_that_is_cancelled(client):
    assert refusal(client, "probe", KEEPS, cancel="yes").status() == "StatusCode.CANCELLED"


def test_an_allocator_that_has_no_memory(client):
    assert "the caller has no memory for seven" in refusal(client, "probe", *range(7)).message()
    assert call(client, "probe", 1).as_numpy("y").tolist() == [[1]]
