"""Inputs in shared memory of clients that are trusted: the worker maps them, and no one else notices."""

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from inferd.backends.python.arenas import arena_of
from inferd.server.engine.instances.shared_memory import SYSTEM, SharedMemoryPolicy, User
from inferd.server.errors import Status
from tests.backends.python.served import add_model, wait_for
from tests.conformance.shared import Object
from tests.engine.region_owner import placed
from tests.engine.serving import infer, infer_all, request, serving_folder
from tests.waiting import wait_until

CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "order" data_type: TYPE_INT64 dims: [ 1 ] }
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "maps" data_type: TYPE_INT64 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { max_queue_delay_microseconds: 20000 }
"""
DECOUPLED = (
    CONFIG
    + """
model_transaction_policy { decoupled: true }
parameters { key: "decoupled_model_infer" value { string_value: "true" } }
"""
)
ECHO, WRITE, KEEP, KEPT, WAIT, FAIL, KEEP_ALL, SLICE = range(8)
CODE = """
import os, pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils
ECHO, WRITE, KEEP, KEPT, WAIT, FAIL, KEEP_ALL, SLICE = range(8)

class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])
        self.kept = None
        self.all = []

    def execute(self, requests):
        responses = [self.answer(request) for request in requests]
        if not pb_utils.using_decoupled_model_transaction_policy(self.config):
            return responses
        for request, response in zip(requests, responses):
            request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    config = {"model_transaction_policy": {"decoupled": DECOUPLED}}

    def answer(self, request):
        [order, x] = [tensor.as_numpy() for tensor in request.inputs()]
        maps = pathlib.Path("/proc/self/maps").read_text().count("/dev/shm/inferd-test")
        order = order[0, 0]
        if order == WRITE:
            x += 1
        elif order == FAIL:
            raise ValueError("on purpose")
        elif order == KEEP_ALL:
            self.all.append(x)
        elif order == SLICE:
            x = x[:, 1000:]
        elif order == KEEP:
            self.kept = x
        elif order == KEPT:
            x, self.kept = self.kept, None
        elif order == WAIT:
            (self.folder / "executing").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.001)
            (self.folder / "go").unlink()
            x = x.copy()
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("y", x), pb_utils.Tensor("maps", np.array([[maps]], np.int64))])
"""
X = np.arange(1 << 14).reshape(1, -1)  # 128 KiB
OWN = User(os.geteuid(), os.getpid())  # at the other end of a unix socket
SHIFT = 24  # of the region in its object, and of the tensor in its region


@pytest.fixture
def made():
    with Object(b"*" * 2 * SHIFT + X.tobytes() + b"-" * X.nbytes) as made:
        yield made


@asynccontextmanager
async def serving(root, made, access="map", user=OWN, decoupled=False):
    """The model "m", "decoupled" if that is needed, and the region "r"."""
    add_model(root, "m", CODE.replace("DECOUPLED", "False"), CONFIG)
    if decoupled:
        add_model(root, "decoupled", CODE.replace("DECOUPLED", "True"), DECOUPLED)
    policy = SharedMemoryPolicy(shared=True, access=access)
    async with serving_folder(root, shared_memory=policy) as engine:
        engine.shared_memory.register_system(user, "r", made.key, SHIFT, SHIFT + 2 * X.nbytes)
        yield engine


def message(order, columns=X.size, model="m", in_region=True, at=SHIFT, out=None, region="r"):
    """x lies in the region `at` a place, or in the message. With `out` y is wanted there in the region."""
    built = request(model, order=np.array([[order]]), x=X[:, :columns])
    if in_region:
        del built.raw_input_contents[1]
        placed(built.inputs[1], region, 8 * columns, at)
    if out is not None:
        placed(built.outputs.add(name="y"), "r", 8 * columns, out)
        built.outputs.add(name="maps")
    return built


def descriptors(made):
    """How many of this process are of the object."""
    links = (str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum(link.startswith(str(made.path)) for link in links)


async def ask(engine, order, columns=X.size, **how):
    """The model's answers, and how many parts of the object it sees mapped."""
    answer = await infer(engine, message(order, columns, **how))
    assert answer.status == Status.OK, answer.text
    return answer.array(), int(answer.array("maps")[0, 0])


async def test_they_are_mapped_and_what_the_model_writes_there_is_its_own(tmp_path, made):
    async with serving(tmp_path, made) as engine:
        for order, more in ((ECHO, 0), (WRITE, 1), (WRITE, 1), (ECHO, 0)):
            found, maps = await ask(engine, order)
            assert (found == X + more).all() and maps == 1
        assert made.read(2 * SHIFT, X.nbytes) == X.tobytes()
        assert (await ask(engine, ECHO, in_region=False))[1] == 1, "it stays mapped"


