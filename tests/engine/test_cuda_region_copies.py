"""Guards how tensors in CUDA regions reach a model and come back: without the host's memory where they can, in order,
and with the region held until the device is done with it.

The stub driver reports accesses that no event orders and memory that is used after it was given back. Two tests plant
such a bug, to show that it would.
"""

import asyncio
import gc
from contextlib import asynccontextmanager
from random import Random

import numpy as np
import pytest

from inferd._native.cuda import closing
from inferd._native.request.recorder import RecorderHandle
from inferd.server.engine.instances.shared_memory import CUDA, SharedMemoryPolicy
from inferd.server.errors import Status
from tests.engine.region_owner import SIZE, RegionOwner, placed
from tests.engine.serving import CONFIG as PUPPET
from tests.engine.serving import Loader, Pending, gpus_of_stub, infer, infer_all, request, serving_folder
from tests.engine.test_alternating import Framework
from tests.engine.test_gpu import CONFIG, STATIC, TWO_INPUTS, array
from tests.gpu_stub.fixtures import stub

__all__ = ["stub"]

ON_CPU = CONFIG.replace("KIND_GPU", "KIND_CPU")
COPIES = ("h2d", "d2h", "d2d")


@pytest.fixture(scope="module")
def other():
    other = RegionOwner()
    yield other
    other.close()


@asynccontextmanager
async def serving(root, stub, other, config=CONFIG, ordinal=0, access="map", loader=None):
    """The model "m" on device 0, and the other process's memory, on device `ordinal`, as region "r"."""
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(config)
    policy = SharedMemoryPolicy(shared=True, access=access)
    try:
        async with serving_folder(root, loader, gpus=gpus_of_stub(), shared_memory=policy) as engine:
            engine.shared_memory.register_cuda(None, "r", other.handle, ordinal, SIZE)
            yield engine
    finally:
        gc.collect()
        assert not [line for line in stub.report() if "imported" in line or "violation" in line]


pytestmark = pytest.mark.usefixtures("native_counters")


def reference(values, offset=None, output=None):
    """A request for "m" with x = `values` in the region at `offset`, and y written there at `output`."""
    message = request(x=values)
    if offset is not None:
        del message.raw_input_contents[:]
        placed(message.inputs[0], "r", values.nbytes, offset)
    y = message.outputs.add(name="y")
    if output is not None:
        placed(y, "r", values.nbytes, output)
    return message


class Copies:
    """How many copies of each kind ran since it was made."""

    def __init__(self, stub):
        self._stub = stub
        self._before = [stub.executed(kind) for kind in COPIES]

    @property
    def made(self):
        return {kind: self._stub.executed(kind) - was for kind, was in zip(COPIES, self._before, strict=True)}


def made(h2d=0, d2h=0, d2d=0):
    return {"h2d": h2d, "d2h": d2h, "d2d": d2d}


async def test_a_batch_of_one_request_is_read_and_written_where_it_lies(tmp_path, stub, other):
    """The identity model's own copy is the only one."""
    values = array(4, 16)
    other.write(256, values.tobytes())
    async with serving(tmp_path, stub, other) as engine:
        copies = Copies(stub)
        answer = await infer(engine, reference(values, 256, 4096))
        assert answer.status == Status.OK, answer.text
        assert list(answer.response.outputs[0].shape) == [4, 16]
        assert other.read(4096, 512) == values.tobytes()
        assert copies.made == made(d2d=1)


async def test_a_strangers_region_is_not_worked_on_in_place(tmp_path, stub, other):
    """A stranger could change the tensor while the model computes, so the tensor is copied."""
    values = array(4, 16)
    other.write(256, values.tobytes())
    async with serving(tmp_path, stub, other, access="auto") as engine:
        copies = Copies(stub)
        assert (await infer(engine, reference(values, 256, 4096))).status == Status.OK
        assert other.read(4096, 512) == values.tobytes()
        assert copies.made == made(d2d=3)


async def test_what_is_not_aligned_is_copied_on_the_device(tmp_path, stub, other):
    values = array(4, 16)
    other.write(8, values.tobytes())
    async with serving(tmp_path, stub, other) as engine:
        copies = Copies(stub)
        assert (await infer(engine, reference(values, 8, 4104))).status == Status.OK
        assert other.read(4104, 512) == values.tobytes()
        assert copies.made == made(d2d=3)


