"""Backends compiled for Triton's C API: a probe in C, compiled here, behind a real server; and how libraries are found.

What the probe does is told by the first number of its input, see triton_probe.c.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from backends.api import BackendError
from backends.loader import BackendLoader
from tests.backends.models import source
from tests.conformance import doors

ROOT = Path(__file__).resolve().parents[2]
CC = os.environ.get("CC", "cc").split()
FAILS, FAILS_WITH_ALL, CRASHES, FORGETS, LATER, SHORT, ASKS_FOR_MORE, COUNTS = range(-1, -9, -1)

BATCHED = """
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }
dynamic_batching { max_queue_delay_microseconds: 50000 }
"""
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
SUM = """
max_batch_size: 1
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching {
  state {
    input_name: "sum" output_name: "sum_out" data_type: TYPE_INT32 dims: [ 1 ]
    initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" }
  }
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The folder of backends with libtriton_probe.so in it."""
    if shutil.which(CC[-1]) is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("backends")
    (folder / "probe").mkdir()
    build(folder / "probe" / "libtriton_probe.so", "-I", str(ROOT), str(ROOT / "tests/backends/triton_probe.c"))
    return folder


def build(library, *arguments):
    flags = ["-std=gnu11", "-shared", "-fPIC", "-O1", "-g", "-Wall", "-Werror", "-fvisibility=default", "-pthread"]
    subprocess.run([*CC, *flags, "-o", str(library), *arguments], check=True)


def add_model(root, name, config, backend="probe"):
    version = root / name / "1"
    version.mkdir(parents=True)
    group = "instance_group { count: 1 kind: KIND_CPU }"
    (root / name / "config.pbtxt").write_text(f'backend: "{backend}"\n{group}\n{config}')
    return version


@pytest.fixture(scope="module")
def server(probe, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, config in (("batched", BATCHED), ("texts", TEXTS), ("stream", STREAM), ("sum", SUM), ("bare", "")):
        add_model(root, name, config)
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


def ask(client, *numbers, model="batched", **more):
    array = np.array([numbers], np.int32)
    return client.infer(model, [tensor(array)], **more)


def tensor(array):
    return triton.InferInput("x", list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


def refusal(client, *numbers, **more):
    with pytest.raises(InferenceServerException) as caught:
        ask(client, *numbers, **more)
    return caught.value


def said(answer):
    """The response's parameters."""
    return {
        key: getattr(each, each.WhichOneof("parameter_choice"))
        for key, each in answer.get_response().parameters.items()
    }


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


def test_strings(client):
    array = np.array([b"", "ü".encode(), b"a" * 70_000], object)
    assert client.infer("texts", [tensor(array)]).as_numpy("y").tolist() == array.tolist()


def test_requests_are_one_batch(client):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: ask(client, number), range(8)))
    assert [int(answer.as_numpy("y")[0, 0]) for answer in answers] == list(range(8))
    assert max(said(answer)["batch"] for answer in answers) > 1


def test_a_response_that_comes_after_the_execution(client):
    assert ask(client, LATER, 4).as_numpy("y").tolist() == [[LATER, 4]]


def test_a_decoupled_model_answers_by_a_factory_after_it_has_released_the_request(client):
    assert streamed(client, 0) == []
    assert streamed(client, 100) == list(range(100))


def streamed(client, count):
    found = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)))
    try:
        array = np.array([[count]], np.int32)
        client.async_stream_infer("stream", [tensor(array)], enable_empty_final_response=True)
        numbers = []
        while True:
            result, error = found.get(timeout=60)
            assert error is None, error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return numbers
            numbers.append(int(result.as_numpy("y")[0, 0]))
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


def test_the_backend_completes_a_configuration(client):
    config = client.get_model_config("bare").config
    assert (config.max_batch_size, config.input[0].name, config.output[0].name) == (4, "x", "y")
    assert ask(client, 5, model="bare").as_numpy("y").tolist() == [[5]]


def test_a_library_that_lies_with_the_model(client):
    assert ask(client, 6, model="beside").as_numpy("y").tolist() == [[6]]


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
        (ASKS_FOR_MORE, "TRITONSERVER_ServerInferAsync is not served by inferd"),
    ],
)
def test_what_a_backend_does_wrong_fails_its_request(client, number, text):
    assert text in refusal(client, number).message()
    assert ask(client, 1).as_numpy("y").tolist() == [[1]]


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
