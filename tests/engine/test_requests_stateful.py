"""Requests in every order through ensembles, the response cache, coalescing and splitting, of models that write where
their inputs lie: each request has one outcome, each answer is its own, and nobody's tensors change but the writer's.

Requests come from the process itself and from connections, with tensors in the message or in shared memory. Models
wait at a valve that the test opens, so that requests pile up, meet, leave and come too late wherever it likes.

A long run: INFERD_STATEFUL_EXAMPLES=2000.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from inferd._native.transport.endpoint import Endpoint
from inferd.server.caching import LocalCache
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.shared_memory import SharedMemoryPolicy, User
from inferd.server.errors import Status
from inferd_client.pb import grpc_service_pb2 as pb
from tests.counters import settled_counters
from tests.engine.serving import Answer, Execute, Loader, Pending, request
from tests.engine.test_ensembles import ensemble, model, parameter, step, tensors
from tests.native.h2peer import Peer, framed

MS = 1_000_000
PATIENCE = 60.0  # seconds: no answer by then is one that was lost
USER = User(os.geteuid(), os.getpid())
SLOTS = 16
WIDEST = 600  # numbers in a row
ROWS = 24
SLOT = ROWS * WIDEST

CACHE = "response_cache { enable: true }\n"
BATCHING = "dynamic_batching { }\n"
COALESCE = parameter("coalesce_requests", "true")
SPLIT = parameter("split_requests", "true")
DECOUPLED = "model_transaction_policy { decoupled: true }\n" + parameter("decoupled_model_infer", "true")
TWO = "instance_group { kind: KIND_CPU count: 2 }\n"
PIECES = (
    'backend: "identity"\nmax_batch_size: 8\n'
    + tensors("input", "x")
    + tensors("output", "y")
    + "instance_group { kind: KIND_CPU count: 1 }\n"
    + DECOUPLED
)


class Valve:
    """Lets executions through, some at a time or all."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._permits = 0
        self.open = False

    def let(self, times: int) -> None:
        with self._condition:
            self._permits += times
            self._condition.notify_all()

    def set(self, is_open: bool) -> None:
        with self._condition:
            self.open = is_open
            self._permits = 0
            self._condition.notify_all()

    def wait(self) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.open or self._permits, PATIENCE)
            if not self.open:
                self._permits -= 1


def double(batch):
    """y is 2 x, computed where x lies."""
    x = batch.input("x").numpy()
    x *= 2
    batch.set_output("y", x)


def scribble(batch):
    """y is 2 x; x is overwritten, before and after y is made."""
    x = batch.input("x").numpy()
    y = x * 2
    x[:] = -7
    batch.set_output("y", y)
    x[:] = -8


def same(batch):
    """y is x, and its memory, too."""
    batch.set_output("y", batch.input("x").numpy())


same.writes_inputs = False


def refuse(batch):
    """y is 2 x, but for negative numbers."""
    x = batch.input("x").numpy()
    x *= 2
    if x[0, 0] < 0:
        raise ValueError("negative")
    batch.set_output("y", x)


MODELS = {
    "double": (double, model(extra=BATCHING)),
    "scribble": (scribble, model(extra=BATCHING + TWO)),
    "same": (same, model(extra=BATCHING)),
    "cached": (double, model(extra=BATCHING + CACHE)),
    "twins": (double, model(extra=BATCHING + COALESCE)),
    "both": (scribble, model(extra=BATCHING + CACHE + COALESCE)),
    "parts": (double, model(extra=BATCHING + SPLIT + TWO)),
    "reused_parts": (scribble, model(extra=BATCHING + SPLIT + CACHE + COALESCE)),
    "refuse": (refuse, model(extra="")),
}


def doubled(name, source, result):
    return step(name, {"x": source}, {"y": result})


