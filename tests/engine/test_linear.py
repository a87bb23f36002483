"""Guards that what a client can make long costs what its length says: decoders, checkers, splitters and encoders.

Instructions of the loop's thread are counted for inputs of n, 2n and 4n, so no test depends on the machine's load.
Twice as much for twice as long is a line; four times as much, as with a loop inside of a loop, is far above the limit.
"""

import asyncio

import numpy as np
import pytest

from bench import steps
from inferd.server.caching import LocalCache
from inferd_client.pb import grpc_service_pb2 as pb
from tests.engine.serving import request, serving
from tests.engine.test_ensembles import parameter, tensors
from tests.native.h2peer import Lanes

pytestmark = pytest.mark.skipif(not steps.can_count(), reason="instructions are counted on x86-64 only")

SIZES = (12, 24, 48)
HALF = (6, 12, 24)  # for what takes many instructions an element
FEW = 40  # instructions for one more element that no loop inside of a loop would be content with
LIMIT = 2.7  # of what the second half costs over what the first does: 2 for a line, 4 for a square


def identity(*names, datatype="INT64", dims="[ 1 ]", inputs="", extra=""):
    return (
        f'backend: "identity"\nmax_batch_size: 1\n'
        f"{tensors('input', *names, datatype=datatype, dims=dims, extra=inputs)}"
        f"{tensors('output', *(f'y{name}' for name in names), datatype=datatype, dims=dims)}{extra}"
        "instance_group { kind: KIND_CPU count: 1 }\n"
    )


async def submitted(engine, message, counts=True):
    """Instructions that it takes to submit the message; it is answered then."""
    done = asyncio.Event()
    answers = []

    def deliver(*answer):
        answers.append(answer)
        done.set()

    def submit():
        engine.infer.submit(message, deliver)

    taken = steps.count(submit) if counts else submit()
    await asyncio.wait_for(done.wait(), 30)
    assert len(answers) == 1
    return taken


async def answered(engine, message, counts=True):
    """The same for a request that the response cache answers; all of it happens on this thread."""
    answers = []

    def deliver(status, text, response):
        assert status == 0, text
        answers.append(response)

    def submit():
        engine.infer.submit(message, deliver)
        engine._deliveries.bridge.drain()

    if not counts:
        await submitted(engine, message, False)
        return None
    taken = steps.count(submit)
    assert len(answers) == 1
    return taken


async def growth(engine, made, measure=submitted, sizes=SIZES):
    """How much more the second n cost than the first; `made` gives a message of a size."""
    messages = [made(size).SerializeToString() for size in sizes]
    taken: list[list[int]] = [[], [], []]
    found = LIMIT
    for _ in range(10):  # some take some hundred more, of other threads' making: the fewest count
        for counts, message in zip(taken, messages, strict=True):
            await measure(engine, message, False)  # what is kept from one request to the next is there
            counts.append(await measure(engine, message))
        few = FEW * (sizes[1] - sizes[0])
        first, second = (min(taken[i + 1]) - min(taken[i]) for i in range(2))
        found = max(0, second - 2 * few) / max(few, first)
        if found < LIMIT:
            break
    return found


async def test_parameters_wrong_and_right(tmp_path):
    def made(size):
        message = request(x=np.zeros((1, 1), np.int64)).SerializeToString()
        for number in range(size):  # a wrong one of each key, then the right ones: the last of a key counts
            message += parameter_field(f"key {number}", uint64_param=1)
        for number in range(size):
            message += parameter_field(f"key {number}", int64_param=1)
        return Encoded(message)

    async with serving(tmp_path, m=identity("x")) as engine:
        assert await growth(engine, made) < LIMIT


async def test_inputs_and_outputs_by_name(tmp_path):
    names = [f"{number:03}" for number in range(max(SIZES))]

    def made(size):
        message = pb.ModelInferRequest(model_name="m")
        for name in reversed(names[-size:]):
            message.inputs.add(name=name, datatype="INT64", shape=(1, 1))
            message.raw_input_contents.append(bytes(8))
            message.outputs.add(name=f"y{name}")
        return message

    config = identity(*names, inputs="optional: true")
    async with serving(tmp_path, m=config) as engine:
        assert await growth(engine, made) < LIMIT


@pytest.mark.parametrize("datatype", ["INT64", "BYTES"])
async def test_a_request_that_is_split(tmp_path, datatype):
    def made(size):
        if datatype == "INT64":
            return request(x=np.zeros((size, 16), np.int64))
        return request(x=np.full((size, 16), b"text", object))

    config = identity(
        "x", datatype=datatype.replace("BYTES", "STRING"), dims="[ 16 ]", extra=parameter("split_requests", "true")
    )
    async with serving(tmp_path, m=config) as engine:
        assert await growth(engine, made) < LIMIT


