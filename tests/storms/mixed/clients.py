"""The kinds of client: each sends requests of one kind, one after the other, and checks every answer."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
from google.protobuf import json_format

from inferd_client.pb import grpc_service_pb2 as pb
from tests.front.encryption import Encryption

SERVICE = "/inference.GRPCInferenceService/"
PATIENCE = 60.0  # seconds: a request that is not answered by then counts as lost
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
SIZES = (0, 1, 64, 1000, 16_000, 300_000, 1 << 20)
RARE_SIZES = (8 << 20, 64 << 20)
# Statuses that are allowed while an operator replaces models, a queue is full or a client holds too much.
BUSY = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
DATATYPES = {np.dtype(np.int32): "INT32", np.dtype(np.uint8): "UINT8"}


@dataclass
class Tally:
    """The outcomes of one kind's clients."""

    asked: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: collections.Counter[str] = field(default_factory=collections.Counter)

    def end(self, code: str, allowed: frozenset[str], details: str = "") -> None:
        """One request has ended with this code."""
        self.outcomes[code] += 1
        if code != "OK" and code not in allowed:
            self.wrong[f"{code}: {details}"[:300]] += 1


@dataclass
class World:
    """The state that all clients share."""

    address: str
    unix: str
    until: float
    encryption: Encryption
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))
    tallies: dict[str, Tally] = field(default_factory=lambda: collections.defaultdict(Tally))

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    @contextlib.asynccontextmanager
    async def channel(self, address: str = "", **more: object) -> AsyncIterator[grpc.aio.Channel]:
        async with self.encryption.aio_channel(address or self.address, OPTIONS, **more) as channel:
            yield channel


def request(model: str, **tensors: np.ndarray) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    for name, array in tensors.items():
        message.inputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message


def output(answer: pb.ModelInferResponse, name: str) -> bytes:
    return next(
        data for tensor, data in zip(answer.outputs, answer.raw_output_contents, strict=True) if tensor.name == name
    )


async def infer(
    channel: grpc.aio.Channel,
    message: pb.ModelInferRequest,
    tally: Tally,
    *,
    allowed: frozenset[str] = BUSY,
    patience: float = PATIENCE,
) -> pb.ModelInferResponse | None:
    """Call once; None after an error, which is counted."""
    tally.asked += 1
    call = channel.unary_unary(SERVICE + "ModelInfer", None, pb.ModelInferResponse.FromString)
    try:
        answer = await call(message.SerializeToString(), timeout=patience)
    except grpc.aio.AioRpcError as error:
        tally.end(error.code().name, allowed, error.details() or "")
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            await asyncio.sleep(0.02)
        return None
    except asyncio.CancelledError:
        tally.outcomes["cancelled"] += 1
        raise
    tally.end("OK", allowed)
    return answer


def check(tally: Tally, what: str, got: bytes, expected: np.ndarray) -> None:
    if got != expected.tobytes():
        tally.wrong[f"{what} is wrong"] += 1


def ints(nonce: int, size: int) -> np.ndarray:
    """One row that no other request has."""
    return (np.arange(size, dtype=np.int32) + np.int32(nonce % (1 << 24)))[np.newaxis, :]


