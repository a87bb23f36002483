"""Queue policies and log settings as Triton's own client sees them, on both doors of a real server.

The model executes one request, until the test lets it go on; everything else waits, or is refused.
"""

from __future__ import annotations

import contextlib
import queue
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from inferd_client.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request
from tests.conformance.held import add_held_model
from tests.waiting import look_until

CONFIG = """
backend: "identity"
max_batch_size: 1
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
parameters { key: "execute_delay_ms" value { string_value: "20" } }
"""
POLICIES = {
    "hasty": "default_queue_policy { default_timeout_microseconds: 20000 }",
    "patient": "default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: true }",
    "levels": "priority_levels: 2 default_priority_level: 2 "
    "priority_queue_policy { key: 1 value { default_timeout_microseconds: 20000 } }",
    "ordered": "preserve_ordering: true",
}
BUSY = "StatusCode.UNAVAILABLE"
BATCH = "model ordered, instance ordered_0_0, executing"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    for name, policy in POLICIES.items():
        config = f"{CONFIG}dynamic_batching {{ {policy} }}\n"
        if name == "ordered":
            (folder / name / "1").mkdir(parents=True)
            (folder / name / "config.pbtxt").write_text(config)
        else:
            add_held_model(folder, name, config.replace("identity", "python"))
    return folder


@pytest.fixture(scope="module", params=doors.NAMES)
def server(request, repository):
    with doors.running_server(request.param, repository) as process:
        yield process


@pytest.fixture
def occupied(server, repository):
    """Keeps a model busy with a request."""

    @contextlib.contextmanager
    def occupy(model):
        go = repository / model / "go"
        began = go.with_name("began")
        ended = queue.SimpleQueue()

        def begin():
            client.async_infer(model, inputs(), lambda result, error: ended.put(error))

        def is_busy():
            if not ended.empty():  # it has waited for too long itself
                ended.get()
                begin()
            return began.exists()

        for left in (began, go):  # not at the end: what has waited for the request is executed then
            left.unlink(missing_ok=True)
        with doors.connected(server) as client:
            begin()
            look_until(is_busy)
            try:
                yield
            finally:
                go.touch()
                assert ended.get(timeout=60) is None

    return occupy


@pytest.fixture
def client(server):
    with doors.connected(server) as client:
        yield client


def inputs():
    return [triton.InferInput("INPUT0", [1, 1], "FP32").set_data_from_numpy(np.zeros((1, 1), np.float32))]


@pytest.fixture
def refused(client, occupied):
    """Status and text of a request that is sent while another keeps the model busy."""

    def refused(model, **arguments):
        with occupied(model), pytest.raises(InferenceServerException) as error:
            client.infer(model, inputs(), **arguments)
        return error.value.status(), error.value.message()

    return refused


def test_timeout_of_the_policy(refused):
    status, text = refused("hasty")
    assert (status, text) == (
        BUSY,
        "Request timeout expired: waited 20000 us in the queue of model 'hasty' version 1, as long as it may",
    )


def test_timeout_of_the_request(refused):
    status, text = refused("patient", timeout=10_000)
    assert status == BUSY
    assert text.startswith("Request timeout expired: waited 10000 us in the queue of model 'patient'")


def test_timeout_of_a_level(refused):
    status, text = refused("levels", priority=1)
    assert status == BUSY
    assert text.startswith("Request timeout expired")


def test_rich_form_of_a_timeout(server, occupied):
    with occupied("hasty"), grpc.insecure_channel(server.address) as channel:
        call = Stub(channel).ModelInfer.future(request("hasty", floats(1)))
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        rich = richerrors.of(call)
        assert (rich.reason, rich.retry_seconds) == ("QUEUE_TIMEOUT", 0.1)


def test_model_config_shows_the_policy(client):
    config = client.get_model_config("patient").config
    policy = config.dynamic_batching.default_queue_policy
    assert (policy.default_timeout_microseconds, policy.allow_timeout_override) == (60_000_000, True)


# -- log settings --


def test_log_settings_are_shown_and_changed(server, client):
    before = client.get_log_settings(as_json=True)["settings"]
    assert before == {
        "log_file": {"string_param": ""},
        "log_info": {"bool_param": True},
        "log_warning": {"bool_param": True},
        "log_error": {"bool_param": True},
        "log_verbose_level": {},
        "log_format": {"string_param": "default"},
    } or before["log_verbose_level"] == {"uint32_param": 0}
    changed = client.update_log_settings({"log_verbose_level": 2, "log_format": "ISO8601"}, as_json=True)["settings"]
    assert changed["log_verbose_level"] == {"uint32_param": 2}
    try:
        client.infer("ordered", inputs())
        line = server.says(BATCH)
        assert " V " in line
        assert "inferd.batch]" in line
    finally:
        client.update_log_settings({"log_verbose_level": 0, "log_format": "default"})
    client.infer("ordered", inputs())  # the line of a batch comes before its answers
    client.update_log_settings({"log_verbose_level": 2})
    try:
        client.infer("ordered", inputs())
        server.says(BATCH, count=2)  # lines come in order: that of the batch between them would have come
        assert sum(BATCH in line for line in server.lines) == 2
    finally:
        client.update_log_settings({"log_verbose_level": 0})


@pytest.mark.parametrize(
    ("name", "value", "code", "text"),
    [
        ("log_file", {"string_param": "/tmp/x"}, "UNIMPLEMENTED", "log file location can not be updated"),
        ("log_info", {"string_param": "yes"}, "INVALID_ARGUMENT", "expect boolean for log_info"),
        ("log_verbose_level", {"bool_param": True}, "INVALID_ARGUMENT", "expect int32 for log_verbose_level"),
        ("log_format", {"bool_param": True}, "INVALID_ARGUMENT", "expect string for log_format"),
        ("log_format", {"string_param": "xml"}, "INVALID_ARGUMENT", "invalid argument for log_format, got: xml"),
        ("log_colour", {"bool_param": True}, "INVALID_ARGUMENT", "unknown log setting 'log_colour'"),
        ("log\0colour", {"bool_param": True}, "INVALID_ARGUMENT", "unknown log setting 'log colour'"),
    ],
)
def test_wrong_log_settings_change_nothing(server, name, value, code, text):
    with grpc.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        before = stub.LogSettings(pb.LogSettingsRequest())
        message = pb.LogSettingsRequest(settings={name: pb.LogSettingsRequest.SettingValue(**value)})
        message.settings["log_error"].bool_param = False
        with pytest.raises(grpc.RpcError) as error:
            stub.LogSettings(message)
        assert error.value.code() is grpc.StatusCode[code]
        assert error.value.details().startswith(text)
        richerrors.of(error.value)  # checks that the details repeat the text
        assert stub.LogSettings(pb.LogSettingsRequest()) == before


def test_answers_in_order_on_a_stream(server):
    """Many streams at once; each gets its own answers in the order of its requests."""

    def one(channel, number):
        stub = Stub(channel)
        sent = [request("ordered", floats(number), id=str(n)) for n in range(2)]
        return [response.infer_response.id for response in stub.ModelStreamInfer(iter(sent))]

    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda n: one(channel, n), range(3))) == [["0", "1"]] * 3
