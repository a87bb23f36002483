"""A server that is told to stop finishes what it has accepted, tells its clients, and ends well."""

from __future__ import annotations

import contextlib
import signal

import grpc
import pytest

from tests.conformance import doors
from tests.conformance.client import Stub, floats, pb, request
from tests.conformance.raw import Client, framed

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture
def process(door, repository):
    if door == "target":
        pytest.skip("stops the server")
    with doors.running_server(door, repository) as process:
        yield process


def test_idle_connections_do_not_hold_it_up(process, door):
    if door == "grpcio":
        pytest.skip("C core waits for these clients to answer a ping")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(process.address)) for _ in range(20)]
        for client in clients[:10]:
            client.call(INFER, request("simple", floats(1)).SerializeToString())
        process.terminate()
        assert process.wait() == 0  # the real server: the exit timeout has not passed


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_what_runs_is_finished_and_the_connection_is_told(process, path):
    with Client(process.address) as client:
        streams = []
        for number in range(3):
            stream = client.headers(path)
            client.data(stream, framed(request("slow", floats(number)).SerializeToString()), end=True)
            streams.append(stream)
        assert client.call(LIVE).status == 0  # behind the others on their connection
        process.terminate()
        for stream in streams:
            answer = client.answer(stream)
            assert answer.status == 0
            assert len(answer.messages) == 1
        client.receive_until(lambda: client.goaway is not None)
        assert client.goaway.error_code == 0
    assert process.wait() == 0


def test_what_outlasts_the_grace_period_gets_an_answer_or_a_reset(door, repository):
    if door == "target":
        pytest.skip("stops the server")
    arguments = ("--exit-timeout-secs", "1")
    with (
        doors.running_server(door, repository, *arguments, ends_with=128 + signal.SIGTERM) as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        stub = Stub(channel)
        stub.ServerLive(pb.ServerLiveRequest())
        calls = [stub.ModelInfer.future(request("hang", floats(1))) for _ in range(17)]  # more than two batches
        stub.ServerLive(pb.ServerLiveRequest())  # behind the other calls on their connection
        process.terminate()
        assert calls[-1].code() is not grpc.StatusCode.OK
        process.wait()
