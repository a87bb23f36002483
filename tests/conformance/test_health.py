"""grpc.health.v1 with the library's own messages and stub; the library's servicer hosted unchanged."""

from __future__ import annotations

import queue
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conformance import doors
from tests.conformance.client import Control
from tests.conformance.raw import Client

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

SERVER_NAMES = ("", "inference.GRPCInferenceService")


@pytest.fixture
def health(channel):
    return health_pb2_grpc.HealthStub(channel)


class Watch:
    """A running Watch; its answers are taken one by one."""

    def __init__(self, health, name):
        self._call = health.Watch(health_pb2.HealthCheckRequest(service=name))
        self._statuses = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for response in self._call:
                self._statuses.put(response.status)
        except grpc.RpcError:
            pass  # cancelled

    def next(self):
        return self._statuses.get(timeout=60)

    def cancel(self):
        self._call.cancel()


@pytest.fixture
def watch(health):
    watches = []

    def start(name):
        watches.append(Watch(health, name))
        return watches[-1]

    yield start
    for each in watches:
        each.cancel()


def check(health, name):
    return health.Check(health_pb2.HealthCheckRequest(service=name)).status


@pytest.mark.parametrize("name", [*SERVER_NAMES, "simple", "simple/1", "versions", "versions/1", "versions/3"])
def test_check_answers_serving_for_every_name_that_is_served(health, name):
    assert check(health, name) == SERVING


@pytest.mark.parametrize("name", ["nothing", "simple/9", "simple/", "/1"])
def test_check_of_an_unknown_name(health, name):
    with pytest.raises(grpc.RpcError) as caught:
        check(health, name)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_status_follows_the_models(health, control, watch):
    names = (*SERVER_NAMES, "versions", "versions/3")
    watches = {name: watch(name) for name in names}
    assert {each.next() for each in watches.values()} == {SERVING}
    control.set_ready("versions", 3, False)
    try:
        assert [watches[name].next() for name in (*SERVER_NAMES, "versions/3")] == [NOT_SERVING] * 3
        assert check(health, "versions/1") == check(health, "versions") == SERVING
        assert check(health, "versions/3") == check(health, "") == NOT_SERVING
        control.set_ready("versions", 1, False)
        assert watches["versions"].next() == NOT_SERVING
    finally:
        control.set_ready("versions", 1, True)
        control.set_ready("versions", 3, True)
    assert {each.next() for each in watches.values()} == {SERVING}


def test_watch_of_an_unknown_name(watch):
    assert watch("nothing").next() == UNKNOWN


def test_a_watcher_that_leaves_does_not_take_others_along(control, watch):
    first, second = watch("versions/3"), watch("versions/3")
    assert first.next() == second.next() == SERVING
    first.cancel()
    for ready, status in ((False, NOT_SERVING), (True, SERVING)):
        control.set_ready("versions", 3, ready)
        assert second.next() == status


def test_after_a_drain_every_name_stays_not_serving(door):
    if door == "target":
        pytest.skip("stops the server")
    with doors.running_door(door) as process, grpc.insecure_channel(process.address) as channel:
        health, watch = health_pb2_grpc.HealthStub(channel), Watch(health_pb2_grpc.HealthStub(channel), "simple")
        assert watch.next() == SERVING
        control = Control(channel)
        control.drain()
        assert watch.next() == NOT_SERVING
        control.set_ready("simple", 1, True)  # too late
        assert {check(health, name) for name in (*SERVER_NAMES, "simple", "simple/1")} == {NOT_SERVING}
        watch.cancel()


def test_the_servicer_of_the_library_is_hosted_unchanged(door):
    if door == "target":
        pytest.skip("needs a server of ours")
    with doors.running_door(door, "--library-health") as process, grpc.insecure_channel(process.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert check(health, "on") == check(health, "") == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(health, "nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = Watch(health, "on")
        assert watch.next() == SERVING
        watch.cancel()


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_bytes_that_are_no_request_are_the_clients_fault(server, path):
    """Not an internal error with a traceback in the log for each."""
    with Client(server) as client:
        answer = client.call(path, b"\xff\xff")
    assert answer.status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "2%20bytes%20are%20not%20a%20valid" in answer.details or "2 bytes are not a valid" in answer.details