CONFIGS = {name: config for name, (_, config) in MODELS.items()} | {
    "pieces": PIECES,
    "chain": ensemble(
        doubled("double", "x", "t2"),
        doubled("double", "t2", "t4"),
        doubled("scribble", "t4", "t8"),
        outputs=("t2", "t4", "t8"),
        extra=CACHE,
    ),
    "fan": ensemble(
        step("same", {"x": "x"}, {"y": "t"}),
        doubled("double", "t", "a"),
        doubled("scribble", "t", "b"),
        doubled("cached", "t", "c"),
        doubled("double", "x", "d"),
        outputs=("t", "a", "b", "c", "d"),
    ),
    "reused": ensemble(
        doubled("cached", "x", "t"),
        doubled("twins", "t", "u"),
        doubled("both", "u", "v"),
        doubled("double", "t", "w"),
        outputs=("t", "u", "v", "w"),
    ),
    "halves": ensemble(doubled("parts", "x", "t"), doubled("refuse", "t", "y"), outputs=("t", "y")),
    "one": ensemble(doubled("pieces", "x", "t"), doubled("double", "t", "y"), outputs=("t", "y"), extra=DECOUPLED),
}
# What each output is a multiple of.
OUTPUTS = {name: {"y": 2} for name in MODELS} | {
    "same": {"y": 1},
    "pieces": {"y": 1},
    "chain": {"t2": 2, "t4": 4, "t8": 8},
    "fan": {"t": 1, "a": 2, "b": 2, "c": 2, "d": 2},
    "reused": {"t": 2, "u": 4, "v": 8, "w": 4},
    "halves": {"t": 2, "y": 4},
    "one": {"t": 1, "y": 2},
}
QUESTIONS = st.tuples(
    st.sampled_from(sorted(CONFIGS)),
    st.integers(-3, 2),  # which question, or one of its own
    st.sampled_from([1, 1, 1, 2, 3, 8, ROWS]),
    st.sampled_from([1, 5, WIDEST]),
    st.sampled_from([False, False, True]),  # negative numbers
    st.sampled_from([-1, -1, -1, -1, 0, MS, 3_600_000 * MS]),  # deadline
    st.sampled_from(["process", "process", "client 0", "client 1", "input in region", "output in region"]),
)


@dataclass
class Asked:
    """One request."""

    name: str
    x: np.ndarray
    message: bytes
    may_be_late: bool
    slot: int  # of the region that its output is to lie in, or -1
    pending: Pending | None = None
    peer: Peer | None = None
    stream: int = 0
    left: bool = False

    @property
    def answers(self) -> list[Answer]:
        """The responses that have come for the request."""
        if self.pending is not None:
            return self.pending.answers
        answer = self.peer.answers[self.stream]
        if not answer.ended:
            assert answer.reset is None
            return []
        [*messages] = answer.messages
        assert len(messages) == (answer.status == Status.OK)
        response = pb.ModelInferResponse.FromString(messages[0] if messages else b"")
        return [Answer(answer.status, answer.details, response)]

    @property
    def expected(self) -> frozenset[Status]:
        """How it may end."""
        refuses = self.name == "refuse" or (self.name == "halves" and self.slot < 0)  # else it is asked for `t` alone
        end = Status.OK
        if (self.name in ("pieces", "one") and len(self.x) > 1) or (refuses and self.x[0, 0] < 0):
            end = Status.INTERNAL
        return frozenset({end, Status.DEADLINE_EXCEEDED} if self.may_be_late else {end})


