"""Another process that owns memory of the stub driver's devices: a process cannot open its own handles."""

import multiprocessing
import os

from tests import gpu_stub

SIZE = 8192


def own(library, ordinal, pipe):
    """What that process does: it fills and reads its memory as it is told."""
    os.environ["CUDA_STUB"] = f"devices={ordinal + 1}"
    from _native.cuda import driver
    from _native.cuda.device import device

    driver.load(library)
    stub = gpu_stub.Stub()
    memory = device(ordinal).allocate(SIZE)
    pipe.send(memory.export())
    while (told := pipe.recv()) is not None:
        offset, data = told
        if isinstance(data, bytes):
            stub.write(memory.pointer + offset, data)
            pipe.send(None)
        else:
            pipe.send(stub.read(memory.pointer + offset, data))


class RegionOwner:
    """That process, with SIZE bytes on one device."""

    def __init__(self, ordinal=0):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self._process = spawn.Process(target=own, args=(str(gpu_stub.library()), ordinal, there))
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
