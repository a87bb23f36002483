"""A real engine around one model whose tensors lie in shared memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.shared_memory import SharedMemoryPolicy, User
from tests.engine.serving import CONFIG, Loader, Pending, infer, request

USER = User(os.geteuid(), os.getpid())
SIZE = 1 << 16


@pytest.fixture
def memory():
    """A shared memory object of 64 KiB, as an array that begins at its first byte."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="inferd-test-") as file:
        file.truncate(SIZE)
        array = np.memmap(file.name, np.int64, "r+")
        array.key = Path(file.name).name
        yield array


class Served:
    """An engine around one model, with the region "r"."""

    def __init__(self, root, execute, memory, config=CONFIG, *, access="auto", shared=False, user=USER, cache=None):
        (root / "m" / "1").mkdir(parents=True)
        (root / "m" / "config.pbtxt").write_text(config)
        policy = SharedMemoryPolicy(access=access, shared=shared)
        self.user = user
        if execute is not None:  # a function: it only reads them, so it gets them where they lie
            execute.writes_inputs = False
        self.engine = Engine([root], Loader({"m": execute}), Options(), cache=cache, shared_memory=policy)
        self.memory = memory

    async def __aenter__(self):
        assert await self.engine.start() == []
        self.engine.shared_memory.register_system(self.user, "r", self.memory.key, 0, SIZE)
        return self

    async def __aexit__(self, *_):
        await self.engine.close()

    def start(self, message):
        return Pending(self.engine, message, user=-1 if self.user is None else self.user.uid)

    async def ask(self, message):
        answer = await infer(self.engine, message, user=-1 if self.user is None else self.user.uid)
        assert answer.status == 0, answer.text
        return answer


def placed(columns=2, *, at=0, to=None, room=None, rows=1):
    """A request with x at this element of the region, and y to be written at another one."""
    message = request()
    tensor = message.inputs.add(name="x", datatype="INT64", shape=[rows, columns])
    refer(tensor, at, 8 * rows * columns)
    if to is not None:
        refer(message.outputs.add(name="y"), to, 8 * rows * columns if room is None else room)
    return message


def refer(tensor, at, size):
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_offset"].int64_param = 8 * at
    tensor.parameters["shared_memory_byte_size"].int64_param = size
