"""Queue policies and log settings as Triton's own client sees them, on both doors of a real server.

The model executes one request at a time and takes long; everything else waits, or is refused.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from server.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request

CONFIG = """
backend: "identity"
max_batch_size: 1
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
parameters { key: "execute_delay_ms" value { string_value: "DELAY" } }
"""
POLICIES = {
    "hasty": "default_queue_policy { default_timeout_microseconds: 20000 }",
    "patient": "default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: true }",
    "short": "default_queue_policy { max_queue_size: 1 }",
    "levels": "priority_levels: 2 default_priority_level: 2 "
    "priority_queue_policy { key: 1 value { default_timeout_microseconds: 20000 } }",
    "ordered": "preserve_ordering: true",
    "unheard": "",
}
DELAYS_MS = {"hasty": 2000, "patient": 2000, "levels": 2000, "short": 2000, "ordered": 20, "unheard": 0}
BUSY = "StatusCode.UNAVAILABLE"


@pytest.fixture(scope="module", params=doors.NAMES)
def server(request, tmp_path_factory):
    repository = tmp_path_factory.mktemp("policies")
    for name, policy in POLICIES.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(
            CONFIG.replace("DELAY", str(DELAYS_MS[name])) + f"dynamic_batching {{ {policy} }}\n"
        )
    with doors.running_server(request.param, repository) as process:
        yield process


@pytest.fixture
def client(server):
    with doors.connected(server) as client:
        yield client


def inputs():
    return [triton.InferInput("INPUT0", [1, 1], "FP32").set_data_from_numpy(np.zeros((1, 1), np.float32))]


def occupied(client, model: str) -> None:
    """Have one more request keep the model busy."""
    client.async_infer(model, inputs(), lambda result, error: None)


def refused(client, model: str, **arguments) -> tuple[str, str]:
    """Status and text of a request that is sent while others keep the model busy."""
    occupied(client, model)
    with pytest.raises(InferenceServerException) as error:
        client.infer(model, inputs(), **arguments)
    return error.value.status(), error.value.message()


def test_timeout_of_the_policy(client):
    status, text = refused(client, "hasty")
    assert (status, text) == (
        BUSY,
        "Request timeout expired: waited 20000 us in the queue of model 'hasty' version 1, as long as it may",
    )


def test_timeout_of_the_request(client):
    status, text = refused(client, "patient", timeout=10_000)
    assert status == BUSY
    assert text.startswith("Request timeout expired: waited 10000 us in the queue of model 'patient'")


def test_timeout_of_a_level(client):
    status, text = refused(client, "levels", priority=1)
    assert status == BUSY
    assert text.startswith("Request timeout expired")


def test_rich_form_of_a_timeout(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        calls = [stub.ModelInfer.future(request("hasty", floats(1))) for _ in range(3)]
        errors = [call for call in calls if call.code() is grpc.StatusCode.UNAVAILABLE]
        assert errors
        for error in errors:
            rich = richerrors.of(error)
            assert (rich.reason, rich.retry_seconds) == ("QUEUE_TIMEOUT", 0.1)


def test_full_queue(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = Stub(channel)
        ended: queue.SimpleQueue = queue.SimpleQueue()
        calls = [stub.ModelInfer.future(request("short", floats(1))) for _ in range(4)]
        for call in calls:
            call.add_done_callback(ended.put)
        for _ in range(2):  # or three: they may all have come before the first was taken
            error = ended.get(timeout=60)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error.details() == (
                "Exceeds maximum queue size: model 'short' version 1 has 1 requests waiting, which is its limit"
            )
        assert not all(call.done() for call in calls)
        for call in calls:
            call.cancel()


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
        client.infer("ordered", inputs())  # the line of the first is written by then
        line = server.says("batch of model 'ordered' version 1 on ordered_0_0")
        assert " V " in line
        assert "inferd.batch]" in line
    finally:
        client.update_log_settings({"log_verbose_level": 0, "log_format": "default"})
    for _ in range(3):
        client.infer("unheard", inputs())
    client.update_log_settings({"log_verbose_level": 2})
    try:
        before = sum("batch of model 'ordered'" in line for line in server.lines)
        for _ in range(4):
            client.infer("ordered", inputs())
        server.says("batch of model 'ordered'", count=before + 3)  # behind all that was written before
    finally:
        client.update_log_settings({"log_verbose_level": 0})
    # the line of the last batch may be written after its answer, and so when the level is up again
    assert sum("batch of model 'unheard'" in line for line in server.lines) <= 1


@pytest.mark.parametrize(
    ("name", "value", "code", "text"),
    [
        ("log_file", {"string_param": "/tmp/x"}, "UNIMPLEMENTED", "log file location can not be updated"),
        ("log_info", {"string_param": "yes"}, "INVALID_ARGUMENT", "expect boolean for log_info"),
        ("log_verbose_level", {"bool_param": True}, "INVALID_ARGUMENT", "expect int32 for log_verbose_level"),
        ("log_format", {"bool_param": True}, "INVALID_ARGUMENT", "expect string for log_format"),
        ("log_format", {"string_param": "xml"}, "INVALID_ARGUMENT", "invalid argument for log_format, got: xml"),
        ("log_colour", {"bool_param": True}, "INVALID_ARGUMENT", "unknown log setting 'log_colour'"),
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
        assert stub.LogSettings(pb.LogSettingsRequest()) == before


def test_answers_in_order_on_a_stream(server):
    """Many streams at once; each gets its own answers in the order of its requests."""

    def one(channel, number):
        stub = Stub(channel)
        sent = [request("ordered", floats(number), id=str(n)) for n in range(2)]
        return [response.infer_response.id for response in stub.ModelStreamInfer(iter(sent))]

    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda n: one(channel, n), range(3))) == [["0", "1"]] * 3