async def test_a_result_may_replace_its_input(tmp_path, stub, other):
    """The model must not write to what it still reads, even where the two overlap in part only."""
    values = array(4, 16)
    for at in (0, 256):
        other.write(0, values.tobytes())
        async with serving(tmp_path / str(at), stub, other) as engine:
            copies = Copies(stub)
            assert (await infer(engine, reference(values, 0, at))).status == Status.OK
            assert other.read(at, 512) == values.tobytes()
            assert copies.made == made(d2d=2)


async def test_requests_of_a_batch_keep_to_themselves(tmp_path, stub, other):
    """Inputs and outputs in regions and in messages, in one batch: each request gets its own rows, where it asked."""
    sent = [array(1 + i % 2, 8, 1000 * i) for i in range(5)]
    for i, values in enumerate(sent):
        other.write(512 * i, values.tobytes())
    async with serving(tmp_path, stub, other) as engine:
        with stub.held("d2d"):  # the first fills the device, the others form a batch
            first = Pending(engine, request(x=array(1, 8)))
            messages = [
                reference(values, 512 * i if i % 2 else None, 4096 + 512 * i if i % 3 == 0 else None)
                for i, values in enumerate(sent)
            ]
            pending = [Pending(engine, message) for message in messages]
            await asyncio.sleep(0)
        assert (await first.answer()).status == Status.OK
        for i, (values, each) in enumerate(zip(sent, pending, strict=True)):
            answer = await each.answer()
            assert answer.status == Status.OK, answer.text
            if i % 3 == 0:
                assert other.read(4096 + 512 * i, values.nbytes) == values.tobytes()
            else:
                np.testing.assert_array_equal(answer.array(), values)


async def test_nothing_of_a_batch_passes_the_host_when_all_is_in_regions(tmp_path, stub, other):
    sent = [array(1, 64, 1000 * i) for i in range(4)]
    for i, values in enumerate(sent):
        other.write(512 * i, values.tobytes())
    async with serving(tmp_path, stub, other) as engine:
        copies = Copies(stub)
        with stub.held("d2d"):
            first = Pending(engine, reference(sent[0], 0, 4096))
            pending = [
                Pending(engine, reference(values, 512 * i, 4096 + 512 * i)) for i, values in enumerate(sent[1:], 1)
            ]
        for each in (first, *pending):
            assert (await each.answer()).status == Status.OK
        for i, values in enumerate(sent):
            assert other.read(4096 + 512 * i, 512) == values.tobytes()
        assert (copies.made["h2d"], copies.made["d2h"]) == (0, 0)


async def test_one_input_in_a_region_and_one_in_the_message(tmp_path, stub, other):
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 5), 7, np.int8)
    other.write(512, a.tobytes())
    async with serving(tmp_path, stub, other, TWO_INPUTS) as engine:
        for name, value in (("a", a), ("b", b)):
            other.write(512, value.tobytes())
            message = request(a=a, b=b)
            index = [tensor.name for tensor in message.inputs].index(name)
            del message.raw_input_contents[index]
            placed(message.inputs[index], "r", value.nbytes, 512)
            copies = Copies(stub)
            answer = await infer(engine, message)
            np.testing.assert_array_equal(answer.array("a"), a)
            np.testing.assert_array_equal(answer.array("b"), b)
            assert copies.made["h2d"] == 1


async def test_graphs_take_their_inputs_from_their_own_buffers(tmp_path, stub, other):
    """Their addresses are part of them, so what lies in a region is copied on the device, and the result too."""
    values = array(2, 4, 77)
    other.write(256, values.tobytes())
    graphs = "optimization { cuda { graphs: true graph_spec { batch_size: 4 graph_lower_bound { batch_size: 1 } } } }"
    async with serving(tmp_path, stub, other, STATIC + graphs) as engine:
        launched, copies = stub.calls("cuGraphLaunch"), Copies(stub)
        for output in (4096, None):
            answer = await infer(engine, reference(values, 256, output))
            assert answer.status == Status.OK, answer.text
        np.testing.assert_array_equal(answer.array(), values)
        assert other.read(4096, 64) == values.tobytes()
        assert stub.calls("cuGraphLaunch") == launched + 2
        assert copies.made["h2d"] == 0


async def test_a_split_request_reads_the_rows_of_its_parts(tmp_path, stub, other):
    values = array(20, 16)
    other.write(8, values.tobytes())
    split = 'parameters { key: "split_requests" value { string_value: "true" } }'
    async with serving(tmp_path, stub, other, CONFIG + split) as engine:
        answer = await infer(engine, reference(values, 8, 4096))
        assert answer.status == Status.OK, answer.text
        assert other.read(4096, values.nbytes) == values.tobytes()


