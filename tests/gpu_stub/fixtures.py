"""The stub driver as a fixture: what a test does to the GPU is in order, and gone when it ends."""

import ctypes
import gc

import pytest

from inferd._native.cuda import closing
from inferd._native.cuda.memory import PageLocked
from tests import gpu_stub

LOCKED = 1 << 21  # bytes


@pytest.fixture
def stub():
    """The stub driver; the test fails when it reports a violation or something alive."""
    stub = gpu_stub.load()
    gc.collect()
    closing.wait_closed()
    before = stub.leftovers()
    yield stub
    gc.collect()
    closing.wait_closed()
    after = stub.leftovers()
    assert after == before, f"{before} before, {after} after"


class HostBuffer:
    """Memory of the process; page-locked if a device is given."""

    def __init__(self, data, device=None):
        self.size = len(data)
        if device is None:
            self._memory = ctypes.create_string_buffer(self.size)
            self.address = ctypes.addressof(self._memory)
        else:
            self._memory = PageLocked(device, LOCKED).take(self.size)
            self.address = self._memory.address
        self.write(data)

    def write(self, data):
        ctypes.memmove(self.address, bytes(data), len(data))

    def read(self):
        return ctypes.string_at(self.address, self.size)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._memory = None
