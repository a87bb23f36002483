"""The stub driver as a fixture: what a test does to the GPU is in order, and gone when it ends."""

import ctypes
import gc

import pytest

from inferd._native.cuda import closing
from tests import gpu_stub

PAGE = 4096


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
    """Page-aligned memory of the process; page-locked while `device` is given."""

    def __init__(self, data, device=None):
        self.size = len(data)
        self._memory = ctypes.create_string_buffer(self.size + PAGE)
        self.address = -(-ctypes.addressof(self._memory) // PAGE) * PAGE
        self.device = device
        self.write(data)
        if device:
            device.register_host(self.address, self.size)

    def write(self, data):
        ctypes.memmove(self.address, bytes(data), len(data))

    def read(self):
        return ctypes.string_at(self.address, self.size)

    def close(self):
        if self.device:
            self.device.unregister_host(self.address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