async def test_regions_of_another_device_go_through_the_host(tmp_path, stub):
    stub.set(devices=2)
    other = RegionOwner(1)
    try:
        values = array(2, 16)
        other.write(0, values.tobytes())
        near = CONFIG.replace("count: 1", "count: 1 gpus: [ 0 ]")
        async with serving(tmp_path, stub, other, near, ordinal=1) as engine:
            copies = Copies(stub)
            answer = await infer(engine, reference(values, 0, 4096))
            assert answer.status == Status.OK, answer.text
            assert other.read(4096, 256) == values.tobytes()
            assert copies.made == made(h2d=2, d2h=2, d2d=1)
    finally:
        other.close()
        stub.set(devices=1)


def part(random, size):
    """Offset and size of a part of a region: half of them within it and as large as they should be."""
    offset, aligned = random.randrange(SIZE - size), random.randrange(SIZE - size) & ~255
    if random.random() < 0.75:
        return random.choice([offset, aligned]), size
    return random.choice([offset, -1, SIZE, 2**62, -(2**63)]), random.choice([size, size - 32, SIZE, -32, 2**63 - 1])


async def test_hostile_references_are_refused_and_others_served(tmp_path, stub, other):
    """Whatever part of a region a request names: the right bytes, or the right status; never memory beyond it."""
    random = Random(11)
    content = random.randbytes(SIZE)
    counts = {Status.OK: 0, Status.INVALID_ARGUMENT: 0, Status.INTERNAL: 0}
    async with serving(tmp_path, stub, other) as engine:
        for _ in range(400):
            other.write(0, content)
            rows = random.randrange(1, 9)
            (offset, size), (output, room) = part(random, rows * 32), part(random, rows * 32)
            message = reference(array(rows, 4), 0, 0)
            placed(message.inputs[0], "r", size, offset)
            placed(message.outputs[0], "r", room, output)
            fits = size == rows * 32 and 0 <= offset <= SIZE - size
            has_room = room >= 0 and 0 <= output <= SIZE - room
            expected = Status.OK if fits and has_room else Status.INVALID_ARGUMENT
            if expected == Status.OK and room < size:
                expected = Status.INTERNAL
            answer = await infer(engine, message)
            assert answer.status == expected, (offset, size, output, room, answer.text)
            counts[expected] += 1
            after = bytearray(content)
            if expected == Status.OK:
                after[output : output + size] = content[offset : offset + size]
            assert other.read(0, SIZE) == bytes(after)
    assert min(counts.values()) > 0, counts


# -- order and lifetime --


@pytest.mark.parametrize("forgotten", [0, 1])
async def test_a_forgotten_event_would_be_found(tmp_path, stub, other, forgotten):
    """Plants a bug: the model does not wait for its input's copy, or the copy of the result not for the model."""
    values = array(4, 16)
    async with serving(tmp_path, stub, other) as engine:
        executed = stub.executed("d2d")
        stub.ignore("cuStreamWaitEvent", after=forgotten)
        await infer(engine, reference(values, 8, 4104))
        # the answer may come before the model has run: nothing orders them
        await asyncio.to_thread(stub.wait_executed, "d2d", executed + 3)
        found = stub.violations()
        assert any("no event orders them" in line for line in found), found  # and what follows from it


async def test_a_region_is_open_until_its_input_is_copied(tmp_path, stub, other):
    values = array(1, 4)
    other.write(8, values.tobytes())
    async with serving(tmp_path, stub, other) as engine:
        closed = stub.calls("cuIpcCloseMemHandle")
        with stub.held("d2d"):
            pending = Pending(engine, reference(values, 8))
            engine.shared_memory.unregister(None, CUDA, "r")
            assert stub.calls("cuIpcCloseMemHandle") == closed
        np.testing.assert_array_equal((await pending.answer()).array(), values)
        await asyncio.to_thread(closing.wait_closed)
        assert stub.calls("cuIpcCloseMemHandle") == closed + 1


