"""Guards CUDA shared memory on the stub driver: what is registered, what is refused, inputs and outputs in regions.

The memory belongs to another process, as the protocol has it: a process cannot open its own handles.
"""

import asyncio
import gc

import pytest

from inferd._native.cuda import closing
from inferd.backends.loader import BackendLoader
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.gpu import GpuPolicy, Gpus
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.instances.shared_memory import CUDA, SYSTEM, SharedMemoryPolicy
from inferd.server.errors import AlreadyExists, InvalidArgument, NotFound, Status, Unimplemented
from tests.engine.region_owner import SIZE, RegionOwner, placed
from tests.engine.serving import gpus_of_stub, infer, request, serving_folder
from tests.engine.test_gpu import CONFIG, array
from tests.gpu_stub.fixtures import stub

__all__ = ["stub"]

POLICY = SharedMemoryPolicy(shared=True)


@pytest.fixture(scope="module")
def other():
    other = RegionOwner()
    yield other
    other.close()


@pytest.fixture
async def engine(tmp_path, stub, native_counters):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    async with serving_folder(tmp_path, gpus=gpus_of_stub(), shared_memory=POLICY) as engine:
        yield engine
    gc.collect()
    assert not [line for line in stub.report() if "imported" in line]


async def test_input_and_output_in_regions(engine, other):
    memory = engine.shared_memory
    memory.register_cuda(None, "r", other.handle, 0, SIZE)
    values = array(4, 16)
    other.write(256, values.tobytes())
    message = request(x=values)
    del message.raw_input_contents[:]
    placed(message.inputs[0], "r", 512, 256)
    output = message.outputs.add(name="y")
    placed(output, "r", 1024, 4096)
    answer = await infer(engine, message)
    assert answer.status == Status.OK, answer.text
    assert list(answer.response.outputs[0].shape) == [4, 16]
    assert other.read(4096, 512) == values.tobytes()


async def test_output_too_small(engine, other):
    engine.shared_memory.register_cuda(None, "r", other.handle, 0, SIZE)
    message = request(x=array(4, 16))
    placed(message.outputs.add(name="y"), "r", 8)
    answer = await infer(engine, message)
    assert answer.status == Status.INTERNAL
    assert "should be at least 512 bytes to hold the results" in answer.text


async def test_status_and_unregister(engine, other):
    memory = engine.shared_memory
    memory.register_cuda(None, "a", other.handle, 0, SIZE)
    memory.register_cuda(None, "b", other.handle, 0, 16)
    assert [(each.name, each.device, each.byte_size) for each in memory.status(None, CUDA, "")] == [
        ("a", 0, SIZE),
        ("b", 0, 16),
    ]
    assert memory.status(None, SYSTEM, "") == []
    with pytest.raises(NotFound, match="is registered as CUDA shared memory, not system"):
        memory.status(None, SYSTEM, "a")
    with pytest.raises(AlreadyExists, match="shared memory region 'a' already in manager"):
        memory.register_cuda(None, "a", other.handle, 0, SIZE)
    memory.unregister(None, CUDA, "a")
    memory.unregister(None, CUDA, "nothing")
    memory.unregister(None, CUDA, "")
    assert memory.status(None, CUDA, "") == []


async def test_region_in_use_is_closed_after_its_last_user(engine, other, stub):
    engine.shared_memory.register_cuda(None, "r", other.handle, 0, SIZE)
    message = request(x=array(1, 4))
    placed(message.outputs.add(name="y"), "r", 32)
    with stub.held("d2d"):
        computed = asyncio.ensure_future(infer(engine, message))
        await asyncio.sleep(0)
        closed = stub.calls("cuIpcCloseMemHandle")
        engine.shared_memory.unregister(None, CUDA, "r")
        assert stub.calls("cuIpcCloseMemHandle") == closed
    assert (await computed).status == Status.OK
    await asyncio.to_thread(closing.wait_closed)
    assert stub.calls("cuIpcCloseMemHandle") == closed + 1
    assert other.read(0, 32) == array(1, 4).tobytes()


@pytest.mark.parametrize(
    ("handle", "device", "size", "expected"),
    [
        (b"", 0, 16, "expected a handle of 64 bytes, got 0"),
        (bytes(63), 0, 16, "expected a handle of 64 bytes, got 63"),
        (bytes(65), 0, 16, "expected a handle of 64 bytes, got 65"),
        (bytes(64), 0, 16, "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE"),
        (None, 1, 16, "expected device_id 0 to 0, got 1"),
        (None, -1, 16, "expected device_id 0 to 0, got -1"),
        (None, 0, 0, f"expected 1 to {SIZE} bytes, which is the size of the memory, got 0"),
        (None, 0, SIZE + 1, f"expected 1 to {SIZE} bytes, which is the size of the memory, got {SIZE + 1}"),
        (None, 0, 2**64 - 1, "expected 1 to"),
    ],
)
async def test_a_wrong_registration_is_refused_and_registers_nothing(engine, other, handle, device, size, expected):
    with pytest.raises(InvalidArgument) as caught:
        engine.shared_memory.register_cuda(None, "r", other.handle if handle is None else handle, device, size)
    assert "failed to register CUDA shared memory region 'r': invalid args: " in str(caught.value)
    assert expected in str(caught.value)
    assert engine.shared_memory.regions.count == 0


async def test_server_without_a_gpu_says_so(tmp_path):
    gpus = Gpus(GpuPolicy(library=str(tmp_path / "none")))
    engine = Engine([tmp_path], BackendLoader(), Options(), hardware=Hardware(gpus=gpus), shared_memory=POLICY)
    with pytest.raises(InvalidArgument, match="GPUs not supported"):
        engine.shared_memory.register_cuda(None, "r", bytes(64), 0, 16)


async def test_it_is_off_by_default(tmp_path):
    engine = Engine([tmp_path], BackendLoader(), Options())
    with pytest.raises(Unimplemented, match="--allow-client-shm=true"):
        engine.shared_memory.register_cuda(None, "r", bytes(64), 0, 16)
