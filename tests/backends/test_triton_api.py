"""Backends compiled for Triton's C API: a probe in C, compiled here, behind a real server; and how libraries are found.

What the probe does is told by the first number of its input, see triton_probe.c.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import queue
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from inferd.backends import python
from inferd.backends.api import BackendError
from inferd.backends.loader import BackendLoader
from tests.backends.models import source
from tests.backends.triton_models import add_model, ask, build, compile_backend, said, tensor
from tests.conformance import doors
from tests.waiting import wait_until

FAILS, FAILS_WITH_ALL, CRASHES, FORGETS, LATER, SHORT, ASKS_FOR_MORE, COUNTS, KEEPS = range(-1, -10, -1)
TWICE, REPEATS, UNKNOWN_STATE, RESCHEDULES, RESCHEDULES_LATE, ANSWERS_AND_RESCHEDULES = range(-10, -16, -1)
GETS_UNREADY, GETS_READY, HANGS, REPORTS, PREPARES, IS_PREPARED, SENDS_PREPARED = range(-16, -23, -1)

BATCHED = """
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }
dynamic_batching { max_queue_delay_microseconds: 50000 }
"""
PAIRS = BATCHED.replace("50000", "60000000 preferred_batch_size: [ 2 ]")
TEXTS = """
input { name: "x" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "y" data_type: TYPE_STRING dims: [ -1 ] }
"""
STREAM = """
max_batch_size: 1
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }
model_transaction_policy { decoupled: true }
"""
PARTS = STREAM.replace(
    "model_transaction",
    'output [ { name: "odd" data_type: TYPE_BOOL dims: [ 5 ] }, '
    '{ name: "halves" data_type: TYPE_FP64 dims: [ 3 ] } ]\nmodel_transaction',
)
SUM = """
max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching {
  oldest { max_candidate_sequences: 4 }
  max_sequence_idle_microseconds: 600000000
  state {
    input_name: "sum" output_name: "sum_out" data_type: TYPE_INT32 dims: [ 1 ]
    initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" }
  }
}
"""
IN_PLACE = SUM.replace("sum", "same").replace("  state {", "  state { use_same_buffer_for_input_output: true")
ROUNDS = """
max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching {
  oldest { max_candidate_sequences: 4 }
  iterative_sequence: true
  state {
    input_name: "rounds" output_name: "rounds_out" data_type: TYPE_INT32 dims: [ 1 ]
    initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" }
  }
}
"""
LIMITED = BATCHED + 'parameters { key: "EXECUTION_TIMEOUT_SECONDS" value { string_value: "1" } }'
CHAIN = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }
ensemble_scheduling { step [
  { model_name: "several" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "z" } },
  { model_name: "several" model_version: -1 input_map { key: "x" value: "z" } output_map { key: "y" value: "y" } }
] }
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The folder of backends with libtriton_probe.so in it."""
    folder = tmp_path_factory.mktemp("backends")
    compile_backend(folder, "probe")
    return folder