async def test_what_is_small_or_lies_across_elements_is_copied(tmp_path, made):
    async with serving(tmp_path, made) as engine:
        found, maps = await ask(engine, ECHO, columns=100)
        assert (found == X[:, :100]).all() and maps == 0
        made.write(X.tobytes(), 2 * SHIFT + 4)
        found, maps = await ask(engine, ECHO, at=SHIFT + 4)
        assert (found == X).all() and maps == 0


@pytest.mark.parametrize("order", [ECHO, WRITE, SLICE])
async def test_what_a_client_writes_between_its_requests_is_seen(tmp_path, made, order):
    """The client's writes are seen also where the model has written to the same pages before."""
    async with serving(tmp_path, made) as engine:
        for content in (X, -X, X * 7):
            made.write(content.tobytes(), 2 * SHIFT)
            found, maps = await ask(engine, order)
            assert maps == 1
            if order == SLICE:
                assert (found == content[:, 1000:]).all()
            else:
                assert (found == content + (order == WRITE)).all()


async def test_a_region_that_is_unregistered_is_unmapped(tmp_path, made):
    """At once, not with the next request for it; and what takes its name, or the name of its object, is another."""
    async with serving(tmp_path, made) as engine:
        await ask(engine, ECHO)
        engine.shared_memory.unregister(None, SYSTEM, "r")
        assert (await ask(engine, ECHO, in_region=False))[1] == 0
        made.path.unlink()
        made.path.write_bytes(bytes(2 * SHIFT) + (X * 3).tobytes())
        engine.shared_memory.register_system(OWN, "r", made.key, SHIFT, SHIFT + X.nbytes)
        found, maps = await ask(engine, ECHO)
        assert (found == X * 3).all() and maps == 1


async def test_so_many_regions_stay_mapped_and_others_are_mapped_for_their_batches(tmp_path, made):
    async with serving(tmp_path, made) as engine:
        for number in range(70):
            engine.shared_memory.register_system(OWN, f"r{number}", made.key, SHIFT, SHIFT + X.nbytes)
        for number in range(70):
            answer = await infer(engine, message(ECHO, region=f"r{number}"))
            assert (answer.array() == X).all()
        assert (await ask(engine, ECHO, in_region=False))[1] == 64
        for number in range(70):
            engine.shared_memory.unregister(None, SYSTEM, f"r{number}")
        assert (await ask(engine, ECHO))[1] == 1


async def test_another_worker_maps_a_region_again(tmp_path, made):
    async with serving(tmp_path, made) as engine:
        await ask(engine, ECHO)
        [instance] = engine.model("m")._instances.live
        os.kill(instance.worker.pid, 9)
        await asyncio.to_thread(wait_until, lambda: instance.worker.restarts and instance.worker.state == "up")
        assert ((await ask(engine, ECHO))[0] == X).all()
        engine.shared_memory.unregister(None, SYSTEM, "r")
        assert (await ask(engine, ECHO, in_region=False))[1] == 0