async def sizes(world: World, chance: random.Random, tally: Tally) -> None:
    """Tensors of 0 bytes to 64 MiB, some compressed, to models that use them in place and models that gather."""
    compression = chance.choice((None, None, grpc.Compression.Gzip))
    async with world.channel(compression=compression) as channel:
        while not world.over:
            nonce = next(world.numbers)
            rare = chance.random() < 0.002 and compression is None
            size = chance.choice(RARE_SIZES if rare else SIZES)
            x = np.frombuffer(nonce.to_bytes(8, "little") * (size // 8 + 1), np.uint8)[:size][np.newaxis, :]
            answer = await infer(channel, request(chance.choice(("echo", "shared")), x=x), tally)
            if answer is not None:
                check(tally, "the tensor", output(answer, "y"), x)


async def cancels(world: World, chance: random.Random, tally: Tally) -> None:
    """Calls, some of which are cancelled at any moment."""
    async with world.channel() as channel:
        while not world.over:
            x = ints(next(world.numbers), 100).view(np.uint8)
            tasks = [
                asyncio.create_task(infer(channel, request(model, x=x), tally)) for model in ("slow", "echo", "twins")
            ]
            await asyncio.sleep(chance.uniform(0, 0.03))
            tasks[chance.randrange(3)].cancel()
            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(answer, pb.ModelInferResponse):
                    check(tally, "the tensor", output(answer, "y"), x)


async def deadlines(world: World, chance: random.Random, tally: Tally) -> None:
    """Calls with deadlines around the model's execution time."""
    async with world.channel() as channel:
        while not world.over:
            x = ints(next(world.numbers), 10).view(np.uint8)
            timeout = chance.uniform(0.001, 0.1)
            allowed = BUSY | {"DEADLINE_EXCEEDED"}
            answer = await infer(channel, request("slow", x=x), tally, allowed=allowed, patience=timeout)
            if answer is not None:
                check(tally, "the tensor", output(answer, "y"), x)


async def in_place(world: World, chance: random.Random, tally: Tally) -> None:
    """An ensemble of models that write in place into inputs that other steps read, too."""
    async with world.channel() as channel:
        while not world.over:
            x = ints(next(world.numbers), chance.choice((1, 10, 1000, 50_000)))
            answer = await infer(channel, request("chain", x=x), tally)
            if answer is not None:
                expected = {"twice": x * 2, "four": x * 4, "eight": x * 8, "plus": x * 2 + 1, "also": x + 1}
                for name, y in expected.items():
                    check(tally, name, output(answer, name), y)


async def reused(world: World, chance: random.Random, tally: Tally) -> None:
    """Repeat the same few requests, some at a time: responses come from the cache or from a twin."""
    async with world.channel() as channel:
        while not world.over:
            x = ints(chance.randrange(20), 500)
            answers = await asyncio.gather(*(infer(channel, request("reused", x=x), tally) for _ in range(3)))
            for answer in answers:
                if answer is not None:
                    for name, y in {"twice": x * 2, "four": x * 4, "plus": x * 2 + 1}.items():
                        check(tally, name, output(answer, name), y)


async def calls(world: World, chance: random.Random, tally: Tally) -> None:
    """A Python model that calls others."""
    async with world.channel() as channel:
        while not world.over:
            x = ints(next(world.numbers), chance.choice((1, 1000, 100_000)))
            answer = await infer(channel, request("caller", x=x), tally, allowed=BUSY | {"INTERNAL"})
            if answer is not None:
                check(tally, "the tensor", output(answer, "y"), (x + 1) * 2)


async def failures(world: World, chance: random.Random, tally: Tally) -> None:
    """A Python model that fails some requests; the others of the batch are answered."""
    async with world.channel() as channel:
        while not world.over:
            rows = [ints(next(world.numbers), 20) for _ in range(4)]
            bad = chance.randrange(4)
            rows[bad][0, 0] = -1
            allowed = BUSY | {"INTERNAL", "NOT_FOUND"}  # the operator unloads this model
            answers = await asyncio.gather(
                *(infer(channel, request("shaky", x=x), tally, allowed=allowed) for x in rows)
            )
            for index, answer in enumerate(answers):
                if answer is not None and index == bad:
                    tally.wrong["a failed request was answered"] += 1
                elif answer is not None:
                    check(tally, "the tensor", output(answer, "y"), rows[index])


async def one_of_many(world: World, chance: random.Random, tally: Tally) -> None:
    """ModelInfer to models that send one response, several or none: one outcome, never another's content."""
    async with world.channel() as channel:
        while not world.over:
            nonce = next(world.numbers) % (1 << 24)
            count = chance.choice((1, 1, 1, 0, 2, 3, 70))
            if chance.random() < 0.5:
                x = np.full((count, 7), nonce, np.int32)
                message, expected = request("pieces", x=x), x[:1]
            else:
                message = request("many", x=np.array([[count, nonce, 28]], np.int32))
                expected = np.full((1, 7), nonce, np.int32)
                expected[0, 0] = 0
            allowed = BUSY if count == 1 else BUSY | {"INTERNAL", "INVALID_ARGUMENT", "UNIMPLEMENTED"}
            answer = await infer(channel, message, tally, allowed=allowed)
            if answer is not None and answer.raw_output_contents:
                check(tally, "the one response", output(answer, "y"), expected)


async def streams(world: World, chance: random.Random, tally: Tally) -> None:
    """Streams to decoupled models, read to the end, abandoned, or read slowly."""
    while not world.over:
        async with world.channel() as channel:
            for _ in range(20):
                if world.over:
                    return
                await one_stream(channel, world, chance, tally)


async def one_stream(channel: grpc.aio.Channel, world: World, chance: random.Random, tally: Tally) -> None:
    nonce, count = next(world.numbers) % (1 << 24), chance.choice((0, 1, 5, 100))
    size = chance.choice((8, 4000, 100_000))
    message = request(chance.choice(("many", "over_many")), x=np.array([[count, nonce, size]], np.int32))
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    leaves_after = chance.choice((None, None, None, 1, 3))
    tally.asked += 1
    call = channel.stream_stream(SERVICE + "ModelStreamInfer", None, pb.ModelStreamInferResponse.FromString)(
        timeout=PATIENCE
    )
    try:
        await call.write(message.SerializeToString())
        index = 0
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                tally.wrong["a stream ended before its final response"] += 1
                return
            if response.error_message:
                tally.end("stream error", frozenset({"stream error"}))
                break
            if response.infer_response.parameters["triton_final_response"].bool_param:
                if index != count:
                    tally.wrong["responses are missing"] += 1
                tally.end("OK", BUSY)
                break
            expected = np.full((1, max(2, size // 4)), nonce, np.int32)
            expected[0, 0] = index
            check(tally, "a response", output(response.infer_response, "y"), expected)
            index += 1
            if leaves_after == index:
                tally.outcomes["left"] += 1
                call.cancel()
                return
            if chance.random() < 0.01:
                await asyncio.sleep(0.05)
        with contextlib.suppress(grpc.aio.BaseError):  # the server has ended the call already
            await call.done_writing()
        call.cancel()
    except grpc.aio.AioRpcError as error:
        tally.end(error.code().name, BUSY, error.details() or "")
        await asyncio.sleep(0.02)


async def sequences(world: World, chance: random.Random, tally: Tally) -> None:
    """Running sums over sequences of their own."""
    async with world.channel() as channel:
        while not world.over:
            number, total = next(world.numbers), 0.0
            for index in range(length := chance.randrange(1, 12)):
                message = pb.ModelInferRequest(model_name="sum")
                message.inputs.add(name="x", datatype="FP32", shape=[1, 1])
                message.raw_input_contents.append(np.float32(number % 1000).tobytes())
                message.parameters["sequence_id"].int64_param = number
                message.parameters["sequence_start"].bool_param = index == 0
                message.parameters["sequence_end"].bool_param = index == length - 1
                answer = await infer(channel, message, tally)
                if answer is None:
                    break
                total += number % 1000
                check(tally, "the sum", output(answer, "y"), np.float32(total))


async def shared_memory(world: World, chance: random.Random, tally: Tally) -> None:
    """Inputs and outputs in the client's own regions, over the unix socket; a model never changes an input."""
    size = 1 << 18
    name = f"inferd-mixed-{os.getpid()}-{next(world.numbers)}"
    path = Path("/dev/shm") / name
    path.write_bytes(bytes(2 * size))
    region = np.memmap(path, np.int32, "r+")
    try:
        async with world.channel(world.unix) as channel:
            register = channel.unary_unary(SERVICE + "SystemSharedMemoryRegister")
            await register(
                pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=2 * size).SerializeToString()
            )
            while not world.over:
                x = ints(next(world.numbers), size // 4)
                region[: size // 4] = x[0]
                message = pb.ModelInferRequest(model_name="doubler")
                message.inputs.add(name="INPUT__0", datatype="INT32", shape=x.shape)
                message.outputs.add(name="OUTPUT__0")
                for tensor, offset in ((message.inputs[0], 0), (message.outputs[0], size)):
                    tensor.parameters["shared_memory_region"].string_param = name
                    tensor.parameters["shared_memory_byte_size"].int64_param = size
                    tensor.parameters["shared_memory_offset"].int64_param = offset
                if await infer(channel, message, tally) is not None:
                    check(tally, "the output region", region[size // 4 :].tobytes(), x * 2)
                check(tally, "the input region", region[: size // 4].tobytes(), x)
                await asyncio.sleep(chance.uniform(0, 0.02))
            unregister = channel.unary_unary(SERVICE + "SystemSharedMemoryUnregister")
            await unregister(pb.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString())
    finally:
        path.unlink()


async def operator(world: World, chance: random.Random, tally: Tally) -> None:
    """Replaces models in use, changes their number of instances, and unloads and loads one."""
    async with world.channel() as channel:
        load = channel.unary_unary(SERVICE + "RepositoryModelLoad")
        unload = channel.unary_unary(SERVICE + "RepositoryModelUnload")
        while not world.over:
            await asyncio.sleep(chance.uniform(1, 5))
            model = chance.choice(("echo", "doubler", "cached", "adder", "many", "pieces", "sum", "chain"))
            tally.asked += 1
            try:
                if chance.random() < 0.2:
                    model = "shaky"
                    await unload(pb.RepositoryModelUnloadRequest(model_name=model).SerializeToString())
                    message = pb.RepositoryModelLoadRequest(model_name=model)
                else:
                    message = await changed(channel, model, next(world.numbers), chance)
                await load(message.SerializeToString(), timeout=PATIENCE)
                tally.end("OK", BUSY)
            except grpc.aio.AioRpcError as error:
                tally.end(error.code().name, BUSY, error.details() or "")


async def changed(
    channel: grpc.aio.Channel, model: str, number: int, chance: random.Random
) -> pb.RepositoryModelLoadRequest:
    """Load the model with another number of instances, or with a new parameter, which needs a new version."""
    ask = channel.unary_unary(SERVICE + "ModelConfig", None, pb.ModelConfigResponse.FromString)
    config = (await ask(pb.ModelConfigRequest(name=model).SerializeToString())).config
    if config.instance_group and chance.random() < 0.5:
        config.instance_group[0].count = chance.choice((1, 2))
    else:
        config.parameters["turn"].string_value = str(number)
    message = pb.RepositoryModelLoadRequest(model_name=model)
    message.parameters["config"].string_param = json_format.MessageToJson(config)
    return message


Kind = Callable[[World, random.Random, Tally], Awaitable[None]]
# How many clients of each kind there are.
KINDS: tuple[tuple[Kind, int], ...] = (
    (sizes, 3),
    (cancels, 2),
    (deadlines, 2),
    (in_place, 3),
    (reused, 2),
    (calls, 2),
    (failures, 1),
    (one_of_many, 2),
    (streams, 3),
    (sequences, 3),
    (shared_memory, 2),
    (operator, 1),
)


async def run(world: World, seed: int, only: frozenset[str] = frozenset()) -> None:
    """Run all clients until the run ends."""
    tasks = []
    for kind, count in KINDS:
        name = kind.__name__
        if not only or name in only:
            for index in range(count):
                chance = random.Random(f"{seed} {name} {index}")
                tasks.append(asyncio.create_task(kind(world, chance, world.tallies[name]), name=name))
    await asyncio.gather(*tasks)