@pytest.fixture(scope="module")
def server(probe, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, config in (
        ("batched", BATCHED),
        ("texts", TEXTS),
        ("stream", STREAM),
        ("reports", STREAM),
        ("parts", PARTS),
        ("sum", SUM),
        ("bare", ""),
    ):
        add_model(root, name, config)
    add_model(root, "in_place", IN_PLACE)
    one_at_a_time = IN_PLACE.replace("max_batch_size: 4", "max_batch_size: 1")
    add_model(root, "in_turns", one_at_a_time + "model_transaction_policy { decoupled: true }")
    add_model(root, "pairs", PAIRS)
    add_model(root, "rounds", ROUNDS)
    add_model(root, "countdown", ROUNDS + "model_transaction_policy { decoupled: true }")
    add_model(root, "limited", LIMITED)
    add_model(root, "several", BATCHED, count=3)
    (root / "chain" / "1").mkdir(parents=True)
    (root / "chain" / "config.pbtxt").write_text(CHAIN)
    add_model(root, "refused", BATCHED + 'parameters { key: "refuse_me" value { string_value: "yes" } }')
    beside = add_model(root, "beside", BATCHED, backend="own")
    shutil.copy(probe / "probe/libtriton_probe.so", beside.parent / "libtriton_own.so")
    build(add_model(root, "empty", BATCHED, backend="empty") / "libtriton_empty.so", "-x", "c", os.devnull)
    (add_model(root, "text", BATCHED, backend="text") / "libtriton_text.so").write_text("no library")
    add_model(root, "missing", BATCHED, backend="missing")
    add_model(root, "newer", BATCHED, backend="newer")
    options = (
        f"--backend-config=newer,library={probe}/probe/libtriton_probe.so",
        "--backend-config=newer,needs-major=2",
    )
    with doors.running_server("native", root, f"--backend-directory={probe}", *options) as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def refusal(client, *numbers, **more):
    with pytest.raises(InferenceServerException) as caught:
        ask(client, *numbers, **more)
    return caught.value


# -- answers


def test_what_a_request_carries_reaches_the_backend_and_comes_back(client):
    parameters = {"text": "a", "flag": True, "number": 3, "share": 0.5}
    answer = ask(client, 1, 2, 3, request_id="me", parameters=parameters)
    assert answer.as_numpy("y").tolist() == [[1, 2, 3]]
    told = {"id": "me", "batch": 1, "flags": 0, "sequence": 0, "outputs": 1, "cancelled": False}
    assert said(answer) == {**told, **parameters}


def test_large_and_empty_tensors(client):
    for size in (0, 1 << 20):
        array = np.arange(size, dtype=np.int32)[None]
        assert np.array_equal(client.infer("batched", [tensor(array)]).as_numpy("y"), array)


def test_strings_pass_through_a_compiled_backend_unchanged(client):
    array = np.array([b"", "ü".encode(), b"a" * 70_000], object)
    assert client.infer("texts", [tensor(array)]).as_numpy("y").tolist() == array.tolist()


def test_requests_are_one_batch(client):
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda number: ask(client, number, model="pairs"), range(2)))
    assert [int(answer.as_numpy("y")[0, 0]) for answer in answers] == [0, 1]
    assert [said(answer)["batch"] for answer in answers] == [2, 2]


def test_a_response_that_comes_after_the_execution(client):
    assert ask(client, LATER, 4).as_numpy("y").tolist() == [[LATER, 4]]


@pytest.mark.parametrize("size", [2, 50_000])
def test_a_response_that_is_written_in_an_execution_and_sent_in_a_later_one(client, size):
    """Guards its outputs: the outputs of the executions between have other memory."""
    first = np.arange(size, dtype=np.int32)[None]
    first[0, 0] = PREPARES
    answers = queue.Queue()
    client.infer("batched", [tensor(np.zeros_like(first))])  # the server knows how much memory an execution takes
    client.async_infer("batched", [tensor(first)], lambda result, error: answers.put((result, error)))
    wait_until(lambda: ask(client, IS_PREPARED), "nothing is prepared", InferenceServerException)
    for number in range(1, 9):
        assert (client.infer("batched", [tensor(np.full_like(first, number))]).as_numpy("y") == number).all()
    ask(client, SENDS_PREPARED)
    result, error = answers.get(timeout=60)
    assert error is None
    assert np.array_equal(result.as_numpy("y"), first)


def test_a_decoupled_model_answers_by_a_factory_after_it_has_released_the_request(client):
    assert streamed(client, 0) == []
    assert streamed(client, 100) == list(range(100))


