"""The I/O thread: what it serves does not wait for the interpreter, and what it has answered is not lost."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from h2.settings import SettingCodes

from bench import messages
from bench.repository import Identity, write
from inferd.backends.loader import BackendLoader
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.front.native import NativeDoor
from tests.conformance.raw import Client, framed
from tests.front.test_closing import connect, serve_stream
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60
INFER = "/inference.GRPCInferenceService/ModelInfer"
INITIAL_WINDOW_SIZE = SettingCodes.INITIAL_WINDOW_SIZE
SIZE, CALLS = 3 << 20, 2
"""More than a line takes that is not read, and so little that both calls begin."""
HELD = ctypes.PyDLL(None)
"""Functions of the C library, called with the GIL held."""

CLIENT = """
import os, sys
import numpy as np
import inferd_client.grpc as grpcclient

def asked(value):
    return [grpcclient.InferInput("INPUT0", [1, 4], "FP32").set_data_from_numpy(np.full((1, 4), value, np.float32))]

with grpcclient.InferenceServerClient(sys.argv[1]) as client:
    right = client.infer("identity", asked(0)).as_numpy("OUTPUT0")[0, 0] == 0
    os.write(1, b"r")
    os.read(0, 1)
    for value in range(200):
        right = right and client.infer("identity", asked(value)).as_numpy("OUTPUT0")[0, 0] == value
    os.write(1, b"y" if right else b"n")
"""


@contextlib.asynccontextmanager
async def served(root, address="127.0.0.1:0"):
    """A native front door over an engine with the model `identity`, in this process."""
    engine = Engine([write(root, [Identity("identity", (("FP32", 1),))])], BackendLoader(), Options())
    assert not await engine.start()
    door = NativeDoor(engine.infer)
    try:
        await door.start(address)
        yield door
    finally:
        await door.stop(PATIENCE)
        await engine.close()


def wait_with_the_gil(descriptor: int) -> bool:
    """Wait until a descriptor is readable, and let no other thread have the interpreter meanwhile."""
    events = struct.pack("ihh", descriptor, 1, 0)
    return bool(HELD.poll(ctypes.create_string_buffer(events, len(events)), 1, PATIENCE * 1000) == 1)


async def test_inferences_are_answered_while_python_stands_still(tmp_path):
    """200 calls, one after the other, begin and end while the thread of the event loop keeps the GIL."""
    async with served(tmp_path) as door:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, door.addresses[0], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert client.stdin is not None
        assert client.stdout is not None
        assert await asyncio.wait_for(client.stdout.readexactly(1), PATIENCE) == b"r"
        transport = client.stdout._transport  # type: ignore[attr-defined]
        output = os.dup(transport.get_extra_info("pipe").fileno())
        transport.pause_reading()
        client.stdin.write(b"g")
        assert wait_with_the_gil(output), "no inference was answered while the GIL was held"
        transport.resume_reading()
        os.close(output)
        assert await client.stdout.read() == b"y"
        assert await client.wait() == 0


def send(client: Client, stream: int, message: bytes) -> None:
    """Send a request as soon as the server's windows are as large as it."""
    client.receive_until(lambda: client.h2.local_flow_control_window(stream) >= len(message))
    for at in range(0, len(message), 1 << 14):
        client.data(stream, message[at : at + (1 << 14)], end=at + (1 << 14) >= len(message))


@pytest.mark.parametrize("line", ["tcp", "unix"])
async def test_a_client_that_closes_its_end_gets_what_was_answered(tmp_path, line):
    """The socket is full of answers when the client closes its end for writing. A call that was not answered ends by
    that; the answers go on until the client has them, then the connection ends."""
    asked, begun, over = messages.identity(SIZE), asyncio.Event(), asyncio.Event()

    async def talk(requests, context):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    async with served(tmp_path, f"unix:{tmp_path}/s" if line == "unix" else "127.0.0.1:0") as door:
        serve_stream(door, talk)
        with Client(connect(door.addresses[0], None, 1 << 14), settings={INITIAL_WINDOW_SIZE: 2 * SIZE}) as client:
            client.h2.increment_flow_control_window(CALLS * 2 * SIZE)
            client.headers("/test.Closing/Talk")
            await begun.wait()
            talking = door.traffic().held["executed"]
            streams = [client.headers(INFER) for _ in range(CALLS)]
            for stream in streams:
                await asyncio.to_thread(send, client, stream, framed(asked.request))

            def are_answered() -> bool:
                now = door.traffic()
                return now.calls[INFER][0] == CALLS and (now.held["arriving"], now.held["executed"]) == (0, talking)

            await until(are_answered)
            client.socket.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(over.wait(), PATIENCE)
            client.flush = client.h2.data_to_send  # it can send no more
            await asyncio.to_thread(client.receive_until, lambda: False)
            answers = [client.answers[stream] for stream in streams]
            await until(lambda: not door.traffic().connections)
    assert [answer.status for answer in answers] == [0] * CALLS
    for answer in answers:
        messages.check_response(answer.messages[0], asked.response)
