"""Guards that no answer is lost, doubled or somebody else's: random models, shapes, sizes, cancels and deadlines."""

import asyncio
import os
import random

import numpy as np
import pytest

from inferd._native.memory.resource import live_counters
from inferd.server.errors import Status
from inferd_client.pb import grpc_service_pb2 as pb
from tests.engine.serving import CONFIG, Answer, request, serving

REQUESTS = int(os.environ.get("INFERD_CROSSTALK_REQUESTS", "8000"))
IN_FLIGHT = 300
MS = 1_000_000

IDENTITY = """
    backend: "identity" max_batch_size: 16 dynamic_batching { max_queue_delay_microseconds: 200 }
    input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
    output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
    instance_group { kind: KIND_CPU count: 2 }
"""
CONFIGS = {
    "keyed": CONFIG.replace("count: 1", "count: 2"),
    "preferred": CONFIG.replace(
        "dynamic_batching { }",
        "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 500 }",
    ),
    "single": CONFIG.replace("max_batch_size: 8", "max_batch_size: 0").replace("dynamic_batching { }", ""),
    "strings": CONFIG.replace("TYPE_INT64", "TYPE_STRING"),
    "identity": IDENTITY,
    "gathered": IDENTITY + 'parameters { key: "gather" value { string_value: "true" } }',
}


pytestmark = pytest.mark.usefixtures("native_counters")


def keyed(batch):
    batch.set_output("y", batch.input("x").numpy() * 3 + 1)


def reverse(batch):
    view = batch.input("x")
    batch.set_bytes_output("y", [element[::-1] for element in view.strings()], view.shape)


def drawn(rng, number):
    """A request that only its own answer fits, and the array of that answer."""
    name = rng.choice(list(CONFIGS))
    rows, width = rng.choice([1, 1, 1, 2, 5, 8]), rng.choice([1, 1, 2, 17, 700])
    array = number * 10_000 + np.arange(rows * width).reshape(rows, width)
    if name == "single":
        array = array.reshape(-1)
    if name == "strings":
        array = np.array([b"%d" % value for value in array.flat], dtype=object).reshape(array.shape)
        expected = np.array([value[::-1] for value in array.flat], dtype=object).reshape(array.shape)
    else:
        expected = array if name in ("identity", "gathered") else array * 3 + 1
    return request(name, str(number), x=array), expected


class Run:
    """Keeps IN_FLIGHT random requests on their way and checks each answer."""

    def __init__(self, engine, rng):
        self.engine, self.rng = engine, rng
        self.open = {}
        self.cancelled = set()
        self.counts = dict.fromkeys(("ok", "late", "cancelled"), 0)
        self.wrong = []
        self.room = asyncio.Event()

    def start(self, number):
        message, expected = drawn(self.rng, number)
        timeout = self.rng.choice([-1] * 8 + [0, self.rng.randrange(5 * MS), 60_000 * MS])
        self.open[number] = (None, expected, 0 <= timeout < 60_000 * MS)
        ticket = self.engine.infer.submit(
            message.SerializeToString(), lambda *answer: self.check(number, *answer), timeout_ns=timeout
        )
        self.open[number] = (ticket, *self.open[number][1:])
        if self.rng.random() < 0.1:
            self.cancel(self.rng.choice(list(self.open)))

    def cancel(self, number):
        self.open.pop(number)[0].cancel()
        self.cancelled.add(number)
        self.counts["cancelled"] += 1

    def check(self, number, status, text, response):
        self.room.set()
        if number not in self.open:
            self.wrong.append((number, "cancelled before" if number in self.cancelled else "answered twice"))
            return
        _, expected, may_be_late = self.open.pop(number)
        if status == Status.DEADLINE_EXCEEDED and may_be_late:
            self.counts["late"] += 1
            return
        answer = Answer(status, text, pb.ModelInferResponse.FromString(response or b""))
        if status != Status.OK or answer.response.id != str(number):
            self.wrong.append((number, status, text, answer.response.id))
        elif not np.array_equal(answer.array(), expected):
            self.wrong.append((number, "crossed", answer.array(), expected))
        self.counts["ok"] += 1


async def test_every_answer_is_its_own(tmp_path):
    rng = random.Random(2024)
    execute = {"keyed": keyed, "preferred": keyed, "single": keyed, "strings": reverse}
    async with serving(tmp_path, execute, **CONFIGS) as engine:
        run = Run(engine, rng)
        for number in range(REQUESTS):
            run.start(number)
            while len(run.open) >= IN_FLIGHT:
                run.room.clear()
                await asyncio.wait_for(run.room.wait(), 30)
            if rng.random() < 0.05:
                await asyncio.sleep(0)
        while run.open:
            run.room.clear()
            await asyncio.wait_for(run.room.wait(), 30)
        assert run.wrong == []
        assert sum(run.counts.values()) == REQUESTS
        assert min(run.counts.values()) > REQUESTS // 50
    assert live_counters()["requests"] == 0
