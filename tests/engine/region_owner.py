"""Another process that owns memory of a device: a process cannot open its own handles."""

import ctypes
import multiprocessing
import os

from tests import gpu_stub

SIZE = 8192


def own(library, ordinal, size, pipe):
    """What that process does: it fills and reads its memory as it is told."""
    os.environ["CUDA_STUB"] = f"devices={ordinal + 1}"
    from inferd._native.cuda import driver
    from inferd._native.cuda.device import device

    driver.load(library)
    gpu = device(ordinal)
    gpu.use()
    memory, stream = gpu.allocate(size), gpu.stream()
    handle = ctypes.create_string_buffer(64)
    assert ctypes.CDLL(library).cuIpcGetMemHandle(handle, ctypes.c_uint64(memory.pointer)) == 0
    pipe.send(handle.raw)
    while (told := pipe.recv()) is not None:
        offset, data = told
        count = len(data) if isinstance(data, bytes) else data
        buffer = ctypes.create_string_buffer(data if isinstance(data, bytes) else count, count)
        if isinstance(data, bytes):
            stream.copy_to_device(memory.pointer + offset, ctypes.addressof(buffer), count)
        else:
            stream.copy_to_host(ctypes.addressof(buffer), memory.pointer + offset, count)
        stream.synchronize()
        pipe.send(buffer.raw)


class RegionOwner:
    """A process that owns `size` bytes on one device: that of the stub driver, unless `library` is another driver."""

    def __init__(self, ordinal=0, library="", size=SIZE):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self._process = spawn.Process(target=own, args=(library or str(gpu_stub.library()), ordinal, size, there))
        self._process.start()
        self.handle = self._pipe.recv()

    def write(self, offset, data):
        self._pipe.send((offset, data))
        self._pipe.recv()

    def read(self, offset, size):
        self._pipe.send((offset, size))
        return self._pipe.recv()

    def close(self):
        self._pipe.send(None)
        self._process.join()


def placed(tensor, region, size, offset=0):
    """Have a tensor of a request lie in a region."""
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = size
    tensor.parameters["shared_memory_offset"].int64_param = offset