@pytest.mark.parametrize("wanted", [("y", "odd", "halves"), ("halves",), ("odd", "y"), ()])
def test_responses_of_a_decoupled_model_with_several_outputs(client, wanted):
    """Each output has its datatype, its shape and its bytes, whichever others are asked for."""
    expected = {
        "y": lambda number: [[number]],
        "odd": lambda number: [[bool(number & 1), True, False, True, False]],
        "halves": lambda number: [[number / 2, number, 2 * number]],
    }
    outputs = [triton.InferRequestedOutput(name) for name in wanted] or None
    results = responses(client, "parts", 1005, outputs)
    assert len(results) == 5
    for number, result in enumerate(results):
        found = {each.name: result.as_numpy(each.name).tolist() for each in result.get_response().outputs}
        assert found == {name: expected[name](number) for name in wanted or expected}


def test_outputs_that_the_configuration_does_not_have_are_left_out(client):
    assert [each.as_numpy("y").tolist() for each in responses(client, "stream", 1003)] == [[[0]], [[1]], [[2]]]


def streamed(client, count, model="stream"):
    return [int(result.as_numpy("y")[0, 0]) for result in responses(client, model, count)]


def responses(client, model, count, outputs=None):
    found = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)))
    try:
        array = np.array([[count]], np.int32)
        client.async_stream_infer(model, [tensor(array)], outputs=outputs, enable_empty_final_response=True)
        results = []
        while True:
            result, error = found.get(timeout=60)
            assert error is None, error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return results
            results.append(result)
    finally:
        client.stop_stream()


def test_the_state_of_a_sequence(client):
    sums = []
    for number, begins, ends in ((1, True, False), (2, False, False), (3, False, True)):
        answer = ask(client, number, model="sum", sequence_id=9, sequence_start=begins, sequence_end=ends)
        sums.append(int(answer.as_numpy("y")[0, 0]))
        assert (said(answer)["sequence"], said(answer)["flags"]) == (9, begins + 2 * ends)
        assert said(answer)["outputs"] == 1, "the state is none of the outputs that are asked for"
    assert sums == [1, 3, 6]


def test_a_state_that_does_not_fit_its_shape_fails_its_request_and_no_other_of_the_batch(client):
    """The sequence goes on from the state before."""
    ask(client, 5, model="sum", sequence_id=10, sequence_start=True)
    with ThreadPoolExecutor(2) as threads:
        wrong = threads.submit(refusal, client, 2000, model="sum", sequence_id=10)
        good = threads.submit(ask, client, 7, model="sum", sequence_id=11, sequence_start=True, sequence_end=True)
        assert "the backend gave output 'sum_out' 4 bytes, its shape [1, 2] has 8" in wrong.result().message()
        assert good.result().as_numpy("y").tolist() == [[7]]
    assert ask(client, 1, model="sum", sequence_id=10, sequence_end=True).as_numpy("y").tolist() == [[6]]


def test_a_state_has_the_same_memory_as_input_and_output_in_all_requests_of_its_sequence(client):
    """With use_same_buffer_for_input_output: a backend may write a part of it, and need not say that it has."""
    found = []
    for number in range(4):
        answer = ask(client, 5, model="in_place", sequence_id=12, sequence_start=number == 0, sequence_end=number == 3)
        found.append(int(answer.as_numpy("y")[0, 0]))
    assert found == [5, 10, 15, 20]


@pytest.mark.parametrize("number", [1, 2], ids=["response", "end"])
def test_the_memory_of_a_state_is_free_when_its_decoupled_request_has_ended(client, number):
    """The next request of the sequence has it, also after the execution, and while the backend keeps its factory."""
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))

    def first_response(given, sequence, begins, ends):
        array = np.array([[given]], np.int32)
        terms = {"sequence_id": sequence, "sequence_start": begins, "sequence_end": ends}
        client.async_stream_infer("in_turns", [tensor(array)], request_id=str(sequence), **terms)
        while True:
            result = results.get(timeout=60)
            answer = int(result.as_numpy("y")[0, 0])
            if result.get_response().id == str(sequence) and (answer or not given):  # not the end of another request
                return answer

    same = []
    for begins, ends in ((True, False), (False, False), (False, True)):
        same.append(first_response(number, 13, begins, ends))
        first_response(0, 14, True, True)
    client.stop_stream()
    assert same == [1, 1, 1]