@pytest.mark.parametrize("before", [False, True])
async def test_a_mapped_object_that_is_shortened_fails_requests_until_it_is_long_enough(tmp_path, made, before):
    """Before its first use, or between two; the worker lives on, and uses what has grown again."""
    async with serving(tmp_path, made) as engine:
        if not before:
            await ask(engine, ECHO)
        os.truncate(made.path, 2 * SHIFT + X.nbytes - 4096)
        answer = await infer(engine, message(ECHO))
        assert answer.status == Status.INVALID_ARGUMENT and "input 'x' cannot be read" in answer.text
        found, maps = await ask(engine, ECHO, columns=X.size // 2)
        assert (found == X[:, : X.size // 2]).all() and maps == 1, "what is there can be used"
        os.truncate(made.path, 2 * SHIFT + X.nbytes)
        found, _ = await ask(engine, ECHO)
        assert (found[:, :-512] == X[:, :-512]).all() and (found[:, -512:] == 0).all()
        assert [instance.worker.restarts for instance in engine.model("m")._instances.live] == [0]


async def test_an_output_that_is_an_input_takes_no_memory_of_the_arena(tmp_path, made):
    """The output leaves from where the client has put the input, unless the model has written to it."""
    async with serving(tmp_path, made) as engine:
        arena = arena_of("m")
        before = arena.used + arena.pooled
        await ask(engine, ECHO)
        await ask(engine, SLICE)
        assert arena.used + arena.pooled - before < X.nbytes // 2
        await ask(engine, WRITE)
        assert arena.used + arena.pooled - before > X.nbytes // 2


async def test_the_regions_of_others_are_copied(tmp_path, made):
    async with serving(tmp_path, made, access="copy") as engine:
        found, maps = await ask(engine, WRITE)
        assert (found == X + 1).all() and maps == 0
        assert made.read(2 * SHIFT, X.nbytes) == X.tobytes()


async def test_what_the_model_keeps_is_a_copy_once_it_has_answered(tmp_path, made):
    """The client may write to its region as soon as it has the response."""
    async with serving(tmp_path, made) as engine:
        await ask(engine, KEEP)
        made.write((-X).tobytes(), 2 * SHIFT)
        found, maps = await ask(engine, KEPT)
        assert (found == X).all() and maps == 2
        found, maps = await ask(engine, ECHO)
        assert (found == -X).all() and maps == 1


async def test_a_region_is_used_to_the_end_of_its_request(tmp_path, made):
    async with serving(tmp_path, made) as engine:
        asked = asyncio.ensure_future(ask(engine, WAIT))
        await asyncio.to_thread(wait_for, tmp_path / "m" / "executing")
        engine.shared_memory.unregister(None, SYSTEM, "r")
        made.path.unlink()
        assert (engine.shared_memory.regions.count, descriptors(made)) == (1, 1)
        (tmp_path / "m" / "go").touch()
        assert ((await asked)[0] == X).all()
        assert (engine.shared_memory.regions.count, descriptors(made)) == (0, 0)


async def test_a_shortened_object_fails_the_requests_that_lie_in_it(tmp_path, made):
    """Others of their batches are answered, and the worker lives on."""
    async with serving(tmp_path, made, decoupled=True) as engine:
        os.truncate(made.path, 4096)
        answers = await infer_all(engine, message(ECHO), message(ECHO, in_region=False), message(ECHO))
        assert [answer.status for answer in answers] == [Status.INVALID_ARGUMENT, Status.OK, Status.INVALID_ARGUMENT]
        assert "input 'x' cannot be read: its shared memory has been shortened" in answers[0].text
        assert (answers[1].array() == X).all()
        answer = await infer(engine, message(ECHO, model="decoupled"))
        assert answer.status == Status.INVALID_ARGUMENT
        assert [instance.worker.restarts for instance in engine.model("m")._instances.live] == [0]


async def test_what_fails_one_request_is_not_told_to_one_whose_region_is_gone(tmp_path, made):
    """The text of an exception may say what is in the request for which it was raised."""
    async with serving(tmp_path, made) as engine:
        os.truncate(made.path, 4096)
        gone, failed = await infer_all(engine, message(ECHO), message(FAIL, in_region=False))
        assert failed.status == Status.INTERNAL and "on purpose" in failed.text
        assert gone.status == Status.INVALID_ARGUMENT and "on purpose" not in gone.text


async def test_a_client_that_cannot_be_seen_has_its_regions_copied(tmp_path, made):
    """The same where all users are trusted: a client that shortens its object ends no worker."""
    async with serving(tmp_path, made, user=None) as engine:
        found, maps = await ask(engine, ECHO)
        assert (found == X).all() and maps == 0


async def test_more_inputs_than_may_be_mapped_are_copied(tmp_path, made):
    async with serving(tmp_path, made) as engine:
        for _ in range(300):
            assert ((await ask(engine, KEEP_ALL))[0] == X).all()
        found, maps = await ask(engine, ECHO)
        assert (found == X).all() and maps == 256


async def test_an_object_that_is_shortened_while_it_is_used_ends_the_worker_alone(tmp_path, made):
    async with serving(tmp_path, made) as engine:
        asked = asyncio.ensure_future(infer(engine, message(WAIT)))
        await asyncio.to_thread(wait_for, tmp_path / "m" / "executing")
        os.truncate(made.path, 4096)
        (tmp_path / "m" / "go").touch()
        answer = await asked
        assert answer.status == Status.UNAVAILABLE
        assert "signal 7 (SIGBUS), as when a client shortens shared memory" in answer.text
        found, _ = await ask(engine, ECHO, in_region=False)
        assert (found == X).all()


BEHIND = SHIFT + X.nbytes


@pytest.mark.parametrize("access", ["map", "copy"])
async def test_outputs_go_to_their_places(tmp_path, made, access):
    """The place may be that of the input, or overlap it."""
    async with serving(tmp_path, made, access) as engine:
        for out, order, found in (
            (BEHIND, WRITE, X + 1),
            (BEHIND, ECHO, X),
            (SHIFT, WRITE, X + 1),
            (SHIFT + 8, ECHO, X + 1),
        ):
            answer = await infer(engine, message(order, out=out))
            assert answer.status == Status.OK, answer.text
            assert answer.response.raw_output_contents[0] == b""
            assert made.read(SHIFT + out, X.nbytes) == found.tobytes()


async def test_what_does_not_fit_its_place_fails_as_it_does_elsewhere(tmp_path, made):
    async with serving(tmp_path, made) as engine:
        short = message(ECHO, out=BEHIND)
        short.outputs[0].parameters["shared_memory_byte_size"].int64_param = X.nbytes - 8
        answer = await infer(engine, short)
        assert answer.status == Status.INTERNAL and "should be at least 131072 bytes" in answer.text
        os.truncate(made.path, 2 * SHIFT + X.nbytes)
        answer = await infer(engine, message(ECHO, out=BEHIND))
        assert answer.status == Status.INVALID_ARGUMENT and "shorten" in answer.text
        assert made.path.stat().st_size == 2 * SHIFT + X.nbytes
