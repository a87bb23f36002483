"""The I/O thread: what it serves does not wait for the interpreter, whatever Python does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

from bench.repository import Identity, write
from inferd.backends.loader import BackendLoader
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.front.native import NativeDoor

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60
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
async def served(root):
    """The address of a native front door over an engine with the model `identity`, in this process."""
    engine = Engine([write(root, [Identity("identity", (("FP32", 1),))])], BackendLoader(), Options())
    assert not await engine.start()
    door = NativeDoor(engine.infer)
    try:
        port = await door.start("127.0.0.1:0")
        yield f"127.0.0.1:{port}"
    finally:
        await door.stop(PATIENCE)
        await engine.close()


def wait_with_the_gil(descriptor: int) -> bool:
    """Wait until a descriptor is readable, and let no other thread have the interpreter meanwhile."""
    events = struct.pack("ihh", descriptor, 1, 0)
    return bool(HELD.poll(ctypes.create_string_buffer(events, len(events)), 1, PATIENCE * 1000) == 1)


async def test_inferences_are_answered_while_python_stands_still(tmp_path):
    """200 calls, one after the other, begin and end while the thread of the event loop keeps the GIL."""
    async with served(tmp_path) as address:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, address, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
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