async def test_a_region_is_open_until_a_cancelled_request_is_off_the_device(tmp_path, stub, other):
    """Nobody waits for the answer any more, but the model reads and writes the region."""
    values = array(1, 4)
    async with serving(tmp_path, stub, other) as engine:
        recorded, closed = stub.executed("record"), stub.calls("cuIpcCloseMemHandle")
        with stub.held("d2d"):
            pending = Pending(engine, reference(values, 0, 4096))
            await asyncio.to_thread(stub.wait_executed, "record", recorded + 1)
            pending.ticket.cancel()
            engine.shared_memory.unregister(None, CUDA, "r")
            await asyncio.sleep(0)
            assert stub.calls("cuIpcCloseMemHandle") == closed
        assert (await infer(engine, request(x=values))).status == Status.OK  # batches are answered in order
        await asyncio.to_thread(closing.wait_closed)
        assert stub.calls("cuIpcCloseMemHandle") == closed + 1


async def test_a_failed_copy_fails_its_batch_and_leaves_the_region_usable(tmp_path, stub, other):
    values = array(1, 4)
    other.write(8, values.tobytes())
    async with serving(tmp_path, stub, other) as engine:
        for call in range(3):
            stub.fail("cuMemcpyDtoDAsync_v2", 1, after=call)
            answer = await infer(engine, reference(values, 8, 4104))
            assert answer.status == Status.INTERNAL
            assert "cuMemcpyDtoDAsync_v2: CUDA_ERROR_INVALID_VALUE (1)" in answer.text
            assert (await infer(engine, reference(values, 8, 4104))).status == Status.OK
        assert other.read(4104, 32) == values.tobytes()


# -- models on the CPU --


async def test_a_model_on_the_cpu_gets_a_copy(tmp_path, stub, other):
    values = array(4, 16)
    other.write(8, values.tobytes())
    async with serving(tmp_path, stub, other, ON_CPU) as engine:
        assert (await infer(engine, reference(values, 8, 4104))).status == Status.OK
        assert other.read(4104, 512) == values.tobytes()


async def test_a_device_that_does_not_copy_fails_the_one_request(tmp_path, stub, other):
    """Mates in its batch are not concerned."""
    config = ON_CPU.replace("dynamic_batching { }", "dynamic_batching { max_queue_delay_microseconds: 60000000 }")
    values = [array(4, 4, 100 * i) for i in range(2)]
    other.write(8, values[0].tobytes())
    async with serving(tmp_path, stub, other, config) as engine:
        stub.fail("cuMemcpyDtoHAsync_v2", 1)
        failed, served = await infer_all(engine, reference(values[0], 8), request(x=values[1]))
        assert failed.status == Status.INTERNAL
        assert "cannot be read from CUDA shared memory region 'r': device 0 does not copy it" in failed.text
        np.testing.assert_array_equal(served.array(), values[1])
        again, _ = await infer_all(engine, reference(values[0], 8), request(x=values[1]))
        np.testing.assert_array_equal(again.array(), values[0])


async def test_a_batch_without_requests_does_not_begin(tmp_path, stub, other):
    """Its only one has failed before, at an instance with an alternate."""
    framework = Framework(free=True)
    values = np.arange(4, dtype=np.int64).reshape(1, 4)
    other.write(8, values.tobytes())
    async with serving(tmp_path, stub, other, PUPPET, loader=Loader({"m": framework})) as engine:
        stub.fail("cuMemcpyDtoHAsync_v2", 1)
        assert (await infer(engine, reference(values, 8))).status == Status.INTERNAL
        np.testing.assert_array_equal((await infer(engine, reference(values, 8))).array(), values * 10)
        assert framework.calls == 1


async def test_a_trace_has_the_input_that_was_sent_not_what_the_model_makes_of_it(tmp_path, stub, other):
    """A model on the CPU may compute in its copy of what lies in the region."""

    def double(batch):
        x = batch.input("x").numpy()
        x *= 2
        batch.set_output("y", x)

    values = np.arange(4, dtype=np.int64).reshape(1, 4)
    other.write(8, values.tobytes())
    async with serving(tmp_path, stub, other, PUPPET, loader=Loader({"m": double})) as engine:
        recorder = RecorderHandle()
        recorder.sample(on=True, tensors=True, rate=1, count=-1)
        recorder.keep(access_rate=0, slow_ns=0, log_slow_ns=0)
        recorder.switch(True)
        engine.infer.record(recorder)
        np.testing.assert_array_equal((await infer(engine, reference(values, 8))).array(), values * 2)
        [record] = recorder.take()
        [[x], [y]] = record["tensors"]
        assert x["data"] == values.tobytes()
        assert y["data"] == (values * 2).tobytes()