@pytest.mark.parametrize("datatype", ["INT64", "BYTES", "BOOL"])
async def test_typed_contents_cost_what_their_length_says(tmp_path, datatype):
    def made(size):
        message = pb.ModelInferRequest(model_name="m")
        tensor = message.inputs.add(name="x", datatype=datatype, shape=(1, size))
        if datatype == "BYTES":
            tensor.contents.bytes_contents.extend([b"text"] * size)
        elif datatype == "BOOL":
            tensor.contents.bool_contents.extend([True] * size)
        else:
            tensor.contents.int64_contents.extend(range(size))
        return message

    config = identity("x", datatype=datatype.replace("BYTES", "STRING"), dims="[ -1 ]")
    async with serving(tmp_path, m=config) as engine:
        assert await growth(engine, made) < LIMIT


@pytest.mark.parametrize("what", ["outputs", "strings", "classes"])
async def test_answers(tmp_path, what):
    """From the cache, so that they are made and encoded on this thread."""
    names = [f"{number:03}" for number in range(max(HALF))]

    def made(size):
        message = pb.ModelInferRequest(model_name="m")
        shape = (1, size) if what != "outputs" else (1, 1)
        for name in names if what == "outputs" else ["x"]:
            message.inputs.add(name=name, datatype="BYTES" if what == "strings" else "INT64", shape=shape)
            message.raw_input_contents.append((b"\4\0\0\0text" if what == "strings" else bytes(8)) * shape[1])
        for name in names[:size] if what == "outputs" else ["x"]:
            output = message.outputs.add(name=f"y{name}")
            if what == "classes":
                output.parameters["classification"].int64_param = size
        return message

    config = identity(
        *(names if what == "outputs" else ["x"]),
        datatype="STRING" if what == "strings" else "INT64",
        dims="[ 1 ]" if what == "outputs" else "[ -1 ]",
        extra="response_cache { enable: true }\n",
    )
    async with serving(tmp_path, cache=LocalCache(1 << 24), m=config) as engine:
        assert await growth(engine, made, answered, HALF if what == "outputs" else SIZES) < LIMIT


class Encoded:
    """A message that no protobuf object stands for: its map has a key twice."""

    def __init__(self, encoded):
        self._encoded = encoded

    def SerializeToString(self):  # noqa: N802 - as messages have it
        return self._encoded


def parameter_field(key, **value):
    """One entry of ModelInferRequest.parameters, encoded."""
    message = pb.ModelInferRequest()
    message.parameters[key].CopyFrom(pb.InferParameter(**value))
    return message.SerializeToString()


def test_requests_that_wait_for_models_of_many_names(native_counters):
    """Their loads end one after the other; each looks at the requests that wait for it, and at few others."""

    def waiting(size, count=steps.count):
        lanes = Lanes(running=False)
        lanes.service.load_on_demand(lambda name, by_model, asked_by: "")
        message, answers = lanes.request(b"x"), []
        for number in range(size):
            named = pb.ModelInferRequest.FromString(message)
            named.model_name = f"missing {number}"
            lanes.service.submit(named.SerializeToString(), lambda *answer: answers.append(answer))
        taken = count(lambda: [lanes.service.resume(f"missing {number}", 14, "no") for number in range(size)])
        lanes.run()
        lanes.settle()
        assert [answer[:2] for answer in answers] == [(14, "no")] * size
        lanes.close()
        return taken

    waiting(8, lambda call: call())
    taken = [waiting(size) for size in (12, 24, 48)]
    assert (taken[2] - taken[1]) / (taken[1] - taken[0]) < LIMIT


@pytest.mark.parametrize("other", ["sequences", "models"])
def test_requests_of_sequences_that_wait_for_models(native_counters, other):
    """A further one looks for an earlier request of its sequence, but not at those of all other sequences: they have
    other ids, or the same id at another model."""

    def one_more(size):
        lanes = Lanes(running=False)
        lanes.service.load_on_demand(lambda name, by_model, asked_by: "")
        message, answers = pb.ModelInferRequest.FromString(lanes.request(b"x")), []

        def submit():
            lanes.service.submit(encoded, lambda *answer: answers.append(answer))

        for number in range(size):
            at_ends = number in (0, size - 1)
            message.model_name = "missing" if other == "sequences" or at_ends else "another"
            sequence = number if other == "sequences" else int(number == 0)
            message.parameters["sequence_id"].string_param = f"{sequence:04}" * 256
            encoded = message.SerializeToString()
            taken = steps.count(submit) if number == size - 1 else submit()
        lanes.service.resume("missing", 14, "no")
        lanes.service.resume("another", 14, "no")
        lanes.run()
        lanes.settle()
        assert [answer[:2] for answer in answers] == [(14, "no")] * size
        lanes.close()
        return taken

    one_more(8)
    assert one_more(512) - one_more(8) < FEW // 4 * (512 - 8)