def test_requests_that_are_rescheduled_keep_what_they_have_counted_in_their_states(client):
    with ThreadPoolExecutor(5) as threads:
        answers = list(threads.map(lambda rounds: ask(client, rounds, model="rounds"), (1, 5, 2, 40, 3)))
    assert [answer.as_numpy("y").tolist() for answer in answers] == [[[1]], [[5]], [[2]], [[40]], [[3]]]


def test_each_round_has_the_response_that_was_sent_after_its_release(client):
    """Guards streams of iterative sequences whose backend releases first and sends then, as Triton's own does."""
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    for number, rounds in enumerate((1, 4)):
        array = np.array([[rounds]], np.int32)
        client.async_stream_infer("countdown", [tensor(array)], request_id=str(number))
    client.stop_stream()
    found = collections.defaultdict(list)
    while not results.empty():
        result = results.get()
        found[result.get_response().id].append(int(result.as_numpy("y")[0, 0]))
    assert found == {"0": [0], "1": [3, 2, 1, 0]}


def test_an_output_that_comes_several_times_counts_as_it_came_last(client):
    assert ask(client, REPEATS).as_numpy("y").tolist() == [[3]]


def test_instances_of_a_model_each_have_a_worker(client):
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda number: ask(client, number, model="several"), range(60)))
    assert [int(answer.as_numpy("y")[0, 0]) for answer in answers] == list(range(60))


def test_a_step_of_an_ensemble(client):
    assert ask(client, 1, 2, 3, model="chain").as_numpy("y").tolist() == [[1, 2, 3]]
    assert refusal(client, FAILS, model="chain").status() == "StatusCode.NOT_FOUND"


def test_the_backend_completes_a_configuration(client):
    config = client.get_model_config("bare").config
    assert (config.max_batch_size, config.input[0].name, config.output[0].name) == (4, "x", "y")
    assert ask(client, 5, model="bare").as_numpy("y").tolist() == [[5]]


@pytest.mark.parametrize(("model", "times"), [("pairs", 1), ("bare", 2)])
def test_a_model_whose_configuration_is_complete_is_initialized_once(server, model, times):
    """For a backend that loads weights then; `bare` is also initialized to be completed."""
    line = f"the probe initializes '{model}'"
    assert sum(line in each for each in server.lines) == times


def test_a_library_that_lies_with_the_model(client):
    assert ask(client, 6, model="beside").as_numpy("y").tolist() == [[6]]


def test_statistics_of_responses_are_those_that_the_backend_reports(server, client):
    """The kinds of responses and the phases that Triton counts for each; reports after the end; wrong ones are refused.

    What the server has counted before the first report does not add to them.
    """
    assert streamed(client, 2, "reports") == [0, 1]
    assert streamed(client, REPORTS, "reports") == [1]
    wait_until(lambda: len(response_statistics(client)) == 8)
    assert response_statistics(client) == {
        "0": {"compute_infer": (1, 400), "compute_output": (1, 200), "success": (1, 600)},
        "1": {"compute_infer": (1, 300), "compute_output": (1, 200), "fail": (1, 500)},
        "2": {"compute_infer": (1, 700), "fail": (1, 700)},
        "3": {"compute_infer": (1, 800), "empty_response": (1, 800)},
        "4": {"cancel": (1, 900)},
        "5": {},
        "6": {},
        "7": {"compute_infer": (1, 1), "compute_output": (1, 2), "success": (1, 3)},
    }
    server.says("Response start cannot happen after compute output start")
    server.says("Compute output start cannot happen after response end")


def response_statistics(client):
    """By the response's index, the phases and kinds that have been counted: their number and nanoseconds."""
    [of_model] = client.get_inference_statistics("reports").model_stats
    return {
        index: {field.name: (value.count, value.ns) for field, value in counted.ListFields() if value.count}
        for index, counted in of_model.response_stats.items()
    }


def test_a_metric_of_the_backends(client):
    before, after = (said(ask(client, COUNTS))["counted"] for _ in range(2))
    assert after == before + 1