class Requests(RuleBasedStateMachine):
    """One engine, a connection for each of two clients, and a region of shared memory."""

    asked = Bundle("asked")

    def __init__(self) -> None:
        super().__init__()
        self.counters = settled_counters()
        self.loop = asyncio.new_event_loop()
        self.files = contextlib.ExitStack()
        self.root = Path(self.files.enter_context(tempfile.TemporaryDirectory(prefix="inferd-stateful-")))
        shared = Path("/dev/shm") / self.root.name
        self.files.callback(shared.unlink)
        self.region = np.memmap(shared, np.int64, "w+", shape=2 * SLOTS * SLOT)
        self.inputs = self.region[: SLOTS * SLOT].reshape(SLOTS, SLOT)
        self.inputs[:] = np.arange(SLOTS * SLOT).reshape(SLOTS, SLOT) + (1 << 40)
        self.outputs = self.region[SLOTS * SLOT :].reshape(SLOTS, SLOT)
        self.before = self.inputs.copy()
        self.free = list(range(SLOTS))
        self.valves = {name: Valve() for name in MODELS}
        self.requests: list[Asked] = []
        self.kept: list[tuple[bytes, bytes]] = []
        self.run(self._start())

    def run(self, awaitable):
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, PATIENCE))

    async def _start(self) -> None:
        for name, config in CONFIGS.items():
            (self.root / name / "1").mkdir(parents=True)
            (self.root / name / "config.pbtxt").write_text(config)
        puppets = {name: self._behind(valve, MODELS[name][0]) for name, valve in self.valves.items()}
        self.engine = Engine(
            [self.root],
            Loader(puppets),
            Options(),
            cache=LocalCache(1 << 19),
            shared_memory=SharedMemoryPolicy(access="auto", shared=True),
        )
        assert await self.engine.start() == []
        self.engine.shared_memory.register_system(USER, "r", self.root.name, 0, self.region.nbytes)
        self.endpoint = Endpoint(lambda call: call.end(Status.UNIMPLEMENTED))
        self.engine.infer.install(self.endpoint)
        self.peers = [Peer(self.endpoint, window=1 << 24) for _ in range(2)]

    @staticmethod
    def _behind(valve: Valve, function: Execute) -> Execute:
        def execute(batch):
            valve.wait()
            function(batch)

        execute.writes_inputs = getattr(function, "writes_inputs", True)
        return execute

    # -- clients --

    @rule(target=asked, questions=st.lists(QUESTIONS, min_size=1, max_size=4))
    def ask(self, questions):
        """Requests that may meet in a batch."""
        return multiple(*(self._ask(*question) for question in questions))

    def _ask(self, name, again, rows, width, negative, deadline, door):
        """A question that was asked before, perhaps at the same time, or (`again` below 0) one of its own."""
        if name not in ("parts", "reused_parts"):
            rows = min(rows, 8)
        first = again if again >= 0 else 1000 + len(self.requests)
        x = first * (1 << 20) + np.arange(rows * width).reshape(rows, width)
        x = -1 - x if negative else x
        slot = -1
        message = request(name, str(len(self.requests)), x=x)
        if door == "input in region":
            at = first % SLOTS
            x = self.before[at, : x.size].reshape(x.shape)
            message = request(name, str(len(self.requests)))
            refer(message.inputs.add(name="x", datatype="INT64", shape=x.shape), at, x.size)
        elif door == "output in region" and self.free:
            slot = self.free.pop()
            refer(message.outputs.add(name=next(iter(OUTPUTS[name]))), SLOTS + slot, SLOT)
        asked = Asked(name, x, message.SerializeToString(), 0 <= deadline <= MS, slot)
        self.kept.append((asked.message, bytes(bytearray(asked.message))))
        if door.startswith("client"):
            asked.peer = self.peers[int(door[-1])]
            metadata = (("grpc-timeout", f"{deadline // 1000}u"),) if deadline in (0, MS) else ()
            asked.stream = asked.peer.open(metadata=metadata)
            asked.peer.send_all(asked.stream, framed(asked.message))
        else:
            self.run(self._submit(asked, deadline))
        self.requests.append(asked)
        return asked

    async def _submit(self, asked, deadline):
        asked.pending = Pending(self.engine, asked.message, timeout_ns=deadline, user=USER.uid)

    @rule(target=asked, other=asked, times=st.integers(1, 4))
    def ask_the_same(self, other, times):
        """The very same bytes, which the process still holds; a twin, or a question whose answer is in the cache."""
        if other.slot >= 0:  # two that write one output would race
            return multiple()
        copies = [Asked(other.name, other.x, other.message, False, -1) for _ in range(times)]
        for copy in copies:
            self.run(self._submit(copy, -1))
        self.requests += copies
        return multiple(*copies)

    @rule(asked=consumes(asked))
    def leave(self, asked):
        if asked.left or asked.answers:
            return
        asked.left = True
        if asked.pending is not None:
            asked.pending.ticket.cancel()
        else:
            asked.peer.h2.reset_stream(asked.stream)
            asked.peer.pump()

    # -- models --

    @rule(name=st.sampled_from(sorted(MODELS)), times=st.integers(1, 3))
    def let(self, name, times):
        """Let some executions of a model through, and look after answers once."""
        self.valves[name].let(times)
        self.run(self._turn())

    @rule()
    def wait(self):
        """Look after answers, and after deadlines that are over."""
        self.run(self._turn(0.002))

    @rule()
    def settle(self):
        """All models run until everything is answered."""
        for valve in self.valves.values():
            valve.set(True)
        self.run(self._settled())
        for valve in self.valves.values():
            valve.set(False)

    async def _turn(self, seconds: float = 0) -> None:
        await asyncio.sleep(seconds)
        self._flush()

    async def _settled(self) -> None:
        while not all(asked.left or asked.answers for asked in self.requests) or self._in_flight():
            await asyncio.sleep(0.0005)
            self._flush()

    def _in_flight(self) -> int:
        return sum(loaded.lane.in_flight for loaded in self.engine.loaded())

    def _flush(self) -> None:
        self.endpoint.flush_dirty()
        for peer in self.peers:
            peer.pump()

    # -- what holds --

    @invariant()
    def every_answer_is_its_own(self):
        for number, asked in enumerate(self.requests):
            answers = asked.answers if not asked.left else []
            assert len(answers) <= 1, "a request has one outcome"
            for answer in answers:
                self._check(number, asked, answer)

    def _check(self, number: int, asked: Asked, answer: Answer) -> None:
        assert answer.status in asked.expected, (asked.name, answer.status, answer.text)
        if answer.status != Status.OK:
            return
        wanted = OUTPUTS[asked.name]
        if asked.slot >= 0:
            first, factor = next(iter(wanted.items()))
            got = self.outputs[asked.slot, : asked.x.size].reshape(asked.x.shape)
            np.testing.assert_array_equal(got, asked.x * factor)
            assert [output.name for output in answer.response.outputs] == [first]
            return
        assert {output.name for output in answer.response.outputs} == set(wanted)
        for name, factor in wanted.items():
            np.testing.assert_array_equal(answer.array(name), asked.x * factor)

    @invariant()
    def what_clients_hold_has_not_changed(self):
        assert all(message == copy for message, copy in self.kept)
        np.testing.assert_array_equal(self.inputs, self.before)

    @invariant()
    def the_sums_agree(self):
        assert self.endpoint.ledger_agrees()

    def teardown(self):
        try:
            self.settle()
            self.every_answer_is_its_own()
            assert self.endpoint.held == 0, "nothing is charged when everything is answered"
        finally:
            for valve in self.valves.values():
                valve.set(True)
            for peer in self.peers:
                peer.close()
            self.run(self.engine.close())
            self.loop.close()
            self.requests.clear()
            del self.engine, self.peers, self.endpoint, self.region, self.inputs, self.outputs
            self.files.close()
        assert settled_counters() == self.counters


def refer(tensor, slot: int, numbers: int) -> None:
    """Let the tensor lie at the beginning of this slot of the region."""
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_offset"].int64_param = 8 * slot * SLOT
    tensor.parameters["shared_memory_byte_size"].int64_param = 8 * numbers


Requests.TestCase.settings = settings(
    max_examples=int(os.environ.get("INFERD_STATEFUL_EXAMPLES", "6")),
    stateful_step_count=40,
    deadline=None,
    derandomize="INFERD_STATEFUL_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TestRequests = Requests.TestCase
