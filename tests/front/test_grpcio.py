"""What only the grpcio door has: the options of C core."""

from __future__ import annotations

import grpc
import pytest

from tests.conformance import doors
from tests.conformance.raw import Client


@pytest.fixture(scope="module")
def address():
    with doors.running_door("grpcio") as process:
        yield process.address


def test_streams_of_a_connection_are_limited(address):
    with Client(address) as client:
        client.h2.ping(b"settings")
        client.flush()
        client.receive_until(lambda: client.pings)
        assert client.h2.remote_settings.max_concurrent_streams == 256


def test_a_burst_of_calls_is_answered_whatever_their_methods_are(address):
    """Far more at once than a connection may have open: the others wait at the client, none is refused."""
    with grpc.insecure_channel(address) as channel:
        for _ in range(2):
            calls = [channel.unary_unary(f"/test.Unknown/Method{i}").future(b"x", timeout=60) for i in range(2000)]
            assert {call.code() for call in calls} == {grpc.StatusCode.UNIMPLEMENTED}


def test_frequent_pings_are_allowed(address):
    """gRPC's default would send a client away that pings more than twice in five minutes."""
    with Client(address) as client:
        for number in range(1, 3):
            client.h2.ping(f"number {number}".encode())
            client.flush()
            client.receive_until(lambda number=number: client.pings == number)
        assert client.goaway is None