# -- errors


def test_an_error_of_one_request_is_its_own(client):
    error = refusal(client, FAILS)
    assert error.message() == "the probe does not find it"
    assert error.status() == "StatusCode.NOT_FOUND"


def test_an_error_of_the_execution_is_that_of_its_requests(client):
    error = refusal(client, FAILS_WITH_ALL)
    assert error.message() == "the probe is not there"
    assert error.status() == "StatusCode.UNAVAILABLE"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (FORGETS, "the backend released the request without a final response"),
        (SHORT, "the backend gave output 'y' 4 bytes, its shape [1, 9] has 36"),
        (ASKS_FOR_MORE, "TRITONSERVER_ServerMetrics is not served by inferd"),
        (UNKNOWN_STATE, "State configuration is missing for model 'batched'"),
        (
            RESCHEDULES,
            "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
            "handle such a flag.",
        ),
    ],
)
def test_what_a_backend_does_wrong_fails_its_request(client, number, text):
    assert text in refusal(client, number).message()
    assert ask(client, 1).as_numpy("y").tolist() == [[1]]


def test_a_request_that_is_rescheduled_when_its_execution_is_over_fails(client):
    with ThreadPoolExecutor(1) as threads:
        failed = threads.submit(refusal, client, RESCHEDULES_LATE, model="rounds")
        while not failed.done():  # until an execution has come after its own
            ask(client, GETS_UNREADY, model="rounds")
        assert "the backend rescheduled the request after its execution" in failed.result().message()
    ask(client, GETS_READY)


def test_a_request_that_has_its_answer_is_not_rescheduled(client):
    answer = ask(client, ANSWERS_AND_RESCHEDULES)
    assert answer.as_numpy("y").tolist() == [[ANSWERS_AND_RESCHEDULES]]


def test_what_is_sent_or_released_twice_is_refused(server, client):
    assert ask(client, TWICE, model="several").as_numpy("y").tolist() == [[TWICE]]
    server.says("the request has had its final response")
    server.says("the request has been released already")


def test_the_backend_sees_that_nobody_waits_for_a_request_any_more(server):
    with doors.connected(server) as client:
        call = client.async_infer("batched", [tensor(np.array([[KEEPS]], np.int32))], lambda *_: None)
        server.says("the probe keeps a request")
        call.cancel()
        server.says("the probe has let go of a request")
        for seconds in (1, 10, 100):
            with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
                ask(client, KEEPS, client_timeout=seconds)
            if sum("the probe keeps a request" in line for line in server.lines) > 1:
                break  # it does not keep one whose deadline passed in the queue
        server.says("the probe has let go of a request", count=2)
        assert ask(client, 1).as_numpy("y").tolist() == [[1]]


def test_whether_an_instance_is_ready_is_what_the_backend_says(client):
    assert client.is_model_ready("batched")
    ask(client, GETS_UNREADY)
    assert not client.is_model_ready("batched")
    ask(client, GETS_READY)
    assert client.is_model_ready("batched")


def test_an_execution_that_does_not_end_is_ended(client):
    assert "1 s" in refusal(client, HANGS, model="limited").message()


def test_a_crash_fails_its_request_and_the_worker_is_followed_by_another(client):
    assert "signal" in refusal(client, CRASHES).message().lower()
    for _ in range(1000):
        try:
            assert ask(client, 8).as_numpy("y").tolist() == [[8]]
            break
        except InferenceServerException as error:
            assert "UNAVAILABLE" in error.status(), error
    else:
        pytest.fail("the worker is not back")
    assert ask(client, 9, model="beside").as_numpy("y").tolist() == [[9]]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("refused", "the probe refuses this model"),
        ("newer", "the probe needs version 2 of the API"),
        ("empty", "does not define TRITONBACKEND_ModelInstanceExecute, so it is no backend"),
        ("text", r"backend 'text' cannot be loaded: .*libtriton_text.so"),
        ("missing", "unable to find backend 'missing'"),
    ],
)
def test_why_a_model_does_not_load(client, model, text):
    reasons = {each.name: each.reason for each in client.get_model_repository_index().models}
    assert re.search(text, reasons[model]), reasons[model]


