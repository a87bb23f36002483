"""What only the grpcio door has: the options of C core, and its way to say that an address is taken."""

from __future__ import annotations

import socket
import subprocess
import sys

import grpc

from tests.conformance import doors
from tests.conformance.raw import Client


def test_streams_of_a_connection_are_limited():
    with doors.running_door("grpcio") as process, Client(process.address) as client:
        client.h2.ping(b"settings")
        client.flush()
        client.receive_until(lambda: client.pings)
        assert client.h2.remote_settings.max_concurrent_streams == 256


def test_a_burst_of_calls_is_answered_whatever_their_methods_are():
    """Far more at once than a connection may have open: the others wait at the client, none is refused."""
    with doors.running_door("grpcio") as process, grpc.insecure_channel(process.address) as channel:
        for _ in range(2):
            calls = [channel.unary_unary(f"/test.Unknown/Method{i}").future(b"x", timeout=60) for i in range(2000)]
            assert {call.code() for call in calls} == {grpc.StatusCode.UNIMPLEMENTED}


def test_frequent_pings_are_allowed():
    """gRPC's default would send a client away that pings more than twice in five minutes."""
    with doors.running_door("grpcio") as process, Client(process.address) as client:
        for number in range(1, 3):
            client.h2.ping(f"number {number}".encode())
            client.flush()
            client.receive_until(lambda number=number: client.pings == number)
        assert client.goaway is None


def test_taken_address():
    # in a process of its own: one event loop of a process may use grpc.aio
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = subprocess.run([sys.executable, "-c", _TAKEN, str(port)], cwd=doors.ROOT, capture_output=True, text=True)
    assert f"Socket '127.0.0.1:{port}' already in use" in run.stdout, run.stderr


def test_unix_socket(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", _UNIX, f"unix:{tmp_path}/s"], cwd=doors.ROOT, capture_output=True, text=True
    )
    assert run.stdout == "0\n", run.stderr


_TAKEN = """
import asyncio, sys
from inferd.server.front.grpcio import GrpcioDoor

async def main():
    try:
        await GrpcioDoor().start(f"127.0.0.1:{sys.argv[1]}")
    except OSError as error:
        print(error)

asyncio.run(main())
"""

_UNIX = """
import asyncio, sys
from inferd.server.front.grpcio import GrpcioDoor

async def main():
    door = GrpcioDoor()
    print(await door.start(sys.argv[1]))
    await door.stop(0)

asyncio.run(main())
"""