# -- finding libraries


LATE = r"""
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void *TRITONSERVER_ServerModelIsReady(void *, const char *, int64_t, bool *);
void *TRITONSERVER_ServerModelTransactionProperties(void *, const char *, int64_t, uint32_t *, void **);
void *TRITONSERVER_ServerLoadModel(void *, const char *);
void *TRITONSERVER_ServerUnloadModel(void *, const char *);
void *TRITONSERVER_MetricFamilyNew(void **, int, const char *, const char *);
void *TRITONSERVER_MetricNew(void **, void *, const void **, uint64_t);
void *TRITONSERVER_GetMetricKind(void *, int *);
const char *TRITONSERVER_ErrorMessage(void *);

static void asks(void) {
    bool ready;
    uint32_t flags;
    void *made;
    int kind;
    void *errors[] = {
        TRITONSERVER_ServerModelIsReady(NULL, "m", 1, &ready),
        TRITONSERVER_ServerModelTransactionProperties(NULL, "m", 1, &flags, NULL),
        TRITONSERVER_ServerLoadModel(NULL, "m"),
        TRITONSERVER_ServerUnloadModel(NULL, "m"),
        TRITONSERVER_MetricFamilyNew(&made, 0, "name", "text"),
        TRITONSERVER_MetricNew(&made, NULL, NULL, 0),
        TRITONSERVER_GetMetricKind(NULL, &kind),
    };
    for (unsigned at = 0; at < sizeof errors / sizeof *errors; at++) puts(TRITONSERVER_ErrorMessage(errors[at]));
}

__attribute__((constructor)) static void arm(void) { atexit(asks); }
"""
LOADS_LATE = """
import ctypes, importlib, sys

sys.path += [sys.argv[1] + "/worker/modules", sys.argv[1] + "/programs"]
importlib.import_module("c_python_backend_utils")
importlib.import_module("triton_api_backend").load_host(sys.argv[2])
ctypes.CDLL(sys.argv[3])
"""


def test_a_library_asks_when_the_interpreter_has_ended(tmp_path):
    """Guards the end of the worker, which would be a crash: destructors of a library may call the API then."""
    (tmp_path / "late.c").write_text(LATE)
    build(tmp_path / "late.so", str(tmp_path / "late.c"))
    host = importlib.util.find_spec("inferd.backends.triton_api._host").origin
    folder = Path(python.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", LOADS_LATE, folder, host, tmp_path / "late.so"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()) == (0, ["the instance has ended"] * 7), done.stderr


def test_the_servers_own_backends_come_before_a_library_of_their_name_unless_it_is_named(tmp_path):
    (tmp_path / "identity").mkdir()
    library = tmp_path / "identity" / "libtriton_identity.so"
    library.touch()
    assert type(BackendLoader(directory=tmp_path).backend("identity")).__name__ == "IdentityBackend"
    named = BackendLoader({"identity": {"library": str(library)}})
    assert type(named.backend("identity")).__name__ == "TritonApiBackend"


def test_a_named_library_that_is_not_there(tmp_path):
    loader = BackendLoader({"own": {"library": str(tmp_path / "libtriton_own.so")}})
    assert loader.unknown() == []
    with pytest.raises(BackendError, match=r"backend 'own': there is no file '.*libtriton_own\.so'"):
        loader.backend("own").load(source(tmp_path))


def test_a_model_has_its_library_in_its_version_before_that_of_the_model(tmp_path):
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    for folder in (version, version.parent):
        (folder / "libtriton_own.so").touch()
    found = BackendLoader().backend_of_model("own", (version, version.parent))
    assert found._library == version / "libtriton_own.so"
    with pytest.raises(BackendError, match="unable to find backend 'other'"):
        BackendLoader().backend_of_model("other", (version, version.parent))
